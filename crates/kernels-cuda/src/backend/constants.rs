//! The constants of a model beside its matrices.

use crate::device::Device;
use crate::error::Result;
use crate::memory::Buffer;
use half::bf16;
use oscar_codec::HeadRotations;
use std::sync::OnceLock;

/// Vectors (norm weights) as f32.
pub struct CudaVector {
    pub(super) values: Buffer,
    pub(super) len: usize,
}

/// Cosines and sines, `[position][rotary_dim / 2]`.
pub struct CudaRope {
    pub(super) cosines: Buffer,
    pub(super) sines: Buffer,
    pub(super) rotary_dim: usize,
    pub(super) positions: usize,
    /// A table that turns nothing, for heads that `prepare_heads` has already turned: only part of
    /// a head turns, and the kernels of attention turn whole heads.
    pub(super) still: OnceLock<(Buffer, Buffer)>,
}

impl CudaRope {
    /// The table that turns nothing, made at first use.
    pub(super) fn still(&self, device: &Device, head_dim: usize) -> Result<&(Buffer, Buffer)> {
        if let Some(tables) = self.still.get() {
            return Ok(tables);
        }
        let entries = self.positions * head_dim / 2;
        let ones = device.upload_new(&vec![1f32; entries], "a RoPE table")?;
        let zeros = device.upload_new(&vec![0f32; entries], "a RoPE table")?;
        Ok(self.still.get_or_init(|| (ones, zeros)))
    }
}

/// Key rotations of a layer's heads, one after the other in the order of `append.cu`, and their
/// means.
pub struct CudaRotation {
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) matrices: Buffer,
    pub(super) means: Option<Buffer>,
    /// The means in the cache's basis.
    pub(super) rotated_means: Option<Buffer>,
}

impl CudaRotation {
    pub(super) fn upload(device: &Device, heads: &[HeadRotations]) -> Result<Self> {
        let matrices: Vec<[u32; 4]> =
            heads.iter().flat_map(|h| fragments(h.key.matrix(), h.key.head_dim())).collect();
        let means = heads.iter().any(|h| h.key_mean.is_some()).then(|| {
            let zero = vec![0.0; heads[0].key.head_dim()];
            let means: Vec<f32> =
                heads.iter().flat_map(|h| h.key_mean.as_ref().unwrap_or(&zero).iter().copied()).collect();
            means
        });
        let rotated = means.as_ref().map(|means| {
            let d = heads[0].key.head_dim();
            let of_head = |(head, mean): (&HeadRotations, &[f32])| rotated_mean(head.key.matrix(), mean);
            heads.iter().zip(means.chunks_exact(d)).flat_map(of_head).collect::<Vec<f32>>()
        });
        let upload = |means: Vec<f32>| device.upload_new(&means, "key means");
        let (count, head_dim) = (heads.len(), heads.first().map_or(0, |h| h.key.head_dim()));
        Ok(Self {
            heads: count,
            head_dim,
            matrices: device.upload_new(&matrices, "key rotations")?,
            means: means.map(upload).transpose()?,
            rotated_means: rotated.map(upload).transpose()?,
        })
    }
}

/// A mean as queries in the cache's basis meet it: with the rotation `[input][output]` of its head.
fn rotated_mean(matrix: &[f32], mean: &[f32]) -> Vec<f32> {
    let d = mean.len();
    let output = |j: usize| (0..d).map(|i| f64::from(mean[i]) * f64::from(matrix[i * d + j])).sum::<f64>();
    (0..d).map(|j| output(j) as f32).collect()
}

/// A matrix `[input][output]` in the order of `heads.cuh`: steps of 16 inputs, tiles of 8 outputs,
/// and for every lane the two registers of a B operand with the high parts of the numbers and two
/// with the low parts.
fn fragments(matrix: &[f32], d: usize) -> Vec<[u32; 4]> {
    let parts = |input: usize, output: usize| {
        let x = matrix[input * d + output];
        let high = bf16::from_f32(x);
        [high, bf16::from_f32(x - high.to_f32())].map(|part| u32::from(part.to_bits()))
    };
    let mut all = Vec::with_capacity(d * d / 4);
    for place in 0..d * d / 4 {
        let (step, tile, lane) = (place / 32 / (d / 8), place / 32 % (d / 8), place % 32);
        let (input, output) = (16 * step + 2 * (lane % 4), 8 * tile + lane / 4);
        let pair = |input: usize| {
            let (first, second) = (parts(input, output), parts(input + 1, output));
            [first[0] | second[0] << 16, first[1] | second[1] << 16]
        };
        let (low_inputs, high_inputs) = (pair(input), pair(input + 8));
        all.push([low_inputs[0], high_inputs[0], low_inputs[1], high_inputs[1]]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_hold_every_element_in_two_parts() {
        let d = 64;
        let matrix: Vec<f32> = (0..d * d).map(|i| ((i * 37 % 101) as f32 - 50.0) / 77.0).collect();
        let found = fragments(&matrix, d);
        assert_eq!(found.len(), d * d / 4);
        let part = |bits: u32| bf16::from_bits(bits as u16).to_f32();
        for input in 0..d {
            for output in 0..d {
                // B operand of mma.m16n8k16: a lane has one output and inputs 2t, 2t + 1 (first
                // register), 2t + 8, 2t + 9 (second register).
                let (lane, register) = (output % 8 * 4 + input % 8 / 2, input % 16 / 8);
                let quad = found[(input / 16 * (d / 8) + output / 8) * 32 + lane];
                let [high, low] =
                    [quad[register], quad[2 + register]].map(|r| r >> (16 * (input % 2)) & 0xffff);
                let x = matrix[input * d + output];
                assert_eq!(part(high), bf16::from_f32(x).to_f32());
                assert!((part(high) + part(low) - x).abs() <= x.abs() * 2f32.powi(-16), "{input} {output}");
            }
        }
    }
}
