//! Conversations under a cap on their rows.

use crate::client::{Outcome, submit};
use crate::support::Setup;
use oscar_codec::{KvFormat, Windows};
use oscar_engine::{
    Cap, Engine, EngineApi, EngineHandle, EngineOptions, Eviction, GenerationParams, KvRequest, RowCap,
    SchedulerOptions,
};
use oscar_views::{Evict, Policy};

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) % 6000 + 3).collect()
}

fn setup(kv_memory: usize) -> Setup {
    Setup {
        format: KvFormat::OSCAR2,
        windows: Windows::new(64, 64).unwrap(),
        kv_memory,
        context: 16384,
        ..Setup::default()
    }
}

fn engine(setup: &Setup, evict: Evict, rows: &str, chunk: usize, prefix_cache: bool) -> EngineHandle {
    let runner = setup.embedded();
    let policy =
        Policy { evict, budget: rows.parse().unwrap(), heads: Eviction::Scorer(evict).default_split() };
    let options = EngineOptions {
        cap: Some(Cap::Block(RowCap::new(&runner, policy, 128).unwrap())),
        prefix_cache,
        scheduler: SchedulerOptions { prefill_chunk: chunk, ..SchedulerOptions::default() },
        ..EngineOptions::new("test")
    };
    Engine::start(runner, options).unwrap()
}

fn ask(engine: &EngineHandle, prompt: &[u32], max_tokens: usize) -> Outcome {
    let params = GenerationParams { max_tokens, ..GenerationParams::default() };
    let outcome = submit(engine, prompt, params).unwrap().finish(engine, None);
    assert_eq!(outcome.failed, None);
    outcome
}

/// Chunks, the prefix cache and the turns in which a prompt came do not change an answer.
#[test]
fn capped_answers_depend_on_the_tokens_alone() {
    let prompt = tokens(1100, 1);
    for evict in [Evict::KeyDiff, Evict::SnapKv] {
        let cold = engine(&setup(1 << 30), evict, "128", 512, false);
        let expected = ask(&cold, &prompt, 12);
        assert!(cold.stats().compactions >= 5 && cold.stats().evicted_rows > 0, "{:?}", cold.stats());
        let whole = Engine::start(setup(1 << 30).embedded(), EngineOptions::new("test")).unwrap();
        let uncapped = ask(&whole, &prompt, 12);
        let warm = engine(&setup(1 << 30), evict, "128", 100, true);
        for end in [400, 700, 1000] {
            ask(&warm, &prompt[..end], 1);
        }
        for turn in 0..2 {
            let outcome = ask(&warm, &prompt, 12);
            assert_eq!(outcome.answers[&0].tokens, expected.answers[&0].tokens, "{evict}, turn {turn}");
            assert!(outcome.cached >= 900, "{evict}, turn {turn}: {} tokens were cached", outcome.cached);
        }
        // Without a cap the answer is that of the whole history.
        assert_eq!(ask(&whole, &prompt, 12).answers[&0].tokens, uncapped.answers[&0].tokens);
        assert_eq!(whole.stats().compactions, 0);
        [cold, warm, whole].iter().for_each(EngineHandle::shutdown);
    }
}

/// A conversation of two hundred turns in a cache that holds a fraction of it: nothing fails, and the
/// memory that one conversation uses stays within its cap.
#[test]
fn two_hundred_turns_fit_their_cap() {
    let layout_probe = setup(1 << 20).embedded();
    let layout = layout_probe.layout().clone();
    // About half of the whole conversation; most of it is for the BF16 windows.
    let budget = layout.sequence_bytes(5800) * 11 / 20;
    let engine = engine(&setup(budget), Evict::KeyDiff, "256", 512, true);
    let mut conversation = Vec::new();
    let mut peaks = [0; 2];
    for turn in 0..200u32 {
        conversation.extend(tokens(24, turn));
        let outcome = ask(&engine, &conversation, 5);
        conversation.extend(&outcome.answers[&0].tokens);
        let stats = engine.stats();
        assert_eq!((stats.failed, stats.running), (0, 0));
        let peak = &mut peaks[usize::from(turn >= 100)];
        *peak = stats.cache_bytes.max(*peak);
        assert!(stats.cache_bytes <= budget);
    }
    let stats = engine.stats();
    assert_eq!((stats.finished, conversation.len()), (200, 200 * 29));
    assert!(stats.compactions >= 38, "{} compactions", stats.compactions);
    assert!(peaks[1] <= peaks[0] + layout.full_block_bytes(), "memory grew: {peaks:?}");
    engine.flush_cache();
    assert_eq!(engine.stats().cache_bytes, 0, "every page returns");
    engine.shutdown();
}

