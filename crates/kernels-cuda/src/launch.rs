//! A launch: a kernel and its grid.

use cudarc::driver::sys;
use std::ffi::CStr;

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchShape {
    pub grid: (u32, u32, u32),
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The kernel may start before the previous one has finished (programmatic dependent launch).
    /// It must then call `wait_for_previous_kernel` before it touches anything that an earlier
    /// kernel writes.
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

/// A kernel in a loaded module.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Function {
    pub handle: sys::CUfunction,
    pub name: &'static CStr,
}

// SAFETY: a function handle is an address in the driver's tables, valid as long as its module,
// which is never unloaded.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}
