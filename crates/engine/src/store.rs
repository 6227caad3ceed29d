//! The page store as the engine uses it.
//!
//! Pages go to the store when they are computed, not when they are evicted: a process that is
//! killed has no time to save anything, and eviction never has to wait. Quantized pages go as they
//! become complete, the full-precision pages of a window and the recurrent state when a prompt or an
//! answer ends.
//!
//! A request whose prompt the prefix tree does not hold waits beside the scheduler while threads of
//! the store look its pages up and read them. The engine thread copies a bounded number of bytes
//! between two steps, so streams that run are not held up. Then the request is scheduled and finds
//! its prefix in the tree like any other.
//!
//! A request with a ticket of another machine fetches its pages from there in the same way, and goes to
//! the store only if that machine has none.
//!
//! **Invariant:** a page that is late, gone or damaged makes a shorter prefix, never another answer.

use crate::copies::{Gathered, OfferedPage, fill, pages_of};
use crate::request::{CachedByTier, RequestId};
use crate::serving::Activity;
use oscar_backend::{Backend, BlockId};
use oscar_cache::{
    CacheSalt, PageHash, PageKind, PrefixKey, RadixCache, Reclaimed, RestoredPage, TakenPages, WantedPage,
};
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use oscar_runner::{Runner, StepError};
use oscar_store::{FetchedPage, Loaded, PeerTicket, RemotePages, Reply, Store, StoreReader, Tier};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes copied to the device between two steps while requests run.
const LOAD_BYTES: usize = 16 << 20;
/// Bytes copied together while none runs and the store has more to send: several threads share a large
/// copy, and each call of the device costs time of its own.
const LOADED_TOGETHER: usize = 64 << 20;
/// How long a store that did not answer in time is left alone.
const REST: Duration = Duration::from_secs(30);
/// How long the engine waits at its end for pages to be written.
const LAST_WRITES: Duration = Duration::from_secs(30);

/// See the [module](self).
pub struct PageTiers {
    store: Store,
    reader: StoreReader,
    /// Requests that wait for pages, by ticket: in order of arrival.
    restores: BTreeMap<u64, Restore>,
    tickets: u64,
    /// Bytes offered since the last step.
    offered: usize,
    /// The store did not answer in time: it is not asked before this.
    rests_until: Option<Instant>,
    /// The last [`PageTiers::advance`] found an answer of the store.
    answers: bool,
}

/// A request that waits for pages.
struct Restore {
    request: RequestId,
    salt: Option<CacheSalt>,
    /// The whole pages of the prompt that a hit may cover.
    tokens: Arc<[u32]>,
    chain: Arc<[PageHash]>,
    /// Pages that were not ordered yet.
    wanted: VecDeque<WantedPage>,
    /// The look-up is under way.
    looks: bool,
    /// Orders under way. Readers may end a later one first.
    orders: VecDeque<Order>,
    /// When the store last answered, or was first asked.
    answered: Instant,
    fetched: VecDeque<FetchedPage>,
    /// The tier of each block that was restored.
    restored: Vec<(usize, Tier)>,
    /// Tokens of the prompt of which the store has something.
    known: usize,
    /// A page was missing, or there was no room: the rest is of no use.
    broken: bool,
    /// The other machine that the pages come from, if they do not come from the store.
    remote: Option<Arc<RemotePages>>,
}

/// Pages that were asked for together.
struct Order {
    first: WantedPage,
    /// The answer, if it has come.
    pages: Option<Vec<FetchedPage>>,
}

impl Restore {
    fn key(&self) -> PrefixKey<'_> {
        PrefixKey::new(self.salt, &self.tokens)
    }

    /// Bytes that have come and are not in the cache yet.
    fn fetched_bytes(&self) -> usize {
        let bytes = |page: &FetchedPage| page.page.as_ref().map_or(0, |(_, loaded)| loaded.payload().len());
        self.fetched.iter().map(bytes).sum()
    }

    /// Whether a larger copy is not worth waiting for, or will not come: a page is missing.
    fn is_enough(&self) -> bool {
        let misses = self.fetched.back().is_some_and(|page| page.page.is_none());
        misses || self.orders.is_empty() || self.fetched_bytes() >= LOADED_TOGETHER
    }

    fn is_done(&self) -> bool {
        let is_waiting = self.looks || !self.orders.is_empty();
        self.broken || !(is_waiting || !self.wanted.is_empty() || !self.fetched.is_empty())
    }
}

