//! API keys: who calls, what the caller may do, and how much of it at once.
//!
//! A key belongs to a tenant. Lines of a key file that share a name share the tenant, so a key can
//! be replaced while the old one still works. Users see and stop their own requests; operators also
//! abort others, flush the cache and read the state of the server. Without any key every caller is
//! anonymous and has the rights of an operator.
//!
//! Invariant: a secret never appears in a log line, an error or a `Debug` output.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use constant_time_eq::constant_time_eq;
use oscar_engine::CacheSalt;

use crate::error::ApiError;

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The rights of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    User,
    Operator,
}

/// Most work a tenant may have in flight; absent means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Sequences: prompts times choices.
    pub requests: Option<usize>,
    /// Prompt tokens plus the tokens that may be generated, of all sequences.
    pub tokens: Option<usize>,
}

/// One key.
#[derive(Clone)]
pub struct ApiKey {
    /// The tenant; the secret itself stands for a tenant without a name.
    name: Option<String>,
    role: Role,
    secret: String,
    quota: Quota,
    in_flight: Arc<InFlight>,
}

#[derive(Debug, Default)]
struct InFlight {
    requests: AtomicUsize,
    tokens: AtomicUsize,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey").field("name", &self.name()).field("role", &self.role).finish_non_exhaustive()
    }
}

/// Why a list of keys cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("{place} holds no key: the server would be open to everyone; remove it, or put a key in")]
    Empty { place: String },
    #[error(
        "{place}, line {line}: {problem}; write `KEY` or `user|operator NAME KEY [requests=N] [tokens=N]`"
    )]
    Syntax { place: String, line: usize, problem: &'static str },
}

impl ApiKey {
    pub fn new(name: Option<&str>, role: Role, secret: &str) -> Self {
        Self {
            name: name.map(str::to_owned),
            role,
            secret: secret.to_owned(),
            quota: Quota::default(),
            in_flight: Arc::default(),
        }
    }

    pub fn with_quota(self, quota: Quota) -> Self {
        Self { quota, ..self }
    }

    /// The name for log lines.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or("unnamed")
    }

    /// Reads a key file: one key on each line, `#` begins a comment line. `place` names the file in
    /// errors.
    pub fn parse_file(text: &str, place: &str) -> Result<Vec<Self>, KeyError> {
        let mut keys = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let key = Self::parse_line(line);
            let place = place.to_owned();
            keys.push(key.map_err(|problem| KeyError::Syntax { place, line: index + 1, problem })?);
        }
        match keys.is_empty() {
            true => Err(KeyError::Empty { place: place.to_owned() }),
            false => Ok(keys),
        }
    }

    fn parse_line(line: &str) -> Result<Self, &'static str> {
        let mut quota = Quota::default();
        let mut words: Vec<&str> = line.split_whitespace().collect();
        while let Some(last) = words.last().copied().filter(|_| words.len() > 1) {
            let limit = |text: &str| text.parse().map(Some).map_err(|_| "a limit is no number");
            if let Some(number) = last.strip_prefix("requests=") {
                quota.requests = limit(number)?;
            } else if let Some(number) = last.strip_prefix("tokens=") {
                quota.tokens = limit(number)?;
            } else {
                break;
            }
            words.pop();
        }
        let key = match words.as_slice() {
            [secret] => Self::new(None, Role::User, secret),
            ["user", name, secret] => Self::new(Some(name), Role::User, secret),
            ["operator", name, secret] => Self::new(Some(name), Role::Operator, secret),
            _ => return Err("the line is not understood"),
        };
        Ok(key.with_quota(quota))
    }

    /// Reads the keys of an environment variable, separated by commas.
    pub fn parse_list(list: &str, role: Role, place: &str) -> Result<Vec<Self>, KeyError> {
        let secrets = list.split(',').map(str::trim).filter(|secret| !secret.is_empty());
        let keys: Vec<Self> = secrets.map(|secret| Self::new(None, role, secret)).collect();
        match keys.is_empty() {
            true => Err(KeyError::Empty { place: place.to_owned() }),
            false => Ok(keys),
        }
    }

    /// Identifies the tenant; never shown.
    fn tenant(&self) -> (bool, &str) {
        match &self.name {
            Some(name) => (true, name),
            None => (false, &self.secret),
        }
    }
}

/// The keys in force. Clones share them; [`Keys::replace`] changes them for all.
#[derive(Clone, Default)]
pub struct Keys(Arc<RwLock<Arc<[Arc<ApiKey>]>>>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.list().iter()).finish()
    }
}

