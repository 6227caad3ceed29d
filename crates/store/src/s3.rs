//! Pages in a bucket of S3, or of a server that speaks its protocol.
//!
//! A page is an object under its name below the fingerprint, the same bytes as a file of a
//! [`DirectoryStore`](crate::DirectoryStore), and verified like one. A rule of the bucket's life cycle
//! decides how long objects stay. Answers take tens of milliseconds, so many objects are asked for at a
//! time. A server that is slow or gone is left alone for a while, and its pages are misses.

use crate::object::{Loaded, PageName, PageRef, SealedPage};
use crate::shared::Shared;
use crate::{PageStore, kinds_of};
use oscar_cache::{PageHash, PageKind, StoredKinds};
use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use ureq::Agent;

/// How long a connection may take to be made, and an exchange without a state to end.
const CONNECT: Duration = Duration::from_secs(2);
const EXCHANGE: Duration = Duration::from_secs(5);
/// How long a signed address is valid.
const SIGNED_FOR: Duration = Duration::from_secs(300);
/// Exchanges at a time.
const AT_A_TIME: usize = 16;
/// Blocks at each end of a prefix that are always looked up: the sink, the recent window, sliding windows
/// of up to 1024 tokens, and the states at the last ends.
const EDGE: usize = 20;
const DEFAULT_REGION: &str = "us-east-1";

const OK: u16 = 200;
const NO_CONTENT: u16 = 204;
const FORBIDDEN: u16 = 403;
const NOT_FOUND: u16 = 404;
const FULL: u16 = 507;

/// A bucket, the keys for it, and what all names of objects begin with.
#[derive(Clone)]
pub struct S3Address {
    bucket: Bucket,
    credentials: Credentials,
    prefix: String,
}

/// What a [`S3Address`] lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoBucket {
    #[error("write s3://BUCKET or s3://BUCKET/PREFIX")]
    Form,
    #[error("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: other sources of keys are not read")]
    Keys,
    #[error("AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is not the http(s) address of a server: {0}")]
    Endpoint(String),
}

impl S3Address {
    /// Reads `s3://BUCKET[/PREFIX]`. Keys, region and endpoint come from the variables of the AWS tools,
    /// which `variable` looks up.
    ///
    /// # Errors
    /// If the text has another form, there are no keys, or the endpoint is no address.
    pub fn parse(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Self, NoBucket> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let (name, prefix) = {
            let rest = text.strip_prefix("s3://").ok_or(NoBucket::Form)?;
            rest.split_once('/').unwrap_or((rest, ""))
        };
        let is_bucket = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if name.is_empty() || !name.chars().all(is_bucket) {
            return Err(NoBucket::Form);
        }
        let (Some(key), Some(secret)) = (set("AWS_ACCESS_KEY_ID"), set("AWS_SECRET_ACCESS_KEY")) else {
            return Err(NoBucket::Keys);
        };
        let credentials = match set("AWS_SESSION_TOKEN") {
            Some(token) => Credentials::new_with_token(key, secret, token),
            None => Credentials::new(key, secret),
        };
        let region = set("AWS_REGION").or_else(|| set("AWS_DEFAULT_REGION"));
        let region = region.unwrap_or_else(|| DEFAULT_REGION.to_owned());
        // Other servers have no name for each bucket.
        let (endpoint, style) = match set("AWS_ENDPOINT_URL_S3").or_else(|| set("AWS_ENDPOINT_URL")) {
            Some(endpoint) => (endpoint, UrlStyle::Path),
            None => (format!("https://s3.{region}.amazonaws.com"), UrlStyle::VirtualHost),
        };
        let url = endpoint.parse().map_err(|_| NoBucket::Endpoint(endpoint.clone()))?;
        let bucket = Bucket::new(url, style, name.to_owned(), region);
        let bucket = bucket.map_err(|_| NoBucket::Endpoint(endpoint))?;
        let prefix = prefix.trim_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        Ok(Self { bucket, credentials, prefix })
    }
}

/// Without the keys.
impl fmt::Display for S3Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.bucket.base_url(), self.prefix)
    }
}

