//! Every CUDA kernel against the scalar reference, then a whole model against the CPU.
//!
//! A [`Part`] names the kernels that it checks. Each part is a test named `<kernel>_matches_scalar`
//! (`tests/matches_scalar.rs`), which runs where a GPU is, and a value of `oscar gpu-check --only`
//! for machines that have only the binary.
//!
//! **Invariant:** a check that has never seen a GPU is known to be right: the unit tests run the
//! checks of pages, attention and picks on the scalar CPU backend, which must pass them.

mod approximate;
mod attention;
mod calibration;
mod dequantized;
mod e4m3;
mod experts;
mod families;
mod fp8_products;
mod fused_append;
mod growing;
mod heads;
mod hybrid;
mod inspected;
mod model;
#[cfg(test)]
mod on_cpu;
mod pages;
mod picks;
mod ranks;
mod report;
mod rows;
mod scores;
mod sliding;
mod twin;
mod twin_pages;
mod views;

pub use report::{Extent, Finding, Report};

use anyhow::Result;
use growing::{Checks, Compared};
use oscar_backend::{Backend, HeadShape, HostMatrix, HostValues, Step};
use oscar_codec::random::SplitMix64;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, Windows};
use oscar_kernels_cuda::{AttentionMode, CudaBackend, CudaError};
use std::str::FromStr;

/// A part of the check that can run by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Embed,
    Norm,
    Gate,
    Gemm,
    Fp8Products,
    Experts,
    Gram,
    Append,
    FusedAppend,
    Demote,
    Decode,
    Prefill,
    PrefillMma,
    Simple,
    Dequantized,
    Sliding,
    Approximate,
    Pages,
    Ranks,
    Pick,
    Views,
    Scores,
    Recode,
    Divergence,
    Model,
    Families,
    Hybrid,
}

/// Each part with the name that `oscar gpu-check --only` takes and one line for `--help`.
#[rustfmt::skip]
const PARTS: [(Part, &str, &str); 27] = [
    (Part::Embed, "embed", "Embedding, with a factor too, and row selection (rows.cu)"),
    (Part::Norm, "norm", "RMSNorm (rows.cu)"),
    (Part::Gate, "gate", "Gates, and norms of the results of products (rows.cu)"),
    (Part::Gemm, "gemm", "Matrix products, BF16 and FP8 weights (skinny_gemm.cu, expand.cu, cuBLASLt)"),
    (Part::Fp8Products, "fp8-products", "Products of FP8 weights and FP8 activations (fp8_products.cu)"),
    (Part::Experts, "experts", "Mixtures of experts: router, lists and products (experts.cu, experts_grouped.cu)"),
    (Part::Gram, "gram", "Gram matrices of calibration (gram.cu)"),
    (Part::Append, "append", "QK-norm, RoPE, rotation and storing of new tokens (append.cu)"),
    (Part::FusedAppend, "fused-append", "Decode attention that also appends the new token (attention_decode.cu)"),
    (Part::Demote, "demote", "Quantization of tiles that leave the recent window (demote.cu)"),
    (Part::Decode, "decode", "Attention of the decode phase (attention_decode.cu)"),
    (Part::Prefill, "prefill", "Attention of prompts by the kernel that this GPU uses"),
    (Part::PrefillMma, "prefill-mma", "Attention of prompts by the kernel of every GPU (attention_prefill.cu)"),
    (Part::Simple, "simple", "Simple attention over codes and BF16 rows (attention_simple.cu)"),
    (Part::Dequantized, "dequantized", "Formats without kernels: simple attention over dequantized history (attention_simple.cu)"),
    (Part::Sliding, "sliding", "Sliding windows and attention sinks (attention_sliding.cu, sinks.cu, all kernels of attention)"),
    (Part::Approximate, "approximate", "Attention after an approximate prefix hit"),
    (Part::Pages, "pages", "Copies of blocks to and from the host (copy_blocks.cu)"),
    (Part::Ranks, "ranks", "Sums over simulated ranks (ranks.cu), and NCCL with one rank where it is installed"),
    (Part::Pick, "pick", "Choice of tokens on the device (pick.cu)"),
    (Part::Views, "views", "Views: rows gathered and read back, attention over them (views.cu and all kernels of attention)"),
    (Part::Scores, "scores", "Attention weights of single rows, for eviction (scores.cu)"),
    (Part::Recode, "recode", "History as its codes dequantize it, for calibration (demote.cu)"),
    (Part::Divergence, "divergence", "KL divergence of rows of logits, for calibration (divergence.cu)"),
    (Part::Model, "model", "The embedded model against the CPU"),
    (Part::Families, "families", "Tiny models of families with experts or sliding windows against the CPU"),
    (Part::Hybrid, "hybrid", "Experts on the CPU beside the GPU, in a random model (--cpu-experts)"),
];

