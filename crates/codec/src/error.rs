//! One error type: each variant names the value that was wrong and what is allowed.

/// Errors of this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CodecError {
    #[error(
        "head size {0} is not supported: it must be a multiple of 16 between 32 and 256 (e.g. 64, 80, 96, 128, 256)"
    )]
    HeadDim(usize),
    #[error(
        "latent rows of {0} channels (kv_lora_rank and qk_rope_head_dim) are not supported: a row must be a multiple \
         of 16 between 32 and {MAX_LATENT_ROW}"
    )]
    LatentRow(usize),
    #[error(
        "--kv {0} is not offered for latent attention (MLA): how its rows bear quantization has not been measured; \
         use --kv bf16"
    )]
    LatentFormat(String),
    #[error("values can be the rows of keys only where keys are not quantized")]
    SharedRows,
    #[error(
        "group size {group} does not fit head size {head_dim}: use 32, 64, 128 or the head size, dividing it evenly"
    )]
    Group { group: usize, head_dim: usize },
    #[error(
        "groups of {tokens} tokens do not fit head size {head_dim}: they must be whole 16-token tiles that share the \
         parameters of the channels evenly"
    )]
    TokenGroup { tokens: usize, head_dim: usize },
    #[error(
        "groups of {0} tokens do not fit into one page: write them with quantize_group and read them with dequantize_token"
    )]
    GroupSpansPages(usize),
    #[error("{0} bits a code are not supported: use 1 to 5, or 8")]
    Bits(u32),
    #[error(
        "a head stores the history of both keys and values or of neither: give it 0 bits on both sides, or at least 1 on each"
    )]
    HalfAbsent,
    #[error(
        "'{found}' is not a possible mean of 1- to 4-bit codes: with scale and minimum it is between 1.25 and 4.25 bits"
    )]
    MeanBits { found: String },
    #[error("query-aware rounding needs a query second moment that is finite and not zero: calibrate again")]
    Metric,
    #[error("query-aware rounding works only with affine codes that have one scale for each row")]
    Rounding,
    #[error("clip ratio {0} is out of range: it is a quantile of |x|, between 0 (no clipping) and 1")]
    ClipRatio(f64),
    #[error("unknown KV format '{name}': known formats are {known}")]
    UnknownFormat { name: String, known: String },
    #[error("unknown rotation composition '{name}': known compositions are {known}")]
    UnknownComposition { name: String, known: String },
    #[error("{what} has {got} elements, expected {expected}")]
    Length { what: &'static str, got: usize, expected: usize },
    #[error("{tokens} tokens do not fit: a page holds {max}")]
    Tokens { tokens: usize, max: usize },
    #[error("tile {tile} does not exist: a page has {max} tiles")]
    Tile { tile: usize, max: usize },
    #[error("layout '{layout}' cannot hold {bits}-bit codes of head size {head_dim}: {why}")]
    Layout { layout: &'static str, bits: u32, head_dim: usize, why: &'static str },
    #[error("rotation of head size {0} contains a value that is not finite")]
    NotFinite(usize),
    #[error("{what} {index} does not exist: there are {count}")]
    Index { what: &'static str, index: usize, count: usize },
    #[error("windows: {0}")]
    Windows(String),
}

pub type Result<T> = std::result::Result<T, CodecError>;

/// Longest row of latent attention: 512 channels of the latent and 64 that RoPE turns.
pub const MAX_LATENT_ROW: usize = 576;

/// A row that keys and values share.
pub(crate) fn check_latent_row(row: usize) -> Result<()> {
    match (32..=MAX_LATENT_ROW).contains(&row) && row.is_multiple_of(16) {
        true => Ok(()),
        false => Err(CodecError::LatentRow(row)),
    }
}

/// The head sizes the formats are defined for.
pub fn check_head_dim(head_dim: usize) -> Result<()> {
    if (32..=256).contains(&head_dim) && head_dim.is_multiple_of(16) {
        Ok(())
    } else {
        Err(CodecError::HeadDim(head_dim))
    }
}

pub(crate) fn check_len(what: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected { Ok(()) } else { Err(CodecError::Length { what, got, expected }) }
}