impl fmt::Debug for S3Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// See the [module](self).
pub struct S3Store {
    address: S3Address,
    shared: Shared,
    agent: Agent,
}

/// A status and a body. Small bodies of errors are not read.
type Answer = (u16, Vec<u8>);

impl S3Store {
    /// Opens a store; a server that cannot be reached now may come later.
    ///
    /// # Errors
    /// If there is no such bucket, or the keys are not accepted.
    pub fn open(address: S3Address, shared: Shared) -> io::Result<Self> {
        let config = Agent::config_builder()
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(EXCHANGE))
            .max_idle_connections_per_host(AT_A_TIME)
            .max_idle_connections(AT_A_TIME)
            .http_status_as_error(false)
            .max_redirects(0)
            .build();
        let store = Self { address, shared, agent: Agent::new_with_config(config) };
        let S3Address { bucket, credentials, .. } = &store.address;
        let url = bucket.head_bucket(Some(credentials)).sign(SIGNED_FOR);
        let answer = store.agent.head(url.as_str()).call().map(|answer| answer.status().as_u16());
        let problem = match answer {
            Ok(OK) => return Ok(store),
            Ok(NOT_FOUND) => "there is no such bucket".to_owned(),
            Ok(FORBIDDEN) => "the keys are not accepted for this bucket (HTTP 403)".to_owned(),
            Ok(status @ 300..500) => format!("HTTP {status}: is AWS_REGION that of the bucket?"),
            Ok(status) => {
                store.shared.fail(&store.address, &format!("HTTP {status}"));
                return Ok(store);
            }
            Err(error) => {
                store.shared.fail(&store.address, &error);
                return Ok(store);
            }
        };
        Err(io::Error::new(ErrorKind::PermissionDenied, format!("{}: {problem}", store.address)))
    }

    /// Does one exchange; `None` if the server cannot be used.
    fn run(&self, exchange: impl FnOnce() -> Result<Answer, ureq::Error>) -> Option<Answer> {
        if self.shared.rests() {
            return None;
        }
        match exchange() {
            Ok((status, _)) if status == 429 || (status >= 500 && status != FULL) => {
                self.shared.fail(&self.address, &format!("HTTP {status}"));
                None
            }
            Ok(answer) => Some(answer),
            Err(error) => {
                self.shared.fail(&self.address, &error);
                None
            }
        }
    }

    fn object(&self, name: &PageName) -> String {
        format!("{}{}/{}", self.address.prefix, self.shared.fingerprint.folder(), name.file_name())
    }

    /// Whether an object is there; `None` if nobody knows.
    fn has(&self, name: &PageName) -> Option<bool> {
        let S3Address { bucket, credentials, .. } = &self.address;
        let url = bucket.head_object(Some(credentials), &self.object(name)).sign(SIGNED_FOR);
        let (status, _) =
            self.run(|| Ok((self.agent.head(url.as_str()).call()?.status().as_u16(), Vec::new())))?;
        match status {
            OK => Some(true),
            NOT_FOUND => Some(false),
            _ => {
                self.shared.refused();
                None
            }
        }
    }

    fn get(&self, page: &PageRef<'_>) -> Option<Loaded> {
        let S3Address { bucket, credentials, .. } = &self.address;
        let object = self.object(&page.name);
        let url = bucket.get_object(Some(credentials), &object).sign(SIGNED_FOR);
        let time = self.shared.time(EXCHANGE, [&page.name]);
        let answer = self.run(|| {
            let get = self.agent.get(url.as_str()).config().timeout_global(Some(time)).build();
            let mut answer = get.call()?;
            let status = answer.status().as_u16();
            let most = self.shared.most_bytes as u64 + 1;
            let bytes = match status {
                OK => answer.body_mut().with_config().limit(most).read_to_vec()?,
                _ => Vec::new(),
            };
            Ok((status, bytes))
        });
        match answer? {
            (OK, bytes) => {
                let loaded = self.shared.verify(page, bytes);
                if loaded.is_none() {
                    let url = bucket.delete_object(Some(credentials), &object).sign(SIGNED_FOR);
                    self.run(|| Ok((self.agent.delete(url.as_str()).call()?.status().as_u16(), Vec::new())));
                }
                loaded
            }
            (NOT_FOUND, _) => None,
            _ => {
                self.shared.refused();
                None
            }
        }
    }

    fn put(&self, page: &SealedPage) -> bool {
        // A part may have grown since; everything else is the same whoever writes it.
        if page.name.kind != PageKind::Part {
            match self.has(&page.name) {
                Some(true) => return true,
                Some(false) => {}
                None => return false,
            }
        }
        let S3Address { bucket, credentials, .. } = &self.address;
        let url = bucket.put_object(Some(credentials), &self.object(&page.name)).sign(SIGNED_FOR);
        let time = self.shared.time(EXCHANGE, [&page.name]);
        let sent = self.run(|| {
            let put = self.agent.put(url.as_str()).config().timeout_global(Some(time)).build();
            let answer = put.send(page.bytes.as_slice())?;
            Ok((answer.status().as_u16(), Vec::new()))
        });
        match sent {
            Some((OK | NO_CONTENT, _)) => self.shared.written(page),
            Some((FULL, _)) => self.shared.full(),
            Some(_) => self.shared.refused(),
            None => false,
        }
    }
}

