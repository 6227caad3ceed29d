//! Pages that outlive the cache: answers after a restart, and with a store that is damaged, full,
//! vanishing or another model's, are those of an engine without one.

use crate::client::{Outcome, submit};
use crate::support::{Setup, sliding_model, tiny_model};
use oscar_codec::{KvFormat, Windows};
use oscar_engine::{
    CacheSalt, CachedByTier, Engine, EngineApi, EngineHandle, EngineOptions, GenerationParams, SamplingParams,
};
use oscar_models::Family;
use oscar_store::{
    Counters, DirectoryStore, Files, FingerprintParts, PlainFiles, Store, StoreLimits, StoreOptions,
    StoreStats, Tiers,
};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

pub fn setup(format: KvFormat, recent: usize) -> Setup {
    let windows = Windows::new(64, recent).unwrap();
    Setup { format, windows, context: 2048, kv_memory: 64 << 20, ..Setup::default() }
}

fn engine(setup: &Setup, store: Option<Store>, exact: bool) -> EngineHandle {
    let options = EngineOptions { store, approximate_hits: !exact, ..EngineOptions::new("test") };
    Engine::start(setup.embedded(), options).unwrap()
}

pub fn store_of(model: &str, folder: &Path, options: StoreOptions) -> Store {
    let (fingerprint, about) = FingerprintParts::default().text("model", model).finish();
    Store::open(&StoreOptions { directory: Some(folder.to_owned()), ..options }, fingerprint, &about).unwrap()
}

pub fn store(folder: &Path) -> Store {
    store_of("test", folder, StoreOptions::default())
}

pub fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) % 6000 + 3).collect()
}

fn ask_salted(engine: &EngineHandle, prompt: &[u32], count: usize, salt: Option<&str>) -> Outcome {
    let params = GenerationParams {
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens: count,
        cache_salt: salt.map(|salt| CacheSalt::of(&[salt])),
        ..GenerationParams::default()
    };
    let outcome = submit(engine, prompt, params).unwrap().finish(engine, None);
    assert_eq!(outcome.failed, None);
    outcome
}

pub fn ask(engine: &EngineHandle, prompt: &[u32], count: usize) -> Outcome {
    ask_salted(engine, prompt, count, None)
}

pub fn answer(outcome: &Outcome) -> &[u32] {
    &outcome.answers[&0].tokens
}

/// The numbers of the store, which must account for the answer that was just given.
pub fn counts(engine: &EngineHandle) -> StoreStats {
    engine.stats().store.unwrap()
}

/// The files of a store.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    oscar_store::list(folder).unwrap().pages.into_iter().map(|page| page.path).collect()
}

/// Asks once, ends the engine, and returns the answer with the prompt that continues it.
fn first_life(setup: &Setup, store: Store, prompt: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let engine = engine(setup, Some(store), true);
    let outcome = ask(&engine, prompt, 40);
    let next = [prompt, answer(&outcome), &tokens(30, 9)].concat();
    let uninterrupted = ask(&engine, &next, 12);
    assert!(uninterrupted.cached > prompt.len() / 64 * 64 - 64, "{}", uninterrupted.cached);
    let expected = answer(&uninterrupted).to_vec();
    engine.shutdown();
    (expected, next)
}

