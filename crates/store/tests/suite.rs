//! Places for pages on a real directory: limits, losses, several users at once.

use oscar_cache::{PageHash, PageKind, PrefixKey, StoredFlag, WantedPage};
use oscar_store::{
    Counters, DirectoryStore, Files, Fingerprint, FingerprintParts, Page, PageName, PageRef, PageStore,
    PlainFiles, RamStore, Reply, SealedPage, Store, StoreLimits, StoreOptions, Tier, Tiers, list, prune,
};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, SystemTime};

const PAYLOAD: usize = 5000;

fn fingerprint() -> Fingerprint {
    FingerprintParts::default().text("model", "test").finish().0
}

fn tokens(blocks: usize, seed: u32) -> Vec<u32> {
    (0..64 * blocks as u32).map(|i| i * 7 + 1000 * seed).collect()
}

fn chain(tokens: &[u32]) -> Vec<PageHash> {
    PageHash::chain(PrefixKey::new(None, tokens)).collect()
}

fn page(tokens: &[u32], block: usize, kind: PageKind) -> (PageName, Page) {
    let name = PageName { hash: chain(tokens)[block], block: block as u32, kind };
    let mut page = Page::new(PageRef { name, tokens: &tokens[64 * block..][..64] }, 128, PAYLOAD);
    page.payload().extend((0..PAYLOAD).map(|i| (i + block) as u8));
    (name, page)
}

fn sealed(tokens: &[u32], kind: PageKind) -> Vec<SealedPage> {
    (0..tokens.len() / 64).map(|block| page(tokens, block, kind).1.seal(&fingerprint())).collect()
}

fn open(root: &Path, limits: StoreLimits) -> (DirectoryStore, Arc<Counters>) {
    let counters = Arc::new(Counters::default());
    let store = DirectoryStore::open(root, fingerprint(), "model: test\n", limits, counters.clone());
    (store.unwrap(), counters)
}

fn get(store: &impl PageStore, tokens: &[u32], block: usize, kind: PageKind) -> Option<Vec<u8>> {
    let name = PageName { hash: chain(tokens)[block], block: block as u32, kind };
    let asked = PageRef { name, tokens: &tokens[64 * block..][..64] };
    store.get_many(&[asked]).remove(0).map(|page| page.payload().to_vec())
}

#[test]
fn a_directory_keeps_pages_for_the_next_process_and_refuses_strangers() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(3, 1);
    let (store, counters) = open(folder.path(), StoreLimits::default());
    assert_eq!(store.put_many(&sealed(&tokens, PageKind::Coded)), [true; 3]);
    assert_eq!(store.put_many(&sealed(&tokens, PageKind::Coded)), [true; 3], "again costs nothing");
    let stats = counters.snapshot();
    assert_eq!(stats.written_pages, 3);
    assert_eq!(stats.disk_bytes, list(folder.path()).unwrap().bytes());
    drop(store);

    let (store, counters) = open(folder.path(), StoreLimits::default());
    let longer = [&tokens[..], &[1; 64]].concat();
    let kinds = store.exists_prefix(&chain(&longer), &PageKind::ALL);
    assert!(kinds.len() == 3 && kinds.iter().all(|kinds| kinds.coded && !kinds.full && !kinds.part));
    let payload = get(&store, &tokens, 2, PageKind::Coded).unwrap();
    assert_eq!((payload.len(), payload[1]), (PAYLOAD, 3));
    assert_eq!(counters.snapshot().disk_hits, 1);
    assert_eq!(get(&store, &tokens, 2, PageKind::Full), None, "another kind");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let file = &list(folder.path()).unwrap().pages[0].path;
        assert_eq!((mode(file), mode(file.parent().unwrap())), (0o600, 0o700), "pages tell of prompts");
    }
}

/// Between `look_up` and `get_many` another process removed the page.
#[test]
fn a_page_that_vanishes_is_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(2, 1);
    let (store, counters) = open(folder.path(), StoreLimits::default());
    store.put_many(&sealed(&tokens, PageKind::Full));
    let ram = RamStore::new(fingerprint(), 1 << 20, counters.clone());
    let tiers = Tiers::new(fingerprint(), counters.clone(), Some(ram), Some(store));
    assert_eq!(tiers.look_up(&chain(&tokens)).len(), 2);
    let asked = |block: usize| {
        let name = PageName { hash: chain(&tokens)[block], block: block as u32, kind: PageKind::Full };
        PageRef { name, tokens: &tokens[64 * block..][..64] }
    };
    assert_eq!(tiers.get_many(&[asked(0)])[0].as_ref().unwrap().0, Tier::Disk);
    prune(folder.path(), StoreLimits { bytes: Some(0), age: None }, 0).unwrap();
    let found = tiers.get_many(&[asked(1), asked(0)]);
    assert!(found[0].is_none() && found[1].as_ref().unwrap().0 == Tier::Ram);
    let stats = counters.snapshot();
    assert_eq!((stats.vanished, stats.corrupt, stats.io_errors), (1, 0, 0));
    assert_eq!(tiers.look_up(&chain(&tokens)).len(), 1, "its copy in memory");
}

