//! Prompts that one machine computes and another continues: the flags of both.

use crate::options::{parse_size, serialize_optional_size};
use crate::progress::note;
use anyhow::{Context, Result, bail};
use oscar_server::{DeskAddress, TransferConfig};
use oscar_store::{DeskOptions, Fingerprint, PeerRule, PeerRules, TransferDesk, serve_desk};
use serde::{Serialize, Serializer};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are kept for other machines if nothing else is said.
const MEMORY: usize = 1 << 30;

/// Whether this server computes prompts for others, or continues prompts of others.
#[derive(clap::Args, Clone, Serialize)]
pub struct TransferArgs {
    /// Compute prompts for other machines: keep copies of the pages of requests with
    /// `kv_transfer_params.do_remote_decode` and hand them out on this address, e.g. `10.0.0.5:14579`
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub kv_transfer_listen: Option<String>,
    /// Name or address, and port, that tickets give to other machines, if it is not the address above
    #[arg(long, value_name = "HOST[:PORT]", requires = "kv_transfer_listen")]
    pub kv_transfer_announce: Option<String>,
    /// Host memory for pages that wait for other machines; 1G if absent
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "kv_transfer_listen")]
    #[serde(serialize_with = "serialize_optional_size")]
    pub kv_transfer_memory: Option<usize>,
    /// Seconds after which pages that no other machine fetched are dropped
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub kv_transfer_timeout: u64,
    /// Continue prompts of this machine (HOST:PORT) or network (10.0.0.0/8:PORT): pages are fetched from
    /// there if a request has its ticket, and from nowhere else
    #[arg(long, value_name = "PEER")]
    #[serde(serialize_with = "serialize_rules")]
    pub kv_transfer_peer: Vec<PeerRule>,
}

/// No transfers.
impl Default for TransferArgs {
    fn default() -> Self {
        Self {
            kv_transfer_listen: None,
            kv_transfer_announce: None,
            kv_transfer_memory: None,
            kv_transfer_timeout: 120,
            kv_transfer_peer: Vec::new(),
        }
    }
}

fn serialize_rules<S: Serializer>(rules: &[PeerRule], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(rules.iter().map(ToString::to_string))
}

impl TransferArgs {
    pub fn is_used(&self) -> bool {
        self.kv_transfer_listen.is_some() || self.fetches()
    }

    /// Whether pages are fetched from other machines.
    pub fn fetches(&self) -> bool {
        !self.kv_transfer_peer.is_empty()
    }

    /// The desk for pages that others fetch, if they are to.
    pub fn desk(&self, fingerprint: Fingerprint) -> Option<Arc<TransferDesk>> {
        self.kv_transfer_listen.as_ref()?;
        let bytes = self.kv_transfer_memory.unwrap_or(MEMORY);
        let options = DeskOptions { bytes, time: Duration::from_secs(self.kv_transfer_timeout) };
        Some(Arc::new(TransferDesk::new(fingerprint, options)))
    }

    /// Binds the port for pages, if others are to fetch some, and finds what tickets say.
    pub fn open(&self) -> Result<(Option<TcpListener>, TransferConfig)> {
        let peers = PeerRules(self.kv_transfer_peer.clone());
        let Some(asked) = &self.kv_transfer_listen else {
            return Ok((None, TransferConfig { desk: None, peers }));
        };
        let listener = TcpListener::bind(asked.as_str())
            .with_context(|| format!("--kv-transfer-listen {asked}: write ADDRESS:PORT with a free port"))?;
        let bound = listener.local_addr()?;
        let desk = match self.kv_transfer_announce.as_deref() {
            Some(text) => {
                let (host, port) = match text.rsplit_once(':') {
                    // An IPv6 address without a port.
                    Some((host, _)) if host.contains(':') && !host.ends_with(']') => (text, None),
                    Some((host, port)) => (host, Some(port)),
                    None => (text, None),
                };
                let port = port.map_or(Ok(bound.port()), str::parse);
                let port = port.with_context(|| format!("--kv-transfer-announce {text}: the port"))?;
                DeskAddress { host: host.trim_matches(['[', ']']).to_owned(), port }
            }
            None if bound.ip().is_unspecified() => bail!(
                "--kv-transfer-listen {asked} is no address that others can connect to: say which one with \
                 --kv-transfer-announce HOST"
            ),
            None => DeskAddress { host: bound.ip().to_string(), port: bound.port() },
        };
        Ok((Some(listener), TransferConfig { desk: Some(desk), peers }))
    }
}

/// Hands out pages from now on.
pub fn serve(desk: Arc<TransferDesk>, listener: TcpListener, address: &DeskAddress) -> Result<()> {
    let open = !listener.local_addr()?.ip().is_loopback();
    serve_desk(desk, listener).context("the thread for page transfers could not start")?;
    note!("pages for other machines: {}:{}", address.host, address.port);
    if open {
        note!("  whoever reaches that port and knows a ticket reads the tokens of its prompt");
    }
    Ok(())
}
