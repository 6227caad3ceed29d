//! Pages in a Valkey or Redis server that any number of machines share.
//!
//! A page is a string under its name below the fingerprint, the same bytes as a file of a
//! [`DirectoryStore`](crate::DirectoryStore), and verified like one. The server decides what it gives up:
//! `maxmemory` with `allkeys-lru`. A server that is slow or gone is left alone for a while, and its pages
//! are misses.

use crate::deadline::{connect, is_late};
use crate::object::{Loaded, PageName, PageRef, SealedPage};
use crate::resp::{Reply, command, exchange};
use crate::shared::Shared;
use crate::{PageStore, kinds_of, lock};
use oscar_cache::{PageHash, PageKind, StoredKinds};
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::str::FromStr;
use std::sync::Mutex;
use std::time::Duration;

/// How long a connection may take to be made, and an exchange without states to end.
const CONNECT: Duration = Duration::from_secs(1);
const EXCHANGE: Duration = Duration::from_secs(2);
/// Connections that are kept open between two uses.
const IDLE_CONNECTIONS: usize = 4;
const DEFAULT_PORT: u16 = 6379;

/// Where a server is: `redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]`.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisAddress {
    host: String,
    port: u16,
    user: String,
    password: String,
    database: u32,
}

/// The text is no address of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAddress {
    #[error("write redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]")]
    Form,
    #[error("rediss:// (TLS) is not supported: use redis:// on a trusted network, or a TLS proxy")]
    Tls,
}

impl FromStr for RedisAddress {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        if text.starts_with("rediss://") || text.starts_with("valkeys://") {
            return Err(NoAddress::Tls);
        }
        let rest = text.strip_prefix("redis://").or(text.strip_prefix("valkey://")).ok_or(NoAddress::Form)?;
        let (login, rest) = rest.rsplit_once('@').unwrap_or(("", rest));
        let (user, password) = login.split_once(':').unwrap_or(("", login));
        let (place, database) = rest.split_once('/').unwrap_or((rest, ""));
        let database = if database.is_empty() { Ok(0) } else { database.parse() };
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, port.parse().ok()),
            _ => (place, Some(DEFAULT_PORT)),
        };
        let host = host.trim_matches(['[', ']']).to_owned();
        match (host.is_empty(), port, database) {
            (false, Some(port), Ok(database)) => {
                Ok(Self { host, port, user: user.to_owned(), password: password.to_owned(), database })
            }
            _ => Err(NoAddress::Form),
        }
    }
}

/// Without the password.
impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "redis://{}:{}/{}", self.host, self.port, self.database)
    }
}

impl fmt::Debug for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// See the [module](self).
pub struct RedisStore {
    address: RedisAddress,
    shared: Shared,
    /// Seconds after which a page that nobody used is gone, as text.
    age: Option<String>,
    idle: Mutex<Vec<TcpStream>>,
}

impl RedisStore {
    /// Opens a store; a server that cannot be reached now may come later.
    ///
    /// # Errors
    /// If the server refuses the password or the database.
    pub fn open(address: RedisAddress, age: Option<Duration>, shared: Shared) -> io::Result<Self> {
        let age = age.map(|age| age.as_secs().max(1).to_string());
        let store = Self { address, shared, age, idle: Mutex::default() };
        match store.connect() {
            Ok(stream) => lock(&store.idle).push(stream),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
            Err(error) => store.fail(&error),
        }
        Ok(store)
    }

    /// A connection that is logged in.
    fn connect(&self) -> io::Result<TcpStream> {
        let RedisAddress { host, port, user, password, database } = &self.address;
        let stream = connect(host, *port, CONNECT)?;
        let (mut commands, mut count) = (Vec::new(), 1);
        match (user.as_bytes(), password.as_bytes()) {
            (_, b"") => count = 0,
            (b"", password) => command(&mut commands, &[b"AUTH", password]),
            (user, password) => command(&mut commands, &[b"AUTH", user, password]),
        }
        command(&mut commands, &[b"SELECT", database.to_string().as_bytes()]);
        let replies = exchange(&stream, &commands, count + 1, 0, EXCHANGE)?;
        let refused = replies.into_iter().find_map(|reply| match reply {
            Reply::Refused(problem) => Some(problem),
            _ => None,
        });
        match refused {
            Some(problem) => Err(io::Error::new(ErrorKind::PermissionDenied, problem)),
            None => Ok(stream),
        }
    }

    fn fail(&self, error: &io::Error) {
        self.shared.fail(&self.address, error);
        lock(&self.idle).clear();
    }

    /// Sends commands and reads their replies within a time; `None` if the server cannot be used.
    fn run(&self, commands: &[u8], count: usize, time: Duration) -> Option<Vec<Reply>> {
        if count == 0 {
            return Some(Vec::new());
        }
        if self.shared.rests() {
            return None;
        }
        let run = |stream: TcpStream| -> io::Result<Vec<Reply>> {
            let replies = exchange(&stream, commands, count, self.shared.most_bytes, time)?;
            let mut idle = lock(&self.idle);
            if idle.len() < IDLE_CONNECTIONS {
                idle.push(stream);
            }
            Ok(replies)
        };
        let held = lock(&self.idle).pop();
        let outcome = match held.map(run) {
            // A server that was started anew has closed the connections of its first life.
            Some(Err(error)) if !is_late(&error) => self.connect().and_then(run),
            Some(outcome) => outcome,
            None => self.connect().and_then(run),
        };
        outcome.inspect_err(|error| self.fail(error)).ok()
    }

