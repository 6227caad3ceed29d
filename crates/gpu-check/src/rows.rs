//! Checks of the operations on rows; formulas in f64 are the reference.

use crate::{Extent, Numbers, Report, download, largest_difference, upload, without_cache};
use anyhow::Result;
use oscar_backend::{
    Backend, Fp8Matrix, Gate, HostMatrix, HostValues, Output, Product, Step, TappedRows, WeightFormat,
    fp8_blocks,
};
use oscar_kernels_cuda::CudaBackend;
use oscar_kernels_cuda::CudaRows;
use oscar_kernels_cuda::multiplies_few_rows;

/// Elements of the largest matrix of a small check. Some of these still have more units than a GPU
/// has multiprocessors.
const SMALL_MATRIX: usize = 1 << 21;

pub fn gemm(gpu: &CudaBackend, extent: Extent, report: &mut Report) -> Result<()> {
    for format in [WeightFormat::Bf16, WeightFormat::Fp8] {
        products(gpu, format, extent, report)?;
        fused_products(gpu, format, extent, report)?;
    }
    Ok(())
}

pub fn embeddings<B: Backend>(gpu: &B, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(1);
    for (rows, width) in [(1, 64), (5, 384), (70, 1000)] {
        let values = numbers.vector(rows * width);
        let x = upload(gpu, &values, width)?;
        let exact: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
        report.case("embed", largest_difference(&download(gpu, &x, rows)?, &exact), 0.0, || {
            format!("{rows}×{width}")
        });
        let wanted: Vec<usize> = (0..rows).rev().step_by(2).collect();
        let mut selected = gpu.rows(width);
        without_cache(gpu, |step| Ok(step.select(&x, &wanted, &mut selected)?))?;
        let expected: Vec<f64> = wanted.iter().flat_map(|&r| exact[r * width..][..width].to_vec()).collect();
        let difference = largest_difference(&download(gpu, &selected, wanted.len())?, &expected);
        report.case("select", difference, 0.0, || format!("{} of {rows}×{width}", wanted.len()));
        // A factor is one more rounding.
        let table = gpu.matrix(HostMatrix {
            outputs: rows,
            inputs: width,
            values: HostValues::F32(&values),
            bias: None,
        })?;
        let (factor, tokens) = (53.1f32, (0..rows as u32).rev().collect::<Vec<_>>());
        let mut scaled = gpu.rows(width);
        without_cache(gpu, |step| Ok(step.embed(&table, &tokens, factor, &mut scaled)?))?;
        let of_row = |&row: &u32| values[row as usize * width..][..width].iter();
        let expected: Vec<f64> = tokens.iter().flat_map(of_row).map(|&v| f64::from(v * factor)).collect();
        let difference = largest_difference(&download(gpu, &scaled, rows)?, &expected);
        report.case("embed, scaled", difference, 0.0, || format!("{rows}×{width}"));
    }
    Ok(())
}

pub fn norms(gpu: &CudaBackend, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(2);
    for (rows, width) in [(1, 64), (3, 384), (2, 5120), (40, 2560), (1, 16384)] {
        for scale in [1.0f32, 1024.0, 1.0 / 1024.0, 0.0] {
            let values: Vec<f32> = numbers.vector(rows * width).iter().map(|v| v * scale).collect();
            let weights = numbers.vector(width);
            let (x, weight) = (upload(gpu, &values, width)?, gpu.vector(&weights)?);
            let mut out = gpu.rows(width);
            without_cache(gpu, |step| Ok(step.rms_norm(&x, &weight, 1e-6, &mut out)?))?;
            let expected = normed(&values, &weights, 1e-6);
            let difference = largest_difference(&download(gpu, &out, rows)?, &expected);
            report.case("rms_norm", difference, 2e-5, || format!("{rows}×{width} times {scale}"));
        }
    }
    Ok(())
}

/// RMSNorm of rows as wide as the weights.
fn normed(values: &[f32], weights: &[f32], eps: f64) -> Vec<f64> {
    let row = |row: &[f32]| {
        let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / row.len() as f64;
        let factor = 1.0 / (mean + eps).sqrt();
        row.iter().zip(weights).map(|(&v, &w)| f64::from(v) * factor * f64::from(w)).collect::<Vec<_>>()
    };
    values.chunks_exact(weights.len()).flat_map(row).collect()
}

