//! What a single request may ask for, and what happens when things go wrong.

use crate::client::submit;
use crate::support::{Setup, all_logits, greedy, log_probability};
use oscar_backend::argmax;
use oscar_codec::{KvFormat, Windows};
use oscar_engine::{
    Engine, EngineApi, EngineHandle, EngineOptions, Event, EventSink, FinishReason, GenerationParams,
    Request, RequestError, RequestId, SamplingParams, SchedulerOptions,
};
use oscar_models::{ModelSource, Weights};

const FULL_BLOCK: usize = 64 * 2 * 128 * 2 * 6 * 2;

fn setup() -> Setup {
    let windows = Windows::new(32, 80).unwrap();
    Setup { format: KvFormat::OSCAR2, windows, context: 1024, ..Setup::default() }
}

fn engine(setup: &Setup) -> EngineHandle {
    Engine::start(setup.embedded(), EngineOptions::new("test")).unwrap()
}

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) % 6000 + 3).collect()
}

fn params(max_tokens: usize) -> GenerationParams {
    GenerationParams { max_tokens, ..GenerationParams::default() }
}

#[test]
fn repetition_and_continuation_compute_one_page_at_most() {
    let engine = engine(&setup());
    for len in [10, 64, 65, 128, 300, 320, 511] {
        let prompt = tokens(len, len as u32);
        let steps = engine.stats().steps;
        let first = submit(&engine, &prompt, params(1)).unwrap().finish(&engine, None);
        assert_eq!((first.cached, first.usage.cached_tokens), (0, 0));
        assert!(engine.stats().steps - steps <= 3, "a first token within three steps");

        // A long answer moves the window far beyond the prompt; the prompt's own window is still there.
        let long = submit(&engine, &prompt, params(150)).unwrap().finish(&engine, None);
        assert!(prompt.len() - long.cached <= 64, "{len}: {} cached", long.cached);
        let again = submit(&engine, &prompt, params(150)).unwrap().finish(&engine, None);
        assert_eq!(again.answers[&0].tokens, long.answers[&0].tokens);
        assert!(prompt.len() - again.cached <= 64, "{len}: {} cached", again.cached);

        // The next turn of the conversation, and a branch off the middle of the first answer.
        let mut turn = prompt.clone();
        turn.extend(&long.answers[&0].tokens);
        let held = turn.len() - 1;
        turn.extend(tokens(20, 77));
        let next = submit(&engine, &turn, params(1)).unwrap().finish(&engine, None);
        assert!(held - next.cached <= 64, "{len}: {} of {held} cached", next.cached);
        turn.truncate(len + 70);
        turn.extend(tokens(9, 78));
        let branch = submit(&engine, &turn, params(1)).unwrap().finish(&engine, None);
        assert!(len + 70 - branch.cached < 64, "{len}: {} cached by the branch", branch.cached);
    }
    assert_eq!(engine.stats().approximate_hits, 0);
    engine.shutdown();
}

#[test]
fn growth_beyond_the_budget_preempts_and_resumes_with_the_same_answers() {
    let setup = Setup { kv_memory: 9 * FULL_BLOCK, ..setup() };
    let mut reference = Setup { kv_memory: 1 << 30, ..self::setup() }.embedded();
    // Admitted for their prompts alone, they outgrow the cache together.
    let scheduler = SchedulerOptions { decode_room: 0, ..SchedulerOptions::default() };
    let engine =
        Engine::start(setup.embedded(), EngineOptions { scheduler, ..EngineOptions::new("test") }).unwrap();
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| tokens(20 + i as usize, i)).collect();
    let calls: Vec<_> = prompts.iter().map(|p| submit(&engine, p, params(230)).unwrap()).collect();
    for (call, prompt) in calls.into_iter().zip(&prompts) {
        let outcome = call.finish(&engine, None);
        assert_eq!(outcome.failed, None);
        assert_eq!(outcome.answers[&0].tokens, greedy(&mut reference, prompt, 230, &[]));
    }
    assert!(engine.stats().preemptions > 0);

    // Alone and still too long for the cache: the answer ends early instead of hanging.
    let small = Setup { format: KvFormat::Bf16, kv_memory: 4 * FULL_BLOCK, ..self::setup() };
    let engine = self::engine(&small);
    let outcome = submit(&engine, &prompts[0], params(500)).unwrap().finish(&engine, None);
    let answer = &outcome.answers[&0];
    assert_eq!((answer.reason, answer.tokens.len()), (Some(FinishReason::Length), 256 - 20 + 1));
    let refused = submit(&engine, &tokens(200, 1), params(5)).err();
    assert!(matches!(refused, Some(RequestError::TooLarge { .. })), "{refused:?}");
}

