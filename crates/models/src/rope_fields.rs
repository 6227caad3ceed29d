//! The rotary fields of `config.json`, in both spellings, lowered into a [`RopeConfig`].
//!
//! Older files carry `rope_theta` beside `rope_scaling`; newer ones put everything under
//! `rope_parameters`.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::LoadError;
use crate::rope::{RopeConfig, RopeScaling};

/// The base if a file names none. Families with another default put it into the fields first, or
/// demand it.
const DEFAULT_THETA: f64 = 10_000.0;

#[derive(Debug, Default, Deserialize)]
pub(crate) struct RopeFields {
    rope_theta: Option<f64>,
    rope_scaling: Option<Map<String, Value>>,
    rope_parameters: Option<Map<String, Value>>,
    pub(crate) partial_rotary_factor: Option<f64>,
    /// MiniMax's name for the same, in channels.
    rotary_dim: Option<usize>,
}

/// All fields of the supported scalings.
#[derive(Debug, Default, Deserialize)]
struct ScalingFields {
    rope_type: Option<String>,
    /// The older name of `rope_type`.
    #[serde(rename = "type")]
    legacy_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
}

impl RopeFields {
    /// A base without scaling.
    pub(crate) fn of_theta(theta: f64) -> Self {
        Self { rope_theta: Some(theta), ..Self::default() }
    }

    /// Base and scaling, and the channels of a head that turn unless all do.
    pub(crate) fn lower(
        self,
        max_position_embeddings: usize,
        head_dim: usize,
    ) -> Result<(RopeConfig, Option<usize>), LoadError> {
        let (name, stated) = match (self.rope_parameters, self.rope_scaling) {
            (Some(parameters), _) => ("rope_parameters", parameters),
            (None, Some(scaling)) => ("rope_scaling", scaling),
            (None, None) => ("rope_scaling", Map::new()),
        };
        if let Some((layer_kind, _)) = stated.iter().find(|(_, value)| value.is_object()) {
            return Err(LoadError::config_field(
                name,
                format!(
                    "sets rotary parameters by layer kind (`{layer_kind}`); one set for all layers is supported"
                ),
            ));
        }
        let fields: ScalingFields = serde_json::from_value(Value::Object(stated))
            .map_err(|source| LoadError::Json { file: format!("config.json, field `{name}`"), source })?;
        let lowering = Lowering { name, fields, max_position_embeddings };

        let partial = lowering.fields.partial_rotary_factor.or(self.partial_rotary_factor);
        if let Some(part) = partial.filter(|part| !(*part > 0.0 && *part <= 1.0)) {
            return Err(LoadError::config_field(
                "partial_rotary_factor",
                format!("is {part}; it must be above 0 and at most 1"),
            ));
        }
        // A product that is whole in theory may lie just below its integer.
        let stated = self.rotary_dim.or(partial.map(|part| (head_dim as f64 * part + 1e-6) as usize));
        let rotary_dim = stated.filter(|&turned| turned != head_dim);
        let theta = lowering.fields.rope_theta.or(self.rope_theta).unwrap_or(DEFAULT_THETA);
        if !(theta.is_finite() && theta > 1.0) {
            return Err(LoadError::config_field("rope_theta", format!("is {theta}; it must be above 1")));
        }
        Ok((RopeConfig { theta, scaling: lowering.scaling()? }, rotary_dim))
    }
}

struct Lowering {
    name: &'static str,
    fields: ScalingFields,
    max_position_embeddings: usize,
}

