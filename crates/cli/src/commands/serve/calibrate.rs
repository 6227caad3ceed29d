//! Rotations and widths for a server: found, or calibrated at the first start and kept.

use super::load::{CalibrateArg, LoadArgs};
use crate::device::AnyBackend;
use crate::options::OpenModel;
use crate::progress::{self, note};
use crate::rotations::{self, Calibration, Found};
use anyhow::{Result, bail};
use indicatif::ProgressBar;
use oscar_backend::Backend;
use oscar_calibrate::bits::Watch;
use oscar_calibrate::{
    CalibrateError, CalibratedModel, ModelOptions, RotationFile, Subject, WidthOptions, calibrate_model,
};
use oscar_codec::MeanBits;
use oscar_server::StartProgress;
use oscar_text::ModelText;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The rotations that the server uses; calibrates what is missing. A calibration that fails is a
/// warning: the server then goes on in a safe format.
pub fn rotations(
    args: &LoadArgs,
    model: &OpenModel,
    text: &ModelText,
    backend: &Arc<AnyBackend>,
    progress: &StartProgress,
) -> Result<Option<Found>> {
    if model.config.latent.is_some() {
        if let Some(CalibrateArg::Rotations | CalibrateArg::Widths) = args.calibrate {
            bail!("--calibrate: {}", CalibrateError::Latent);
        }
        return Ok(None);
    }
    progress.begin("looking for rotations", 0);
    let mut found = rotations::find(model)?;
    let cached = rotations::cached_file(model);
    if found.is_none() {
        found = rotations::find_in_zoo(model, args.model.may_download());
        if let (Some(found), Some(path)) = (&found, &cached) {
            rotations::keep(&found.file, path);
        }
    }
    let wanted = args.calibrate.unwrap_or(match &**backend {
        AnyBackend::Cpu(_) => CalibrateArg::Rotations,
        AnyBackend::Cuda(_) => CalibrateArg::Widths,
    });
    let subject =
        Subject { backend, config: &model.config, weights: &model.weights, text, name: &model.name };
    let run = Run { subject, watch: StartWatch::new(progress.clone()), cached };
    if found.is_none() && wanted != CalibrateArg::No {
        note!("calibrating rotations: the model has none yet (--calibrate no skips this)");
        found = run.stage("rotations", None, ModelOptions::default());
    }
    let start = found.as_ref().filter(|_| wanted == CalibrateArg::Widths);
    if let Some(start) = start.filter(|found| Calibration::of(Some(found)) != Calibration::Widths) {
        let tried = start.file.bits.harm.is_some();
        if tried {
            note!(
                "widths are not measured again: an earlier calibration found no table good enough; \
                 `oscar calibrate --bits MEAN` tries other means"
            );
        } else {
            note!("calibrating widths; a start that is stopped continues here the next time");
            let mut widths = WidthOptions::of_means(vec![MeanBits::DEFAULT]);
            widths.probe_tokens = widths.probe_tokens.min(model.config.max_position_embeddings);
            if let Ok(Some(free)) = backend.free_memory() {
                // The weights come after this, and caches that verify tables.
                widths.memory = free / 4;
            }
            let options = ModelOptions { widths: Some(widths), ..ModelOptions::default() };
            found = run.stage("widths", Some(start.file.clone()), options).or(found);
        }
    }
    Ok(found)
}

/// One calibration: its model and where its results go.
struct Run<'a> {
    subject: Subject<'a, AnyBackend>,
    watch: StartWatch,
    cached: Option<PathBuf>,
}

impl Run<'_> {
    /// Calibrates and keeps the result; `None` with a warning if that fails.
    fn stage(&self, what: &str, start: Option<RotationFile>, options: ModelOptions) -> Option<Found> {
        let scratch;
        let state = match self.cached.as_deref().filter(|path| writable(path)) {
            Some(path) => path.with_extension("harm.jsonl"),
            None => {
                // Nothing to continue from later, but this start needs not fail.
                scratch = std::env::temp_dir().join(format!("oscar-{}.harm.jsonl", std::process::id()));
                scratch
            }
        };
        let cancelled = AtomicBool::new(false);
        let result = calibrate_model(&self.subject, start, &options, &state, &self.watch, &cancelled);
        self.watch.end();
        let CalibratedModel { file, refused, .. } = match result {
            Ok(result) => result,
            Err(error) => {
                note!("warning: {what} could not be calibrated: {:#}", anyhow::Error::from(error));
                return None;
            }
        };
        for refused in &refused {
            note!("warning: no table of widths for {} bits: {}", refused.mean, refused.reason);
        }
        let kept = self.cached.as_deref().is_some_and(|path| rotations::keep(&file, path));
        // The harms are in the file now, or will not be asked for again.
        let _ = std::fs::remove_file(&state);
        let origin = match &self.cached {
            Some(path) if kept => format!("calibrated at this start, {}", path.display()),
            _ => "calibrated at this start, not kept".to_owned(),
        };
        Some(Found { file, origin })
    }
}

/// Whether a file beside `path` can be written.
fn writable(path: &Path) -> bool {
    let probe = path.with_extension(format!("{}.probe", std::process::id()));
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    let result = made.and_then(|()| std::fs::write(&probe, b"x"));
    let _ = std::fs::remove_file(&probe);
    result.is_ok()
}

/// A calibration on the terminal and in the answers of the socket.
struct StartWatch {
    progress: StartProgress,
    bar: RefCell<Option<ProgressBar>>,
    done: Cell<usize>,
}

impl StartWatch {
    fn new(progress: StartProgress) -> Self {
        Self { progress, bar: RefCell::default(), done: Cell::new(0) }
    }
}

impl Watch for StartWatch {
    fn begin(&self, stage: &'static str, passes: usize) {
        self.progress.begin(format!("calibrating, {stage}"), passes);
        self.done.set(0);
        *self.bar.borrow_mut() = Some(progress::bar(stage, passes as u64));
    }

    fn advance(&self, passes: usize) {
        self.done.set(self.done.get() + passes);
        self.progress.set(self.done.get());
        if let Some(bar) = &*self.bar.borrow() {
            bar.inc(passes as u64);
        }
    }

    fn end(&self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn note(&self, text: String) {
        note!("{text}");
    }
}