/// A request that need not wait any more.
pub struct Restored {
    pub request: RequestId,
    pub blocks: Vec<(usize, Tier)>,
    /// Tokens of its prompt of which the store has something: other prompts may part from it there.
    pub known: usize,
}

/// What [`PageTiers::advance`] did.
#[derive(Default)]
pub struct Advance {
    pub ready: Vec<Restored>,
    pub reclaimed: Reclaimed,
}

impl PageTiers {
    pub fn new(store: Store) -> Self {
        Self {
            reader: store.reader(),
            store,
            restores: BTreeMap::new(),
            tickets: 0,
            offered: 0,
            rests_until: None,
            answers: false,
        }
    }

    /// Waits until the pages offered so far are written.
    pub fn finish(&self) {
        if !self.store.flush(LAST_WRITES) {
            tracing::warn!("the page store did not write everything in time");
        }
    }

    /// Whether requests wait for pages. While answers come, the next is looked for without a pause.
    pub fn activity(&self) -> Activity {
        match self.restores.is_empty() {
            true => Activity::Idle,
            false if self.answers => Activity::Busy,
            false => Activity::Waiting,
        }
    }

    /// Whether the store can be asked now.
    fn is_usable(&self) -> bool {
        self.store.keeps_pages() && self.rests_until.is_none_or(|until| until <= Instant::now())
    }

    /// Lets a request wait for pages of its prompt that the tree does not hold: those of a ticket, or
    /// those of the store. `false` if that cannot help.
    pub fn begin(
        &mut self,
        request: RequestId,
        key: PrefixKey<'_>,
        ticket: Option<&PeerTicket>,
        cache: &RadixCache,
    ) -> bool {
        let remote = ticket.and_then(|ticket| self.store.remote(ticket));
        if remote.is_none() && !self.is_usable() {
            return false;
        }
        let whole = key.tokens.len() / PAGE_TOKENS * PAGE_TOKENS;
        let tokens = &key.tokens[..whole];
        if whole == 0 || cache.resumable_len(PrefixKey::new(key.salt, tokens), true) == whole {
            remote.iter().for_each(|remote| self.reader.release(remote));
            return false;
        }
        let tokens: Arc<[u32]> = tokens.into();
        self.tickets += 1;
        if !self.reader.look_up(self.tickets, key.salt, tokens.clone(), remote.as_ref()) {
            return false;
        }
        let restore = Restore {
            request,
            salt: key.salt,
            tokens,
            chain: Arc::from([]),
            wanted: VecDeque::new(),
            looks: true,
            orders: VecDeque::new(),
            answered: Instant::now(),
            fetched: VecDeque::new(),
            restored: Vec::new(),
            known: 0,
            broken: false,
            remote,
        };
        self.restores.insert(self.tickets, restore);
        true
    }

    /// Takes the answers of the store and copies pages into the cache: a bounded number if requests
    /// run. `is_open` says whether anyone still waits for a request.
    ///
    /// # Errors
    /// If tails that were given up for room could not be quantized.
    pub fn advance<B: Backend>(
        &mut self,
        runner: &mut Runner<B>,
        cache: &mut RadixCache,
        runs: bool,
        is_open: impl Fn(RequestId) -> bool,
    ) -> Result<Advance, StepError> {
        (self.offered, self.answers) = (0, false);
        while let Some(reply) = self.reader.poll() {
            self.take(reply, cache);
            self.answers = true;
        }
        let mut advance = Advance::default();
        let mut budget = if runs { LOAD_BYTES } else { usize::MAX };
        for (&ticket, restore) in &mut self.restores {
            restore.broken |= !is_open(restore.request);
            if !restore.broken && (runs || restore.is_enough()) {
                load(restore, runner, cache, &mut budget, &mut advance.reclaimed)?;
            }
            if !restore.broken {
                order(&self.reader, ticket, restore, runner.layout(), &self.store);
            }
        }
        self.give_up_late();
        let done = |restore: &Restore| restore.is_done();
        for (_, restore) in self.restores.extract_if(.., |_, restore| done(restore)) {
            restore.remote.iter().for_each(|remote| self.reader.release(remote));
            let Restore { request, restored: blocks, known, .. } = restore;
            advance.ready.push(Restored { request, blocks, known });
        }
        Ok(advance)
    }

    /// Lets requests go on whose answers are late. Answers that come after all are ignored.
    fn give_up_late(&mut self) {
        let patience = self.store.patience();
        for restore in self.restores.values_mut() {
            let is_waiting = restore.looks || !restore.orders.is_empty();
            if !is_waiting || restore.answered.elapsed() <= patience {
                continue;
            }
            restore.broken = true;
            if let Some(remote) = &restore.remote {
                remote.give_up();
            } else {
                tracing::warn!(request = restore.request.0, "the page store does not answer");
                self.store.note_late();
                self.rests_until = Some(Instant::now() + REST);
            }
        }
    }

