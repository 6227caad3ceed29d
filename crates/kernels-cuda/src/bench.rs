//! Timings of single kernels, for `oscar bench`: device events around launches over rotating data, so that nothing is
//! found in the second-level cache.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::gemm::{CublasLt, CudaMatrix, Product, Skinny, SkinnyProduct};
use crate::kernels::Kernels;

/// Bytes that must lie between two uses of a matrix.
const COLD_BYTES: usize = 512 << 20;

/// Microseconds of one launch, sample by sample in ascending order; `launch(i)` is the `i`-th of runs of launches
/// without pause.
pub fn time_us<E: From<CudaError>>(
    device: &Device,
    repetitions: usize,
    mut launch: impl FnMut(usize) -> std::result::Result<(), E>,
) -> std::result::Result<Vec<f64>, E> {
    const RUN: usize = 16;
    let (start, end) = (device.event()?, device.event()?);
    let mut samples = Vec::with_capacity(repetitions);
    let mut index = 0;
    for sample in 0..repetitions.max(1) + 2 {
        start.record()?;
        for _ in 0..RUN {
            launch(index)?;
            index += 1;
        }
        end.record()?;
        let us = end.us_since(&start)? / RUN as f64;
        if sample >= 2 {
            samples.push(us);
        }
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples)
}

fn median(samples: &[f64]) -> f64 {
    samples[samples.len() / 2]
}

/// One way to multiply, and how long it took.
pub struct GemmTiming {
    pub kernel: String,
    /// What the backend chooses for this shape.
    pub chosen: bool,
    pub us: f64,
}

/// Times every way the backend has to multiply `rows` rows with an `outputs × inputs` matrix.
pub fn gemm(
    device: &Device,
    kernels: &Kernels,
    rows: usize,
    outputs: usize,
    inputs: usize,
    repetitions: usize,
) -> Result<Vec<GemmTiming>> {
    let bytes = outputs * inputs * 2;
    let copies = COLD_BYTES.div_ceil(bytes) + 1;
    let matrices = (0..copies)
        .map(|_| {
            let matrix = CudaMatrix::uninitialized(device, outputs, inputs)?;
            device.fill(&matrix.weights, 0x3c)?;
            Ok(matrix)
        })
        .collect::<Result<Vec<_>>>()?;
    let x = device.alloc(rows * inputs * 4, "activations")?;
    device.fill(&x, 0x3c)?;
    let out = device.alloc(rows * outputs * 4, "activations")?;
    let mut timings = Vec::new();
    if Skinny::takes(&matrices[0], rows) {
        let skinny = Skinny::new(device, kernels)?;
        let (x, out) = (x.address(), out.address());
        let product = SkinnyProduct { rows, x, out, norm: None, add: false, gated: false };
        let chosen = skinny.choose(rows, outputs, false);
        for shape in skinny.shapes(rows) {
            let us = time_us::<CudaError>(device, repetitions, |i| {
                skinny.enqueue_as(shape, &matrices[i % copies], &product)
            })?;
            let kernel = format!("own, {} rows, {} warps, {} tiles", shape.rows, shape.warps, shape.tiles);
            timings.push(GemmTiming { kernel, chosen: Some(shape) == chosen, us: median(&us) });
        }
    }
    let mut cublaslt = CublasLt::open(device)?;
    let product = Product { rows, outputs, inputs, add: false };
    let us = time_us::<CudaError>(device, repetitions, |i| {
        cublaslt.enqueue(product, matrices[i % copies].weights.address(), x.address(), out.address())
    })?;
    timings.push(GemmTiming { kernel: "cuBLASLt".into(), chosen: timings.is_empty(), us: median(&us) });
    Ok(timings)
}
