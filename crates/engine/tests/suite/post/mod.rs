//! Views of whole histories: `keydiff-post`, `kvzip` and episodes in a running engine.

mod reference;

use crate::client::{Call, Outcome, submit};
use crate::support::Setup;
use oscar_codec::{KvFormat, Windows};
use oscar_engine::{
    Cap, Engine, EngineApi, EngineHandle, EngineOptions, EngineStats, EpisodeOptions, Evict, Eviction,
    GenerationParams, InputEmbeddings, KvRequest, KvRoute, PostCap, PostSetting, Probe, Route,
    SchedulerOptions, Turn,
};
use oscar_models::{ModelSource, Weights};
use oscar_store::{FingerprintParts, Store, StoreOptions};
use reference::Reference;
use std::sync::Arc;
use std::time::{Duration, Instant};

const KVZIP: Eviction = Eviction::Scorer(Evict::KvZip);
const ROWS: usize = 128;
const BLOCK: usize = 128;
/// Sink, recent window, rows and block.
const FIRST: usize = 64 + 64 + ROWS + BLOCK;
const ANSWER: usize = 6;

fn word(topic: u32, i: u32) -> u32 {
    400 + topic * 500 + i.wrapping_mul(2654435761) % 23
}

/// A conversation of three topics in turn: utterances of 32 tokens, two of each topic.
fn utterances(count: u32) -> Vec<u32> {
    (0..count).flat_map(|u| (0..32).map(move |i| word(u / 2 % 3, u * 32 + i))).collect()
}

/// A question about a topic, behind some history.
#[derive(Clone)]
struct Asked {
    prompt: Vec<u32>,
    turn: Turn,
}

fn asked(history: &[u32], topic: u32) -> Asked {
    asked_again(history, topic, 0)
}

/// Another question about the topic.
fn asked_again(history: &[u32], topic: u32, number: u32) -> Asked {
    let question: Vec<u32> = (0..11).map(|i| word(topic, i * 7 + 3 + number)).collect();
    let mut prompt = history.to_vec();
    let start = prompt.len();
    prompt.extend([5, 6]);
    prompt.extend(&question);
    prompt.extend([7]);
    let utterances = (0..start.div_ceil(32)).map(|u| u * 32..((u + 1) * 32).min(start)).collect();
    Asked { prompt, turn: Turn { start, utterances, question } }
}

fn setup(kv_memory: usize, chunk: usize) -> Setup {
    let windows = Windows::new(64, 64).unwrap();
    Setup { format: KvFormat::OSCAR2, windows, kv_memory, chunk, context: 4096, ..Setup::default() }
}

fn setting() -> PostSetting {
    let weights = Weights::open(&ModelSource::Embedded(oscar_embedded::FILES)).unwrap();
    PostSetting {
        probe: Probe { repeat: vec![11, 12, 13], recall: vec![14, 15, 16] },
        embeddings: InputEmbeddings::new(Arc::new(weights)).unwrap(),
        episodes: EpisodeOptions { count: 3, segment: 2, ..EpisodeOptions::default() },
    }
}

fn engine_of(setup: &Setup, cap: Option<Eviction>) -> EngineHandle {
    engine_with(setup, cap, EngineOptions::new("test"))
}

fn engine_with(setup: &Setup, cap: Option<Eviction>, options: EngineOptions) -> EngineHandle {
    let runner = setup.embedded();
    let post = setting();
    let cap = cap.map(|eviction| {
        let budget = (ROWS.to_string().parse().unwrap(), eviction.default_split());
        Cap::Post(PostCap::new(&runner, eviction, budget, BLOCK, post.episodes).unwrap())
    });
    let scheduler = SchedulerOptions { prefill_chunk: setup.chunk, ..options.scheduler };
    Engine::start(runner, EngineOptions { cap, post: Some(post), scheduler, ..options }).unwrap()
}

fn send(engine: &EngineHandle, asked: &Asked, kv: KvRequest) -> Call {
    send_for(engine, asked, kv, ANSWER)
}

