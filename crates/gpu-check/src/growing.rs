//! Sequences that grow on a device beside a scalar twin. The twin holds the rows and codes that the
//! codec puts into every page; reference attention over them is the codec's.

use crate::e4m3::RoundedKeys;
pub use crate::inspected::Inspected;
use crate::scores::Scored;
pub use crate::twin::HeadTwin;
use crate::twin_pages::TwinPages;
use crate::{Numbers, Report, largest_difference, read_all, upload};
use anyhow::Result;
use oscar_backend::{Backend, CacheHead, HeadShape, LayerHeads, SequenceRows, Step, Tap};
use oscar_cache::{PagePool, SequencePages, StepPages};
use oscar_codec::attention::attend_context;
use oscar_codec::{CacheLayout, PAGE_TOKENS, Windows};

/// The values of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    Plain,
    /// A few channels a thousand times larger.
    Outliers,
    /// Every row constant.
    Constant,
    /// Beyond the range of a code's fp16 parameters.
    Huge,
    /// Subnormal neighbourhood.
    Tiny,
    Zero,
    /// Ties at the clip threshold.
    Ties,
}

impl Pattern {
    pub const ALL: [Self; 7] =
        [Self::Plain, Self::Outliers, Self::Constant, Self::Huge, Self::Tiny, Self::Zero, Self::Ties];

    pub fn row(self, numbers: &mut Numbers, d: usize) -> Vec<f32> {
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

/// The results of a step that are compared with the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compared {
    /// Pages of history, after their tiles were quantized.
    pub history: bool,
    /// Attention of sequences that bring one row.
    pub decode: bool,
    /// Attention of sequences that bring several rows.
    pub prefill: bool,
}

impl Compared {
    pub const NOTHING: Self = Self { history: false, decode: false, prefill: false };
    pub const EVERYTHING: Self = Self { history: true, decode: true, prefill: true };
}

/// Names of the checks, and the largest allowed difference of attention.
#[derive(Clone, Copy)]
pub struct Checks {
    pub history: &'static str,
    pub decode: &'static str,
    pub prefill: &'static str,
    /// Largest difference of an output, as a share of the largest value it is a mean of.
    pub allowed: f64,
    /// Prefill attention multiplies keys of at most this many bits in E4M3 ([`crate::e4m3`]).
    pub e4m3_bits: u32,
    pub compared: Compared,
}

/// The rows that each sequence brings to a step, one sequence behind the other.
pub fn rows_of<'a>(pages: &'a [SequencePages], plans: &'a [StepPages]) -> Vec<SequenceRows<'a>> {
    let mut first = 0;
    let rows = |(pages, plan): (&'a SequencePages, &'a StepPages)| {
        let rows = pages.rows(plan, first);
        first = rows.rows.end;
        rows
    };
    pages.iter().zip(plans).map(rows).collect()
}

/// The cache of some sequences, on the device and as a twin.
pub struct Growing<'a, B: Backend> {
    pub gpu: &'a B,
    pub layout: CacheLayout,
    shape: HeadShape,
    pub page_pool: PagePool,
    pub pool: B::Pool,
    pub pages: Vec<SequencePages>,
    /// By sequence, and by layer and KV head.
    pub twins: Vec<Vec<HeadTwin>>,
    rope: B::Rope,
    attended: B::Rows,
    /// Scores of query heads without a value, in all layers, and the same on the device.
    sinks: Option<(Vec<f32>, B::Vector)>,
    numbers: Numbers,
    /// Rows of the next steps, by layer, if they are known already.
    next: Option<Vec<Vec<f32>>>,
    pub checks: Checks,
    what: String,
}

