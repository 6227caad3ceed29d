//! Many turns, branches, repetitions and cancellations through a cache that is too small for them: every answer is
//! the one of a cold run on an empty machine, and after every round all pages are accounted for.

use crate::client::{Outcome, submit};
use crate::support::{Setup, log_probability, sliding_model, tiny_model};
use oscar_backend::argmax;
use oscar_codec::{CodeLayout, KvFormat, Windows};
use oscar_engine::{
    Engine, EngineApi, EngineHandle, EngineOptions, EngineStats, FinishReason, GenerationParams,
    SchedulerOptions,
};
use oscar_kernels_cpu::backend::CpuBackend;
use oscar_models::{DecoderConfig, Family, ModelSource};
use oscar_runner::{Logits, Runner, Sequence, StepOutput, StepRequest};
use std::collections::HashMap;

/// A small generator of test data.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below
    }

    fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.roll(high - low)
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.roll(6000) as u32 + 3).collect()
    }
}

fn embedded() -> ModelSource {
    ModelSource::Embedded(oscar_embedded::FILES)
}

/// Small windows; a method with windows of its own keeps their form.
fn windows(format: KvFormat) -> Windows {
    let recent = if format.windows(None, None).unwrap().sides_agree() { Some(80) } else { None };
    format.windows(Some(32), recent).unwrap()
}

/// Greedy tokens and their log-probabilities.
type Cold = Vec<(u32, f64)>;

/// Cold greedy answers with their log-probabilities, each computed once.
struct Oracle {
    runner: Runner<CpuBackend>,
    known: HashMap<(Vec<u32>, usize), Cold>,
}

impl Oracle {
    fn new(format: KvFormat) -> Self {
        Self::of(format, &embedded())
    }

    fn of(format: KvFormat, model: &ModelSource) -> Self {
        // Another chunk than any engine's.
        let setup = Setup { format, windows: windows(format), context: 2048, chunk: 177, ..Setup::default() };
        Self { runner: setup.runner(model), known: HashMap::new() }
    }

    fn answer(&mut self, prompt: &[u32], limit: usize) -> Cold {
        let runner = &mut self.runner;
        let cold = || {
            let (mut sequence, mut output, mut out) = (Sequence::new(), StepOutput::default(), Vec::new());
            runner.prefill(&mut sequence, prompt, &mut output, |_| {}).unwrap();
            loop {
                let token = argmax(&output.logits);
                out.push((token, log_probability(&output.logits, token)));
                if out.len() == limit {
                    return out;
                }
                let request = StepRequest { sequence: &mut sequence, tokens: &[token], logits: Logits::Last };
                runner.step(&mut [request], &mut output).unwrap();
            }
        };
        self.known.entry((prompt.to_vec(), limit)).or_insert_with(cold).clone()
    }
}

fn check_answer(expected: &[(u32, f64)], outcome: &Outcome, what: &str) {
    assert_eq!(outcome.failed, None, "{what}");
    for (choice, answer) in &outcome.answers {
        let cut = answer.reason == Some(FinishReason::Cancelled);
        let tokens: Vec<u32> = expected.iter().map(|e| e.0).take(answer.tokens.len()).collect();
        assert_eq!(answer.tokens, tokens, "{what}, choice {choice}");
        assert!(cut || tokens.len() == expected.len(), "{what}, choice {choice}: {} tokens", tokens.len());
        // Greedy tokens forgive small differences; log-probabilities do not.
        for (got, (_, logprob)) in answer.logprobs.iter().zip(expected) {
            assert!((f64::from(got.logprob) - logprob).abs() < 1e-5, "{what}: {got:?} is not {logprob}");
        }
    }
}

/// With nothing running, the prefix cache holds every page, and no more than the budget.
fn check_accounts(engine: &EngineHandle, what: &str) {
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting), (0, 0), "{what}");
    assert_eq!(stats.full_pages, stats.cached_full_pages, "{what}: a full page is held by nobody known");
    assert_eq!(stats.coded_pages, stats.cached_coded_pages, "{what}: a coded page is held by nobody known");
    assert_eq!(
        stats.sliding_pages, stats.cached_sliding_pages,
        "{what}: a sliding page is held by nobody known"
    );
    assert_eq!(stats.states, stats.cached_states, "{what}: a state is held by nobody known");
    let info = engine.info();
    let bytes = stats.full_pages * info.full_block_bytes
        + stats.coded_pages * info.coded_block_bytes
        + stats.sliding_pages * info.sliding_block_bytes
        + stats.states * info.state_bytes;
    assert!(bytes <= info.kv_budget_bytes, "{what}");
}

