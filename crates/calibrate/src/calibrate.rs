//! A calibration from the first token to the finished rotations.

use crate::bits::BitPlan;
use crate::clip_fit::{self, HeadRows};
use crate::error::CalibrateError;
use crate::moments::{HeadGrid, HeadStatistics, Moments};
use crate::options::{CalibrationOptions, ClipPolicy, Granularity, MemoryPlan};
use crate::parallel;
use crate::quality::{logit_energy, measure};
use crate::report::{CalibrationReport, HeadReport};
use crate::rotation_file::{Clips, Metadata, RotationFile};
use crate::sample::{HeadSample, RowSample, rotate_rows};
use crate::spectrum::Spectrum;
use crate::symmetric::Symmetric;
use crate::text_input::digest;
use oscar_backend::Backend;
use oscar_codec::format::default_clip;
use oscar_codec::{CacheLayout, CodeLayout, HeadRotations, KvFormat, Rotation, RotationSet, Side, Windows};
use oscar_models::Transformer;
use oscar_runner::{KvMemory, Logits, Runner, Sequence, StepOutput, StepRequest};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Fewer tokens do not fill the statistics of a head.
const LEAST_TOKENS: usize = 64;

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Running the text, pass `pass` of `passes` (from 1).
    Running { pass: usize, passes: usize },
    /// Turning statistics into rotations; counts layers instead of tokens.
    Solving,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub stage: Stage,
    pub done: usize,
    pub total: usize,
}

/// What a calibration gives.
#[derive(Clone, Debug)]
pub struct Calibration {
    pub file: RotationFile,
    pub report: CalibrationReport,
    pub plan: MemoryPlan,
}

/// Calibrates a model on token sequences.
///
/// `transformer` must have been built without rotations: its values would come out rotated. `fingerprint` is that
/// of its weights and ties the file to them. Setting `cancelled` ends the run within a chunk.
pub fn calibrate<B: Backend>(
    backend: &Arc<B>,
    transformer: &Transformer<B>,
    fingerprint: &str,
    sequences: &[Vec<u32>],
    options: &CalibrationOptions,
    progress: &mut dyn FnMut(Progress),
    cancelled: &AtomicBool,
) -> Result<Calibration, CalibrateError> {
    options.check()?;
    let config = transformer.config();
    let mut plan = options.plan(config);
    plan.sequence_len = plan.sequence_len.min(transformer.max_positions());
    let pieces = pieces(sequences, &plan, options.tokens, config.vocab_size)?;
    let lengths: Vec<usize> = pieces.iter().map(|piece| piece.len()).collect();
    let tokens: usize = lengths.iter().sum();

    let grid = HeadGrid::of(config);
    let sample = RowSample::new(grid.heads(), grid.head_dim, &lengths, plan.sample_rows, options.seed);
    let mut moments = Moments::new(grid, options.statistic, sample);
    run(backend, transformer, &pieces, &plan, options, &mut moments, progress, cancelled)?;

    let (statistics, sample) = moments.finish();
    let solved = solve(grid, statistics, &sample, options, progress, cancelled)?;
    let metadata = Metadata {
        model_fingerprint: Some(fingerprint.to_owned()),
        granularity: options.granularity,
        statistic: options.statistic.name().to_owned(),
        composition: options.composition.name().to_owned(),
        centred: options.centre_keys,
        clip: options.clip.name().to_owned(),
        clip_bits: options.bits,
        tokens,
        sequences: pieces.len(),
        sequence_len: plan.sequence_len,
        text_digest: Some(digest(&pieces)),
        tool: format!("oscar {}", env!("CARGO_PKG_VERSION")),
        note: format!("{}, seed {}", config.family.architecture(), options.seed),
    };
    assemble(grid, solved, sample.rows(), metadata, options, plan)
}

/// Cuts sequences to length and budget and checks their tokens.
fn pieces<'a>(
    sequences: &'a [Vec<u32>],
    plan: &MemoryPlan,
    budget: usize,
    vocabulary: usize,
) -> Result<Vec<&'a [u32]>, CalibrateError> {
    let mut left = budget;
    let mut pieces = Vec::new();
    for (index, sequence) in sequences.iter().enumerate() {
        if let Some(&token) = sequence.iter().find(|&&t| t as usize >= vocabulary) {
            return Err(CalibrateError::Token { sequence: index, token, vocabulary });
        }
        for piece in sequence.chunks(plan.sequence_len) {
            let piece = &piece[..piece.len().min(left)];
            left -= piece.len();
            if !piece.is_empty() {
                pieces.push(piece);
            }
        }
    }
    let found = budget - left;
    if found < LEAST_TOKENS {
        return Err(CalibrateError::TooFewTokens { found, needed: LEAST_TOKENS });
    }
    Ok(pieces)
}

