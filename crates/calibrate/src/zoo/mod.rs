//! RotationZoo: rotation files as PyTorch wrote them, read and written without Python.
//!
//! * [`pickle`] understands the small part of pickle that `torch.save` emits and refuses the rest;
//! * [`archive`] opens the zip around it and lends out tensor storages as slices of the file;
//! * [`file`](mod@file) turns that into checked rotation matrices ([`ZooFile`]);
//! * [`write`](mod@write) goes the other way, formats 1 and 2;
//! * [`layout`] finds the K and V pair of a model in a local copy of the zoo.
//!
//! Invariant: a file is data from a stranger. Nothing in it is executed, no size it declares is
//! believed before it has been compared with bytes that are really there, and every path ends in a
//! value or a [`ZooError`], never in a panic.

pub mod archive;
pub mod error;
pub mod file;
pub mod layout;
mod nodes;
pub mod pickle;
pub mod value;
pub mod write;

pub use archive::TorchFile;
pub use error::{PickleError, ZooError};
pub use file::{ZooFile, ZooLayer};
pub use layout::{
    Candidate, Choice, Grouping, REPOSITORY, cached_root, files_of, find_pair, list_candidates,
};
pub use value::{Dtype, TensorView, Value};

/// Ceilings on what one file may cost; each is far above any published rotation file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Size of the `.pt` file itself.
    pub file_bytes: u64,
    /// Entries in the zip directory.
    pub entries: usize,
    /// Size of `data.pkl`.
    pub pickle_bytes: usize,
    /// Opcodes executed; bounds the stack, the memo and every list at once.
    pub operations: usize,
    /// Values in the finished tree, a shared reference counted at each place it appears.
    pub values: usize,
    /// Nesting of the finished tree.
    pub depth: usize,
    /// Bytes of `f32` made from all tensors together (a stride-0 view can be larger than its
    /// storage).
    pub tensor_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            file_bytes: 1 << 30,
            entries: 1 << 16,
            pickle_bytes: 16 << 20,
            operations: 1 << 21,
            values: 1 << 20,
            depth: 32,
            tensor_bytes: 1 << 30,
        }
    }
}