struct Plan {
    model: ModelSource,
    format: KvFormat,
    /// In full blocks.
    budget: usize,
    chunk: usize,
    step_tokens: usize,
    batch: usize,
    rounds: usize,
    seed: u64,
    /// May hits be approximate? Answers after such a hit are only checked for form.
    approximates: bool,
}

/// Returns the statistics, so that a test can say that it tested something.
fn converse(plan: &Plan, oracle: &mut Oracle) -> EngineStats {
    let mut setup = Setup {
        format: plan.format,
        windows: windows(plan.format),
        chunk: plan.chunk,
        context: 2048,
        ..Setup::default()
    };
    let config = DecoderConfig::load(&plan.model).unwrap();
    let layout = config.cache_layout(plan.format, setup.windows, CodeLayout::CpuTile).unwrap();
    setup.kv_memory = plan.budget * layout.unquantized_block_bytes();
    let options = EngineOptions {
        scheduler: SchedulerOptions {
            max_batch: plan.batch,
            step_tokens: Some(plan.step_tokens),
            prefill_chunk: plan.chunk,
            // Little, so that sequences are preempted too.
            decode_room: 4,
            ..SchedulerOptions::default()
        },
        approximate_hits: plan.approximates,
        ..EngineOptions::new("test")
    };
    let engine = Engine::start(setup.runner(&plan.model), options).unwrap();
    let mut dice = Dice(plan.seed);
    let mut histories: Vec<Vec<u32>> = Vec::new();
    let mut approximate_hits = 0;
    for round in 0..plan.rounds {
        let mut calls = Vec::new();
        for _ in 0..dice.between(1, plan.batch + 3) {
            let mut prompt = match (histories.is_empty(), dice.roll(5)) {
                (true, _) | (_, 0) => Vec::new(),
                (_, kind) => {
                    let history = &histories[dice.roll(histories.len())];
                    match kind {
                        1 => history[..dice.between(1, history.len())].to_vec(),
                        _ => history.clone(),
                    }
                }
            };
            // One in four repeats a known prefix as it is.
            if prompt.is_empty() || dice.roll(4) > 0 {
                let count = if prompt.is_empty() { dice.between(2, 220) } else { dice.between(1, 60) };
                prompt.extend(dice.tokens(count));
            }
            if prompt.len() > 400 {
                prompt.truncate(dice.between(200, 400));
            }
            let limit = dice.between(1, 32);
            let choices = if dice.roll(6) == 0 { 3 } else { 1 };
            let params = GenerationParams {
                max_tokens: limit,
                choices,
                logprobs: Some(0),
                ..GenerationParams::default()
            };
            let cancel = (dice.roll(7) == 0).then(|| dice.roll(limit));
            calls.push((submit(&engine, &prompt, params).unwrap(), prompt, limit, choices, cancel));
        }
        for (call, prompt, limit, choices, cancel) in calls {
            let what =
                format!("seed {}, round {round}, prompt of {}, {limit} tokens", plan.seed, prompt.len());
            let outcome = call.finish(&engine, cancel);
            assert_eq!(outcome.approximate, outcome.usage.approximate, "{what}");
            if outcome.approximate {
                approximate_hits += 1;
                assert!(plan.approximates && outcome.cached >= 64 && outcome.failed.is_none(), "{what}");
            } else {
                let expected = oracle.answer(&prompt, limit);
                check_answer(&expected, &outcome, &what);
            }
            assert_eq!(outcome.answers.len(), choices, "{what}");
            assert!(outcome.cached < prompt.len() && outcome.cached.is_multiple_of(64), "{what}");
            let mut history = prompt;
            history.extend(&outcome.answers[&0].tokens);
            histories.push(history);
            if histories.len() > 6 {
                histories.remove(dice.roll(3));
            }
        }
        check_accounts(&engine, &format!("seed {}, after round {round}", plan.seed));
    }
    let stats = engine.stats();
    assert!(
        stats.approximate_hits >= approximate_hits,
        "a request that was cancelled early may have been one"
    );
    assert!(plan.approximates || stats.approximate_hits == 0);
    engine.flush_cache();
    let empty = engine.stats();
    assert_eq!((empty.full_pages, empty.coded_pages, empty.cache_bytes), (0, 0, 0), "nothing is leaked");
    assert_eq!((empty.sliding_pages, empty.states), (0, 0));
    engine.shutdown();
    stats
}

