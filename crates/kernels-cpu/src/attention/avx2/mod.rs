//! Pages on AVX2: `codes` reads coded and BF16 pages, `int8` codes of one and two bits, `softmax`
//! serves both.

pub(super) mod codes;
mod int8;
mod softmax;
