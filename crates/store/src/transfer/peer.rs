//! Pages of a ticket that lie on another machine.

use super::rules::PeerTicket;
use super::stats::{TransferCounters, TransferStats};
use super::wire::{Ask, MOST_PAGES, Question, Verdict, read_head, read_kinds, read_page};
use crate::counters::add;
use crate::deadline::{Deadline, connect, is_late};
use crate::fingerprint::Fingerprint;
use crate::object::{Defect, Loaded, PageName, PageRef, SealedPage};
use crate::{PageStore, lock};
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(2);
/// How long a machine that could not be reached is left alone.
const REST: Duration = Duration::from_secs(10);

/// Fetches pages from other machines.
#[derive(Debug)]
pub struct Peers {
    fingerprint: Fingerprint,
    /// No page is longer than this.
    most_page_bytes: usize,
    /// How long an answer may take.
    patience: Duration,
    counters: TransferCounters,
    /// Machines that are left alone, and until when.
    resting: Mutex<HashMap<(String, u16), Instant>>,
}

impl Peers {
    /// `most_page_bytes`: of the payload of the largest page.
    pub fn new(fingerprint: Fingerprint, most_page_bytes: usize, patience: Duration) -> Self {
        let most_page_bytes = most_page_bytes.saturating_add(crate::object::HEADER_BYTES);
        let (counters, resting) = (TransferCounters::default(), Mutex::default());
        Self { fingerprint, most_page_bytes, patience, counters, resting }
    }

    pub fn stats(&self) -> TransferStats {
        self.counters.snapshot()
    }

    /// The pages of a ticket. Nothing is asked yet.
    pub fn open(self: &Arc<Self>, ticket: PeerTicket) -> RemotePages {
        RemotePages { peers: self.clone(), ticket, state: Mutex::default() }
    }

    fn connect(&self, ticket: &PeerTicket) -> Result<TcpStream, Failure> {
        let (host, port) = ticket.address();
        let key = (host.to_owned(), port);
        let now = Instant::now();
        if lock(&self.resting).get(&key).is_some_and(|until| now < *until) {
            return Err(Failure::Unreachable);
        }
        connect(host, port, CONNECT).map_err(|error| {
            tracing::warn!(host, port, %error, "a machine with pages cannot be reached");
            self.rest(key);
            if is_late(&error) { Failure::Late } else { Failure::Unreachable }
        })
    }

    fn rest(&self, key: (String, u16)) {
        let (mut resting, now) = (lock(&self.resting), Instant::now());
        resting.retain(|_, until| now < *until);
        resting.insert(key, now + REST);
    }
}

/// Why pages could not be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Unreachable,
    Late,
    Expired,
    WrongFingerprint,
    Corrupt,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            _ if is_late(&error) => Self::Late,
            ErrorKind::InvalidData => Self::Corrupt,
            _ => Self::Unreachable,
        }
    }
}

/// See the [module](self). After its first failure it has nothing.
#[derive(Debug)]
pub struct RemotePages {
    peers: Arc<Peers>,
    ticket: PeerTicket,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stream: Option<TcpStream>,
    failed: bool,
}

