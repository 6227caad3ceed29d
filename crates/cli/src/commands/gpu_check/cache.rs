//! Checks of append, demotion and attention: sequences grow step by step on the GPU while a scalar twin holds what the
//! codec says every page must contain and what attention over it must return.

use super::{Numbers, Report, download, largest_difference, upload};
use anyhow::{Context, Result};
use oscar_backend::{Backend, HeadPreparation, HeadShape, SequenceRows};
use oscar_cache::{PagePool, SequencePages};
use oscar_codec::{
    CacheLayout, CodeLayout, FormatTable, HeadRotations, KvFormat, PAGE_TOKENS, PageCodec, Rotation,
    RowPageCodec, Side, SideSpec, TILE_TOKENS, Windows,
};
use oscar_kernels_cuda::CudaBackend;
use std::collections::HashMap;

/// What rows look like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pattern {
    Plain,
    /// A few channels a thousand times larger.
    Outliers,
    /// Every row constant.
    Constant,
    /// Beyond what the fp16 pair of a code can hold.
    Huge,
    /// Subnormal neighbourhood.
    Tiny,
    Zero,
    /// Ties at the clip threshold.
    Ties,
}

impl Pattern {
    const ALL: [Self; 7] =
        [Self::Plain, Self::Outliers, Self::Constant, Self::Huge, Self::Tiny, Self::Zero, Self::Ties];

    fn row(self, numbers: &mut Numbers, d: usize) -> Vec<f32> {
        let constant = numbers.unit();
        (0..d)
            .map(|i| {
                let x = numbers.unit();
                let x = match self {
                    Self::Plain => x,
                    Self::Outliers if i % 37 == 5 => x * 1000.0,
                    Self::Outliers => x,
                    Self::Constant => constant,
                    Self::Huge => x * 1e6,
                    Self::Tiny => x * 1e-30,
                    Self::Zero => 0.0,
                    Self::Ties => (x * 4.0).round() / 4.0,
                };
                half::bf16::from_f32(x).to_f32()
            })
            .collect()
    }
}

struct Case {
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    /// (key bits, value bits) by head, repeated as needed; none for a BF16 cache.
    widths: Vec<(u32, u32)>,
    windows: Windows,
    pattern: Pattern,
    /// Rows that each sequence brings to each step.
    steps: Vec<Vec<usize>>,
}

