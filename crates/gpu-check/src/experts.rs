//! Checks of mixtures of experts; [`route`] and formulas in f64 are the reference.

use crate::{Extent, Numbers, Report, download, largest_difference, upload, without_cache};
use anyhow::Result;
use oscar_backend::{
    Backend, ExpertFormat, ExpertId, ExpertsShape, Fp8Blocks, Gate, HostMatrix, HostValues, MXFP4_GROUP,
    Mxfp4Blocks, RouterRule, RouterScores, ScaleGrid, Step, route,
};

/// One mixture and its rows.
struct Case {
    rows: usize,
    experts: usize,
    chosen: usize,
    hidden: usize,
    width: usize,
    shared_width: usize,
    scores: RouterScores,
    format: ExpertFormat,
    gate: Gate,
    /// The router and all matrices have biases.
    biased: bool,
}

/// A matrix as it is stored, and its weights.
struct Drawn {
    outputs: usize,
    inputs: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    grid: ScaleGrid,
    /// Scales of MXFP4, whose codes are bytes of two.
    exponents: Vec<u8>,
    values: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Drawn {
    fn new(numbers: &mut Numbers, format: ExpertFormat, outputs: usize, inputs: usize) -> Self {
        let grid = if format == ExpertFormat::Fp8Channels { ScaleGrid::Channels } else { ScaleGrid::Blocks };
        let plain = |values| Self {
            outputs,
            inputs,
            codes: Vec::new(),
            scales: Vec::new(),
            grid,
            exponents: Vec::new(),
            values,
            bias: None,
        };
        if format == ExpertFormat::Bf16 {
            return plain(numbers.vector(outputs * inputs));
        }
        if format == ExpertFormat::Mxfp4 {
            let codes: Vec<u8> = (0..outputs * inputs / 2).map(|_| numbers.below(256) as u8).collect();
            let exponents: Vec<u8> =
                (0..outputs * inputs / MXFP4_GROUP).map(|_| 122 + numbers.below(4) as u8).collect();
            let blocks = Mxfp4Blocks { codes: &codes, scales: &exponents };
            let values = blocks.expand(outputs, inputs).unwrap_or_default();
            return Self { codes, exponents, ..plain(values) };
        }
        // All codes that are numbers, and a scale of its own everywhere.
        let code = |n: usize| if n & 0x7f == 0x7f { 0x7e } else { n as u8 };
        let codes: Vec<u8> = (0..outputs * inputs).map(|_| code(numbers.below(256))).collect();
        let count: usize = grid.shape(outputs, inputs).iter().product();
        let scales: Vec<f32> = (0..count).map(|_| (1 + numbers.below(7)) as f32 / 512.0).collect();
        let values = Fp8Blocks { codes: &codes, scales: &scales, grid }.expand(inputs);
        Self { codes, scales, ..plain(values) }
    }

    fn with_bias(self, bias: Option<Vec<f32>>) -> Self {
        Self { bias, ..self }
    }

    fn host(&self) -> HostMatrix<'_> {
        let Self { outputs, inputs, codes, scales, grid, exponents, values, bias } = self;
        let values = match (codes.is_empty(), exponents.is_empty()) {
            (true, _) => HostValues::F32(values),
            (false, true) => HostValues::Fp8(Fp8Blocks { codes, scales, grid: *grid }),
            (false, false) => HostValues::Mxfp4(Mxfp4Blocks { codes, scales: exponents }),
        };
        HostMatrix { outputs: *outputs, inputs: *inputs, values, bias: bias.as_deref() }
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
        let bias = |o: usize| self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[o]));
        self.values.chunks_exact(self.inputs).enumerate().map(|(o, row)| dot(row) + bias(o)).collect()
    }
}

/// `down(gate(gate x, up x))`.
fn expert(gate: Gate, parts: &[Drawn; 3], x: &[f64]) -> Vec<f64> {
    let (gates, ups) = (parts[0].times(x), parts[1].times(x));
    let gated: Vec<f64> = gates.iter().zip(&ups).map(|(&g, &u)| gate.apply(g, u)).collect();
    parts[2].times(&gated)
}

