//! How much memory a model takes and what is left for its KV pages. `serve` and `plan` use the
//! same sum.

use crate::cpu_experts::{HostExperts, WeightBytes};
use crate::options::OpenModel;
use crate::progress;
use anyhow::{Result, bail};
use oscar_backend::{StepMemory, StepSize};
use oscar_codec::CacheLayout;
use oscar_engine::SchedulerOptions;

/// Memory besides KV pages, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FixedMemory {
    pub weights: usize,
    /// Experts in host memory, which are not among `weights`.
    pub host: HostExperts,
    /// The largest step.
    pub step: StepMemory,
}

impl OpenModel {
    /// The largest step under these options, over sequences of up to `context` tokens.
    pub fn step_size(&self, options: &SchedulerOptions, layout: &CacheLayout, context: usize) -> StepSize {
        let fp8 = self.weights.describe_fp8(&self.config, false, true).is_some();
        let size = self.config.step_size(options.most_rows(), options.max_batch, context);
        StepSize { fp8, quantized: layout.coded().is_some(), ..size }
    }
}

impl FixedMemory {
    /// `host_layers`: layers whose experts are in host memory.
    pub fn of(weights: &WeightBytes, host_layers: usize, step: StepMemory) -> Self {
        let host = weights.last(host_layers);
        Self { weights: weights.without(host), host, step }
    }

    pub fn total(&self) -> usize {
        self.weights + self.step.total()
    }

    pub fn describe(&self) -> String {
        let StepMemory { activations, expanded_pages, products, rope } = self.step;
        let parts = [
            ("weights", self.weights),
            ("activations", activations),
            ("expanded pages", expanded_pages),
            ("products", products),
            ("RoPE", rope),
        ];
        let some = parts.iter().filter(|(_, bytes)| *bytes > 0);
        let mut parts: Vec<_> =
            some.map(|(what, bytes)| format!("{what} {}", progress::bytes(*bytes))).collect();
        if self.host.layers > 0 {
            let HostExperts { layers, bytes } = self.host;
            parts.insert(
                1,
                format!("beside them experts of {layers} layers on the CPU, {}", progress::bytes(bytes)),
            );
        }
        parts.join(", ")
    }
}

/// What the user asked for.
#[derive(Clone, Copy, Debug)]
pub struct Wishes {
    pub kv_memory: Option<usize>,
    pub context: Option<usize>,
    /// Share of the memory left beside [`FixedMemory`] that KV pages get.
    pub share: f64,
}

/// Memory for KV pages and the longest sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizing {
    pub kv_memory: usize,
    pub context: usize,
    /// Everything that takes memory.
    pub parts: String,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Divides the memory of a device. `available` is what is free before anything is loaded; `None`
/// where the system does not tell. `layout` is in the device's form.
///
/// # Errors
/// If not even one prefill step fits; says what would.
pub fn divide(
    available: Option<usize>,
    fixed: &FixedMemory,
    layout: &CacheLayout,
    chunk: usize,
    positions: usize,
    wishes: Wishes,
) -> Result<Sizing> {
    let wanted = wishes.context.map_or(positions, |asked| asked.min(positions));
    let least = layout.working_bytes(wanted.min(chunk), chunk);
    let left = available.map(|bytes| bytes.saturating_sub(fixed.total()));
    let kv_memory = wishes.kv_memory.unwrap_or_else(|| match left {
        Some(left) => (left as f64 * wishes.share) as usize,
        None => layout.working_bytes(wanted, chunk),
    });
    if kv_memory < least {
        if wishes.kv_memory.is_some() {
            bail!(
                "--kv-memory {}: one prefill step of this model needs at least {}",
                progress::bytes(kv_memory),
                progress::bytes(least)
            );
        }
        bail!(
            "the model does not fit into {} of free memory: {}, and {} for the KV pages of one prefill step, {} in all. \
             Free some memory, or lower it with --weights fp8, --prefill-chunk, a narrower --kv or, for a mixture of \
             experts on a GPU, --cpu-experts auto",
            progress::bytes(available.unwrap_or(0)),
            fixed.describe(),
            progress::bytes(least),
            progress::bytes(fixed.total() + (least as f64 / wishes.share) as usize),
        );
    }
    let longest = layout.longest_context(kv_memory, chunk);
    let mut notes = Vec::new();
    if let (Some(asked), Some(left)) = (wishes.kv_memory, left.filter(|&left| left < kv_memory)) {
        notes.push(format!(
            "warning: --kv-memory {} is more than the {} that are free beside {}",
            progress::bytes(asked),
            progress::bytes(left),
            fixed.describe()
        ));
    }
    if let Some(asked) = wishes.context.filter(|&asked| asked > positions) {
        notes.push(format!(
            "--context {asked}: the model addresses {positions} positions, so the context is {positions}"
        ));
    }
    let (context, note) = match wishes.context {
        _ if longest >= wanted => (wanted, None),
        None => (
            longest,
            Some(format!(
                "context limited to {longest} of the model's {positions} tokens: {} of KV memory hold no more in {}; \
                 --kv-memory, --kv-memory-share or a narrower --kv make it longer",
                progress::bytes(kv_memory),
                layout.format()
            )),
        ),
        Some(asked) => (
            asked,
            Some(format!(
                "--context {asked}: {} of KV memory hold sequences of {longest} tokens; longer ones will be refused",
                progress::bytes(kv_memory)
            )),
        ),
    };
    notes.extend(note);
    let parts = format!("{}, KV pages {}", fixed.describe(), progress::bytes(kv_memory));
    Ok(Sizing { kv_memory, context, parts, notes })
}

