//! Recurrent states beyond the cache: after a restart, from memory, and on another machine. Answers are
//! compared with their log-probabilities, to the bit.

use crate::client::{Outcome, submit};
use crate::store::{copy_folder, counts, files, setup, store, store_of, tokens};
use crate::support::{Setup, bits, tiny_model};
use oscar_backend::BlockId;
use oscar_codec::KvFormat;
use oscar_engine::{
    CachedByTier, Engine, EngineApi, EngineHandle, EngineOptions, GenerationParams, PageTransfer, PeerRules,
    SamplingParams, TokenLogprobs,
};
use oscar_models::{Family, ModelSource};
use oscar_runner::{Sequence, StepOutput};
use oscar_store::{
    DeskOptions, FingerprintParts, PageKind, Store, StoreOptions, TransferDesk, serve_desk, verify_file,
};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const FAMILIES: [Family; 3] = [Family::Qwen3Next, Family::Qwen3_5, Family::Qwen3_5Moe];

/// The tokens of an answer and what made them.
type Answer = (Vec<u32>, Vec<TokenLogprobs>);

fn begin(setup: &Setup, model: &ModelSource, store: Option<Store>) -> EngineHandle {
    let options = EngineOptions { store, ..EngineOptions::new("test") };
    Engine::start(setup.runner(model), options).unwrap()
}

fn ask_with(engine: &EngineHandle, prompt: &[u32], count: usize, transfer: PageTransfer) -> Outcome {
    let params = GenerationParams {
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens: count,
        logprobs: Some(2),
        transfer,
        ..GenerationParams::default()
    };
    let outcome = submit(engine, prompt, params).unwrap().finish(engine, None);
    assert_eq!((outcome.failed.as_ref(), outcome.approximate), (None, false));
    outcome
}

fn ask(engine: &EngineHandle, prompt: &[u32], count: usize) -> (Outcome, Answer) {
    let outcome = ask_with(engine, prompt, count, PageTransfer::None);
    let answer = answer(&outcome);
    (outcome, answer)
}

fn answer(outcome: &Outcome) -> Answer {
    let answer = &outcome.answers[&0];
    (answer.tokens.clone(), answer.logprobs.clone())
}

/// The files of states, by the tokens that they follow.
fn states(folder: &Path) -> Vec<(usize, PathBuf)> {
    let pages = oscar_store::list(folder).unwrap().pages.into_iter();
    let states = pages.filter(|page| page.kind == PageKind::State);
    let mut states: Vec<_> = states.map(|page| ((page.block as usize + 1) * 64, page.path.clone())).collect();
    states.sort();
    states
}

/// One turn before the end of a process, on a store, and the next one without an end.
fn first_life(setup: &Setup, model: &ModelSource, store: Store) -> (Vec<u32>, Answer) {
    let engine = begin(setup, model, Some(store));
    let prompt = tokens(610, 1);
    let (_, (answer, _)) = ask(&engine, &prompt, 40);
    let next = [&prompt[..], &answer, &tokens(30, 9)].concat();
    engine.shutdown();
    let uninterrupted = begin(setup, model, None);
    ask(&uninterrupted, &prompt, 40);
    let (outcome, expected) = ask(&uninterrupted, &next, 12);
    assert_eq!(outcome.cached, 640);
    uninterrupted.shutdown();
    (next, expected)
}

#[test]
fn states_come_back_after_a_restart() {
    for family in FAMILIES {
        let (_model, model) = tiny_model(family);
        for format in [KvFormat::OSCAR2, KvFormat::Bf16] {
            let (folder, setup) = (tempfile::tempdir().unwrap(), setup(format, 128));
            let (next, expected) = first_life(&setup, &model, store(folder.path()));
            let ends: Vec<usize> = states(folder.path()).into_iter().map(|(end, _)| end).collect();
            assert_eq!(ends, [576, 640], "the ends of the prompt and of the answer");
            // Read at once, or in many orders that may end in any order.
            for read_ahead in [8 << 20, 1] {
                let options = StoreOptions { read_ahead, ..StoreOptions::default() };
                let engine = begin(&setup, &model, Some(store_of("test", folder.path(), options)));
                let (outcome, again) = ask(&engine, &next, 12);
                assert!(again == expected, "{family:?} {format}");
                let all = CachedByTier { disk: 640, ..CachedByTier::default() };
                assert_eq!((outcome.cached, outcome.usage.by_tier), (640, all), "{:?}", counts(&engine));
                assert_eq!((counts(&engine).missing_states, counts(&engine).corrupt), (0, 0));
                // The same again comes from the tree, and the prompt's own end from the store.
                let (outcome, again) = ask(&engine, &next, 12);
                assert_eq!((again == expected, outcome.cached), (true, 640));
                assert_eq!(outcome.usage.by_tier, CachedByTier::default());
                assert_eq!(ask(&engine, &tokens(610, 1), 1).0.cached, 576);
                engine.shutdown();
            }
        }
    }
}