pub fn check<B: Backend>(gpu: &B, extent: Extent, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(21);
    let rows: &[usize] = if extent.small { &[1, 3, 20, 300] } else { &[1, 2, 8, 16, 17, 40, 100, 300, 700] };
    for format in [ExpertFormat::Bf16, ExpertFormat::Fp8Blocks, ExpertFormat::Fp8Channels] {
        for &rows in rows {
            // Sizes that end in the middle of a unit; BF16 ones in the middle of a chunk too.
            let odd = if format == ExpertFormat::Bf16 { 32 } else { 64 };
            for (experts, chosen, hidden, width, shared_width, scores) in [
                (8, 2, 128, 64, 0, RouterScores::Softmax),
                (5, 3, 128 + odd, 192 + odd, 0, RouterScores::Sigmoid),
                (37, 6, 256, 192, 192, RouterScores::Sigmoid),
                (128, 8, 512, 320, 0, RouterScores::Softmax),
            ] {
                if rows > 100 && experts > 8 {
                    continue;
                }
                let (gate, biased) = (Gate::Silu, false);
                let case =
                    Case { rows, experts, chosen, hidden, width, shared_width, scores, format, gate, biased };
                one(gpu, &mut numbers, &case, report)?;
            }
        }
    }
    check_general(gpu, extent, report)
}

/// Layers with biases, gates other than silu, and MXFP4.
pub fn check_general<B: Backend>(gpu: &B, extent: Extent, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(22);
    let rows: &[usize] = if extent.small { &[1, 20] } else { &[1, 2, 8, 16, 17, 40, 300] };
    for (format, gate, biased) in [
        (ExpertFormat::Bf16, Gate::Clamped, true),
        (ExpertFormat::Bf16, Gate::Silu, true),
        (ExpertFormat::Bf16, Gate::GeluTanh, false),
        (ExpertFormat::Mxfp4, Gate::Clamped, true),
        (ExpertFormat::Mxfp4, Gate::Silu, false),
        (ExpertFormat::Fp8Blocks, Gate::Clamped, true),
        (ExpertFormat::Fp8Channels, Gate::Clamped, true),
    ] {
        for &rows in rows {
            let odd = if matches!(format, ExpertFormat::Bf16 | ExpertFormat::Mxfp4) { 32 } else { 64 };
            let softmax = RouterScores::Softmax;
            for (experts, chosen, hidden, width, scores) in [
                (8, 2, 128, 64, softmax),
                (5, 3, 128 + odd, 192 + odd, RouterScores::Sigmoid),
                (32, 4, 256, 320, softmax),
            ] {
                let shared_width = 0;
                let case =
                    Case { rows, experts, chosen, hidden, width, shared_width, scores, format, gate, biased };
                one(gpu, &mut numbers, &case, report)?;
            }
        }
    }
    Ok(())
}

/// Whether rounding may exchange the last chosen expert and the next one.
fn nearly_tied(rule: &RouterRule, logits: &[f32], correction: Option<&[f32]>) -> bool {
    let chosen = |rule: &RouterRule| {
        let mut picked = Vec::new();
        route(rule, logits, correction, &mut picked);
        picked.into_iter().map(|(expert, _)| expert as usize).collect::<Vec<_>>()
    };
    if rule.chosen == logits.len() {
        return false;
    }
    let score = |e: usize| match rule.scores {
        RouterScores::Softmax => logits[e],
        RouterScores::Sigmoid => 1.0 / (1.0 + (-logits[e]).exp()) + correction.map_or(0.0, |c| c[e]),
    };
    let (kept, more) = (chosen(rule), chosen(&RouterRule { chosen: rule.chosen + 1, ..*rule }));
    let last = kept.iter().map(|&e| score(e)).fold(f32::INFINITY, f32::min);
    let next = more.into_iter().filter(|e| !kept.contains(e)).map(score).fold(f32::NEG_INFINITY, f32::max);
    last - next < 1e-3
}

/// The results of all rows, one by one.
fn in_parallel(values: &[f32], width: usize, of_row: impl Fn(&[f32]) -> Vec<f64> + Sync) -> Vec<Vec<f64>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = values.len().div_ceil(width * threads) * width;
    std::thread::scope(|scope| {
        let of_row = &of_row;
        let of_part = |part| scope.spawn(move || <[f32]>::chunks_exact(part, width).map(of_row).collect());
        let running: Vec<_> = values.chunks(each).map(of_part).collect();
        let joined = running.into_iter().map(|thread| thread.join().unwrap_or_default());
        joined.collect::<Vec<Vec<Vec<f64>>>>().concat()
    })
}

