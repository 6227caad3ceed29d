//! Checks of demotion, decode attention and prefill attention over pages of every width: sequences
//! grow step by step on the device and as a scalar twin.

use crate::growing::{Checks, Compared, Growing, Inspected, Pattern};
use crate::{Extent, Report};
use anyhow::Result;
use oscar_backend::Backend;
use oscar_codec::{
    CacheLayout, CodeLayout, Composition, Feedback, FormatTable, KvFormat, Rounding, RowPageCodec, SideSpec,
    Windows,
};

/// The kernels that `auto` chooses.
pub const FAST: Checks = Checks {
    history: "demote, codes",
    decode: "decode attention",
    prefill: "prefill attention",
    // Softmax weights are rounded to BF16 (half a unit of 2⁻⁸ each), and codes count from a row's
    // minimum, so a weighted value is up to twice the largest one. Twice that is allowed.
    allowed: 1.0 / 128.0,
    e4m3_bits: 0,
    compared: Compared::EVERYTHING,
};

/// `attention_prefill.cu` for prompts, on GPUs that have a faster kernel too.
pub const MMA: Checks = Checks {
    prefill: "prefill attention, mma.sync",
    compared: Compared { history: false, decode: false, prefill: true },
    ..FAST
};

/// `attention_simple.cu` for everything. All its arithmetic is f32.
pub const SIMPLE: Checks = Checks {
    history: "simple attention, codes",
    decode: "simple attention, decode",
    prefill: "simple attention, prefill",
    allowed: 5e-4,
    e4m3_bits: 0,
    compared: Compared { history: false, decode: true, prefill: true },
};

struct Case {
    layers: usize,
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    /// (key bits, value bits) by layer and head, repeated as needed; none for a BF16 cache.
    widths: Vec<(u32, u32)>,
    windows: Windows,
    pattern: Pattern,
    /// Rows that each sequence brings to each step.
    steps: Vec<Vec<usize>>,
}

impl Case {
    /// One layer, narrow windows, ordinary values.
    fn new(
        head_dim: usize,
        kv_heads: usize,
        group: usize,
        widths: Vec<(u32, u32)>,
        steps: Vec<Vec<usize>>,
    ) -> Result<Self> {
        let windows = Windows::new(16, 48)?;
        Ok(Self { layers: 1, head_dim, kv_heads, group, widths, windows, pattern: Pattern::Plain, steps })
    }

    fn describe(&self) -> String {
        format!(
            "{} layers, head {}, {} KV heads, group {}, widths {:?}, sink {} recent {}, {:?} rows, steps {:?}",
            self.layers,
            self.head_dim,
            self.kv_heads,
            self.group,
            self.widths,
            self.windows.sink(),
            self.windows.recent(),
            self.pattern,
            self.steps
        )
    }

    fn layout(&self) -> Result<CacheLayout> {
        let (layers, d, heads, order) = (self.layers, self.head_dim, self.kv_heads, CodeLayout::GpuTile);
        if self.widths.is_empty() {
            return Ok(CacheLayout::new(KvFormat::Bf16, layers, heads, d, self.windows, order)?);
        }
        let clips = [(0.96, 0.92), (0.0, 1.0), (0.5, 0.99)];
        // No two heads that follow one another are alike, also from layer to layer.
        let codecs = (0..layers * heads)
            .map(|h| {
                let (key, value) = self.widths[h % self.widths.len()];
                let (key_clip, value_clip) = clips[h % clips.len()];
                let (key, value) = (SideSpec::of_width(key, key_clip), SideSpec::of_width(value, value_clip));
                let codec = RowPageCodec::new(d, key, value, order)?;
                Ok(codec.with_rounding(rounding(d, h)?)?)
            })
            .collect::<Result<_>>()?;
        let layout = CacheLayout::new(KvFormat::OSCAR2, layers, heads, d, self.windows, order)?;
        Ok(layout.with_coded_table(FormatTable::new(layers, heads, codecs)?))
    }
}

/// Every kind of rounding: nearest, query-aware with bias correction, bias correction alone.
fn rounding(head_dim: usize, head: usize) -> Result<Rounding> {
    let spectrum: Vec<f32> = (0..head_dim).map(|i| 0.9f32.powi((head_dim - i) as i32)).collect();
    let feedback = match head % 3 {
        1 => Feedback::of_spectrum(&spectrum, Composition::RHPbr)?,
        _ => None,
    };
    Ok(Rounding { unbiased: !head.is_multiple_of(3), feedback })
}

pub fn check<B: Backend<Pool: Inspected>>(
    gpu: &B,
    checks: Checks,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let cases =
        [shapes()?, widths_of_zero()?, many_sequences()?, values()?, layers(extent)?, long_contexts()?];
    for (seed, case) in (101..).zip(cases.into_iter().flatten()) {
        // Caches of several layers are few: a small check takes them too.
        if !extent.takes(seed) && case.layers == 1 {
            continue;
        }
        // A case that cannot run counts as a failure; the other cases still run.
        if let Err(error) = grow(gpu, &case, checks, seed, report) {
            report.case("steps of growing sequences run", f64::INFINITY, 0.0, || {
                format!("{}: {error:#}", case.describe())
            });
        }
    }
    Ok(())
}