/// The peak of a capped conversation, as docs/conversations.md states it: an ordinary sequence of
/// `sink + recent + budget + block` tokens, the pages of one more view, and two BF16 pages. A cache of
/// exactly that many bytes holds a prompt of any length.
#[test]
fn the_peak_of_a_capped_conversation_is_the_stated_one() {
    let (rows, block, tokens_told) = (192, 128, 2500);
    let layout = setup(1 << 20).embedded().layout().clone();
    let first = 64 + 64 + rows + block;
    let peak = layout.peak_bytes(first)
        + (rows.div_ceil(64) + 1) * layout.coded_block_bytes()
        + 2 * layout.full_block_bytes();
    assert!(peak < layout.peak_bytes(tokens_told), "the cap saves memory");
    let run = |memory: usize, evict| {
        let engine = engine(&setup(memory), evict, &rows.to_string(), 512, false);
        let prompt = tokens(tokens_told, 5);
        let params = GenerationParams { max_tokens: 4, ..GenerationParams::default() };
        let outcome = submit(&engine, &prompt, params).map(|call| call.finish(&engine, None));
        let compactions = engine.stats().compactions;
        engine.shutdown();
        outcome.map(|outcome| (outcome.failed, outcome.answers[&0].tokens.len(), compactions))
    };
    for evict in [Evict::KeyDiff, Evict::SnapKv] {
        assert_eq!(
            run(peak, evict).unwrap(),
            (None, 4, ((tokens_told - first) / block + 1) as u64),
            "{evict}"
        );
    }
    let error = run(peak - layout.coded_block_bytes(), Evict::KeyDiff).unwrap_err().to_string();
    assert!(error.contains("--kv-memory") || error.contains("bytes"), "{error}");
}

#[test]
fn caps_that_cannot_work_are_refused_with_the_reason() {
    let refused = |setup: Setup, evict, budget: &str| {
        let policy =
            Policy { evict, budget: budget.parse().unwrap(), heads: Eviction::Scorer(evict).default_split() };
        RowCap::new(&setup.embedded(), policy, 128).unwrap_err()
    };
    let oscar = || setup(1 << 28);
    assert!(refused(oscar(), Evict::KvZip, "512").contains("keydiff"));
    assert!(refused(oscar(), Evict::KeyDiff, "25%").contains("rows"));
    assert!(refused(oscar(), Evict::KeyDiff, "1K").contains("page"));
    let bf16 = Setup { format: KvFormat::Bf16, ..oscar() };
    assert!(refused(bf16, Evict::KeyDiff, "512").contains("--kv"));
    let kivi: KvFormat = "kivi2".parse().unwrap();
    let kivi = Setup { format: kivi, windows: kivi.windows(None, None).unwrap(), ..oscar() };
    assert!(refused(kivi, Evict::KeyDiff, "512").contains("groups tokens"));
    let engine = engine(&oscar(), Evict::Recent, "512", 512, true);
    let params = GenerationParams { prompt_logprobs: Some(1), ..GenerationParams::default() };
    let Err(error) = submit(&engine, &tokens(40, 1), params) else { panic!("logprobs of evicted text") };
    assert!(error.to_string().contains("--kv-budget"), "{error}");
    engine.shutdown();
}