/// Prompts that share their beginning: the state where they part is stored with the second.
#[test]
fn a_branch_comes_back_after_a_restart() {
    let (_model, model) = tiny_model(Family::Qwen3Next);
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let prompt = |number: u32| [tokens(400, 1), tokens(150, 20 + number)].concat();
    let first = begin(&setup, &model, Some(store(folder.path())));
    assert_eq!([1, 2].map(|number| ask(&first, &prompt(number), 4).0.cached), [0, 0]);
    let (outcome, expected) = ask(&first, &prompt(3), 12);
    assert_eq!(outcome.cached, 384);
    first.shutdown();
    for number in [3, 4] {
        let second = begin(&setup, &model, Some(store(folder.path())));
        let (outcome, again) = ask(&second, &prompt(number), 12);
        assert_eq!(outcome.usage.by_tier.disk, if number == 3 { 512 } else { 384 });
        assert!(number == 4 || again == expected);
        second.shutdown();
        let cold = begin(&setup, &model, None);
        assert!(ask(&cold, &prompt(number), 12).1 == again, "{number}");
        cold.shutdown();
    }
}

/// A prompt that leaves what the store has keeps a state there, though the tree knows no other prompt.
#[test]
fn prompts_of_different_lives_part_at_a_state() {
    let (_model, model) = tiny_model(Family::Qwen3_5);
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    for (number, cached) in [(1, 0), (2, 0), (3, 384), (4, 384)] {
        let prompt = [tokens(400, 1), tokens(150, 20 + number)].concat();
        let engine = begin(&setup, &model, Some(store(folder.path())));
        let (outcome, answer) = ask(&engine, &prompt, 12);
        assert_eq!(outcome.usage.by_tier.disk, cached, "{number}");
        assert_eq!(counts(&engine).missing_states, u64::from(number == 2));
        engine.shutdown();
        let cold = begin(&setup, &model, None);
        assert!(ask(&cold, &prompt, 12).1 == answer, "{number}");
        cold.shutdown();
    }
}

/// What happens to the files of states, with the tokens of the hit that is left.
type Harm<'a> = (&'a str, usize, &'a dyn Fn(&[(usize, PathBuf)]));

/// A state that is missing, damaged or another model's costs a hit and never an answer, and is counted.
#[test]
fn a_state_that_is_lost_costs_the_hit_alone() {
    let (_model, model) = tiny_model(Family::Qwen3_5Moe);
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let (next, expected) = first_life(&setup, &model, store(folder.path()));
    let change = |path: &Path, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        std::fs::write(path, bytes).unwrap();
    };
    let remove = |states: &[(usize, PathBuf)]| {
        states.iter().for_each(|(_, path)| std::fs::remove_file(path).unwrap());
    };
    let flip = |states: &[(usize, PathBuf)]| {
        let flip = |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1;
        states.iter().for_each(|(_, path)| change(path, &flip));
    };
    let cut = |states: &[(usize, PathBuf)]| {
        states.iter().for_each(|(_, path)| change(path, &|bytes| bytes.truncate(700)));
    };
    // The state of an earlier length under the name of the last one.
    let swap = |states: &[(usize, PathBuf)]| {
        std::fs::copy(&states[0].1, &states[1].1).unwrap();
    };
    let last = |states: &[(usize, PathBuf)]| remove(&states[1..]);
    let harms: [Harm<'_>; 5] = [
        ("all missing", 0, &remove),
        ("the last missing", 576, &last),
        ("a bit", 0, &flip),
        ("cut off", 0, &cut),
        ("another length", 0, &swap),
    ];
    for (what, left, harm) in harms {
        let harmed = tempfile::tempdir().unwrap();
        copy_folder(folder.path(), harmed.path());
        harm(&states(harmed.path()));
        let engine = begin(&setup, &model, Some(store(harmed.path())));
        let (outcome, again) = ask(&engine, &next, 12);
        assert!(again == expected, "{what}");
        assert_eq!(outcome.cached, left, "{what}");
        let stats = counts(&engine);
        match what.contains("missing") {
            true => assert_eq!((stats.missing_states, stats.corrupt), (1, 0), "{what}: {stats:?}"),
            false => assert_eq!((stats.missing_states, stats.corrupt), (0, 1), "{what}: {stats:?}"),
        }
        engine.shutdown();
        // The turn stored its own ends, so the next one finds them.
        let engine = begin(&setup, &model, Some(store(harmed.path())));
        assert_eq!(ask(&engine, &next, 12).0.usage.by_tier.disk, 640, "{what}");
        engine.shutdown();
    }

    // Another model's states under our names.
    let other = tempfile::tempdir().unwrap();
    first_life(&setup, &model, store_of("other", other.path(), StoreOptions::default()));
    for ((_, ours), (_, theirs)) in states(folder.path()).iter().zip(states(other.path())) {
        std::fs::copy(theirs, ours).unwrap();
        assert!(verify_file(ours).unwrap().is_err());
    }
    let engine = begin(&setup, &model, Some(store(folder.path())));
    let (outcome, again) = ask(&engine, &next, 12);
    assert_eq!((again == expected, outcome.cached, counts(&engine).wrong_fingerprint), (true, 0, 1));
    engine.shutdown();
}

