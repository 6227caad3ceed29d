//! Why a calibration ended without a result.

use crate::rotation_file::RotationFileError;
use oscar_codec::CodecError;
use oscar_models::BuildError;
use oscar_runner::StepError;
use oscar_tasks::TaskError;
use oscar_text::TextError;

#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    #[error("calibration was cancelled; nothing was written")]
    Cancelled,
    #[error(
        "there are {found} tokens of calibration text and at least {needed} are needed: give a longer text \
         or a larger token budget"
    )]
    TooFewTokens { found: usize, needed: usize },
    #[error(
        "token {token} of sequence {sequence} is not in the vocabulary of {vocabulary}: the text was \
         tokenized for another model"
    )]
    Token { sequence: usize, token: u32, vocabulary: usize },
    #[error("latent attention (MLA) is not calibrated: its cache is bf16, which needs no rotations")]
    Latent,
    #[error(
        "widths are not measured in models with a recurrent state (gated delta nets): calibrate rotations only, and \
         choose a format with --kv"
    )]
    RecurrentState,
    #[error("option {option}: {problem}")]
    Option { option: &'static str, problem: String },
    #[error(
        "the {what} of layer {layer}, KV head {head} is not finite: the model overflows on this text, or its \
         weights are damaged"
    )]
    NotFinite { what: &'static str, layer: usize, head: usize },
    #[error(
        "the eigenvalues of the {what} of layer {layer}, KV head {head} did not converge: report this with the model"
    )]
    NoConvergence { what: &'static str, layer: usize, head: usize },
    #[error("{}: {source}", path.display())]
    Checkpoint { path: std::path::PathBuf, source: std::io::Error },
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    File(#[from] RotationFileError),
    #[error(transparent)]
    Text(#[from] TextError),
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl CalibrateError {
    pub(crate) fn option(option: &'static str, problem: impl Into<String>) -> Self {
        Self::Option { option, problem: problem.into() }
    }
}