pub fn gates(gpu: &CudaBackend, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(3);
    for (gate, name) in
        [(Gate::Silu, "swiglu"), (Gate::GeluTanh, "gate, GELU by tanh"), (Gate::Clamped, "gate, clamped")]
    {
        for (rows, width, scale) in
            [(1, 96, 1.0f32), (7, 384, 64.0), (5, 128, 8.0), (16, 128, 16384.0), (40, 256, 8.0)]
        {
            let values: Vec<f32> = numbers.vector(rows * 2 * width).iter().map(|v| v * scale).collect();
            let x = upload(gpu, &values, 2 * width)?;
            let mut out = gpu.rows(width);
            without_cache(gpu, |step| Ok(step.gate(gate, &x, &mut out)?))?;
            let found = download(gpu, &out, rows)?;
            let mut worst = 0f64;
            for (row, found) in values.chunks_exact(2 * width).zip(found.chunks_exact(width)) {
                for i in 0..width {
                    let expected = gate.apply(f64::from(row[i]), f64::from(row[width + i]));
                    worst = worst.max((f64::from(found[i]) - expected).abs() / (1e-3 + expected.abs()));
                }
            }
            // The rows of a prompt are rounded to BF16.
            let allowed = if rows > 16 { 1.0 / 256.0 } else { 2e-5 };
            report.case(name, worst, allowed, || format!("{rows}×{width} times {scale}"));
        }
    }
    Ok(())
}

/// Products whose results are normalized before they are added, and gates that have a launch of their
/// own. Few rows and many, with a bias and without.
pub fn other_outputs<B: Backend>(gpu: &B, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(31);
    for rows in [1, 5, 16, 17, 70] {
        for (outputs, inputs, biased) in [(64, 128, false), (192, 320, true), (1152, 256, false)] {
            let weights = numbers.vector(outputs * inputs);
            let bias = biased.then(|| numbers.vector(outputs));
            let matrix = gpu.matrix(HostMatrix {
                outputs,
                inputs,
                values: HostValues::F32(&weights),
                bias: bias.as_deref(),
            })?;
            let values = numbers.vector(rows * inputs);
            let sums: Vec<f64> = values
                .chunks_exact(inputs)
                .flat_map(|x| {
                    let dot = |(o, w): (usize, &[f32])| {
                        let sum: f64 = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                        sum + bias.as_ref().map_or(0.0, |bias| f64::from(bias[o]))
                    };
                    weights.chunks_exact(inputs).enumerate().map(dot).collect::<Vec<_>>()
                })
                .collect();
            let what = || format!("{rows} rows, {outputs} × {inputs}, bias {biased}");
            // Few rows keep 16 bits of activations; many are rounded to BF16.
            let share = if rows > 16 { 1.0 / 128.0 } else { 2e-4 };
            let x = upload(gpu, &values, inputs)?;

            let (norm, before) = (numbers.vector(outputs), numbers.vector(rows * outputs));
            let (on_gpu, mut sum) = (gpu.vector(&norm)?, upload(gpu, &before, outputs)?);
            let product = Product::of(&matrix, Output::Add).then_norm(Some(&on_gpu), 1e-6);
            without_cache(gpu, |step| Ok(step.product(product, &x, &mut sum)?))?;
            let normed = sums.chunks_exact(outputs).flat_map(|row| {
                let mean = row.iter().map(|v| v * v).sum::<f64>() / outputs as f64;
                let factor = 1.0 / (mean + 1e-6).sqrt();
                row.iter().zip(&norm).map(move |(v, &w)| v * factor * f64::from(w)).collect::<Vec<_>>()
            });
            let expected: Vec<f64> = normed.zip(&before).map(|(n, &b)| n + f64::from(b)).collect();
            let largest = expected.iter().fold(0f64, |a, v| a.max(v.abs()));
            let difference = largest_difference(&download(gpu, &sum, rows)?, &expected);
            report.case("product with a norm of its result", difference, share * largest, what);

            let width = outputs / 2;
            for gate in [Gate::GeluTanh, Gate::Clamped] {
                let mut out = gpu.rows(width);
                let product = Product::of(&matrix, Output::Gated(gate));
                without_cache(gpu, |step| Ok(step.product(product, &x, &mut out)?))?;
                let gated = sums.chunks_exact(outputs).flat_map(|row| {
                    (0..width).map(|i| gate.apply(row[i], row[width + i])).collect::<Vec<_>>()
                });
                let expected: Vec<f64> = gated.collect();
                let largest = expected.iter().fold(1f64, |a, v| a.max(v.abs()));
                let difference = largest_difference(&download(gpu, &out, rows)?, &expected);
                let name = format!("product with a gate, {gate:?}");
                report.case(&name, difference, 2.0 * share * largest, what);
            }
        }
    }
    Ok(())
}

