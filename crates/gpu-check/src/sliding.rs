//! Checks of layers with a sliding window and of attention sinks: sequences grow step by step, in chunks
//! shorter and longer than the windows and token by token, several together.

use crate::attention::FAST;
use crate::growing::{Checks, Compared, Growing, Inspected, Pattern};
use crate::heads::rotated_heads;
use crate::{Extent, Numbers, Report, largest_difference, read_all, upload};
use anyhow::Result;
use oscar_backend::{Backend, HeadShape, LayerHeads, Step};
use oscar_cache::{PagePool, SequencePages};
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, KvFormat, PAGE_TOKENS, Windows};

/// Layers of a case. In caches with a window all but the second slide.
const LAYERS: usize = 3;
const SLIDING: [usize; 2] = [0, 2];

/// Names of the checks, of decoding and of prompts.
#[derive(Clone, Copy)]
pub struct Names {
    windows: [&'static str; 2],
    sinks: [&'static str; 2],
    /// In layers of both kinds.
    both: [&'static str; 2],
    centred: &'static str,
}

macro_rules! names {
    ($suffix:literal) => {
        Names {
            windows: [
                concat!("sliding windows, decode", $suffix),
                concat!("sliding windows, prefill", $suffix),
            ],
            sinks: [concat!("sinks, decode", $suffix), concat!("sinks, prefill", $suffix)],
            both: [
                concat!("sinks and sliding windows, decode", $suffix),
                concat!("sinks and sliding windows, prefill", $suffix),
            ],
            centred: concat!("sinks under centred keys", $suffix),
        }
    };
}

/// With the kernels that `auto` chooses for the other layers, with those of every GPU, and with the
/// simple one.
pub const AUTO: Names = names!("");
pub const MMA: Names = names!(", mma.sync");
pub const SIMPLE: Names = names!(", simple");

struct Case {
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    /// Of the sliding layers, if there are some.
    window: Option<usize>,
    sinks: bool,
    /// (key bits, value bits) of the other layers by head, repeated; none for a BF16 cache.
    widths: Vec<(u32, u32)>,
    /// Another format of these layers.
    format: Option<&'static str>,
    /// Rows that each sequence brings to each step.
    steps: Vec<Vec<usize>>,
}

impl Case {
    fn describe(&self) -> String {
        format!(
            "head {}, {} KV heads, group {}, window {:?}, sinks {}, widths {:?}, format {:?}, steps {:?}",
            self.head_dim,
            self.kv_heads,
            self.group,
            self.window,
            self.sinks,
            self.widths,
            self.format,
            self.steps
        )
    }

    fn layout(&self) -> Result<CacheLayout> {
        let (d, heads, order, windows) =
            (self.head_dim, self.kv_heads, CodeLayout::GpuTile, Windows::new(16, 48)?);
        let layout = match (self.format, self.widths.is_empty()) {
            (Some(name), _) => {
                let format: KvFormat = name.parse()?;
                let own = format.windows(None, None)?;
                let windows = if own.sides_agree() { windows } else { own };
                CacheLayout::new(format, LAYERS, heads, d, windows, order)?
            }
            (None, true) => CacheLayout::new(KvFormat::Bf16, LAYERS, heads, d, windows, order)?,
            (None, false) => {
                let widths: Vec<_> = self.widths.iter().copied().cycle().take(LAYERS * heads).collect();
                let layout = CacheLayout::new(KvFormat::OSCAR2, LAYERS, heads, d, windows, order)?;
                layout.with_coded_table(FormatTable::from_widths(LAYERS, heads, d, &widths, order)?)
            }
        };
        Ok(match self.window {
            Some(window) => layout.with_sliding_layers(window, &SLIDING)?,
            None => layout,
        })
    }
}

/// Everything: sliding windows alone, sinks, and sinks under centred keys.
pub fn check<B: Backend<Pool: Inspected>>(
    gpu: &B,
    names: Names,
    e4m3_bits: u32,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let mut seed = 500;
    for window in [1, 7, 24, 64, 65, 100, 128, 200] {
        for (head_dim, kv_heads, group) in
            [(64, 2, 8), (64, 1, 1), (64, 3, 5), (128, 2, 2), (128, 1, 16), (256, 1, 4), (256, 2, 1)]
        {
            seed += 1;
            if !extent.takes(seed) {
                continue;
            }
            let steps = vec![
                vec![61, 3, 1, 130],
                vec![1, 1, 1, 1],
                vec![90, 17, 200, 1],
                vec![1, 1, 2, 1],
                vec![64, 129, 3, 1],
                vec![1, 1, 1, 1],
            ];
            let widths = if seed % 2 == 0 { vec![(2, 2), (3, 1)] } else { vec![] };
            let case = Case {
                head_dim,
                kv_heads,
                group,
                window: Some(window),
                sinks: false,
                widths,
                format: None,
                steps,
            };
            run(gpu, &case, names.windows, e4m3_bits, seed, report);
        }
    }
    // A published window, and a chunk of several windows.
    for (head_dim, group, window) in [(128, 2, 1024), (256, 4, 512), (64, 8, 128)] {
        seed += 1;
        if extent.small {
            break;
        }
        let steps = [vec![1100, 5], vec![1, 1], vec![1500, 700], vec![1, 1], vec![1, 64]].to_vec();
        let case = Case {
            head_dim,
            kv_heads: 1,
            group,
            window: Some(window),
            sinks: false,
            widths: vec![],
            format: None,
            steps,
        };
        run(gpu, &case, names.windows, e4m3_bits, seed, report);
    }
    // Formats that a GPU keeps dequantized.
    for (name, head_dim, group) in [("kivi2", 64, 4), ("int8", 128, 2)] {
        seed += 1;
        let (window, steps) = (Some(24), vec![vec![150, 1], vec![1, 90], vec![1, 1], vec![40, 1]]);
        let (sinks, widths, format) = (true, vec![], Some(name));
        let case = Case { head_dim, kv_heads: 2, group, window, sinks, widths, format, steps };
        run(gpu, &case, names.both, 0, seed, report);
    }
    check_sinks(gpu, names, e4m3_bits, extent, report)?;
    check_centred(gpu, names, extent, report)
}

/// Sinks in sliding layers and in others, over codes and BF16 rows.
pub fn check_sinks<B: Backend<Pool: Inspected>>(
    gpu: &B,
    names: Names,
    e4m3_bits: u32,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let mut seed = 700;
    for window in [None, Some(24), Some(128)] {
        let of_window = if window.is_some() { names.both } else { names.sinks };
        for (head_dim, kv_heads, group) in
            [(64, 2, 8), (64, 8, 8), (64, 1, 16), (128, 2, 4), (128, 1, 5), (256, 1, 4), (256, 1, 12)]
        {
            for widths in [vec![], vec![(2, 2)], vec![(2, 2), (4, 1), (0, 0)]] {
                seed += 1;
                if !extent.takes(seed) {
                    continue;
                }
                let mut steps =
                    vec![vec![161, 17, 1], vec![1, 1, 1], vec![33, 1, 90], vec![1, 1, 1], vec![200, 2, 1]];
                if seed % 5 == 0 {
                    // A short chunk behind a long context: several blocks share it.
                    steps.extend([vec![1700, 1, 1], vec![40, 1, 1], vec![1, 1, 1]]);
                }
                let case =
                    Case { head_dim, kv_heads, group, window, sinks: true, widths, format: None, steps };
                run(gpu, &case, of_window, e4m3_bits, seed, report);
            }
        }
    }
    Ok(())
}

/// Runs a case and compares after every step. A case that cannot run counts as a failure; the other cases
/// still run.
fn run<B: Backend<Pool: Inspected>>(
    gpu: &B,
    case: &Case,
    [decode, prefill]: [&'static str; 2],
    e4m3_bits: u32,
    seed: u64,
    report: &mut Report,
) {
    let checks = Checks { history: "codes beside sliding layers", e4m3_bits, ..FAST };
    let checks = Checks { compared: Compared::EVERYTHING, decode, prefill, ..checks };
    if let Err(error) = grow(gpu, case, checks, seed, report) {
        report.case("steps of sliding layers run", f64::INFINITY, 0.0, || {
            format!("{}: {error:#}", case.describe())
        });
    }
}

fn grow<B: Backend<Pool: Inspected>>(
    gpu: &B,
    case: &Case,
    checks: Checks,
    seed: u64,
    report: &mut Report,
) -> Result<()> {
    let total: usize = case.steps.iter().map(|s| s.iter().sum::<usize>()).sum();
    let (sequences, scale) = (case.steps[0].len(), 1.0 / (case.head_dim as f32).sqrt());
    let layout = case.layout()?;
    let mut growing =
        Growing::new(gpu, layout, case.group, scale, sequences, total, seed, checks, case.describe())?;
    if case.sinks {
        growing = growing.with_sinks(sinks(&mut Numbers::new(seed), case.kv_heads * case.group))?;
    }
    for rows in &case.steps {
        growing.step(rows, Pattern::Plain, report)?;
    }
    Ok(())
}

/// Sinks of all sizes: without weight, about as heavy as a window, far heavier than all scores.
fn sinks(numbers: &mut Numbers, count: usize) -> Vec<f32> {
    let of_head = |h: usize| match h % 4 {
        0 => numbers.unit(),
        1 => 4.0 + numbers.unit(),
        2 => -60.0,
        _ => 9.0 * numbers.unit(),
    };
    (0..count).map(of_head).collect()
}

/// A sink moves with the scores that a key mean shifts: attention over centred, rotated keys against
/// attention over the keys themselves.
pub fn check_centred<B: Backend>(gpu: &B, names: Names, extent: Extent, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(77);
    for (index, (head_dim, group)) in [(64, 8), (128, 4), (256, 2), (64, 5)].into_iter().enumerate() {
        for window in [9, 70] {
            if extent.small && index > 0 {
                continue;
            }
            centred(gpu, &mut numbers, (head_dim, group, window), names.centred, report)?;
        }
    }
    Ok(())
}

const KV_HEADS: usize = 2;

/// A prompt of a single sequence, then tokens one by one, in a sliding layer and one that is none.
fn centred<B: Backend>(
    gpu: &B,
    numbers: &mut Numbers,
    (d, group, window): (usize, usize, usize),
    name: &str,
    report: &mut Report,
) -> Result<()> {
    let steps = [100, 1, 20, 1, 1];
    let (total, query_heads): (usize, usize) = (steps.iter().sum(), KV_HEADS * group);
    let width = (query_heads + 2 * KV_HEADS) * d;
    let windows = Windows::default();
    let layout = CacheLayout::new(KvFormat::Bf16, 2, KV_HEADS, d, windows, CodeLayout::GpuTile)?;
    let layout = gpu.held_layout(&layout.with_sliding_layers(window, &[0])?);
    let scale = 1.0 / (d as f32).sqrt();
    let shape = HeadShape { query_heads, kv_heads: KV_HEADS, head_dim: d, rms_norm_eps: 1e-6, scale };
    let budget = (layout.full_block_bytes() + layout.sliding_block_bytes()) * (total / PAGE_TOKENS + 4);
    let (page_pool, mut pool) = (PagePool::new(&layout, budget), gpu.pool(&layout, &shape, budget)?);
    let mut heads = rotated_heads(numbers, KV_HEADS, d)?;
    for mean in heads.iter_mut().flat_map(|head| &mut head.key_mean) {
        mean.iter_mut().for_each(|m| *m *= 3.0);
    }
    let (rotation, rope) =
        (gpu.layer_rotation(&heads)?, gpu.rope(&vec![1.0; total * d / 2], &vec![0.0; total * d / 2], d)?);
    // About as heavy as what a row sees.
    let sinks: Vec<f32> = (0..query_heads).map(|_| 3.0 + numbers.unit()).collect();
    let on_device = gpu.vector(&sinks)?;
    let (mut pages, mut rows): (_, Vec<Vec<f32>>) = (SequencePages::new(), Vec::new());
    for count in steps {
        let new = numbers.vector(count * width);
        let plan = pages.prepare(&layout, &page_pool, count)?;
        let first = rows.len();
        rows.extend(new.chunks_exact(width).map(<[f32]>::to_vec));
        let mut attended = gpu.rows(query_heads * d);
        let mut found = Vec::new();
        {
            let sequence = [pages.rows(&plan, 0)];
            let mut step_rows = [upload(gpu, &new, width)?, upload(gpu, &new, width)?];
            let mut step = gpu.step(&sequence, &mut pool)?;
            for (layer, qkv) in step_rows.iter_mut().enumerate() {
                let heads = LayerHeads {
                    layer,
                    qk_norm: None,
                    rope: &rope,
                    rotation: Some(&rotation),
                    window: (layer == 0).then_some(window),
                    sinks: Some(&on_device),
                };
                step.attend(heads, qkv, &mut attended, None)?;
                found.push(read_all::<B>(&mut step, &attended, count)?);
            }
            step.finish()?;
        }
        for (layer, found) in found.iter().enumerate() {
            for (i, out) in found.chunks_exact(query_heads * d).enumerate() {
                let t = first + i;
                let seen = if layer == 0 { (t + 1).saturating_sub(window)..t + 1 } else { 0..t + 1 };
                for (head, out) in out.chunks_exact(d).enumerate() {
                    let exact =
                        attention(&rows[seen.clone()], &rows[t], (head, group, d), scale, sinks[head]);
                    // Keys are at most 4 and stored with a relative error of 2^-9, queries and weights
                    // are rounded as much: scores of d products of at most 1 · 4 are 2^-6 off at most,
                    // far less on average, and a mean of values up to 1 moves by as much.
                    report.case(name, largest_difference(out, &exact), 1.0 / 64.0, || {
                        format!("head {d}, group {group}, window {window}, layer {layer}, position {t}, head {head}")
                    });
                }
            }
        }
        pages.commit(&layout, &plan);
    }
    Ok(())
}

/// Attention of a query head of a row over rows of `[queries | keys | values]`.
fn attention(
    seen: &[Vec<f32>],
    row: &[f32],
    (head, group, d): (usize, usize, usize),
    scale: f32,
    sink: f32,
) -> Vec<f64> {
    let (query, query_heads, kv_head) = (&row[head * d..][..d], KV_HEADS * group, head / group);
    let score = |row: &Vec<f32>| {
        let key = &row[(query_heads + kv_head) * d..][..d];
        query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() * f64::from(scale)
    };
    let weights: Vec<f64> = seen.iter().map(|row| score(row).exp()).collect();
    let total = weights.iter().sum::<f64>() + f64::from(sink).exp();
    let value = |row: &Vec<f32>, c: usize| f64::from(row[(query_heads + KV_HEADS + kv_head) * d + c]);
    (0..d).map(|c| weights.iter().zip(seen).map(|(w, row)| w * value(row, c)).sum::<f64>() / total).collect()
}
