//! Random weights and pages for benchmarks, made on the device.

use super::CudaBackend;
use super::experts::{CudaExperts, Stack};
use super::launches::{RandomPagesParams, RandomParams};
use crate::error::Result;
use crate::gemm::{CudaMatrix, random_scale};
use crate::pages::CudaPages;
use oscar_backend::{ExpertsShape, WeightFormat, fp8_blocks};

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
                let p = RandomParams {
                    out: matrix.weights.ptr(),
                    count: (outputs * inputs) as u64,
                    seed,
                    amplitude: oscar_backend::random_amplitude(inputs),
                };
                // SAFETY: the matrix has `count` elements.
                unsafe { self.launches.random(&self.kernels, p) }?;
                Ok(matrix)
            }
            WeightFormat::Fp8 => {
                let scales = vec![random_scale(inputs); fp8_blocks(outputs) * fp8_blocks(inputs)];
                let matrix = CudaMatrix::uninitialized_fp8(&self.device, outputs, inputs, &scales)?;
                // Any bits are valid codes: the matrix is one page of codes without parameters.
                let bytes = matrix.weights.bytes() as u64;
                let pages = matrix.weights.ptr();
                let p = RandomPagesParams { pages, page_bytes: bytes, parameters: bytes, count: 1, seed };
                // SAFETY: the matrix is one page of this many bytes.
                unsafe { self.launches.random_pages(&self.kernels, p) }?;
                self.fp8_kernels()?;
                Ok(matrix)
            }
        }
    }

    /// Experts of random weights, made on the device.
    pub(super) fn random_expert_weights(&self, shape: &ExpertsShape<'_>, seed: u64) -> Result<CudaExperts> {
        let mut experts = CudaExperts::new(&self.device, &self.kernels, shape)?;
        let fill = |stack: &Stack, inputs: usize, seed: u64| -> Result<()> {
            let bytes = stack.weights.bytes() as u64;
            match &stack.scales {
                None => {
                    let amplitude = oscar_backend::random_amplitude(inputs);
                    let p = RandomParams { out: stack.weights.ptr(), count: bytes / 2, seed, amplitude };
                    // SAFETY: the buffer has `count` elements.
                    unsafe { self.launches.random(&self.kernels, p) }
                }
                Some(scales) => {
                    self.device.upload(&vec![random_scale(inputs); scales.bytes() / 4], scales.slice())?;
                    // Any bits are valid codes: one page of codes without parameters.
                    let pages = stack.weights.ptr();
                    let p = RandomPagesParams { pages, page_bytes: bytes, parameters: bytes, count: 1, seed };
                    // SAFETY: the buffer is one page of this many bytes.
                    unsafe { self.launches.random_pages(&self.kernels, p) }
                }
            }
        };
        fill(&experts.gate_up, shape.hidden, 3 * seed + 1)?;
        fill(&experts.down, shape.width, 3 * seed + 2)?;
        if shape.shared_width > 0 {
            let (format, wide) = (shape.format.weights().unwrap_or(WeightFormat::Bf16), shape.shared_width);
            let gate_up = self.random_weights(format, 2 * wide, shape.hidden, 5 * seed + 3)?;
            experts.shared = Some((gate_up, self.random_weights(format, shape.hidden, wide, 5 * seed + 4)?));
        }
        Ok(experts)
    }

    /// Fills pages that were never written with random rows and codes.
    pub(super) fn randomize_pages(&self, pool: &mut CudaPages, full: usize, coded: usize) -> Result<()> {
        for run in pool.fresh(full, coded)? {
            let bytes = (run.count * run.page_bytes) as u64;
            let seed = run.start.address();
            match run.parameters {
                None => {
                    let p = RandomParams { out: run.start.cast(), count: bytes / 2, seed, amplitude: 1.7 };
                    // SAFETY: the pages of the run have memory (`CudaPages::fresh`).
                    unsafe { self.launches.random(&self.kernels, p) }?;
                }
                Some(parameters) => {
                    let p = RandomPagesParams {
                        pages: run.start,
                        page_bytes: run.page_bytes as u64,
                        parameters: parameters as u64,
                        count: run.count as u64,
                        seed,
                    };
                    // SAFETY: the pages of the run have memory (`CudaPages::fresh`).
                    unsafe { self.launches.random_pages(&self.kernels, p) }?;
                }
            }
        }
        Ok(())
    }
}
