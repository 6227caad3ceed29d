//! Where pages wait for the machine that continues their prompt.

use super::stats::{TransferCounters, TransferStats};
use crate::counters::{add, set};
use crate::fingerprint::Fingerprint;
use crate::object::{Page, PageName};
use crate::stored_prefix;
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Names the kept pages of a prompt. It is random: whoever knows it may read them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TicketId(pub(crate) [u8; 16]);

impl TicketId {
    /// `None` if the system has no random numbers.
    fn random() -> Option<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }
}

/// In hexadecimal digits.
impl fmt::Display for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Ids are secrets: logs show the beginning.
impl fmt::Debug for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketId({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}

/// The text is not 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a ticket has 32 hexadecimal digits")]
pub struct NoTicketId;

impl FromStr for TicketId {
    type Err = NoTicketId;

    fn from_str(text: &str) -> Result<Self, NoTicketId> {
        let digit = |byte: &u8| (*byte as char).to_digit(16).ok_or(NoTicketId);
        let digits = text.as_bytes().iter().map(digit).collect::<Result<Vec<_>, _>>()?;
        let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect();
        match (digits.len(), bytes.try_into()) {
            (32, Ok(bytes)) => Ok(Self(bytes)),
            _ => Err(NoTicketId),
        }
    }
}

/// What a client is given to pass on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    pub id: TicketId,
    /// Tokens of the prompt whose pages are kept.
    pub tokens: usize,
}

/// How much a desk keeps.
#[derive(Clone, Copy, Debug)]
pub struct DeskOptions {
    /// Most bytes of all tickets.
    pub bytes: usize,
    /// How long a ticket that nobody releases is kept.
    pub time: Duration,
}

/// See the [module](self). Every method may be called from several threads.
pub struct TransferDesk {
    pub(super) fingerprint: Fingerprint,
    options: DeskOptions,
    pub(super) counters: TransferCounters,
    tickets: Mutex<HashMap<TicketId, Kept>>,
}

struct Kept {
    pages: HashMap<PageName, Arc<Vec<u8>>>,
    bytes: usize,
    until: Instant,
}

impl fmt::Debug for TransferDesk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransferDesk({}, {:?})", self.fingerprint, self.options)
    }
}

impl TransferDesk {
    pub fn new(fingerprint: Fingerprint, options: DeskOptions) -> Self {
        Self { fingerprint, options, counters: TransferCounters::default(), tickets: Mutex::default() }
    }

    pub fn stats(&self) -> TransferStats {
        self.expire();
        self.counters.snapshot()
    }

    /// Forgets the tickets whose time is over.
    pub(super) fn expire(&self) {
        drop(self.lock());
    }

    /// The tickets that have not expired.
    fn lock(&self) -> MutexGuard<'_, HashMap<TicketId, Kept>> {
        // A panic while holding the lock leaves a whole map.
        let mut tickets = self.tickets.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, now) = (tickets.len(), Instant::now());
        tickets.retain(|_, kept| now < kept.until);
        add(&self.counters.tickets_expired, before - tickets.len());
        self.count(&tickets);
        tickets
    }

    fn count(&self, tickets: &HashMap<TicketId, Kept>) {
        set(&self.counters.tickets_held, tickets.len() as u64);
        set(&self.counters.held_bytes, tickets.values().map(|kept| kept.bytes as u64).sum());
    }

    /// Whether there is room for that many bytes of pages. If there is not, that is counted.
    pub fn has_room(&self, bytes: usize) -> bool {
        let held: usize = self.lock().values().map(|kept| kept.bytes).sum();
        let has_room = bytes > 0 && held.saturating_add(bytes) <= self.options.bytes;
        if !has_room {
            add(&self.counters.tickets_refused, 1);
        }
        has_room
    }

    /// Keeps the pages of the first `tokens` tokens of a prompt. `None` if the system has no random
    /// numbers.
    pub fn keep(&self, pages: Vec<Page>, tokens: usize) -> Option<Ticket> {
        let id = TicketId::random()?;
        let sealed = pages.into_iter().map(|page| page.seal(&self.fingerprint));
        let pages: HashMap<_, _> = sealed.map(|page| (page.name, page.bytes)).collect();
        let bytes = pages.values().map(|bytes| bytes.len()).sum();
        let mut tickets = self.lock();
        tickets.insert(id, Kept { pages, bytes, until: Instant::now() + self.options.time });
        add(&self.counters.tickets, 1);
        self.count(&tickets);
        Some(Ticket { id, tokens })
    }

    /// Forgets a ticket.
    pub(super) fn release(&self, id: TicketId) {
        let mut tickets = self.lock();
        tickets.remove(&id);
        self.count(&tickets);
    }

    /// The stored kinds of these pages, up to the first page with none. `None` if the ticket is unknown.
    pub(super) fn find(&self, id: TicketId, pages: &[PageHash]) -> Option<Vec<StoredKinds>> {
        let tickets = self.lock();
        let kept = tickets.get(&id)?;
        Some(stored_prefix(pages, &PageKind::ALL, |name| kept.pages.contains_key(name)))
    }

    /// Pages of a ticket; `None` if there is no such ticket.
    pub(super) fn get(&self, id: TicketId, names: &[PageName]) -> Option<Vec<Option<Arc<Vec<u8>>>>> {
        let tickets = self.lock();
        let kept = tickets.get(&id)?;
        Some(names.iter().map(|name| kept.pages.get(name).cloned()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_as_they_are_written() {
        let id = TicketId::random().unwrap();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_ne!(Some(id), TicketId::random());
        for bad in ["", "12", &"g".repeat(32), &"1".repeat(31), &"1".repeat(33), &"é".repeat(16)] {
            assert_eq!(bad.parse::<TicketId>(), Err(NoTicketId), "{bad}");
        }
    }
}
