//! `attention_sliding.cu`: attention of layers with a sliding window, for all rows of a step.

use super::{LayerCall, Sinks};
use crate::device::{Device, Function, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::DevicePtr;
use crate::pages::HeadPages;
use crate::sources::ATTENTION_SLIDING;
use crate::step::{StepTables, window};
use half::bf16;

shared_struct! {
    pub(super) struct SlidingParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        sinks: Sinks,
        queries: DevicePtr<f32>,
        out: Option<DevicePtr<f32>>,
        rounded: Option<DevicePtr<bf16>>,
        query_heads: u32,
        kv_heads: u32,
        window: u32,
        scale: f32,
    }
}

/// Rows times query heads of a KV head up to which a sequence belongs to the kernel for few.
const FEW_ROWS: usize = 16;

/// Sizes of the kernels for a head size, as in `attention_sliding.cu`.
#[derive(Clone, Copy)]
struct Sizes {
    head_dim: usize,
    /// Tokens of a stage.
    tokens: usize,
    /// Warps of a block for many rows, each with 16 of them.
    row_warps: usize,
}

impl Sizes {
    fn new(head_dim: usize) -> Self {
        let (tokens, row_warps) = if head_dim == 256 { (32, 4) } else { (64, 8) };
        Self { head_dim, tokens, row_warps }
    }

    /// Two stages of keys and values.
    fn stages(self) -> usize {
        2 * 4 * self.tokens * self.head_dim
    }

    /// Dynamic shared memory of a block for many rows, and for few: queries and stages.
    fn shared(self) -> (usize, usize) {
        let tile = 2 * FEW_ROWS * self.head_dim;
        (self.row_warps * tile + self.stages(), 2 * tile + self.stages())
    }
}

/// The kernels for one head size.
pub struct SlidingKernels {
    many: Function,
    few: Function,
    sizes: Sizes,
}

impl SlidingKernels {
    pub fn new(kernels: &Kernels, head_dim: usize) -> Result<Self> {
        let (defines, sizes) = (vec![("HEAD_DIM", head_dim)], Sizes::new(head_dim));
        let (many, few) = sizes.shared();
        Ok(Self {
            many: kernels.function(&ATTENTION_SLIDING, &defines, c"attention_sliding", many)?,
            few: kernels.function(&ATTENTION_SLIDING, &defines, c"attention_sliding_few", few)?,
            sizes,
        })
    }

    /// Attention of all rows of a layer.
    ///
    /// # Safety
    /// As for [`LayerCall::slide`].
    pub unsafe fn launch(&self, device: &Device, call: &LayerCall<'_>, tokens: usize) -> Result<()> {
        let shape = call.pages.shape();
        let params = SlidingParams {
            step: call.step(),
            pages: call.pages.layer(call.layer),
            sinks: call.sinks,
            queries: call.ready_queries()?,
            out: call.out,
            rounded: call.rounded,
            query_heads: shape.query_heads as u32,
            kv_heads: shape.kv_heads as u32,
            window: window(tokens),
            scale: shape.scale,
        };
        let rows = || call.summary.sequences.iter().map(|s| s.rows as usize * shape.group());
        let grid = |x: usize| (x as u32, shape.kv_heads as u32, call.summary.sequences.len() as u32);
        let (shared_of_many, shared_of_few) = self.sizes.shared();
        if let Some(most) = rows().filter(|&rows| rows > FEW_ROWS).max() {
            let launch = LaunchShape {
                grid: grid(most.div_ceil(16 * self.sizes.row_warps)),
                block: 32 * self.sizes.row_warps as u32,
                shared: shared_of_many as u32,
                overlap: true,
            };
            // SAFETY: the caller's promise.
            unsafe { device.launch(self.many, launch, params) }?;
        }
        if rows().any(|rows| rows <= FEW_ROWS) {
            let launch = LaunchShape {
                grid: grid(1),
                block: 2 * self.sizes.tokens as u32,
                shared: shared_of_few as u32,
                overlap: true,
            };
            // SAFETY: the caller's promise.
            unsafe { device.launch(self.few, launch, params) }?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::HEAD_DIMS;

    #[test]
    fn blocks_fit_the_shared_memory_of_every_gpu() {
        for head_dim in HEAD_DIMS {
            let (many, few) = Sizes::new(head_dim).shared();
            assert!(many <= 99 << 10 && few <= many, "{head_dim}: {many} and {few}");
        }
    }
}