impl Lowering {
    fn scaling(&self) -> Result<RopeScaling, LoadError> {
        let fields = &self.fields;
        let kind = fields.rope_type.as_deref().or(fields.legacy_type.as_deref()).unwrap_or("default");
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: self.factor(None)? }),
            "llama3" => {
                let low = self.positive("low_freq_factor", fields.low_freq_factor)?;
                let high = self.positive("high_freq_factor", fields.high_freq_factor)?;
                if low >= high {
                    return Err(self.error("low_freq_factor", "must be below high_freq_factor"));
                }
                Ok(RopeScaling::Llama3 {
                    factor: self.factor(None)?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_max_position_embeddings: match fields.original_max_position_embeddings {
                        Some(original) if original > 0 => original,
                        _ => return Err(self.error("original_max_position_embeddings", "must be given")),
                    },
                })
            }
            "yarn" => self.yarn(),
            "dynamic" | "longrope" | "su" => Err(LoadError::LengthDependentRope { kind: kind.to_owned() }),
            other => Err(LoadError::UnknownRope { kind: other.to_owned() }),
        }
    }

    fn yarn(&self) -> Result<RopeScaling, LoadError> {
        let fields = &self.fields;
        let original = fields.original_max_position_embeddings.unwrap_or(self.max_position_embeddings);
        if original == 0 {
            return Err(self.error("original_max_position_embeddings", "must be positive"));
        }
        // A stated factor wins, as in current transformers; some 4.x releases recomputed it from
        // the two context lengths, which contradicts the published long-context instructions of
        // Qwen.
        let ratio = fields
            .original_max_position_embeddings
            .map(|original| self.max_position_embeddings as f64 / original as f64);
        // Zero means "not set", as for the mscales.
        let or_default = |value: Option<f64>, default: f64| value.filter(|v| *v != 0.0).unwrap_or(default);
        let beta_fast = self.positive("beta_fast", Some(or_default(fields.beta_fast, 32.0)))?;
        let beta_slow = self.positive("beta_slow", Some(or_default(fields.beta_slow, 1.0)))?;
        if beta_fast < beta_slow {
            return Err(self.error("beta_fast", "must not be below beta_slow"));
        }
        if let Some(attention) = fields.attention_factor {
            self.positive("attention_factor", Some(attention))?;
        }
        Ok(RopeScaling::Yarn {
            factor: self.factor(ratio)?,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            attention_factor: fields.attention_factor,
            mscale: fields.mscale,
            mscale_all_dim: fields.mscale_all_dim,
            truncate: fields.truncate.unwrap_or(true),
        })
    }

    fn factor(&self, fallback: Option<f64>) -> Result<f64, LoadError> {
        let factor = self.positive("factor", self.fields.factor.or(fallback))?;
        if factor < 1.0 {
            return Err(self.error("factor", "must be at least 1"));
        }
        Ok(factor)
    }

    fn positive(&self, field: &str, value: Option<f64>) -> Result<f64, LoadError> {
        match value {
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            Some(value) => Err(self.error(field, &format!("is {value}; it must be positive"))),
            None => Err(self.error(field, "must be given")),
        }
    }

    fn error(&self, field: &str, problem: &str) -> LoadError {
        LoadError::config_field(&format!("{}.{field}", self.name), problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lower(config: Value) -> Result<RopeConfig, LoadError> {
        serde_json::from_value::<RopeFields>(config).unwrap().lower(40960, 128).map(|(rope, _)| rope)
    }

    #[test]
    fn both_spellings_give_the_same() {
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let mut parameters = scaling.clone();
        parameters["rope_theta"] = json!(500000.0);
        let old = lower(json!({"rope_theta": 500000.0, "rope_scaling": scaling})).unwrap();
        assert_eq!(old, lower(json!({"rope_parameters": parameters})).unwrap());
        assert!(matches!(old.scaling, RopeScaling::Llama3 { original_max_position_embeddings: 8192, .. }));
        assert_eq!(lower(json!({"rope_scaling": null})).unwrap(), RopeConfig::plain(10_000.0));
        assert_eq!(
            lower(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})).unwrap(),
            RopeConfig::plain(1e6)
        );
    }

    #[test]
    fn yarn_takes_the_stated_factor_and_its_defaults() {
        let stated = lower(
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
        );
        let RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, .. } = stated.unwrap().scaling else {
            panic!("not yarn");
        };
        assert_eq!((factor, beta_fast, beta_slow, truncate), (4.0, 32.0, 1.0, true));

        let derived =
            lower(json!({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 20480}}));
        assert!(matches!(derived.unwrap().scaling, RopeScaling::Yarn { factor: 2.0, .. }));
    }

    #[test]
    fn part_of_a_head_may_turn() {
        let part = |config: Value| {
            serde_json::from_value::<RopeFields>(config).unwrap().lower(40960, 128).unwrap().1
        };
        assert_eq!(part(json!({"partial_rotary_factor": 0.5})), Some(64));
        assert_eq!(part(json!({"rope_parameters": {"partial_rotary_factor": 0.25}})), Some(32));
        assert_eq!(part(json!({"rotary_dim": 64})), Some(64));
        assert_eq!((part(json!({"rotary_dim": 128})), part(json!({}))), (None, None));
    }

    #[test]
    fn refused_by_name() {
        for kind in ["dynamic", "longrope"] {
            let error = lower(json!({"rope_scaling": {"type": kind, "factor": 2.0}})).unwrap_err();
            assert!(
                matches!(&error, LoadError::LengthDependentRope { kind: named } if named == kind),
                "{error}"
            );
        }
        let error = lower(json!({"rope_scaling": {"rope_type": "mrope"}})).unwrap_err();
        assert!(error.to_string().contains("`mrope`"), "{error}");
    }

    #[test]
    fn bad_values_name_their_field() {
        let cases = [
            (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor"),
            (json!({"rope_scaling": {"type": "linear", "factor": 0.0}}), "rope_scaling.factor"),
            (json!({"rope_scaling": {"type": "yarn"}}), "rope_scaling.factor"),
            (
                json!({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
                "low_freq_factor",
            ),
            (json!({"rope_theta": -1.0}), "rope_theta"),
            (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
            (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), "full_attention"),
            (json!({"rope_scaling": {"type": "linear", "factor": "two"}}), "rope_scaling"),
        ];
        for (config, field) in cases {
            let message = lower(config.clone()).unwrap_err().to_string();
            assert!(message.contains(field), "{config}: {message}");
        }
    }
}