/// A state for which the write queue has no room is dropped and counted.
#[test]
fn a_full_queue_drops_states_and_counts_them() {
    let (_model, model) = tiny_model(Family::Qwen3Next);
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let queue = setup.runner(&model).layout().state_bytes();
    let options = StoreOptions { queue, ..StoreOptions::default() };
    let (next, expected) = first_life(&setup, &model, store_of("test", folder.path(), options.clone()));
    assert_eq!(states(folder.path()), []);
    let engine = begin(&setup, &model, Some(store_of("test", folder.path(), options)));
    let (outcome, again) = ask(&engine, &next, 12);
    assert_eq!((again == expected, outcome.cached), (true, 0));
    assert!(counts(&engine).dropped_writes > 0, "{:?}", counts(&engine));
    engine.shutdown();
}

/// A cache without room for the states of all prompts: they come back from memory or disk, and nothing
/// leaks.
#[test]
fn states_that_memory_pressure_took_come_back() {
    let (_model, model) = tiny_model(Family::Qwen3Next);
    let prompts: Vec<Vec<u32>> = (0..4).map(|number| tokens(500, 40 + number)).collect();
    for format in [KvFormat::OSCAR2, KvFormat::Bf16] {
        let (folder, mut setup) = (tempfile::tempdir().unwrap(), setup(format, 128));
        let cold = begin(&setup, &model, None);
        let expected: Vec<Answer> = prompts.iter().map(|prompt| ask(&cold, prompt, 8).1).collect();
        cold.shutdown();
        let layout = setup.runner(&model).layout().clone();
        let room = layout.working_bytes(520, 512) + layout.resume_bytes();
        setup.kv_memory = room + 6 * layout.full_block_bytes() + layout.state_bytes();
        let options = StoreOptions { ram: Some(64 << 20), ..StoreOptions::default() };
        let engine = begin(&setup, &model, Some(store_of("test", folder.path(), options)));
        for round in 0..3 {
            for (prompt, expected) in prompts.iter().zip(&expected) {
                let (outcome, again) = ask(&engine, prompt, 8);
                assert!(again == *expected, "{format}, round {round}");
                assert_eq!(
                    outcome.cached,
                    if round == 0 { 0 } else { 448 },
                    "{format}, round {round}: {:?}",
                    engine.stats()
                );
            }
        }
        let stats = engine.stats();
        assert!(stats.cached_ram_tokens > 0 && stats.evicted_pages > 0, "{stats:?}");
        engine.flush_cache();
        let stats = engine.stats();
        assert_eq!((stats.full_pages, stats.coded_pages, stats.states, stats.cache_bytes), (0, 0, 0, 0));
        engine.shutdown();
    }
}

/// A prompt that one machine computed continues on another as on one machine. Of the states, the one that
/// the other machine resumes from is sent, and no other.
#[test]
fn a_prompt_continues_on_another_machine() {
    for family in FAMILIES {
        let (_model, model) = tiny_model(family);
        let setup = setup(KvFormat::OSCAR2, 128);
        let (fingerprint, about) = FingerprintParts::default().text("model", "test").finish();
        let options = DeskOptions { bytes: 64 << 20, time: Duration::from_secs(60) };
        let desk = Arc::new(TransferDesk::new(fingerprint, options));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        serve_desk(desk.clone(), listener).unwrap();
        let options = EngineOptions { desk: Some(desk.clone()), ..EngineOptions::new("test") };
        let first = Engine::start(setup.runner(&model), options).unwrap();
        let options = StoreOptions { peers: true, ..StoreOptions::default() };
        let peers = Store::open(&options, fingerprint, &about).unwrap();
        let second = begin(&setup, &model, Some(peers));
        let alone = begin(&setup, &model, None);
        let rules = PeerRules(vec![format!("127.0.0.1:{port}").parse().unwrap()]);
        // The second prompt continues the first; the last one ends with a page.
        for (len, resume) in [(300, 256), (610, 576), (640, 576)] {
            let prompt = tokens(len, 1);
            let kept = ask_with(&first, &prompt, 1, PageTransfer::Keep).kept.unwrap();
            assert_eq!(kept.tokens, len / 64 * 64);
            second.flush_cache();
            let ticket = rules.ticket("127.0.0.1", port, kept.id).unwrap();
            let split = ask_with(&second, &prompt, 24, PageTransfer::Fetch(ticket));
            assert!(answer(&split) == ask(&alone, &prompt, 24).1, "{family:?}, {len} tokens");
            assert_eq!(split.usage.by_tier, CachedByTier { peer: resume, ..CachedByTier::default() });
        }
        let fetched = second.stats().fetched_from_peers.unwrap();
        assert_eq!((fetched.fallbacks, fetched.corrupt), (0, 0));
        // No room at the desk: no ticket, and the prompt is computed where its answer is.
        assert!(desk.stats().tickets_refused == 0);
        // A prompt without a whole page to resume from has no ticket.
        assert_eq!(ask_with(&first, &tokens(64, 3), 1, PageTransfer::Keep).kept, None);
        assert_eq!(desk.stats().tickets_refused, 1);
        [first, second, alone].iter().for_each(EngineHandle::shutdown);
    }
}