#[test]
fn draws_depend_on_the_seed_alone_and_choices_share_the_prompt() {
    let engine = engine(&setup());
    let prompt = tokens(200, 5);
    let sampled = |seed, choices| GenerationParams {
        sampling: SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() },
        choices,
        ..params(24)
    };
    let alone: Vec<Vec<u32>> = (0..4)
        .map(|i| {
            let outcome = submit(&engine, &prompt, sampled(40 + i, 1)).unwrap().finish(&engine, None);
            outcome.answers[&0].tokens.clone()
        })
        .collect();
    assert_ne!(alone[0], alone[1]);
    engine.flush_cache();
    let demoted = engine.stats().demoted_tokens;
    let noise: Vec<_> =
        (0..3).map(|i| submit(&engine, &tokens(70, 50 + i), sampled(9, 1)).unwrap()).collect();
    let together = submit(&engine, &prompt, sampled(40, 4)).unwrap().finish(&engine, None);
    for (i, expected) in alone.iter().enumerate() {
        assert_eq!(&together.answers[&i].tokens, expected, "choice {i}");
    }
    assert_eq!((together.usage.prompt_tokens, together.usage.completion_tokens), (200, 96));
    noise.into_iter().for_each(|call| drop(call.finish(&engine, None)));
    assert!(engine.stats().demoted_tokens > demoted);
    // Three whole pages of the prompt, shared; each choice holds what comes after them.
    let stats = engine.stats();
    assert!(stats.coded_pages <= 2 + 4 + 3, "{stats:?}");
}

#[test]
fn logprobs_are_those_of_the_model() {
    let setup = setup();
    let engine = engine(&setup);
    let prompt = tokens(150, 3);
    let wanted = GenerationParams { logprobs: Some(3), prompt_logprobs: Some(2), max_tokens: 4, ..params(4) };
    let logits = all_logits(&mut setup.embedded(), &prompt, 512);
    let rows: Vec<&[f32]> = logits.chunks_exact(6144).collect();
    // The second time the prompt is in the cache, and its logits are wanted all the same.
    for _ in 0..2 {
        let outcome = submit(&engine, &prompt, wanted.clone()).unwrap().finish(&engine, None);
        let found = outcome.prompt_logprobs.unwrap();
        assert_eq!((found.len(), &found[0]), (150, &None));
        for (i, entry) in found.iter().enumerate().skip(1) {
            let entry = entry.as_ref().unwrap();
            assert_eq!(entry.token, prompt[i]);
            assert!((f64::from(entry.logprob) - log_probability(rows[i - 1], prompt[i])).abs() < 1e-4);
            assert_eq!(entry.top.len(), 2);
            assert_eq!(entry.top[0].0, argmax(rows[i - 1]));
        }
        let first = &outcome.answers[&0].logprobs[0];
        assert_eq!(first.token, argmax(rows[149]));
        assert_eq!((first.top.len(), first.top[0]), (3, (first.token, first.logprob)));
    }
    let only_prompt = GenerationParams { prompt_logprobs: Some(0), ..params(0) };
    let outcome = submit(&engine, &prompt, only_prompt).unwrap().finish(&engine, None);
    assert_eq!(outcome.prompt_logprobs.unwrap().len(), 150);
    assert_eq!(outcome.answers[&0].reason, Some(FinishReason::Length));
    assert_eq!(outcome.usage.completion_tokens, 0);
}

/// The head's product with it gives the logits, and neither company nor a prefix hit changes a bit of it.
#[test]
fn the_hidden_state_is_that_of_the_last_token() {
    let setup = setup();
    let engine = engine(&setup);
    let wanted = GenerationParams { embedding: true, ..params(0) };
    let prompts = [tokens(150, 3), tokens(700, 4), tokens(7, 5)];
    let vectors = || {
        let calls = prompts.each_ref().map(|prompt| submit(&engine, prompt, wanted.clone()).unwrap());
        calls.map(|call| {
            let outcome = call.finish(&engine, None);
            assert_eq!(outcome.usage.completion_tokens, 0);
            (outcome.cached, outcome.embedding.unwrap())
        })
    };
    let (cold, warm) = (vectors(), vectors());
    assert_eq!(cold.each_ref().map(|found| found.0), [0, 0, 0]);
    assert_eq!(warm.each_ref().map(|found| found.0), [128, 640, 0]);
    assert_eq!(cold.map(|found| found.1), warm.clone().map(|found| found.1));

    let source = ModelSource::Embedded(oscar_embedded::FILES);
    let weights = Weights::open(&source).unwrap();
    let head = weights.matrix(&weights.names().embedding()).unwrap().to_f32_vec();
    for (prompt, (_, vector)) in prompts.iter().zip(&warm) {
        let logits = all_logits(&mut setup.embedded(), prompt, 512);
        let last = &logits[logits.len() - 6144..];
        let most = last.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (row, logit) in head.chunks_exact(vector.len()).zip(last) {
            let product: f32 = row.iter().zip(vector).map(|(a, b)| a * b).sum();
            assert!((product - logit).abs() < 0.01 * most, "{product} instead of {logit}");
        }
    }
    let with_tokens = GenerationParams { embedding: true, ..params(1) };
    let error = submit(&engine, &prompts[2], with_tokens).err().unwrap().to_string();
    assert!(error.contains("embedding"), "{error}");
}

