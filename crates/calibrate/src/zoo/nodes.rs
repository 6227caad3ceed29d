//! What the pickle machine's stack, memo and containers hold: numbered nodes of an arena.
//!
//! Invariant: [`Global::lookup`] is the complete list of names a file may mention.

use std::sync::Arc;

use super::PickleError;
use super::value::{Dtype, TensorView};

/// Index of a node in the machine's arena.
pub(super) type NodeId = usize;

/// The names a pickle may mention.
#[derive(Debug, Clone, Copy)]
pub(super) enum Global {
    RebuildTensor,
    RebuildParameter,
    OrderedDict,
    Storage(Dtype),
}

impl Global {
    pub(super) fn lookup(module: &str, name: &str) -> Result<Self, PickleError> {
        match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Ok(Self::RebuildTensor),
            ("torch._utils", "_rebuild_parameter") => Ok(Self::RebuildParameter),
            ("collections", "OrderedDict") => Ok(Self::OrderedDict),
            _ => match Dtype::from_storage_class(name) {
                Some(dtype) if module == "torch" => Ok(Self::Storage(dtype)),
                _ => Err(PickleError::Forbidden(shorten(&format!("{module}.{name}")))),
            },
        }
    }
}

/// A storage the pickle has named and the archive has confirmed.
#[derive(Debug)]
pub(super) struct StorageRef {
    pub(super) dtype: Dtype,
    pub(super) key: Arc<str>,
    pub(super) numel: usize,
}

#[derive(Debug)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Arc<str>),
    List(Vec<NodeId>),
    Tuple(Vec<NodeId>),
    Dict(Vec<(NodeId, NodeId)>),
    Tensor(Arc<TensorView>),
    Storage(Arc<StorageRef>),
    Global(Global),
}

impl Node {
    pub(super) fn is_not(&self, expected: &'static str) -> PickleError {
        let found = match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an int",
            Self::Float(_) => "a float",
            Self::Str(_) => "a string",
            Self::List(_) => "a list",
            Self::Tuple(_) => "a tuple",
            Self::Dict(_) => "a dict",
            Self::Tensor(_) => "a tensor",
            Self::Storage(_) => "a storage",
            Self::Global(_) => "a class or function name",
        };
        PickleError::Type { expected, found }
    }
}

/// Names in messages come from the file; keep them short.
pub(super) fn shorten(name: &str) -> String {
    name.chars().take(80).collect()
}
