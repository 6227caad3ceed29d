//! A store with threads of its own: pages are written and read while the model runs.
//!
//! Writes wait in a queue of bounded bytes; a page that finds it full is dropped and counted. Reads
//! are answered in the order in which they end. Whoever asks has to accept a miss at any time.

use crate::counters::{Counters, StoreStats, Tier, add, subtract};
use crate::directory::DirectoryStore;
use crate::fingerprint::Fingerprint;
use crate::folder::StoreLimits;
use crate::object::{Loaded, Page, PageName, PageRef};
use crate::ram::RamStore;
use crate::tiers::Tiers;
use oscar_cache::{CacheSalt, PageHash, PrefixKey, StoredFlag, StoredKinds, WantedPage};
use oscar_codec::PAGE_TOKENS;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How long the last owner of a store waits for it to write.
const LAST_WRITES: Duration = Duration::from_secs(30);
/// Threads that read.
const READERS: usize = 2;

/// Which tiers a store has, and their limits.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Most bytes of pages in host memory; no such tier if absent.
    pub ram: Option<usize>,
    /// Directory of pages that outlive the process; no such tier if absent.
    pub directory: Option<PathBuf>,
    pub limits: StoreLimits,
    /// Most bytes that wait to be written.
    pub queue: usize,
    /// Bytes that are read at a time for one request; the next ones are read while they are copied.
    pub read_ahead: usize,
    /// Time after which whoever waits for an answer should go on without it.
    pub patience: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            ram: None,
            directory: None,
            limits: StoreLimits::default(),
            queue: 256 << 20,
            read_ahead: 8 << 20,
            patience: Duration::from_secs(10),
        }
    }
}

enum WriteJob {
    Put(Page, StoredFlag),
    Touch(Vec<(PageName, StoredFlag)>),
    /// Everything before this has been written.
    Tell(Sender<()>),
}

enum ReadJob {
    LookUp { id: u64, salt: Option<CacheSalt>, tokens: Arc<[u32]>, to: Sender<Reply> },
    Fetch { id: u64, chain: Arc<[PageHash]>, tokens: Arc<[u32]>, wanted: Vec<WantedPage>, to: Sender<Reply> },
}

/// An answer of a [`StoreReader`].
#[derive(Debug)]
pub enum Reply {
    /// What the store has of the pages of a prompt.
    Found { id: u64, chain: Arc<[PageHash]>, kinds: Vec<StoredKinds> },
    /// The pages of one order, in its order. The list ends at the first miss.
    Pages { id: u64, pages: Vec<FetchedPage> },
}

#[derive(Debug)]
pub struct FetchedPage {
    pub wanted: WantedPage,
    /// `None`: a miss.
    pub page: Option<(Tier, Loaded)>,
}

/// A handle of a store. Clones are of the same one; the last one dropped waits until everything is
/// written, for a limited time.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    tiers: Arc<Tiers>,
    queue: usize,
    read_ahead: usize,
    patience: Duration,
    /// `None` only while it is dropped.
    jobs: Option<(Sender<WriteJob>, Sender<ReadJob>)>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The threads end once nobody can send; one that hangs on a disk must not hang its owner.
        if let Some((writes, _)) = self.jobs.take() {
            flush(&writes, LAST_WRITES);
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.0.tiers.fingerprint)
    }
}

impl Store {
    /// Opens the tiers and starts the threads.
    ///
    /// # Errors
    /// If the directory cannot be used, or the system gives no threads.
    pub fn open(options: &StoreOptions, fingerprint: Fingerprint, about: &str) -> io::Result<Self> {
        let counters = Arc::new(Counters::default());
        let ram = options.ram.map(|bytes| RamStore::new(fingerprint, bytes, counters.clone()));
        let open =
            |root: &PathBuf| DirectoryStore::open(root, fingerprint, about, options.limits, counters.clone());
        let directory = options.directory.as_ref().map(open).transpose()?;
        Self::start(Tiers::new(fingerprint, counters, ram, directory), options)
    }

    /// A store of these tiers; of the options, all but those of the tiers count.
    ///
    /// # Errors
    /// If the system gives no threads.
    pub fn start(tiers: Tiers, options: &StoreOptions) -> io::Result<Self> {
        let tiers = Arc::new(tiers);
        let (writes, inbox) = channel();
        let theirs = tiers.clone();
        let name = |what: &str| Builder::new().name(what.into());
        name("store-write").spawn(move || write_all(&theirs, &inbox))?;
        let (reads, inbox) = channel();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..READERS {
            let (theirs, inbox) = (tiers.clone(), inbox.clone());
            name("store-read").spawn(move || read_all(&theirs, &inbox))?;
        }
        let StoreOptions { queue, read_ahead, patience, .. } = *options;
        Ok(Self(Arc::new(Inner { tiers, queue, read_ahead, patience, jobs: Some((writes, reads)) })))
    }

    /// Queues a page to be written. `stored` is set now and cleared if the page could not be
    /// written. Returns whether there was room in the queue.
    pub fn offer(&self, page: Page, stored: &StoredFlag) -> bool {
        let (bytes, counters) = (page.len(), &self.0.tiers.counters);
        let queued = counters.queued_bytes.load(Ordering::Relaxed) as usize;
        if queued + bytes > self.0.queue {
            self.note_dropped(1);
            return false;
        }
        add(&counters.queued_bytes, bytes);
        stored.set(true);
        self.write(WriteJob::Put(page, stored.clone()))
    }

    /// See [`StoreOptions::read_ahead`].
    pub fn read_ahead(&self) -> usize {
        self.0.read_ahead
    }

    /// See [`StoreOptions::patience`].
    pub fn patience(&self) -> Duration {
        self.0.patience
    }