#[test]
fn stop_tokens_end_and_min_tokens_hold_them_off() {
    let setup = setup();
    let engine = engine(&setup);
    let prompt = tokens(30, 8);
    let free = greedy(&mut setup.embedded(), &prompt, 12, &[]);
    let stop = free[4];
    let first = free.iter().position(|&t| t == stop).unwrap();
    let stopping = GenerationParams { stop_tokens: vec![stop], ..params(12) };
    let outcome = submit(&engine, &prompt, stopping.clone()).unwrap().finish(&engine, None);
    assert_eq!(outcome.answers[&0].tokens, free[..first], "the stop token is not delivered");
    assert_eq!(outcome.answers[&0].reason, Some(FinishReason::Stop(stop)));
    assert_eq!(outcome.usage.completion_tokens, first + 1, "but counted");
    let held = GenerationParams { min_tokens: 12, ..stopping };
    let outcome = submit(&engine, &prompt, held).unwrap().finish(&engine, None);
    assert_eq!(outcome.answers[&0].tokens.len(), 12);
    assert!(!outcome.answers[&0].tokens.contains(&stop));
}

#[test]
fn refusals_name_what_is_wrong() {
    let engine = engine(&setup());
    let refuse = |prompt: &[u32], params| submit(&engine, prompt, params).err().unwrap().to_string();
    let sampling = |sampling| GenerationParams { sampling, ..params(4) };
    assert!(refuse(&[], params(4)).starts_with("prompt"));
    assert!(refuse(&[6144], params(4)).contains("6144"));
    assert!(refuse(&tokens(1000, 1), params(25)).contains("1024"));
    assert!(refuse(&[5], params(usize::MAX)).contains("context"));
    assert!(refuse(&[5], GenerationParams { choices: 0, ..params(4) }).starts_with("n: 0"));
    assert!(refuse(&[5], GenerationParams { min_tokens: 5, ..params(4) }).starts_with("min_tokens"));
    assert!(refuse(&[5], GenerationParams { logprobs: Some(9999), ..params(4) }).starts_with("logprobs"));
    let bad = SamplingParams { top_p: 2.0, ..Default::default() };
    assert!(refuse(&[5], sampling(bad)).starts_with("top_p: 2"));
    let bad = SamplingParams { logit_bias: vec![(6144, 1.0)], ..Default::default() };
    assert!(refuse(&[5], sampling(bad)).starts_with("logit_bias"));
    engine.drain();
    assert_eq!(submit(&engine, &[5], params(1)).err(), Some(RequestError::ShuttingDown));
}

#[test]
fn queues_are_bounded_and_shutdown_leaves_nobody_waiting() {
    let options = EngineOptions {
        max_queue: 3,
        scheduler: SchedulerOptions { max_batch: 1, ..SchedulerOptions::default() },
        ..EngineOptions::new("test")
    };
    let engine = Engine::start(setup().embedded(), options).unwrap();
    let running = submit(&engine, &tokens(20, 1), params(900)).unwrap();
    assert!(matches!(running.events.recv(), Ok(Event::Started { cached_tokens: 0, .. })));
    let waiting: Vec<_> = (0..3).map(|i| submit(&engine, &tokens(20, i), params(900)).unwrap()).collect();
    let refused = submit(&engine, &tokens(20, 9), params(9)).err();
    assert_eq!(refused, Some(RequestError::QueueFull { waiting: 3 }));
    // A place in the queue is free again once its holder has gone.
    let mut waiting = waiting.into_iter();
    let outcome = waiting.next().unwrap().finish(&engine, Some(0));
    assert_eq!(outcome.answers[&0].reason, Some(FinishReason::Cancelled));
    let late = submit(&engine, &tokens(20, 9), params(9)).unwrap();
    engine.shutdown();
    for call in waiting.chain([late]) {
        assert_eq!(call.finish(&engine, None).failed, Some(RequestError::ShuttingDown));
    }
    let last = running.events.iter().last();
    assert_eq!(last, Some(Event::Failed(RequestError::ShuttingDown)));
    assert_eq!(submit(&engine, &[5], params(1)).err(), Some(RequestError::ShuttingDown));
    assert_eq!((engine.flush_cache(), engine.stats().running), (0, 0));
}

struct Deaf;

impl EventSink for Deaf {
    fn send(&self, _: Event) -> bool {
        false
    }
}

struct Rude;

