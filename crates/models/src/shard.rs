//! The part of a model that one rank holds.
//!
//! Each rank has a share of the KV heads with their query heads, of the columns of the feed-forward
//! parts, of the experts ([`HeldExperts`](oscar_backend::HeldExperts)) and of the rows of the output
//! head. Norms, routers, RoPE and the embedding are on every rank. The output and down projections are
//! split by their inputs, so each rank has a summand of the result.
//!
//! **Invariant:** the parts of all ranks together are the model, each weight once.

use std::ops::Range;

use oscar_backend::Backend;
use oscar_codec::{HeadRotations, RotationSet};

use crate::config::{DecoderConfig, Family};
use crate::error::LoadError;
use crate::tensor_names::Projection;
use crate::transformer::BuildError;
use crate::weights::Weights;

/// A rank's part of a model.
#[derive(Debug, Clone)]
pub struct Shard {
    rank: usize,
    ranks: usize,
    whole: DecoderConfig,
    part: DecoderConfig,
}

impl Shard {
    /// The part that belongs on this device: the whole model if it is no rank.
    ///
    /// # Errors
    /// If the model cannot be split over this number of ranks; says which numbers work.
    pub fn of<B: Backend>(backend: &B, whole: &DecoderConfig) -> Result<Self, BuildError> {
        let (rank, ranks) = backend.communicator().map_or((0, 1), |c| (c.rank(), c.ranks()));
        Self::new(rank, ranks, whole)
    }

    pub fn new(rank: usize, ranks: usize, whole: &DecoderConfig) -> Result<Self, BuildError> {
        let refuse = |why: String| Err(BuildError::Ranks { ranks, why });
        if ranks > 1 && whole.latent.is_some() {
            return refuse("latent attention (MLA) is not split yet".into());
        }
        if ranks > 1 && whole.delta.is_some() {
            return refuse("layers with a recurrent state (gated delta nets) are not split yet".into());
        }
        if ranks == 0 || !whole.kv_heads.is_multiple_of(ranks) {
            let works: Vec<String> = (1..=whole.kv_heads)
                .filter(|n| whole.kv_heads.is_multiple_of(*n))
                .map(|n| n.to_string())
                .collect();
            let heads = whole.kv_heads;
            return refuse(format!(
                "its {heads} KV heads do not divide by {ranks}; {} works",
                works.join(", ")
            ));
        }
        // Other families may do more between a product that is summed over ranks and the residual.
        let dense = [Family::Qwen3, Family::Qwen2, Family::Llama, Family::Mistral];
        let split = [&dense[..], &[Family::Qwen3Moe, Family::Mixtral, Family::Glm4Moe]].concat();
        if ranks > 1 && !split.contains(&whole.family) {
            let names: Vec<_> = split.iter().map(|family| family.model_type()).collect();
            let names = names.join(", ");
            return refuse(format!("{} is not split yet, only {names}", whole.family.model_type()));
        }
        let few_experts = whole.moe.as_ref().is_some_and(|moe| moe.experts < ranks);
        if whole.intermediate_size < ranks || whole.vocab_size < ranks || few_experts {
            return refuse("it has fewer feed-forward columns, experts or tokens than ranks".into());
        }
        let mut shard = Self { rank, ranks, whole: whole.clone(), part: whole.clone() };
        shard.part.kv_heads = whole.kv_heads / ranks;
        shard.part.query_heads = whole.query_heads / ranks;
        shard.part.intermediate_size = shard.share(whole.intermediate_size).len();
        Ok(shard)
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Whether there are other ranks.
    pub fn is_split(&self) -> bool {
        self.ranks > 1
    }

    pub fn whole(&self) -> &DecoderConfig {
        &self.whole
    }

    /// The model as this rank computes it: its own heads and feed-forward columns. The vocabulary
    /// is that of the whole model.
    pub fn part(&self) -> &DecoderConfig {
        &self.part
    }

    /// This rank's KV heads.
    pub fn kv_heads(&self) -> Range<usize> {
        self.share(self.whole.kv_heads)
    }

    /// The tokens whose logits this rank computes.
    pub fn vocabulary(&self) -> Range<usize> {
        self.share(self.whole.vocab_size)
    }

    /// Of the rotations of a layer, those of this rank's heads.
    pub fn rotations<'a>(&self, set: &'a RotationSet, layer: usize) -> &'a [HeadRotations] {
        &set.heads()[layer * self.whole.kv_heads..][self.kv_heads()]
    }

    /// This rank's share of `count` things, as even as it gets.
    fn share(&self, count: usize) -> Range<usize> {
        count * self.rank / self.ranks..count * (self.rank + 1) / self.ranks
    }

    /// The rows (outputs) and columns (inputs) of a projection that this rank holds.
    fn cut(&self, projection: Projection) -> [Range<usize>; 2] {
        let [rows, columns] = projection.shape(&self.whole);
        let heads = |width: usize| {
            let Range { start, end } = self.kv_heads();
            let each = width / self.whole.kv_heads;
            start * each..end * each
        };
        match projection {
            Projection::Query | Projection::Key | Projection::Value => [heads(rows), 0..columns],
            // Latent attention is not split.
            Projection::QueryDown | Projection::QueryUp | Projection::LatentDown | Projection::LatentUp => {
                [0..rows, 0..columns]
            }
            Projection::Output => [0..rows, heads(columns)],
            Projection::Gate | Projection::Up => [self.share(rows), 0..columns],
            Projection::Down => [0..rows, self.share(columns)],
        }
    }

    /// This rank's part of a projection, in f32, row-major.
    pub(crate) fn projection(
        &self,
        weights: &Weights,
        layer: usize,
        projection: Projection,
    ) -> Result<Vec<f32>, LoadError> {
        let values = weights.matrix(&weights.names().weight(layer, projection))?.to_f32_vec();
        let [rows, columns] = self.cut(projection);
        let [_, width] = projection.shape(&self.whole);
        Ok(cut(values, width, rows, columns))
    }

    /// This rank's part of the bias of a projection. A sum over ranks gets its bias once, from the
    /// first.
    pub(crate) fn bias(
        &self,
        weights: &Weights,
        layer: usize,
        projection: Projection,
    ) -> Result<Vec<f32>, LoadError> {
        let [rows, columns] = self.cut(projection);
        let is_summand = columns.len() < projection.shape(&self.whole)[1];
        if !projection.has_bias(&self.whole) || is_summand && self.rank > 0 {
            return Ok(vec![0.0; rows.len()]);
        }
        Ok(weights.vector(&weights.names().bias(layer, projection))?[rows].to_vec())
    }

    /// This rank's rows of the output head, in f32.
    pub(crate) fn head(&self, weights: &Weights) -> Result<Vec<f32>, LoadError> {
        let names = weights.names();
        let name = if self.whole.tie_word_embeddings { names.embedding() } else { names.lm_head() };
        let width = self.whole.hidden_size;
        Ok(cut(weights.matrix(&name)?.to_f32_vec(), width, self.vocabulary(), 0..width))
    }
}