impl Case {
    fn describe(&self) -> String {
        format!(
            "head {}, {} KV heads, group {}, widths {:?}, sink {} recent {}, {:?} rows, steps {:?}",
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
        let (d, heads, order) = (self.head_dim, self.kv_heads, CodeLayout::GpuTile);
        if self.widths.is_empty() {
            return Ok(CacheLayout::new(KvFormat::Bf16, 1, heads, d, self.windows, order)?);
        }
        let clips = [(0.96, 0.92), (0.0, 1.0), (0.5, 0.99)];
        let codecs = (0..heads)
            .map(|h| {
                let (key, value) = self.widths[h % self.widths.len()];
                let (key_clip, value_clip) = clips[h % clips.len()];
                RowPageCodec::new(
                    d,
                    SideSpec::affine(key, key_clip),
                    SideSpec::affine(value, value_clip),
                    order,
                )
            })
            .collect::<Result<_, _>>()?;
        let layout = CacheLayout::new(KvFormat::OSCAR2, 1, heads, d, self.windows, order)?;
        Ok(layout.with_coded_table(FormatTable::new(1, heads, codecs)?))
    }
}

/// What one sequence holds, by KV head: rows as stored and as coded.
#[derive(Default, Clone)]
struct HeadTwin {
    keys: Vec<f32>,
    values: Vec<f32>,
    coded_pages: HashMap<usize, Vec<u8>>,
    coded_keys: Vec<f32>,
    coded_values: Vec<f32>,
}

pub fn check(gpu: &CudaBackend, report: &mut Report) -> Result<()> {
    let narrow = Windows::new(16, 48)?;
    let usual = Windows::default();
    let mut seed = 100;
    let mut run = |case: Case, report: &mut Report| -> Result<()> {
        seed += 1;
        // A case that cannot run is a difference too; the others still tell something.
        if let Err(error) = grow(gpu, &case, seed, report) {
            report.case("steps run", f64::INFINITY, 0.0, || format!("{}: {error:#}", case.describe()));
        }
        Ok(())
    };
    // Every group size, with pages of every kind.
    for group in 1..=16 {
        for head_dim in [64, 128, 256] {
            let widths = match group % 3 {
                0 => vec![],
                1 => vec![(2, 2)],
                _ => vec![(2, 2), (3, 1)],
            };
            let steps = vec![vec![61 + group], vec![1], vec![90], vec![1], vec![1]];
            let case = Case {
                head_dim,
                kv_heads: 2,
                group,
                widths,
                windows: narrow,
                pattern: Pattern::Plain,
                steps,
            };
            run(case, report)?;
        }
    }
    // Every pair of widths, odd lengths, several sequences in a step.
    for key in 1..=4 {
        for value in 1..=4 {
            for head_dim in [64, 128, 256] {
                let steps = vec![vec![130, 17, 1], vec![1, 1, 76], vec![33, 1, 1], vec![1, 1, 1]];
                let (widths, windows) = (vec![(key, value), (value, key), (2, 2)], narrow);
                let case =
                    Case { head_dim, kv_heads: 3, group: 4, widths, windows, pattern: Pattern::Plain, steps };
                run(case, report)?;
            }
        }
    }
    // Values that hurt.
    for pattern in Pattern::ALL {
        for head_dim in [64, 128, 256] {
            let steps = vec![vec![200], vec![1], vec![16], vec![1]];
            let widths = vec![(2, 2), (1, 4), (4, 1), (3, 3)];
            let case = Case { head_dim, kv_heads: 4, group: 3, widths, windows: narrow, pattern, steps };
            run(case, report)?;
        }
    }
    // The usual windows and a context of many pages, cut in odd chunks.
    let steps = [509, 700, 3, 1, 1, 64, 1].map(|n| vec![n]).to_vec();
    for widths in [vec![], vec![(2, 2)]] {
        let (windows, steps) = (usual, steps.clone());
        let case =
            Case { head_dim: 128, kv_heads: 2, group: 4, widths, windows, pattern: Pattern::Outliers, steps };
        run(case, report)?;
    }
    prepared_heads(gpu, report)
}

/// Runs a case and compares after every step.
fn grow(gpu: &CudaBackend, case: &Case, seed: u64, report: &mut Report) -> Result<()> {
    let (d, kv_heads, group) = (case.head_dim, case.kv_heads, case.group);
    let layout = case.layout()?;
    let mut numbers = Numbers::new(seed);
    let shape = HeadShape {
        query_heads: kv_heads * group,
        kv_heads,
        head_dim: d,
        rms_norm_eps: 1e-6,
        // Scores of a few units, whatever the rows.
        scale: if case.pattern == Pattern::Huge { 1e-12 } else { 1.0 / (d as f32).sqrt() },
    };
    let total: usize = case.steps.iter().map(|s| s.iter().sum::<usize>()).sum();
    let rope = gpu.rope(&vec![1.0; total * d / 2], &vec![0.0; total * d / 2], d)?;
    let budget = (layout.full_block_bytes() + layout.coded_block_bytes()) * (total / PAGE_TOKENS + 24);
    let (page_pool, mut pool) = (PagePool::new(&layout, budget), gpu.pool(&layout, budget)?);
    let sequences = case.steps[0].len();
    let mut pages: Vec<SequencePages> = (0..sequences).map(|_| SequencePages::new()).collect();
    let mut twins = vec![vec![HeadTwin::default(); kv_heads]; sequences];
    let width = (kv_heads * group + 2 * kv_heads) * d;
    let (mut queries, mut attended) = (gpu.rows(kv_heads * group * d), gpu.rows(kv_heads * group * d));
    for step_rows in &case.steps {
        let mut values = Vec::new();
        for &rows in step_rows {
            for _ in 0..rows {
                for _ in 0..kv_heads * group {
                    values.extend(Pattern::Plain.row(&mut numbers, d));
                }
                for _ in 0..2 * kv_heads {
                    values.extend(case.pattern.row(&mut numbers, d));
                }
            }
        }
        let mut plans = Vec::new();
        for (pages, &rows) in pages.iter_mut().zip(step_rows) {
            plans.push(pages.prepare(&layout, &page_pool, rows)?);
        }
        let mut first = 0;
        let rows: Vec<SequenceRows<'_>> = pages
            .iter()
            .zip(&plans)
            .map(|(pages, plan)| {
                let range = first..first + plan.positions.len();
                first = range.end;
                SequenceRows {
                    rows: range,
                    first_position: plan.positions.start,
                    full: pages.full(),
                    coded: pages.coded(),
                    demote: plan.demote.clone(),
                    demote_values: plan.demote.clone(),
                }
            })
            .collect();
        let mut qkv = upload(gpu, &values, width)?;
        gpu.begin_step(&rows, &mut pool)?;
        let plain = HeadPreparation { qk_norm: None, rotation: None };
        gpu.append(0, &shape, plain, &rope, &rows, &mut qkv, &mut queries, &mut pool)?;
        gpu.demote(0, &rows, &mut pool)?;
        gpu.attention(0, &shape, &rows, &queries, &pool, &mut attended)?;
        let found = download(gpu, &attended)?;

        for (index, s) in rows.iter().enumerate() {
            for head in 0..kv_heads {
                let twin = &mut twins[index][head];
                for row in s.rows.clone() {
                    let at = |h: usize| &values[row * width + h * d..][..d];
                    twin.keys.extend_from_slice(at(kv_heads * group + head));
                    twin.values.extend_from_slice(at(kv_heads * group + kv_heads + head));
                }
                if let Some(table) = layout.coded() {
                    twin.demote(table.codec(0, head), s.demote.clone())?;
                    for position in s.demote.clone().step_by(TILE_TOKENS) {
                        let block = position / PAGE_TOKENS;
                        let id = s.coded.get(block).copied().flatten().context("a coded page")?;
                        let page = pool.read_page(0, head, id.0, true)?;
                        let first = position % PAGE_TOKENS;
                        let differing = twin.differing(table.codec(0, head), block, first, &page);
                        report.case("demoted codes", differing as f64, 0.0, || {
                            format!("{}, position {position}, head {head}, codes", case.describe())
                        });
                    }
                }
            }
        }
        compare_attention(case, &shape, &rows, &twins, &values, width, &found, &mut numbers, report);
        for (pages, plan) in pages.iter_mut().zip(&plans) {
            pages.commit(&layout, plan);
        }
    }
    Ok(())
}

impl HeadTwin {
    /// Codes positions as the codec does and keeps what they decode to.
    fn demote(&mut self, codec: &RowPageCodec, positions: std::ops::Range<usize>) -> Result<()> {
        let d = codec.head_dim();
        self.coded_keys.resize(self.keys.len(), 0.0);
        self.coded_values.resize(self.values.len(), 0.0);
        for position in positions.step_by(TILE_TOKENS) {
            let (block, tile) = (position / PAGE_TOKENS, position % PAGE_TOKENS / TILE_TOKENS);
            let page = self.coded_pages.entry(block).or_insert_with(|| vec![0; codec.page_bytes()]);
            let range = position * d..(position + TILE_TOKENS) * d;
            codec.encode_tile(tile, &self.keys[range.clone()], &self.values[range.clone()], page)?;
            let first = tile * TILE_TOKENS;
            for t in 0..TILE_TOKENS {
                let at = (position + t) * d;
                codec.decode_row(Side::Key, page, first + t, &mut self.coded_keys[at..at + d]);
                codec.decode_row(Side::Value, page, first + t, &mut self.coded_values[at..at + d]);
            }
        }
        Ok(())
    }