#[test]
fn answers_after_a_restart_equal_those_of_an_uninterrupted_run() {
    let prompt = tokens(610, 1);
    for (format, recent) in [
        (KvFormat::OSCAR2, 128),
        (KvFormat::OSCAR2, 100),
        (KvFormat::Oscar { bits: 4 }, 256),
        (KvFormat::Bf16, 64),
    ] {
        let (folder, setup) = (tempfile::tempdir().unwrap(), setup(format, recent));
        let (expected, next) = first_life(&setup, store(folder.path()), &prompt);
        for exact in [true, false] {
            // Read at once, or in many orders that may end in any order.
            let read_ahead = if exact { 8 << 20 } else { 1 };
            let options = StoreOptions { read_ahead, ..StoreOptions::default() };
            let engine = engine(&setup, Some(store_of("test", folder.path(), options)), exact);
            let outcome = ask(&engine, &next, 12);
            assert_eq!(answer(&outcome), expected, "{format}, recent {recent}");
            assert!(!outcome.approximate);
            assert_eq!(outcome.cached, 640, "{format}, recent {recent}: {:?}", counts(&engine));
            assert_eq!(outcome.usage.by_tier, CachedByTier { disk: 640, ..CachedByTier::default() });
            let stats = engine.stats();
            assert_eq!((stats.cached_tokens, stats.cached_disk_tokens), (640, 640));
            // The same again comes from the tree.
            let again = ask(&engine, &next, 12);
            assert_eq!((answer(&again), again.usage.by_tier), (&expected[..], CachedByTier::default()));
            engine.shutdown();
        }
    }
}

/// A conversation goes on after a restart as without one, and all its pages come from the directory.
/// Returns its second turn and the answer to it.
pub fn comes_back_after_a_restart(
    begin: impl Fn(Option<Store>) -> EngineHandle,
    folder: &Path,
    prompt: &[u32],
    what: &str,
) -> (Vec<u32>, Vec<u32>) {
    let first = begin(Some(store(folder)));
    let outcome = ask(&first, prompt, 40);
    let next = [prompt, answer(&outcome), &tokens(30, 9)].concat();
    first.shutdown();
    let cold = begin(None);
    let expected = answer(&ask(&cold, &next, 12)).to_vec();
    cold.shutdown();
    let second = begin(Some(store(folder)));
    let outcome = ask(&second, &next, 12);
    assert_eq!(answer(&outcome), expected, "{what}");
    assert_eq!(outcome.usage.by_tier, CachedByTier { disk: 640, ..CachedByTier::default() });
    second.shutdown();
    (next, expected)
}

/// Latent rows come back as they were.
#[test]
fn latent_rows_come_back_after_a_restart() {
    let prompt = tokens(610, 1);
    for family in [Family::DeepseekV3, Family::Glm4MoeLite] {
        let (_folder, model) = tiny_model(family);
        let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::Bf16, 64));
        let begin = |store| {
            let options = EngineOptions { store, ..EngineOptions::new("test") };
            Engine::start(setup.runner(&model), options).unwrap()
        };
        comes_back_after_a_restart(begin, folder.path(), &prompt, &format!("{family:?}"));
    }
}

/// Pages of sliding layers come back with the others, and without them nothing does.
#[test]
fn sliding_windows_come_back_after_a_restart() {
    let prompt = tokens(610, 1);
    for (family, window) in [(Family::Gemma3, 24), (Family::GptOss, 200)] {
        let (_folder, model) = sliding_model(family, window);
        let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
        let begin = |store| {
            let options = EngineOptions { store, approximate_hits: false, ..EngineOptions::new("test") };
            Engine::start(setup.runner(&model), options).unwrap()
        };
        let what = format!("{family:?}, window {window}");
        let (next, expected) = comes_back_after_a_restart(begin, folder.path(), &prompt, &what);

        let is_sliding = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "sliding");
        let sliding: Vec<PathBuf> = files(folder.path()).into_iter().filter(is_sliding).collect();
        assert!(!sliding.is_empty());
        sliding.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        let third = begin(Some(store(folder.path())));
        let outcome = ask(&third, &next, 12);
        assert_eq!((answer(&outcome), outcome.cached), (&expected[..], 0), "{what}");
        third.shutdown();
    }
}