/// Every group size with pages of every kind; every pair of widths with odd lengths and several
/// sequences in a step.
fn shapes() -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for group in 1..=16 {
        for head_dim in [64, 128, 256] {
            let widths = match group % 3 {
                0 => vec![],
                1 => vec![(2, 2)],
                _ => vec![(2, 2), (3, 1)],
            };
            let steps = vec![vec![61 + group], vec![1], vec![90], vec![1], vec![1]];
            cases.push(Case::new(head_dim, 2, group, widths, steps)?);
        }
    }
    for key in 1..=4 {
        for value in 1..=4 {
            for head_dim in [64, 128, 256] {
                let steps = vec![vec![130, 17, 1], vec![1, 1, 76], vec![33, 1, 1], vec![1, 1, 1]];
                let widths = vec![(key, value), (value, key), (2, 2)];
                cases.push(Case::new(head_dim, 3, 4, widths, steps)?);
            }
        }
    }
    Ok(cases)
}

/// Zero-width heads beside others and alone, with a sink and without.
fn widths_of_zero() -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for widths in [vec![(0, 0), (2, 2), (3, 1)], vec![(4, 2), (0, 0)], vec![(0, 0)]] {
        let windows = [Windows::new(16, 48)?, Windows::default(), Windows::new(0, 48)?];
        for (head_dim, windows) in [64, 128, 256].into_iter().zip(windows) {
            let steps = vec![vec![500, 17, 1], vec![1, 1, 76], vec![33, 1, 1], vec![1, 1, 1]];
            cases.push(Case { windows, ..Case::new(head_dim, 3, 4, widths.clone(), steps)? });
        }
    }
    Ok(cases)
}

/// Many sequences of uneven lengths, some with a prompt in steps in which the others decode: thread
/// blocks that read several sequences must skip the prompts.
fn many_sequences() -> Result<Vec<Case>> {
    let of_step = |step: usize| -> Vec<usize> {
        let rows = |i: usize| match (i + step) % 3 {
            _ if step == 0 => 3 + i * 37 % 300,
            1 => 2 + i * 13 % 30,
            _ => 1,
        };
        (0..40).map(rows).collect()
    };
    let case = |(head_dim, kv_heads)| {
        Case::new(head_dim, kv_heads, 4, vec![(2, 2), (3, 1)], (0..4).map(of_step).collect())
    };
    [(64, 4), (128, 3), (128, 8)].into_iter().map(case).collect()
}

/// Difficult values.
fn values() -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for pattern in Pattern::ALL {
        for head_dim in [64, 128, 256] {
            let steps = vec![vec![200], vec![1], vec![16], vec![1]];
            let widths = vec![(2, 2), (1, 4), (4, 1), (3, 3)];
            cases.push(Case { pattern, ..Case::new(head_dim, 4, 3, widths, steps)? });
        }
    }
    Ok(cases)
}

/// Several layers. Tiles of earlier steps are quantized for all layers at once before the step; tiles
/// of a prompt's own rows layer by layer. Some steps append inside decode attention.
fn layers(extent: Extent) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for (head_dim, group, sequences) in [(64, 5, 2), (128, 4, 3), (128, 8, 40), (256, 2, 2)] {
        if !extent.fits(sequences, 3) {
            continue;
        }
        // The first sequence demotes a tile in its third step, every other one in another step.
        let mut steps: Vec<Vec<usize>> = vec![(0..sequences).map(|i| 77 - i % 5 + 3 * i).collect()];
        steps.extend((0..if extent.small { 4 } else { 17 }).map(|_| vec![1; sequences]));
        steps.push((0..sequences).map(|i| if i == 0 { 90 } else { 1 }).collect());
        steps.extend([vec![1; sequences], vec![20; sequences], vec![1; sequences]]);
        let widths = vec![(2, 2), (3, 1), (2, 2), (0, 0), (4, 2)];
        cases.push(Case { layers: 3, ..Case::new(head_dim, 2, group, widths, steps)? });
    }
    Ok(cases)
}

/// The usual windows and a context of many pages, in odd chunks.
fn long_contexts() -> Result<Vec<Case>> {
    let steps = [509, 700, 3, 1, 1, 64, 1].map(|n| vec![n]).to_vec();
    let (windows, pattern) = (Windows::default(), Pattern::Outliers);
    let case = |widths| Ok(Case { windows, pattern, ..Case::new(128, 2, 4, widths, steps.clone())? });
    let alone: Vec<Case> = [vec![], vec![(2, 2)]].into_iter().map(case).collect::<Result<_>>()?;
    // Blocks share a context of this length, also beside sequences that decode before and after it.
    let steps = [[2, 3300, 40], [1, 70, 1], [1, 1, 1], [1, 3, 150], [1, 500, 1], [64, 260, 1]];
    let steps = steps.map(Vec::from).to_vec();
    let shared =
        |(head_dim, widths)| Ok(Case { windows, ..Case::new(head_dim, 2, 4, widths, steps.clone())? });
    let shapes =
        [(128, vec![]), (128, vec![(2, 2), (4, 1)]), (64, vec![(2, 2)]), (256, vec![(1, 4), (0, 0)])];
    let shared: Vec<Case> = shapes.into_iter().map(shared).collect::<Result<_>>()?;
    Ok(alone.into_iter().chain(shared).collect())
}

/// Runs a case and compares after every step.
fn grow<B: Backend<Pool: Inspected>>(
    gpu: &B,
    case: &Case,
    checks: Checks,
    seed: u64,
    report: &mut Report,
) -> Result<()> {
    let total: usize = case.steps.iter().map(|s| s.iter().sum::<usize>()).sum();
    let sequences = case.steps[0].len();
    // The scale gives scores of a few units for every pattern.
    let scale = if case.pattern == Pattern::Huge { 1e-12 } else { 1.0 / (case.head_dim as f32).sqrt() };
    let layout = case.layout()?;
    let mut growing =
        Growing::new(gpu, layout, case.group, scale, sequences, total, seed, checks, case.describe())?;
    for rows in &case.steps {
        growing.step(rows, case.pattern, report)?;
    }
    Ok(())
}