impl<'a, B: Backend<Pool: Inspected>> Growing<'a, B> {
    pub fn new(
        gpu: &'a B,
        layout: CacheLayout,
        group: usize,
        scale: f32,
        sequences: usize,
        total: usize,
        seed: u64,
        checks: Checks,
        what: String,
    ) -> Result<Self> {
        let (d, kv_heads) = (layout.head_dim(), layout.kv_heads());
        let layout = gpu.held_layout(&layout);
        let block = layout.full_block_bytes() + layout.coded_block_bytes() + layout.sliding_block_bytes();
        let budget = block * (total / PAGE_TOKENS + 24);
        let query_heads = kv_heads * group;
        let shape = HeadShape { query_heads, kv_heads, head_dim: d, rms_norm_eps: 1e-6, scale };
        Ok(Self {
            gpu,
            shape,
            page_pool: PagePool::new(&layout, budget),
            pool: gpu.pool(&layout, &shape, budget)?,
            pages: (0..sequences).map(|_| SequencePages::new()).collect(),
            twins: vec![vec![HeadTwin::default(); layout.layers() * kv_heads]; sequences],
            attended: gpu.rows(query_heads * d),
            rope: gpu.rope(&vec![1.0; total * d / 2], &vec![0.0; total * d / 2], d)?,
            layout,
            sinks: None,
            numbers: Numbers::new(seed),
            next: None,
            checks,
            what,
        })
    }

    /// Every layer has these attention sinks, one for each query head.
    pub fn with_sinks(mut self, sinks: Vec<f32>) -> Result<Self> {
        let on_device = self.gpu.vector(&sinks)?;
        self.sinks = Some((sinks, on_device));
        Ok(self)
    }

    /// The next steps bring the rows of this seed.
    pub fn reseed(&mut self, seed: u64) {
        self.numbers = Numbers::new(seed);
    }

    /// The next steps bring these many rows of this seed, the same ones however the steps divide them.
    pub fn bring(&mut self, rows: usize, seed: u64) {
        self.reseed(seed);
        self.next = Some((0..self.layout.layers()).map(|_| self.rows(rows, Pattern::Plain)).collect());
    }

    /// Appends `step_rows[i]` rows to sequence `i`, then compares pages and attention. Returns the
    /// attention of each layer.
    pub fn step(
        &mut self,
        step_rows: &[usize],
        pattern: Pattern,
        report: &mut Report,
    ) -> Result<Vec<Vec<f32>>> {
        self.step_with(step_rows, pattern, None, report)
    }

    /// [`Growing::step`] of one sequence whose queries score its history.
    pub fn scored_step(&mut self, rows: usize, scored: &mut Scored, report: &mut Report) -> Result<()> {
        self.step_with(&[rows], Pattern::Plain, Some(scored), report).map(|_| ())
    }

