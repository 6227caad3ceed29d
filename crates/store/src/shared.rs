//! What stores behind a network have in common: any number of machines use them, and one that fails is
//! left alone for a while.

use crate::counters::{Counters, add};
use crate::fingerprint::Fingerprint;
use crate::lock;
use crate::object::{HEADER_BYTES, Loaded, PageName, PageRef, SealedPage};
use crate::redis::RedisAddress;
#[cfg(feature = "s3")]
use crate::s3::S3Address;
use oscar_cache::PageKind;
use std::fmt::Display;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a server that failed is left alone.
const REST: Duration = Duration::from_secs(10);
/// Bytes of recurrent states that a server must carry in a second.
const STATE_RATE: usize = 16 << 20;

/// Where machines share pages.
#[derive(Clone, Debug)]
pub enum SharedAddress {
    Redis(RedisAddress),
    #[cfg(feature = "s3")]
    S3(S3Address),
}

/// The part of a store that does not depend on how its server is spoken to.
pub struct Shared {
    pub(crate) fingerprint: Fingerprint,
    /// Most bytes of a page.
    pub(crate) most_bytes: usize,
    counters: Arc<Counters>,
    rests_until: Mutex<Option<Instant>>,
}

impl Shared {
    /// No page has a larger payload than `most_page_bytes`.
    pub fn new(fingerprint: Fingerprint, most_page_bytes: usize, counters: Arc<Counters>) -> Self {
        let most_bytes = most_page_bytes.saturating_add(HEADER_BYTES);
        Self { fingerprint, most_bytes, counters, rests_until: Mutex::default() }
    }

    /// How long an exchange may take that is given `usual` for pages and carries some of these. A
    /// recurrent state is as large as many pages, and the largest of them.
    pub(crate) fn time<'a>(
        &self,
        usual: Duration,
        pages: impl IntoIterator<Item = &'a PageName>,
    ) -> Duration {
        let states = pages.into_iter().filter(|name| name.kind == PageKind::State).count();
        usual + Duration::from_secs_f64(states as f64 * self.most_bytes as f64 / STATE_RATE as f64)
    }

    /// Whether the server is left alone now.
    pub(crate) fn rests(&self) -> bool {
        lock(&self.rests_until).is_some_and(|until| Instant::now() < until)
    }

    /// Leaves a server alone that did not answer as it should.
    pub(crate) fn fail(&self, server: &dyn Display, error: &dyn Display) {
        tracing::warn!(%server, %error, "the shared page store cannot be used for a while");
        add(&self.counters.shared_errors, 1);
        *lock(&self.rests_until) = Some(Instant::now() + REST);
    }

    /// The page in these bytes, unless they are something else.
    pub(crate) fn verify(&self, page: &PageRef<'_>, bytes: Vec<u8>) -> Option<Loaded> {
        let length = bytes.len();
        match Loaded::verify(Arc::new(bytes), &self.fingerprint, page) {
            Ok(loaded) => {
                add(&self.counters.shared_hits, 1);
                add(&self.counters.shared_read_bytes, length);
                Some(loaded)
            }
            Err(defect) => {
                self.counters.note(defect);
                None
            }
        }
    }

    /// Counts a page that was written; `true`.
    pub(crate) fn written(&self, page: &SealedPage) -> bool {
        add(&self.counters.shared_written_pages, 1);
        add(&self.counters.shared_written_bytes, page.bytes.len());
        true
    }

    /// Counts a page for which the server had no room; `false`.
    pub(crate) fn full(&self) -> bool {
        add(&self.counters.shared_full, 1);
        false
    }

    /// Counts an answer that is none; `false`.
    pub(crate) fn refused(&self) -> bool {
        add(&self.counters.shared_errors, 1);
        false
    }
}
