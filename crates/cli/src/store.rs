//! The page store: its flags, and the fingerprint of everything that its pages depend on.

use crate::cache::Cache;
use crate::device::AnyBackend;
use crate::options::{ModelArgs, OpenModel, parse_size, serialize_optional_size};
use crate::progress::{bytes, note};
use crate::transfer::TransferArgs;
use anyhow::{Context, Result, bail};
use oscar_backend::{Backend, DeltaShape};
use oscar_models::DecoderConfig;
use oscar_store::{
    Fingerprint, FingerprintParts, PageKind, RedisAddress, SharedAddress, Store, StoreLimits, StoreOptions,
    TransferDesk,
};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Where copies of pages are kept.
#[derive(clap::Args, Clone, Default, Serialize)]
pub struct StoreArgs {
    /// Directory for copies of KV pages: conversations survive a restart. Several servers may share
    /// it
    #[arg(long, value_name = "DIR")]
    pub store: Option<PathBuf>,
    /// Largest size of that directory; the least recently used pages go first. No limit if absent
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "store")]
    #[serde(serialize_with = "serialize_optional_size")]
    pub store_size: Option<usize>,
    /// Time after which pages that nobody used are removed, e.g. 12h or 7d; never if absent
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    #[serde(serialize_with = "serialize_age")]
    pub store_age: Option<Duration>,
    /// Valkey or Redis server for copies of KV pages that several servers share:
    /// redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]. Give it `maxmemory` with `allkeys-lru`
    #[arg(long, value_name = "URL")]
    pub store_redis: Option<String>,
    /// Bucket for copies of KV pages that several servers share: s3://BUCKET[/PREFIX]. Keys, region and
    /// endpoint come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and
    /// AWS_ENDPOINT_URL
    #[cfg(feature = "s3")]
    #[arg(long, value_name = "URL")]
    pub store_s3: Option<String>,
    /// Host memory for copies of KV pages that the prefix cache gave up; none if absent
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(serialize_with = "serialize_optional_size")]
    pub store_ram: Option<usize>,
}

/// The model whose pages a store keeps.
pub struct StoredModel<'a> {
    pub name: &'a str,
    /// Text that tells these weights from all others.
    pub weights: String,
    pub config: &'a DecoderConfig,
}

impl<'a> From<&'a OpenModel> for StoredModel<'a> {
    fn from(model: &'a OpenModel) -> Self {
        Self { name: &model.name, weights: model.weights.fingerprint(), config: &model.config }
    }
}

impl StoreArgs {
    pub fn limits(&self) -> StoreLimits {
        StoreLimits { bytes: self.store_size.map(|size| size as u64), age: self.store_age }
    }

    /// The flag of the bucket, if there is one.
    pub fn s3(&self) -> Option<&String> {
        #[cfg(feature = "s3")]
        return self.store_s3.as_ref();
        #[cfg(not(feature = "s3"))]
        None
    }

    /// The server that machines share pages on.
    fn shared(&self) -> Result<Option<SharedAddress>> {
        if self.store_redis.is_some() && self.s3().is_some() {
            bail!("--store-redis and --store-s3 cannot be used together: leave out one of them");
        }
        #[cfg(feature = "s3")]
        if let Some(url) = &self.store_s3 {
            let address = oscar_store::S3Address::parse(url, |name| std::env::var(name).ok());
            return Ok(Some(SharedAddress::S3(address.context("--store-s3")?)));
        }
        let redis = self.store_redis.as_ref().map(|url| url.parse::<RedisAddress>());
        Ok(redis.transpose().context("--store-redis")?.map(SharedAddress::Redis))
    }

    /// Refuses a place that cannot hold a recurrent state: no prefix would ever come back from it.
    fn check_room(&self, transfer: &TransferArgs, state: usize) -> Result<()> {
        for (flag, room) in [
            ("--store-ram", self.store_ram),
            ("--store-size", self.store_size),
            ("--kv-transfer-memory", transfer.kv_transfer_memory),
        ] {
            if room.is_some_and(|room| room < state) {
                bail!(
                    "{flag}: a prefix needs a recurrent state of {}, for which there is no room: give more",
                    bytes(state)
                );
            }
        }
        Ok(())
    }

    /// Opens the store that the flags ask for, and the desk for pages of other machines.
    pub fn open(
        &self,
        transfer: &TransferArgs,
        args: &ModelArgs,
        model: &StoredModel<'_>,
        cache: &Cache,
        backend: &AnyBackend,
        prefix_cache: bool,
    ) -> Result<(Option<Store>, Option<Arc<TransferDesk>>)> {
        let has_shared = self.store_redis.is_some() || self.s3().is_some();
        let has_store = self.store.is_some() || self.store_ram.is_some() || has_shared;
        if self.store_age.is_some() && self.store.is_none() && self.store_redis.is_none() {
            bail!("--store-age needs --store or --store-redis; a bucket has rules of its own");
        }
        if !has_store && !transfer.is_used() {
            return Ok((None, None));
        }
        let flags = if has_store {
            "--store, --store-redis, --store-s3 and --store-ram"
        } else {
            "--kv-transfer-listen and -peer"
        };
        if !backend.copies_blocks() {
            bail!(
                "{flags} do not work with --tensor-parallel, where no rank has whole pages: leave out one of them"
            );
        }
        if !prefix_cache {
            bail!("{flags} need the prefix cache: leave out --no-prefix-cache");
        }
        let layout = backend.held_layout(&cache.layout);
        self.check_room(transfer, layout.state_bytes())?;
        let kinds = PageKind::of(&layout);
        let largest = kinds.iter().map(|kind| kind.bytes(&layout)).max().unwrap_or(0);
        let pace = pace(backend);
        let options = StoreOptions {
            ram: self.store_ram,
            directory: self.store.clone(),
            limits: self.limits(),
            shared: self.shared()?,
            peers: transfer.fetches(),
            most_page_bytes: largest,
            kinds,
            // A turn ends with up to two states, at the end of its prompt and of its answer.
            queue: pace.queue.max(4 * layout.state_bytes()),
            ..pace
        };
        let (fingerprint, about) = fingerprint(args, model, cache, backend);
        let desk = transfer.desk(fingerprint);
        if !has_store && !transfer.fetches() {
            return Ok((None, desk));
        }
        let place = || match (&self.store, &self.store_redis, self.s3()) {
            (Some(folder), _, _) => format!("--store {}", folder.display()),
            (None, Some(_), _) => "--store-redis".to_owned(),
            (None, None, Some(_)) => "--store-s3".to_owned(),
            (None, None, None) if has_store => "--store-ram".to_owned(),
            (None, None, None) => "--kv-transfer-peer".to_owned(),
        };
        let store = Store::open(&options, fingerprint, &about).with_context(place)?;
        if let Some(folder) = &self.store {
            let held = bytes(store.stats().disk_bytes as usize);
            note!("page store: {} ({held}), fingerprint {}", folder.display(), fingerprint.folder());
        }
        Ok((Some(store), desk))
    }
}

