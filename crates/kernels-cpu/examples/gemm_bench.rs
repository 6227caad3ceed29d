//! Prints, per variant, the rate of matrix products against what the machine can do: GFLOP/s of a prefill-sized
//! product, GB/s of a decode-sized one beside the read ceiling, and the cost of an empty fork-join.
//!
//! `cargo run --release -p oscar-kernels-cpu --example gemm_bench [threads]`

use std::hint::black_box;

use oscar_kernels_cpu::bandwidth::read_ceiling;
use oscar_kernels_cpu::bench::time_median;
use oscar_kernels_cpu::{
    Epilogue, GemmScratch, Kernels, PackedMatrix, Precision, ThreadPool, Variant, Weights,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads: usize = std::env::args().nth(1).map_or(Ok(1), |argument| argument.parse())?;
    let pool = ThreadPool::new(threads)?;
    println!("{}, {threads} threads", Variant::chosen()?.describe());

    let fork_join = time_median(1000, 20_000, || {
        pool.run(threads, &|task| {
            black_box(task);
        })
    });
    println!("empty fork-join: {:.2} us", fork_join.median.as_secs_f64() * 1e6);

    let prefill = filled(&pool, 2048, 2048, Precision::Bf16)?;
    let prefill_f32 = filled(&pool, 2048, 2048, Precision::F32)?;
    let decode = filled(&pool, 8192, 16_384, Precision::Bf16)?;
    for variant in Variant::available() {
        let kernels = Kernels::for_variant(variant)?;
        let ceiling = read_ceiling(kernels, &pool, 256 << 20, 7);
        println!("{variant}: read ceiling {ceiling:.1} GB/s");
        for m in [1, 4, 16] {
            let timing = measure(kernels, &pool, &decode, m);
            let rate = timing.giga_per_second(decode.bytes() as f64);
            let part = 100.0 * rate / ceiling;
            println!("  decode  {m:3} × 16384 → 8192 bf16: {rate:6.1} GB/s, {part:.0} % of the ceiling");
        }
        for (matrix, name) in [(&prefill, "bf16"), (&prefill_f32, "f32")] {
            let timing = measure(kernels, &pool, matrix, 512);
            let rate = timing.giga_per_second(2.0 * 512.0 * 2048.0 * 2048.0);
            println!("  prefill 512 × 2048 → 2048 {name}: {rate:.1} GFLOP/s");
        }
        operations(kernels, &pool);
    }
    Ok(())
}

fn filled(
    pool: &ThreadPool,
    outputs: usize,
    inputs: usize,
    precision: Precision,
) -> Result<PackedMatrix, Box<dyn std::error::Error>> {
    let weights: Vec<f32> = (0..outputs * inputs).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect();
    Ok(PackedMatrix::pack(pool, Weights::F32(&weights), outputs, inputs, precision)?)
}

fn measure(
    kernels: &Kernels,
    pool: &ThreadPool,
    matrix: &PackedMatrix,
    m: usize,
) -> oscar_kernels_cpu::bench::Timing {
    let x: Vec<f32> = (0..m * matrix.inputs()).map(|i| (i % 127) as f32 / 127.0 - 0.5).collect();
    let mut y = vec![0.0; m * matrix.outputs()];
    let mut scratch = GemmScratch::default();
    time_median(1, 7, || {
        matrix.linear(kernels, pool, &x, m, &mut y, Epilogue::default(), &mut scratch);
        black_box(&mut y);
    })
}

fn operations(kernels: &Kernels, pool: &ThreadPool) {
    let (rows, width) = (64, 2048);
    let x: Vec<f32> = (0..rows * width).map(|i| (i % 97) as f32 / 9.0 - 5.0).collect();
    let mut out = vec![0.0; x.len()];
    let elements = x.len() as f64;
    let norm = time_median(3, 21, || kernels.rms_norm(pool, &x, &x[..width], 1e-6, black_box(&mut out)));
    let swiglu = time_median(3, 21, || kernels.swiglu(pool, &x, &x, black_box(&mut out)));
    println!(
        "  elements/ns: rms_norm {:.2}, swiglu {:.2}",
        norm.giga_per_second(elements),
        swiglu.giga_per_second(elements),
    );
}
