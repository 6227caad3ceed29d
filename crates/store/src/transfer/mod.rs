//! Pages of a prompt go from the machine that computed it to the machine that continues it.
//!
//! The first machine keeps copies of the prompt's pages at its [`TransferDesk`] and gives out a
//! [`Ticket`]. Whoever brings the ticket's id to the desk's port ([`serve_desk`]) is handed the pages.
//! The second machine reads them as a [`PageStore`](crate::PageStore) of one ticket ([`RemotePages`]):
//! every page is verified like one from a disk.
//!
//! **Invariants:** a desk keeps a bounded number of bytes for a bounded time. Only addresses that the
//! operator named are connected to ([`PeerRules`]). Both sides check sizes before they allocate, and
//! nobody waits without a limit.

mod desk;
mod peer;
mod rules;
mod serve;
mod stats;
#[cfg(test)]
mod tests;
mod wire;

pub use desk::{DeskOptions, Ticket, TicketId, TransferDesk};
pub use peer::{Peers, RemotePages};
pub use rules::{PeerRule, PeerRules, PeerTicket};
pub use serve::serve_desk;
pub use stats::{TransferCounters, TransferStats};
pub use wire::{Ask, Question, Verdict};
