//! Rotation files as matrices.
//!
//! Invariant: a [`ZooFile`] that was read, or passed [`ZooFile::validate`], has square, finite
//! matrices whose sizes agree within each layer. Orthogonality is measured, not enforced: format 3
//! allows transforms that are not rotations, and the caller knows what it can tolerate.

use std::collections::BTreeMap;
use std::path::Path;

use oscar_codec::rotation::orthogonality_error;

use super::value::{TensorView, Value};
use super::{Limits, TorchFile, ZooError};

/// Wider than any attention head (MLA's latent is 512).
const MAX_HEAD_DIM: usize = 1024;
const MAX_HEADS: usize = 1024;
const MAX_LAYERS: usize = 4096;
/// Metadata is for people to read.
const MAX_METADATA_BYTES: usize = 64 << 10;

/// A rotation file: one side (K or V) of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct ZooFile {
    /// 1: one rotation a layer; 2: one a KV head; 3: either, with companions.
    pub format_version: u32,
    /// How the rotations were found, e.g. `qqt_r_h_pbr`; empty when the file does not say.
    pub objective: String,
    /// `layer`, `per_kv_head` or `head`; empty when the file does not say.
    pub source_grouping: String,
    /// Everything else at the top of the file (`transform`, `calibration`, ...), as text.
    pub metadata: BTreeMap<String, String>,
    /// By the model's global layer number; hybrid models have gaps.
    pub layers: BTreeMap<u32, ZooLayer>,
}

/// The rotation of one layer, with what the file says about it.
#[derive(Debug, Clone, PartialEq)]
pub struct ZooLayer {
    pub head_dim: usize,
    /// Number of KV heads, or `None` when one matrix serves them all.
    pub heads: Option<usize>,
    /// `[d, d]` or `[heads, d, d]`, row-major.
    pub rotation: Vec<f32>,
    /// `[d]` or `[heads, d]`.
    pub eigenvalues: Option<Vec<f32>>,
    /// Format 3, K side: what queries are multiplied by; shaped like `rotation`.
    pub q_rotation: Option<Vec<f32>>,
    /// Format 3, K side: `[d]` or `[heads, d]`, subtracted from keys.
    pub k_mean: Option<Vec<f32>>,
    /// Format 3, V side: shaped like `rotation`.
    pub o_rotation: Option<Vec<f32>>,
}

impl ZooFile {
    /// Reads a file under the default limits.
    pub fn read(path: &Path) -> Result<Self, ZooError> {
        Self::read_with(path, &Limits::default())
    }

    pub fn read_with(path: &Path, limits: &Limits) -> Result<Self, ZooError> {
        Self::from_torch(&TorchFile::open(path, limits)?, limits)
    }

    pub fn from_bytes(bytes: Vec<u8>, limits: &Limits) -> Result<Self, ZooError> {
        Self::from_torch(&TorchFile::from_bytes(bytes, limits)?, limits)
    }

    fn from_torch(torch: &TorchFile, limits: &Limits) -> Result<Self, ZooError> {
        let Value::Dict(top) = torch.root() else {
            let kind = torch.root().kind();
            return Err(ZooError::Structure(format!("the top value is {kind}, a dict is expected")));
        };
        let format_version = match torch.root().get("format_version") {
            // The official loader looks only at `layers`, so old files may lack the number.
            None => 1,
            Some(Value::Int(version @ 1..=3)) => *version as u32,
            Some(Value::Int(version)) => return Err(ZooError::UnknownVersion(*version)),
            Some(other) => {
                return Err(ZooError::Structure(format!("format_version is {}, not an int", other.kind())));
            }
        };
        let text = |key: &str| match torch.root().get(key) {
            None => Ok(String::new()),
            Some(Value::Str(text)) => Ok(text.to_string()),
            Some(other) => Err(ZooError::Structure(format!("{key} is {}, not a string", other.kind()))),
        };
        let mut file = Self {
            format_version,
            objective: text("objective")?,
            source_grouping: text("source_grouping")?,
            metadata: metadata(top)?,
            layers: BTreeMap::new(),
        };
        let layers = match torch.root().get("layers") {
            Some(Value::Dict(layers)) => layers,
            Some(other) => {
                return Err(ZooError::Structure(format!("'layers' is {}, not a dict", other.kind())));
            }
            None => return Err(ZooError::Structure("it has no 'layers'".into())),
        };
        check_count(layers.len())?;
        let mut budget = limits.tensor_bytes;
        for (key, entry) in layers {
            let id = layer_id(key)?;
            let layer = LayerReader { torch, id, entry, budget: &mut budget }.read()?;
            if file.layers.insert(id, layer).is_some() {
                return Err(ZooError::Layer { layer: id, reason: "the layer occurs twice".into() });
            }
        }
        file.validate()?;
        Ok(file)
    }