#[test]
fn answers_do_not_depend_on_the_cache_the_batch_or_the_chunk() {
    let (mut two_bit, mut bf16) = (Oracle::new(KvFormat::OSCAR2), Oracle::new(KvFormat::Bf16));
    let plan = |format, budget, chunk, batch, seed, approximates| Plan {
        model: embedded(),
        format,
        budget,
        chunk,
        step_tokens: 2 * chunk,
        batch,
        rounds: 4,
        seed,
        approximates,
    };
    let (mut cached, mut evicted) = (0, 0);
    for plan in [
        plan(KvFormat::OSCAR2, 11, 150, 4, 11, true),
        plan(KvFormat::OSCAR2, 11, 33, 6, 12, false),
        plan(KvFormat::OSCAR2, 200, 512, 3, 13, true),
        plan(KvFormat::Bf16, 18, 100, 4, 14, true),
    ] {
        let oracle = if plan.format == KvFormat::Bf16 { &mut bf16 } else { &mut two_bit };
        let stats = converse(&plan, oracle);
        cached += stats.cached_tokens;
        evicted += stats.evicted_pages;
    }
    assert!(cached > 0 && evicted > 0, "{cached} tokens found, {evicted} pages evicted");
}

/// Sliding layers, whose windows end within the recent tokens, beyond them and nearly never: evicted and
/// resumed conversations answer as cold runs do.
#[test]
fn sliding_windows_answer_alike_from_the_prefix_cache() {
    let mut evicted = 0;
    for (family, window, format, budget, chunk, approximates) in [
        (Family::Gemma3, 24, KvFormat::OSCAR2, 7, 150, true),
        (Family::Gemma3, 150, KvFormat::OSCAR2, 8, 33, false),
        (Family::GptOss, 64, KvFormat::OSCAR2, 7, 90, false),
        (Family::GptOss, 300, KvFormat::Bf16, 11, 100, false),
    ] {
        let (_folder, model) = sliding_model(family, window);
        let mut oracle = Oracle::of(format, &model);
        let (step_tokens, seed) = (2 * chunk, 30 + window as u64);
        let plan =
            Plan { model, format, budget, chunk, step_tokens, batch: 5, rounds: 6, seed, approximates };
        let stats = converse(&plan, &mut oracle);
        assert!(stats.cached_tokens > 0, "{family:?}, window {window}: nothing was found");
        evicted += stats.evicted_pages;
    }
    assert!(evicted > 0, "the cache was large enough for everything");
}

/// Latent rows: evicted and resumed conversations answer as cold runs do.
#[test]
fn latent_models_answer_alike_from_the_prefix_cache() {
    let mut evicted = 0;
    for (family, budget, chunk) in [(Family::DeepseekV3, 11, 150), (Family::Glm4MoeLite, 9, 33)] {
        let (_folder, model) = tiny_model(family);
        let format = KvFormat::Bf16;
        let mut oracle = Oracle::of(format, &model);
        let (step_tokens, seed) = (2 * chunk, budget as u64);
        let plan =
            Plan { model, format, budget, chunk, step_tokens, batch: 5, rounds: 6, seed, approximates: true };
        let stats = converse(&plan, &mut oracle);
        assert!(stats.cached_tokens > 0, "{family:?}: nothing was found");
        assert_eq!((stats.coded_pages, stats.approximate_hits), (0, 0), "nothing is quantized");
        evicted += stats.evicted_pages;
    }
    assert!(evicted > 0, "the cache was large enough for everything");
}

/// Recurrent states: hits begin where a state was kept, and answers are those of cold runs.
#[test]
fn models_with_states_answer_alike_from_the_prefix_cache() {
    let mut evicted = 0;
    for (family, format, budget, chunk) in [
        (Family::Qwen3Next, KvFormat::OSCAR2, 12, 150),
        (Family::Qwen3_5, KvFormat::Bf16, 12, 33),
        (Family::Qwen3_5Moe, KvFormat::OSCAR2, 200, 512),
    ] {
        let (_folder, model) = tiny_model(family);
        let mut oracle = Oracle::of(format, &model);
        let (step_tokens, seed) = (2 * chunk, budget as u64);
        let plan =
            Plan { model, format, budget, chunk, step_tokens, batch: 5, rounds: 6, seed, approximates: true };
        let stats = converse(&plan, &mut oracle);
        assert!(stats.cached_tokens > 0, "{family:?}: nothing was found");
        assert_eq!(stats.approximate_hits, 0, "a state is exact or absent");
        evicted += stats.evicted_pages;
    }
    assert!(evicted > 0, "the cache was large enough for everything");
}

