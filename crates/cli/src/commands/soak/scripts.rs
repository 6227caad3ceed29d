//! What the clients talk about: conversations that share beginnings and branch, and the cold answer to every turn.

use super::http;
use anyhow::{Context, Result, ensure};
use oscar_codec::random::SplitMix64;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Turns of a conversation, and ways to go on after each.
const TURNS: usize = 4;
const BRANCHES: usize = 2;

/// How long the reference may take for one answer.
const PATIENCE: Duration = Duration::from_secs(900);

/// One question of one conversation after given turns. Whoever asks it gets the same answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Turn {
    conversation: usize,
    /// The branch taken at every turn so far.
    branches: Vec<usize>,
    /// A long answer, which makes others give way.
    is_long: bool,
}

/// What an answer is compared by.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    pub content: String,
    pub finish: String,
    /// Absent in streams.
    pub logprobs: Option<Value>,
}

type Slot = Arc<Mutex<Option<Said>>>;

/// The conversations and the answers of a server without a prefix cache, found out when first needed.
pub struct Scripts {
    conversations: usize,
    reference: String,
    cold: Mutex<HashMap<Turn, Slot>>,
}

impl Scripts {
    pub fn new(conversations: usize, reference: String) -> Self {
        Self { conversations, reference, cold: Mutex::default() }
    }

    pub fn draw(&self, random: &mut SplitMix64) -> Turn {
        let turns = 1 + random.below(TURNS);
        Turn {
            conversation: random.below(self.conversations),
            branches: (0..turns).map(|_| random.below(BRANCHES)).collect(),
            is_long: random.below(12) == 0,
        }
    }

    /// The request for a turn: the earlier answers in it are the cold ones, so it depends on the turn alone.
    pub fn request(&self, turn: &Turn) -> Result<Value> {
        let mut messages = vec![json!({"role": "system", "content": opening(turn.conversation)})];
        for (at, &branch) in turn.branches.iter().enumerate() {
            if at > 0 {
                let earlier = Turn { branches: turn.branches[..at].to_vec(), is_long: false, ..turn.clone() };
                messages.push(json!({"role": "assistant", "content": self.cold(&earlier)?.content}));
            }
            messages.push(json!({"role": "user", "content": question(turn.conversation, at, branch)}));
        }
        let most = if turn.is_long { 500 } else { 8 + turn.conversation % 24 };
        Ok(json!({"messages": messages, "temperature": 0, "max_tokens": most, "ignore_eos": turn.is_long,
            "logprobs": true, "top_logprobs": 2}))
    }

    /// The answer of a server that keeps no prefixes.
    pub fn cold(&self, turn: &Turn) -> Result<Said> {
        let slot = {
            let mut known = self.cold.lock().unwrap_or_else(PoisonError::into_inner);
            known.entry(turn.clone()).or_default().clone()
        };
        // Others that want the same answer wait for it here.
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(said) = &*slot {
            return Ok(said.clone());
        }
        let body = self.request(turn)?.to_string();
        let answer = http::call(&self.reference, "/v1/chat/completions", &body, &[], PATIENCE)?;
        ensure!(answer.status == 200, "the reference answers {}: {}", answer.status, answer.body);
        let said = Said::of_answer(&serde_json::from_str(&answer.body)?).context("the reference's answer")?;
        *slot = Some(said.clone());
        Ok(said)
    }
}

impl Said {
    pub fn of_answer(answer: &Value) -> Option<Self> {
        let choice = &answer["choices"][0];
        Some(Self {
            content: choice["message"]["content"].as_str()?.to_owned(),
            finish: choice["finish_reason"].as_str()?.to_owned(),
            logprobs: Some(choice["logprobs"].clone()),
        })
    }

    /// Joins the chunks of a stream.
    pub fn of_stream(chunks: &[Value]) -> Option<Self> {
        let text =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        let finish = chunks.iter().find_map(|chunk| chunk["choices"][0]["finish_reason"].as_str())?;
        Some(Self { content: text, finish: finish.to_owned(), logprobs: None })
    }

    /// Equal in all that both know.
    pub fn agrees(&self, other: &Self) -> bool {
        let logprobs = self.logprobs.as_ref().zip(other.logprobs.as_ref());
        self.content == other.content && self.finish == other.finish && logprobs.is_none_or(|(a, b)| a == b)
    }
}

/// The beginning of a conversation; several share the first part of it.
fn opening(conversation: usize) -> String {
    let shared = format!("The harbour of town {} lay still in the morning. ", conversation % 4).repeat(20);
    let own = format!("Ship {conversation} came in with the tide and told of the north. ");
    shared + &own.repeat(8 + 9 * (conversation % 7))
}

fn question(conversation: usize, turn: usize, branch: usize) -> String {
    let matter =
        ["the harbour", "the captain", "the cargo", "the weather", "the way home"][(conversation + turn) % 5];
    format!("Question {turn} of the crew, put in way {branch}: what is there to say about {matter}? ")
        .repeat(2 + turn)
}
