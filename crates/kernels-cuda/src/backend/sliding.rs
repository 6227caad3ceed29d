//! The parts of `attend` that only some layers have: sliding windows and attention sinks.

use super::step::{Planned, check_output};
use super::{CudaBackend, CudaRows, CudaStep, grow};
use crate::attention::decode::Queries;
use crate::attention::sinks::{self, ShiftSinksParams};
use crate::attention::{LayerCall, Sinks};
use crate::error::{CudaError, Result};
use crate::sources::SINKS;
use oscar_backend::LayerHeads;

impl CudaStep<'_> {
    /// Whether the layer slides. Its window must be that of the cache's group.
    pub(super) fn check_windows(&self, heads: &LayerHeads<'_, CudaBackend>) -> Result<bool> {
        let layout = self.pool.layout();
        let exists = heads.layer < layout.layers();
        let group = layout.sliding().filter(|_| exists && layout.slides(heads.layer));
        let window = group.map(|group| group.window());
        if window != heads.window {
            let detail = format!(
                "layer {} has a window of {:?} tokens, its pages one of {window:?}",
                heads.layer, heads.window
            );
            return Err(CudaError::Shape { what: "a sliding window", detail });
        }
        Ok(window.is_some())
    }

    /// The sinks of a layer: its own, or, under centred keys, those of each row of `queries`, which are
    /// ready in layers with sinks.
    pub(super) fn sinks(&mut self, heads: &LayerHeads<'_, CudaBackend>, queries: &CudaRows) -> Result<Sinks> {
        let (Some(vector), Some(_)) = (heads.sinks, &self.planned) else { return Ok(Sinks::default()) };
        let Self { backend, state, pool, .. } = self;
        let shape = *pool.shape();
        if vector.len != shape.query_heads {
            let detail = format!("{} for {} query heads", vector.len, shape.query_heads);
            return Err(CudaError::Shape { what: "attention sinks", detail });
        }
        pool.kernels().prepare_sinks(&backend.kernels)?;
        let own = Sinks { scores: Some(vector.values.ptr()), stride: 0 };
        let Some(means) = heads.rotation.and_then(|rotation| rotation.rotated_means.as_ref()) else {
            return Ok(own);
        };
        let (rows, device) = (queries.count(), &backend.device);
        let bytes = 4 * rows * shape.query_heads;
        let shifted = grow(device, &mut state.sinks, bytes, "attention sinks of rows")?.0.ptr();
        let p = ShiftSinksParams {
            sinks: vector.values.ptr(),
            queries: queries.held_values("queries")?.ptr(),
            means: means.ptr(),
            out: shifted,
            rows: rows as u32,
            query_heads: shape.query_heads as u32,
            group: shape.group() as u32,
            head_dim: shape.head_dim as u32,
            scale: shape.scale,
        };
        let function = backend.kernels.function(&SINKS, &Vec::new(), c"shift_sinks", 0)?;
        // SAFETY: `queries` have `rows` rows of query heads, as `append` made them; there is a mean for
        // each KV head (`projections` compared the rotation with the cache); `shifted` has a number for
        // each row and query head.
        unsafe { sinks::shift(device, function, p) }?;
        Ok(Sinks { scores: Some(shifted), stride: shape.query_heads as u32 })
    }

    /// Attention of a sliding layer.
    pub(super) fn slide(
        &mut self,
        layer: usize,
        queries: Queries,
        rows: usize,
        sinks: Sinks,
        out: &mut CudaRows,
        tapped: bool,
    ) -> Result<()> {
        check_output(self.pool.shape(), out)?;
        // The product after it reads the rounded rows of a prompt.
        let rounds = CudaBackend::rounds(rows);
        out.resize(&self.backend.device, rows, tapped || !rounds, rounds)?;
        let window = self.pool.layout().sliding().map_or(0, |group| group.window());
        let Some(tables) = self.tables_of(layer)? else { return Ok(()) };
        let Some(Planned { summary, .. }) = &self.planned else { return Ok(()) };
        let (values, rounded) = (out.values().map(|out| out.ptr()), out.rounded_ptr());
        let call =
            LayerCall { layer, tables, summary, pages: self.pool, queries, out: values, rounded, sinks };
        // SAFETY: the tables are of this step, over these pages, which hold the group's page of every
        // position that the window requires (`check_sliding_pages`); `queries`, `out` and the sinks have
        // the step's rows (checked by our caller).
        unsafe { call.slide(&self.backend.device, window) }
    }
}
