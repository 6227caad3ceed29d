//! What all chunks of a stream have in common.

use serde::Serialize;
use serde_json::Value;

use super::usage::UsageReport;
use crate::app::App;
use crate::generate::{Prepared, PromptLogprobs, TokenTexts, Totals};
use crate::ids::unix_seconds;

/// Fields that every response and chunk of a request repeats, and how it is written.
pub struct Frame {
    pub id: String,
    object: &'static str,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
    pub texts: TokenTexts,
    pub logprobs: bool,
    include_usage: bool,
}

/// A chunk of a stream, or a whole response.
#[derive(Debug, Serialize)]
pub struct Chunk<C> {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<C>,
    system_fingerprint: String,
    /// Of a whole response: the usage. Of a chunk: absent unless asked for, then null but in the
    /// last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<UsageReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Where another machine fetches the prompt's pages, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<Value>,
}

impl Frame {
    pub fn new(app: &App, id: String, object: &'static str, prepared: &Prepared) -> Self {
        Self {
            id,
            object,
            created: unix_seconds(),
            model: prepared.model.clone(),
            fingerprint: app.fingerprint(),
            texts: TokenTexts::new(&app.text.tokenizer),
            logprobs: prepared.params().logprobs.is_some(),
            include_usage: prepared.include_usage,
        }
    }

    pub fn chunk<C>(&self, choices: Vec<C>) -> Chunk<C> {
        Chunk {
            id: self.id.clone(),
            object: self.object,
            created: self.created,
            model: self.model.clone(),
            choices,
            system_fingerprint: self.fingerprint.clone(),
            usage: self.include_usage.then_some(None),
            prompt_logprobs: None,
            kv_transfer_params: None,
        }
    }

    /// The chunk after all others: the usage, if it is asked for.
    pub fn last<C>(&self, totals: Totals) -> Vec<Chunk<C>> {
        let last = || Chunk { usage: Some(Some(totals.into())), ..self.chunk(Vec::new()) };
        self.include_usage.then(last).into_iter().collect()
    }
}
