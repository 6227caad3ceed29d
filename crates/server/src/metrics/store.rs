//! The numbers of the page store and of transfers between machines, where there are any.

use std::fmt;

use oscar_engine::EngineStats;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{encode_counters, encode_family, encode_gauges};

/// Values by tier.
type Tiers<'a> = &'a [(&'a str, u64)];

pub fn encode(stats: &EngineStats, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
    if stats.store.is_some() || stats.fetched_from_peers.is_some() {
        encode_hits(stats, encoder)?;
    }
    encode_transfers(stats, encoder)?;
    encode_store(stats, encoder)
}

fn encode_hits(stats: &EngineStats, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
    let EngineStats {
        cached_ram_tokens, cached_disk_tokens, cached_shared_tokens, cached_peer_tokens, ..
    } = *stats;
    let restored = cached_ram_tokens + cached_disk_tokens + cached_shared_tokens + cached_peer_tokens;
    let help = "Prompt tokens found in the prefix tree, brought back from the page store or fetched";
    let values = [
        ("tree", stats.cached_tokens.saturating_sub(restored)),
        ("ram", cached_ram_tokens),
        ("disk", cached_disk_tokens),
        ("shared", cached_shared_tokens),
        ("peer", cached_peer_tokens),
    ];
    encode_tiers(encoder, "prefix_cache_hits_by_tier", help, &values)
}

/// A counter for each tier.
fn encode_tiers(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: Tiers<'_>,
) -> Result<(), fmt::Error> {
    let counter = |&(tier, value): &_| ([("tier", tier)], ConstCounter::new(value));
    encode_family(encoder, name, help, values.iter().map(counter))
}

fn encode_transfers(stats: &EngineStats, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
    let (mut counters, mut gauges) = (Vec::new(), Vec::new());
    if let Some(kept) = &stats.kept_for_peers {
        counters.extend([
            ("kv_transfer_tickets", "Prompts whose pages were kept for another machine", kept.tickets),
            ("kv_transfer_tickets_refused", "Prompts whose pages had no room", kept.tickets_refused),
            ("kv_transfer_tickets_expired", "Tickets that nobody released in time", kept.tickets_expired),
            ("kv_transfer_sent_pages", "Pages sent to other machines", kept.sent_pages),
            ("kv_transfer_sent_bytes", "Bytes of pages sent to other machines", kept.sent_bytes),
            (
                "kv_transfer_unknown_tickets",
                "Questions about tickets that are not there",
                kept.unknown_tickets,
            ),
            (
                "kv_transfer_other_fingerprints",
                "Questions of other models' machines",
                kept.other_fingerprints,
            ),
            (
                "kv_transfer_bad_connections",
                "Connections closed: too many, or nonsense",
                kept.bad_connections,
            ),
        ]);
        gauges.extend([
            ("kv_transfer_tickets_held", "Tickets whose pages are kept", kept.tickets_held),
            ("kv_transfer_held_bytes", "Bytes of pages kept for other machines", kept.held_bytes),
        ]);
    }
    if let Some(fetched) = &stats.fetched_from_peers {
        counters.extend([
            ("kv_transfer_fetched_pages", "Pages fetched from other machines", fetched.fetched_pages),
            (
                "kv_transfer_fetched_bytes",
                "Bytes of pages fetched from other machines",
                fetched.fetched_bytes,
            ),
            ("kv_transfer_fallbacks", "Requests with a ticket that computed their prompt", fetched.fallbacks),
            ("kv_transfer_unreachable", "Fallbacks: the machine could not be reached", fetched.unreachable),
            ("kv_transfer_timeouts", "Fallbacks: the machine did not answer in time", fetched.timeouts),
            ("kv_transfer_expired", "Fallbacks: the machine did not have the pages", fetched.expired),
            (
                "kv_transfer_wrong_fingerprint",
                "Fallbacks: another model, cache or device",
                fetched.wrong_fingerprint,
            ),
            ("kv_transfer_corrupt", "Fallbacks: a page was damaged", fetched.corrupt),
        ]);
    }
    encode_counters(encoder, counters)?;
    encode_gauges(encoder, gauges)
}

fn encode_store(stats: &EngineStats, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
    let Some(store) = &stats.store else { return Ok(()) };
    let tiers: [(&str, &str, Tiers<'_>); 2] = [
        (
            "kv_store_hits",
            "Pages read from the page store",
            &[("ram", store.ram_hits), ("disk", store.disk_hits), ("shared", store.shared_hits)],
        ),
        (
            "kv_store_read_bytes",
            "Bytes read from the page store",
            &[
                ("ram", store.ram_read_bytes),
                ("disk", store.disk_read_bytes),
                ("shared", store.shared_read_bytes),
            ],
        ),
    ];
    for (name, help, values) in tiers {
        encode_tiers(encoder, name, help, values)?;
    }
    let counters = [
        ("kv_store_misses", "Pages that the page store did not have", store.misses),
        (
            "kv_store_missing_states",
            "Prompts whose last stored page has no recurrent state",
            store.missing_states,
        ),
        ("kv_store_vanished", "Pages that were gone when they were to be read", store.vanished),
        ("kv_store_written_pages", "Pages written to the directory", store.written_pages),
        ("kv_store_written_bytes", "Bytes written to the directory", store.written_bytes),
        ("kv_store_shared_written_pages", "Pages written to the shared server", store.shared_written_pages),
        ("kv_store_shared_written_bytes", "Bytes written to that server", store.shared_written_bytes),
        ("kv_store_shared_full", "Pages that server had no room for", store.shared_full),
        (
            "kv_store_shared_errors",
            "Exchanges with that server that failed or were late",
            store.shared_errors,
        ),
        ("kv_store_dropped_writes", "Pages not written because the queue was full", store.dropped_writes),
        ("kv_store_disk_full", "Pages not written because the disk was full", store.disk_full),
        ("kv_store_io_errors", "Pages not read or written for another reason", store.io_errors),
        ("kv_store_corrupt", "Pages that were damaged", store.corrupt),
        ("kv_store_wrong_fingerprint", "Pages of another model under our name", store.wrong_fingerprint),
        ("kv_store_timeouts", "Requests that the page store did not answer in time", store.timeouts),
        ("kv_store_pruned_pages", "Pages removed by age or size", store.pruned_pages),
    ];
    encode_counters(encoder, counters)?;
    let held = [("ram", store.ram_bytes), ("disk", store.disk_bytes)];
    let held = held.map(|(tier, bytes)| ([("tier", tier)], ConstGauge::new(bytes)));
    encode_family(encoder, "kv_store_bytes", "Bytes of stored pages", held)?;
    encode_gauges(encoder, [("kv_store_queued_bytes", "Bytes that wait to be written", store.queued_bytes)])
}
