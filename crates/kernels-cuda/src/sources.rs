//! The kernels as text: every `.cu` file, the headers they share, and the variants of each.
//!
//! The files include no toolkit headers, so that NVRTC alone compiles them. A *variant* is a file
//! with its definitions, such as `HEAD_DIM=128`.

use crate::attention::Variant;
use oscar_backend::WeightFormat;

/// One `.cu` file.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Source {
    pub file: &'static str,
    pub text: &'static str,
    /// Whether it is compiled once for each head size.
    pub by_head_dim: bool,
    /// Whether it uses instructions that only Hopper has (`sm_90a`).
    pub hopper: bool,
}

macro_rules! source {
    ($name:ident, $file:literal, by_head_dim: $by:literal) => {
        source!($name, $file, by_head_dim: $by, hopper: false);
    };
    ($name:ident, $file:literal, by_head_dim: $by:literal, hopper: $hopper:literal) => {
        pub static $name: Source = Source {
            file: $file,
            text: include_str!(concat!("../kernels/", $file)),
            by_head_dim: $by,
            hopper: $hopper,
        };
    };
}

source!(ROWS, "rows.cu", by_head_dim: false);
// Has a variant for each format of weights: `weight_defines`.
source!(SKINNY_GEMM, "skinny_gemm.cu", by_head_dim: false);
// Has a variant for each format of weights: `weight_defines`.
source!(EXPERTS, "experts.cu", by_head_dim: false);
// Has a variant for each format of weights: `weight_defines`.
source!(EXPERTS_GROUPED, "experts_grouped.cu", by_head_dim: false);
// Has a variant for each format of weights: `weight_defines`.
source!(EXPERTS_SINGLE, "experts_single.cu", by_head_dim: false);
source!(PREPARE_HEADS, "prepare_heads.cu", by_head_dim: false);
source!(EXPAND, "expand.cu", by_head_dim: false);
source!(FP8_PRODUCTS, "fp8_products.cu", by_head_dim: false, hopper: true);
source!(BANDWIDTH, "bandwidth.cu", by_head_dim: false);
source!(GRAM, "gram.cu", by_head_dim: false);
source!(RANDOM, "random.cu", by_head_dim: false);
source!(RANKS, "ranks.cu", by_head_dim: false);
source!(COPY_BLOCKS, "copy_blocks.cu", by_head_dim: false);
source!(PICK, "pick.cu", by_head_dim: false);
source!(DIVERGENCE, "divergence.cu", by_head_dim: false);
source!(VIEWS, "views.cu", by_head_dim: false);
source!(APPEND, "append.cu", by_head_dim: true);
// Has two variants for each head size: `simple_attention_defines`.
source!(ATTENTION_SIMPLE, "attention_simple.cu", by_head_dim: false);
source!(ATTENTION_PREFILL, "attention_prefill.cu", by_head_dim: true);
source!(ATTENTION_PREFILL_HOPPER, "attention_prefill_hopper.cu", by_head_dim: true, hopper: true);
source!(DEQUANTIZE, "dequantize.cu", by_head_dim: true, hopper: true);
source!(DEMOTE, "demote.cu", by_head_dim: true);
source!(ATTENTION_PLAN, "attention_plan.cu", by_head_dim: false);
// Has variants of its own: `attention::Variant`.
source!(ATTENTION_DECODE, "attention_decode.cu", by_head_dim: false);

