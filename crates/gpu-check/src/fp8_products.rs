//! Checks of products with FP8 activations: the published recipe in f64 is the reference.

use crate::{Extent, Numbers, Report, download, upload, without_cache};
use anyhow::Result;
use oscar_backend::{
    Backend, FP8_BLOCK, Fp8Matrix, HostMatrix, HostValues, Output, Product, Step, fp8_blocks,
};
use oscar_codec::fp8;
use oscar_kernels_cuda::{CudaBackend, CudaError};

pub fn check(extent: Extent, report: &mut Report) -> Result<()> {
    let mut gpu = crate::open()?;
    match gpu.quantize_activations() {
        Err(CudaError::Unsupported(why)) => {
            eprintln!("FP8 activations are not checked: {why}");
            return Ok(());
        }
        other => other?,
    }
    let mut numbers = Numbers::new(11);
    let shapes =
        [(128, 128), (1152, 384), (256, 4096), (136, 192), (4672, 1024), (264, 2624), (16_640, 4096)];
    for rows in [17, 20, 33, 100, 256] {
        for (outputs, inputs) in shapes {
            if !extent.fits(outputs * inputs, 1 << 18) || (outputs > 16_000 && rows != 20) {
                continue;
            }
            one(&gpu, &mut numbers, rows, outputs, inputs, report)?;
        }
    }
    Ok(())
}

fn one(
    gpu: &CudaBackend,
    numbers: &mut Numbers,
    rows: usize,
    outputs: usize,
    inputs: usize,
    report: &mut Report,
) -> Result<()> {
    let codes = (0..outputs * inputs).map(|_| (numbers.below(0x7f) | numbers.below(2) << 7) as u8).collect();
    let scales =
        (0..fp8_blocks(outputs) * fp8_blocks(inputs)).map(|_| (1.1 + numbers.unit()) / 300.0).collect();
    let weights = Fp8Matrix { codes, scales };
    let expanded = weights.blocks().expand(inputs);
    let mut x = numbers.vector(rows * inputs);
    // Groups of other sizes, and one of zeros.
    for (i, group) in x.chunks_mut(FP8_BLOCK).enumerate() {
        let factor = if i == 1 { 0.0 } else { 2f32.powi(i as i32 % 7 - 3) };
        group.iter_mut().for_each(|v| *v *= factor);
    }
    let values = HostValues::Fp8(weights.blocks());
    let matrix = gpu.matrix(HostMatrix { outputs, inputs, values, bias: None })?;
    let rows_of_x = upload(gpu, &x, inputs)?;
    let quantized: Vec<f64> = x.chunks_exact(inputs).flat_map(quantize_row).collect();
    let mut out = gpu.rows(outputs);
    for (output, times) in [(Output::Replace, 1.0), (Output::Add, 2.0)] {
        without_cache(gpu, |step| Ok(step.product(Product::of(&matrix, output), &rows_of_x, &mut out)?))?;
        let found = download(gpu, &out, rows)?;
        let mut worst = 0f64;
        for (row, found) in quantized.chunks_exact(inputs).zip(found.chunks_exact(outputs)) {
            for (weight, &found) in expanded.chunks_exact(inputs).zip(found) {
                let terms = row.iter().zip(weight).map(|(a, &b)| a * f64::from(b));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t: f64| (sum + t, size + t.abs()));
                let share = (f64::from(found) - times * sum).abs() / (times * size).max(1e-30);
                worst = worst.max(if share.is_nan() { f64::INFINITY } else { share });
            }
        }
        // Sums of 128 products have 14 bits.
        report.case("linear, FP8 activations", worst, 1e-3, || format!("{rows} rows, {outputs}×{inputs}"));
    }
    Ok(())
}

/// A row after quantization: every group of 128 under the scale of its largest element.
fn quantize_row(row: &[f32]) -> Vec<f64> {
    let group = |group: &[f32]| -> Vec<f64> {
        let largest = group.iter().fold(0f32, |a, b| a.max(b.abs()));
        let scale = if largest > 0.0 { largest / fp8::MAX } else { 1.0 };
        let value = |&v: &f32| f64::from(fp8::dequantize(fp8::quantize(v / scale))) * f64::from(scale);
        group.iter().map(value).collect()
    };
    row.chunks(FP8_BLOCK).flat_map(group).collect()
}