/// Holds both writers while their temporary files exist.
struct Together(Arc<Barrier>);

impl Files for Together {
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.0.wait();
        let written = PlainFiles.write(path, bytes);
        self.0.wait();
        written
    }
}

/// Two containers may share a directory, and both have the process number 1.
#[test]
fn two_writers_of_one_process_number_do_not_meet() {
    let folder = tempfile::tempdir().unwrap();
    // So that both begin with a page: neither has to write the text about the model.
    drop(open(folder.path(), StoreLimits::default()));
    let pages = sealed(&tokens(1, 1), PageKind::Full);
    let barrier = Arc::new(Barrier::new(2));
    let writers = [0, 1].map(|_| {
        let (counters, files) = (Arc::new(Counters::default()), Box::new(Together(barrier.clone())));
        let (limits, about) = (StoreLimits::default(), "model: test\n");
        DirectoryStore::with_files(folder.path(), fingerprint(), about, limits, counters, files).unwrap()
    });
    std::thread::scope(|scope| {
        let writing = writers.each_ref().map(|store| scope.spawn(|| store.put_many(&pages)));
        assert_eq!(writing.map(|thread| thread.join().unwrap()), [[true], [true]]);
    });
    let listing = list(folder.path()).unwrap();
    assert_eq!((listing.pages.len(), listing.temporary.len()), (1, 0));
}

fn set_age(path: &Path, age: Duration) {
    File::options().write(true).open(path).unwrap().set_modified(SystemTime::now() - age).unwrap();
}

#[test]
fn the_least_recently_used_go_first_and_of_one_prefix_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (tokens(4, 1), tokens(4, 2));
    let (store, _) = open(folder.path(), StoreLimits::default());
    for tokens in [&old, &new] {
        store.put_many(&sealed(tokens, PageKind::Coded));
    }
    let all = list(folder.path()).unwrap();
    let old_names: Vec<String> = chain(&old).iter().map(ToString::to_string).collect();
    let is_old = |path: &Path| old_names.iter().any(|name| path.to_string_lossy().contains(name));
    all.pages
        .iter()
        .filter(|page| is_old(&page.path))
        .for_each(|page| set_age(&page.path, Duration::from_secs(7200)));
    let one = all.pages[0].bytes;
    // Room for five: two of the old prefix go, from its end; those that are left can be used.
    let limits = StoreLimits { bytes: Some(all.bytes()), age: None };
    let pruned = prune(folder.path(), limits, one).unwrap();
    assert_eq!((pruned.too_many, pruned.left), (2, 6 * one));
    assert_eq!(store.exists_prefix(&chain(&old), &PageKind::ALL).len(), 2);
    assert_eq!(store.exists_prefix(&chain(&new), &PageKind::ALL).len(), 4);
    // A page that was read counts as used; the others are too old.
    assert!(get(&store, &old, 0, PageKind::Coded).is_some());
    let pruned =
        prune(folder.path(), StoreLimits { bytes: None, age: Some(Duration::from_secs(3600)) }, 0).unwrap();
    assert_eq!((pruned.too_old, store.exists_prefix(&chain(&old), &PageKind::ALL).len()), (1, 1));
}

/// A writer that is killed leaves a temporary file. It is never taken for a page, and removed later.
#[test]
fn files_of_a_killed_writer_are_never_read() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(1, 1);
    let (store, _) = open(folder.path(), StoreLimits::default());
    store.put_many(&sealed(&tokens, PageKind::Coded));
    let file = list(folder.path()).unwrap().pages[0].path.clone();
    let half = file.with_file_name(format!("{}.77-0.tmp", file.file_name().unwrap().to_string_lossy()));
    fs::write(&half, &fs::read(&file).unwrap()[..900]).unwrap();
    fs::remove_file(&file).unwrap();
    assert_eq!(store.exists_prefix(&chain(&tokens), &PageKind::ALL).len(), 0);
    assert_eq!(prune(folder.path(), StoreLimits::default(), 0).unwrap().abandoned, 0, "it may be in use");
    set_age(&half, Duration::from_secs(3600));
    assert_eq!(prune(folder.path(), StoreLimits::default(), 0).unwrap().abandoned, 1);
    assert_eq!(list(folder.path()).unwrap().bytes(), 0);
}

