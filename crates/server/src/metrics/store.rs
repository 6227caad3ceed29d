//! The numbers of the page store, if the engine has one.

use std::fmt;

use oscar_engine::EngineStats;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Values by tier.
type Tiers<'a> = &'a [(&'a str, u64)];

pub fn encode(stats: &EngineStats, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
    let Some(store) = &stats.store else { return Ok(()) };
    let restored = stats.cached_ram_tokens + stats.cached_disk_tokens;
    let tiers: [(&str, &str, Tiers<'_>); 3] = [
        (
            "prefix_cache_hits_by_tier",
            "Prompt tokens found in the prefix tree, or brought back from the page store",
            &[
                ("tree", stats.cached_tokens.saturating_sub(restored)),
                ("ram", stats.cached_ram_tokens),
                ("disk", stats.cached_disk_tokens),
            ],
        ),
        (
            "kv_store_hits",
            "Pages read from the page store",
            &[("ram", store.ram_hits), ("disk", store.disk_hits)],
        ),
        (
            "kv_store_read_bytes",
            "Bytes read from the page store",
            &[("ram", store.ram_read_bytes), ("disk", store.disk_read_bytes)],
        ),
    ];
    let kind = ConstCounter::new(0u64).metric_type();
    for (name, help, values) in tiers {
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for &(tier, value) in values {
            ConstCounter::new(value).encode(family.encode_family(&[("tier", tier)])?)?;
        }
    }
    let counters = [
        ("kv_store_misses", "Pages that the page store did not have", store.misses),
        ("kv_store_vanished", "Pages that were gone when they were to be read", store.vanished),
        ("kv_store_written_pages", "Pages written to the directory", store.written_pages),
        ("kv_store_written_bytes", "Bytes written to the directory", store.written_bytes),
        ("kv_store_dropped_writes", "Pages not written because the queue was full", store.dropped_writes),
        ("kv_store_disk_full", "Pages not written because the disk was full", store.disk_full),
        ("kv_store_io_errors", "Pages not read or written for another reason", store.io_errors),
        ("kv_store_corrupt", "Pages that were damaged", store.corrupt),
        ("kv_store_wrong_fingerprint", "Pages of another model under our name", store.wrong_fingerprint),
        ("kv_store_timeouts", "Requests that the page store did not answer in time", store.timeouts),
        ("kv_store_pruned_pages", "Pages removed by age or size", store.pruned_pages),
    ];
    for (name, help, value) in counters {
        ConstCounter::new(value).encode(encoder.encode_descriptor(name, help, None, kind)?)?;
    }
    let kind = ConstGauge::new(0u64).metric_type();
    let help = "Bytes of stored pages";
    let mut family = encoder.encode_descriptor("kv_store_bytes", help, None, kind)?;
    for (tier, value) in [("ram", store.ram_bytes), ("disk", store.disk_bytes)] {
        ConstGauge::new(value).encode(family.encode_family(&[("tier", tier)])?)?;
    }
    let help = "Bytes that wait to be written";
    let gauge = ConstGauge::new(store.queued_bytes);
    gauge.encode(encoder.encode_descriptor("kv_store_queued_bytes", help, None, kind)?)
}