/// Does the same for every item, several at a time. The results have the order of the items.
fn each<T: Sync, R: Send + Sync>(items: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, results) = (AtomicUsize::new(0), items.iter().map(|_| OnceLock::new()).collect::<Vec<_>>());
    let work = || loop {
        let place = next.fetch_add(1, Ordering::Relaxed);
        let (Some(item), Some(result)) = (items.get(place), results.get(place)) else { return };
        // Every place has one visitor.
        let _ = result.set(run(item));
    };
    std::thread::scope(|scope| {
        (1..items.len().min(AT_A_TIME)).for_each(|_| {
            scope.spawn(work);
        });
        work();
    });
    results.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// Finds how much of a prefix of `blocks` blocks is stored. `look` returns the stored kinds of some
/// blocks, `at_a_time` in one round. A long prefix has thousands of objects, so few of them are looked up.
///
/// Blocks are written in order, so the end of the prefix is found by a search. Blocks between the two
/// edges are assumed to have the kinds of `history`. A page that is missing there is a miss when it is
/// read.
fn search(
    blocks: usize,
    history: StoredKinds,
    at_a_time: usize,
    mut look: impl FnMut(&[usize]) -> Vec<StoredKinds>,
) -> Vec<StoredKinds> {
    let mut found = vec![history; blocks];
    // The end is at least `low` and at most `high`.
    let (mut low, mut high) = (0, blocks);
    let mut probes = vec![0];
    while low < high {
        let kinds = look(&probes);
        for (&block, kinds) in probes.iter().zip(kinds) {
            if kinds.is_empty() {
                high = block;
                break;
            }
            found[block] = kinds;
            low = block + 1;
        }
        let (span, parts) = (high - low, at_a_time.max(1) + 1);
        probes = (1..parts).map(|part| low + span * part / parts).collect();
        if span < parts {
            probes = (low..high).collect();
        }
    }
    found.truncate(low);
    let edges: Vec<usize> = (0..low).filter(|block| *block < EDGE || low - *block <= EDGE).collect();
    let kinds = look(&edges);
    edges.into_iter().zip(kinds).for_each(|(block, kinds)| found[block] = kinds);
    let end = found.iter().position(StoredKinds::is_empty).unwrap_or(low);
    found.truncate(end);
    found
}

impl PageStore for S3Store {
    fn exists_prefix(&self, pages: &[PageHash], kinds: &[PageKind]) -> Vec<StoredKinds> {
        let mut history = StoredKinds::default();
        history.insert(if kinds.contains(&PageKind::Coded) { PageKind::Coded } else { PageKind::Full });
        search(pages.len(), history, AT_A_TIME / kinds.len().max(1), |blocks| {
            let name = |block: usize, kind| PageName { hash: pages[block], block: block as u32, kind };
            let names: Vec<PageName> =
                blocks.iter().flat_map(|&block| kinds.iter().map(move |&kind| name(block, kind))).collect();
            let there = each(&names, |name| self.has(name) == Some(true));
            there.chunks(kinds.len().max(1)).map(|there| kinds_of(kinds, there)).collect()
        })
    }