#[test]
fn a_size_limit_holds_while_pages_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let limits = StoreLimits { bytes: Some(10 * 6000), age: None };
    let stores = [0, 1].map(|_| open(folder.path(), limits));
    for seed in 0..20 {
        let (store, _) = &stores[seed % 2];
        assert_eq!(store.put_many(&sealed(&tokens(2, seed as u32), PageKind::Coded)), [true; 2]);
        store.tidy(0).unwrap();
        assert!(list(folder.path()).unwrap().bytes() <= 60_000);
    }
    assert!(stores.iter().map(|(_, counters)| counters.snapshot().pruned_pages).sum::<u64>() > 0);
    let (small, _) = open(folder.path(), StoreLimits { bytes: Some(100), age: None });
    assert_eq!(small.put_many(&sealed(&tokens(1, 99), PageKind::Coded)), [false], "larger than the limit");
}

#[test]
fn memory_stays_below_its_limit_and_drops_ends_first() {
    let counters = Arc::new(Counters::default());
    let store = RamStore::new(fingerprint(), 4 * 6000, counters.clone());
    let tokens = tokens(6, 1);
    store.put_many(&sealed(&tokens, PageKind::Coded));
    let stats = counters.snapshot();
    assert!(stats.ram_bytes <= 4 * 6000 && stats.ram_pages == 4, "{stats:?}");
    // The last page came last and stays as long as it is written; of the rest the first ones are kept.
    assert!(store.exists_prefix(&chain(&tokens), &PageKind::ALL).len() >= 3);
    assert!(get(&store, &tokens, 0, PageKind::Coded).is_some());
}

/// Pages queued, written, looked up and fetched by the threads; a second tier keeps copies.
#[test]
fn threads_write_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        StoreOptions { ram: Some(1 << 20), directory: Some(folder.path().into()), ..StoreOptions::default() };
    let tokens = tokens(3, 1);
    let flags: Vec<StoredFlag> = (0..3).map(|_| StoredFlag::default()).collect();
    let store = Store::open(&options, fingerprint(), "model: test\n").unwrap();
    for (block, flag) in flags.iter().enumerate() {
        assert!(store.offer(page(&tokens, block, PageKind::Coded).1, flag));
    }
    assert!(store.flush(Duration::from_secs(20)));
    assert!(flags.iter().all(StoredFlag::is_set));
    assert_eq!((store.stats().written_pages, store.stats().queued_bytes), (3, 0));
    drop(store);

    let store = Store::open(&options, fingerprint(), "model: test\n").unwrap();
    let reader = store.reader();
    let wait = || loop {
        match reader.poll() {
            Some(reply) => break reply,
            None => std::thread::yield_now(),
        }
    };
    let prompt: Arc<[u32]> = tokens.clone().into();
    for tier in [Tier::Disk, Tier::Ram] {
        assert!(reader.look_up(7, None, prompt.clone(), None));
        let Reply::Found { id: 7, chain, kinds } = wait() else { panic!("not the answer") };
        assert_eq!(kinds.len(), 3);
        let wanted = (0..3).map(|block| WantedPage { block, kind: PageKind::Coded }).collect();
        assert!(reader.fetch(8, chain, prompt.clone(), wanted, None));
        let Reply::Pages { id: 8, pages } = wait() else { panic!("not the answer") };
        assert_eq!(pages.len(), 3);
        assert!(
            pages.iter().all(|page| page.page.as_ref().is_some_and(|(from, _)| *from == tier)),
            "{tier:?}"
        );
    }
    // The list ends at a miss.
    let wanted = (0..3).map(|block| WantedPage { block, kind: PageKind::Full }).collect();
    assert!(reader.fetch(9, chain(&tokens).into(), prompt, wanted, None));
    let Reply::Pages { id: 9, pages } = wait() else { panic!("not the answer") };
    assert!(pages.len() == 1 && pages[0].page.is_none());
}

/// A page that could not be written, or that the store has lost, is offered again.
#[test]
fn flags_tell_what_is_stored() {
    let folder = tempfile::tempdir().unwrap();
    let (directory, counters) = open(folder.path(), StoreLimits { bytes: Some(6000), age: None });
    let tiers = Tiers::new(fingerprint(), counters, None, Some(directory));
    let store = Store::start(tiers, &StoreOptions::default()).unwrap();
    let tokens = tokens(2, 1);
    let flags = [StoredFlag::default(), StoredFlag::default()];
    let (name, first) = page(&tokens, 0, PageKind::Coded);
    store.offer(first, &flags[0]);
    let mut large = page(&tokens, 1, PageKind::Coded).1;
    large.payload().resize(50_000, 0);
    store.offer(large, &flags[1]);
    assert!(store.flush(Duration::from_secs(20)));
    assert_eq!(flags.each_ref().map(StoredFlag::is_set), [true, false]);
    prune(folder.path(), StoreLimits { bytes: Some(0), age: None }, 0).unwrap();
    store.touch(vec![(name, flags[0].clone())]);
    assert!(store.flush(Duration::from_secs(20)));
    assert!(!flags[0].is_set());
}
