//! Pages on AVX-512: `codes` and `int8` read quantized pages, `bf16` reads BF16 pages, `softmax`
//! serves both. `dequantize`, `rows` and `sketch` turn the pages of other codecs into BF16 tiles.
//! `demote` and `rounding` quantize.

pub(super) mod bf16;
pub(super) mod codes;
pub(super) mod demote;
pub(super) mod dequantize;
pub(super) mod int8;
mod rounding;
mod rows;
mod sketch;
pub(super) mod softmax;
mod softmax_int8;