/// Sequences that outgrow the cache together are preempted and go on as if alone.
fn check_preemption(model: &ModelSource, format: KvFormat) {
    let mut oracle = Oracle::of(format, model);
    // A layout without codes needs a page for every 64 tokens.
    let blocks = if format.is_coded() { 7 } else { 9 };
    let kv_memory = blocks * oracle.runner.layout().unquantized_block_bytes();
    let setup = Setup { format, windows: windows(format), context: 2048, kv_memory, ..Setup::default() };
    // Admitted for their prompts alone.
    let scheduler = SchedulerOptions { decode_room: 0, ..SchedulerOptions::default() };
    let options = EngineOptions { scheduler, ..EngineOptions::new("test") };
    let engine = Engine::start(setup.runner(model), options).unwrap();
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| Dice(70 + i).tokens(20 + i as usize)).collect();
    let params = || GenerationParams { max_tokens: 230, logprobs: Some(0), ..GenerationParams::default() };
    let calls: Vec<_> = prompts.iter().map(|prompt| submit(&engine, prompt, params()).unwrap()).collect();
    for (call, prompt) in calls.into_iter().zip(&prompts) {
        let outcome = call.finish(&engine, None);
        assert!(!outcome.approximate);
        check_answer(&oracle.answer(prompt, 230), &outcome, &format!("prompt of {}", prompt.len()));
    }
    assert!(engine.stats().preemptions > 0);
    check_accounts(&engine, "after preemption");
    engine.shutdown();
}

#[test]
fn sliding_models_answer_alike_after_preemption() {
    let (_folder, model) = sliding_model(Family::Gemma3, 100);
    check_preemption(&model, KvFormat::OSCAR2);
}

#[test]
fn models_with_states_answer_alike_after_preemption() {
    let (_folder, model) = tiny_model(Family::Qwen3Next);
    check_preemption(&model, KvFormat::OSCAR2);
}

#[test]
fn latent_models_answer_alike_after_preemption() {
    let (_folder, model) = tiny_model(Family::DeepseekV3);
    check_preemption(&model, KvFormat::Bf16);
}

/// Keys in groups of tokens: within a page, where the prefix cache shares their codes, and over pages, where codes
/// depend on what follows and a branch must compute its own.
#[test]
fn rivals_answer_alike_from_the_prefix_cache() {
    for (name, shares) in [("kivi2", true), ("kivi2-g128", false)] {
        let format: KvFormat = name.parse().unwrap();
        let mut oracle = Oracle::new(format);
        let setup = Setup { format, windows: windows(format), context: 2048, ..Setup::default() };
        let engine = Engine::start(setup.embedded(), EngineOptions::new("test")).unwrap();
        let mut dice = Dice(21);
        let history = dice.tokens(330);
        let mut cached = Vec::new();
        // Cold, longer, and a branch that parts inside a group of 128.
        for (kept, added) in [(330, 0), (330, 40), (250, 60), (330, 40)] {
            let mut prompt = history[..kept].to_vec();
            prompt.extend(Dice(added as u64 + 1).tokens(added));
            let params = GenerationParams { max_tokens: 6, logprobs: Some(0), ..GenerationParams::default() };
            let outcome = submit(&engine, &prompt, params).unwrap().finish(&engine, None);
            let what = format!("{name}, {kept} known and {added} new tokens");
            check_answer(&oracle.answer(&prompt, 6), &outcome, &what);
            cached.push(outcome.cached);
        }
        let expected = if shares { [0, 320, 192, 320] } else { [0, 128, 128, 128] };
        assert_eq!(cached, expected, "{name}: tokens found in the prefix cache");
        engine.shutdown();
    }
}

/// `cargo test --release -p oscar-engine -- --ignored soak`; `OSCAR_SOAK_SEEDS` sets how long.
#[test]
#[ignore = "minutes"]
fn soak() {
    let seeds = std::env::var("OSCAR_SOAK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    let mut oracle = Oracle::new(KvFormat::OSCAR2);
    let mut dice = Dice(99);
    for seed in 1000..1000 + seeds {
        let chunk = dice.between(1, 300);
        let plan = Plan {
            model: embedded(),
            format: KvFormat::OSCAR2,
            budget: dice.between(9, 40),
            chunk,
            step_tokens: dice.between(1, 3) * chunk,
            batch: dice.between(1, 9),
            rounds: 25,
            seed,
            approximates: dice.roll(2) == 0,
        };
        println!("seed {seed}: {:?}", converse(&plan, &mut oracle));
        oracle.known.clear();
    }
}
