//! The plain values a rotation file can hold.
//!
//! Invariant: a [`TensorView`] made by the unpickler lies inside a storage that exists in the
//! archive and has the declared size; reading through it needs no further bounds.

use std::fmt;
use std::sync::Arc;

/// Element type of a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

impl Dtype {
    /// The dtype of a `torch.<name>` storage class.
    pub(super) fn from_storage_class(name: &str) -> Option<Self> {
        Some(match name {
            "DoubleStorage" => Self::F64,
            "FloatStorage" => Self::F32,
            "HalfStorage" => Self::F16,
            "BFloat16Storage" => Self::Bf16,
            "LongStorage" => Self::I64,
            "IntStorage" => Self::I32,
            "ShortStorage" => Self::I16,
            "CharStorage" => Self::I8,
            "ByteStorage" => Self::U8,
            "BoolStorage" => Self::Bool,
            _ => return None,
        })
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }
}

/// A strided view of one storage; strides and offset count elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorView {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
    /// Name of the storage: the zip entry `<archive>/data/<storage>`.
    pub storage: Arc<str>,
    pub offset: usize,
}

impl TensorView {
    /// Number of elements; `None` when the product overflows.
    pub fn numel(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n))
    }

    /// Index one past the last element the view touches; 0 for an empty view, `None` on overflow.
    pub fn end(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let last = self
            .shape
            .iter()
            .zip(&self.strides)
            .try_fold(self.offset, |at, (&n, &stride)| at.checked_add((n - 1).checked_mul(stride)?))?;
        last.checked_add(1)
    }
}

/// A value of the pickle, as a tree.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Arc<str>),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    /// In file order; a repeated key is kept, and the later one wins on look-up, as in Python.
    Dict(Vec<(Value, Value)>),
    Tensor(Arc<TensorView>),
}

impl Value {
    /// The kind of value, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an int",
            Self::Float(_) => "a float",
            Self::Str(_) => "a string",
            Self::List(_) => "a list",
            Self::Tuple(_) => "a tuple",
            Self::Dict(_) => "a dict",
            Self::Tensor(_) => "a tensor",
        }
    }

    /// The entry of a dict under a string key; `None` also when this is no dict.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let Self::Dict(items) = self else { return None };
        items.iter().rev().find(|(k, _)| matches!(k, Self::Str(s) if &**s == key)).map(|(_, v)| v)
    }
}

/// JSON-like text, used to carry metadata nobody computes with.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn joined(f: &mut fmt::Formatter<'_>, open: &str, items: &[Value], close: &str) -> fmt::Result {
            f.write_str(open)?;
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    f.write_str(", ")?;
                }
                item.fmt(f)?;
            }
            f.write_str(close)
        }
        match self {
            Self::None => f.write_str("null"),
            Self::Bool(b) => write!(f, "{b}"),
            Self::Int(i) => write!(f, "{i}"),
            Self::Float(x) => write!(f, "{x:?}"),
            Self::Str(s) => write!(f, "{s:?}"),
            Self::List(items) => joined(f, "[", items, "]"),
            Self::Tuple(items) => joined(f, "(", items, ")"),
            Self::Dict(items) => {
                f.write_str("{")?;
                for (i, (key, value)) in items.iter().enumerate() {
                    write!(f, "{}{key}: {value}", if i > 0 { ", " } else { "" })?;
                }
                f.write_str("}")
            }
            Self::Tensor(t) => write!(f, "<tensor {:?} {:?}>", t.dtype, t.shape),
        }
    }
}
