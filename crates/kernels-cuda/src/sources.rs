//! The kernels, as text: every `.cu` file, the headers they share, and the variants each is compiled in.
//!
//! The files are free of toolkit headers, so that NVRTC alone compiles them. A *variant* is a file with its
//! definitions, such as `HEAD_DIM=128`.

/// One `.cu` file.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Source {
    pub file: &'static str,
    pub text: &'static str,
    /// Is it compiled once for each head size?
    pub by_head_dim: bool,
}

macro_rules! source {
    ($name:ident, $file:literal, by_head_dim: $by:literal) => {
        pub static $name: Source =
            Source { file: $file, text: include_str!(concat!("../kernels/", $file)), by_head_dim: $by };
    };
}

source!(ROWS, "rows.cu", by_head_dim: false);
source!(SKINNY_GEMM, "skinny_gemm.cu", by_head_dim: false);
source!(BANDWIDTH, "bandwidth.cu", by_head_dim: false);
source!(GRAM, "gram.cu", by_head_dim: false);
source!(RANDOM, "random.cu", by_head_dim: false);
source!(APPEND, "append.cu", by_head_dim: true);
source!(ATTENTION_GENERIC, "attention_generic.cu", by_head_dim: true);
source!(ATTENTION_PREFILL, "attention_prefill.cu", by_head_dim: true);

/// Headers that kernels include by name.
pub static HEADERS: &[(&str, &str)] = &[
    ("page.cuh", include_str!("../kernels/page.cuh")),
    ("common.cuh", include_str!("../kernels/common.cuh")),
];

/// Every source.
pub static ALL: &[&Source] =
    &[&ROWS, &SKINNY_GEMM, &BANDWIDTH, &GRAM, &RANDOM, &APPEND, &ATTENTION_GENERIC, &ATTENTION_PREFILL];

/// Head sizes the kernels are compiled for.
pub const HEAD_DIMS: [usize; 3] = [64, 128, 256];

/// Definitions of a variant, in a fixed order.
pub type Defines = Vec<(&'static str, usize)>;

/// Every variant that a model may ask for.
pub fn variants() -> Vec<(&'static Source, Defines)> {
    let mut all = Vec::new();
    for source in ALL {
        if source.by_head_dim {
            all.extend(HEAD_DIMS.map(|d| (*source, vec![("HEAD_DIM", d)])));
        } else {
            all.push((*source, Vec::new()));
        }
    }
    all
}
