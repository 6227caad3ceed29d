//! Settings of the cap on the rows of each conversation.

use crate::episodes::{EpisodeArgs, probe};
use crate::options::{at_least_one, serialize_optional_display};
use crate::progress::note;
use anyhow::{Result, anyhow, bail};
use oscar_backend::Backend;
use oscar_engine::{Cap, DEFAULT_EVICT, EVICT_BLOCK, PostCap, PostSetting, RowCap, default_split};
use oscar_models::Weights;
use oscar_runner::Runner;
use oscar_text::ModelText;
use oscar_views::{Budget, Eviction, HeadSplit, InputEmbeddings, Policy};
use serde::{Serialize, Serializer};
use std::sync::Arc;

#[derive(clap::Args, Clone, Serialize)]
pub struct EvictionArgs {
    /// Cap on the quantized rows of each conversation, beside its BF16 windows: rows of a layer and head on
    /// average (2048) or bytes (64M). A conversation that grows beyond it forgets the rows that --evict ranks lowest.
    #[arg(long, value_name = "N|SIZE")]
    #[serde(serialize_with = "serialize_optional_display")]
    pub kv_budget: Option<Budget>,
    /// Which rows a conversation keeps beyond --kv-budget: keydiff, snapkv, tova or recent; keydiff if absent.
    /// keydiff-post (or post), kvzip and episodes choose from the whole history, which stays in memory: they save
    /// what a step reads
    #[arg(long, value_name = "POLICY", requires = "kv_budget")]
    #[serde(serialize_with = "serialize_optional_display")]
    pub evict: Option<Eviction>,
    /// Division of the rows among heads: uniform, adaptive or global; the policy's own if absent. GPUs divide
    /// evenly
    #[arg(long, value_name = "NAME", requires = "kv_budget")]
    #[serde(serialize_with = "serialize_split")]
    pub evict_heads: Option<HeadSplit>,
    /// Rows beyond the budget after which a conversation is compacted again
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value_t = EVICT_BLOCK)]
    pub evict_block: usize,
    #[command(flatten)]
    #[serde(flatten)]
    pub episodes: EpisodeArgs,
}

fn serialize_split<S: Serializer>(split: &Option<HeadSplit>, serializer: S) -> Result<S::Ok, S::Error> {
    match split {
        Some(split) => serializer.serialize_str(split.name()),
        None => serializer.serialize_none(),
    }
}

impl EvictionArgs {
    /// The cap for this cache and device, if one is wanted.
    pub fn cap<B: Backend>(&self, runner: &Runner<B>) -> Result<Option<Cap>> {
        let Some(budget) = self.kv_budget else {
            if self.evict.is_some() {
                bail!("--evict needs --kv-budget");
            }
            return Ok(None);
        };
        let eviction = self.evict.unwrap_or(Eviction::Scorer(DEFAULT_EVICT));
        let heads = self.evict_heads.unwrap_or_else(|| default_split(runner.layout(), eviction));
        let cap = match eviction {
            Eviction::Scorer(evict) if !eviction.keeps_base() => {
                RowCap::new(runner, Policy { evict, budget, heads }, self.evict_block).map(Cap::Block)
            }
            _ => {
                let episodes = self.episodes.options()?;
                PostCap::new(runner, eviction, (budget, heads), self.evict_block, episodes).map(Cap::Post)
            }
        };
        let cap = cap.map_err(|why| anyhow!("--kv-budget {budget} --evict {eviction}: {why}"))?;
        let (heads, block) = (heads.name(), cap.block());
        let kept = match budget {
            Budget::Bytes(bytes) => crate::progress::bytes(bytes),
            rows => format!("{rows} rows"),
        };
        match cap {
            Cap::Block(_) => {
                note!(
                    "each conversation keeps {kept} of its history, chosen by {eviction} ({heads}) again after every {block} rows"
                );
            }
            Cap::Post(_) => note!(
                "each turn reads {kept} of the history, chosen by {eviction} ({heads}) again after every {block} rows; \
                 the whole history stays in memory"
            ),
        }
        Ok(Some(cap))
    }

    /// What views of whole histories need of a model; `None` if it has no chat template. A template
    /// that cannot render the probes ends the start only if the server itself was asked for views.
    pub fn post(&self, text: &ModelText, weights: &Arc<Weights>) -> Result<Option<PostSetting>> {
        let episodes = self.episodes.options()?;
        if text.chat.is_none() {
            return Ok(None);
        }
        let probe = match probe(text) {
            Err(error) if !self.evict.is_some_and(Eviction::keeps_base) => {
                note!("requests cannot ask for views of a whole history: {error:#}");
                return Ok(None);
            }
            probe => probe?,
        };
        Ok(Some(PostSetting { probe, embeddings: InputEmbeddings::new(weights.clone())?, episodes }))
    }
}
