//! A whole model, from its weights to a file with rotations and widths. `oscar calibrate` and the
//! first start of a server run this.

mod documents;
mod probes;

pub use documents::Input;
pub use probes::ProbeKind;

use crate::bits::{BitPlan, Chosen, Freedom, HarmOptions, Judge, Refused, Search, Watch, WidthLayers};
use crate::options::{CalibrationOptions, CodeRounding};
use crate::report::CalibrationReport;
use crate::rotation_file::{RotationFile, RotationFileError};
use crate::{CalibrateError, Progress, Stage, calibrate};
use documents::{sequences, shipped, shipped_prose};
use oscar_backend::{Backend, Calibrates};
use oscar_codec::{MeanBits, Rounding, Windows};
use oscar_models::{DecoderConfig, Transformer, Weights};
use oscar_text::ModelText;
use probes::Prober;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The model to calibrate.
pub struct Subject<'a, B: Backend> {
    pub backend: &'a Arc<B>,
    pub config: &'a DecoderConfig,
    pub weights: &'a Weights,
    pub text: &'a ModelText,
    /// For messages.
    pub name: &'a str,
}

/// What is calibrated, and on which text.
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    pub rotations: CalibrationOptions,
    /// Widths are chosen if this is given.
    pub widths: Option<WidthOptions>,
    /// Calibration text; the text that ships with oscar if empty.
    pub text: Vec<Input>,
}

/// How widths are chosen.
#[derive(Clone, Debug)]
pub struct WidthOptions {
    pub means: Vec<MeanBits>,
    /// Tokens of a probe: text, or a task with its answer.
    pub probe_tokens: usize,
    /// Probes of each kind, at most.
    pub probes: usize,
    pub kinds: Vec<ProbeKind>,
    /// Widths whose harm is measured, ascending.
    pub measured: Vec<u32>,
    pub freedom: Freedom,
    /// Rounds in which bits are moved between units that interact.
    pub refine_rounds: usize,
    /// By default the best rounding that the rotations allow.
    pub rounding: Option<CodeRounding>,
    /// Take the harms of the given file instead of measuring them.
    pub reuse_harms: bool,
    /// Bytes for versions of the history that are read at once.
    pub memory: usize,
}

impl WidthOptions {
    /// The defaults for these means.
    pub fn of_means(means: Vec<MeanBits>) -> Self {
        Self {
            means,
            probe_tokens: 2560,
            probes: 4,
            kinds: ProbeKind::defaults(),
            measured: HarmOptions::default().measured,
            freedom: Freedom::default(),
            refine_rounds: 1,
            rounding: None,
            reuse_harms: false,
            memory: 512 << 20,
        }
    }
}

/// The result of [`calibrate_model`].
pub struct CalibratedModel {
    pub file: RotationFile,
    /// `None` if the rotations were given.
    pub report: Option<CalibrationReport>,
    /// Bytes that the statistics took beyond the model.
    pub extra_memory: usize,
    /// Tables that passed their verification; the file holds them.
    pub chosen: Vec<Chosen>,
    /// Means without a table, with the reason.
    pub refused: Vec<Refused>,
}

/// Calibrates a model: rotations, unless `start` has them, then widths if the options ask for them.
///
/// `state` is where results of finished probes are stored. A run that was killed continues from
/// there, if model and options are the same; the caller removes the file after it has saved the
/// result. Setting `cancelled` ends the run within a pass.
pub fn calibrate_model<B: Calibrates>(
    subject: &Subject<'_, B>,
    start: Option<RotationFile>,
    options: &ModelOptions,
    state: &Path,
    watch: &dyn Watch,
    cancelled: &AtomicBool,
) -> Result<CalibratedModel, CalibrateError> {
    if subject.config.latent.is_some() {
        return Err(CalibrateError::Latent);
    }
    if options.widths.is_some() && subject.config.delta.is_some() {
        return Err(CalibrateError::RecurrentState);
    }
    if let Some(widths) = &options.widths {
        // An option that cannot be met is refused now, not after minutes of measuring.
        widths.check(subject)?;
    }
    let mut result = match start {
        Some(file) => {
            file.check_model(&subject.weights.fingerprint(), subject.config)?;
            CalibratedModel { file, report: None, extra_memory: 0, chosen: Vec::new(), refused: Vec::new() }
        }
        None => find_rotations(subject, options, watch, cancelled)?,
    };
    if let Some(widths) = &options.widths {
        choose_widths(subject, options, widths, state, watch, cancelled, &mut result)?;
        if let Some(report) = &mut result.report {
            report.widths = Some(result.file.bits.clone());
        }
    }
    Ok(result)
}