    /// Counts an answer that did not come in time.
    pub fn note_late(&self) {
        add(&self.0.tiers.counters.timeouts, 1);
    }

    /// Counts pages that were not even offered.
    pub fn note_dropped(&self, pages: usize) {
        add(&self.0.tiers.counters.dropped_writes, pages);
    }

    /// Counts pages as used now. The flag of a page that the store has lost is cleared.
    pub fn touch(&self, pages: Vec<(PageName, StoredFlag)>) {
        if !pages.is_empty() {
            self.write(WriteJob::Touch(pages));
        }
    }

    /// Waits until everything that was queued before is written, at most for `most`.
    pub fn flush(&self, most: Duration) -> bool {
        self.0.jobs.as_ref().is_some_and(|(writes, _)| flush(writes, most))
    }

    fn write(&self, job: WriteJob) -> bool {
        self.0.jobs.as_ref().is_some_and(|(writes, _)| writes.send(job).is_ok())
    }

    pub fn stats(&self) -> StoreStats {
        self.0.tiers.counters.snapshot()
    }

    /// Someone who asks this store.
    pub fn reader(&self) -> StoreReader {
        let (to, replies) = channel();
        StoreReader { store: self.clone(), to, replies }
    }
}

/// Asks a store and collects its answers.
#[derive(Debug)]
pub struct StoreReader {
    store: Store,
    to: Sender<Reply>,
    replies: Receiver<Reply>,
}

impl StoreReader {
    /// Asks what the store has of the whole pages of a prompt. `false` if there will be no answer.
    pub fn look_up(&self, id: u64, salt: Option<CacheSalt>, tokens: Arc<[u32]>) -> bool {
        self.ask(ReadJob::LookUp { id, salt, tokens, to: self.to.clone() })
    }

    /// Asks for pages of a prompt whose chain a look-up told. `false` if there will be no answer.
    pub fn fetch(
        &self,
        id: u64,
        chain: Arc<[PageHash]>,
        tokens: Arc<[u32]>,
        wanted: Vec<WantedPage>,
    ) -> bool {
        self.ask(ReadJob::Fetch { id, chain, tokens, wanted, to: self.to.clone() })
    }

    fn ask(&self, job: ReadJob) -> bool {
        self.store.0.jobs.as_ref().is_some_and(|(_, reads)| reads.send(job).is_ok())
    }

    /// An answer, if there is one.
    pub fn poll(&self) -> Option<Reply> {
        self.replies.try_recv().ok()
    }
}

fn flush(writes: &Sender<WriteJob>, most: Duration) -> bool {
    let (tell, told) = channel();
    writes.send(WriteJob::Tell(tell)).is_ok() && told.recv_timeout(most).is_ok()
}

/// Writes until the queue has no sender. Applies the limits of the directory from time to time.
fn write_all(tiers: &Tiers, inbox: &Receiver<WriteJob>) {
    let every = tiers.directory.as_ref().map_or(Duration::from_secs(3600), DirectoryStore::tidy_every);
    let mut tidied = Instant::now();
    loop {
        match inbox.recv_timeout(every) {
            Ok(WriteJob::Put(page, stored)) => {
                let bytes = page.len();
                let put = catch_unwind(AssertUnwindSafe(|| tiers.put(page.seal(&tiers.fingerprint))));
                if !put.unwrap_or(false) {
                    stored.set(false);
                }
                subtract(&tiers.counters.queued_bytes, bytes);
            }
            Ok(WriteJob::Touch(pages)) => {
                // From the last to the first: the first is needed by all others, so it goes last.
                for (name, stored) in pages.into_iter().rev() {
                    stored.set(tiers.touch(name));
                }
            }
            Ok(WriteJob::Tell(told)) => {
                // Nobody may wait any more.
                let _ = told.send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if let Some(directory) = tiers.directory.as_ref().filter(|_| tidied.elapsed() >= every) {
            if let Err(error) = directory.tidy(0) {
                tracing::warn!(%error, "the page store's directory could not be read");
            }
            tidied = Instant::now();
        }
    }
}

/// Reads until there is nobody to ask.
fn read_all(tiers: &Tiers, inbox: &Mutex<Receiver<ReadJob>>) {
    loop {
        let job = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        // Nobody may listen any more.
        let _ = match job {
            ReadJob::LookUp { id, salt, tokens, to } => {
                let chain: Arc<[PageHash]> = PageHash::chain(PrefixKey::new(salt, &tokens)).collect();
                let kinds = catch_unwind(AssertUnwindSafe(|| tiers.look_up(&chain))).unwrap_or_default();
                to.send(Reply::Found { id, chain, kinds })
            }
            ReadJob::Fetch { id, chain, tokens, wanted, to } => {
                let read = || fetch(tiers, &chain, &tokens, wanted);
                let pages = catch_unwind(AssertUnwindSafe(read)).unwrap_or_default();
                to.send(Reply::Pages { id, pages })
            }
        };
    }
}

fn fetch(tiers: &Tiers, chain: &[PageHash], tokens: &[u32], wanted: Vec<WantedPage>) -> Vec<FetchedPage> {
    let mut pages = Vec::with_capacity(wanted.len());
    for wanted in wanted {
        let WantedPage { block, kind } = wanted;
        let place = block * PAGE_TOKENS..(block + 1) * PAGE_TOKENS;
        let page = match (chain.get(block), tokens.get(place)) {
            (Some(&hash), Some(tokens)) => {
                tiers.get(PageRef { name: PageName { hash, block: block as u32, kind }, tokens })
            }
            _ => None,
        };
        let is_miss = page.is_none();
        pages.push(FetchedPage { wanted, page });
        if is_miss {
            break;
        }
    }
    pages
}
