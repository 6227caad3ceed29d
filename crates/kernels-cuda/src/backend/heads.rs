//! Heads of a step: queries, keys and values on their way to the cache, and attention over it.

use super::launches::{Append, append_rows_per_block};
use super::{CudaBackend, CudaRope, CudaRows, State};
use crate::attention_paths::AttentionCall;
use crate::error::{CudaError, Result};
use crate::heads::{HeadConstants, Projections};
use crate::memory::Buffer;
use crate::pages::CudaPages;
use oscar_backend::{HeadPreparation, HeadShape};

/// Heads that `append` was asked for and attention will make.
pub(super) struct PendingAppend {
    layer: usize,
    head_dim: usize,
    params: Append,
}

impl CudaBackend {
    /// Appends, or leaves it to the attention that follows: whatever else comes first has it done ([`CudaBackend::append_now`]).
    pub(super) fn append_heads(
        &self,
        state: &mut State,
        layer: usize,
        shape: &HeadShape,
        heads: HeadPreparation<'_, Self>,
        rope: &CudaRope,
        qkv: &mut CudaRows,
        queries: &mut CudaRows,
        pool: &CudaPages,
    ) -> Result<()> {
        let summary = state.planner.summary();
        if summary.rows != qkv.count() || summary.longest > rope.positions {
            let detail = format!(
                "{} rows of a step of {}, position {} of {}",
                qkv.count(),
                summary.rows,
                summary.longest,
                rope.positions
            );
            return Err(CudaError::Shape { what: "heads to append", detail });
        }
        queries.resize(&self.device, qkv.count(), true, false)?;
        qkv.written();
        let constants = HeadConstants {
            query_norm: heads.qk_norm.map_or(0, |(q, _)| q.values.address()),
            key_norm: heads.qk_norm.map_or(0, |(_, k)| k.values.address()),
            cosines: rope.cosines.address(),
            sines: rope.sines.address(),
            rotation: heads.rotation.map_or(0, |r| r.matrices.address()),
            mean: heads.rotation.and_then(|r| r.means.as_ref()).map_or(0, Buffer::address),
            eps: shape.rms_norm_eps,
            unused: 0,
        };
        let p = Append {
            step: state.tables,
            pages: pool.layer(layer),
            qkv: qkv.values(),
            queries: queries.values(),
            heads: constants,
            query_heads: shape.query_heads as u32,
            kv_heads: shape.kv_heads as u32,
            rows_per_block: append_rows_per_block(qkv.count()) as u32,
            unused: 0,
        };
        state.pending = Some(PendingAppend { layer, head_dim: shape.head_dim, params: p });
        if state.attention.makes_heads(&self.device, shape) { Ok(()) } else { self.append_now(state) }
    }

    /// Appends what was left to attention.
    pub(super) fn append_now(&self, state: &mut State) -> Result<()> {
        match state.pending.take() {
            Some(PendingAppend { head_dim, params, .. }) => {
                self.launches.append(&self.kernels, head_dim, &params)
            }
            None => Ok(()),
        }
    }

    pub(super) fn attend(
        &self,
        state: &mut State,
        layer: usize,
        shape: &HeadShape,
        queries: &CudaRows,
        pool: &CudaPages,
        out: &mut CudaRows,
    ) -> Result<()> {
        if state.pending.as_ref().is_some_and(|p| p.layer != layer || p.params.queries != queries.values()) {
            self.append_now(state)?;
        }
        let State { attention, tables, planner, pending, .. } = state;
        let projections =
            pending.take().map(|p| Projections { rows: p.params.qkv, constants: p.params.heads });
        out.resize(&self.device, queries.count(), true, Self::rounds(queries.count()))?;
        let call = AttentionCall {
            layer,
            shape,
            tables,
            summary: planner.summary(),
            pool,
            queries: queries.values(),
            projections,
            out: out.values(),
            rounded: out.rounded(),
        };
        if !attention.attend(&self.device, &self.kernels, &call)? {
            out.written();
        }
        Ok(())
    }
}
