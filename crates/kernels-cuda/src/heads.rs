//! What a new token's heads meet on their way into the cache: norms, RoPE, rotations. Two kernels go that way: `append.cu` for
//! any rows, and decode attention itself in most steps of a few single tokens.
//!
//! **Invariant:** the struct here has the layout of that in `kernels/heads.cuh`.

/// `HeadConstants` of the kernels: device addresses, 0 where there is nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::NoUninit)]
pub struct HeadConstants {
    pub query_norm: u64,
    pub key_norm: u64,
    pub cosines: u64,
    pub sines: u64,
    pub rotation: u64,
    pub mean: u64,
    pub eps: f32,
    pub unused: u32,
}

/// Rows of `[queries | keys | values]`, f32, that nothing was done to yet.
#[derive(Clone, Copy, Debug)]
pub struct Projections {
    /// Device address.
    pub rows: u64,
    pub constants: HeadConstants,
}