fn find_rotations<B: Calibrates>(
    subject: &Subject<'_, B>,
    options: &ModelOptions,
    watch: &dyn Watch,
    cancelled: &AtomicBool,
) -> Result<CalibratedModel, CalibrateError> {
    let rotations = &options.rotations;
    let tokens = match options.text.is_empty() {
        true => sequences(subject, &shipped(rotations), rotations.sequence_len, rotations.tokens)?,
        false => sequences(subject, &options.text, rotations.sequence_len, rotations.tokens)?,
    };
    let context = rotations.sequence_len.max(256);
    let transformer =
        Transformer::build(&**subject.backend, subject.config, subject.weights, None, context, |_| {})?;
    let mut at = None;
    let mut progress = |p: Progress| {
        if at.is_none_or(|(stage, _)| stage != p.stage) {
            if at.is_some() {
                watch.end();
            }
            watch.begin(
                match p.stage {
                    Stage::Running { .. } => "finding rotations: tokens",
                    Stage::Solving => "finding rotations: layers",
                },
                p.total,
            );
            at = Some((p.stage, 0));
        }
        if let Some((_, done)) = &mut at {
            watch.advance(p.done.saturating_sub(*done));
            *done = p.done;
        }
    };
    let fingerprint = subject.weights.fingerprint();
    let made =
        calibrate(subject.backend, &transformer, &fingerprint, &tokens, rotations, &mut progress, cancelled)?;
    if at.is_some() {
        watch.end();
    }
    Ok(CalibratedModel {
        file: made.file,
        report: Some(made.report),
        extra_memory: made.plan.bytes,
        chosen: Vec::new(),
        refused: Vec::new(),
    })
}

impl WidthOptions {
    fn check<B: Backend>(&self, subject: &Subject<'_, B>) -> Result<(), CalibrateError> {
        let c = subject.config;
        if self.probes == 0 {
            return Err(CalibrateError::option("--probes", "at least 1 of each kind"));
        }
        HarmOptions { measured: self.measured.clone() }.check()?;
        let layers = WidthLayers::of(c).count();
        self.freedom.check_means(layers, c.kv_heads, c.head_dim, &self.means)?;
        probes::check_tokens(self.probe_tokens, subject)
    }

    /// The rounding asked for; by default the best that the file allows.
    fn roundings(
        &self,
        file: &RotationFile,
        watch: &dyn Watch,
    ) -> Result<(CodeRounding, Vec<Rounding>), CalibrateError> {
        let known = file.bits.harm.as_ref().map(|_| file.bits.rounding).filter(|_| self.reuse_harms);
        if let (Some(asked), Some(known)) = (self.rounding, known)
            && asked != known
        {
            let problem =
                format!("{asked}: the harms of the file are those of {known} codes: leave out --reuse-harms");
            return Err(CalibrateError::option("--rounding", problem));
        }
        match self.rounding.or(known) {
            Some(rounding) => Ok((rounding, file.roundings(rounding)?)),
            None => match file.roundings(CodeRounding::Shaped) {
                Ok(roundings) => Ok((CodeRounding::Shaped, roundings)),
                Err(RotationFileError::NoSpectrum) => {
                    watch.note(
                        "note: the rotations come without a spectrum of the queries: codes are rounded to \
                         the nearest level"
                            .into(),
                    );
                    Ok((CodeRounding::Nearest, file.roundings(CodeRounding::Nearest)?))
                }
                Err(error) => Err(error.into()),
            },
        }
    }
}

/// Measures harms, solves for every mean and verifies the tables; puts them into the file.
fn choose_widths<B: Calibrates>(
    subject: &Subject<'_, B>,
    options: &ModelOptions,
    widths: &WidthOptions,
    state: &Path,
    watch: &dyn Watch,
    cancelled: &AtomicBool,
    result: &mut CalibratedModel,
) -> Result<(), CalibrateError> {
    let file = &mut result.file;
    let (rounding, roundings) = widths.roundings(file, watch)?;
    let wanted = 2 * widths.probes * widths.probe_tokens;
    let probe_text = match options.text.is_empty() {
        true => sequences(subject, &shipped_prose(), wanted, wanted)?,
        false => sequences(subject, &options.text, wanted, wanted)?,
    };
    let prober =
        Prober { subject, options: widths, text: &probe_text.concat(), seed: options.rotations.seed };
    // Tables are chosen on one half of the probes and verified on the other.
    let (probes, fresh) = (prober.choosing()?, prober.verifying()?);
    let distances = prober.distances(&probes)?;
    let transformer = Transformer::build(
        &**subject.backend,
        subject.config,
        subject.weights,
        Some(&file.rotations),
        widths.probe_tokens + 64,
        |_| {},
    )?;
    let search = Search {
        judge: Judge {
            backend: subject.backend,
            transformer: &transformer,
            windows: Windows::default(),
            roundings: &roundings,
            chunk: 512,
            memory: widths.memory,
            cancelled,
        },
        harm: HarmOptions { measured: widths.measured.clone() },
        freedom: widths.freedom.clone(),
        refine_rounds: widths.refine_rounds,
        rounding,
        probes: &probes,
        distances: &distances,
        fresh: &fresh,
        watch,
    };
    let map = match (widths.reuse_harms, &file.bits.harm) {
        (true, Some(map)) => map.clone(),
        (true, None) => {
            let problem = "the file of --rotations holds no harms: make it with `oscar calibrate --bits`";
            return Err(CalibrateError::option("--reuse-harms", problem));
        }
        (false, _) => search.measure_harms(&file.metadata, state, &widths.means)?,
    };
    let (chosen, refused) = search.choose(&map, &widths.means)?;
    let mut tables: Vec<_> = chosen.iter().map(|c| (c.mean, c.table.clone())).collect();
    if widths.reuse_harms {
        // Of the same harms and the same codes: they stay, for the means that were not asked for.
        let kept = file.bits.tables.iter().filter(|(mean, _)| !widths.means.contains(mean));
        tables.extend(kept.cloned());
    }
    let layers = WidthLayers::of(subject.config).list().to_vec();
    file.bits = BitPlan { layers, tables, harm: Some(map), rounding };
    result.chosen = chosen;
    result.refused = refused;
    Ok(())
}
