//! Operations outside of serving: random weights and pages for benchmarks, the statistic of calibration.

use super::launches::{Gram, Random, RandomPages};
use super::rows::{CudaRows, grow};
use super::{CudaBackend, Index, State};
use crate::error::{CudaError, Result};
use crate::gemm::{CudaMatrix, random_scale};
use crate::pages::CudaPages;
use oscar_backend::{WeightFormat, fp8_blocks};

impl CudaBackend {
    /// A matrix of random weights, made on the device.
    pub(crate) fn random_weights(
        &self,
        format: WeightFormat,
        outputs: usize,
        inputs: usize,
        seed: u64,
    ) -> Result<CudaMatrix> {
        let seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        match format {
            WeightFormat::Bf16 => {
                let matrix = CudaMatrix::uninitialized(&self.device, outputs, inputs)?;
                let p = Random {
                    out: matrix.weights.address(),
                    count: (outputs * inputs) as u64,
                    seed,
                    amplitude: oscar_backend::random_amplitude(inputs),
                    unused: 0,
                };
                self.launches.random(&self.kernels, &p)?;
                Ok(matrix)
            }
            WeightFormat::Fp8 => {
                let scales = vec![random_scale(inputs); fp8_blocks(outputs) * fp8_blocks(inputs)];
                let matrix = CudaMatrix::uninitialized_fp8(&self.device, outputs, inputs, &scales)?;
                // Any bits are codes: a page of nothing else.
                let bytes = matrix.weights.bytes() as u64;
                let pages = matrix.weights.address();
                let p = RandomPages { pages, page_bytes: bytes, parameters: bytes, count: 1, seed };
                self.launches.random_pages(&self.kernels, &p)?;
                self.fp8_kernels()?;
                Ok(matrix)
            }
        }
    }

    /// Fills pages that nobody has written yet with random rows and codes.
    pub(super) fn randomize_pages(&self, pool: &mut CudaPages, full: usize, coded: usize) -> Result<()> {
        for run in pool.fresh(full, coded)? {
            let bytes = (run.count * run.page_bytes) as u64;
            match run.parameters {
                None => {
                    let p = Random {
                        out: run.address,
                        count: bytes / 2,
                        seed: run.address,
                        amplitude: 1.7,
                        unused: 0,
                    };
                    self.launches.random(&self.kernels, &p)?;
                }
                Some(parameters) => {
                    let p = RandomPages {
                        pages: run.address,
                        page_bytes: run.page_bytes as u64,
                        parameters: parameters as u64,
                        count: run.count as u64,
                        seed: run.address,
                    };
                    self.launches.random_pages(&self.kernels, &p)?;
                }
            }
        }
        Ok(())
    }

    /// Adds a Gram matrix of some columns to `gram`.
    pub(super) fn add_gram(
        &self,
        state: &mut State,
        x: &CudaRows,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> Result<()> {
        if first + width > x.width() || gram.len() != width * width || x.values() == 0 {
            let detail = format!("columns {first}.. of {}, {width} wide", x.width());
            return Err(CudaError::Shape { what: "a Gram matrix", detail });
        }
        let weights = match weights {
            Some(weights) => self.send_indices(state, Index::Weights, bytemuck::cast_slice(weights))?,
            None => 0,
        };
        grow(&self.device, &mut state.gram, gram.len() * 8, "a statistic")?;
        let Some(buffer) = &state.gram else { return Ok(()) };
        let p = Gram {
            x: x.values(),
            weights,
            gram: buffer.address(),
            stride: x.width() as u32,
            first: first as u32,
            width: width as u32,
            rows: x.count() as u32,
        };
        self.launches.gram(&self.kernels, &p)?;
        let mut sums = vec![0f64; gram.len()];
        self.device.download(buffer, 0, &mut sums)?;
        gram.iter_mut().zip(sums).for_each(|(g, s)| *g += s);
        Ok(())
    }
}
