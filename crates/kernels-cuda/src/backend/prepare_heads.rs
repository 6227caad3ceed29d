//! QK-norm and RoPE in a launch of their own: `prepare_heads.cu`.

use super::step::Planned;
use super::{CudaBackend, CudaRows, CudaStep, CudaVector};
use crate::device::LaunchShape;
use crate::error::Result;
use crate::layout::shared_struct;
use crate::memory::DevicePtr;
use crate::sources::PREPARE_HEADS;
use oscar_backend::LayerHeads;

shared_struct! {
    pub(super) struct PrepareHeadsParams {
        pub qkv: DevicePtr<f32>,
        pub positions: DevicePtr<u32>,
        pub query_norm: Option<DevicePtr<f32>>,
        pub key_norm: Option<DevicePtr<f32>>,
        pub cosines: DevicePtr<f32>,
        pub sines: DevicePtr<f32>,
        pub query_heads: u32,
        pub kv_heads: u32,
        pub head_dim: u32,
        pub half: u32,
        pub all_heads: u32,
        pub eps: f32,
    }
}

impl CudaStep<'_> {
    pub(super) fn norms_each_head(&self, (q, k): (&CudaVector, &CudaVector)) -> bool {
        let d = self.pool.shape().head_dim;
        q.len == d && k.len == d
    }

    pub(super) fn norms_all_heads(&self, (q, k): (&CudaVector, &CudaVector)) -> bool {
        let shape = self.pool.shape();
        (q.len, k.len) == (shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    }

    /// Whether QK-norm and RoPE have a launch of their own: the kernels of attention norm each head
    /// and turn whole heads.
    pub(super) fn needs_preparation(&self, heads: &LayerHeads<'_, CudaBackend>) -> bool {
        let partial = heads.rope.rotary_dim != self.pool.shape().head_dim;
        partial || heads.qk_norm.is_some_and(|norms| !self.norms_each_head(norms))
    }

    /// That launch. Called before `projections`, which then leaves both out.
    pub(super) fn prepare_heads(&self, heads: &LayerHeads<'_, CudaBackend>, qkv: &CudaRows) -> Result<()> {
        let Some(Planned { tables, .. }) = &self.planned else { return Ok(()) };
        if !self.needs_preparation(heads) || qkv.count() == 0 {
            return Ok(());
        }
        // Checks the sizes.
        self.projections(heads, qkv)?;
        let shape = self.pool.shape();
        let p = PrepareHeadsParams {
            qkv: qkv.held_values("the heads of a layer")?.ptr(),
            positions: tables.row_position,
            query_norm: heads.qk_norm.map(|(q, _)| q.values.ptr()),
            key_norm: heads.qk_norm.map(|(_, k)| k.values.ptr()),
            cosines: heads.rope.cosines.ptr(),
            sines: heads.rope.sines.ptr(),
            query_heads: shape.query_heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            half: heads.rope.rotary_dim as u32 / 2,
            all_heads: u32::from(heads.qk_norm.is_some_and(|norms| self.norms_all_heads(norms))),
            eps: shape.rms_norm_eps,
        };
        // SAFETY: `projections` compared rows, norms and the table with the step and the cache.
        unsafe { self.backend.launch_prepare_heads(qkv.count(), p) }
    }
}

impl CudaBackend {
    /// # Safety
    /// Rows, positions, norms and tables must have the sizes that the parameters say.
    pub(super) unsafe fn launch_prepare_heads(&self, rows: usize, p: PrepareHeadsParams) -> Result<()> {
        let function = self.kernels.function(&PREPARE_HEADS, &Vec::new(), c"prepare_heads", 0)?;
        let shape = LaunchShape::grid2(rows, 2, 256).overlapping();
        // SAFETY: the caller's promise.
        unsafe { self.device.launch(function, shape, p) }
    }
}