    fn step_with(
        &mut self,
        step_rows: &[usize],
        pattern: Pattern,
        mut scored: Option<&mut Scored>,
        report: &mut Report,
    ) -> Result<Vec<Vec<f32>>> {
        let HeadShape { query_heads, kv_heads, head_dim: d, .. } = self.shape;
        let (layers, width) = (self.layout.layers(), (query_heads + 2 * kv_heads) * d);
        let count: usize = step_rows.iter().sum();
        let values: Vec<Vec<f32>> = match self.next.as_mut().filter(|next| next[0].len() >= count * width) {
            Some(next) => next.iter_mut().map(|rows| rows.drain(..count * width).collect()).collect(),
            None => (0..layers).map(|_| self.rows(count, pattern)).collect(),
        };
        let mut plans = Vec::new();
        for (pages, &rows) in self.pages.iter_mut().zip(step_rows) {
            plans.push(pages.prepare(&self.layout, &self.page_pool, rows)?);
        }
        let rows = rows_of(&self.pages, &plans);
        let (gpu, pool) = (self.gpu, &mut self.pool);
        let mut projected = Vec::new();
        for values in &values {
            projected.push(upload(gpu, values, width)?);
        }
        let mut found = Vec::new();
        let mut step = gpu.step(&rows, pool)?;
        for (layer, qkv) in projected.iter_mut().enumerate() {
            let heads = LayerHeads {
                layer,
                qk_norm: None,
                rope: &self.rope,
                rotation: None,
                window: self.layout.sliding().filter(|_| self.layout.slides(layer)).map(|s| s.window()),
                sinks: self.sinks.as_ref().map(|(_, on_device)| on_device),
            };
            let tap = scored.as_deref_mut().map(|scored| scored as &mut dyn Tap);
            step.attend(heads, qkv, &mut self.attended, tap)?;
            found.push(read_all::<B>(&mut step, &self.attended, count)?);
        }
        step.finish()?;

        for (s, twins) in rows.iter().zip(&mut self.twins) {
            for (index, twin) in twins.iter_mut().enumerate() {
                let head = CacheHead { layer: index / kv_heads, kv_head: index % kv_heads };
                for row in s.rows.clone() {
                    let at = |h: usize| &values[head.layer][row * width + h * d..][..d];
                    twin.keys.extend_from_slice(at(query_heads + head.kv_head));
                    twin.values.extend_from_slice(at(query_heads + kv_heads + head.kv_head));
                }
                if self.layout.slides(head.layer) {
                    continue;
                }
                twin.demote(&self.layout, pool.storage(), head, [&s.demote, &s.demote_values])?;
                if self.checks.compared.history {
                    let name = self.checks.history;
                    twin.compare_history(&self.layout, pool, head, s, name, &self.what, report)?;
                }
            }
        }
        let references: Vec<Reference<'_>> = values
            .iter()
            .zip(&found)
            .enumerate()
            .map(|(layer, (values, found))| Reference {
                shape: &self.shape,
                layout: &self.layout,
                layer,
                values,
                width,
                found,
                sinks: self.sinks.as_ref().map(|(sinks, _)| sinks.as_slice()),
                checks: self.checks,
                what: format!("{}, layer {layer}", self.what),
            })
            .collect();
        let mut heads = Vec::new();
        for reference in &references {
            for (s, twins) in rows.iter().zip(&self.twins) {
                let twins = &twins[reference.layer * kv_heads..][..kv_heads];
                reference.compared(s, twins, &mut self.numbers, &mut heads);
                if let Some(scored) = scored.as_deref_mut() {
                    let rows = (reference.values, width);
                    scored.expect(&self.shape, &self.layout, reference.layer, rows, s, twins)?;
                }
            }
        }
        compare_all(&heads, report)?;
        for (pages, plan) in self.pages.iter_mut().zip(&plans) {
            pages.commit(&self.layout, plan);
        }
        Ok(found)
    }

    /// `count` rows of `[queries | keys | values]`.
    fn rows(&mut self, count: usize, pattern: Pattern) -> Vec<f32> {
        let HeadShape { query_heads, kv_heads, head_dim: d, .. } = self.shape;
        let mut values = Vec::new();
        for _ in 0..count {
            for _ in 0..query_heads {
                values.extend(Pattern::Plain.row(&mut self.numbers, d));
            }
            for _ in 0..2 * kv_heads {
                values.extend(pattern.row(&mut self.numbers, d));
            }
        }
        values
    }
}

/// Reference attention of a layer's rows, against the device's.
struct Reference<'a> {
    shape: &'a HeadShape,
    layout: &'a CacheLayout,
    layer: usize,
    /// Rows of `[queries | keys | values]`.
    values: &'a [f32],
    width: usize,
    found: &'a [f32],
    sinks: Option<&'a [f32]>,
    checks: Checks,
    what: String,
}

/// The query heads of a step that share a KV head, and some of their rows.
struct ComparedHead<'a> {
    reference: &'a Reference<'a>,
    sequence: &'a SequenceRows<'a>,
    kv_head: usize,
    twin: &'a HeadTwin,
    chosen: Vec<usize>,
    name: &'static str,
}