/// A prompt that leaves a stored one in its middle: approximate and marked, or computed again.
#[test]
fn a_middle_whose_window_is_not_stored_is_an_approximate_hit_or_none() {
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let prompt = tokens(610, 1);
    first_life(&setup, store(folder.path()), &prompt);
    let branch = [&prompt[..400], &tokens(60, 5)].concat();
    let cold = engine(&setup, None, true);
    let expected = ask(&cold, &branch, 12);
    let exact = engine(&setup, Some(store(folder.path())), true);
    let outcome = ask(&exact, &branch, 12);
    assert_eq!((answer(&outcome), outcome.approximate), (answer(&expected), false));
    assert_eq!(outcome.cached, 64, "the sink alone");
    drop(exact);
    // The branch was computed, so its window is stored now.
    let exact = engine(&setup, Some(store(folder.path())), true);
    let other = [&branch[..], &tokens(20, 6)].concat();
    let outcome = ask(&exact, &other, 12);
    assert_eq!((outcome.cached, outcome.approximate), (448, false));
    drop(exact);

    let folder = tempfile::tempdir().unwrap();
    first_life(&setup, store(folder.path()), &prompt);
    let approximate = engine(&setup, Some(store(folder.path())), false);
    let outcome = ask(&approximate, &branch, 12);
    assert_eq!((outcome.cached, outcome.approximate), (384, true));
    assert_eq!(approximate.stats().approximate_hits, 1);
}

#[test]
fn memory_keeps_what_the_tree_gives_up() {
    let setup = setup(KvFormat::OSCAR2, 128);
    let (fingerprint, about) = FingerprintParts::default().text("model", "test").finish();
    let options = StoreOptions { ram: Some(64 << 20), ..StoreOptions::default() };
    let engine = engine(&setup, Some(Store::open(&options, fingerprint, &about).unwrap()), true);
    let prompt = tokens(500, 3);
    let expected = ask(&engine, &prompt, 12);
    engine.flush_cache();
    let outcome = ask(&engine, &prompt, 12);
    assert_eq!(answer(&outcome), answer(&expected));
    assert_eq!(
        (outcome.cached, outcome.usage.by_tier),
        (448, CachedByTier { ram: 448, ..CachedByTier::default() })
    );
    assert!(counts(&engine).ram_bytes > 0 && counts(&engine).ram_hits > 0);
    // Another tenant does not find it.
    assert_eq!(ask_salted(&engine, &prompt, 12, Some("other")).cached, 0);
    engine.flush_cache();
    assert_eq!(ask_salted(&engine, &prompt, 12, Some("other")).usage.by_tier.ram, 448);
}

pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_folder(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

/// Every kind of damage, to all pages and to some: the answer is right and the damage is counted.
#[test]
fn damaged_pages_are_counted_and_computed_again() {
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let (expected, next) = first_life(&setup, store(folder.path()), &tokens(610, 1));
    let flip = |bytes: &mut Vec<u8>| bytes[4000] ^= 1;
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(5000);
    let empty = |bytes: &mut Vec<u8>| bytes.clear();
    let damages: [(Damage<'_>, usize); 4] = [(&flip, 1), (&flip, 5), (&cut, 1), (&empty, 2)];
    for (damage, every) in damages {
        let damaged = tempfile::tempdir().unwrap();
        copy_folder(folder.path(), damaged.path());
        let damaged = damaged.path();
        let mut pages = files(damaged);
        pages.sort();
        for file in pages.iter().step_by(every) {
            let mut bytes = std::fs::read(file).unwrap();
            damage(&mut bytes);
            std::fs::write(file, bytes).unwrap();
        }
        let engine = engine(&setup, Some(store(damaged)), true);
        assert_eq!(answer(&ask(&engine, &next, 12)), expected);
        assert!(counts(&engine).corrupt > 0, "{:?}", counts(&engine));
        engine.shutdown();
        // Pages that were cut off are written again; a page with a flipped bit when it is next read.
        let is_whole = |path: &PathBuf| oscar_store::verify_file(path).unwrap().is_ok();
        let whole = files(damaged).iter().filter(|path| is_whole(path)).count();
        assert!(whole >= pages.len() - pages.len().div_ceil(every));
    }
}

#[test]
fn pages_of_another_model_are_not_used() {
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let (expected, next) =
        first_life(&setup, store_of("other", folder.path(), StoreOptions::default()), &tokens(610, 1));
    let own = engine(&setup, Some(store(folder.path())), true);
    let outcome = ask(&own, &next, 12);
    assert_eq!((answer(&outcome), outcome.cached), (&expected[..], 0));
    assert!(counts(&own).misses > 0);
    own.shutdown();

    // Somebody renamed the other model's folder to ours.
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let is_other =
        |path: &PathBuf| std::fs::read_to_string(path.join("about.txt")).unwrap().contains("other");
    folders.sort_by_key(is_other);
    std::fs::remove_dir_all(&folders[0]).unwrap();
    std::fs::rename(&folders[1], &folders[0]).unwrap();
    let own = engine(&setup, Some(store(folder.path())), true);
    let outcome = ask(&own, &next, 12);
    assert_eq!((answer(&outcome), outcome.cached), (&expected[..], 0));
    assert!(counts(&own).wrong_fingerprint > 0);
}

/// A disk that takes some bytes and is full then.
struct Filling {
    left: AtomicUsize,
}

impl Files for Filling {
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let room = |left: usize| left.checked_sub(bytes.len());
        match self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, room) {
            Ok(_) => PlainFiles.write(path, bytes),
            Err(_) => {
                PlainFiles.write(path, &bytes[..bytes.len() / 2])?;
                Err(io::ErrorKind::StorageFull.into())
            }
        }
    }
}

#[test]
fn a_full_disk_costs_pages_and_nothing_else() {
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let (expected, next) = first_life(&setup, store(tempfile::tempdir().unwrap().path()), &tokens(610, 1));
    let (fingerprint, about) = FingerprintParts::default().text("model", "test").finish();
    let counters = Arc::new(Counters::default());
    let files = Box::new(Filling { left: AtomicUsize::new(300_000) });
    let limits = StoreLimits::default();
    let directory =
        DirectoryStore::with_files(folder.path(), fingerprint, &about, limits, counters.clone(), files)
            .unwrap();
    let full =
        Store::start(Tiers::new(fingerprint, counters, None, Some(directory)), &StoreOptions::default())
            .unwrap();
    let first = engine(&setup, Some(full), true);
    assert_eq!(answer(&ask(&first, &next, 12)), expected);
    first.shutdown();
    let listing = oscar_store::list(folder.path()).unwrap();
    assert_eq!(listing.temporary.len(), 0, "half-written files are removed");
    assert!(!listing.pages.is_empty() && listing.bytes() <= 300_000);
    assert!(counts(&first).disk_full > 0, "{:?}", counts(&first));
    // What was written is right.
    let engine = engine(&setup, Some(store(folder.path())), true);
    assert_eq!(answer(&ask(&engine, &next, 12)), expected);
    assert_eq!(counts(&engine).corrupt, 0);
}

#[test]
fn a_queue_that_is_full_drops_pages_and_counts_them() {
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let options = StoreOptions { queue: 1000, ..StoreOptions::default() };
    let (expected, next) =
        first_life(&setup, store_of("test", folder.path(), options.clone()), &tokens(610, 1));
    assert_eq!(files(folder.path()).len(), 0);
    let engine = engine(&setup, Some(store_of("test", folder.path(), options)), true);
    let outcome = ask(&engine, &next, 12);
    assert_eq!((answer(&outcome), outcome.cached), (&expected[..], 0));
    assert!(counts(&engine).dropped_writes > 0);
}

/// Two engines on one directory, and a third hand that deletes files all the time.
#[test]
fn a_directory_is_shared_and_pages_may_vanish() {
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| [tokens(300, 1), tokens(100, 20 + i)].concat()).collect();
    let cold = engine(&setup, None, true);
    let expected: Vec<Vec<u32>> = prompts.iter().map(|p| answer(&ask(&cold, p, 6)).to_vec()).collect();
    let engines = [0, 1].map(|_| engine(&setup, Some(store(folder.path())), true));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let hand = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for file in files(folder.path()).iter().skip(1).step_by(4) {
                    let _ = std::fs::remove_file(file);
                }
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        let asking: Vec<_> = engines
            .iter()
            .map(|engine| {
                let (prompts, expected) = (&prompts, &expected);
                scope.spawn(move || {
                    for round in 0..4 {
                        for (prompt, expected) in prompts.iter().zip(expected) {
                            assert_eq!(answer(&ask(engine, prompt, 6)), expected, "round {round}");
                        }
                        engine.flush_cache();
                    }
                })
            })
            .collect();
        let results: Vec<_> = asking.into_iter().map(|thread| thread.join()).collect();
        done.store(true, Ordering::Relaxed);
        hand.join().unwrap();
        assert!(results.iter().all(Result::is_ok));
    });
    for engine in engines {
        let stats = counts(&engine);
        assert_eq!((stats.corrupt, stats.io_errors, stats.disk_full), (0, 0, 0), "{stats:?}");
        assert!(stats.written_pages > 0);
    }
}