/// Runs every pass over the text with an unrotated BF16 cache.
fn run<B: Backend>(
    backend: &Arc<B>,
    transformer: &Transformer<B>,
    pieces: &[&[u32]],
    plan: &MemoryPlan,
    options: &CalibrationOptions,
    moments: &mut Moments,
    progress: &mut dyn FnMut(Progress),
    cancelled: &AtomicBool,
) -> Result<(), CalibrateError> {
    let config = transformer.config();
    if config.latent.is_some() {
        return Err(CalibrateError::Latent);
    }
    let layout = CacheLayout::new(
        KvFormat::Bf16,
        config.cache_layers(),
        config.kv_heads,
        config.head_dim,
        Windows::unlimited(),
        CodeLayout::Logical,
    )?
    .with_states(config.state_bytes());
    let room = KvMemory::Sequences { count: 1, tokens: pieces.iter().map(|p| p.len()).max().unwrap_or(0) };
    let mut runner = Runner::new(backend.clone(), transformer.clone(), &layout, room, plan.chunk)?;
    let mut output = StepOutput::default();
    let total = pieces.iter().map(|p| p.len()).sum();
    let passes = Moments::passes(options.statistic);
    for pass in 0..passes {
        let mut tap = moments.pass(pass);
        let stage = Stage::Running { pass: pass + 1, passes };
        progress(Progress { stage, done: 0, total });
        for piece in pieces {
            let mut sequence = Sequence::new();
            for tokens in piece.chunks(plan.chunk) {
                if cancelled.load(Ordering::Relaxed) {
                    return Err(CalibrateError::Cancelled);
                }
                let request = StepRequest { sequence: &mut sequence, tokens, logits: Logits::None };
                runner.tapped_step(&mut [request], &mut output, Some(&mut tap))?;
                tap.first_token += tokens.len();
                progress(Progress { stage, done: tap.first_token, total });
            }
        }
    }
    Ok(())
}

/// One head, solved.
struct SolvedHead {
    rotations: HeadRotations,
    clips: (f64, f64),
    report: HeadReport,
}

/// Turns statistics into rotations, layer by layer, each layer's statistics being freed as it is done.
fn solve(
    grid: HeadGrid,
    statistics: Vec<HeadStatistics>,
    sample: &RowSample,
    options: &CalibrationOptions,
    progress: &mut dyn FnMut(Progress),
    cancelled: &AtomicBool,
) -> Result<Vec<Vec<SolvedHead>>, CalibrateError> {
    let mut statistics = statistics.into_iter();
    let threads = parallel::thread_count(options.threads);
    let mut solved = Vec::with_capacity(grid.layers);
    while solved.len() < grid.layers {
        progress(Progress { stage: Stage::Solving, done: solved.len(), total: grid.layers });
        let first = solved.len();
        let batch: Vec<Vec<HeadStatistics>> = (first..grid.layers.min(first + threads))
            .map(|_| statistics.by_ref().take(grid.kv_heads).collect())
            .collect();
        solved.extend(parallel::map(threads, batch, |index, heads| {
            match cancelled.load(Ordering::Relaxed) {
                true => Err(CalibrateError::Cancelled),
                false => solve_layer(first + index, heads, sample, options),
            }
        })?);
    }
    progress(Progress { stage: Stage::Solving, done: grid.layers, total: grid.layers });
    Ok(solved)
}

/// Both spectra of one head, or of a whole layer.
struct Bases {
    key: Spectrum,
    value: Spectrum,
    key_rotation: Rotation,
    value_rotation: Rotation,
}

impl Bases {
    fn of(
        query: &Symmetric,
        value: &Symmetric,
        layer: usize,
        head: usize,
        options: &CalibrationOptions,
    ) -> Result<Self, CalibrateError> {
        let spectrum = |what, matrix: &Symmetric| {
            if !matrix.is_finite() {
                return Err(CalibrateError::NotFinite { what, layer, head });
            }
            Spectrum::of(matrix).ok_or(CalibrateError::NoConvergence { what, layer, head })
        };
        let key = spectrum("query statistic", query)?;
        let value = spectrum("value statistic", value)?;
        let key_rotation = key.rotation(options.composition)?;
        let value_rotation = value.rotation(options.composition)?;
        Ok(Self { key, value, key_rotation, value_rotation })
    }
}

fn solve_layer(
    layer: usize,
    heads: Vec<HeadStatistics>,
    sample: &RowSample,
    options: &CalibrationOptions,
) -> Result<Vec<SolvedHead>, CalibrateError> {
    let shared = match options.granularity {
        Granularity::Head => None,
        Granularity::Layer => {
            let (query, value) = layer_mean(&heads);
            Some(Bases::of(&query, &value, layer, 0, options)?)
        }
    };
    let kv_heads = heads.len();
    let mut solved = Vec::with_capacity(kv_heads);
    for (head, statistics) in heads.into_iter().enumerate() {
        let own;
        let bases = match &shared {
            Some(bases) => bases,
            None => {
                own = Bases::of(&statistics.query, &statistics.value, layer, head, options)?;
                &own
            }
        };
        let sample = sample.head(layer * kv_heads + head);
        solved.push(solve_head(layer, head, &statistics, bases, &sample, options)?);
    }
    Ok(solved)
}

