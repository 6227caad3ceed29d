//! The router of GLM and DeepSeek: sigmoids with a correction, experts of the strongest groups, and a
//! shared expert. Both families spell its fields alike; their defaults differ.

use oscar_backend::{ExpertGroups, RouterRule, RouterScores};
use serde::Deserialize;

use super::{number, refuse_unless, yes};
use crate::config::{MOST_LAYERS, MoeConfig};
use crate::error::LoadError;
use crate::tensor_names::ExpertNames;

#[derive(Debug, Deserialize)]
pub(crate) struct CorrectedRouter {
    n_routed_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    #[serde(default = "number::<1>")]
    n_shared_experts: usize,
    first_k_dense_replace: Option<usize>,
    #[serde(default = "number::<1>")]
    moe_layer_freq: usize,
    /// `dense` or `sparse` for each layer, in newer files.
    mlp_layer_types: Option<Vec<String>>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    routed_scaling_factor: Option<f64>,
    #[serde(default = "yes")]
    norm_topk_prob: bool,
    topk_method: Option<String>,
    scoring_func: Option<String>,
}

/// What a family's file means that leaves these fields out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RouterDefaults {
    pub(crate) dense_layers: usize,
    pub(crate) groups: usize,
    pub(crate) kept_groups: usize,
    pub(crate) factor: f64,
}

impl CorrectedRouter {
    pub(crate) fn lower(self, layers: usize, defaults: RouterDefaults) -> Result<MoeConfig, LoadError> {
        let method = self.topk_method.as_deref().unwrap_or("noaux_tc");
        let scores = self.scoring_func.as_deref().unwrap_or("sigmoid");
        refuse_unless(method == "noaux_tc", "topk_method", method, "noaux_tc")?;
        refuse_unless(scores == "sigmoid", "scoring_func", scores, "sigmoid")?;
        refuse_unless(self.moe_layer_freq == 1, "moe_layer_freq", self.moe_layer_freq, "1")?;
        let Some(shared_width) = self.moe_intermediate_size.checked_mul(self.n_shared_experts) else {
            return Err(LoadError::config_field("n_shared_experts", "is too large"));
        };
        let first = self.first_k_dense_replace.unwrap_or(defaults.dense_layers);
        let dense_layers = match self.mlp_layer_types {
            None => (0..first.min(layers).min(MOST_LAYERS)).collect(),
            Some(kinds) => {
                let known = kinds.len() == layers && kinds.iter().all(|k| k == "dense" || k == "sparse");
                refuse_unless(known, "mlp_layer_types", format!("{kinds:?}"), "`dense` or `sparse` a layer")?;
                (0..layers).filter(|&layer| kinds[layer] == "dense").collect()
            }
        };
        let count = self.n_group.unwrap_or(defaults.groups);
        let kept = self.topk_group.unwrap_or(defaults.kept_groups);
        let (experts, chosen, width) =
            (self.n_routed_experts, self.num_experts_per_tok, self.moe_intermediate_size);
        Ok(MoeConfig {
            shared_width,
            rule: RouterRule {
                chosen,
                scores: RouterScores::Sigmoid,
                normalize: self.norm_topk_prob,
                factor: self.routed_scaling_factor.unwrap_or(defaults.factor) as f32,
                groups: (count != 1).then_some(ExpertGroups { count, kept }),
            },
            correction: true,
            dense_layers,
            ..MoeConfig::new(experts, chosen, width, ExpertNames::Mlp)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const DEFAULTS: RouterDefaults =
        RouterDefaults { dense_layers: 3, groups: 8, kept_groups: 4, factor: 2.5 };

    fn lower(change: Value) -> Result<MoeConfig, LoadError> {
        let mut fields =
            json!({"n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32});
        for (field, value) in change.as_object().unwrap() {
            fields[field] = value.clone();
        }
        serde_json::from_value::<CorrectedRouter>(fields).unwrap().lower(6, DEFAULTS)
    }

    #[test]
    fn fields_that_are_left_out_have_the_family_s_values() {
        let moe = lower(json!({})).unwrap();
        assert_eq!((moe.rule.groups, moe.rule.factor), (Some(ExpertGroups { count: 8, kept: 4 }), 2.5));
        assert_eq!((moe.dense_layers.as_slice(), moe.shared_width), (&[0, 1, 2][..], 32));
        let moe = lower(json!({"n_group": 1, "first_k_dense_replace": 9, "n_shared_experts": 2})).unwrap();
        assert_eq!((moe.rule.groups, moe.dense_layers.len(), moe.shared_width), (None, 6, 64));
        let kinds = json!(["dense", "sparse", "dense", "sparse", "sparse", "sparse"]);
        assert_eq!(lower(json!({"mlp_layer_types": kinds})).unwrap().dense_layers, [0, 2]);
    }

    #[test]
    fn other_routers_are_refused_by_field() {
        for (field, value) in [
            ("topk_method", json!("group_limited_greedy")),
            ("scoring_func", json!("softmax")),
            ("moe_layer_freq", json!(2)),
            ("mlp_layer_types", json!(["dense"])),
        ] {
            let message = lower(json!({field: value})).unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
    }
}
