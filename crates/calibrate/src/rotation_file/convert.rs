//! To and from the files of the public RotationZoo.

use super::{Clips, Metadata, RotationFile, RotationFileError};
use crate::bits::BitPlan;
use crate::options::{ClipPolicy, Granularity, Statistic};
use crate::zoo::{ZooFile, ZooLayer};
use oscar_codec::{Composition, HeadRotations, Rotation, RotationSet, Side};
use std::collections::BTreeMap;

impl RotationFile {
    /// The K and V files of the RotationZoo: format 1 for one rotation in each layer, format 2 for
    /// one in each head.
    ///
    /// Neither holds key means or clip ratios. Unless `lossy`, rotations that have them are
    /// refused.
    pub fn to_zoo(&self, lossy: bool) -> Result<(ZooFile, ZooFile), RotationFileError> {
        if !lossy {
            if self.metadata.centred {
                return Err(RotationFileError::WouldLose("the key means".into()));
            }
            if !self.bits.is_empty() {
                return Err(RotationFileError::WouldLose("the tables of widths".into()));
            }
            let [layers, kv_heads, _] = self.shape();
            if self.clips != Clips::uniform(layers * kv_heads, (2, 2)) {
                return Err(RotationFileError::WouldLose("clip ratios other than the official ones".into()));
            }
        }
        Ok((self.zoo_side(Side::Key), self.zoo_side(Side::Value)))
    }

    fn zoo_side(&self, side: Side) -> ZooFile {
        let [layers, _, d] = self.shape();
        let heads = self.stored_heads();
        let per_head = self.metadata.granularity == Granularity::Head;
        let statistic = match (side, self.metadata.statistic.as_str()) {
            (Side::Key, _) => "qqt",
            (Side::Value, s) if s == Statistic::Plain.name() => "vtv",
            (Side::Value, s) if s == Statistic::Paper.name() => "svsv",
            (Side::Value, _) => "sst",
        };
        let eigenvalues = match side {
            Side::Key => &self.key_eigenvalues,
            Side::Value => &self.value_eigenvalues,
        };
        let mut stored = self.stored();
        let layer = |index: usize| {
            let rotation = stored
                .by_ref()
                .take(heads)
                .flat_map(|head| match side {
                    Side::Key => head.key.matrix(),
                    Side::Value => head.value.matrix(),
                })
                .copied()
                .collect();
            let layer = ZooLayer {
                head_dim: d,
                heads: per_head.then_some(heads),
                rotation,
                eigenvalues: eigenvalues.as_ref().map(|v| v[index * heads * d..][..heads * d].to_vec()),
                q_rotation: None,
                k_mean: None,
                o_rotation: None,
            };
            (index as u32, layer)
        };
        ZooFile {
            format_version: if per_head { 2 } else { 1 },
            objective: match per_head {
                true => "cov_eig_hadamard_perhead".into(),
                false => match self.metadata.composition.parse::<Composition>() {
                    Ok(composition) => format!("{statistic}_{composition}"),
                    Err(_) => statistic.into(),
                },
            },
            source_grouping: if per_head { "per_kv_head" } else { "layer" }.into(),
            metadata: BTreeMap::new(),
            layers: (0..layers).map(layer).collect(),
        }
    }

