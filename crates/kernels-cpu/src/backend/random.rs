//! Experts of random weights for benchmarks: billions of weights in seconds, one expert a task.

use super::experts::CpuExperts;
use super::{CpuBackend, shape_error};
use half::bf16;
use oscar_backend::{
    ExpertFormat, ExpertId, ExpertsShape, Fp8Blocks, HostMatrix, HostValues, Mxfp4Blocks, Result, ScaleGrid,
    random_amplitude,
};
use oscar_codec::random::SplitMix64;

/// Weights of one matrix before they are packed. Codes are random bits, except for those of NaN.
enum Random {
    Bf16(Vec<bf16>),
    Fp8 { codes: Vec<u8>, scales: Vec<f32>, grid: ScaleGrid },
    Mxfp4 { codes: Vec<u8>, scales: Vec<u8> },
}

impl Random {
    fn new(format: ExpertFormat, outputs: usize, inputs: usize, seed: u64) -> Self {
        let (count, amplitude) = (outputs * inputs, random_amplitude(inputs));
        let mut random = SplitMix64::new(seed);
        let mut bytes = |count: usize| -> Vec<u8> {
            let mut bytes: Vec<u8> =
                (0..count.div_ceil(8)).flat_map(|_| random.next_u64().to_le_bytes()).collect();
            bytes.truncate(count);
            bytes
        };
        let fp8 = |mut codes: Vec<u8>, grid: ScaleGrid| {
            codes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code &= 0xfe);
            // The root of the mean square of all codes is about 110, that of the weights amplitude / √3.
            let scales = vec![amplitude / 190.0; grid.shape(outputs, inputs).iter().product()];
            Self::Fp8 { codes, scales, grid }
        };
        match format {
            ExpertFormat::Bf16 => {
                let value = |pair: &[u8]| f32::from(i16::from_le_bytes([pair[0], pair[1]]));
                let weight = |pair: &[u8]| bf16::from_f32(value(pair) * (amplitude / 32768.0));
                Self::Bf16(bytes(2 * count).chunks_exact(2).map(weight).collect())
            }
            ExpertFormat::Fp8Blocks => fp8(bytes(count), ScaleGrid::Blocks),
            ExpertFormat::Fp8Channels => fp8(bytes(count), ScaleGrid::Channels),
            ExpertFormat::Mxfp4 => {
                // The factor of scale 127 is 1, and the largest code is 6.
                let exponent = (amplitude / 4.0).log2().round() as i32;
                let scales = vec![(127 + exponent).clamp(0, 127) as u8; count / oscar_backend::MXFP4_GROUP];
                Self::Mxfp4 { codes: bytes(count / 2), scales }
            }
        }
    }

    fn values(&self) -> HostValues<'_> {
        match self {
            Self::Bf16(weights) => HostValues::Bf16(weights),
            Self::Fp8 { codes, scales, grid } => HostValues::Fp8(Fp8Blocks { codes, scales, grid: *grid }),
            Self::Mxfp4 { codes, scales } => HostValues::Mxfp4(Mxfp4Blocks { codes, scales }),
        }
    }
}

impl CpuBackend {
    pub(super) fn make_random_experts(
        &self,
        shape: &ExpertsShape<'_>,
        ids: &[ExpertId],
        seed: u64,
    ) -> Result<CpuExperts> {
        let mut experts = self.make_experts(shape)?;
        let mut made: Vec<_> = ids.iter().map(|_| None).collect();
        self.pool.run_chunks(&mut made, 1, |index, made| {
            let width = shape.width_of(ids[index]);
            let sizes = [[width, shape.hidden], [width, shape.hidden], [shape.hidden, width]];
            let mut part = 0;
            let matrices = sizes.map(|[outputs, inputs]| {
                part += 1;
                let seed = (seed << 24) ^ ((index as u64) << 4) ^ part;
                let random = Random::new(shape.format, outputs, inputs, seed);
                self.expert_matrix(HostMatrix { outputs, inputs, values: random.values(), bias: None })
            });
            made[0] = Some(matrices);
        });
        for (&id, made) in ids.iter().zip(made) {
            let Some([gate, up, down]) = made else {
                return Err(shape_error("an expert", format!("{id:?} was not made")));
            };
            experts.put(id, [gate?, up?, down?], [None, None, None])?;
        }
        Ok(experts)
    }
}
