//! The gated delta net: its sizes, its tensors, and the layers that have it.
//!
//! Two files lay its projections out differently. Qwen3-Next has `in_proj_qkvz` (by key head: query, key,
//! the values of its value heads, their gates) and `in_proj_ba` (by key head: the `b`, then the `a` of its
//! value heads). Qwen3.5 has `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`. Devices get one matrix
//! with the rows `[q | k | v | z | b | a]`.

use oscar_backend::DeltaShape;

use crate::config::DecoderConfig;
use crate::error::LoadError;
use crate::tensor_names::TensorNames;
use crate::weights::Weights;

/// The layers with a gated delta net.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaConfig {
    pub shape: DeltaShape,
    /// Ascending.
    pub layers: Vec<usize>,
    /// The file joins the projections, as Qwen3-Next does.
    pub joined: bool,
}

/// The input projections in the order of the rows that devices get, as both files name them.
const JOINED: [&str; 2] = ["in_proj_qkvz", "in_proj_ba"];
const SEPARATE: [&str; 4] = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"];

impl DeltaConfig {
    /// Parameters of a layer's matrices.
    pub(crate) fn parameters(&self, hidden: usize) -> usize {
        hidden * (self.shape.projected() + self.shape.value_width())
    }

    /// The matrices of a layer: name, outputs, inputs.
    pub(crate) fn matrices(
        &self,
        names: &TensorNames,
        layer: usize,
        hidden: usize,
    ) -> Vec<(String, [usize; 2])> {
        let shape = &self.shape;
        let (values, heads) = (shape.value_width(), shape.value_heads);
        let inputs: &[(&str, usize)] = match self.joined {
            true => &[(JOINED[0], shape.channels() + values), (JOINED[1], 2 * heads)],
            false => &[
                (SEPARATE[0], shape.channels()),
                (SEPARATE[1], values),
                (SEPARATE[2], heads),
                (SEPARATE[3], heads),
            ],
        };
        let name = |part: &str| names.in_layer(layer, &format!("linear_attn.{part}.weight"));
        let inputs = inputs.iter().map(|&(part, outputs)| (name(part), [outputs, hidden]));
        inputs.chain([(name("out_proj"), [hidden, values])]).collect()
    }

    /// All tensors of a layer.
    pub(crate) fn required(
        &self,
        names: &TensorNames,
        layer: usize,
        hidden: usize,
    ) -> Vec<(String, Vec<usize>)> {
        let (shape, [conv, decay, bias, norm]) = (&self.shape, names.delta_vectors(layer));
        let mut all: Vec<_> = self
            .matrices(names, layer, hidden)
            .into_iter()
            .map(|(name, shape)| (name, shape.to_vec()))
            .collect();
        all.push((conv, vec![shape.channels(), 1, shape.taps]));
        all.extend([decay, bias].map(|name| (name, vec![shape.value_heads])));
        all.push((norm, vec![shape.value_dim]));
        all
    }

    /// The input projection, rows `[q | k | v | z | b | a]`.
    pub(crate) fn input(
        &self,
        weights: &Weights,
        layer: usize,
        hidden: usize,
    ) -> Result<Vec<f32>, LoadError> {
        let mut files = self.matrices(weights.names(), layer, hidden);
        files.pop();
        let parts = files
            .iter()
            .map(|(name, _)| Ok(weights.matrix(name)?.to_f32_vec()))
            .collect::<Result<Vec<_>, LoadError>>()?;
        if !self.joined {
            return Ok(parts.concat());
        }
        let shape = &self.shape;
        let shared = shape.value_heads / shape.key_heads;
        let (d, values) = (shape.key_dim, shared * shape.value_dim);
        // Of each key head: these rows of the first or the second tensor.
        let runs = [(0, 0, d), (0, d, d), (0, 2 * d, values), (0, 2 * d + values, values)];
        let runs = runs.into_iter().chain([(1, 0, shared), (1, shared, shared)]);
        let of_head = [2 * (d + values), 2 * shared];
        let mut rows = Vec::with_capacity(shape.projected() * hidden);
        for (tensor, first, count) in runs {
            for head in 0..shape.key_heads {
                let start = (head * of_head[tensor] + first) * hidden;
                rows.extend_from_slice(&parts[tensor][start..start + count * hidden]);
            }
        }
        Ok(rows)
    }