/// Requests bring caps of their own; others on the same engine never notice.
#[test]
fn a_request_may_bring_its_own_cap() {
    let prompt = tokens(1100, 1);
    let start = |prefix_cache: bool| {
        let options = EngineOptions { prefix_cache, ..EngineOptions::new("test") };
        Engine::start(setup(1 << 30).embedded(), options).unwrap()
    };
    let asked = |engine: &EngineHandle, kv: KvRequest| {
        let params = GenerationParams { max_tokens: 8, kv, ..GenerationParams::default() };
        submit(engine, &prompt, params).unwrap().finish(engine, None)
    };
    let budget = || KvRequest { budget: Some("128".parse().unwrap()), ..KvRequest::default() };
    let (cold, warm) = (start(false), start(true));
    let whole = asked(&cold, KvRequest::default());
    assert_eq!((whole.usage.kv, cold.stats().compactions), (None, 0));
    let expected = asked(&cold, budget());
    let usage = expected.usage.kv.unwrap();
    assert_eq!((usage.policy, usage.budget, usage.compactions), (Eviction::Scorer(Evict::KeyDiff), 128, 1));
    assert!(usage.kept < usage.history && usage.view.is_some() && usage.protected == 0, "{usage:?}");
    // Protected rows are kept beside the budget, in a part of the prefix tree of their own.
    let protecting = || KvRequest { protected: std::iter::once(70..170).collect(), ..budget() };
    let protected = asked(&cold, protecting());
    let more = protected.usage.kv.unwrap();
    assert_eq!((more.protected, more.kept), (100, usage.kept + 100));
    for turn in 0..2 {
        for (kv, known) in [(KvRequest::default(), &whole), (budget(), &expected), (protecting(), &protected)]
        {
            let outcome = asked(&warm, kv);
            assert_eq!(outcome.answers[&0].tokens, known.answers[&0].tokens, "turn {turn}");
            assert_eq!(outcome.usage.kv.map(|kv| kv.kept), known.usage.kv.map(|kv| kv.kept));
            assert!(turn == 0 || outcome.cached >= 1000, "{} tokens were cached", outcome.cached);
        }
    }
    assert_eq!(warm.stats().protected_rows, 100 * 12);
    warm.flush_cache();
    assert_eq!(warm.stats().cache_bytes, 0, "every page returns");
    [cold, warm].iter().for_each(EngineHandle::shutdown);
}

#[test]
fn caps_of_requests_are_refused_by_field() {
    let free = Engine::start(setup(1 << 28).embedded(), EngineOptions::new("test")).unwrap();
    let capped = engine(&setup(1 << 28), Evict::KeyDiff, "256", 512, true);
    let refused = |engine: &EngineHandle, kv: KvRequest, logprobs: Option<usize>| {
        let params = GenerationParams { kv, prompt_logprobs: logprobs, ..GenerationParams::default() };
        submit(engine, &tokens(40, 1), params).err().unwrap().to_string()
    };
    let kv = KvRequest::default;
    let budget = |text: &str| text.parse().ok();
    for (error, named) in [
        (
            refused(&free, KvRequest { evict: Some(Eviction::Scorer(Evict::SnapKv)), ..kv() }, None),
            "kv.budget",
        ),
        (refused(&free, KvRequest { budget: budget("25%"), ..kv() }, None), "no cap"),
        (
            refused(
                &free,
                KvRequest { budget: budget("256"), evict: Some(Eviction::Scorer(Evict::KvZip)), ..kv() },
                None,
            ),
            "kvzip",
        ),
        (refused(&free, KvRequest { budget: budget("256"), whole: true, ..kv() }, None), "kv.view"),
        (refused(&free, KvRequest { budget: budget("256"), ..kv() }, Some(1)), "prompt_logprobs"),
        (refused(&capped, KvRequest { whole: true, ..kv() }, None), "--kv-budget 256"),
        (refused(&capped, KvRequest { budget: budget("512"), ..kv() }, None), "256 of this server"),
    ] {
        assert!(error.contains(named), "{error}");
    }
    [free, capped].iter().for_each(EngineHandle::shutdown);
    let bf16 = Setup { format: KvFormat::Bf16, ..setup(1 << 28) };
    let bf16 = Engine::start(bf16.embedded(), EngineOptions::new("test")).unwrap();
    let error = refused(&bf16, KvRequest { budget: budget("256"), ..kv() }, None);
    assert!(error.contains("kv:") && error.contains("--kv"), "{error}");
    bf16.shutdown();
}
