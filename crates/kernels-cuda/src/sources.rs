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
    variants: Variants,
    /// Whether it uses instructions that only Hopper has (`sm_90a`).
    pub hopper: bool,
}

/// What a file is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Variants {
    One,
    HeadSizes,
    /// [`weight_defines`].
    WeightFormats,
    /// [`expert_defines`].
    Experts,
    /// [`prefill_defines`].
    Prefill,
    /// [`simple_attention_defines`].
    SimpleAttention,
    /// [`Variant`].
    Decode,
}

macro_rules! sources {
    ($($name:ident = $file:literal, $variants:ident $(, hopper: $hopper:literal)?;)*) => {
        $(pub static $name: Source = Source {
            file: $file,
            text: include_str!(concat!("../kernels/", $file)),
            variants: Variants::$variants,
            hopper: false $(|| $hopper)?,
        };)*
        static ALL: &[&Source] = &[$(&$name),*];
    };
}

sources! {
    ROWS = "rows.cu", One;
    SKINNY_GEMM = "skinny_gemm.cu", WeightFormats;
    EXPERTS = "experts.cu", Experts;
    EXPERTS_GROUPED = "experts_grouped.cu", Experts;
    EXPERTS_SINGLE = "experts_single.cu", Experts;
    PREPARE_HEADS = "prepare_heads.cu", One;
    EXPAND = "expand.cu", One;
    FP8_PRODUCTS = "fp8_products.cu", One, hopper: true;
    BANDWIDTH = "bandwidth.cu", One;
    GRAM = "gram.cu", One;
    RANDOM = "random.cu", One;
    RANKS = "ranks.cu", One;
    COPY_BLOCKS = "copy_blocks.cu", One;
    PICK = "pick.cu", One;
    DIVERGENCE = "divergence.cu", One;
    VIEWS = "views.cu", One;
    SINKS = "sinks.cu", One;
    SCORES = "scores.cu", HeadSizes;
    APPEND = "append.cu", HeadSizes;
    ATTENTION_SIMPLE = "attention_simple.cu", SimpleAttention;
    ATTENTION_SLIDING = "attention_sliding.cu", HeadSizes;
    ATTENTION_PREFILL = "attention_prefill.cu", Prefill;
    ATTENTION_PREFILL_HOPPER = "attention_prefill_hopper.cu", Prefill, hopper: true;
    DEQUANTIZE = "dequantize.cu", HeadSizes, hopper: true;
    DEMOTE = "demote.cu", HeadSizes;
    ATTENTION_PLAN = "attention_plan.cu", One;
    ATTENTION_DECODE = "attention_decode.cu", Decode;
}

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
    ("flash.cuh", include_str!("../kernels/flash.cuh")),
    ("fp8.cuh", include_str!("../kernels/fp8.cuh")),
    ("fragments.cuh", include_str!("../kernels/fragments.cuh")),
    ("gate.cuh", include_str!("../kernels/gate.cuh")),
    ("heads.cuh", include_str!("../kernels/heads.cuh")),
    ("pipeline.cuh", include_str!("../kernels/pipeline.cuh")),
    ("page.cuh", include_str!("../kernels/page.cuh")),
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("weights.cuh", include_str!("../kernels/weights.cuh")),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
];

/// Head sizes the kernels are compiled for.
pub const HEAD_DIMS: [usize; 3] = [64, 128, 256];

const FORMATS: [WeightFormat; 2] = [WeightFormat::Bf16, WeightFormat::Fp8];

/// Definitions of a variant, in a fixed order.
pub type Defines = Vec<(&'static str, usize)>;

/// Definitions of kernels that read weights in this format.
pub fn weight_defines(format: WeightFormat) -> Defines {
    match format {
        WeightFormat::Bf16 => Vec::new(),
        WeightFormat::Fp8 => vec![("FP8", 1)],
    }
}

/// Definitions of the kernels of experts. The general form takes biases and every gate.
pub fn expert_defines(format: WeightFormat, general: bool) -> Defines {
    let mut defines = weight_defines(format);
    defines.extend(general.then_some(("GENERAL", 1)));
    defines
}

/// Definitions of prefill attention, with attention sinks or without.
pub fn prefill_defines(head_dim: usize, sinks: bool) -> Defines {
    let mut defines = vec![("HEAD_DIM", head_dim)];
    defines.extend(sinks.then_some(("SINKS", 1)));
    defines
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
    let simple = |d| [false, true].map(|dequantized| simple_attention_defines(d, dequantized));
    let mut all: Vec<(&'static Source, Defines)> = Vec::new();
    for source in ALL.iter().filter(|source| !source.hopper || capability == HOPPER) {
        let defines: Vec<Defines> = match source.variants {
            Variants::One => vec![Vec::new()],
            Variants::HeadSizes => HEAD_DIMS.map(|d| vec![("HEAD_DIM", d)]).into(),
            Variants::WeightFormats => FORMATS.map(weight_defines).into(),
            Variants::Experts => {
                let forms = |format| [false, true].map(|general| expert_defines(format, general));
                FORMATS.into_iter().flat_map(forms).collect()
            }
            Variants::Prefill => {
                let forms = |d| [false, true].map(|sinks| prefill_defines(d, sinks));
                HEAD_DIMS.into_iter().flat_map(forms).collect()
            }
            Variants::SimpleAttention => HEAD_DIMS.into_iter().flat_map(simple).collect(),
            Variants::Decode => Variant::all(shared_memory).map(|variant| variant.defines()).collect(),
        };
        for defines in defines {
            // Several group sizes may have the same variant of decode attention.
            if !all.contains(&(*source, defines.clone())) {
                all.push((source, defines));
            }
        }
    }
    all
}
