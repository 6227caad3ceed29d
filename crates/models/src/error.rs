//! The one error type of loading. Every message says what was wrong, in which file, and what to do
//! about it.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },

    #[error(
        "model `{name}` was not found. Looked for:\n{looked}\nGive a folder that holds config.json and \
         *.safetensors, or a name on the Hugging Face hub (`org/name`) that is in the local cache or may be downloaded."
    )]
    NotFound { name: String, looked: LineList },

    #[error("`{name}` is neither a folder nor a model name of the form `org/name` or `org/name@revision`")]
    BadName { name: String },

    #[error("{} is a file; give the folder that holds config.json and *.safetensors", path.display())]
    NotADirectory { path: PathBuf },

    #[error("{} is no regular file, so it is not read: a pipe or a device might never end", path.display())]
    NotAFile { path: PathBuf },

    #[error("{place} has no {file}; the model folder is incomplete")]
    MissingFile { place: String, file: String },

    #[error("`{name}` is not a plain file name, so it will not be opened")]
    UnsafeFileName { name: String },

    #[error("{file} holds {bytes} bytes, more than the {limit} a file of its kind may have")]
    FileTooLarge { file: String, bytes: u64, limit: u64 },

    #[error("{file} is not the JSON expected there: {source}")]
    Json { file: String, source: serde_json::Error },

    #[error(
        "architecture `{found}` is not supported; supported are {}. Other attention, a vision tower or a \
         classifier head needs its own forward pass.",
        supported.join(", ")
    )]
    UnknownArchitecture { found: String, supported: Vec<&'static str> },

    #[error("{file}: `{field}` {problem}")]
    BadField { file: &'static str, field: String, problem: String },

    #[error(
        "the checkpoint is quantized (quantization_config: {method}); BF16, F16 and F32 weights are read, and FP8 of \
         quant_method `fp8` or `compressed-tensors`. Use the unquantized checkpoint of the same model, or its FP8 one."
    )]
    Quantized { method: String },

    #[error(
        "the model attends through a sliding window of {window} tokens but allows {max_positions} positions; \
         full attention would give wrong answers beyond the window. To serve only short contexts, set \
         max_position_embeddings to {window} in config.json."
    )]
    SlidingWindow { window: usize, max_positions: usize },

    #[error(
        "rotary scaling `{kind}` is not supported (supported: default, linear, llama3, yarn); its frequencies \
         change with the length of the request, so cached keys would not stay valid"
    )]
    LengthDependentRope { kind: String },

    #[error("rotary scaling `{kind}` is not supported (supported: default, linear, llama3, yarn)")]
    UnknownRope { kind: String },

    #[error("{file} is not a valid safetensors file: {problem}. Download it again.")]
    BadSafetensors { file: String, problem: String },

    #[error("the weights do not fit the configuration:\n{problems}")]
    WeightsMismatch { problems: LineList },

    #[error("{file} and the shards it names disagree:\n{problems}")]
    BadIndex { file: &'static str, problems: LineList },

    #[error("no tensor `{name}` in the weights")]
    TensorMissing { name: String },

    #[error("tensor `{name}` is {dtype}; only BF16, F16 and F32 weights are read")]
    UnsupportedDtype { name: String, dtype: String },

    #[error("{name} is {dtype}; codes and scales of MXFP4 are U8")]
    PackedDtype { name: String, dtype: String },

    #[error(
        "tensor `{name}` holds weights that are no numbers (NaN or infinite); the file is damaged, download it again"
    )]
    NanWeights { name: String },

    #[error(
        "a table for {positions} positions takes {bytes} bytes, more than this machine has; give a smaller --context"
    )]
    TooManyPositions { positions: usize, bytes: u64 },

    #[error("the scales of tensor `{name}` cannot be used: {problem}")]
    BadScales { name: String, problem: String },

    #[error("a random {family} model cannot be written: {problem}")]
    UnwritableModel { family: &'static str, problem: String },

    #[cfg(feature = "hub")]
    #[error("downloading {what}: {problem}")]
    Download { what: String, problem: Box<dyn std::error::Error + Send + Sync> },
}

impl LoadError {
    pub(crate) fn io(path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    pub(crate) fn config_field(field: &str, problem: impl Into<String>) -> Self {
        Self::BadField { file: "config.json", field: field.to_owned(), problem: problem.into() }
    }
}

/// Findings shown one a line: the first few in full, the rest as a count, so that one error names
/// every kind of problem without flooding a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineList(pub Vec<String>);

impl LineList {
    const SHOWN: usize = 10;
}

impl fmt::Display for LineList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, line) in self.0.iter().take(Self::SHOWN).enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "  - {line}")?;
        }
        if self.0.len() > Self::SHOWN {
            write!(f, "\n  ... and {} more ({} in all)", self.0.len() - Self::SHOWN, self.0.len())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_cut_and_counted() {
        let lines = LineList((0..13).map(|i| format!("problem {i}")).collect()).to_string();
        assert!(lines.contains("problem 9") && !lines.contains("problem 10"));
        assert!(lines.ends_with("... and 3 more (13 in all)"), "{lines}");
    }

    #[test]
    fn a_short_list_is_shown_whole() {
        assert_eq!(LineList(vec!["a".into(), "b".into()]).to_string(), "  - a\n  - b");
    }
}