    /// Rotations of a model with `kv_heads` from the K and V files of the RotationZoo, formats 1 to
    /// 3. The clip ratios are the official ones. Pairs of format 3 whose queries or outputs need
    /// another matrix are refused.
    pub fn from_zoo(key: &ZooFile, value: &ZooFile, kv_heads: usize) -> Result<Self, RotationFileError> {
        let pair = |reason: String| RotationFileError::Pair(reason);
        let layers = key.layers.len();
        if !key.layers.keys().eq(value.layers.keys()) {
            return Err(pair(format!("K has {layers} layers, V has {} or others", value.layers.len())));
        }
        if key.layers.keys().ne((0..layers as u32).collect::<Vec<_>>().iter()) {
            return Err(pair("layers are missing between the first and the last: a hybrid model".into()));
        }
        let d = key.layers.values().next().map_or(0, |layer| layer.head_dim);
        let centred = key.layers.values().any(|layer| layer.k_mean.is_some());
        let mut heads = Vec::with_capacity(layers * kv_heads);
        for (id, (key, value)) in key.layers.values().zip(value.layers.values()).enumerate() {
            for (side, layer) in [("K", key), ("V", value)] {
                if layer.head_dim != d {
                    return Err(pair(format!(
                        "{side} of layer {id} has heads of {}, others {d}",
                        layer.head_dim
                    )));
                }
                if layer.heads.is_some_and(|n| n != kv_heads) {
                    let found = layer.heads.unwrap_or_default();
                    return Err(RotationFileError::OtherModel(format!(
                        "{side} of layer {id} has {found} heads, the model has {kv_heads}"
                    )));
                }
                let partner = layer.q_rotation.as_ref().or(layer.o_rotation.as_ref());
                if partner.is_some_and(|partner| *partner != layer.rotation) {
                    return Err(pair(format!("{side} of layer {id} is an oblique pair, not a rotation")));
                }
            }
            if key.k_mean.is_some() != centred {
                return Err(pair(format!("layer {id} differs from others in having a key mean")));
            }
            for head in 0..kv_heads {
                let rotation = |layer: &ZooLayer| {
                    let matrix = layer.rotation_of_head(head).unwrap_or_default().to_vec();
                    Rotation::from_matrix(d, matrix)
                };
                let mean_at = if key.heads.is_some() { head * d } else { 0 };
                heads.push(HeadRotations {
                    key: rotation(key)?,
                    value: rotation(value)?,
                    key_mean: key.k_mean.as_ref().map(|mean| mean[mean_at..mean_at + d].to_vec()),
                });
            }
        }
        let shared = |file: &ZooFile| file.layers.values().all(|layer| layer.heads.is_none());
        let granularity = match shared(key) && shared(value) {
            true => Granularity::Layer,
            false => Granularity::Head,
        };
        let file = Self {
            rotations: RotationSet::per_head(layers, kv_heads, d, heads)?,
            clips: Clips::uniform(layers * kv_heads, (2, 2)),
            key_eigenvalues: eigenvalues(key, granularity, kv_heads),
            value_eigenvalues: eigenvalues(value, granularity, kv_heads),
            bits: BitPlan::default(),
            metadata: Metadata {
                model_fingerprint: None,
                granularity,
                statistic: statistic(&value.objective),
                composition: composition(&key.objective),
                centred,
                clip: ClipPolicy::Official.name().into(),
                clip_bits: (2, 2),
                tokens: 0,
                sequences: 0,
                sequence_len: 0,
                text_digest: None,
                tool: format!("oscar {}", env!("CARGO_PKG_VERSION")),
                note: format!("imported from RotationZoo format {}", key.format_version),
            },
        };
        file.check()?;
        Ok(file)
    }
}

/// The value statistic that an objective such as `sst_r_h_pbr` begins with; other objectives as
/// they are.
fn statistic(objective: &str) -> String {
    match objective.split('_').next() {
        Some("sst") => Statistic::Coded.name().into(),
        Some("svsv") => Statistic::Paper.name().into(),
        Some("vtv") => Statistic::Plain.name().into(),
        _ => objective.into(),
    }
}

/// The composition that an objective such as `qqt_r_h_pbr` ends with.
fn composition(objective: &str) -> String {
    let named = objective.split_once('_').and_then(|(_, name)| name.parse::<Composition>().ok());
    named.map_or("as published", Composition::name).into()
}

/// Eigenvalues in our order; `None` if a layer has none.
fn eigenvalues(file: &ZooFile, granularity: Granularity, kv_heads: usize) -> Option<Vec<f32>> {
    let mut all = Vec::new();
    for layer in file.layers.values() {
        let values = layer.eigenvalues.as_ref()?;
        let copies = if granularity == Granularity::Head && layer.heads.is_none() { kv_heads } else { 1 };
        (0..copies).for_each(|_| all.extend_from_slice(values));
    }
    Some(all)
}
