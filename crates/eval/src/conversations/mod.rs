//! Conversations under eviction: how many of their facts survive, and what that costs.
//!
//! A case is a long conversation with several questions, each asked by itself. Its history is
//! computed once for each cache format. Every policy scores that shared history before it knows a
//! question, and every budget gives a view of it; all questions are then asked of all views. An
//! answer counts as right if every token of it, and the end of the turn, is the most likely one
//! after the right tokens before it: exactly then would greedy decoding give it.

mod cases;
mod picture;
mod report;

pub use cases::{Ask, ConversationCase, conversation_cases};
pub use picture::picture;
pub use report::{ConversationRow, summarize};

use crate::error::Result;
use crate::prompts::Prompts;
use oscar_backend::{Backend, Divergence, argmax};
use oscar_runner::{Logits, Runner, Sequence, StepOutput, StepRequest};
use oscar_views::{
    Budget, Evict, HeadSplit, History, Observed, Policy, Probe, Scores, observe, score, select,
};
use serde::{Deserialize, Serialize};

/// What is compared: every scorer and division with every share of the rows.
#[derive(Clone, Debug)]
pub struct Arms {
    pub scorers: Vec<(Evict, HeadSplit)>,
    /// Percent of the history.
    pub percents: Vec<f64>,
}

/// The results of one case under one policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub policy: String,
    pub percent: f64,
    /// Share of the history that is kept, protected rows included.
    pub rows: f64,
    /// Bytes of the view's pages, or of the whole history.
    pub bytes: usize,
    /// Tokens computed to score the rows.
    pub probe_tokens: usize,
    pub asked: usize,
    pub right: usize,
    /// Sum over the questions of the mean divergence from the whole cache.
    pub kl: f64,
    /// Sum over the questions of the share of the needed rows that the heads keep, and how many
    /// questions need rows of the history.
    pub survival: f64,
    pub needing: usize,
    /// Questions without an answer, and how many of them got no value of the conversation.
    pub unanswerable: usize,
    pub abstained: usize,
}

/// The results of one case, as a journal keeps them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseOutcomes {
    pub outcomes: Vec<Outcome>,
}

/// The name of the arm without eviction.
pub const FULL: &str = "none";

/// Runs one case under every arm.
pub fn run_case<B: Backend>(
    runner: &mut Runner<B>,
    case: &ConversationCase,
    arms: &Arms,
    probe: &Probe,
    prompts: &Prompts<'_>,
    stops: &[u32],
) -> Result<Vec<Outcome>> {
    let mut base = Sequence::forkable(runner);
    let tokens = &case.history;
    let observed = match arms.scorers.iter().any(|(evict, _)| evict.replays()) {
        true => Some(observe(runner, &mut base, tokens)?),
        false => {
            runner.prefill(&mut base, tokens, &mut StepOutput::default(), |_| {})?;
            None
        }
    };
    let asking = Asking { case, prompts, stops };
    let full = asking.answers(runner, &base)?;
    let heads = runner.layout().layers() * runner.layout().kv_heads();
    let blocks = oscar_cache::view_end(runner.layout(), tokens.len()).saturating_sub(64) / 64;
    let whole = Outcome {
        rows: 1.0,
        bytes: blocks * runner.layout().coded_block_bytes(),
        ..asking.outcome(FULL, 100.0, &full, &full, |_| 1.0)
    };
    let mut outcomes = vec![whole];
    let mut scored: Vec<(Evict, Scores)> = Vec::new();
    for &(evict, split) in &arms.scorers {
        if !scored.iter().any(|(known, _)| *known == evict) {
            let scores = scores(runner, &base, case, evict, probe, observed.as_ref())?;
            scored.push((evict, scores));
        }
        let Some((_, scores)) = scored.iter().find(|(known, _)| *known == evict) else { continue };
        for &percent in &arms.percents {
            let policy = Policy { evict, budget: Budget::Percent(percent), heads: split };
            let selection = select(runner.layout(), scores, &policy, &case.protected);
            let survives = |needs: &std::ops::Range<usize>| {
                let held =
                    |kept: &Vec<u32>| kept.iter().filter(|&&p| needs.contains(&(p as usize))).count() as f64;
                let kept: f64 = selection.kept.iter().map(held).sum();
                kept / (heads * needs.len()).max(1) as f64
            };
            let rows = selection.share();
            let survival =
                |ask: &Ask| ask.needs.iter().map(survives).sum::<f64>() / ask.needs.len().max(1) as f64;
            let survivals: Vec<f64> = case.asks.iter().map(survival).collect();
            let view = runner.derive(&base, tokens.len(), selection.kept.clone())?;
            let bytes = view.pages().view().map_or(0, |view| view.bytes());
            let answers = asking.answers(runner, &view)?;
            let name = format!("{evict}-{}", split.name());
            let outcome = asking.outcome(&name, percent, &full, &answers, |ask| survivals[ask]);
            outcomes.push(Outcome { rows, bytes, probe_tokens: scores.probe_tokens, ..outcome });
        }
    }
    Ok(outcomes)
}

