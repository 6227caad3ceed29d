//! Weights in FP8: E4M3 codes with one scale for every block of 128 × 128 or for every output, as
//! published checkpoints hold them.
//!
//! `weight = e4m3(code) · scale`, one f32 product. [`Fp8Blocks::expand_row`] is the specification:
//! a device may keep the codes and apply the scales to sums of products, or expand them once and
//! multiply what that gives.

use crate::{BackendError, HostMatrix, HostValues, Result};
use oscar_codec::fp8;
use std::sync::LazyLock;

/// Outputs and inputs of a block that shares a scale.
pub const FP8_BLOCK: usize = 128;

/// The value of every code.
static VALUES: LazyLock<[f32; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| fp8::dequantize(code as u8)));

/// The weights that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleGrid {
    /// Blocks of 128 × 128: scales `[⌈outputs / 128⌉][⌈inputs / 128⌉]`, row-major.
    Blocks,
    /// All weights of an output: one scale each.
    Channels,
}

impl ScaleGrid {
    /// Scales of a matrix, in rows and columns.
    pub const fn shape(self, outputs: usize, inputs: usize) -> [usize; 2] {
        match self {
            Self::Blocks => [outputs.div_ceil(FP8_BLOCK), inputs.div_ceil(FP8_BLOCK)],
            Self::Channels => [outputs, 1],
        }
    }
}

/// Codes `[outputs][inputs]`, row-major, and their scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Blocks<'a> {
    pub codes: &'a [u8],
    pub scales: &'a [f32],
    pub grid: ScaleGrid,
}

/// Blocks along a side of this many elements.
pub fn fp8_blocks(elements: usize) -> usize {
    elements.div_ceil(FP8_BLOCK)
}

impl Fp8Blocks<'_> {
    /// Refuses codes or scales that are not those of an `outputs × inputs` matrix.
    pub fn check(&self, outputs: usize, inputs: usize) -> Result<()> {
        let [rows, columns] = self.grid.shape(outputs, inputs);
        let scales = rows.checked_mul(columns);
        if outputs.checked_mul(inputs) == Some(self.codes.len()) && scales == Some(self.scales.len()) {
            return Ok(());
        }
        Err(BackendError::Shape {
            what: "an FP8 matrix".into(),
            detail: format!(
                "{} codes and {} scales for {outputs} × {inputs}",
                self.codes.len(),
                self.scales.len()
            ),
        })
    }

    /// The weights of one output, in f32.
    pub fn expand_row(&self, output: usize, row: &mut [f32]) {
        let inputs = row.len();
        let codes = &self.codes[output * inputs..][..inputs];
        let (scales, width) = match self.grid {
            ScaleGrid::Blocks => (&self.scales[output / FP8_BLOCK * fp8_blocks(inputs)..], FP8_BLOCK),
            ScaleGrid::Channels => (&self.scales[output..], inputs.max(1)),
        };
        let values = &*VALUES;
        let blocks = row.chunks_mut(width).zip(codes.chunks(width)).zip(scales);
        for ((weights, codes), scale) in blocks {
            for (weight, &code) in weights.iter_mut().zip(codes) {
                *weight = values[code as usize] * scale;
            }
        }
    }

    /// All weights, in f32.
    pub fn expand(&self, inputs: usize) -> Vec<f32> {
        let mut weights = vec![0.0; self.codes.len()];
        weights.chunks_exact_mut(inputs).enumerate().for_each(|(output, row)| self.expand_row(output, row));
        weights
    }
}

/// Whether devices with FP8 products multiply matrices of this shape in FP8. Others are expanded.
pub const fn fp8_multiplied(outputs: usize, inputs: usize) -> bool {
    inputs.is_multiple_of(64) && outputs.is_multiple_of(8)
}

/// An FP8 matrix of our own making.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8Matrix {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
}