impl Keys {
    pub fn new(keys: Vec<ApiKey>) -> Self {
        let all = Self::default();
        all.replace(keys);
        all
    }

    /// Puts other keys into force; requests that run keep counting against their tenant's quota.
    pub fn replace(&self, mut keys: Vec<ApiKey>) {
        let old = self.list();
        for index in 0..keys.len() {
            let (before, rest) = keys.split_at_mut(index);
            let key = &mut rest[0];
            let known = old.iter().map(Arc::as_ref).chain(before.iter());
            if let Some(same) = known.into_iter().find(|other| other.tenant() == key.tenant()) {
                key.in_flight = same.in_flight.clone();
            }
        }
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys.into_iter().map(Arc::new).collect();
    }

    pub fn is_empty(&self) -> bool {
        self.list().is_empty()
    }

    pub fn has_operator(&self) -> bool {
        self.list().iter().any(|key| key.role == Role::Operator)
    }

    fn list(&self) -> Arc<[Arc<ApiKey>]> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Who sends these headers; `None` if a key is needed and none is right.
    pub fn caller(&self, headers: &HeaderMap) -> Option<Caller> {
        let keys = self.list();
        if keys.is_empty() {
            return Some(Caller { key: None });
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
        });
        let plain = headers.get(API_KEY).map(HeaderValue::as_bytes);
        let mut found = None;
        // Every key is compared to its end, so that the time taken does not tell how much of one
        // was right.
        for key in keys.iter() {
            for offer in [bearer, plain].into_iter().flatten() {
                if constant_time_eq(offer, key.secret.as_bytes()) {
                    found = Some(key);
                }
            }
        }
        found.map(|key| Caller { key: Some(key.clone()) })
    }
}

/// The sender of a request.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// None where no key is asked for.
    key: Option<Arc<ApiKey>>,
}

impl Caller {
    pub fn is_operator(&self) -> bool {
        self.key.as_ref().is_none_or(|key| key.role == Role::Operator)
    }

    /// Whether this caller may see and stop requests of `owner`.
    pub fn controls(&self, owner: &Self) -> bool {
        self.is_operator() || self.tenant() == owner.tenant()
    }

    /// The name for log lines.
    pub fn name(&self) -> Option<&str> {
        self.key.as_ref().map(|key| key.name())
    }

    fn tenant(&self) -> Option<(bool, &str)> {
        self.key.as_ref().map(|key| key.tenant())
    }

    /// Names the part of the prefix cache that a request may share: the tenant's own if keys are
    /// isolated, further divided by the salt that the request gave.
    pub fn cache_salt(&self, isolate: bool, given: Option<&str>) -> Option<CacheSalt> {
        let tenant = self.tenant().filter(|_| isolate);
        if tenant.is_none() && given.is_none() {
            return None;
        }
        let (kind, name) = match tenant {
            Some((true, name)) => ("name", name),
            Some((false, secret)) => ("secret", secret),
            None => ("all", ""),
        };
        let given = given.map_or(["", ""], |salt| ["salt", salt]);
        Some(CacheSalt::of(&[kind, name, given[0], given[1]]))
    }

    /// Counts work against the tenant's quota until the result is dropped.
    pub fn admit(&self, requests: usize, tokens: usize, retry_after: u64) -> Result<Admission, ApiError> {
        let Some(key) = &self.key else { return Ok(Admission::default()) };
        let mut admission = Admission { in_flight: key.in_flight.clone(), requests: 0, tokens: 0 };
        let take = |counter: &AtomicUsize, more: usize, limit: Option<usize>, what| {
            let fits =
                |held: usize| held.checked_add(more).filter(|&sum| limit.is_none_or(|limit| sum <= limit));
            counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).map(drop).map_err(|held| {
                match limit.unwrap_or(usize::MAX) {
                    limit if more > limit => ApiError::beyond_quota(what, more, limit),
                    limit => ApiError::Quota { what, held, more, limit, retry_after },
                }
            })
        };
        take(&key.in_flight.requests, requests, key.quota.requests, "requests")?;
        admission.requests = requests;
        take(&key.in_flight.tokens, tokens, key.quota.tokens, "tokens")?;
        admission.tokens = tokens;
        Ok(admission)
    }
}