/// The official per-layer statistics: the mean over heads.
fn layer_mean(heads: &[HeadStatistics]) -> (Symmetric, Symmetric) {
    let d = heads.first().map_or(0, |h| h.query.dim());
    let (mut query, mut value) = (Symmetric::zeros(d), Symmetric::zeros(d));
    for head in heads {
        query.add_scaled(&head.query, 1.0 / heads.len() as f64);
        value.add_scaled(&head.value, 1.0 / heads.len() as f64);
    }
    (query, value)
}

fn solve_head(
    layer: usize,
    head: usize,
    statistics: &HeadStatistics,
    bases: &Bases,
    sample: &HeadSample,
    options: &CalibrationOptions,
) -> Result<SolvedHead, CalibrateError> {
    if statistics.key_mean.iter().any(|v| !v.is_finite()) || !statistics.query.is_finite() {
        return Err(CalibrateError::NotFinite { what: "key statistic", layer, head });
    }
    let rotations = HeadRotations {
        key: bases.key_rotation.clone(),
        value: bases.value_rotation.clone(),
        key_mean: options.centre_keys.then(|| statistics.key_mean.iter().map(|&v| v as f32).collect()),
    };
    let keys = rotate_rows(&sample.keys, rotations.key_mean.as_deref(), &rotations.key);
    let values = rotate_rows(&sample.values, None, &rotations.value);
    let rows = HeadRows {
        head_dim: sample.head_dim,
        keys: &keys,
        values: &values,
        query: &statistics.query.rotated(&rotations.key),
        value_weights: &logit_energy(&sample.keys, &statistics.query),
    };
    let (key_curve, value_curve) = clip_fit::fit(rows, options.bits, &clip_fit::RATIOS)?;
    let clips = match options.clip {
        ClipPolicy::Official => {
            (default_clip(Side::Key, options.bits.0), default_clip(Side::Value, options.bits.1))
        }
        ClipPolicy::Fit => (key_curve.best, value_curve.best),
    };
    let quality = measure(sample, &statistics.query, &rotations, clips, options.bits)?;
    // kᵀ C_Q k in the mean is the mean squared logit; what the mean key contributes to it is removed by centring.
    let mean: Vec<f32> = statistics.key_mean.iter().map(|&v| v as f32).collect();
    let energies = sample.keys.chunks_exact(sample.head_dim).map(|key| statistics.query.quadratic(key));
    let logit_energy = energies.sum::<f64>() / (sample.keys.len() / sample.head_dim).max(1) as f64;
    let mean_energy = statistics.query.quadratic(&mean);
    let report = HeadReport {
        layer,
        head,
        key_participation: bases.key.participation_ratio(),
        value_participation: bases.value.participation_ratio(),
        key_eigenvalues: bases.key.values.clone(),
        value_eigenvalues: bases.value.values.clone(),
        mean_key_share: if logit_energy > 0.0 { (mean_energy / logit_energy).clamp(0.0, 1.0) } else { 0.0 },
        quality,
        clips,
        key_clip_curve: key_curve,
        value_clip_curve: value_curve,
    };
    Ok(SolvedHead { rotations, clips, report })
}

fn assemble(
    grid: HeadGrid,
    solved: Vec<Vec<SolvedHead>>,
    sample_rows: usize,
    metadata: Metadata,
    options: &CalibrationOptions,
    plan: MemoryPlan,
) -> Result<Calibration, CalibrateError> {
    let mut heads = Vec::with_capacity(grid.heads());
    let mut clips = Clips { key: Vec::new(), value: Vec::new() };
    let mut reports = Vec::with_capacity(grid.heads());
    for head in solved.into_iter().flatten() {
        heads.push(head.rotations);
        clips.key.push(head.clips.0);
        clips.value.push(head.clips.1);
        reports.push(head.report);
    }
    // A layer's heads share their spectrum; files keep it once.
    let per_layer = if metadata.granularity == Granularity::Layer { 1 } else { grid.kv_heads };
    let kept = || reports.iter().filter(|r| r.head < per_layer);
    let narrow = |values: &Vec<f64>| values.iter().map(|&v| v as f32).collect::<Vec<_>>();
    let file = RotationFile {
        rotations: RotationSet::per_head(grid.layers, grid.kv_heads, grid.head_dim, heads)?,
        clips,
        key_eigenvalues: Some(kept().flat_map(|r| narrow(&r.key_eigenvalues)).collect()),
        value_eigenvalues: Some(kept().flat_map(|r| narrow(&r.value_eigenvalues)).collect()),
        bits: BitPlan::default(),
        metadata: metadata.clone(),
    };
    let report = CalibrationReport {
        metadata,
        layers: grid.layers,
        kv_heads: grid.kv_heads,
        head_dim: grid.head_dim,
        bits: options.bits,
        sample_rows,
        heads: reports,
        widths: None,
    };
    Ok(Calibration { file, report, plan })
}
