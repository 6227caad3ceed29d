//! Conversations under a cap on their rows.

use crate::client::{Outcome, submit};
use crate::support::Setup;
use oscar_codec::{KvFormat, Windows};
use oscar_engine::{
    Engine, EngineApi, EngineHandle, EngineOptions, GenerationParams, RowCap, SchedulerOptions, default_split,
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
    let policy = Policy { evict, budget: rows.parse().unwrap(), heads: default_split(evict) };
    let options = EngineOptions {
        row_cap: Some(RowCap::new(&runner, policy, 128).unwrap()),
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

#[test]
fn caps_that_cannot_work_are_refused_with_the_reason() {
    let refused = |setup: Setup, evict, budget: &str| {
        let policy = Policy { evict, budget: budget.parse().unwrap(), heads: default_split(evict) };
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
