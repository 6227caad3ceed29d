//! What a launch consists of: a kernel, its grid, its parameters.

use cudarc::driver::sys;
use std::ffi::CStr;

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    pub grid: (u32, u32, u32),
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// May begin while the kernel before it ends: the kernel must then wait by `griddepcontrol.wait` before it touches
    /// anything that an earlier kernel writes.
    pub overlap: bool,
}

impl LaunchShape {
    pub fn new(grid: usize, block: u32) -> Self {
        Self { grid: (grid as u32, 1, 1), block, shared: 0, overlap: false }
    }

    pub fn grid2(x: usize, y: usize, block: u32) -> Self {
        Self { grid: (x as u32, y as u32, 1), block, shared: 0, overlap: false }
    }

    pub fn shared(self, bytes: usize) -> Self {
        Self { shared: bytes as u32, ..self }
    }

    pub fn overlapping(self) -> Self {
        Self { overlap: true, ..self }
    }
}

/// The parameters of a kernel: one C struct, passed by value as the kernel's only parameter.
///
/// # Safety
/// The type must be `repr(C)` with the fields of the kernel's parameter struct, and the addresses in it must stay valid
/// until the stream has run the kernel.
pub unsafe trait KernelParams: bytemuck::NoUninit {}

/// A kernel in a loaded module.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Function {
    pub(crate) handle: sys::CUfunction,
    pub(crate) name: &'static CStr,
}

// SAFETY: a function handle is an address in the driver's tables, valid as long as its module, which is never unloaded.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
