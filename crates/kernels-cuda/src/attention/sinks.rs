//! Attention sinks: scores of query heads without a value, and `sinks.cu`, which moves them with centred
//! keys.

use crate::device::{Device, Function, LaunchShape};
use crate::error::{CudaError, Result};
use crate::layout::shared_struct;
use crate::memory::DevicePtr;
use std::sync::OnceLock;

shared_struct! {
    /// The sinks of a layer, `[query head]`, or `[row][query head]` with a stride.
    #[derive(Default)]
    pub struct Sinks {
        pub scores: Option<DevicePtr<f32>>,
        pub stride: u32,
    }
}

shared_struct! {
    pub struct ShiftSinksParams {
        pub sinks: DevicePtr<f32>,
        pub queries: DevicePtr<f32>,
        pub means: DevicePtr<f32>,
        pub out: DevicePtr<f32>,
        pub rows: u32,
        pub query_heads: u32,
        pub group: u32,
        pub head_dim: u32,
        pub scale: f32,
    }
}

/// Threads of a block of `shift_sinks`.
const THREADS: u32 = 256;
const MOST_BLOCKS: usize = 1 << 16;

impl Sinks {
    pub fn is_empty(&self) -> bool {
        self.scores.is_none()
    }

    /// The form of a kernel for a layer with these sinks.
    pub(super) fn form(&self, plain: Function, with_sinks: &OnceLock<Function>) -> Result<Function> {
        let absent = || CudaError::Shape { what: "attention", detail: "no kernel with sinks".into() };
        if self.is_empty() { Ok(plain) } else { with_sinks.get().copied().ok_or_else(absent) }
    }
}

/// Takes `scale · q · mean` off the sinks of every row.
///
/// # Safety
/// The pointers must hold as many numbers as the sizes say.
pub unsafe fn shift(device: &Device, function: Function, p: ShiftSinksParams) -> Result<()> {
    let blocks = (p.rows as usize * p.query_heads as usize).div_ceil(THREADS as usize / 32);
    if blocks == 0 {
        return Ok(());
    }
    let shape = LaunchShape::new(blocks.min(MOST_BLOCKS), THREADS).overlapping();
    // SAFETY: the caller's promise.
    unsafe { device.launch(function, shape, p) }
}