fn scores<B: Backend>(
    runner: &mut Runner<B>,
    base: &Sequence,
    case: &ConversationCase,
    evict: Evict,
    probe: &Probe,
    observed: Option<&Observed>,
) -> Result<Scores> {
    let history = History { sequence: base, tokens: &case.history, len: case.history.len(), observed };
    Ok(score(runner, &history, evict, probe)?)
}

/// The answer to a question: logits after each right token, or the tokens of a free answer.
enum Reply {
    Forced(Vec<f32>),
    Free(Vec<u32>),
}

struct Asking<'a> {
    case: &'a ConversationCase,
    prompts: &'a Prompts<'a>,
    stops: &'a [u32],
}

/// Tokens of an answer to a question that has none.
const FREE_TOKENS: usize = 8;

impl Asking<'_> {
    /// Asks every question of forks of a sequence.
    fn answers<B: Backend>(&self, runner: &mut Runner<B>, sequence: &Sequence) -> Result<Vec<Reply>> {
        let mut replies = Vec::with_capacity(self.case.asks.len());
        let vocab = runner.config().vocab_size;
        let mut out = StepOutput::default();
        for ask in &self.case.asks {
            let mut fork = self.fork(runner, sequence);
            let Some(answer) = &ask.answer else {
                replies.push(Reply::Free(self.free_answer(runner, fork, ask)?));
                continue;
            };
            let tokens: Vec<u32> = ask.tokens.iter().chain(answer).copied().collect();
            let rows = ask.tokens.len() - 1..tokens.len();
            // Long questions come in chunks, as in serving; the last has all wanted rows.
            let first = rows.start.saturating_sub(rows.start % runner.prefill_chunk());
            if first > 0 {
                let request =
                    StepRequest { sequence: &mut fork, tokens: &tokens[..first], logits: Logits::None };
                runner.step(&mut [request], &mut out)?;
            }
            let logits = Logits::Of(rows.start - first..rows.end - first);
            let request = StepRequest { sequence: &mut fork, tokens: &tokens[first..], logits };
            runner.step(&mut [request], &mut out)?;
            debug_assert_eq!(out.logits.len(), (answer.len() + 1) * vocab);
            replies.push(Reply::Forced(std::mem::take(&mut out.logits)));
        }
        Ok(replies)
    }

    fn fork<B: Backend>(&self, runner: &Runner<B>, sequence: &Sequence) -> Sequence {
        let fork = runner.fork(sequence, self.case.history.len());
        fork.unwrap_or_else(|| unreachable!("a sequence that ends here can be forked here"))
    }

    fn free_answer<B: Backend>(
        &self,
        runner: &mut Runner<B>,
        mut fork: Sequence,
        ask: &Ask,
    ) -> Result<Vec<u32>> {
        let mut out = StepOutput::default();
        let mut answer = Vec::new();
        runner.prefill(&mut fork, &ask.tokens, &mut out, |_| {})?;
        loop {
            let token = argmax(&out.logits);
            if self.stops.contains(&token) || answer.len() == FREE_TOKENS {
                return Ok(answer);
            }
            answer.push(token);
            let request = StepRequest { sequence: &mut fork, tokens: &[token], logits: Logits::Last };
            runner.step(&mut [request], &mut out)?;
        }
    }

    fn outcome(
        &self,
        policy: &str,
        percent: f64,
        full: &[Reply],
        replies: &[Reply],
        survival: impl Fn(usize) -> f64,
    ) -> Outcome {
        let mut outcome = Outcome {
            policy: policy.to_owned(),
            percent,
            rows: 1.0,
            bytes: 0,
            probe_tokens: 0,
            asked: 0,
            right: 0,
            kl: 0.0,
            survival: 0.0,
            needing: 0,
            unanswerable: 0,
            abstained: 0,
        };
        for (i, ask) in self.case.asks.iter().enumerate() {
            if !ask.needs.is_empty() {
                outcome.survival += survival(i);
                outcome.needing += 1;
            }
            match (&full[i], &replies[i], &ask.answer) {
                (Reply::Forced(full), Reply::Forced(logits), Some(answer)) => {
                    let vocab = logits.len() / (answer.len() + 1);
                    let picks: Vec<u32> = logits.chunks_exact(vocab).map(argmax).collect();
                    let (end, tokens) = picks.split_last().unwrap_or((&0, &[]));
                    outcome.asked += 1;
                    outcome.right += usize::from(tokens == answer && self.stops.contains(end));
                    let pairs = full.chunks_exact(vocab).zip(logits.chunks_exact(vocab));
                    let kl: f64 = pairs.map(|(a, b)| Divergence::between(a, b).kl).sum();
                    outcome.kl += kl / picks.len() as f64;
                }
                (_, Reply::Free(tokens), _) => {
                    let text = self.prompts.decode(tokens).unwrap_or_default();
                    let invents = ask.plausible.iter().any(|value| text.contains(value.as_str()));
                    outcome.unanswerable += 1;
                    outcome.abstained += usize::from(!invents);
                }
                _ => {}
            }
        }
        outcome
    }
}