impl Part {
    pub fn all() -> [Self; PARTS.len()] {
        PARTS.map(|(part, ..)| part)
    }

    /// The name that `oscar gpu-check --only` takes.
    pub fn name(self) -> &'static str {
        PARTS[self as usize].1
    }

    /// One line for `--help`.
    pub fn describe(self) -> &'static str {
        PARTS[self as usize].2
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = || Self::all().map(Self::name).join(", ");
        Self::all()
            .into_iter()
            .find(|part| part.name() == name)
            .ok_or_else(|| format!("'{name}' is no part of the check: it may be one of {}", known()))
    }
}

/// GPU 0.
pub fn open() -> Result<CudaBackend, CudaError> {
    CudaBackend::open(0)
}

fn open_with(attention: AttentionMode) -> Result<CudaBackend, CudaError> {
    CudaBackend::open_with(0, attention)
}

/// Parts whose results come from the same steps.
const TOGETHER: [Part; 3] = [Part::Demote, Part::Decode, Part::Prefill];

/// Runs these parts on a GPU that [`open`] opened. `begins` gets the name of each before it runs.
pub fn check(gpu: &CudaBackend, parts: &[Part], extent: Extent, mut begins: impl FnMut(&str)) -> Report {
    let mut report = Report::default();
    let wants = |part| parts.contains(&part);
    let compared =
        Compared { history: wants(Part::Demote), decode: wants(Part::Decode), prefill: wants(Part::Prefill) };
    if compared != Compared::NOTHING {
        begins("attention");
        let checks = Checks { e4m3_bits: gpu.e4m3_key_bits(), compared, ..attention::FAST };
        report.part("attention", |report| attention::check(gpu, checks, extent, report));
    }
    for &part in parts.iter().filter(|part| !TOGETHER.contains(part)) {
        begins(part.name());
        report.part(part.name(), |report| check_part(gpu, part, extent, report));
    }
    report
}

fn check_part(gpu: &CudaBackend, part: Part, extent: Extent, report: &mut Report) -> Result<()> {
    match part {
        Part::Embed => rows::embeddings(gpu, report),
        Part::Norm => rows::norms(gpu, report),
        Part::Gate => {
            rows::gates(gpu, report)?;
            rows::other_outputs(gpu, report)
        }
        Part::Gemm => rows::gemm(gpu, extent, report),
        Part::Gram => rows::grams(gpu, report),
        // See `TOGETHER`.
        Part::Demote | Part::Decode | Part::Prefill => Ok(()),
        Part::PrefillMma => {
            let gpu = open_with(AttentionMode::Mma)?;
            attention::check(&gpu, attention::MMA, extent, report)?;
            approximate::check(&gpu, 0, extent, report)
        }
        Part::Simple => {
            attention::check(&open_with(AttentionMode::Simple)?, attention::SIMPLE, extent, report)
        }
        Part::Fp8Products => fp8_products::check(extent, report),
        Part::Experts => experts::check(gpu, extent, report),
        Part::Append => heads::check(gpu, report),
        Part::FusedAppend => fused_append::check(gpu, extent, report),
        Part::Dequantized => dequantized::check(gpu, extent, report),
        Part::Sliding => check_sliding(gpu, extent, report),
        Part::Approximate => approximate::check(gpu, gpu.e4m3_key_bits(), extent, report),
        Part::Pages => pages::check(gpu, extent, report),
        Part::Ranks => ranks::check(gpu, report),
        Part::Pick => picks::check(gpu, extent, report),
        Part::Views => check_views(gpu, extent, report),
        Part::Scores => scores::check(gpu, extent, report),
        Part::Recode => calibration::check_recode(gpu, extent, report),
        Part::Divergence => calibration::check_divergence(gpu, extent, report),
        Part::Model => model::check(extent, report),
        Part::Families => families::check(extent, report),
        Part::Hybrid => hybrid::check(extent, report),
    }
}

