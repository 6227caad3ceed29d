//! Experts of a single row: the kernels of `experts_single.cu`.

use super::expert_limits::Form;
use super::experts::ExpertsParams;
use crate::device::{Device, Function, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::sources::{EXPERTS_SINGLE, expert_defines};
use std::ffi::CStr;

// Sizes of `experts_single.cu`.
const LOGIT_WARPS: usize = 4;
const THREADS: u32 = 256;
const SLOTS: usize = 6 * 2 * 16 * THREADS as usize;
/// Static shared memory of a block and what the system takes.
const BESIDE: usize = 4 << 10;

/// The kernels for one format of weights.
#[derive(Clone, Copy)]
pub(super) struct SingleKernels {
    logits: Function,
    gate: Function,
    down: Function,
    shared_memory: usize,
    multiprocessors: usize,
}

impl SingleKernels {
    pub fn new(device: &Device, kernels: &Kernels, form: Form) -> Result<Self> {
        let (defines, p) = (expert_defines(form.weights, form.general), device.properties());
        // Static memory counts too.
        let shared_memory = p.shared_memory as usize - BESIDE;
        let function =
            |name: &'static CStr, shared| kernels.function(&EXPERTS_SINGLE, &defines, name, shared);
        Ok(Self {
            logits: function(c"experts_single_logits", 0)?,
            gate: function(c"experts_single_gate", shared_memory)?,
            down: function(c"experts_single_down", shared_memory)?,
            shared_memory,
            multiprocessors: p.multiprocessors as usize,
        })
    }

    /// Dynamic shared memory of a block that multiplies this many inputs.
    fn shared(inputs: usize) -> usize {
        SLOTS + 4 * inputs
    }

    /// Whether blocks have room for the inputs of both products.
    pub fn takes(&self, hidden: usize, width: usize, chosen: usize) -> bool {
        Self::shared(hidden.max(width * chosen)) <= self.shared_memory
    }

    /// # Safety
    /// The pointers of `p` must have room for one row, and `takes` must hold.
    pub unsafe fn launch(&self, device: &Device, p: ExpertsParams) -> Result<()> {
        let of = |inputs: usize| {
            let shared = Self::shared(inputs);
            let together = if 2 * (shared + BESIDE) <= self.shared_memory + BESIDE { 2 } else { 1 };
            LaunchShape::new(together * self.multiprocessors, THREADS).shared(shared).overlapping()
        };
        let logits = LaunchShape::new((p.experts as usize).div_ceil(LOGIT_WARPS), 32 * LOGIT_WARPS as u32);
        // SAFETY: the caller's promise, for all launches.
        unsafe {
            device.launch(self.logits, logits.overlapping(), p)?;
            device.launch(self.gate, of(p.hidden as usize), p)?;
            device.launch(self.down, of((p.width * p.per_row) as usize), p)
        }
    }
}
