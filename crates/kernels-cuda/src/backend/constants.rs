//! What a model keeps on the device beside its matrices.

use crate::memory::Buffer;

/// Vectors (norm weights) as f32.
pub struct CudaVector {
    pub(super) values: Buffer,
    pub(super) len: usize,
}

/// Cosines and sines, `[position][head_dim / 2]`.
pub struct CudaRope {
    pub(super) cosines: Buffer,
    pub(super) sines: Buffer,
    pub(super) positions: usize,
}

/// Key rotations of a layer's heads, `[kv_head][d][d]`, and their means.
pub struct CudaRotation {
    pub(super) matrices: Buffer,
    pub(super) means: Option<Buffer>,
}
