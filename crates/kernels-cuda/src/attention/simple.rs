//! `attention_simple.cu`: a kernel for any row, over codes or over dequantized history.

use super::{LayerCall, Sinks};
use crate::device::{Device, Function, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layout::shared_struct;
use crate::memory::DevicePtr;
use crate::pages::HeadPages;
use crate::sources::{ATTENTION_SIMPLE, simple_attention_defines};
use crate::step::{StepTables, window};
use crate::storage::Storage;
use oscar_codec::Side;

shared_struct! {
    pub(super) struct SimpleParams {
        step: StepTables,
        pages: DevicePtr<HeadPages>,
        queries: DevicePtr<f32>,
        out: DevicePtr<f32>,
        query_heads: u32,
        kv_heads: u32,
        scale: f32,
        key_recent: u32,
        key_unit: u32,
        value_recent: u32,
        value_unit: u32,
        sinks: Sinks,
    }
}

pub fn function(kernels: &Kernels, head_dim: usize, storage: Storage) -> Result<Function> {
    let defines = simple_attention_defines(head_dim, storage == Storage::Dequantized);
    kernels.function(&ATTENTION_SIMPLE, &defines, c"attention_simple", 0)
}

/// Attention of all rows of a layer.
///
/// # Safety
/// As for [`LayerCall::attend`].
pub unsafe fn launch(device: &Device, function: Function, call: &LayerCall<'_>) -> Result<()> {
    let (shape, windows) = (call.pages.shape(), call.pages.layout().windows());
    let (key, value) = (windows.tail(Side::Key), windows.tail(Side::Value));
    let params = SimpleParams {
        step: call.step(),
        pages: call.pages.layer(call.layer),
        queries: call.ready_queries()?,
        out: call.held_out()?,
        query_heads: shape.query_heads as u32,
        kv_heads: shape.kv_heads as u32,
        scale: shape.scale,
        key_recent: window(key.recent),
        key_unit: window(key.unit),
        value_recent: window(value.recent),
        value_unit: window(value.unit),
        sinks: call.sinks,
    };
    let grid = LaunchShape::grid2(call.summary.rows, shape.query_heads, 256).overlapping();
    // SAFETY: the caller's promise.
    unsafe { device.launch(function, grid, params) }
}
