//! Timings of single kernels, for `oscar bench`: device events around launches over rotating data,
//! so that the L2 cache never holds it.

use crate::backend::CudaBackend;
use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::gemm::{CublasLt, Product, Skinny, SkinnyProduct, SkinnyShape, Sums};
use oscar_backend::WeightFormat;

/// Bytes of other matrices between two uses of one.
const COLD_BYTES: usize = 512 << 20;

/// Microseconds per launch, one value per sample in ascending order. A sample is a run of launches
/// without pause; `launch(i)` makes the `i`-th launch.
pub fn time_us<E: From<CudaError>>(
    device: &Device,
    repetitions: usize,
    launch: impl FnMut(usize) -> std::result::Result<(), E>,
) -> std::result::Result<Vec<f64>, E> {
    time_runs_us(device, repetitions, 16, launch)
}

/// [`time_us`] with this many launches in a sample.
pub fn time_runs_us<E: From<CudaError>>(
    device: &Device,
    repetitions: usize,
    run: usize,
    mut launch: impl FnMut(usize) -> std::result::Result<(), E>,
) -> std::result::Result<Vec<f64>, E> {
    let run = run.max(1);
    let (start, end) = (device.event()?, device.event()?);
    let mut samples = Vec::with_capacity(repetitions);
    let mut index = 0;
    for sample in 0..repetitions.max(1) + 2 {
        start.record()?;
        for _ in 0..run {
            launch(index)?;
            index += 1;
        }
        end.record()?;
        let us = end.us_since(&start)? / run as f64;
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

/// The time of one kernel.
pub struct GemmTiming {
    pub kernel: String,
    /// Whether the backend chooses it for this shape.
    pub chosen: bool,
    pub us: f64,
    /// Bytes of weights, which are read once.
    pub bytes: usize,
}

/// Times every kernel that multiplies `rows` rows with an `outputs × inputs` matrix of this format.
pub fn gemm(
    backend: &CudaBackend,
    format: WeightFormat,
    rows: usize,
    outputs: usize,
    inputs: usize,
    repetitions: usize,
) -> Result<Vec<GemmTiming>> {
    let device = backend.device();
    let copies = COLD_BYTES.div_ceil(outputs * inputs) + 1;
    let matrices = (0..copies)
        .map(|i| backend.random_weights(format, outputs, inputs, i as u64))
        .collect::<Result<Vec<_>>>()?;
    let bytes = matrices[0].bytes();
    let x = device.alloc(rows * inputs * 4, "activations")?;
    device.fill(&x, 0x3c)?;
    let out = device.alloc(rows * outputs * 4, "activations")?;
    let mut timings = Vec::new();
    if Skinny::takes(&matrices[0], rows) {
        let skinny = backend.skinny(&matrices[0])?;
        let (x, out) = (x.slice(), out.slice());
        let plain = SkinnyProduct { rows, x, out, norm: None, add: false, gated: false };
        // With the norm before it and the gate behind it, as in a model.
        let fused = SkinnyProduct { norm: Some((x, 1e-6)), gated: true, ..plain };
        for (product, what) in [(plain, ""), (fused, ", norm and gate")] {
            let chosen = skinny.choose(rows, outputs, product.gated);
            let gates = Skinny::gates(&matrices[0]);
            let takes = |s: &SkinnyShape| !product.gated || (gates && s.tiles.is_multiple_of(2));
            for shape in skinny.shapes(rows).filter(takes) {
                let us = time_us::<CudaError>(device, repetitions, |i| {
                    skinny.enqueue_as(shape, &matrices[i % copies], &product)
                })?;
                let SkinnyShape { rows, warps, tiles } = shape;
                let kernel = format!("own, {rows} rows, {warps} warps, {tiles} tiles{what}");
                timings.push(GemmTiming { kernel, chosen: Some(shape) == chosen, us: median(&us), bytes });
            }
        }
    }
    let mut cublaslt = CublasLt::open(device)?;
    let mut expanded = None;
    let us = time_us::<CudaError>(device, repetitions, |i| {
        let matrix = &matrices[i % copies];
        for panel in matrix.panels() {
            let weights = backend.panel(matrix, &panel, &mut expanded)?;
            let product = Product { rows, outputs: panel.len(), inputs, stride: outputs, add: false };
            let out = Sums::F32(out.slice()).from(panel.start)?;
            cublaslt.enqueue(product, weights, x.slice(), out)?;
        }
        Ok(())
    })?;
    let kernel = match format {
        WeightFormat::Bf16 => "cuBLASLt",
        WeightFormat::Fp8 => "expanded, cuBLASLt",
    };
    timings.push(GemmTiming { kernel: kernel.into(), chosen: timings.is_empty(), us: median(&us), bytes });
    Ok(timings)
}
