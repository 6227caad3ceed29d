//! A store with threads of its own: pages are written and read while the model runs.
//!
//! Writes wait in a queue of bounded bytes; a page that finds it full is dropped and counted. Reads
//! are answered in the order in which they end. Whoever asks has to accept a miss at any time. Pages of
//! other machines are read by threads of their own, so that a slow machine holds up no disk.

use crate::PageStore;
use crate::counters::{Counters, StoreStats, Tier, add, subtract};
use crate::directory::DirectoryStore;
use crate::fingerprint::Fingerprint;
use crate::folder::StoreLimits;
use crate::object::{Loaded, Page, PageName, PageRef};
use crate::ram::RamStore;
use crate::redis::RedisStore;
#[cfg(feature = "s3")]
use crate::s3::S3Store;
use crate::shared::{Shared, SharedAddress};
use crate::tiers::Tiers;
use crate::transfer::{PeerTicket, Peers, RemotePages};
use oscar_cache::{CacheSalt, PageHash, PageKind, PrefixKey, StoredFlag, StoredKinds, WantedPage};
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
/// Most pages in one write. A remote server takes many pages in one round trip.
const WRITTEN_TOGETHER: usize = 16;
/// Threads that read from other machines.
const PEER_READERS: usize = 4;

/// Which tiers a store has, and their limits.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Most bytes of pages in host memory; no such tier if absent.
    pub ram: Option<usize>,
    /// Directory of pages that outlive the process; no such tier if absent.
    pub directory: Option<PathBuf>,
    /// Server for pages that machines share; no such tier if absent.
    pub shared: Option<SharedAddress>,
    pub limits: StoreLimits,
    /// Most bytes that wait to be written.
    pub queue: usize,
    /// Bytes that are read at a time for one request; the next ones are read while they are copied.
    pub read_ahead: usize,
    /// Threads that read from the tiers and verify.
    pub readers: usize,
    /// Time after which whoever waits for an answer should go on without it.
    pub patience: Duration,
    /// Pages may also be fetched from other machines.
    pub peers: bool,
    /// No page that comes from elsewhere has a larger payload than this.
    pub most_page_bytes: usize,
    /// Kinds of pages that the cache has ([`PageKind::of`]): no other is looked for.
    pub kinds: &'static [PageKind],
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            ram: None,
            directory: None,
            shared: None,
            limits: StoreLimits::default(),
            queue: 256 << 20,
            read_ahead: 8 << 20,
            readers: 2,
            patience: Duration::from_secs(10),
            peers: false,
            most_page_bytes: 64 << 20,
            kinds: &PageKind::ALL,
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
    LookUp {
        id: u64,
        salt: Option<CacheSalt>,
        tokens: Arc<[u32]>,
        to: Sender<Reply>,
    },
    Fetch {
        id: u64,
        chain: Arc<[PageHash]>,
        tokens: Arc<[u32]>,
        wanted: Vec<WantedPage>,
        to: Sender<Reply>,
    },
    /// The pages of a ticket are not needed any more.
    Release,
}

/// A job, and the other machine whose pages it is about, if it is not about the tiers.
type Read = (ReadJob, Option<Arc<RemotePages>>);

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
    most_orders: usize,
    patience: Duration,
    peers: Option<Arc<Peers>>,
    /// `None` only while it is dropped.
    jobs: Option<Jobs>,
}