    fn take(&mut self, reply: Reply, cache: &mut RadixCache) {
        let is_usable = self.is_usable();
        match reply {
            Reply::Found { id, chain, kinds } => {
                let Some(restore) = self.restores.get_mut(&id) else { return };
                (restore.looks, restore.answered) = (false, Instant::now());
                restore.chain = chain;
                let is_remote = restore.remote.is_some();
                if kinds.is_empty() && is_remote {
                    // The store may know the prompt.
                    restore.remote = None;
                    restore.looks =
                        is_usable && self.reader.look_up(id, restore.salt, restore.tokens.clone(), None);
                    return;
                }
                restore.known = kinds.len() * PAGE_TOKENS;
                // Another machine has what an exact resume needs, or is of no use.
                let plan = cache.plan_restore(restore.key(), &kinds, is_remote);
                if !is_remote && cache.lacks_state(restore.key(), &kinds, plan.as_ref()) {
                    self.store.note_missing_state();
                }
                if let Some(plan) = plan {
                    tracing::debug!(
                        request = restore.request.0,
                        tokens = plan.len,
                        exact = plan.exact,
                        pages = plan.wanted.len(),
                        "restoring from the store"
                    );
                    restore.wanted = plan.wanted.into();
                }
            }
            Reply::Pages { id, pages } => {
                let Some(restore) = self.restores.get_mut(&id) else { return };
                restore.answered = Instant::now();
                let first = pages.first().map(|page| page.wanted);
                match restore.orders.iter_mut().find(|order| Some(order.first) == first) {
                    Some(order) => order.pages = Some(pages),
                    // A reader that failed sends nothing.
                    None => restore.broken = true,
                }
                while let Some(pages) = restore.orders.front_mut().and_then(|order| order.pages.take()) {
                    restore.orders.pop_front();
                    restore.fetched.extend(pages);
                }
            }
        }
    }

    /// Offers pages of a sequence to the store: complete quantized pages from block `from` on and,
    /// if it `ends`, everything that a resume needs. Pages that the store has count as used.
    pub fn offer<B: Backend>(
        &mut self,
        runner: &Runner<B>,
        cache: &RadixCache,
        key: PrefixKey<'_>,
        from: usize,
        ends: bool,
    ) {
        if !self.store.keeps_pages() {
            return;
        }
        let mut gathered = Gathered { bytes: self.offered, ..Gathered::default() };
        let layout = runner.layout();
        let offers = cache.offers(key, from, ends);
        // Windows and states first: they are few, and the quantized pages of most prefixes are stored
        // already.
        let is_quantized = |page: &OfferedPage<'_>| matches!(page.kind, PageKind::Coded | PageKind::Part);
        let (quantized, first): (Vec<_>, Vec<_>) = offers.iter().flat_map(pages_of).partition(is_quantized);
        first.iter().chain(&quantized).for_each(|page| gathered.add(layout, page));
        let Gathered { mut copies, flags, used, dropped, bytes } = gathered;
        self.offered = bytes;
        self.store.note_dropped(dropped);
        if copies.is_empty() || fill(runner, &mut copies) {
            // A full queue counts the page itself.
            for (copy, stored) in copies.into_iter().zip(&flags) {
                self.store.offer(copy.page, stored);
            }
        } else {
            self.store.note_dropped(flags.len());
        }
        if ends {
            self.store.touch(used);
        }
    }
}

/// Orders pages as long as there are fewer orders than the store reads at once and reads ahead.
fn order(reader: &StoreReader, ticket: u64, restore: &mut Restore, layout: &CacheLayout, store: &Store) {
    let most_bytes = store.read_ahead();
    while restore.orders.len() < store.most_orders()
        && restore.fetched_bytes() < LOADED_TOGETHER
        && let Some(&first) = restore.wanted.front()
    {
        let (mut wanted, mut bytes) = (Vec::new(), 0);
        while bytes < most_bytes.max(1)
            && let Some(page) = restore.wanted.pop_front()
        {
            bytes += page.kind.bytes(layout);
            wanted.push(page);
        }
        let (chain, tokens) = (restore.chain.clone(), restore.tokens.clone());
        match reader.fetch(ticket, chain, tokens, wanted, restore.remote.as_ref()) {
            true => restore.orders.push_back(Order { first, pages: None }),
            false => {
                restore.broken = true;
                return;
            }
        }
    }
}