/// Stored states have this order. It is part of their fingerprint, as `DeltaShape::STATE_ORDER`.
#[test]
fn a_state_has_the_order_of_its_text() {
    let (_model, model) = tiny_model(Family::Qwen3Next);
    let mut runner = Setup { context: 256, ..Setup::default() }.runner(&model);
    let shape = runner.config().delta.as_ref().unwrap().shape;
    let channels = shape.channels();
    let heads = shape.value_heads * shape.key_dim * shape.value_dim;
    let mut state_after = |tokens: &[u32]| {
        let (mut sequence, mut output) = (Sequence::new(), StepOutput::default());
        runner.prefill(&mut sequence, tokens, &mut output, |_| {}).unwrap();
        let (id, mut bytes) = (sequence.pages().states().unwrap().to, Vec::new());
        runner.read_blocks(&mut [(BlockId::State(id), &mut bytes)]).unwrap();
        let numbers = bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
        let numbers: Vec<f32> = numbers.collect();
        assert_eq!(numbers.len(), heads + (shape.taps - 1) * channels, "one layer with a state");
        numbers
    };
    // After one token the matrix of a head is a key times a value: its rows are multiples of each other.
    let first = state_after(&[7]);
    for matrix in first[..heads].chunks_exact(shape.key_dim * shape.value_dim) {
        let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
        let rows: Vec<&[f32]> = matrix.chunks_exact(shape.value_dim).collect();
        let longest = rows.iter().copied().max_by(|a, b| norm(a).total_cmp(&norm(b))).unwrap();
        assert!(norm(longest) > 0.0);
        for row in rows {
            let dot: f32 = row.iter().zip(longest).map(|(a, b)| a * b).sum();
            let factor = dot / norm(longest);
            let left: Vec<f32> = row.iter().zip(longest).map(|(a, b)| a - factor * b).collect();
            assert!(norm(&left) <= 1e-8 * norm(longest), "a row of another direction");
        }
    }
    // The rows of the convolution are those of the last tokens, the oldest first: in the first layer
    // nothing else shows in them.
    let rows = |state: &[f32]| state[heads..].chunks_exact(channels).map(bits).collect::<Vec<_>>();
    let before = rows(&state_after(&[1, 2, 3, 4]));
    let after = rows(&state_after(&[9, 9, 9, 3, 4, 5]));
    assert_eq!(before[1..], after[..2]);
    assert_ne!(before[2], after[2]);
    assert!(rows(&first)[..2].iter().flatten().all(|word| *word == 0), "before the first token");
}

/// Two engines on one directory write the same states under the same names.
#[test]
fn stores_of_two_engines_have_the_same_bytes() {
    let (_model, model) = tiny_model(Family::Qwen3_5);
    let setup = setup(KvFormat::OSCAR2, 128);
    let folders = [(1, 33), (2, 512)].map(|(threads, chunk)| {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { threads, chunk, ..setup.clone() };
        let engine = begin(&setup, &model, Some(store(folder.path())));
        ask(&engine, &tokens(610, 1), 40);
        engine.shutdown();
        folder
    });
    let [some, others] = folders.each_ref().map(|folder| {
        let mut files = files(folder.path());
        files.sort();
        let contents = files.into_iter().map(|path| {
            let name = path.strip_prefix(folder.path()).unwrap().to_owned();
            (name, std::fs::read(&path).unwrap())
        });
        contents.collect::<Vec<_>>()
    });
    assert!(some == others, "threads and chunks do not show in stored bytes");
}
