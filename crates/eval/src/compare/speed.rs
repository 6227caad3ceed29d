//! Decode speed of several caches, measured alternately so that a busy machine slows all alike.

use super::Speed;
use crate::{EvalError, Journal};
use oscar_backend::Backend;
use oscar_runner::{Logits, Runner, Sequence, StepError, StepOutput, StepRequest};
use std::time::{Duration, Instant};

/// Timed steps.
pub const ROUNDS: usize = 15;
/// Untimed steps before the timed ones.
const WARM_UP: usize = 2;

/// Tokens a second of each runner for one sequence that decodes after its prompt: the median of
/// `rounds` steps. `sequences` hold the prompts.
pub fn decode_in_turns<B: Backend>(
    runners: &mut [&mut Runner<B>],
    sequences: &mut [Sequence],
    rounds: usize,
) -> Result<Vec<f64>, StepError> {
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); runners.len()];
    let mut output = StepOutput::default();
    for round in 0..WARM_UP + rounds.max(1) {
        for ((runner, sequence), times) in runners.iter_mut().zip(sequences.iter_mut()).zip(&mut times) {
            // The time does not depend on the token.
            let token = [(round * 7919 % runner.config().vocab_size) as u32];
            let started = Instant::now();
            runner
                .step(&mut [StepRequest { sequence, tokens: &token, logits: Logits::Last }], &mut output)?;
            if round >= WARM_UP {
                times.push(started.elapsed());
            }
        }
    }
    Ok(times.iter_mut().map(|times| 1.0 / median(times).as_secs_f64().max(1e-9)).collect())
}

/// The speed of each format after a window of text, all in turns; the first is BF16. Speeds that the
/// journal holds are not measured again. Sequences hold the window or are empty.
pub fn recorded_speeds<B: Backend>(
    journal: &mut Journal,
    names: &[&str],
    runners: &mut [Runner<B>],
    sequences: Vec<Sequence>,
    window: &[u32],
) -> Result<Vec<Option<Speed>>, EvalError> {
    let key = |name: &str| format!("{name}/speed");
    let known: Vec<Option<Speed>> = names.iter().map(|name| journal.get(&key(name))).collect();
    if known.iter().any(Option::is_none) {
        let (mut wanted, mut held, mut places) = (Vec::new(), Vec::new(), Vec::new());
        for (i, (runner, mut sequence)) in runners.iter_mut().zip(sequences).enumerate() {
            if i > 0 && known[i].is_some() {
                continue;
            }
            if sequence.is_empty() {
                runner.prefill(&mut sequence, window, &mut StepOutput::default(), |_| {})?;
            }
            places.push(i);
            held.push(sequence);
            wanted.push(runner);
        }
        let speeds = decode_in_turns(&mut wanted, &mut held, ROUNDS)?;
        for (&i, &tokens_per_s) in places.iter().zip(&speeds).filter(|(i, _)| known[**i].is_none()) {
            let ratio = tokens_per_s / speeds[0];
            journal.record(&key(names[i]), &Speed { context: window.len(), tokens_per_s, ratio })?;
        }
    }
    Ok(names.iter().map(|name| journal.get(&key(name))).collect())
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