/// Some rows and columns of a matrix that is `width` wide.
fn cut(values: Vec<f32>, width: usize, rows: Range<usize>, columns: Range<usize>) -> Vec<f32> {
    if columns == (0..width) && rows == (0..values.len() / width.max(1)) {
        return values;
    }
    let rows = &values[rows.start * width..rows.end * width];
    rows.chunks_exact(width).flat_map(|row| &row[columns.clone()]).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiny::tiny_config;

    #[test]
    fn the_parts_of_all_ranks_are_the_model_each_weight_once() {
        for ranks in [1, 2, 4] {
            let whole = DecoderConfig {
                query_heads: 12,
                kv_heads: 4,
                intermediate_size: 99,
                vocab_size: 127,
                ..tiny_config(Family::Llama)
            };
            let shards: Vec<Shard> = (0..ranks).map(|r| Shard::new(r, ranks, &whole).unwrap()).collect();
            for projection in Projection::of(&whole) {
                let [rows, columns] = projection.shape(&whole);
                let mut held = vec![0; rows * columns];
                for shard in &shards {
                    let [mine_rows, mine_columns] = shard.cut(projection);
                    assert_eq!(
                        [mine_rows.len(), mine_columns.len()],
                        projection.shape(shard.part()),
                        "{projection:?}: the part has the shape of its configuration"
                    );
                    mine_rows.for_each(|r| mine_columns.clone().for_each(|c| held[r * columns + c] += 1));
                }
                assert!(held.iter().all(|&count| count == 1), "{projection:?} over {ranks}");
            }
            let tokens: Vec<usize> = shards.iter().flat_map(Shard::vocabulary).collect();
            assert_eq!(tokens, (0..127).collect::<Vec<_>>());
        }
    }

    #[test]
    fn models_that_cannot_be_split_are_refused_by_name() {
        let refused = |ranks, config: &DecoderConfig| Shard::new(0, ranks, config).unwrap_err().to_string();
        let llama = DecoderConfig { query_heads: 12, kv_heads: 6, ..tiny_config(Family::Llama) };
        let message = refused(4, &llama);
        assert!(message.contains("6 KV heads do not divide by 4; 1, 2, 3, 6 works"), "{message}");
        assert!(refused(0, &llama).contains("0 ranks"));
        let experts = DecoderConfig { query_heads: 16, kv_heads: 16, ..tiny_config(Family::Qwen3Moe) };
        assert!(Shard::new(0, 2, &experts).is_ok());
        assert!(refused(16, &experts).contains("experts or tokens than ranks"));
        let other = DecoderConfig { family: Family::MiniMaxM2, ..llama };
        assert!(
            refused(2, &other)
                .contains("minimax_m2 is not split yet, only qwen3, qwen2, llama, mistral, qwen3_moe")
        );
        assert!(Shard::new(0, 1, &tiny_config(Family::MiniMaxM2)).is_ok(), "one rank holds any model");
    }

    #[test]
    fn a_cut_keeps_rows_and_columns() {
        let values: Vec<f32> = (0..12).map(|v| v as f32).collect();
        assert_eq!(cut(values.clone(), 4, 0..3, 0..4), values);
        assert_eq!(cut(values.clone(), 4, 1..3, 0..4), values[4..]);
        assert_eq!(cut(values, 4, 0..3, 1..3), [1.0, 2.0, 5.0, 6.0, 9.0, 10.0]);
    }
}