/// Random weights: their values, and their codes if they are FP8.
struct Drawn {
    values: Vec<f32>,
    fp8: Option<Fp8Matrix>,
}

impl Drawn {
    fn new(numbers: &mut Numbers, format: WeightFormat, outputs: usize, inputs: usize) -> Self {
        if format == WeightFormat::Bf16 {
            return Self { values: numbers.vector(outputs * inputs), fp8: None };
        }
        // Every other matrix has only subnormal codes, which would be lost in the sums beside
        // others. The other matrices have any code but NaN.
        let magnitudes = if numbers.below(2) == 0 { 0x7f } else { 8 };
        let code = |n: &mut Numbers| (n.below(magnitudes) | n.below(2) << 7) as u8;
        let codes = (0..outputs * inputs).map(|_| code(numbers)).collect();
        let blocks = fp8_blocks(outputs) * fp8_blocks(inputs);
        let scales = (0..blocks).map(|_| (1.1 + numbers.unit()) / 300.0).collect();
        let fp8 = Fp8Matrix { codes, scales };
        Self { values: fp8.blocks().expand(inputs), fp8: Some(fp8) }
    }

    fn values(&self) -> HostValues<'_> {
        match &self.fp8 {
            Some(fp8) => HostValues::Fp8(fp8.blocks()),
            None => HostValues::F32(&self.values),
        }
    }
}

/// A check's name with these weights.
fn named(name: &str, format: WeightFormat) -> String {
    match format {
        WeightFormat::Bf16 => name.to_owned(),
        WeightFormat::Fp8 => format!("{name}, FP8"),
    }
}