/// Restored pages make room like computed ones, and nothing leaks.
#[test]
fn a_small_cache_restores_what_fits() {
    let (folder, mut setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| tokens(500, 40 + i)).collect();
    let cold = engine(&setup, None, true);
    let expected: Vec<Vec<u32>> = prompts.iter().map(|p| answer(&ask(&cold, p, 8)).to_vec()).collect();
    let layout = setup.embedded().layout().clone();
    setup.kv_memory = layout.peak_bytes(520) + 6 * layout.full_block_bytes();
    let engine = engine(&setup, Some(store(folder.path())), true);
    for round in 0..3 {
        for (prompt, expected) in prompts.iter().zip(&expected) {
            assert_eq!(answer(&ask(&engine, prompt, 8)), expected, "round {round}");
        }
    }
    let stats = engine.stats();
    assert!(stats.cached_disk_tokens > 0, "{stats:?}");
    engine.flush_cache();
    let stats = engine.stats();
    assert_eq!((stats.full_pages, stats.coded_pages, stats.cache_bytes), (0, 0, 0));
}

/// A request that is cancelled while it waits for pages ends, and the engine goes on.
#[test]
fn requests_may_end_while_they_wait_for_pages() {
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let (expected, next) = first_life(&setup, store(folder.path()), &tokens(610, 1));
    let engine = engine(&setup, Some(store(folder.path())), true);
    for _ in 0..3 {
        let params = GenerationParams { max_tokens: 4, ..GenerationParams::default() };
        submit(&engine, &next, params).unwrap().finish(&engine, Some(0));
        engine.flush_cache();
    }
    assert_eq!(answer(&ask(&engine, &next, 12)), expected);
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.failed), (0, 0, 0));
}

/// A disk that hangs: the reader of one page never returns. Requests go on without the store.
#[cfg(unix)]
#[test]
fn a_store_that_does_not_answer_is_left_alone() {
    let (folder, setup) = (tempfile::tempdir().unwrap(), setup(KvFormat::OSCAR2, 128));
    let (expected, next) = first_life(&setup, store(folder.path()), &tokens(610, 1));
    // Opening a pipe that nobody writes to waits.
    let first =
        oscar_store::list(folder.path()).unwrap().pages.into_iter().find(|page| page.block == 0).unwrap();
    std::fs::remove_file(&first.path).unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::hard_link(&pipe, &first.path).unwrap();
    let options = StoreOptions { patience: Duration::from_millis(200), ..StoreOptions::default() };
    let engine = engine(&setup, Some(store_of("test", folder.path(), options)), true);
    for _ in 0..2 {
        let outcome = ask(&engine, &next, 12);
        assert_eq!(answer(&outcome), expected);
    }
    assert_eq!((counts(&engine).timeouts, engine.stats().cached_disk_tokens), (1, 0));
    // The reader returns when the pipe is written to.
    drop(std::fs::OpenOptions::new().write(true).open(&pipe).unwrap());
    engine.shutdown();
}