/// Copies fetched pages into the cache, up to `budget` bytes, and puts them into the tree.
fn load<B: Backend>(
    restore: &mut Restore,
    runner: &mut Runner<B>,
    cache: &mut RadixCache,
    budget: &mut usize,
    reclaimed: &mut Reclaimed,
) -> Result<(), StepError> {
    let mut pages: Vec<(usize, RestoredPage)> = Vec::new();
    let mut copies: Vec<(BlockId, Loaded)> = Vec::new();
    while *budget > 0
        && let Some(FetchedPage { wanted, page }) = restore.fetched.pop_front()
    {
        let Some((tier, loaded)) = page else {
            restore.broken = true;
            break;
        };
        *budget = budget.saturating_sub(loaded.payload().len());
        let Some(page) = place(wanted.kind, loaded.progress(), runner, cache, reclaimed)? else {
            restore.broken = true;
            break;
        };
        // A page of another machine is not in the store.
        let is_stored = tier != Tier::Peer && wanted.kind != PageKind::Part;
        let (block, stored) = match &page {
            RestoredPage::Full(page) => (BlockId::Full(page.id()), page.stored()),
            RestoredPage::Coded(page) => (BlockId::Coded(page.id()), page.stored()),
            RestoredPage::Sliding(page) => (BlockId::Sliding(page.id()), page.stored()),
            RestoredPage::State(state) => (BlockId::State(state.id()), state.stored()),
        };
        if loaded.payload().len() != block.bytes(runner.layout()) {
            tracing::warn!(?block, "a page of the store does not fit this cache");
            restore.broken = true;
            break;
        }
        stored.set(is_stored);
        if restore.restored.last().is_none_or(|(block, _)| *block != wanted.block) {
            restore.restored.push((wanted.block, tier));
        }
        pages.push((wanted.block, page));
        copies.push((block, loaded));
    }
    let blocks: Vec<_> = copies.iter().map(|(block, loaded)| (*block, loaded.payload())).collect();
    if let Err(error) = runner.write_blocks(&blocks) {
        tracing::warn!(%error, "pages of the store could not be copied to the device");
        restore.broken = true;
        return Ok(());
    }
    let count = pages.len();
    let key = PrefixKey::new(restore.salt, &restore.tokens);
    restore.broken |= cache.restore(key, pages) < count;
    Ok(())
}

/// A page of the pool for a stored page; `None` if there is no room or the page cannot be right.
fn place<B: Backend>(
    kind: PageKind,
    progress: usize,
    runner: &mut Runner<B>,
    cache: &mut RadixCache,
    reclaimed: &mut Reclaimed,
) -> Result<Option<RestoredPage>, StepError> {
    let is_possible = match kind {
        PageKind::Full | PageKind::Sliding | PageKind::State => true,
        PageKind::Coded => progress == 2 * PAGE_TOKENS,
        PageKind::Part => progress < 2 * PAGE_TOKENS,
    };
    if !is_possible {
        return Ok(None);
    }
    let counts = kind.counts();
    let mut taken = runner.pool().take(counts);
    if let Err(full) = taken {
        let missing = full.wanted - full.free;
        if cache.reclaimable() < missing {
            return Ok(None);
        }
        *reclaimed += cache.reclaim(missing);
        taken = runner.pool().take(counts);
    }
    let Ok(TakenPages { full, coded, sliding, states }) = taken else { return Ok(None) };
    coded.iter().for_each(|page| page.mark_coded(progress));
    let full = full.into_iter().map(RestoredPage::Full);
    let coded = coded.into_iter().map(RestoredPage::Coded);
    let sliding = sliding.into_iter().map(RestoredPage::Sliding);
    let states = states.into_iter().map(RestoredPage::State);
    Ok(full.chain(coded).chain(sliding).chain(states).next())
}

/// Tokens of a hit of `stored` tokens that came from each tier.
pub fn tokens_by_tier(blocks: &[(usize, Tier)], stored: usize) -> CachedByTier {
    let mut tokens = CachedByTier::default();
    for (_, tier) in blocks.iter().filter(|(block, _)| (block + 1) * PAGE_TOKENS <= stored) {
        match tier {
            Tier::Ram => tokens.ram += PAGE_TOKENS,
            Tier::Disk => tokens.disk += PAGE_TOKENS,
            Tier::Shared => tokens.shared += PAGE_TOKENS,
            Tier::Peer => tokens.peer += PAGE_TOKENS,
        }
    }
    tokens
}
