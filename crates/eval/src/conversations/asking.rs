//! Questions put to a sequence, and how its replies are judged.

use super::Outcome;
use super::cases::{Ask, ConversationCase};
use crate::error::Result;
use crate::prompts::Prompts;
use oscar_backend::{Backend, Divergence, argmax};
use oscar_runner::{Logits, Runner, Sequence, StepOutput, StepRequest};

/// The answer to a question: logits after each right token, or the tokens of a free answer.
pub(super) enum Reply {
    Forced(Vec<f32>),
    Free(Vec<u32>),
}

pub(super) struct Asking<'a> {
    pub case: &'a ConversationCase,
    pub prompts: &'a Prompts<'a>,
    pub stops: &'a [u32],
}

/// Tokens of an answer to a question that has none.
const FREE_TOKENS: usize = 16;

impl Asking<'_> {
    /// Asks a question of a fork of a sequence.
    pub fn answer<B: Backend>(
        &self,
        runner: &mut Runner<B>,
        sequence: &Sequence,
        ask: &Ask,
    ) -> Result<Reply> {
        let fork = runner.fork(sequence, self.case.history.len());
        let mut fork = fork.unwrap_or_else(|| unreachable!("a sequence that ends here can be forked here"));
        let Some(answer) = &ask.answer else {
            return Ok(Reply::Free(self.free_answer(runner, fork, ask)?));
        };
        let mut out = StepOutput::default();
        let tokens: Vec<u32> = ask.tokens.iter().chain(answer).copied().collect();
        let rows = ask.tokens.len() - 1..tokens.len();
        // Long questions come in chunks, as in serving; the last has all wanted rows.
        let first = rows.start.saturating_sub(rows.start % runner.prefill_chunk());
        if first > 0 {
            let request = StepRequest { sequence: &mut fork, tokens: &tokens[..first], logits: Logits::None };
            runner.step(&mut [request], &mut out)?;
        }
        let logits = Logits::Of(rows.start - first..rows.end - first);
        let request = StepRequest { sequence: &mut fork, tokens: &tokens[first..], logits };
        runner.step(&mut [request], &mut out)?;
        debug_assert_eq!(out.logits.len(), (answer.len() + 1) * runner.config().vocab_size);
        Ok(Reply::Forced(out.logits))
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

    /// Counts the reply to a question, against the one with the whole cache.
    pub fn judge(&self, outcome: &mut Outcome, ask: &Ask, full: &Reply, reply: &Reply) {
        match (full, reply, &ask.answer) {
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
                outcome.free_tokens += tokens.len();
            }
            _ => {}
        }
    }
}