/// Headers that kernels include by name; `layout.cuh` is generated ([`crate::layout`]).
pub static HEADERS: &[(&str, &str)] = &[
    ("decode_block.cuh", include_str!("../kernels/decode_block.cuh")),
    ("decode_filler.cuh", include_str!("../kernels/decode_filler.cuh")),
    ("decode_heads.cuh", include_str!("../kernels/decode_heads.cuh")),
    ("decode_merge.cuh", include_str!("../kernels/decode_merge.cuh")),
    ("decode_plan.cuh", include_str!("../kernels/decode_plan.cuh")),
    ("decode_query.cuh", include_str!("../kernels/decode_query.cuh")),
    ("decode_readers.cuh", include_str!("../kernels/decode_readers.cuh")),
    ("decode_state.cuh", include_str!("../kernels/decode_state.cuh")),
    ("experts.cuh", include_str!("../kernels/experts.cuh")),
    ("experts_choice.cuh", include_str!("../kernels/experts_choice.cuh")),
    ("experts_route.cuh", include_str!("../kernels/experts_route.cuh")),
    ("fp8.cuh", include_str!("../kernels/fp8.cuh")),
    ("fragments.cuh", include_str!("../kernels/fragments.cuh")),
    ("heads.cuh", include_str!("../kernels/heads.cuh")),
    ("pipeline.cuh", include_str!("../kernels/pipeline.cuh")),
    ("page.cuh", include_str!("../kernels/page.cuh")),
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
];

/// Every source that has no variants, or only one for each head size.
static PLAIN: &[&Source] = &[
    &ROWS,
    &SKINNY_GEMM,
    &EXPERTS,
    &EXPERTS_GROUPED,
    &EXPERTS_SINGLE,
    &PREPARE_HEADS,
    &EXPAND,
    &FP8_PRODUCTS,
    &BANDWIDTH,
    &GRAM,
    &RANDOM,
    &RANKS,
    &COPY_BLOCKS,
    &PICK,
    &DIVERGENCE,
    &VIEWS,
    &APPEND,
    &ATTENTION_PREFILL,
    &ATTENTION_PREFILL_HOPPER,
    &DEQUANTIZE,
    &ATTENTION_PLAN,
    &DEMOTE,
];

/// Head sizes the kernels are compiled for.
pub const HEAD_DIMS: [usize; 3] = [64, 128, 256];

/// Definitions of a variant, in a fixed order.
pub type Defines = Vec<(&'static str, usize)>;

/// Definitions of kernels that read weights in this format.
pub fn weight_defines(format: WeightFormat) -> Defines {
    match format {
        WeightFormat::Bf16 => Vec::new(),
        WeightFormat::Fp8 => vec![("FP8", 1)],
    }
}

/// Definitions of simple attention: `dequantized` history consists of BF16 rows instead of codes.
pub fn simple_attention_defines(head_dim: usize, dequantized: bool) -> Defines {
    vec![("HEAD_DIM", head_dim), ("DEQUANTIZED", usize::from(dequantized))]
}

/// Compute capability of GPUs that run sources marked `hopper`.
pub const HOPPER: i32 = 90;

/// Every variant that a model may need on a GPU of this compute capability (e.g. 90) with this much
/// shared memory per block.
pub fn variants(capability: i32, shared_memory: usize) -> Vec<(&'static Source, Defines)> {
    let decode = Variant::all(shared_memory).map(|v| (&ATTENTION_DECODE, v.defines()));
    let mut all: Vec<(&'static Source, Defines)> = Vec::new();
    // Several group sizes may have the same variant.
    for variant in decode {
        if !all.contains(&variant) {
            all.push(variant);
        }
    }
    all.push((&SKINNY_GEMM, weight_defines(WeightFormat::Fp8)));
    for source in [&EXPERTS, &EXPERTS_GROUPED, &EXPERTS_SINGLE] {
        all.push((source, weight_defines(WeightFormat::Fp8)));
    }
    for d in HEAD_DIMS {
        all.extend(
            [false, true].map(|dequantized| (&ATTENTION_SIMPLE, simple_attention_defines(d, dequantized))),
        );
    }
    for source in PLAIN.iter().filter(|source| !source.hopper || capability == HOPPER) {
        if source.by_head_dim {
            all.extend(HEAD_DIMS.map(|d| (*source, vec![("HEAD_DIM", d)])));
        } else {
            all.push((*source, Vec::new()));
        }
    }
    all
}
