//! What the two sides of a transfer count.

use crate::counters::numbers;

numbers!(
    TransferCounters,
    /// Numbers of transfers. Counters only grow; those marked so are of this moment.
    TransferStats:
    /// Prompts whose pages were kept for another machine.
    tickets,
    /// Prompts whose pages were not kept: there was no room, or there were none.
    tickets_refused,
    /// Tickets that nobody released in time.
    tickets_expired,
    /// Pages and bytes that were sent.
    sent_pages,
    sent_bytes,
    /// Questions about tickets that there are not (any more).
    unknown_tickets,
    /// Questions of machines with another model, cache or device.
    other_fingerprints,
    /// Connections that were closed because there were too many, or because they sent nonsense.
    bad_connections,
    /// Now: tickets, and bytes kept for them.
    tickets_held,
    held_bytes,
    /// Pages and bytes that were fetched and verified.
    fetched_pages,
    fetched_bytes,
    /// Requests with a ticket that computed what they could not fetch. The reasons follow.
    fallbacks,
    /// The other machine could not be reached, or closed the connection.
    unreachable,
    /// It did not answer in time.
    timeouts,
    /// It did not know the ticket (any more), or did not have a page of it.
    expired,
    /// It has another model, cache or device.
    wrong_fingerprint,
    /// A page was damaged, or an answer was none.
    corrupt,
);
