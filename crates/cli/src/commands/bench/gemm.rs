//! `oscar bench gemm`: the matrix products a model is made of.

use super::ceiling;
use crate::device::AnyBackend;
use crate::options::{Device, WeightsArg};
use crate::table;
use anyhow::{Context, Result, bail};
use oscar_backend::{Backend, WeightFormat};
use oscar_kernels_cpu::bench::time_median;
use oscar_kernels_cpu::{Epilogue, GemmScratch, Kernels, PackedMatrix, Precision, ThreadPool, Weights};
use oscar_kernels_cuda::CudaBackend;
use oscar_kernels_cuda::bench::{GemmTiming, gemm};
use oscar_kernels_cuda::multiplies_few_rows;
use serde_json::json;

#[derive(clap::Args)]
pub struct Args {
    /// Where to measure
    #[arg(long, value_enum, default_value = "cpu")]
    device: Device,
    /// Rows of activations: 1 is a decode step, hundreds a prefill chunk
    #[arg(long, value_name = "M[,M…]", value_delimiter = ',', default_values_t = [1, 16, 512])]
    rows: Vec<usize>,
    #[arg(long, value_name = "N", default_value_t = 4096)]
    outputs: usize,
    #[arg(long, value_name = "N", default_value_t = 4096)]
    inputs: usize,
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    #[arg(long, value_name = "N", default_value_t = 9)]
    repetitions: usize,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if args.rows.contains(&0) || args.outputs == 0 || args.inputs == 0 || args.threads == 0 {
        bail!("--rows, --outputs, --inputs and --threads must be at least 1");
    }
    crate::options::check_threads(args.threads)?;
    let largest = args.rows.iter().copied().max().unwrap_or(1).max(args.outputs);
    if largest.checked_mul(args.inputs).is_none_or(|elements| elements > 1 << 32) {
        bail!("--rows, --outputs and --inputs: matrices of more than 2³² elements are not measured");
    }
    if args.device == Device::Cuda {
        return on_gpu(args);
    }
    let kernels = Kernels::chosen()?;
    let pool = ThreadPool::new(args.threads)?;
    let ceiling = ceiling(kernels, &pool);
    let weights: Vec<f32> =
        (0..args.outputs * args.inputs).map(|i| ((i * 7 % 13) as f32 - 6.0) / 50.0).collect();
    let mut lines = Vec::new();
    for precision in [Precision::Bf16, Precision::F32] {
        // Several copies, so that a matrix is never found in a cache.
        let copies = ((256 << 20) / (args.outputs * args.inputs * 2)).clamp(1, 16) + 1;
        let matrices = (0..copies)
            .map(|_| PackedMatrix::pack(&pool, Weights::F32(&weights), args.outputs, args.inputs, precision))
            .collect::<Result<Vec<_>, _>>()?;
        for &m in &args.rows {
            let x: Vec<f32> = (0..m * args.inputs).map(|i| ((i * 11 % 17) as f32 - 8.0) / 20.0).collect();
            let mut y = vec![0.0; m * args.outputs];
            let (mut scratch, mut which) = (GemmScratch::default(), 0);
            let timing = time_median(2, args.repetitions, || {
                matrices[which].linear(kernels, &pool, &x, m, &mut y, Epilogue::default(), &mut scratch);
                which = (which + 1) % copies;
            });
            let seconds = timing.median.as_secs_f64();
            let gflops = 2.0 * (m * args.outputs * args.inputs) as f64 / seconds / 1e9;
            let gbps = matrices[0].bytes() as f64 / seconds / 1e9;
            let name = format!("{precision:?}").to_lowercase();
            if args.json {
                println!(
                    "{}",
                    json!({"precision": name, "device": "cpu", "rows": m, "outputs": args.outputs, "inputs": args.inputs,
                           "threads": args.threads, "us": seconds * 1e6, "gflops": gflops, "gbps": gbps, "ceiling_gbps": ceiling})
                );
            }
            lines.push(vec![
                name,
                m.to_string(),
                format!("{}×{}", args.outputs, args.inputs),
                format!("{:.1}", seconds * 1e6),
                format!("{:.0} %", timing.spread * 100.0),
                format!("{gflops:.1}"),
                format!("{gbps:.2}"),
                format!("{:.0} %", gbps / ceiling * 100.0),
            ]);
        }
    }
    if !args.json {
        println!("{} kernels, {} threads; read ceiling {ceiling:.1} GB/s\n", kernels.variant(), args.threads);
        let header = ["precision", "rows", "matrix", "µs", "spread", "GFLOP/s", "GB/s", "of ceiling"];
        println!("{}", table::render(&header, &lines));
    }
    Ok(())
}

