//! Addresses in ZeroMQ's spelling.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// A TCP address of this machine to listen on: `tcp://*:5557`, `tcp://127.0.0.1:5557`. Port 0 picks a
/// free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint(pub SocketAddr);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no address to publish on: {problem}; write tcp://HOST:PORT, e.g. tcp://*:5557")]
pub struct EndpointError {
    text: String,
    problem: &'static str,
}

impl Endpoint {
    pub fn port(&self) -> u16 {
        self.0.port()
    }

    /// The host as routers read it: `*` for all addresses of this machine.
    pub fn host(&self) -> String {
        match self.0.ip() {
            ip if ip.is_unspecified() => "*".to_owned(),
            IpAddr::V6(ip) => format!("[{ip}]"),
            IpAddr::V4(ip) => ip.to_string(),
        }
    }

    /// Whether only this machine can connect.
    pub fn is_loopback(&self) -> bool {
        self.0.ip().is_loopback()
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}:{}", self.host(), self.port())
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = |problem| EndpointError { text: text.to_owned(), problem };
        let rest = text.strip_prefix("tcp://").ok_or_else(|| wrong("only tcp:// is supported"))?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
        let port = port.parse().map_err(|_| wrong("the port is no number up to 65535"))?;
        let ip = match host.trim_start_matches('[').trim_end_matches(']') {
            "*" => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            "::" => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            // vLLM connects to such an endpoint. We only listen.
            host => host.parse().map_err(|_| wrong("the host must be * or an IP address of this machine"))?,
        };
        Ok(Self(SocketAddr::new(ip, port)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_as_zeromq_has_them() {
        for (text, shown) in [
            ("tcp://*:5557", "tcp://*:5557"),
            ("tcp://0.0.0.0:5557", "tcp://*:5557"),
            ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
            ("tcp://localhost:1", "tcp://127.0.0.1:1"),
            ("tcp://[::1]:9", "tcp://[::1]:9"),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), shown);
        }
        for (text, why) in [
            ("ipc:///tmp/x", "only tcp"),
            ("tcp://*", "no port"),
            ("tcp://*:70000", "no number"),
            ("tcp://router.example:5557", "IP address"),
        ] {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(text), "{error}");
        }
    }
}