    /// Checks sizes and finiteness, for files built in memory as well as read ones.
    pub fn validate(&self) -> Result<(), ZooError> {
        if self.layers.is_empty() {
            return Err(ZooError::Structure("it has no layers".into()));
        }
        check_count(self.layers.len())?;
        let words = self.metadata.iter().map(|(key, text)| key.len() + text.len()).sum::<usize>();
        for length in [self.objective.len(), self.source_grouping.len(), words] {
            if length > MAX_METADATA_BYTES {
                return Err(metadata_too_large(length));
            }
        }
        self.layers.iter().try_for_each(|(&id, layer)| layer.validate(id))
    }

    /// The layer with the largest [`ZooLayer::orthogonality_error`], and that error.
    pub fn orthogonality_error(&self) -> Option<(u32, f64)> {
        let errors = self.layers.iter().map(|(&id, layer)| (id, layer.orthogonality_error()));
        errors.max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

impl ZooLayer {
    /// The matrix of one KV head; the shared one when the layer has a single matrix.
    /// `None` when the layer has no such head.
    pub fn rotation_of_head(&self, head: usize) -> Option<&[f32]> {
        let size = self.head_dim.checked_mul(self.head_dim)?;
        let start = match self.heads {
            None => 0,
            Some(heads) if head < heads => head.checked_mul(size)?,
            Some(_) => return None,
        };
        self.rotation.get(start..start.checked_add(size)?)
    }

    /// Largest absolute entry of `R Rᵀ − I`, over all heads, in double precision.
    pub fn orthogonality_error(&self) -> f64 {
        let d = self.head_dim;
        let matrices = self.rotation.chunks_exact((d * d).max(1));
        matrices.map(|matrix| orthogonality_error(d, matrix)).fold(0.0, f64::max)
    }

    fn validate(&self, layer: u32) -> Result<(), ZooError> {
        let (d, heads) = (self.head_dim, self.heads.unwrap_or(1));
        if !(1..=MAX_HEAD_DIM).contains(&d) || !(1..=MAX_HEADS).contains(&heads) {
            let reason = format!(
                "head_dim {d} and {heads} heads; 1 to {MAX_HEAD_DIM} and 1 to {MAX_HEADS} are supported"
            );
            return Err(ZooError::Layer { layer, reason });
        }
        let fields = [
            ("rotation", Some(&self.rotation), heads * d * d),
            ("eigenvalues", self.eigenvalues.as_ref(), heads * d),
            ("q_rotation", self.q_rotation.as_ref(), heads * d * d),
            ("k_mean", self.k_mean.as_ref(), heads * d),
            ("o_rotation", self.o_rotation.as_ref(), heads * d * d),
        ];
        for (field, values, expected) in fields {
            let Some(values) = values else { continue };
            if values.len() != expected {
                let (found, expected) = (vec![values.len()], format!("{expected} values"));
                return Err(ZooError::Shape { layer, field, found, expected });
            }
            if let Some(index) = values.iter().position(|x| !x.is_finite()) {
                return Err(ZooError::NotFinite { layer, field, index, value: values[index] });
            }
        }
        Ok(())
    }
}

/// Top-level entries without a field of their own, as text; a plain string keeps its own words.
fn metadata(top: &[(Value, Value)]) -> Result<BTreeMap<String, String>, ZooError> {
    let mut metadata = BTreeMap::new();
    let mut total = 0;
    for (key, value) in top {
        let Value::Str(key) = key else {
            return Err(ZooError::Structure(format!("a top-level key is {}, not a string", key.kind())));
        };
        if matches!(&**key, "format_version" | "objective" | "source_grouping" | "layers") {
            continue;
        }
        let mut text =
            Bounded { text: String::new(), left: MAX_METADATA_BYTES.saturating_sub(total + key.len()) };
        let written = match value {
            Value::Str(words) => std::fmt::Write::write_str(&mut text, words),
            other => std::fmt::Write::write_fmt(&mut text, format_args!("{other}")),
        };
        if written.is_err() || key.len() > MAX_METADATA_BYTES {
            return Err(metadata_too_large(MAX_METADATA_BYTES + 1));
        }
        total += key.len() + text.text.len();
        metadata.insert(key.to_string(), text.text);
    }
    Ok(metadata)
}

fn metadata_too_large(found: usize) -> ZooError {
    ZooError::TooLarge {
        what: "the descriptive text (metadata), in bytes,",
        found: found as u64,
        limit: MAX_METADATA_BYTES as u64,
    }
}

fn check_count(layers: usize) -> Result<(), ZooError> {
    if layers > MAX_LAYERS {
        return Err(ZooError::TooLarge {
            what: "the number of layers",
            found: layers as u64,
            limit: MAX_LAYERS as u64,
        });
    }
    Ok(())
}

/// A string that stops growing: shared text in a pickle could otherwise be printed without end.
struct Bounded {
    text: String,
    left: usize,
}

impl std::fmt::Write for Bounded {
    fn write_str(&mut self, piece: &str) -> std::fmt::Result {
        self.left = self.left.checked_sub(piece.len()).ok_or(std::fmt::Error)?;
        self.text.push_str(piece);
        Ok(())
    }
}

/// Layer keys are ints in most files and decimal strings in some.
fn layer_id(key: &Value) -> Result<u32, ZooError> {
    let id = match key {
        Value::Int(n) => u32::try_from(*n).ok(),
        Value::Str(text) if text.len() <= 10 && text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
        Value::Str(_) => None,
        other => {
            return Err(ZooError::Structure(format!(
                "a layer key is {}, not an int or a string",
                other.kind()
            )));
        }
    };
    id.ok_or_else(|| {
        let shown: String = key.to_string().chars().take(40).collect();
        ZooError::Structure(format!("{shown} is not a layer number"))
    })
}

/// Reads the dict of one layer.
struct LayerReader<'a> {
    torch: &'a TorchFile,
    id: u32,
    entry: &'a Value,
    budget: &'a mut usize,
}

impl<'a> LayerReader<'a> {
    fn read(mut self) -> Result<ZooLayer, ZooError> {
        if !matches!(self.entry, Value::Dict(_)) {
            return Err(self.fail(format!("the entry is {}, not a dict", self.entry.kind())));
        }
        if let Some(Value::Int(inner)) = self.entry.get("layer_id")
            && *inner != i64::from(self.id)
        {
            return Err(self.fail(format!("its layer_id says {inner}")));
        }
        let rotation = self.view("rotation")?.ok_or_else(|| self.fail("it has no rotation".into()))?;
        let (heads, head_dim) = match rotation.shape[..] {
            [rows, d] if rows == d => (None, d),
            [heads, rows, d] if rows == d => (Some(heads), d),
            _ => {
                let expected = "[d, d] or [heads, d, d]".to_owned();
                let found = rotation.shape.clone();
                return Err(ZooError::Shape { layer: self.id, field: "rotation", found, expected });
            }
        };
        // Before any allocation: an empty or enormous matrix is an error of its own.
        if !(1..=MAX_HEAD_DIM).contains(&head_dim) || heads.is_some_and(|n| !(1..=MAX_HEADS).contains(&n)) {
            let expected = format!("d from 1 to {MAX_HEAD_DIM}, heads from 1 to {MAX_HEADS}");
            let found = rotation.shape.clone();
            return Err(ZooError::Shape { layer: self.id, field: "rotation", found, expected });
        }
        let vector: Vec<usize> = heads.into_iter().chain([head_dim]).collect();
        let matrix = rotation.shape.clone();
        Ok(ZooLayer {
            head_dim,
            heads,
            rotation: self
                .torch
                .floats(rotation, self.budget)
                .map_err(|error| self.within("rotation", error))?,
            eigenvalues: self.companion("eigenvalues", &vector)?,
            q_rotation: self.companion("q_rotation", &matrix)?,
            k_mean: self.companion("k_mean", &vector)?,
            o_rotation: self.companion("o_rotation", &matrix)?,
        })
    }

    fn companion(&mut self, field: &'static str, expected: &[usize]) -> Result<Option<Vec<f32>>, ZooError> {
        let Some(view) = self.view(field)? else { return Ok(None) };
        if view.shape != expected {
            let (found, expected) = (view.shape.clone(), format!("{expected:?} to match the rotation"));
            return Err(ZooError::Shape { layer: self.id, field, found, expected });
        }
        self.torch.floats(view, self.budget).map(Some).map_err(|error| self.within(field, error))
    }

    fn view(&self, field: &'static str) -> Result<Option<&'a TensorView>, ZooError> {
        match self.entry.get(field) {
            None | Some(Value::None) => Ok(None),
            Some(Value::Tensor(view)) => Ok(Some(view)),
            Some(other) => Err(self.fail(format!("{field} is {}, not a tensor", other.kind()))),
        }
    }

    fn within(&self, field: &str, error: ZooError) -> ZooError {
        match error {
            ZooError::Structure(reason) => self.fail(format!("{field}: {reason}")),
            other => other,
        }
    }

    fn fail(&self, reason: String) -> ZooError {
        ZooError::Layer { layer: self.id, reason }
    }
}