/// TFLOP/s of a large BF16 product, measured now: what other operations on this device are compared with.
pub fn peak_tflops(backend: &AnyBackend) -> Result<f64> {
    const REPETITIONS: usize = 5;
    if let Some(cuda) = backend.as_cuda() {
        let (rows, outputs, inputs) = (4096, 12288, 4096);
        let timings = gemm(cuda, WeightFormat::Bf16, rows, outputs, inputs, REPETITIONS)?;
        let us = timings.iter().map(|t| t.us).fold(f64::INFINITY, f64::min);
        return Ok(2.0 * (rows * outputs * inputs) as f64 / us / 1e6);
    }
    let cpu = backend.as_cpu().context("neither a CPU nor a GPU")?;
    let (rows, outputs, inputs) = (512, 2048, 2048);
    let values =
        |count: usize| -> Vec<f32> { (0..count).map(|i| ((i * 7 % 13) as f32 - 6.0) / 50.0).collect() };
    let (weights, x) = (values(outputs * inputs), values(rows * inputs));
    let matrix = PackedMatrix::pack(cpu.threads(), Weights::F32(&weights), outputs, inputs, Precision::Bf16)?;
    let (mut y, mut scratch) = (vec![0.0; rows * outputs], GemmScratch::default());
    let timing = time_median(2, REPETITIONS, || {
        matrix.linear(cpu.kernels(), cpu.threads(), &x, rows, &mut y, Epilogue::default(), &mut scratch);
    });
    Ok(2.0 * (rows * outputs * inputs) as f64 / timing.min.as_secs_f64() / 1e12)
}

/// BF16 weights, and FP8 where there are kernels for the shape.
fn on_gpu_timings(args: &Args, cuda: &CudaBackend, rows: usize) -> Result<Vec<(&'static str, GemmTiming)>> {
    let mut timings = Vec::new();
    for weights in [WeightsArg::Bf16, WeightsArg::Fp8] {
        let (outputs, inputs) = (args.outputs, args.inputs);
        if weights == WeightsArg::Bf16 || multiplies_few_rows(weights.format(), outputs, inputs) {
            let found = gemm(cuda, weights.format(), rows, outputs, inputs, args.repetitions)?;
            timings.extend(found.into_iter().map(|t| (weights.name(), t)));
        }
    }
    Ok(timings)
}

/// Every kernel that could multiply these shapes, the one the backend takes marked.
fn on_gpu(args: &Args) -> Result<()> {
    let backend = AnyBackend::gpu(AnyBackend::cuda()?, None);
    let ceiling = backend.read_ceiling()?;
    let cuda = backend.as_cuda().context("--device cuda")?;
    let mut lines = Vec::new();
    for &rows in &args.rows {
        for (precision, t) in on_gpu_timings(args, cuda, rows)? {
            let gflops = 2.0 * (rows * args.outputs * args.inputs) as f64 / t.us / 1e3;
            let gbps = t.bytes as f64 / t.us / 1e3;
            if args.json {
                println!(
                    "{}",
                    json!({"precision": precision, "device": "cuda", "rows": rows, "outputs": args.outputs,
                           "inputs": args.inputs, "kernel": t.kernel, "chosen": t.chosen, "us": t.us,
                           "gflops": gflops, "gbps": gbps, "ceiling_gbps": ceiling})
                );
            }
            lines.push(vec![
                precision.into(),
                rows.to_string(),
                format!("{}×{}", args.outputs, args.inputs),
                format!("{}{}", t.kernel, if t.chosen { " (chosen)" } else { "" }),
                format!("{:.1}", t.us),
                format!("{gflops:.0}"),
                format!("{gbps:.0}"),
                format!("{:.0} %", gbps / ceiling * 100.0),
            ]);
        }
    }
    if !args.json {
        println!("{}; read ceiling {ceiling:.0} GB/s\n", backend.describe());
        let header = ["weights", "rows", "matrix", "kernel", "µs", "GFLOP/s", "GB/s", "of ceiling"];
        println!("{}", table::render(&header, &lines));
    }
    Ok(())
}