impl RemotePages {
    /// Asks one question and reads its answer; `None` after a failure, which is counted.
    fn ask<T>(
        &self,
        ask: Ask,
        most: usize,
        read: impl FnOnce(&mut Deadline<'_>, usize) -> Result<T, Failure>,
    ) -> Option<T> {
        let mut state = lock(&self.state);
        if state.failed {
            return None;
        }
        let answer = self.attempt(&mut state, ask, most, read);
        let failed = |failure| {
            // Only a machine that was really asked is left alone for a while.
            if matches!(failure, Failure::Late) {
                let (host, port) = self.ticket.address();
                self.peers.rest((host.to_owned(), port));
            }
            self.note(&mut state, failure);
        };
        answer.map_err(failed).ok()
    }

    fn attempt<T>(
        &self,
        state: &mut State,
        ask: Ask,
        most: usize,
        read: impl FnOnce(&mut Deadline<'_>, usize) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let stream = match state.stream.take() {
            Some(stream) => stream,
            None => self.peers.connect(&self.ticket)?,
        };
        let (fingerprint, ticket) = (self.peers.fingerprint, self.ticket.id());
        let mut until = Deadline { stream: &stream, until: Instant::now() + self.peers.patience };
        until.write_all(&Question { ticket, fingerprint, ask }.to_bytes())?;
        let (verdict, count) = read_head(&mut until, most)?;
        let answer = match verdict {
            Verdict::Answered => read(&mut until, count)?,
            Verdict::NoTicket => return Err(Failure::Expired),
            Verdict::OtherFingerprint => return Err(Failure::WrongFingerprint),
        };
        state.stream = Some(stream);
        Ok(answer)
    }

    /// Counts why this ticket is of no more use.
    fn note(&self, state: &mut State, failure: Failure) {
        if std::mem::replace(&mut state.failed, true) {
            return;
        }
        state.stream = None;
        let counters = &self.peers.counters;
        let (host, port) = self.ticket.address();
        tracing::warn!(host, port, reason = ?failure, "the prompt is computed here: its pages could not be fetched");
        add(&counters.fallbacks, 1);
        let reason = match failure {
            Failure::Unreachable => &counters.unreachable,
            Failure::Late => &counters.timeouts,
            Failure::Expired => &counters.expired,
            Failure::WrongFingerprint => &counters.wrong_fingerprint,
            Failure::Corrupt => &counters.corrupt,
        };
        add(reason, 1);
    }

    /// Counts that whoever waited for an answer has gone on without it. Does not wait for the one who
    /// asks.
    pub fn give_up(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            self.note(&mut state, Failure::Late);
        }
        // Otherwise the question under way counts its own failure.
    }

    /// Tells the other machine that the ticket may be forgotten.
    pub fn release(&self) {
        let mut state = lock(&self.state);
        if !state.failed {
            // A ticket that cannot be released expires.
            let released = self.attempt(&mut state, Ask::Release, 0, |_, _| Ok(()));
            tracing::debug!(released = released.is_ok(), "a ticket is not needed any more");
        }
    }

    fn load(&self, page: &PageRef<'_>, bytes: Vec<u8>) -> Result<Loaded, Failure> {
        let (counters, length) = (&self.peers.counters, bytes.len());
        let loaded = Loaded::verify(Arc::new(bytes), &self.peers.fingerprint, page);
        let loaded = loaded.map_err(|defect| match defect {
            Defect::Corrupt(_) => Failure::Corrupt,
            Defect::WrongFingerprint => Failure::WrongFingerprint,
        })?;
        add(&counters.fetched_pages, 1);
        add(&counters.fetched_bytes, length);
        Ok(loaded)
    }
}

impl PageStore for RemotePages {
    fn exists_prefix(&self, pages: &[PageHash], _: &[PageKind]) -> Vec<StoredKinds> {
        let pages = &pages[..pages.len().min(MOST_PAGES)];
        let read = |from: &mut Deadline<'_>, count| {
            let kinds = read_kinds(from, count)?;
            // A ticket without the prompt's first page is one of another prompt.
            if kinds.is_empty() { Err(Failure::Expired) } else { Ok(kinds) }
        };
        self.ask(Ask::Find(pages.to_vec()), pages.len(), read).unwrap_or_default()
    }

    /// At most [`MOST_PAGES`]; what comes before the first failure is returned.
    fn get_many(&self, pages: &[PageRef<'_>]) -> Vec<Option<Loaded>> {
        let asked = &pages[..pages.len().min(MOST_PAGES)];
        let mut loaded = Vec::with_capacity(pages.len());
        let names = asked.iter().map(|page| page.name).collect();
        self.ask(Ask::Get(names), asked.len(), |from, count| {
            for page in &asked[..count] {
                let bytes = read_page(from, self.peers.most_page_bytes)?.ok_or(Failure::Expired)?;
                loaded.push(Some(self.load(page, bytes)?));
            }
            if count < asked.len() { Err(Failure::Expired) } else { Ok(()) }
        });
        loaded.resize(pages.len(), None);
        loaded
    }

    /// Nothing is kept there.
    fn put_many(&self, pages: &[SealedPage]) -> Vec<bool> {
        vec![false; pages.len()]
    }

    fn touch_many(&self, pages: &[PageName]) -> Vec<bool> {
        vec![false; pages.len()]
    }
}
