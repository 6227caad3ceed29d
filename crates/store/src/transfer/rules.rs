//! Which machines pages may be fetched from. A ticket arrives in a request, so the address in it is
//! the client's word: only what the operator named is connected to.

use super::desk::TicketId;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// One machine or one network, and its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRule {
    host: Host,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    /// A name or an address, compared as it is written.
    Named(String),
    /// All addresses with the same first bits.
    Network(IpAddr, u8),
}

/// The text of a rule is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' names no peer: write HOST:PORT, or a network as 10.0.0.0/8:PORT")]
pub struct NoPeer(String);

impl FromStr for PeerRule {
    type Err = NoPeer;

    fn from_str(text: &str) -> Result<Self, NoPeer> {
        let parse = || {
            let (host, port) = text.rsplit_once(':')?;
            let port = port.parse().ok().filter(|port| *port > 0)?;
            let (host, bits) = match host.rsplit_once('/') {
                Some((host, bits)) => (host, Some(bits.parse::<u8>().ok()?)),
                None => (host, None),
            };
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            let address = bare.parse::<IpAddr>().ok();
            let host = match (address, bits) {
                (Some(address), Some(bits)) => {
                    let most = if address.is_ipv4() { 32 } else { 128 };
                    Host::Network(address, Some(bits).filter(|bits| *bits <= most)?)
                }
                (Some(address), None) => Host::Named(address.to_string()),
                (None, None) if is_name(bare) => Host::Named(bare.to_ascii_lowercase()),
                (None, _) => return None,
            };
            Some(Self { host, port })
        };
        parse().ok_or_else(|| NoPeer(text.to_owned()))
    }
}

fn is_name(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    !text.is_empty() && text.bytes().all(is_part)
}

impl fmt::Display for PeerRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Named(host) if host.contains(':') => write!(f, "[{host}]:{}", self.port),
            Host::Named(host) => write!(f, "{host}:{}", self.port),
            Host::Network(address, bits) => write!(f, "{address}/{bits}:{}", self.port),
        }
    }
}

impl PeerRule {
    fn allows(&self, host: &str, port: u16) -> bool {
        let is_inside = match &self.host {
            Host::Named(named) => named == host,
            // A name could resolve to anything.
            Host::Network(network, bits) => {
                host.parse::<IpAddr>().is_ok_and(|address| same_bits(*network, address, *bits))
            }
        };
        port == self.port && is_inside
    }
}

fn same_bits(a: IpAddr, b: IpAddr, bits: u8) -> bool {
    let bits = u32::from(bits);
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            (a.to_bits() ^ b.to_bits()).checked_shr(32 - bits).unwrap_or(0) == 0
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            (a.to_bits() ^ b.to_bits()).checked_shr(128 - bits).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// Every machine that pages may be fetched from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerRules(pub Vec<PeerRule>);

/// Pages of a prompt on a machine that the operator allowed: there is no other way to make one than
/// [`PeerRules::ticket`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTicket {
    host: String,
    port: u16,
    id: TicketId,
}

impl PeerTicket {
    /// The machine, as the operator or the ticket wrote it.
    pub fn address(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    pub(super) fn id(&self) -> TicketId {
        self.id
    }
}

impl PeerRules {
    /// A ticket of that machine; `None` if pages may not be fetched from there.
    pub fn ticket(&self, host: &str, port: u16, id: TicketId) -> Option<PeerTicket> {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let host = bare.parse::<IpAddr>().map_or_else(|_| bare.to_ascii_lowercase(), |ip| ip.to_string());
        self.0.iter().any(|rule| rule.allows(&host, port)).then_some(PeerTicket { host, port, id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_named_is_allowed() {
        let allowed = |rule: &str, host: &str, port: u16| {
            let rules = PeerRules(vec![rule.parse().unwrap()]);
            rules.ticket(host, port, TicketId([0; 16])).is_some()
        };
        assert!(allowed("127.0.0.1:9", "127.0.0.1", 9));
        assert!(allowed("Prefill-0.pods:9", "prefill-0.pods", 9));
        assert!(allowed("[::1]:9", "[::1]", 9) && allowed("[::1]:9", "::1", 9));
        assert!(allowed("[::1]:9", "0:0:0:0:0:0:0:1", 9), "the same address in other words");
        assert!(allowed("10.1.0.0/16:9", "10.1.255.3", 9) && allowed("0.0.0.0/0:9", "8.8.8.8", 9));
        assert!(allowed("[fd00::]/8:9", "fd12::1", 9) && allowed("10.1.2.3/32:9", "10.1.2.3", 9));
        for (rule, host, port) in [
            ("127.0.0.1:9", "127.0.0.1", 10),
            ("127.0.0.1:9", "127.0.0.2", 9),
            ("127.0.0.1:9", "localhost", 9),
            ("127.0.0.1:9", "127.0.0.1.evil.example", 9),
            ("prefill:9", "prefill.evil.example", 9),
            ("10.1.0.0/16:9", "10.2.0.1", 9),
            ("10.1.0.0/16:9", "10.1.0.1.evil.example", 9),
            ("10.1.2.3/32:9", "10.1.2.2", 9),
            ("10.0.0.0/8:9", "::ffff:10.0.0.1", 9),
            ("10.0.0.0/8:9", "0x0a000001", 9),
        ] {
            assert!(!allowed(rule, host, port), "{rule} allows {host}:{port}");
        }
        assert!(PeerRules::default().ticket("127.0.0.1", 9, TicketId([0; 16])).is_none());
    }

    #[test]
    fn rules_are_read_as_they_are_written() {
        for text in ["127.0.0.1:9", "prefill:9", "10.0.0.0/8:9", "[::1]:9", "fd00::/8:9"] {
            assert_eq!(text.parse::<PeerRule>().unwrap().to_string(), text);
        }
        for bad in ["", "host", ":9", "host:", "host:0", "host:99999", "10.0.0.0/33:9", "host/8:9", "a b:9"] {
            assert!(bad.parse::<PeerRule>().is_err(), "{bad}");
        }
    }
}
