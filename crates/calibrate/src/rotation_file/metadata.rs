//! The metadata of a rotation file.

use super::RotationFileError;
use crate::options::Granularity;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Names the format in the file.
pub(super) const FORMAT: &str = "oscar-rotations";
pub(super) const VERSION: u32 = 1;
/// Longest accepted text of one field.
const LONGEST_FIELD: usize = 4096;

/// How the rotations were made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Metadata {
    /// `Weights::fingerprint` of the model; `None` if it is not known (files of the RotationZoo).
    pub model_fingerprint: Option<String>,
    pub granularity: Granularity,
    /// The value statistic: a [`crate::Statistic`], or the objectives that an imported file states.
    pub statistic: String,
    pub composition: String,
    /// The mean key is subtracted.
    pub centred: bool,
    /// A [`crate::ClipPolicy`].
    pub clip: String,
    /// Key and value widths that the clips were chosen for.
    pub clip_bits: (u32, u32),
    pub tokens: usize,
    pub sequences: usize,
    pub sequence_len: usize,
    /// SHA-256 of the token ids.
    pub text_digest: Option<String>,
    /// Program and version that made the file.
    pub tool: String,
    pub note: String,
}

impl Metadata {
    pub(super) fn to_fields(&self, shape: [usize; 3]) -> BTreeMap<String, String> {
        let mut fields = BTreeMap::new();
        let mut put = |key: &str, value: String| fields.insert(key.to_owned(), value);
        put("format", FORMAT.into());
        put("format_version", VERSION.to_string());
        put("layers", shape[0].to_string());
        put("kv_heads", shape[1].to_string());
        put("head_dim", shape[2].to_string());
        put("granularity", self.granularity.to_string());
        put("statistic", self.statistic.clone());
        put("composition", self.composition.clone());
        put("centred", self.centred.to_string());
        put("clip", self.clip.clone());
        put("clip_bits", format!("{},{}", self.clip_bits.0, self.clip_bits.1));
        put("tokens", self.tokens.to_string());
        put("sequences", self.sequences.to_string());
        put("sequence_len", self.sequence_len.to_string());
        put("tool", self.tool.clone());
        put("note", self.note.clone());
        for (key, value) in
            [("model_fingerprint", &self.model_fingerprint), ("text_digest", &self.text_digest)]
        {
            if let Some(value) = value {
                put(key, value.clone());
            }
        }
        fields
    }

    /// Reads the fields; also returns layers, KV heads and head size.
    pub(super) fn from_fields(
        fields: &HashMap<String, String>,
    ) -> Result<(Self, [usize; 3]), RotationFileError> {
        if fields.get("format").is_none_or(|f| f != FORMAT) {
            return Err(RotationFileError::NotARotationFile(
                "it is a safetensors file of something else (its metadata names no rotations)".into(),
            ));
        }
        let reader = Fields(fields);
        let version: u32 = reader.number("format_version")?;
        if version != VERSION {
            return Err(RotationFileError::Version(version));
        }
        let bits = reader.text("clip_bits")?;
        let clip_bits = bits
            .split_once(',')
            .and_then(|(key, value)| Some((key.parse().ok()?, value.parse().ok()?)))
            .ok_or_else(|| reader.wrong("clip_bits", "two numbers like 2,2"))?;
        let metadata = Self {
            model_fingerprint: reader.optional("model_fingerprint")?,
            granularity: reader
                .text("granularity")?
                .parse()
                .map_err(|_| reader.wrong("granularity", "head or layer"))?,
            statistic: reader.text("statistic")?,
            composition: reader.text("composition")?,
            centred: reader.number("centred")?,
            clip: reader.text("clip")?,
            clip_bits,
            tokens: reader.number("tokens")?,
            sequences: reader.number("sequences")?,
            sequence_len: reader.number("sequence_len")?,
            text_digest: reader.optional("text_digest")?,
            tool: reader.text("tool")?,
            note: reader.text("note")?,
        };
        let shape = [reader.number("layers")?, reader.number("kv_heads")?, reader.number("head_dim")?];
        Ok((metadata, shape))
    }
}

struct Fields<'a>(&'a HashMap<String, String>);

impl Fields<'_> {
    fn optional(&self, key: &'static str) -> Result<Option<String>, RotationFileError> {
        match self.0.get(key) {
            Some(text) if text.len() > LONGEST_FIELD => Err(self.wrong(key, "a short text")),
            other => Ok(other.cloned()),
        }
    }

    fn text(&self, key: &'static str) -> Result<String, RotationFileError> {
        self.optional(key)?.ok_or_else(|| self.wrong(key, "a text"))
    }

    fn number<T: std::str::FromStr>(&self, key: &'static str) -> Result<T, RotationFileError> {
        self.text(key)?.parse().map_err(|_| self.wrong(key, "another kind of value"))
    }

    fn wrong(&self, field: &'static str, expected: &'static str) -> RotationFileError {
        let found = match self.0.get(field) {
            Some(text) => format!("'{}'", text.chars().take(60).collect::<String>()),
            None => "missing".to_owned(),
        };
        RotationFileError::Metadata { field, found, expected }
    }
}