/// Compares on all cores. The report does not depend on their number.
fn compare_all(heads: &[ComparedHead<'_>], report: &mut Report) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = |heads: &[ComparedHead<'_>]| -> Result<Report> {
        let mut report = Report::default();
        for head in heads {
            head.reference.compare(head, &mut report)?;
        }
        Ok(report)
    };
    let parts: Vec<Result<Report>> = std::thread::scope(|scope| {
        let parts = heads.chunks(heads.len().div_ceil(threads).max(1));
        let running: Vec<_> = parts.map(|part| scope.spawn(move || each(part))).collect();
        running.into_iter().map(|part| part.join().unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
    });
    for part in parts {
        report.absorb(part?);
    }
    Ok(())
}

impl<'a> Reference<'a> {
    /// Adds the heads of a sequence that are to be compared.
    fn compared(
        &'a self,
        sequence: &'a SequenceRows<'a>,
        twins: &'a [HeadTwin],
        numbers: &mut Numbers,
        heads: &mut Vec<ComparedHead<'a>>,
    ) {
        let s = sequence;
        let count = s.rows.len();
        // First, last and some other rows of a prefill.
        let mut chosen: Vec<usize> = vec![0, count - 1];
        chosen.extend((0..6).map(|_| numbers.below(count)));
        chosen.sort_unstable();
        chosen.dedup();
        let Compared { decode, prefill, .. } = self.checks.compared;
        let (wanted, name) = match count {
            1 => (decode, self.checks.decode),
            _ => (prefill, self.checks.prefill),
        };
        if wanted {
            let heads_of = twins.iter().enumerate().map(|(kv_head, twin)| {
                let chosen = chosen.clone();
                ComparedHead { reference: self, sequence, kv_head, twin, chosen, name }
            });
            heads.extend(heads_of);
        }
    }

    fn compare(&self, head: &ComparedHead<'_>, report: &mut Report) -> Result<()> {
        let &ComparedHead { sequence: s, kv_head, twin, ref chosen, name, .. } = head;
        let (shape, d) = (self.shape, self.shape.head_dim);
        let group = shape.query_heads / shape.kv_heads;
        let seen = s.view.map(|view| twin.seen(view, self.layer * shape.kv_heads + kv_head, self.layout));
        let twin = seen.as_ref().unwrap_or(twin);
        let pages = TwinPages::of(twin, self.layout, CacheHead { layer: self.layer, kv_head }, s)?;
        let context = pages.lists();
        let context = context.context();
        let windows: &Windows = &self.layout.layer_windows(self.layer);
        let rows = [&twin.values, &twin.coded_values];
        let largest = rows.into_iter().flatten().fold(0f32, |a, v| a.max(v.abs()));
        let allowed = f64::from(largest) * self.checks.allowed + 1e-30;
        let table = self.layout.coded().filter(|_| !self.layout.slides(self.layer));
        let codec = table.map(|table| table.codec(self.layer, kv_head));
        let bits = if s.view.is_some() { 0 } else { self.checks.e4m3_bits };
        let rounded = RoundedKeys::of(codec, twin, s, windows, bits);
        let mut expected = vec![0f32; d];
        for &i in chosen {
            let (row, t) = (s.rows.start + i, s.first_position + i);
            for head in kv_head * group..(kv_head + 1) * group {
                let query = &self.values[row * self.width + head * d..][..d];
                let sink = self.sinks.map(|sinks| sinks[head]);
                let (exact, allowed) = match rounded.as_ref().filter(|keys| keys.serve(t)) {
                    Some(keys) => {
                        let (exact, bound) = keys.attend(query, shape.scale, t, sink);
                        (exact, allowed + f64::from(largest) * bound)
                    }
                    None => {
                        let mut state = attend_context(query, shape.scale, t, windows, &context);
                        if let Some(sink) = sink {
                            state.add_sink(sink);
                        }
                        state.finish(&mut expected);
                        (expected.iter().copied().map(f64::from).collect(), allowed)
                    }
                };
                let at = (row * shape.query_heads + head) * d;
                let difference = largest_difference(&self.found[at..at + d], &exact);
                report.case(name, difference, allowed, || {
                    format!("{}, position {t}, query head {head}", self.what)
                });
            }
        }
        Ok(())
    }
}