    fn key(&self, name: &PageName) -> Vec<u8> {
        format!("oscar:{}:{}", self.shared.fingerprint.folder(), name.file_name()).into_bytes()
    }

    /// Runs one command for each page, within a time.
    fn each(
        &self,
        names: &[PageName],
        time: Duration,
        parts: impl Fn(&mut Vec<u8>, &[u8]),
    ) -> Option<Vec<Reply>> {
        let (mut commands, mut count) = (Vec::new(), 0);
        for name in names {
            parts(&mut commands, &self.key(name));
            count += 1;
        }
        self.run(&commands, count, time)
    }

    fn load(&self, page: &PageRef<'_>, bytes: Vec<u8>) -> Option<Loaded> {
        let loaded = self.shared.verify(page, bytes);
        if loaded.is_none() {
            self.each(&[page.name], EXCHANGE, |to, key| command(to, &[b"DEL", key]));
        }
        loaded
    }

    fn put(&self, page: &SealedPage) -> bool {
        let key = self.key(&page.name);
        let mut commands = Vec::with_capacity(page.bytes.len() + 256);
        // A part may have grown since; everything else is the same whoever writes it.
        if page.name.kind != PageKind::Part {
            command(&mut commands, &[b"EXISTS", &key]);
            match self.run(&commands, 1, EXCHANGE).as_deref() {
                Some([Reply::Number(1)]) => return true,
                Some(_) => commands.clear(),
                None => return false,
            }
        }
        match &self.age {
            Some(age) => command(&mut commands, &[b"SET", &key, &page.bytes, b"EX", age.as_bytes()]),
            None => command(&mut commands, &[b"SET", &key, &page.bytes]),
        }
        match self.run(&commands, 1, self.shared.time(EXCHANGE, [&page.name])).as_deref() {
            Some([Reply::Done]) => self.shared.written(page),
            Some([Reply::Refused(problem)]) if problem.starts_with("OOM") => self.shared.full(),
            Some(_) => self.shared.refused(),
            None => false,
        }
    }
}

impl PageStore for RedisStore {
    fn exists_prefix(&self, pages: &[PageHash], kinds: &[PageKind]) -> Vec<StoredKinds> {
        let names = |(block, &hash): (usize, &PageHash)| {
            kinds.iter().map(move |&kind| PageName { hash, block: block as u32, kind })
        };
        let names: Vec<PageName> = pages.iter().enumerate().flat_map(names).collect();
        let replies =
            self.each(&names, EXCHANGE, |to, key| command(to, &[b"EXISTS", key])).unwrap_or_default();
        let there: Vec<bool> = replies.iter().map(|reply| *reply == Reply::Number(1)).collect();
        let stored = there.chunks(kinds.len().max(1)).map(|there| kinds_of(kinds, there));
        stored.take_while(|stored| !stored.is_empty()).collect()
    }

    fn get_many(&self, pages: &[PageRef<'_>]) -> Vec<Option<Loaded>> {
        let names: Vec<PageName> = pages.iter().map(|page| page.name).collect();
        let time = self.shared.time(EXCHANGE, &names);
        let replies = self.each(&names, time, |to, key| command(to, &[b"GET", key])).unwrap_or_default();
        let load = |(page, reply): (&PageRef<'_>, Option<Reply>)| match reply {
            Some(Reply::Value(Some(bytes))) => self.load(page, bytes),
            Some(Reply::Value(None)) | None => None,
            Some(_) => {
                self.shared.refused();
                None
            }
        };
        pages.iter().zip(replies.into_iter().map(Some).chain(std::iter::repeat(None))).map(load).collect()
    }

    fn put_many(&self, pages: &[SealedPage]) -> Vec<bool> {
        pages.iter().map(|page| self.put(page)).collect()
    }

    fn touch_many(&self, pages: &[PageName]) -> Vec<bool> {
        let replies = self.each(pages, EXCHANGE, |to, key| match &self.age {
            Some(age) => command(to, &[b"EXPIRE", key, age.as_bytes()]),
            None => command(to, &[b"TOUCH", key]),
        });
        // A server that does not answer has lost nothing yet.
        let Some(there) = replies else { return vec![true; pages.len()] };
        (0..pages.len()).map(|place| there.get(place) == Some(&Reply::Number(1))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_passwords_are_not_shown() {
        let read = |text: &str| text.parse::<RedisAddress>();
        let full = read("redis://me:s3cret@cache.local:7000/3").unwrap();
        assert_eq!((full.host.as_str(), full.port, full.database), ("cache.local", 7000, 3));
        assert_eq!((full.user.as_str(), full.password.as_str()), ("me", "s3cret"));
        assert_eq!(format!("{full} {full:?}"), "redis://cache.local:7000/3 redis://cache.local:7000/3");
        assert_eq!(read("redis://:p@ss@h").unwrap().password, "p@ss");
        assert_eq!(read("valkey://[::1]:7").unwrap().host, "::1");
        assert_eq!(read("redis://h").unwrap().port, DEFAULT_PORT);
        assert_eq!(read("rediss://h"), Err(NoAddress::Tls));
        for bad in ["", "h", "redis://", "redis://h:x", "redis://h/x", "http://h", "redis://:7"] {
            assert_eq!(read(bad), Err(NoAddress::Form), "{bad}");
        }
    }
}