impl Fp8Matrix {
    /// The nearest codes under scales that give the largest weight of each block the largest code.
    /// Takes all cores: models are quantized while someone waits for them.
    pub fn quantize(weights: &[f32], outputs: usize, inputs: usize) -> Self {
        assert_eq!(weights.len(), outputs * inputs, "weights of {outputs} × {inputs}");
        let (band, columns) = (FP8_BLOCK * inputs, fp8_blocks(inputs));
        let mut matrix =
            Self { codes: vec![0; weights.len()], scales: vec![0.0; fp8_blocks(outputs) * columns] };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let bands = fp8_blocks(outputs).div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let codes = matrix.codes.chunks_mut((bands * band).max(1));
            let scales = matrix.scales.chunks_mut((bands * columns).max(1));
            for ((weights, codes), scales) in weights.chunks((bands * band).max(1)).zip(codes).zip(scales) {
                scope.spawn(move || {
                    let bands =
                        weights.chunks(band).zip(codes.chunks_mut(band)).zip(scales.chunks_mut(columns));
                    bands
                        .for_each(|((weights, codes), scales)| quantize_band(weights, inputs, codes, scales));
                });
            }
        });
        matrix
    }

    pub fn blocks(&self) -> Fp8Blocks<'_> {
        Fp8Blocks { codes: &self.codes, scales: &self.scales, grid: ScaleGrid::Blocks }
    }

    /// As a backend takes it.
    pub fn host(&self, outputs: usize, inputs: usize) -> HostMatrix<'_> {
        HostMatrix { outputs, inputs, values: HostValues::Fp8(self.blocks()), bias: None }
    }
}

/// Up to 128 outputs: one row of blocks.
fn quantize_band(weights: &[f32], inputs: usize, codes: &mut [u8], scales: &mut [f32]) {
    for row in weights.chunks_exact(inputs) {
        for (block, scale) in row.chunks(FP8_BLOCK).zip(&mut *scales) {
            *scale = block.iter().fold(*scale, |largest, w| largest.max(w.abs()));
        }
    }
    // A block of zeros has any scale.
    scales.iter_mut().for_each(|s| *s = if *s > 0.0 { *s / fp8::MAX } else { 1.0 });
    for (row, codes) in weights.chunks_exact(inputs).zip(codes.chunks_exact_mut(inputs)) {
        for ((block, codes), scale) in row.chunks(FP8_BLOCK).zip(codes.chunks_mut(FP8_BLOCK)).zip(&*scales) {
            codes.iter_mut().zip(block).for_each(|(code, w)| *code = fp8::quantize(w / scale));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(outputs: usize, inputs: usize) -> Vec<f32> {
        // Blocks of very different size.
        let at = |i: usize| 10f32.powi((i / inputs / 128 + i % inputs / 128) as i32 - 2);
        (0..outputs * inputs).map(|i| (((i * 7919) % 1009) as f32 / 504.0 - 1.0) * at(i)).collect()
    }

    #[test]
    fn every_block_has_its_own_scale() {
        let (outputs, inputs) = (130, 300);
        let original = weights(outputs, inputs);
        let matrix = Fp8Matrix::quantize(&original, outputs, inputs);
        assert_eq!((matrix.scales.len(), matrix.blocks().check(outputs, inputs).is_ok()), (6, true));
        let expanded = matrix.blocks().expand(inputs);
        for (i, (found, wanted)) in expanded.iter().zip(&original).enumerate() {
            let scale = matrix.scales[i / inputs / 128 * 3 + i % inputs / 128];
            // Three bits behind the leading one, and subnormal codes of a 512th.
            assert!(
                (found - wanted).abs() <= wanted.abs() / 16.0 + scale / 1024.0,
                "{i}: {found} for {wanted}"
            );
        }
        // What is a code times its scale comes back as it is.
        let again = Fp8Matrix::quantize(&expanded, outputs, inputs);
        assert_eq!(again.blocks().expand(inputs), expanded);
    }

    #[test]
    fn a_matrix_of_zeros_stays_one() {
        let matrix = Fp8Matrix::quantize(&[0.0; 6], 2, 3);
        assert_eq!(matrix.blocks().expand(3), [0.0; 6]);
    }

    #[test]
    fn wrong_sizes_are_refused_with_the_numbers() {
        let (codes, scales) = ([0u8; 6], [1f32; 1]);
        let blocks = Fp8Blocks { codes: &codes, scales: &scales, grid: ScaleGrid::Blocks };
        assert!(blocks.check(2, 3).is_ok());
        for (outputs, inputs) in [(3, 3), (usize::MAX, 2)] {
            assert!(blocks.check(outputs, inputs).unwrap_err().to_string().contains("6 codes and 1 scales"));
        }
        let two = Fp8Blocks { scales: &[1.0, 1.0], ..blocks };
        assert!(two.check(2, 3).is_err());
    }

    #[test]
    fn a_channel_has_one_scale_for_all_its_inputs() {
        let codes = vec![fp8::quantize(1.0); 2 * 200];
        let blocks = Fp8Blocks { codes: &codes, scales: &[0.5, 3.0], grid: ScaleGrid::Channels };
        blocks.check(2, 200).unwrap();
        let weights = blocks.expand(200);
        assert!(weights[..200].iter().all(|w| *w == 0.5) && weights[200..].iter().all(|w| *w == 3.0));
        assert!(blocks.check(1, 400).is_err());
    }
}
