//! Prompts in, answers out, through the serving engine: many sequences in a step, shared stored
//! prefixes.

use crate::error::{EvalError, Result};
use crate::forms::Forms;
use oscar_backend::Backend;
use oscar_engine::{
    Engine, EngineApi, EngineHandle, EngineOptions, Event, EventSink, FinishReason, GenerationParams,
    Request, RequestId, SamplingParams, SchedulerOptions, SharedConstraint,
};
use oscar_runner::Runner;
use oscar_text::Tokenizer;
use std::sync::mpsc::{Sender, channel};

/// A prompt to be answered.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: String,
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub sampling: SamplingParams,
    /// Jobs of one group share most of their prompt: the others wait until the first has stored it.
    pub group: Option<usize>,
    /// The form that the answer must have.
    pub constraint: Option<SharedConstraint>,
}

/// The generated tokens, without the stop token.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    /// The model ended the answer itself.
    pub finished: bool,
}

/// A running engine that answers jobs. It stops when this value is dropped.
pub struct Generator {
    engine: EngineHandle,
    in_flight: usize,
    stop_tokens: Vec<u32>,
}

struct Forward {
    job: usize,
    events: Sender<(usize, Event)>,
}

impl EventSink for Forward {
    fn send(&self, event: Event) -> bool {
        self.events.send((self.job, event)).is_ok()
    }
}

impl Generator {
    /// Takes ownership of the runner. `in_flight` sequences are answered at once, memory
    /// permitting.
    pub fn start<B: Backend + 'static>(
        runner: Runner<B>,
        stop_tokens: Vec<u32>,
        in_flight: usize,
    ) -> Result<Self>
    where
        Runner<B>: Send,
    {
        let in_flight = in_flight.max(1);
        let options = EngineOptions {
            scheduler: SchedulerOptions {
                max_batch: in_flight,
                prefill_chunk: runner.prefill_chunk(),
                ..SchedulerOptions::default()
            },
            ..EngineOptions::new("eval")
        };
        let engine = Engine::start(runner, options).map_err(EvalError::Thread)?;
        Ok(Self { engine, in_flight, stop_tokens })
    }

    /// A compiler of forms for this model.
    pub fn forms(&self, tokenizer: &Tokenizer) -> Result<Forms> {
        Forms::new(tokenizer, self.engine.info().vocab_size, &self.stop_tokens)
    }

    /// Answers every job. `done` is called with each answer when it is complete, in no particular
    /// order.
    pub fn answer(&self, jobs: &[Job], mut done: impl FnMut(usize, Answer) -> Result<()>) -> Result<()> {
        let (events, inbox) = channel();
        let mut waiting: Vec<usize> = (0..jobs.len()).rev().collect();
        let mut answers: Vec<Vec<u32>> = vec![Vec::new(); jobs.len()];
        // Groups whose first job has been submitted, and whether it has ended.
        let mut groups: Vec<(usize, bool)> = Vec::new();
        let mut running = 0;
        let mut left = jobs.len();
        while left > 0 {
            while running < self.in_flight {
                let ready = |&job: &usize| match jobs[job].group {
                    Some(group) => groups.iter().find(|g| g.0 == group).is_none_or(|g| g.1),
                    None => true,
                };
                let Some(place) = waiting.iter().rposition(ready) else { break };
                let job = waiting.remove(place);
                if let Some(group) = jobs[job].group
                    && !groups.iter().any(|g| g.0 == group)
                {
                    groups.push((group, false));
                }
                self.submit(&jobs[job], Forward { job, events: events.clone() })?;
                running += 1;
            }
            let (job, event) = inbox.recv().map_err(|_| EvalError::EngineGone)?;
            match event {
                Event::Token { token, .. } => answers[job].push(token),
                Event::Finished { reason, .. } => {
                    let tokens = std::mem::take(&mut answers[job]);
                    done(job, Answer { tokens, finished: matches!(reason, FinishReason::Stop(_)) })?;
                }
                Event::Done(_) => {
                    running -= 1;
                    left -= 1;
                    if let Some(group) = groups.iter_mut().find(|g| Some(g.0) == jobs[job].group) {
                        group.1 = true;
                    }
                }
                Event::Failed(source) => {
                    return Err(EvalError::Request { case: jobs[job].name.clone(), source });
                }
                Event::Started { .. } | Event::Embedding(_) | Event::Kept(_) => {}
            }
        }
        Ok(())
    }

    fn submit(&self, job: &Job, sink: Forward) -> Result<()> {
        let params = GenerationParams {
            sampling: job.sampling.clone(),
            max_tokens: job.max_tokens,
            stop_tokens: self.stop_tokens.clone(),
            constraint: job.constraint.clone(),
            ..GenerationParams::default()
        };
        Request::new(self.engine.info(), RequestId(sink.job as u64), job.prompt.clone(), params)
            .and_then(|request| self.engine.submit(request, Box::new(sink)))
            .map_err(|source| EvalError::Request { case: job.name.clone(), source })
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

/// The first token at which two answers differ; their ends count as a token. `None` if they are
/// equal.
pub fn first_divergence(a: &[u32], b: &[u32]) -> Option<usize> {
    let same = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    (same < a.len().max(b.len())).then_some(same)
}

#[cfg(test)]
mod tests {
    use super::first_divergence;

    #[test]
    fn divergence_counts_tokens_and_ends() {
        assert_eq!(first_divergence(&[1, 2], &[1, 2]), None);
        assert_eq!(first_divergence(&[1, 2], &[1, 3]), Some(1));
        assert_eq!(first_divergence(&[1], &[1, 2]), Some(1));
        assert_eq!(first_divergence(&[], &[5]), Some(0));
    }
}
