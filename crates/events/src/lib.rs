//! Publishes which pages the prefix cache holds, so that a router can send a request to the server
//! that has its prefix.
//!
//! The wire is vLLM's: batches over a ZeroMQ PUB socket ([`pack`](mod@pack) has the bytes), and a
//! ROUTER socket that sends missed batches again. Readers are Dynamo, llm-d and sgl-router.
//!
//! The engine hands changes to [`EventPublisher::sink`] after each step. A thread of its own numbers,
//! packs and sends them. It keeps the last batches, and a list of the pages that are held: a reader
//! that has missed more than the kept batches gets that list ([`journal`]).
//!
//! **Invariants:** the engine never waits for a socket. A reader that applies the batches in order,
//! with gaps filled by the replay socket, knows exactly the unsalted pages of the tree. Prefixes below
//! a salt never come here (see `oscar_cache`): the sockets ask for no key, and events hold tokens.

mod endpoint;
mod journal;
mod pack;
mod publish;
mod zmtp;

pub use endpoint::{Endpoint, EndpointError};
pub use journal::Journal;
pub use pack::Encoding;
pub use publish::{EventPublisher, PublishError};

/// What is published, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventsConfig {
    /// Where readers subscribe.
    pub endpoint: Endpoint,
    /// Where readers ask for batches that they missed.
    pub replay: Option<Endpoint>,
    /// The first frame of every message; readers filter by it.
    pub topic: String,
    pub encoding: Encoding,
    /// Batches that are kept for the replay socket.
    pub buffer_steps: usize,
}

impl EventsConfig {
    /// vLLM's number of kept batches.
    pub const BUFFER_STEPS: usize = 10_000;

    /// Batches that a subscriber may leave unread. Further ones are dropped for it, and it asks for
    /// them on the replay socket.
    pub const HIGH_WATER_MARK: usize = 100_000;

    pub fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            replay: None,
            topic: String::new(),
            encoding: Encoding::Map,
            buffer_steps: Self::BUFFER_STEPS,
        }
    }
}