fn products(gpu: &CudaBackend, format: WeightFormat, extent: Extent, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(4);
    // Some matrices have more units than a GPU has multiprocessors, some fewer chunks than a block
    // has warps. The kernel for few rows does not take all of them.
    let shapes: &[(usize, usize)] = match format {
        WeightFormat::Bf16 => {
            &[(8, 32), (24, 64), (136, 96), (1152, 384), (256, 4096), (40, 1000), (8648, 160), (4672, 512)]
        }
        WeightFormat::Fp8 => {
            &[(8, 64), (24, 128), (136, 192), (1152, 384), (256, 4096), (40, 1000), (8648, 192), (4672, 1024)]
        }
    };
    // More outputs than are expanded at a time.
    let large = [(16_640, 4096)];
    // Both halves of few rows and the fewest many are a small check.
    let counts: &[usize] = if extent.small { &[1, 9, 17] } else { &[1, 2, 7, 8, 9, 15, 16, 17, 33, 100] };
    for &rows in counts {
        let more = large.iter().filter(|_| rows == 17 && format == WeightFormat::Fp8);
        for &(outputs, inputs) in shapes.iter().chain(more) {
            if !extent.fits(outputs * inputs, SMALL_MATRIX) {
                continue;
            }
            let drawn = Drawn::new(&mut numbers, format, outputs, inputs);
            let weights = &drawn.values;
            let bias = numbers.vector(outputs);
            let x = numbers.vector(rows * inputs);
            // Sixteen bits of mantissa: products with a part that BF16 cannot hold.
            let fine: Vec<f32> = x.iter().map(|v| v * 1.003_173_8).collect();
            let with_bias = (rows + outputs) % 2 == 0;
            let matrix = gpu.matrix(HostMatrix {
                outputs,
                inputs,
                values: drawn.values(),
                bias: with_bias.then_some(&bias),
            })?;
            let normed = scaled(gpu, &x, inputs, 1.003_173_8)?;
            let mut out = gpu.rows(outputs);
            let dot = |r: usize, o: usize| -> (f64, f64) {
                let (row, weight) = (&fine[r * inputs..][..inputs], &weights[o * inputs..][..inputs]);
                let terms = row.iter().zip(weight).map(|(&a, &b)| f64::from(a) * f64::from(b));
                let plain = f64::from(if with_bias { bias[o] } else { 0.0 });
                terms.fold((plain, plain.abs()), |(sum, size), t| (sum + t, size + t.abs()))
            };
            let mut reference = vec![(0.0, 0.0); rows * outputs];
            for (i, cell) in reference.iter_mut().enumerate() {
                *cell = dot(i / outputs, i % outputs);
            }
            let worst = |found: &[f32], times: f64| {
                let share = |(f, (sum, size)): (&f32, &(f64, f64))| {
                    let d = (f64::from(*f) - times * sum).abs() / (times * size).max(1e-30);
                    if d.is_nan() { f64::INFINITY } else { d }
                };
                if found.len() != reference.len() {
                    return f64::INFINITY;
                }
                found.iter().zip(&reference).map(share).fold(0.0, f64::max)
            };
            let what = || format!("{rows} rows, {outputs}×{inputs}, bias {with_bias}");
            // Few rows keep 16 bits of the activations. For many rows activations and FP8 weights
            // are rounded to BF16.
            let own = rows <= 16 && multiplies_few_rows(format, outputs, inputs);
            let allowed = if own { 1e-5 } else { 4e-3 };
            let run = |output, out: &mut CudaRows| {
                without_cache(gpu, |step| Ok(step.product(Product::of(&matrix, output), &normed, out)?))
            };
            run(Output::Replace, &mut out)?;
            let name = named(if own { "linear, few rows" } else { "linear, many rows" }, format);
            report.case(&name, worst(&download(gpu, &out, rows)?, 1.0), allowed, what);
            run(Output::Add, &mut out)?;
            report.case(&name, worst(&download(gpu, &out, rows)?, 2.0), allowed, what);
            run(Output::Logits, &mut out)?;
            let allowed = if own || format == WeightFormat::Bf16 { 2e-5 } else { 4e-3 };
            report.case(&named("logits", format), worst(&download(gpu, &out, rows)?, 1.0), allowed, what);
        }
    }
    Ok(())
}

