//! Decode speed of several caches, measured alternately so that a busy machine slows all alike.

use oscar_backend::Backend;
use oscar_runner::{Logits, Runner, Sequence, StepError, StepOutput, StepRequest};
use std::time::{Duration, Instant};

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

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