/// Work that counts against a quota.
#[derive(Debug, Default)]
pub struct Admission {
    in_flight: Arc<InFlight>,
    requests: usize,
    tokens: usize,
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.in_flight.requests.fetch_sub(self.requests, Ordering::AcqRel);
        self.in_flight.tokens.fetch_sub(self.tokens, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(key: &str) -> HeaderMap {
        let value = HeaderValue::from_str(&format!("Bearer {key}")).unwrap();
        HeaderMap::from_iter([(header::AUTHORIZATION, value)])
    }

    #[test]
    fn keys_come_in_two_headers() {
        let keys = Keys::new(ApiKey::parse_list("first, second", Role::User, "list").unwrap());
        let raw = |name: HeaderName, value: &'static str| {
            keys.caller(&HeaderMap::from_iter([(name, HeaderValue::from_static(value))]))
        };
        assert!(raw(header::AUTHORIZATION, "Bearer second").is_some());
        assert!(raw(header::AUTHORIZATION, "bearer first").is_some());
        assert!(raw(API_KEY, "first").is_some());
        for wrong in ["Bearer", "Bearer ", "Bearer firs", "Bearer firstt", "Basic first", "first"] {
            assert!(raw(header::AUTHORIZATION, wrong).is_none(), "{wrong}");
        }
        assert!(keys.caller(&HeaderMap::new()).is_none());
    }

    #[test]
    fn a_key_file_has_names_roles_and_limits() {
        let text = "# comment\nbare==\n\noperator ops o1\nuser ann a1 requests=2 tokens=100\nuser ann a2\n";
        let keys = Keys::new(ApiKey::parse_file(text, "keys").unwrap());
        assert!(keys.has_operator());
        let caller = |key| keys.caller(&bearer(key)).unwrap();
        assert!(caller("o1").is_operator());
        assert!(!caller("bare==").is_operator() && !caller("a1").is_operator());
        assert!(caller("a1").controls(&caller("a2")), "one tenant with two keys");
        assert!(caller("o1").controls(&caller("a1")));
        assert!(!caller("a1").controls(&caller("bare==")) && !caller("a1").controls(&caller("o1")));
        assert!(!format!("{keys:?}").contains("a1"), "{keys:?}");
        for (text, line) in [("user a1", 1), ("x\nroot a b", 2), ("user a b requests=x", 1)] {
            let error = ApiKey::parse_file(text, "f").unwrap_err();
            assert!(matches!(error, KeyError::Syntax { line: found, .. } if found == line), "{error}");
        }
        assert!(matches!(ApiKey::parse_file("# none\n", "f"), Err(KeyError::Empty { .. })));
        assert!(matches!(ApiKey::parse_list(" , ,", Role::User, "X"), Err(KeyError::Empty { .. })));
    }

    #[test]
    fn quotas_count_what_is_in_flight_also_over_a_reload() {
        let text = "user ann a1 requests=2 tokens=100\nuser ann a2 requests=2";
        let keys = Keys::new(ApiKey::parse_file(text, "keys").unwrap());
        let caller = |key| keys.caller(&bearer(key)).unwrap();
        let first = caller("a1").admit(1, 60, 1).unwrap();
        let status = |refused: Result<Admission, ApiError>| refused.unwrap_err().status().as_u16();
        assert_eq!(status(caller("a1").admit(1, 41, 1)), 429, "tokens");
        assert_eq!(status(caller("a1").admit(1, 101, 1)), 400, "more tokens than the quota ever has");
        let second = caller("a2").admit(1, 1, 1).unwrap();
        keys.replace(ApiKey::parse_file(text, "keys").unwrap());
        assert_eq!(status(caller("a1").admit(1, 1, 1)), 429, "requests");
        assert_eq!(status(caller("a1").admit(3, 1, 1)), 400, "more requests than the quota ever has");
        drop((first, second));
        caller("a1").admit(2, 100, 1).unwrap();
    }

    #[test]
    fn salts_separate_tenants_and_requests() {
        let keys = Keys::new(ApiKey::parse_file("user a k1\nuser b k2\nk3", "f").unwrap());
        let salt = |key, isolate, given| keys.caller(&bearer(key)).unwrap().cache_salt(isolate, given);
        assert_eq!(salt("k1", false, None), None);
        assert_eq!(salt("k1", false, Some("x")), salt("k2", false, Some("x")));
        let all = [
            salt("k1", true, None),
            salt("k2", true, None),
            salt("k3", true, None),
            salt("k1", true, Some("x")),
            salt("k1", false, Some("x")),
            salt("k1", false, Some("")),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(one.is_some() && all[..i].iter().all(|other| other != one), "{i}");
        }
    }
}
