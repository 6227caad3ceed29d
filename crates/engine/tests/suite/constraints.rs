//! Answers of a demanded form: the form holds whatever else happens to the request.

use crate::client::{Outcome, submit};
use crate::support::Setup;
use oscar_codec::{KvFormat, Windows};
use oscar_engine::{
    Constraint, ConstraintState, Engine, EngineApi, EngineHandle, EngineOptions, FinishReason,
    GenerationParams, RequestError, SamplingParams, SchedulerOptions, SharedConstraint,
};
use std::sync::Arc;

const FULL_BLOCK: usize = 64 * 2 * 128 * 2 * 6 * 2;
const END: u32 = 2;

/// Token `i` of an answer leaves `i % 7` when divided by 7; after `length` tokens only the end is left.
struct Remainders {
    length: u32,
}

struct State {
    at: u32,
    length: u32,
}

impl Constraint for Remainders {
    fn parameter(&self) -> &str {
        "remainder"
    }

    fn start(&self) -> Box<dyn ConstraintState> {
        Box::new(State { at: 0, length: self.length })
    }
}

impl ConstraintState for State {
    fn allowed(&mut self) -> Result<Vec<u32>, String> {
        let mut words = vec![0u32; 192];
        let is_allowed = |token: u32| match self.at < self.length {
            true => token % 7 == self.at % 7 && token != END,
            false => token == END,
        };
        for token in (0..6144).filter(|&token| is_allowed(token)) {
            words[token as usize / 32] |= 1 << (token % 32);
        }
        match self.at {
            1_000.. => Err("the answer is too long".to_owned()),
            _ => Ok(words),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        if self.at == 9 && self.length == 666 {
            return Err("token 9 is never accepted".to_owned());
        }
        assert!(self.at >= self.length || token % 7 == self.at % 7);
        self.at += 1;
        Ok(())
    }
}

fn setup() -> Setup {
    let windows = Windows::new(32, 80).unwrap();
    Setup { format: KvFormat::OSCAR2, windows, context: 1024, ..Setup::default() }
}

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) % 6000 + 3).collect()
}

fn constrained(length: u32, max_tokens: usize) -> GenerationParams {
    GenerationParams {
        max_tokens,
        stop_tokens: vec![END],
        constraint: Some(SharedConstraint(Arc::new(Remainders { length }))),
        ..GenerationParams::default()
    }
}

fn run(engine: &EngineHandle, prompt: &[u32], params: GenerationParams) -> Outcome {
    submit(engine, prompt, params).unwrap().finish(engine, None)
}

#[test]
fn every_choice_has_the_form_and_ends_with_it() {
    let engine = Engine::start(setup().embedded(), EngineOptions::new("test")).unwrap();
    let prompt = tokens(200, 1);
    let sampling = SamplingParams { temperature: 1.0, seed: 5, ..SamplingParams::default() };
    let params = GenerationParams { sampling, choices: 3, logprobs: Some(1), ..constrained(20, 100) };
    let first = run(&engine, &prompt, params.clone());
    for (choice, answer) in &first.answers {
        assert_eq!(answer.tokens.len(), 20, "choice {choice}");
        assert!(matches!(answer.reason, Some(FinishReason::Stop(_))), "choice {choice}");
        assert!(answer.tokens.iter().enumerate().all(|(i, token)| *token as usize % 7 == i % 7));
        assert_eq!(answer.logprobs.len(), 20);
        // Log-probabilities are the model's, before the form: the best token need not be allowed.
        assert!(answer.logprobs.iter().all(|logprobs| logprobs.logprob <= logprobs.top[0].1));
    }
    assert_eq!(first.usage.completion_tokens, 3 * 21);
    assert_ne!(first.answers[&0].tokens, first.answers[&1].tokens);
    let again = run(&engine, &prompt, params);
    assert!(again.cached > 100, "the prompt is found in the prefix cache");
    assert_eq!(again.answers[&2].tokens, first.answers[&2].tokens);
    let cut = run(&engine, &prompt, constrained(20, 8));
    assert_eq!((cut.answers[&0].tokens.len(), cut.answers[&0].reason), (8, Some(FinishReason::Length)));
    let held = GenerationParams { min_tokens: 30, ..constrained(20, 40) };
    let (held, free) = (run(&engine, &prompt, held), run(&engine, &prompt, constrained(20, 40)));
    assert_eq!(held.answers[&0].tokens, free.answers[&0].tokens, "the form ends before min_tokens");
    assert_eq!(held.answers[&0].reason, free.answers[&0].reason);
}

#[test]
fn preemption_and_company_change_nothing() {
    let prompts: Vec<Vec<u32>> = (0..5).map(|i| tokens(20 + i as usize, i)).collect();
    let roomy = Engine::start(Setup { kv_memory: 1 << 30, ..setup() }.embedded(), EngineOptions::new("test"))
        .unwrap();
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| run(&roomy, prompt, constrained(150, 200)).answers[&0].tokens.clone())
        .collect();
    let scheduler = SchedulerOptions { decode_room: 0, ..SchedulerOptions::default() };
    let narrow = Setup { kv_memory: 9 * FULL_BLOCK, ..setup() }.embedded();
    let narrow = Engine::start(narrow, EngineOptions { scheduler, ..EngineOptions::new("test") }).unwrap();
    let calls: Vec<_> =
        prompts.iter().map(|prompt| submit(&narrow, prompt, constrained(150, 200)).unwrap()).collect();
    for (call, expected) in calls.into_iter().zip(&alone) {
        assert_eq!(&call.finish(&narrow, None).answers[&0].tokens, expected);
    }
    assert!(narrow.stats().preemptions > 0);
}

#[test]
fn a_form_that_fails_ends_its_request_alone() {
    let engine = Engine::start(setup().embedded(), EngineOptions::new("test")).unwrap();
    let good = submit(&engine, &tokens(30, 4), constrained(40, 60)).unwrap();
    let bad = run(&engine, &tokens(30, 3), constrained(666, 60));
    let Some(RequestError::Form { parameter, problem }) = bad.failed else { panic!("{bad:?}") };
    assert_eq!((parameter.as_str(), problem.as_str()), ("remainder", "token 9 is never accepted"));
    assert!(matches!(good.finish(&engine, None).answers[&0].reason, Some(FinishReason::Stop(_))));
    assert_eq!(engine.stats().failed, 1);
}
