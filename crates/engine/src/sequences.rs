//! Requests and their choices while they are being served.

use crate::request::{GenerationParams, RequestId, TokenLogprobs};
use crate::runner::{Logits, Sequence};
use crate::sampling::Sampler;
use crate::scheduler::SequenceId;
use oscar_backend::Candidate;
use oscar_cache::{CacheSalt, PrefixKey};

/// A request under way.
pub struct Job {
    pub params: GenerationParams,
    pub prompt_tokens: usize,
    /// Prompt tokens the first choice found in the cache.
    pub cached_tokens: usize,
    pub completion_tokens: usize,
    /// Does it go on from a prefix whose tail was demoted? Then it may answer differently from a cold run.
    pub demoted_tail: bool,
    /// Sequences that run or wait.
    pub live: Vec<SequenceId>,
    /// Choices that have not begun: all but the first wait for the prompt to be stored.
    pub unborn: Vec<usize>,
    pub prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    /// Has it ever been given a place in a step?
    pub admitted: bool,
    /// Has [`Event::Started`](crate::Event::Started) gone out?
    pub started: bool,
}

impl Job {
    /// Most tokens that one of its choices stores: the last one generated is not.
    pub fn most_tokens(&self) -> usize {
        self.prompt_tokens + self.params.max_tokens.saturating_sub(1)
    }
}

/// One continuation of a prompt.
pub struct Choice {
    pub request: RequestId,
    pub index: usize,
    /// The prompt and what was generated, all but a last token that nobody needs any more.
    pub tokens: Vec<u32>,
    /// The part of the prefix cache it belongs to.
    pub salt: Option<CacheSalt>,
    pub generated: usize,
    pub sampler: Sampler,
    /// Its pages, while it runs.
    pub sequence: Option<Sequence>,
    /// Tokens of it that the prefix cache has been offered.
    pub published: usize,
    /// Longest stored prefix it may begin from: at least the last token has to be computed, and every token whose
    /// logits are still wanted.
    pub resume_limit: usize,
    /// May it go on from a demoted tail? Not once it has computed anything exactly: preempted and resumed, it answers
    /// as if it had never stopped.
    pub takes_demoted: bool,
}

/// What a step says of a choice's next token.
#[derive(Clone, Copy)]
pub enum Found<'a> {
    Logits(&'a [f32]),
    /// What [`Logits::Pick`] asked for.
    Candidates(&'a [Candidate]),
}

impl<'a> Found<'a> {
    pub fn logits(self) -> Option<&'a [f32]> {
        match self {
            Self::Logits(rows) => Some(rows),
            Self::Candidates(_) => None,
        }
    }

    /// What it says of the last token.
    pub fn last(self, vocab: usize) -> Self {
        match self {
            Self::Logits(rows) => Self::Logits(&rows[rows.len() - vocab..]),
            list => list,
        }
    }
}

impl Choice {
    /// Its first `len` tokens as the prefix cache knows them.
    pub fn prefix(&self, len: usize) -> PrefixKey<'_> {
        PrefixKey::new(self.salt, &self.tokens[..len])
    }

    /// Tokens that may not come next: an answer that must go on cannot end.
    pub fn banned<'a>(&self, params: &'a GenerationParams) -> &'a [u32] {
        if self.generated < params.min_tokens { &params.stop_tokens } else { &[] }
    }

    /// What the next token is to be chosen from; `picks` says whether the device can list candidates.
    pub fn wants(&self, params: &GenerationParams, picks: bool) -> Logits {
        match self.sampler.pick() {
            Some(what) if picks && params.logprobs.is_none() && self.banned(params).is_empty() => {
                Logits::Pick(what)
            }
            _ => Logits::Last,
        }
    }

    /// Tokens stored in the cache.
    pub fn stored(&self) -> usize {
        self.sequence.as_ref().map_or(0, Sequence::len)
    }
}