/// Norm, product and gate in one, as far as they go together, against the same in f64.
fn fused_products(
    gpu: &CudaBackend,
    format: WeightFormat,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let mut numbers = Numbers::new(6);
    let counts: &[usize] = if extent.small { &[1, 13, 20] } else { &[1, 5, 8, 13, 16, 20] };
    for &rows in counts {
        let shapes = match format {
            WeightFormat::Bf16 => [(64, 32), (192, 384), (1024, 2560), (96, 64), (8640, 160), (4672, 512)],
            WeightFormat::Fp8 => [(64, 64), (192, 384), (1024, 2560), (96, 128), (8640, 192), (4672, 1024)],
        };
        for (outputs, inputs) in shapes {
            if !extent.fits(outputs * inputs, SMALL_MATRIX) {
                continue;
            }
            let values = numbers.vector(rows * inputs);
            let drawn = Drawn::new(&mut numbers, format, outputs, inputs);
            let weights = &drawn.values;
            let norm = numbers.vector(inputs);
            let host = HostMatrix { outputs, inputs, values: drawn.values(), bias: None };
            let (matrix, norm_vector) = (gpu.matrix(host)?, gpu.vector(&norm)?);
            let x = upload(gpu, &values, inputs)?;
            let eps = 1e-3;
            let normed = normed(&values, &norm, f64::from(eps));
            let plain: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
            let product = |x: &[f64]| -> Vec<f64> {
                let dot = |row: &[f64], weight: &[f32]| -> f64 {
                    row.iter().zip(weight).map(|(a, &b)| a * f64::from(b)).sum()
                };
                x.chunks_exact(inputs)
                    .flat_map(|row| weights.chunks_exact(inputs).map(move |w| dot(row, w)))
                    .collect()
            };
            let gate = |gate_up: &[f64]| -> Vec<f64> {
                let silu = |g: f64| g / (1.0 + (-g).exp());
                let row = |r: &[f64]| -> Vec<f64> {
                    (0..outputs / 2).map(|o| silu(r[o]) * r[o + outputs / 2]).collect()
                };
                gate_up.chunks_exact(outputs).flat_map(row).collect()
            };
            // Sums of `inputs` terms of about 1/3; many rows are rounded to BF16.
            let allowed = if rows <= 16 { 1e-5 } else { 2e-3 } * inputs as f64;
            let what = || format!("{rows} rows, {outputs}×{inputs}");
            let mut case = |name, found: &[f32], expected: &[f64], allowed: f64| {
                report.case(&named(name, format), largest_difference(found, expected), allowed, what);
            };
            // An error of a gate or of its factor is multiplied by the other.
            let of_gate = |sums: &[f64]| {
                let largest = sums.iter().fold(1f64, |a, b| a.max(b.abs()));
                if rows <= 16 { allowed } else { 2.0 * allowed * largest }
            };
            let (mut out, mut gated) = (gpu.rows(outputs), gpu.rows(outputs / 2));
            let run = |norm, output, out: &mut CudaRows| {
                let product = Product { weight: &matrix, norm, output, result_norm: None };
                without_cache(gpu, |step| Ok(step.product(product, &x, out)?))
            };
            let norm = Some((&norm_vector, eps));
            run(norm, Output::Replace, &mut out)?;
            let expected = product(&normed);
            case("norm and linear", &download(gpu, &out, rows)?, &expected, allowed);
            run(None, Output::Gated(Gate::Silu), &mut gated)?;
            let sums = product(&plain);
            case("linear and gate", &download(gpu, &gated, rows)?, &gate(&sums), of_gate(&sums));
            run(norm, Output::Gated(Gate::Silu), &mut gated)?;
            case(
                "norm, linear and gate",
                &download(gpu, &gated, rows)?,
                &gate(&expected),
                of_gate(&expected),
            );
        }
    }
    Ok(())
}

/// `x` times a factor that needs more than BF16, as f32 rows, made with a norm.
fn scaled(gpu: &CudaBackend, x: &[f32], width: usize, factor: f32) -> Result<CudaRows> {
    // RMSNorm divides by the row's root mean square. An epsilon that dwarfs it makes the divisor
    // the same for all rows.
    let rows = upload(gpu, x, width)?;
    let eps = 1e12f32;
    let weight = gpu.vector(&vec![factor * eps.sqrt(); width])?;
    let mut out = gpu.rows(width);
    without_cache(gpu, |step| Ok(step.rms_norm(&rows, &weight, eps, &mut out)?))?;
    Ok(out)
}

pub fn grams(gpu: &CudaBackend, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(5);
    for (rows, stride, first, width) in [(1, 64, 0, 64), (33, 512, 128, 128), (100, 300, 7, 40)] {
        let values = numbers.vector(rows * stride);
        let x = upload(gpu, &values, stride)?;
        for weighted in [false, true] {
            let weights: Vec<f32> = (0..rows).map(|_| numbers.unit().abs()).collect();
            let mut gram = vec![1.0; width * width];
            let weights_of = weighted.then_some(weights.as_slice());
            without_cache(gpu, |step| {
                Ok(step.tapped(&x).accumulate_gram(first, width, weights_of, &mut gram)?)
            })?;
            let mut worst = 0f64;
            for i in 0..width {
                for j in 0..width {
                    let expected: f64 = (0..rows)
                        .map(|r| {
                            let at = |c: usize| f64::from(values[r * stride + first + c]);
                            at(i) * at(j) * if weighted { f64::from(weights[r]) } else { 1.0 }
                        })
                        .sum();
                    worst = worst.max((gram[i * width + j] - 1.0 - expected).abs());
                }
            }
            report.case("gram", worst, 1e-5, || format!("{rows} rows, {width} columns, weighted {weighted}"));
        }
    }
    Ok(())
}