    /// Codes and parameters of a tile in which a page differs from the codec's.
    fn differing(&self, codec: &RowPageCodec, block: usize, first: usize, page: &[u8]) -> usize {
        let Some(expected) = self.coded_pages.get(&block) else { return usize::MAX };
        let mut count = 0;
        for token in first..first + TILE_TOKENS {
            for side in [Side::Key, Side::Value] {
                let params = |page| codec.group_params(side, page, token, 0);
                count += usize::from(params(expected) != params(page));
                let code = |page, c| codec.code(side, page, token, c);
                count += (0..codec.head_dim()).filter(|&c| code(expected, c) != code(page, c)).count();
            }
        }
        count
    }
}

/// Attention of some rows of a step, in f64, against what the GPU found.
fn compare_attention(
    case: &Case,
    shape: &HeadShape,
    rows: &[SequenceRows<'_>],
    twins: &[Vec<HeadTwin>],
    values: &[f32],
    width: usize,
    found: &[f32],
    numbers: &mut Numbers,
    report: &mut Report,
) {
    let (d, group) = (shape.head_dim, shape.query_heads / shape.kv_heads);
    for (s, twins) in rows.iter().zip(twins) {
        let count = s.rows.len();
        // All rows of a decode step; first, last and some others of a prefill.
        let mut chosen: Vec<usize> = vec![0, count - 1];
        chosen.extend((0..6).map(|_| numbers.below(count)));
        chosen.sort_unstable();
        chosen.dedup();
        for i in chosen {
            let (row, t) = (s.rows.start + i, s.first_position + i);
            for head in 0..shape.query_heads {
                let twin = &twins[head / group];
                let query = &values[row * width + head * d..][..d];
                let code = |j: usize| !case.widths.is_empty() && case.windows.reads_code(t, j);
                let key = |j: usize| {
                    if code(j) { &twin.coded_keys[j * d..][..d] } else { &twin.keys[j * d..][..d] }
                };
                let value = |j: usize| {
                    if code(j) { &twin.coded_values[j * d..][..d] } else { &twin.values[j * d..][..d] }
                };
                let dot = |k: &[f32]| -> f64 {
                    query.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum()
                };
                let scores: Vec<f64> = (0..=t).map(|j| f64::from(shape.scale) * dot(key(j))).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let mut expected = vec![0f64; d];
                let mut largest = 0f64;
                for (j, w) in weights.iter().enumerate() {
                    for (e, &v) in expected.iter_mut().zip(value(j)) {
                        *e += w / sum * f64::from(v);
                        largest = largest.max(f64::from(v).abs());
                    }
                }
                let at = row * shape.query_heads * d + head * d;
                let difference = largest_difference(&found[at..at + d], &expected);
                let name = if count == 1 { "attention, decode" } else { "attention, prefill" };
                // Weights enter as BF16, half a unit of 2⁻⁸ each, and codes count from a row's minimum, so that what is
                // weighed is up to twice the largest value; twice that bound is allowed.
                report.case(name, difference, largest / 128.0 + 1e-30, || {
                    format!("{}, position {t}, query head {head}", case.describe())
                });
            }
        }
    }
}

/// QK-norm, RoPE, key mean and rotation on the way into the pages.
fn prepared_heads(gpu: &CudaBackend, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(7);
    for d in [64, 128, 256] {
        for (rows, group) in [(1, 4), (50, 5), (3, 16)] {
            let kv_heads = 2;
            let layout =
                CacheLayout::new(KvFormat::Bf16, 1, kv_heads, d, Windows::default(), CodeLayout::GpuTile)?;
            let shape = HeadShape {
                query_heads: kv_heads * group,
                kv_heads,
                head_dim: d,
                rms_norm_eps: 1e-6,
                scale: 1.0,
            };
            let rotation = Rotation::hadamard(d)?;
            let heads: Vec<HeadRotations> = (0..kv_heads)
                .map(|_| HeadRotations {
                    key: rotation.clone(),
                    value: rotation.clone(),
                    key_mean: Some(numbers.vector(d)),
                })
                .collect();
            let (query_norm, key_norm) = (numbers.vector(d), numbers.vector(d));
            let angles: Vec<f32> = (0..rows * d / 2).map(|_| numbers.unit() * 3.0).collect();
            let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
            let width = (kv_heads * group + 2 * kv_heads) * d;
            let values = numbers.vector(rows * width);

            let budget = layout.full_block_bytes() * 4;
            let (page_pool, mut pool) = (PagePool::new(&layout, budget), gpu.pool(&layout, budget)?);
            let mut pages = SequencePages::new();
            let plan = pages.prepare(&layout, &page_pool, rows)?;
            let sequence = [SequenceRows {
                rows: 0..rows,
                first_position: 0,
                full: pages.full(),
                coded: pages.coded(),
                demote: plan.demote.clone(),
                demote_values: plan.demote.clone(),
            }];
            let mut qkv = upload(gpu, &values, width)?;
            let mut queries = gpu.rows(kv_heads * group * d);
            let (layer, rope) = (gpu.layer_rotation(&heads)?, gpu.rope(&cos, &sin, d)?);
            let norms = (gpu.vector(&query_norm)?, gpu.vector(&key_norm)?);
            gpu.begin_step(&sequence, &mut pool)?;
            let preparation = HeadPreparation { qk_norm: Some((&norms.0, &norms.1)), rotation: Some(&layer) };
            gpu.append(0, &shape, preparation, &rope, &sequence, &mut qkv, &mut queries, &mut pool)?;
            let found = download(gpu, &queries)?;
            let what = || format!("head {d}, {rows} rows, group {group}");

            let prepared = |row: usize, head: usize, norm: &[f32]| -> Vec<f64> {
                let x: Vec<f64> =
                    values[row * width + head * d..][..d].iter().map(|&v| f64::from(v)).collect();
                let squares: f64 = x.iter().map(|v| v * v).sum();
                let factor = 1.0 / (squares / d as f64 + 1e-6).sqrt();
                let x: Vec<f64> = x.iter().zip(norm).map(|(v, &w)| v * factor * f64::from(w)).collect();
                let half = d / 2;
                let angle = |i: usize| (f64::from(cos[row * half + i]), f64::from(sin[row * half + i]));
                (0..d)
                    .map(|i| {
                        let (c, s) = angle(i % half);
                        if i < half { x[i] * c - x[i + half] * s } else { x[i] * c + x[i - half] * s }
                    })
                    .collect()
            };
            let rotated = |x: &[f64]| -> Vec<f64> {
                (0..d).map(|j| (0..d).map(|i| x[i] * f64::from(rotation.matrix()[i * d + j])).sum()).collect()
            };
            for row in 0..rows {
                for head in 0..kv_heads * group {
                    let expected = rotated(&prepared(row, head, &query_norm));
                    let at = (row * kv_heads * group + head) * d;
                    report.case(
                        "append, queries",
                        largest_difference(&found[at..at + d], &expected),
                        2e-4,
                        what,
                    );
                }
                for head in 0..kv_heads {
                    let codec = layout.full().codec(0, head);
                    let id = pages.full()[0].context("the first page")?;
                    let page = pool.read_page(0, head, id.0, false)?;
                    let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
                    codec.decode_row(Side::Key, &page, row, &mut key);
                    codec.decode_row(Side::Value, &page, row, &mut value);
                    let mut expected = prepared(row, kv_heads * group + head, &key_norm);
                    let mean = heads[head].key_mean.as_deref().unwrap_or_default();
                    expected.iter_mut().zip(mean).for_each(|(e, &m)| *e -= f64::from(m));
                    let expected = rotated(&expected);
                    let largest = expected.iter().fold(0f64, |a, b| a.max(b.abs()));
                    // Stored in BF16: half a unit in the last of 8 bits.
                    let allowed = largest / 256.0 + 2e-4;
                    report.case("append, keys", largest_difference(&key, &expected), allowed, what);
                    let stored: Vec<f64> = values[row * width + (kv_heads * (group + 1) + head) * d..][..d]
                        .iter()
                        .map(|&v| f64::from(v))
                        .collect();
                    report.case("append, values", largest_difference(&value, &stored), 0.0, what);
                }
            }
        }
    }
    Ok(())
}