fn one<B: Backend>(gpu: &B, numbers: &mut Numbers, case: &Case, report: &mut Report) -> Result<()> {
    let &Case { rows, experts, chosen, hidden, width, shared_width, scores, format, gate, biased } = case;
    let sigmoid = scores == RouterScores::Sigmoid;
    let factor = if sigmoid { 2.5 } else { 1.0 };
    let rule = RouterRule { chosen, scores, normalize: true, factor, groups: None };
    let router = numbers.vector(experts * hidden);
    let correction = numbers.vector(experts);
    let correction = sigmoid.then_some(correction.as_slice());
    let router_bias = biased.then(|| numbers.vector(experts));
    let (norm, values, eps) = (numbers.vector(hidden), numbers.vector(rows * hidden), 1e-3f32);
    let shape = ExpertsShape {
        following: 0,
        experts,
        hidden,
        width,
        shared_width,
        format,
        rule,
        gate,
        router: &router,
        correction,
        router_bias: router_bias.as_deref(),
        shared_gate: None,
    };
    let mut on_gpu = gpu.experts(&shape)?;
    let shared = (shared_width > 0).then_some((ExpertId::Shared, shared_width));
    let ids: Vec<_> = (0..experts).map(|e| (ExpertId::Routed(e), width)).chain(shared).collect();
    let mut drawn = Vec::new();
    for (id, width) in ids {
        let sizes = [[width, hidden], [width, hidden], [hidden, width]];
        let parts = sizes.map(|[outputs, inputs]| {
            let matrix = Drawn::new(numbers, format, outputs, inputs);
            matrix.with_bias(biased.then(|| numbers.vector(outputs)))
        });
        gpu.load_expert(&mut on_gpu, id, parts.each_ref().map(Drawn::host))?;
        drawn.push(parts);
    }
    let of_row = |row: &[f32]| {
        let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / hidden as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        let normed: Vec<f64> =
            row.iter().zip(&norm).map(|(&v, &w)| f64::from(v) * scale * f64::from(w)).collect();
        let logit = |w: &[f32]| w.iter().zip(&normed).map(|(&w, x)| f64::from(w) * x).sum::<f64>() as f32;
        let mut logits: Vec<f32> = router.chunks_exact(hidden).map(logit).collect();
        logits.iter_mut().zip(router_bias.iter().flatten()).for_each(|(logit, bias)| *logit += bias);
        let mut picked = Vec::new();
        route(&rule, &logits, correction, &mut picked);
        if nearly_tied(&rule, &logits, correction) {
            return Vec::new();
        }
        let mut sum: Vec<f64> = row.iter().map(|&v| f64::from(v)).collect();
        let shared = (shared_width > 0).then_some((experts as u32, 1.0));
        for (id, weight) in picked.into_iter().chain(shared) {
            let part = expert(gate, &drawn[id as usize], &normed);
            sum.iter_mut().zip(part).for_each(|(s, p)| *s += f64::from(weight) * p);
        }
        sum
    };
    let expected = in_parallel(&values, hidden, of_row);
    let (mut x, norm) = (upload(gpu, &values, hidden)?, gpu.vector(&norm)?);
    without_cache(gpu, |step| Ok(step.experts(&on_gpu, (&norm, eps), &mut x)?))?;
    let found = download(gpu, &x, rows)?;
    // Rows without a result are left out.
    let rows_of = found.chunks_exact(hidden).zip(&expected).filter(|(_, expected)| !expected.is_empty());
    let (found, expected): (Vec<_>, Vec<_>) = rows_of.map(|(f, e)| (f.to_vec(), e.clone())).unzip();
    let (found, expected) = (found.concat(), expected.concat());
    let size = expected.iter().map(|v| v.abs()).fold(1.0, f64::max);
    // Few rows keep 16 bits of activations; many are rounded to BF16.
    let allowed = if rows > 16 { 1e-2 } else { 1e-4 };
    let what =
        || format!("{rows} rows, {chosen} of {experts} experts of {width}×{hidden}, shared {shared_width}");
    let name = match (gate, biased) {
        (Gate::Silu, false) => format!("experts, {format:?}"),
        _ => format!("experts, {format:?}, {gate:?}{}", if biased { " with biases" } else { "" }),
    };
    report.case(&name, largest_difference(&found, &expected) / size, allowed, what);
    Ok(())
}