/// Parses a share between 0 and 1.
pub fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err(format!("'{text}' is not a share: a number above 0 and at most 1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodeLayout, KvFormat, Windows};

    const GIB: usize = 1 << 30;

    fn layout(format: KvFormat) -> CacheLayout {
        CacheLayout::new(format, 36, 8, 128, Windows::default(), CodeLayout::Logical).unwrap()
    }

    fn eight_billion() -> FixedMemory {
        let step = StepMemory { rope: GIB / 8, activations: GIB / 2, ..StepMemory::default() };
        FixedMemory { weights: 16 * GIB, host: HostExperts::default(), step }
    }

    const NOTHING: Wishes = Wishes { kv_memory: None, context: None, share: 0.9 };

    fn sized(available: usize, format: KvFormat, wishes: Wishes) -> Result<Sizing> {
        divide(Some(available), &eight_billion(), &layout(format), 3960, 131072, wishes)
    }

    #[test]
    fn pages_get_their_share_of_what_is_left() {
        let sizing = sized(140 * GIB, KvFormat::OSCAR2, NOTHING).unwrap();
        let left = 140 * GIB - eight_billion().total();
        assert_eq!(sizing.kv_memory, (left as f64 * 0.9) as usize);
        assert_eq!((sizing.context, sizing.notes), (131072, vec![]));
    }

    #[test]
    fn a_small_gpu_limits_the_context_and_says_so() {
        let sizing = sized(24 * GIB, KvFormat::Bf16, NOTHING).unwrap();
        assert!(sizing.context < 131072 && sizing.context > 10_000, "{sizing:?}");
        assert!(layout(KvFormat::Bf16).working_bytes(sizing.context, 3960) <= sizing.kv_memory);
        let note = sizing.notes.concat();
        assert!(note.contains(&sizing.context.to_string()) && note.contains("bf16"), "{note}");
        // The same memory holds the whole context in two bits.
        assert_eq!(sized(24 * GIB, KvFormat::OSCAR2, NOTHING).unwrap().context, 131072);
    }

    #[test]
    fn the_user_overrides() {
        let asked = Wishes { kv_memory: Some(2 * GIB), context: Some(100_000), ..NOTHING };
        let sizing = sized(24 * GIB, KvFormat::Bf16, asked).unwrap();
        assert_eq!((sizing.kv_memory, sizing.context), (2 * GIB, 100_000));
        assert!(sizing.notes.concat().contains("--context 100000"));
        let greedy = Wishes { kv_memory: Some(20 * GIB), ..NOTHING };
        let notes = sized(24 * GIB, KvFormat::Bf16, greedy).unwrap().notes.concat();
        assert!(notes.contains("--kv-memory 20.00 GiB") && notes.contains("7.38 GiB"), "{notes}");
    }

    #[test]
    fn too_little_memory_names_what_would_fit() {
        let error = sized(16 * GIB, KvFormat::Bf16, NOTHING).unwrap_err().to_string();
        for part in ["weights 16.00 GiB", "activations", "in all", "--weights fp8"] {
            assert!(error.contains(part), "{error}");
        }
        // What it names does fit.
        let all = eight_billion().total() as f64
            + layout(KvFormat::Bf16).working_bytes(3960, 3960) as f64 / NOTHING.share;
        assert!(sized(all as usize + 1, KvFormat::Bf16, NOTHING).is_ok());
        let tiny = Wishes { kv_memory: Some(1 << 20), ..NOTHING };
        assert!(sized(140 * GIB, KvFormat::Bf16, tiny).unwrap_err().to_string().contains("at least"));
    }
}