fn send_for(engine: &EngineHandle, asked: &Asked, kv: KvRequest, max_tokens: usize) -> Call {
    let kv = KvRequest { turn: Some(asked.turn.clone()), ..kv };
    let params = GenerationParams { max_tokens, kv, ..GenerationParams::default() };
    submit(engine, &asked.prompt, params).unwrap()
}

fn ask(engine: &EngineHandle, asked: &Asked) -> Outcome {
    let outcome = send(engine, asked, KvRequest::default()).finish(engine, None);
    assert_eq!(outcome.failed, None);
    outcome
}

/// Waits until the background work is done.
fn settled(engine: &EngineHandle) -> EngineStats {
    let begun = Instant::now();
    loop {
        let stats = engine.stats();
        if stats.view_jobs == 0 && stats.running == 0 {
            return stats;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{stats:#?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn answer(outcome: &Outcome) -> Vec<u32> {
    outcome.answers[&0].tokens.clone()
}

fn route(outcome: &Outcome) -> Option<Route> {
    match outcome.usage.kv.unwrap().route.unwrap() {
        KvRoute::Full => None,
        KvRoute::View { route, .. } => Some(route),
    }
}

/// Cold or cached, in chunks of any size, alone or in a batch: an answer depends on its lineage alone.
#[test]
fn answers_on_views_depend_on_their_lineage_alone() {
    let history = utterances(30);
    let questions: Vec<Asked> = (0..3).map(|topic| asked(&history, topic)).collect();
    let mut reference = Reference::new();
    let whole: Vec<Vec<u32>> = questions.iter().map(|asked| reference.whole(&asked.prompt)).collect();
    for (eviction, chunk) in [(Eviction::Episodes, 96), (KVZIP, 512), (Eviction::KeyDiffPost, 96)] {
        let expected: Vec<_> =
            questions.iter().map(|asked| reference.answer(asked, eviction, &[], 960)).collect();
        assert!(expected.iter().zip(&whole).any(|(view, whole)| view.0 != *whole), "rows are missed");
        let engine = engine_of(&setup(1 << 30, chunk), Some(eviction));
        // Views are not ready: the first turn reads the whole base.
        let first = ask(&engine, &questions[0]);
        assert_eq!((answer(&first), route(&first)), (whole[0].clone(), None));
        let stats = settled(&engine);
        let views = if eviction == Eviction::Episodes { 4 } else { 1 };
        assert_eq!((stats.views, stats.routes.full, stats.view_jobs_failed), (views, 1, 0));
        assert_eq!(stats.probe_tokens > 0, eviction != Eviction::KeyDiffPost);
        for round in 0..2 {
            for (asked, (tokens, taken)) in questions.iter().zip(&expected) {
                let outcome = ask(&engine, asked);
                assert_eq!((answer(&outcome), route(&outcome)), (tokens.clone(), Some(*taken)), "{round}");
                let kv = outcome.usage.kv.unwrap();
                assert_eq!((kv.policy, kv.budget, kv.view), (eviction, ROWS, Some(832)));
                assert!(kv.kept < kv.history && kv.kept >= ROWS, "{kv:?}");
                // What lies before the turn is never computed again.
                assert!(outcome.cached >= 960, "round {round}: {} tokens were cached", outcome.cached);
            }
        }
        // All together, beside a request that asked for nothing.
        let calls: Vec<Call> = questions.iter().map(|a| send(&engine, a, KvRequest::default())).collect();
        let none = GenerationParams { max_tokens: ANSWER, ..GenerationParams::default() };
        let plain = submit(&engine, &questions[1].prompt, none).unwrap();
        for (call, (tokens, _)) in calls.into_iter().zip(&expected) {
            assert_eq!(answer(&call.finish(&engine, None)), *tokens);
        }
        let plain = plain.finish(&engine, None);
        assert_eq!((answer(&plain), plain.usage.kv), (whole[1].clone(), None));
        let stats = settled(&engine);
        assert_eq!(
            (stats.views, stats.failed, stats.view_jobs_failed),
            (views, 0, 0),
            "nothing is made twice"
        );
        // After a flush nothing is left, and the conversation begins anew.
        engine.flush_cache();
        assert_eq!(engine.stats().cache_bytes, 0, "every page returns");
        assert_eq!(route(&ask(&engine, &questions[2])), None);
        settled(&engine);
        engine.flush_cache();
        assert_eq!(engine.stats().cache_bytes, 0, "every page returns");
        engine.shutdown();
    }
}

/// Turns that outgrow the cache together give way to each other, and their answers do not change.
#[test]
fn preempted_answers_depend_on_their_lineage_alone() {
    let layout = setup(1 << 20, 512).embedded().layout().clone();
    let history = utterances(20);
    let questions: Vec<Asked> = (0..5).map(|i| asked_again(&history, i % 3, i)).collect();
    let mut reference = Reference::new();
    reference.count = 200;
    for eviction in [KVZIP, Eviction::Episodes] {
        let expected = reference.answers(&questions, eviction, &[], 640);
        // Admitted for their prompts alone, they outgrow the cache. How many are admitted depends on its size.
        let preempts = |pages: usize| {
            let scheduler = SchedulerOptions { decode_room: 0, ..SchedulerOptions::default() };
            let options = EngineOptions { scheduler, ..EngineOptions::new("test") };
            let memory = layout.peak_bytes(740) + pages * layout.full_block_bytes();
            let engine = engine_with(&setup(memory, 512), Some(eviction), options);
            ask(&engine, &questions[0]);
            settled(&engine);
            let ask = |asked| send_for(&engine, asked, KvRequest::default(), 200);
            let calls: Vec<Call> = questions.iter().map(ask).collect();
            for (i, (call, (tokens, taken))) in calls.into_iter().zip(&expected).enumerate() {
                let outcome = call.finish(&engine, None);
                let got = (answer(&outcome), route(&outcome), outcome.failed);
                assert_eq!(got, (tokens.clone(), Some(*taken), None), "{eviction}, {pages}, question {i}");
            }
            let preemptions = engine.stats().preemptions;
            settled(&engine);
            engine.flush_cache();
            assert_eq!(engine.stats().cache_bytes, 0, "every page returns");
            engine.shutdown();
            preemptions > 0
        };
        assert!((10..16).any(preempts), "{eviction}: no turn was preempted");
    }
}

/// A restart finds the turns that were computed on views: the store has their replays.
#[test]
fn conversations_on_views_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let begin = || {
        let (fingerprint, about) = FingerprintParts::default().text("model", "test").finish();
        let directory = Some(folder.path().to_owned());
        let store = StoreOptions { directory, ..StoreOptions::default() };
        let store = Store::open(&store, fingerprint, &about).unwrap();
        let options =
            EngineOptions { store: Some(store), approximate_hits: false, ..EngineOptions::new("test") };
        engine_with(&setup(1 << 30, 256), Some(KVZIP), options)
    };
    let engine = begin();
    let mut history = utterances(20);
    for turn in 0..4u32 {
        let asked = asked(&history, turn % 3);
        let outcome = ask(&engine, &asked);
        assert_eq!(route(&outcome).is_some(), turn > 0, "turn {turn}");
        settled(&engine);
        history = [asked.prompt, answer(&outcome), utterances(3)].concat();
    }
    engine.shutdown();
    // The last answer without its last token is stored; the messages behind it are new.
    let known = (history.len() - 3 * 32 - 1) / 64 * 64;
    let engine = begin();
    let asked = asked(&history, 1);
    let outcome = ask(&engine, &asked);
    assert_eq!((outcome.cached, outcome.usage.by_tier.disk), (known, known));
    assert_eq!((answer(&outcome), route(&outcome)), (Reference::new().whole(&asked.prompt), None));
    settled(&engine);
    assert!(route(&ask(&engine, &asked)).is_some(), "views are made again");
    engine.shutdown();
}

/// Turns that were computed on a view are replayed on the base: later views of other topics have them.
#[test]
fn finished_turns_are_replayed_on_the_base() {
    let mut reference = Reference::new();
    let engine = engine_of(&setup(1 << 30, 256), Some(Eviction::Episodes));
    let mut history = utterances(24);
    let (mut points, mut known) = (Vec::new(), 0);
    for turn in 0..7u32 {
        let asked = asked(&history, turn % 3);
        let outcome = ask(&engine, &asked);
        if let Some(taken) = route(&outcome) {
            // The view is that of a point, and the turns behind it are read in full.
            let end = outcome.usage.kv.unwrap().view.unwrap() + 64 + 64;
            assert_eq!(
                reference.answer(&asked, Eviction::Episodes, &[], end),
                (answer(&outcome), taken),
                "{turn}"
            );
            points.push(end);
        } else {
            assert_eq!(answer(&outcome), reference.whole(&asked.prompt));
        }
        assert!(outcome.cached >= known / 64 * 64, "turn {turn}: {} of {known}", outcome.cached);
        settled(&engine);
        history = asked.prompt;
        history.extend(answer(&outcome));
        // The last token of an answer is not stored.
        known = history.len() - 1;
        history.extend(utterances(3));
    }
    let stats = engine.stats();
    assert!(points.len() == 6 && points.is_sorted() && points[0] < points[5], "{points:?}");
    assert!(stats.replayed_tokens > 0 && stats.failed == 0, "{stats:?}");
    engine.flush_cache();
    assert_eq!(engine.stats().cache_bytes, 0, "every page returns");
    engine.shutdown();
}

/// A view that keeps everything answers like its base.
#[test]
fn a_view_of_everything_answers_like_the_base() {
    let history = utterances(30);
    let asked = asked(&history, 1);
    let whole = Reference::new().whole(&asked.prompt);
    let engine = engine_of(&setup(1 << 30, 512), None);
    let everything = || KvRequest {
        budget: ROWS.to_string().parse().ok(),
        evict: Some(Eviction::Episodes),
        protected: std::iter::once(0..asked.prompt.len()).collect(),
        ..KvRequest::default()
    };
    assert_eq!(route(&send(&engine, &asked, everything()).finish(&engine, None)), None);
    settled(&engine);
    let outcome = send(&engine, &asked, everything()).finish(&engine, None);
    let kv = outcome.usage.kv.unwrap();
    assert!(route(&outcome).is_some() && kv.kept == kv.history && kv.view.is_some(), "{kv:?}");
    assert_eq!(answer(&outcome), whole);
    engine.shutdown();
}

/// Background work takes a bounded part of the steps of running requests, and gives its pages to them.
#[test]
fn background_work_yields_to_requests() {
    let layout = setup(1 << 20, 512).embedded().layout().clone();
    let history = utterances(30);
    let first = asked(&history, 0);
    let plain = |engine: &EngineHandle, seed: u32, count: usize, max_tokens: usize| {
        let prompt: Vec<u32> = (0..count as u32).map(|i| (i * 31 + seed * 977) % 5000 + 9).collect();
        submit(engine, &prompt, GenerationParams { max_tokens, ..GenerationParams::default() }).unwrap()
    };
    let engine = engine_of(&setup(1 << 30, 512), Some(Eviction::Episodes));
    ask(&engine, &first);
    let call = plain(&engine, 1, 40, 200);
    while engine.stats().generated_tokens < 20 + ANSWER as u64 {
        std::thread::yield_now();
    }
    let before = engine.stats();
    let outcome = call.finish(&engine, None);
    let after = engine.stats();
    let computed = |s: &EngineStats| s.probe_tokens + s.replayed_tokens;
    let (steps, tokens) = (after.steps - before.steps, computed(&after) - computed(&before));
    assert_eq!((outcome.failed, outcome.answers[&0].tokens.len()), (None, 200));
    assert!(tokens <= (steps / 4 + 2) * 64, "{tokens} tokens in {steps} steps");
    settled(&engine);
    engine.shutdown();
    // A cache that holds little more than one conversation: requests get what they need, whatever the
    // background work holds.
    let engine = engine_of(
        &setup(layout.peak_bytes(1100) + 12 * layout.full_block_bytes(), 512),
        Some(Eviction::Episodes),
    );
    for turn in 0..4 {
        let outcome = ask(&engine, &asked(&history, turn % 3));
        assert_eq!(answer(&outcome).len(), ANSWER);
        let calls = [plain(&engine, turn, 700, 40), plain(&engine, turn + 9, 300, 40)];
        for call in calls {
            let outcome = call.finish(&engine, None);
            assert_eq!((outcome.failed, outcome.answers[&0].tokens.len()), (None, 40));
        }
    }
    settled(&engine);
    engine.flush_cache();
    assert_eq!(engine.stats().cache_bytes, 0, "every page returns");
    engine.shutdown();
}

#[test]
fn combinations_that_cannot_work_are_refused_by_name() {
    let refused = |setup: Setup, eviction: Eviction, budget: &str| {
        let budget = (budget.parse().unwrap(), eviction.default_split());
        PostCap::new(&setup.embedded(), eviction, budget, BLOCK, EpisodeOptions::default()).unwrap_err()
    };
    let oscar = || setup(1 << 28, 512);
    for evict in [Evict::H2o, Evict::Expected, Evict::KeyDiff] {
        assert!(refused(oscar(), Eviction::Scorer(evict), "512").contains("not served"));
    }
    assert!(refused(oscar(), Eviction::Episodes, "25%").contains("rows"));
    let kivi: KvFormat = "kivi2".parse().unwrap();
    let kivi = Setup { format: kivi, windows: kivi.windows(None, None).unwrap(), ..oscar() };
    assert!(refused(kivi, Eviction::Episodes, "512").contains("groups tokens"));
    let bf16 = Setup { format: KvFormat::Bf16, ..oscar() };
    assert!(refused(bf16, KVZIP, "512").contains("--kv"));

    let error = |engine: &EngineHandle, kv: KvRequest, logprobs: Option<usize>| {
        let params = GenerationParams { kv, prompt_logprobs: logprobs, ..GenerationParams::default() };
        submit(engine, &[5; 40], params).err().unwrap().to_string()
    };
    let own = |evict| KvRequest { budget: "128".parse().ok(), evict: Some(evict), ..KvRequest::default() };
    let engine = engine_of(&oscar(), Some(Eviction::Episodes));
    assert!(error(&engine, own(Eviction::Episodes), Some(1)).contains("prompt_logprobs"));
    assert!(error(&engine, own(Eviction::Scorer(Evict::H2o)), None).contains("h2o is not served"));
    let more = KvRequest { budget: "256".parse().ok(), ..KvRequest::default() };
    assert!(error(&engine, more, None).contains("128 of this server"));
    // The whole history is in memory anyway, so a request may read it.
    let asked = asked(&utterances(20), 0);
    let whole =
        send(&engine, &asked, KvRequest { whole: true, ..KvRequest::default() }).finish(&engine, None);
    assert_eq!((whole.failed, whole.usage.kv), (None, None));
    engine.shutdown();

    let runner = oscar().embedded();
    let policy = "keydiff".parse::<Evict>().unwrap();
    let policy =
        oscar_views::Policy { evict: policy, budget: "128".parse().unwrap(), heads: KVZIP.default_split() };
    let cap = Some(Cap::Block(oscar_engine::RowCap::new(&runner, policy, BLOCK).unwrap()));
    let engine =
        Engine::start(runner, EngineOptions { cap, post: Some(setting()), ..EngineOptions::new("t") })
            .unwrap();
    assert!(error(&engine, own(Eviction::Episodes), None).contains("episodes keeps the whole history"));
    engine.shutdown();
    let engine = Engine::start(oscar().embedded(), EngineOptions::new("t")).unwrap();
    assert!(error(&engine, own(KVZIP), None).contains("chat template"));
    engine.shutdown();
    let options = EngineOptions { post: Some(setting()), prefix_cache: false, ..EngineOptions::new("t") };
    let engine = Engine::start(oscar().embedded(), options).unwrap();
    assert!(error(&engine, own(Eviction::Episodes), None).contains("--no-prefix-cache"));
    engine.shutdown();
}
