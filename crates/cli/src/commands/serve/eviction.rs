//! Settings of the cap on the rows of each conversation.

use crate::options::{at_least_one, serialize_optional_display};
use crate::progress::note;
use anyhow::{Result, anyhow, bail};
use oscar_backend::Backend;
use oscar_engine::{DEFAULT_EVICT, EVICT_BLOCK, RowCap, default_split};
use oscar_runner::Runner;
use oscar_views::{Budget, Evict, HeadSplit, Policy};
use serde::{Serialize, Serializer};

#[derive(clap::Args, Clone, Serialize)]
pub struct EvictionArgs {
    /// Cap on the quantized rows of each conversation, beside its BF16 windows: rows of a layer and head on
    /// average (2048) or bytes (64M). A conversation that grows beyond it forgets the rows that --evict ranks lowest.
    /// CPU only
    #[arg(long, value_name = "N|SIZE")]
    #[serde(serialize_with = "serialize_optional_display")]
    pub kv_budget: Option<Budget>,
    /// Which rows a conversation keeps beyond --kv-budget: keydiff, snapkv, tova or recent; keydiff if absent
    #[arg(long, value_name = "POLICY", requires = "kv_budget")]
    #[serde(serialize_with = "serialize_optional_display")]
    pub evict: Option<Evict>,
    /// Division of the rows among heads: uniform, adaptive or global; the policy's own if absent
    #[arg(long, value_name = "NAME", requires = "kv_budget")]
    #[serde(serialize_with = "serialize_split")]
    pub evict_heads: Option<HeadSplit>,
    /// Rows beyond the budget after which a conversation is compacted again
    #[arg(long, value_name = "N", value_parser = at_least_one, default_value_t = EVICT_BLOCK)]
    pub evict_block: usize,
}

fn serialize_split<S: Serializer>(split: &Option<HeadSplit>, serializer: S) -> Result<S::Ok, S::Error> {
    match split {
        Some(split) => serializer.serialize_str(split.name()),
        None => serializer.serialize_none(),
    }
}

impl EvictionArgs {
    /// The cap for this cache and device, if one is wanted.
    pub fn cap<B: Backend>(&self, runner: &Runner<B>) -> Result<Option<RowCap>> {
        let Some(budget) = self.kv_budget else {
            if self.evict.is_some() {
                bail!("--evict needs --kv-budget");
            }
            return Ok(None);
        };
        let evict = self.evict.unwrap_or(DEFAULT_EVICT);
        let heads = self.evict_heads.unwrap_or_else(|| default_split(evict));
        let cap = RowCap::new(runner, Policy { evict, budget, heads }, self.evict_block)
            .map_err(|why| anyhow!("--kv-budget {budget}: {why}"))?;
        note!(
            "conversations keep {budget} of history by {evict} ({}), compacted every {} rows",
            heads.name(),
            cap.block
        );
        Ok(Some(cap))
    }
}
