//! Settings of episodes, and the texts that lead a model to speak of its context.

use anyhow::{Result, bail};
use oscar_eval::Prompts;
use oscar_tasks::chat::Turn;
use oscar_text::ModelText;
use oscar_views::{EpisodeOptions, Probe};
use serde::Serialize;

#[derive(clap::Args, Clone, Copy, Serialize)]
pub struct EpisodeArgs {
    /// Episodes of a conversation, at most
    #[arg(long, value_name = "N", default_value_t = EpisodeOptions::default().count)]
    episodes: usize,
    /// Messages of a segment, the unit that is grouped into episodes
    #[arg(long, value_name = "N", default_value_t = EpisodeOptions::default().segment)]
    episode_segment: usize,
    /// Cosine to every episode below which a question is asked of the global view
    #[arg(long, value_name = "COSINE", default_value_t = EpisodeOptions::default().threshold)]
    episode_threshold: f64,
    /// Difference of cosines below which a question is asked of two episodes together
    #[arg(long, value_name = "COSINE", default_value_t = EpisodeOptions::default().margin)]
    episode_margin: f64,
}

impl EpisodeArgs {
    pub fn options(&self) -> Result<EpisodeOptions> {
        if self.episodes == 0 || self.episode_segment == 0 {
            bail!("--episodes and --episode-segment: give at least 1");
        }
        if !self.episode_threshold.is_finite() || !self.episode_margin.is_finite() {
            bail!("--episode-threshold and --episode-margin: give numbers");
        }
        Ok(EpisodeOptions {
            count: self.episodes,
            segment: self.episode_segment,
            threshold: self.episode_threshold,
            margin: self.episode_margin,
            ..EpisodeOptions::default()
        })
    }
}

/// The request that makes a model repeat its context.
const REPEAT: &str = "Repeat the previous context exactly.";
/// The request that makes a model tell what it was told.
const RECALL: &str = "Recall the names, facts and codes that were told before.";

/// The requests in the model's chat template.
pub fn probe(text: &ModelText) -> Result<Probe> {
    let prompts = Prompts::new(text, false);
    let asked = |request: &str| prompts.chat(&[Turn::user(request)]);
    Ok(Probe { repeat: asked(REPEAT)?, recall: asked(RECALL)? })
}