    /// Refuses sizes that no forward pass can use, and sizes that only a corrupt file states.
    pub(crate) fn validate(&self, config: &DecoderConfig) -> Result<(), LoadError> {
        const LARGEST: usize = 1 << 16;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, taps } = self.shape;
        for (field, value) in [
            ("linear_num_key_heads", key_heads),
            ("linear_num_value_heads", value_heads),
            ("linear_key_head_dim", key_dim),
            ("linear_value_head_dim", value_dim),
            ("linear_conv_kernel_dim", taps),
        ] {
            if value == 0 || value > LARGEST {
                let problem = format!("is {value}; it must be between 1 and {LARGEST}");
                return Err(LoadError::config_field(field, problem));
            }
        }
        if !value_heads.is_multiple_of(key_heads) {
            let problem = format!("is {value_heads}, which {key_heads} key heads do not divide");
            return Err(LoadError::config_field("linear_num_value_heads", problem));
        }
        let widths = [key_heads * key_dim, value_heads * value_dim];
        if widths.iter().any(|&width| width > 1 << 20) {
            let problem =
                format!("gives heads of {widths:?} channels together; at most {} are read", 1 << 20);
            return Err(LoadError::config_field("linear_value_head_dim", problem));
        }
        match self.layers.is_empty() || self.layers.len() >= config.layers {
            true => Err(LoadError::config_field(
                "layer_types",
                "must have layers with linear_attention and layers with full_attention",
            )),
            false => Ok(()),
        }
    }
}

impl TensorNames {
    /// Of a delta net: the convolution, the logarithm of the decay, the bias of its time steps, the norm.
    pub(crate) fn delta_vectors(&self, layer: usize) -> [String; 4] {
        ["conv1d.weight", "A_log", "dt_bias", "norm.weight"]
            .map(|name| self.in_layer(layer, &format!("linear_attn.{name}")))
    }
}

impl DecoderConfig {
    /// The delta net of a layer; `None` if the layer has attention.
    pub fn delta_of(&self, layer: usize) -> Option<&DeltaConfig> {
        self.delta.as_ref().filter(|delta| delta.layers.binary_search(&layer).is_ok())
    }

    /// Layers with a delta net before this one.
    pub(crate) fn deltas_before(&self, layer: usize) -> usize {
        self.delta.as_ref().map_or(0, |delta| delta.layers.partition_point(|&other| other < layer))
    }

    /// The number of a layer among those that have rows in the cache.
    pub fn cache_layer(&self, layer: usize) -> usize {
        layer - self.deltas_before(layer)
    }

    /// Layers that have rows in the cache: those with attention.
    pub fn cache_layers(&self) -> usize {
        self.layers - self.deltas_before(self.layers)
    }

    /// Bytes of the recurrent state of a sequence; 0 in models without delta nets.
    pub fn state_bytes(&self) -> usize {
        let count = self.deltas_before(self.layers);
        self.delta.as_ref().map_or(0, |delta| count * delta.shape.state_bytes())
    }

    /// What layers with delta nets keep.
    pub fn describe_delta(&self) -> Option<String> {
        self.delta.as_ref().map(|_| format!(
            "{} of {} layers are gated delta nets: a state of {:.1} MiB a sequence instead of rows; a prefix hit \
             begins where a state was kept, at the end of a prompt or an answer",
            self.deltas_before(self.layers),
            self.layers,
            self.state_bytes() as f64 / 1_048_576.0
        ))
    }
}

#[cfg(test)]
mod tests {
    use crate::shapes;

    #[test]
    fn layers_of_the_cache_are_those_with_attention() {
        let config = shapes::shape("qwen3-next-80b-a3b").unwrap();
        assert_eq!((config.cache_layers(), config.full_attention_layers().len()), (12, 12));
        assert_eq!([3, 7, 47].map(|layer| config.cache_layer(layer)), [0, 1, 11]);
        assert!(config.delta_of(3).is_none() && config.delta_of(4).is_some());
        // 36 layers of 32 matrices of 128 × 128 and three rows of 8192 channels, in f32.
        assert_eq!(config.state_bytes(), 36 * (32 * 128 * 128 + 3 * 8192) * 4);
        assert!(config.describe_delta().unwrap().contains("36 of 48 layers"));
    }
}