/// Sliding windows and sinks, with every kernel of attention of the other layers.
fn check_sliding(gpu: &CudaBackend, extent: Extent, report: &mut Report) -> Result<()> {
    sliding::check(gpu, sliding::AUTO, gpu.e4m3_key_bits(), extent, report)?;
    // The kernels of sliding layers are the same.
    let some = Extent { every: 3 * extent.every, ..extent };
    sliding::check_sinks(&open_with(AttentionMode::Mma)?, sliding::MMA, 0, some, report)?;
    sliding::check_sinks(&open_with(AttentionMode::Simple)?, sliding::SIMPLE, 0, some, report)
}

/// Views, with every kernel of attention that may read them: all cases with the default kernels, a
/// part of them with each of the others.
fn check_views(gpu: &CudaBackend, extent: Extent, report: &mut Report) -> Result<()> {
    let bits = gpu.e4m3_key_bits();
    views::check(
        gpu,
        views::checks("views, decode attention", "views, prefill attention", bits),
        extent,
        report,
    )?;
    let extent = Extent { every: extent.every * 4, ..extent };
    for (mode, decode, prefill, bits) in [
        (AttentionMode::Apart, "views, decode attention after append", "views, prefill attention", bits),
        (AttentionMode::F16, "views, decode attention", "views, prefill attention in FP16", 0),
        (AttentionMode::Mma, "views, decode attention", "views, prefill attention, mma.sync", 0),
        (AttentionMode::Simple, "views, simple decode", "views, simple prefill", 0),
    ] {
        views::check(&open_with(mode)?, views::checks(decode, prefill, bits), extent, report)?;
    }
    Ok(())
}

/// Deterministic numbers that are exact in BF16.
struct Numbers(SplitMix64);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// Uniform in ±1.
    fn unit(&mut self) -> f32 {
        half::bf16::from_f32(self.0.symmetric()).to_f32()
    }

    fn below(&mut self, n: usize) -> usize {
        self.0.below(n)
    }

    fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
}

/// Rows on the device with these values, which must be exact in BF16. They are the rows of an
/// embedding table.
fn upload<B: Backend>(gpu: &B, values: &[f32], width: usize) -> Result<B::Rows> {
    let count = values.len() / width;
    let table = gpu.matrix(HostMatrix {
        outputs: count,
        inputs: width,
        values: HostValues::F32(values),
        bias: None,
    })?;
    let tokens: Vec<u32> = (0..count as u32).collect();
    let mut rows = gpu.rows(width);
    without_cache(gpu, |step| Ok(step.embed(&table, &tokens, 1.0, &mut rows)?))?;
    Ok(rows)
}

/// The first `count` of these rows.
fn download<B: Backend>(gpu: &B, rows: &B::Rows, count: usize) -> Result<Vec<f32>> {
    without_cache(gpu, |step| read_all::<B>(step, rows, count))
}

fn read_all<B: Backend>(step: &mut B::Step<'_>, rows: &B::Rows, count: usize) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    step.read(rows, &(0..count).collect::<Vec<_>>(), &mut values)?;
    Ok(values)
}

/// Runs operations that touch no cache in a step without sequences.
fn without_cache<B: Backend, T>(gpu: &B, run: impl FnOnce(&mut B::Step<'_>) -> Result<T>) -> Result<T> {
    let heads = HeadShape { query_heads: 1, kv_heads: 1, head_dim: 64, rms_norm_eps: 1e-6, scale: 1.0 };
    let layout = CacheLayout::new(KvFormat::Bf16, 1, 1, 64, Windows::unlimited(), CodeLayout::Logical)?;
    let layout = gpu.held_layout(&layout);
    let mut pool = gpu.pool(&layout, &heads, layout.full_block_bytes())?;
    let mut step = gpu.step(&[], &mut pool)?;
    let done = run(&mut step)?;
    step.finish()?;
    Ok(done)
}

/// Largest absolute difference; infinite if any value is NaN or the lengths differ.
fn largest_difference(found: &[f32], expected: &[f64]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let difference = |(f, e): (&f32, &f64)| {
        let d = (f64::from(*f) - e).abs();
        if d.is_nan() { f64::INFINITY } else { d }
    };
    found.iter().zip(expected).map(difference).fold(0.0, f64::max)
}