struct Jobs {
    writes: Sender<WriteJob>,
    reads: Sender<Read>,
    peer_reads: Sender<Read>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The threads end once nobody can send; one that hangs on a disk must not hang its owner.
        if let Some(jobs) = self.jobs.take() {
            flush(&jobs.writes, LAST_WRITES);
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
    /// If the directory cannot be used, the server refuses us, or the system gives no threads.
    pub fn open(options: &StoreOptions, fingerprint: Fingerprint, about: &str) -> io::Result<Self> {
        let counters = Arc::new(Counters::default());
        let ram = options.ram.map(|bytes| RamStore::new(fingerprint, bytes, counters.clone()));
        let open =
            |root: &PathBuf| DirectoryStore::open(root, fingerprint, about, options.limits, counters.clone());
        let directory = options.directory.as_ref().map(open).transpose()?;
        let open = |address: &SharedAddress| -> io::Result<Box<dyn PageStore>> {
            let shared = Shared::new(fingerprint, options.most_page_bytes, counters.clone());
            Ok(match address.clone() {
                SharedAddress::Redis(address) => {
                    Box::new(RedisStore::open(address, options.limits.age, shared)?)
                }
                #[cfg(feature = "s3")]
                SharedAddress::S3(address) => Box::new(S3Store::open(address, shared)?),
            })
        };
        let shared = options.shared.as_ref().map(open).transpose()?;
        let tiers = Tiers::new(fingerprint, counters.clone(), ram, directory);
        Self::start(tiers.with_shared(shared).with_kinds(options.kinds), options)
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
        let read = |what: &str, threads: usize| -> io::Result<Sender<Read>> {
            let (reads, inbox) = channel();
            let inbox = Arc::new(Mutex::new(inbox));
            for _ in 0..threads {
                let (theirs, inbox) = (tiers.clone(), inbox.clone());
                name(what).spawn(move || read_all(&theirs, &inbox))?;
            }
            Ok(reads)
        };
        let StoreOptions { queue, read_ahead, readers, patience, peers, most_page_bytes, .. } = *options;
        let reads = read("store-read", readers.max(1))?;
        let peer_reads = read("peer-read", if peers { PEER_READERS } else { 0 })?;
        let fingerprint = tiers.fingerprint;
        let peers = peers.then(|| Arc::new(Peers::new(fingerprint, most_page_bytes, patience)));
        let jobs = Some(Jobs { writes, reads, peer_reads });
        // Every thread has the next one to read while its last one is copied.
        let most_orders = 2 * readers.max(1);
        Ok(Self(Arc::new(Inner { tiers, queue, read_ahead, most_orders, patience, peers, jobs })))
    }

    /// Whether pages are kept here at all. A store may also be there for other machines' pages alone.
    pub fn keeps_pages(&self) -> bool {
        let tiers = &self.0.tiers;
        tiers.ram.is_some() || tiers.directory.is_some() || tiers.shared.is_some()
    }

    /// The machines that pages may be fetched from, if any.
    pub fn peers(&self) -> Option<&Arc<Peers>> {
        self.0.peers.as_ref()
    }

    /// The pages of a ticket; `None` if this store fetches nothing from other machines.
    pub fn remote(&self, ticket: &PeerTicket) -> Option<Arc<RemotePages>> {
        Some(Arc::new(self.0.peers.as_ref()?.open(ticket.clone())))
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

    /// Orders of [`Store::read_ahead`] bytes that may be under way for one request.
    pub fn most_orders(&self) -> usize {
        self.0.most_orders
    }

    /// See [`StoreOptions::patience`].
    pub fn patience(&self) -> Duration {
        self.0.patience
    }

    /// Counts an answer that did not come in time.
    pub fn note_late(&self) {
        add(&self.0.tiers.counters.timeouts, 1);
    }

    /// Counts a prompt whose stored pages no state makes resumable.
    pub fn note_missing_state(&self) {
        add(&self.0.tiers.counters.missing_states, 1);
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
        self.0.jobs.as_ref().is_some_and(|jobs| flush(&jobs.writes, most))
    }

    fn write(&self, job: WriteJob) -> bool {
        self.0.jobs.as_ref().is_some_and(|jobs| jobs.writes.send(job).is_ok())
    }

    pub fn stats(&self) -> StoreStats {
        self.0.tiers.counters.snapshot()
    }

    /// The numbers themselves, for someone who must not keep the store open.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.0.tiers.counters
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
    /// Asks what there is of the whole pages of a prompt: in the store, or on another machine.
    /// `false` if there will be no answer.
    pub fn look_up(
        &self,
        id: u64,
        salt: Option<CacheSalt>,
        tokens: Arc<[u32]>,
        remote: Option<&Arc<RemotePages>>,
    ) -> bool {
        self.ask(ReadJob::LookUp { id, salt, tokens, to: self.to.clone() }, remote)
    }

    /// Asks for pages of a prompt whose chain a look-up told. `false` if there will be no answer.
    pub fn fetch(
        &self,
        id: u64,
        chain: Arc<[PageHash]>,
        tokens: Arc<[u32]>,
        wanted: Vec<WantedPage>,
        remote: Option<&Arc<RemotePages>>,
    ) -> bool {
        self.ask(ReadJob::Fetch { id, chain, tokens, wanted, to: self.to.clone() }, remote)
    }

    /// Lets another machine forget pages. Nobody waits for that.
    pub fn release(&self, remote: &Arc<RemotePages>) {
        self.ask(ReadJob::Release, Some(remote));
    }

    fn ask(&self, job: ReadJob, remote: Option<&Arc<RemotePages>>) -> bool {
        let Some(jobs) = &self.store.0.jobs else { return false };
        let to = if remote.is_some() { &jobs.peer_reads } else { &jobs.reads };
        to.send((job, remote.cloned())).is_ok()
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
    let mut next = None;
    loop {
        match next.take().map_or_else(|| inbox.recv_timeout(every), Ok) {
            Ok(WriteJob::Put(page, stored)) => {
                let mut pages = vec![(page, stored)];
                while pages.len() < WRITTEN_TOGETHER && next.is_none() {
                    match inbox.try_recv() {
                        Ok(WriteJob::Put(page, stored)) => pages.push((page, stored)),
                        Ok(other) => next = Some(other),
                        Err(_) => break,
                    }
                }
                put_all(tiers, pages);
            }
            Ok(WriteJob::Touch(mut pages)) => {
                // From the last to the first: the first is needed by all others, so it goes last.
                pages.reverse();
                let names: Vec<PageName> = pages.iter().map(|(name, _)| *name).collect();
                let kept = catch_unwind(AssertUnwindSafe(|| tiers.touch_many(&names))).unwrap_or_default();
                pages.iter().zip(kept).for_each(|((_, stored), kept)| stored.set(kept));
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

fn put_all(tiers: &Tiers, pages: Vec<(Page, StoredFlag)>) {
    let bytes = pages.iter().map(|(page, _)| page.len()).sum();
    let (pages, flags): (Vec<Page>, Vec<StoredFlag>) = pages.into_iter().unzip();
    let put = || {
        let sealed: Vec<_> = pages.into_iter().map(|page| page.seal(&tiers.fingerprint)).collect();
        tiers.put_many(&sealed)
    };
    let kept = catch_unwind(AssertUnwindSafe(put)).unwrap_or_default();
    let kept = kept.into_iter().chain(std::iter::repeat(false));
    flags.iter().zip(kept).filter(|(_, kept)| !kept).for_each(|(stored, _)| stored.set(false));
    subtract(&tiers.counters.queued_bytes, bytes);
}

/// Reads until there is nobody to ask.
fn read_all(tiers: &Tiers, inbox: &Mutex<Receiver<Read>>) {
    loop {
        let job = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((job, remote)) = job else { return };
        // Nobody may listen any more.
        let _ = match job {
            ReadJob::LookUp { id, salt, tokens, to } => {
                let chain: Arc<[PageHash]> = PageHash::chain(PrefixKey::new(salt, &tokens)).collect();
                let look = || match &remote {
                    Some(remote) => remote.exists_prefix(&chain, &PageKind::ALL),
                    None => tiers.look_up(&chain),
                };
                let kinds = catch_unwind(AssertUnwindSafe(look)).unwrap_or_default();
                to.send(Reply::Found { id, chain, kinds })
            }
            ReadJob::Fetch { id, chain, tokens, wanted, to } => {
                let read = || fetch(tiers, remote.as_deref(), &chain, &tokens, wanted);
                let pages = catch_unwind(AssertUnwindSafe(read)).unwrap_or_default();
                to.send(Reply::Pages { id, pages })
            }
            ReadJob::Release => {
                remote.iter().for_each(|remote| remote.release());
                Ok(())
            }
        };
    }
}

fn fetch(
    tiers: &Tiers,
    remote: Option<&RemotePages>,
    chain: &[PageHash],
    tokens: &[u32],
    wanted: Vec<WantedPage>,
) -> Vec<FetchedPage> {
    let page = |wanted: &WantedPage| {
        let WantedPage { block, kind } = *wanted;
        let tokens = tokens.get(block * PAGE_TOKENS..(block + 1) * PAGE_TOKENS)?;
        Some(PageRef { name: PageName { hash: *chain.get(block)?, block: block as u32, kind }, tokens })
    };
    let asked: Vec<PageRef<'_>> = wanted.iter().map_while(page).collect();
    let mut found = match remote {
        Some(remote) => {
            let pages = remote.get_many(&asked).into_iter();
            pages.map(|page| page.map(|loaded| (Tier::Peer, loaded))).collect()
        }
        None => tiers.get_many(&asked),
    }
    .into_iter();
    let mut pages = Vec::with_capacity(wanted.len());
    for wanted in wanted {
        let page = found.next().flatten();
        let is_miss = page.is_none();
        pages.push(FetchedPage { wanted, page });
        if is_miss {
            break;
        }
    }
    pages
}
