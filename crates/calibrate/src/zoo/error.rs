//! Errors of rotation files; each says what to do next.

use std::path::PathBuf;

/// Why a rotation file or a zoo folder was refused.
#[derive(Debug, thiserror::Error)]
pub enum ZooError {
    #[error("cannot access {}", path.display())]
    Io { path: PathBuf, source: std::io::Error },

    #[error("not a torch zip file: {reason}")]
    NotTorchZip { reason: &'static str },

    #[error("the zip structure is damaged; download the file again")]
    Zip(#[from] zip::result::ZipError),

    #[error("zip entry {name:?}: {reason}")]
    Entry { name: String, reason: String },

    #[error("{what} is {found}, above the limit of {limit}")]
    TooLarge { what: &'static str, found: u64, limit: u64 },

    #[error("data.pkl, byte {at}: {fault}")]
    Pickle { at: usize, fault: PickleError },

    #[error("the file is not a rotation file: {0}")]
    Structure(String),

    #[error("format_version {0} is unknown; this build reads 1, 2 and 3")]
    UnknownVersion(i64),

    #[error("layer {layer}: {reason}")]
    Layer { layer: u32, reason: String },

    #[error("layer {layer}, {field}: shape {found:?}, expected {expected}")]
    Shape { layer: u32, field: &'static str, found: Vec<usize>, expected: String },

    #[error("layer {layer}, {field}: element {index} is {value}; every value must be finite")]
    NotFinite { layer: u32, field: &'static str, index: usize, value: f32 },

    #[error("cannot write format {version}: {reason}")]
    CannotWrite { version: u32, reason: String },

    #[error("no rotations for model {model:?} under {}; {available}", root.display())]
    ModelNotFound { model: String, root: PathBuf, available: String },

    #[error("no rotation set named {name:?} for model {model:?}; there are: {available}")]
    SetNotFound { name: String, model: String, available: String },

    #[error("no downloaded copy of the zoo in the Hugging Face cache {}; {hint}", hub.display())]
    NotCached { hub: PathBuf, hint: String },
}

/// Why the pickle inside a file was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    #[error("the stream ends early")]
    Truncated,
    #[error("opcode 0x{0:02x} is not used by rotation files and is refused")]
    Opcode(u8),
    #[error("pickle protocol {0} is not supported (2 to 5 are)")]
    Protocol(u8),
    #[error("the stream names {0:?}; only tensors, storages and OrderedDict are allowed, nothing is run")]
    Forbidden(String),
    #[error("the stack is empty where a value is needed")]
    StackUnderflow,
    #[error("no mark where the opcode needs one")]
    NoMark,
    #[error("memo slot {0} was never filled")]
    EmptyMemo(u32),
    #[error("expected {expected}, found {found}")]
    Type { expected: &'static str, found: &'static str },
    #[error("integer of {0} bytes; at most 8 are supported")]
    WideInteger(usize),
    #[error("text is not UTF-8")]
    NotUtf8,
    #[error("{0}")]
    Tensor(String),
    #[error("more than {limit} {what}")]
    Limit { what: &'static str, limit: usize },
    #[error("{0} bytes follow the end of the value")]
    TrailingBytes(usize),
}