/// A GPU computes prompts faster and takes pages faster than a CPU.
fn pace(backend: &AnyBackend) -> StoreOptions {
    let options = StoreOptions::default();
    if backend.as_cuda().is_none() {
        return options;
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    StoreOptions { queue: 1 << 30, readers: (threads / 2).clamp(2, 8), ..options }
}

/// Everything that the bytes of a page depend on besides its tokens: weights and how they are
/// multiplied, rotations, widths, windows, format, byte order, device.
fn fingerprint(
    args: &ModelArgs,
    model: &StoredModel<'_>,
    cache: &Cache,
    backend: &AnyBackend,
) -> (Fingerprint, String) {
    let layout = backend.held_layout(&cache.layout);
    let gpu = || {
        let p = backend.as_cuda().map(|cuda| cuda.device().properties());
        p.map_or_else(String::new, |p| format!("{}, sm_{}{}", p.name, p.major, p.minor))
    };
    let kernels = backend.as_cpu().map_or_else(gpu, |cpu| cpu.kernels().variant().to_string());
    let rotations = cache.rotations.iter().flat_map(|set| set.heads()).flat_map(|head| {
        let mean = head.key_mean.as_deref().unwrap_or_default();
        [head.key.matrix(), head.value.matrix(), mean].map(float_bytes)
    });
    // Experts on the CPU round differently, and with them the rows of every later layer.
    let on_cpu = backend.as_hybrid().and_then(|hybrid| {
        let layers = hybrid.host_layers()?.min(model.config.mixtures().count());
        let host = hybrid.host().filter(|_| layers > 0)?;
        Some(format!("{layers}, {}", host.kernels().variant()))
    });
    // Only models and devices with such parts name them, so that the stores of others stay valid.
    let mut parts = FingerprintParts::default();
    if let Some(layers) = &on_cpu {
        parts = parts.text("layers with experts on the CPU", layers);
    }
    if layout.has_states() {
        parts = parts.text("states", DeltaShape::STATE_ORDER);
    }
    parts
        .note("model", model.name)
        .text("weights", &model.weights)
        .text("weights held as", args.weights.map_or("stored", |weights| weights.name()))
        .text("cache", &cache.layout.describe())
        .text("device", backend.name())
        .text("kernels", &kernels)
        .text("attention", &backend.attention(&layout).description)
        .debug("precision", &args.precision)
        .debug("activations", &args.activations)
        .debug("configuration", model.config)
        .debug("layout", &layout)
        .bytes("rotations", rotations)
        .finish()
}

/// Numbers as bytes, their count first.
fn float_bytes(values: &[f32]) -> Vec<u8> {
    let count = (values.len() as u64).to_le_bytes();
    count.into_iter().chain(values.iter().flat_map(|value| value.to_le_bytes())).collect()
}

const UNITS: [(char, u64); 4] = [('d', 86400), ('h', 3600), ('m', 60), ('s', 1)];

/// A time from `90s`, `15m`, `12h`, `7d`.
pub fn parse_age(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is not an age: write e.g. 90s, 15m, 12h or 7d");
    let (digits, unit) = UNITS
        .iter()
        .find_map(|(letter, seconds)| Some((text.strip_suffix(*letter)?, *seconds)))
        .ok_or_else(wrong)?;
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    match number.checked_mul(unit) {
        Some(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err(wrong()),
    }
}

/// The shortest text that [`parse_age`] reads as this time.
fn serialize_age<S: serde::Serializer>(age: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    let text = |age: &Duration| {
        let seconds = age.as_secs();
        let unit = UNITS.into_iter().find(|(_, unit)| seconds.is_multiple_of(*unit));
        unit.map_or_else(String::new, |(letter, unit)| format!("{}{letter}", seconds / unit))
    };
    age.as_ref().map(text).serialize(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_units() {
        for (text, seconds) in [("90s", 90), ("15m", 900), ("12h", 43200), ("7d", 604_800)] {
            assert_eq!(parse_age(text), Ok(Duration::from_secs(seconds)), "{text}");
            let written = serde_json::to_value(StoreArgs {
                store_age: Some(Duration::from_secs(seconds)),
                ..StoreArgs::default()
            });
            assert_eq!(written.unwrap()["store_age"], text);
        }
        for bad in ["", "7", "d", "0s", "-1d", "1.5h", "1w", "99999999999999999999d", "9999999999999999999d"]
        {
            assert!(parse_age(bad).is_err(), "{bad}");
        }
    }
}
