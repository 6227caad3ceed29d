//! Memory of steps, counted as the operations allocate it.

use super::CudaBackend;
use super::rows::grown;
use crate::attention::AttentionMode;
use crate::device::Properties;
use crate::gemm::{PANEL_BYTES, WORKSPACE};
use oscar_backend::{StepMemory, StepSize};

impl Properties {
    /// The GPU that our published numbers are from, for plans on machines without one.
    pub fn h200() -> Self {
        Self {
            name: "NVIDIA H200".into(),
            major: 9,
            minor: 0,
            multiprocessors: 132,
            shared_memory: 227 << 10,
            memory: 141 << 30,
            driver: (12, 8),
        }
    }
}

/// Bytes that steps up to this size take on a GPU.
pub fn step_memory(gpu: &Properties, mode: AttentionMode, size: &StepSize) -> StepMemory {
    let StepSize { rows, logits, context, hidden, intermediate, vocab, .. } = *size;
    let (query, qkv) = (size.query_width(), size.qkv_width());
    let rounds = CudaBackend::rounds(rows);
    let f32s = |rows: usize, width: usize| grown(4 * rows * width);
    // Rows between two operations. Where there are many rows, the second operation reads BF16.
    let between = |width: usize| grown(if rounds { 2 } else { 4 } * rows * width);
    // Hidden rows, projections and rotated queries; outputs of attention, which decoding rows of the
    // same step need in f32 as well; normed rows; gate and up, then their product.
    let layer = f32s(rows, hidden)
        + f32s(rows, qkv)
        + 2 * f32s(rows, query)
        + between(query)
        + between(hidden)
        + between(2 * intermediate)
        + between(intermediate);
    let result = if size.result_norms { f32s(rows, hidden) } else { 0 };
    let head = f32s(logits, hidden) + f32s(logits, vocab) + 2 * grown(2 * logits * hidden);
    let parts = if rows > 1 { grown(mode.partial_bytes(gpu, &size.heads)) } else { 0 };
    let expands = size.quantized && rows > 1;
    StepMemory {
        activations: layer + result + head + parts,
        expanded_pages: match expands {
            true => grown(mode.expanded_bytes(gpu, &size.heads, context)),
            false => 0,
        },
        products: WORKSPACE + if size.fp8 { grown(PANEL_BYTES) } else { 0 },
        rope: 4 * size.rope_tables * context * size.rotary,
    }
}