impl EventSink for Rude {
    fn send(&self, _: Event) -> bool {
        panic!("expected by the test");
    }
}

#[test]
fn who_does_not_listen_is_cancelled() {
    let engine = engine(&setup());
    let sinks: [Box<dyn EventSink>; 2] = [Box::new(Deaf), Box::new(Rude)];
    for (i, sink) in sinks.into_iter().enumerate() {
        let id = RequestId(u64::MAX - i as u64);
        let request = Request::new(engine.info(), id, tokens(20, 1), params(900)).unwrap();
        engine.submit(request, sink).unwrap();
    }
    let outcome = submit(&engine, &tokens(30, 2), params(40)).unwrap().finish(&engine, None);
    assert_eq!(outcome.answers[&0].tokens.len(), 40);
    let stats = engine.stats();
    assert_eq!((stats.cancelled, stats.finished, stats.running), (2, 1, 0));
}

#[test]
fn under_pressure_idle_prefixes_lose_their_tails_first_and_hits_on_the_rest_are_counted() {
    // Five prompts of 448 tokens with all their windows do not fit; without their tails they do.
    let setup = Setup { kv_memory: 20 * FULL_BLOCK, ..setup() };
    let options = EngineOptions { approximate_hits: true, ..EngineOptions::new("test") };
    let engine = Engine::start(setup.embedded(), options).unwrap();
    let prompts: Vec<Vec<u32>> = (0..5).map(|i| tokens(448, i)).collect();
    let cold: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let outcome = submit(&engine, prompt, params(8)).unwrap().finish(&engine, None);
            assert_eq!((outcome.cached, outcome.approximate), (0, false));
            outcome.answers[&0].tokens.clone()
        })
        .collect();
    let stats = engine.stats();
    assert!(stats.evicted_pages > 0, "{stats:?}");
    assert_eq!(stats.approximate_hits, 0);
    let mut reference = setup.embedded();
    for (prompt, answer) in prompts.iter().zip(&cold) {
        assert_eq!(answer, &greedy(&mut reference, prompt, 8, &[]));
    }
    // The oldest prompt lost its BF16 tail. Everything before it is still there.
    let hit = submit(&engine, &prompts[0], params(8)).unwrap().finish(&engine, None);
    assert_eq!((hit.cached, hit.approximate, hit.usage.approximate), (320, true, true));
    assert_eq!(hit.answers[&0].tokens.len(), 8);
    assert_eq!(engine.stats().approximate_hits, 1);
    // What followed the hit is not taken for exact later.
    let mut turn = prompts[0].clone();
    turn.extend(&hit.answers[&0].tokens);
    turn.extend(tokens(120, 77));
    let second = submit(&engine, &turn, params(4)).unwrap().finish(&engine, None);
    assert!(second.cached >= 320 && second.approximate);
    assert_eq!(engine.stats().approximate_hits, 2);
    let stats = engine.stats();
    assert_eq!(stats.full_pages, stats.cached_full_pages);
    assert_eq!(stats.coded_pages, stats.cached_coded_pages);
    engine.flush_cache();
    assert_eq!((engine.stats().full_pages, engine.stats().coded_pages), (0, 0));

    // An engine without approximate hits computes prompts again, and is exact.
    let exact = self::engine(&setup);
    for (prompt, answer) in prompts.iter().zip(&cold).chain(prompts.iter().zip(&cold)) {
        let outcome = submit(&exact, prompt, params(8)).unwrap().finish(&exact, None);
        assert_eq!((&outcome.answers[&0].tokens, outcome.approximate), (answer, false));
    }
    assert_eq!(exact.stats().approximate_hits, 0);
}

#[test]
fn alone_or_in_a_batch_of_32_the_answers_are_the_same() {
    let setup = setup();
    let mut reference = setup.embedded();
    // Steps of a fixed size: their number does not depend on the speed of this machine.
    let scheduler = SchedulerOptions { step_tokens: Some(256), ..SchedulerOptions::default() };
    let options = EngineOptions { scheduler, ..EngineOptions::new("test") };
    let engine = Engine::start(setup.embedded(), options).unwrap();
    let prompts: Vec<Vec<u32>> = (0..32).map(|i| tokens(15 + 7 * i as usize, i)).collect();
    let calls: Vec<_> = prompts.iter().map(|p| submit(&engine, p, params(20)).unwrap()).collect();
    for (call, prompt) in calls.into_iter().zip(&prompts) {
        let outcome = call.finish(&engine, None);
        let alone = greedy(&mut reference, prompt, 20, &[]);
        assert_eq!(outcome.answers[&0].tokens, alone, "prompt of {}", prompt.len());
    }
    // Sixteen steps for the prompts, in the last of which nobody has ended.
    let steps = engine.stats().steps;
    assert!(steps < 20 + 20, "{steps} steps: they were not in one batch");
}
