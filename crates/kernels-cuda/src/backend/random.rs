//! Random weights and pages for benchmarks, made on the device.

use super::CudaBackend;
use super::launches::{Random, RandomPages};
use crate::error::Result;
use crate::gemm::{CudaMatrix, random_scale};
use crate::pages::CudaPages;
use oscar_backend::{WeightFormat, fp8_blocks};

impl CudaBackend {
    /// A matrix of random weights.
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
                // Any bits are valid codes: the matrix is one page of codes without parameters.
                let bytes = matrix.weights.bytes() as u64;
                let pages = matrix.weights.address();
                let p = RandomPages { pages, page_bytes: bytes, parameters: bytes, count: 1, seed };
                self.launches.random_pages(&self.kernels, &p)?;
                self.fp8_kernels()?;
                Ok(matrix)
            }
        }
    }

    /// Fills pages that were never written with random rows and codes.
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
}
