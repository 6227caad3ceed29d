//! `generation_config.json`: the sampling defaults a model's authors recommend.
//!
//! Invariant: a field is `Some` only if the file states it and the value is usable.

use serde::Deserialize;

use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::families::TokenIds;
use crate::source::ModelSource;

const FILE: &str = "generation_config.json";

/// Recommended sampling; the caller chooses where a field is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// `false` recommends greedy decoding, regardless of the temperature.
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Any of these ends a generation.
    pub eos_token_ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Fields {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    eos_token_id: Option<TokenIds>,
}

impl GenerationConfig {
    /// Reads the file; a model without one recommends nothing.
    pub fn load(source: &ModelSource) -> Result<Self, LoadError> {
        match source.read(FILE)? {
            Some(bytes) => Self::from_json(&bytes),
            None => Ok(Self::default()),
        }
    }

    /// Parses the bytes of a `generation_config.json`.
    pub fn from_json(bytes: &[u8]) -> Result<Self, LoadError> {
        let fields: Fields = serde_json::from_slice(bytes)
            .map_err(|source| LoadError::Json { file: FILE.to_owned(), source })?;
        let top_k = match fields.top_k {
            // Zero and minus one both mean "no limit" in the wild.
            Some(k) if k <= 0 => None,
            Some(k) => Some(u32::try_from(k).unwrap_or(u32::MAX)),
            None => None,
        };
        Ok(Self {
            do_sample: fields.do_sample,
            temperature: within("temperature", fields.temperature, 0.0, f32::MAX)?,
            top_p: within("top_p", fields.top_p, f32::MIN_POSITIVE, 1.0)?,
            top_k,
            min_p: within("min_p", fields.min_p, 0.0, 1.0)?,
            repetition_penalty: within(
                "repetition_penalty",
                fields.repetition_penalty,
                f32::MIN_POSITIVE,
                f32::MAX,
            )?,
            eos_token_ids: fields.eos_token_id.map(TokenIds::into_vec),
        })
    }

    /// The ids that end a generation: this file's, or else those of `config.json`.
    pub fn stop_token_ids<'a>(&'a self, config: &'a DecoderConfig) -> &'a [u32] {
        self.eos_token_ids.as_deref().unwrap_or(&config.eos_token_ids)
    }
}

fn within(field: &str, value: Option<f32>, low: f32, high: f32) -> Result<Option<f32>, LoadError> {
    match value {
        Some(number) if !(low..=high).contains(&number) => Err(LoadError::BadField {
            file: FILE,
            field: field.to_owned(),
            problem: format!("is {number}, which no sampler can use; correct it or remove the file"),
        }),
        other => Ok(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_values_parse() {
        // Qwen/Qwen3-8B.
        let config = GenerationConfig::from_json(
            br#"{"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643],
                "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
                "transformers_version": "4.51.0"}"#,
        )
        .unwrap();
        assert_eq!(
            config,
            GenerationConfig {
                do_sample: Some(true),
                temperature: Some(0.6),
                top_p: Some(0.95),
                top_k: Some(20),
                eos_token_ids: Some(vec![151_645, 151_643]),
                ..Default::default()
            }
        );
    }

    #[test]
    fn one_stop_token_or_none() {
        let one = GenerationConfig::from_json(br#"{"eos_token_id": 2, "min_p": 0.05, "top_k": 0}"#).unwrap();
        assert_eq!((one.eos_token_ids, one.min_p, one.top_k), (Some(vec![2]), Some(0.05), None));
        let none =
            GenerationConfig::from_json(br#"{"eos_token_id": null, "repetition_penalty": 1.1}"#).unwrap();
        assert_eq!((none.eos_token_ids, none.repetition_penalty), (None, Some(1.1)));
    }

    #[test]
    fn unusable_values_are_named() {
        for (json, field) in [
            (r#"{"temperature": -1.0}"#, "temperature"),
            (r#"{"top_p": 0.0}"#, "top_p"),
            (r#"{"top_p": 1.5}"#, "top_p"),
            (r#"{"min_p": -0.1}"#, "min_p"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"top_k": "many"}"#, "generation_config.json"),
            ("not json", "generation_config.json"),
        ] {
            let message = GenerationConfig::from_json(json.as_bytes()).unwrap_err().to_string();
            assert!(message.contains(field), "{json}: {message}");
        }
    }
}