    fn get_many(&self, pages: &[PageRef<'_>]) -> Vec<Option<Loaded>> {
        each(pages, |page| self.get(page))
    }

    fn put_many(&self, pages: &[SealedPage]) -> Vec<bool> {
        each(pages, |page| self.put(page))
    }

    /// Objects have no time of use. A server that does not answer has lost nothing yet.
    fn touch_many(&self, pages: &[PageName]) -> Vec<bool> {
        each(pages, |name| self.has(name) != Some(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, variables: &[(&str, &str)]) -> Result<S3Address, NoBucket> {
        let find = |name: &str| variables.iter().find(|(held, _)| *held == name);
        S3Address::parse(text, |name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "me"), ("AWS_SECRET_ACCESS_KEY", "s3cret")];

    #[test]
    fn buckets_are_read_and_keys_are_not_shown() {
        let address = read("s3://pages/a/b/", &KEYS).unwrap();
        let shown = format!("{address} {address:?}");
        assert_eq!(shown, ["https://pages.s3.us-east-1.amazonaws.com/a/b/"; 2].join(" "));
        let [key, secret] = KEYS;
        let with = |more: &[(&str, &str)], text: &str| read(text, &[&[key, secret], more].concat());
        let german = with(&[("AWS_DEFAULT_REGION", "eu-central-1")], "s3://pages").unwrap();
        assert_eq!(german.to_string(), "https://pages.s3.eu-central-1.amazonaws.com/");
        let local = [("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"), ("AWS_REGION", "")];
        assert_eq!(with(&local, "s3://pages").unwrap().to_string(), "http://127.0.0.1:9000/pages/");
        let wrong = with(&[("AWS_ENDPOINT_URL", "nowhere")], "s3://pages");
        assert_eq!(wrong.unwrap_err(), NoBucket::Endpoint("nowhere".into()));
        for bad in ["", "pages", "s3://", "s3:///a", "s3://a b", "https://pages"] {
            assert_eq!(read(bad, &KEYS).unwrap_err(), NoBucket::Form, "{bad}");
        }
        assert_eq!(read("s3://pages", &KEYS[..1]).unwrap_err(), NoBucket::Keys);
    }

    const HISTORY: StoredKinds =
        StoredKinds { full: false, coded: true, part: false, sliding: false, state: false };

    /// A stored prefix: full pages in the first block and the last five, quantized pages in all, a state
    /// at the end.
    fn stored(end: usize, block: usize) -> StoredKinds {
        let (coded, full) = (block < end, block < end && (block == 0 || block + 5 >= end));
        StoredKinds { full, coded, state: block + 1 == end, ..StoredKinds::default() }
    }

    #[test]
    fn a_search_finds_what_asking_for_every_block_would() {
        for blocks in [0, 1, 2, 5, 6, 7, 16, 33, 100, 1563] {
            for end in (0..=blocks).filter(|end| *end < 40 || end % 97 == 0 || *end + 3 > blocks) {
                let (mut rounds, mut asked) = (0, 0);
                let found = search(blocks, HISTORY, AT_A_TIME / PageKind::ALL.len(), |some| {
                    (rounds, asked) = (rounds + 1, asked + some.len());
                    some.iter().map(|&block| stored(end, block)).collect()
                });
                let all: Vec<StoredKinds> = (0..end).map(|block| stored(end, block)).collect();
                assert_eq!(found, all, "{end} of {blocks}");
                assert!(rounds <= 8 && asked <= 2 * EDGE + 40, "{end} of {blocks}: {rounds}, {asked}");
            }
        }
        // A hole in the middle is found when its page is read; one at an edge, before.
        let found = search(200, HISTORY, 4, |some| {
            some.iter()
                .map(|&block| if block == 3 { StoredKinds::default() } else { stored(200, block) })
                .collect()
        });
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn results_have_the_order_of_their_items() {
        for count in [0, 1, 5, 100] {
            let items: Vec<usize> = (0..count).collect();
            assert_eq!(each(&items, |item| item * 2), items.iter().map(|item| item * 2).collect::<Vec<_>>());
        }
    }
}
