//! The metrics under vLLM's names and labels, as Gateway API Inference Extension, llm-d,
//! production-stack and vLLM's dashboards read them.
//!
//! Invariant: aliases only. Histograms are the very ones that [`Metrics`](super::Metrics) fills, the
//! other numbers are read from the engine at each scrape.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use oscar_engine::EngineApi;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::{Metrics, ReasonLabels, encode_counters, encode_family, encode_gauges, usage};

/// vLLM's reasons. All are there from the start, so that a rate is 0 and not absent.
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// Ended choices under vLLM's reasons.
#[derive(Clone, Debug, Default)]
pub struct Finished(Family<ReasonLabels, Counter>);

impl Finished {
    pub fn new() -> Self {
        let family = Family::default();
        for finished_reason in REASONS {
            drop(family.get_or_create(&ReasonLabels { finished_reason }));
        }
        Self(family)
    }

    /// Counts an end. An answer that ends with tool calls has stopped, in vLLM's words.
    pub fn count(&self, reason: &'static str) {
        let finished_reason = if reason == "tool_calls" { "stop" } else { reason };
        self.0.get_or_create(&ReasonLabels { finished_reason }).inc();
    }
}

/// The registry of the aliases. It has no prefix: the library joins a prefix with `_`, vLLM with `:`.
pub fn registry(metrics: &Metrics, engine: Arc<dyn EngineApi>) -> Registry {
    let labels: [(Cow<'static, str>, Cow<'static, str>); 2] =
        [("model_name".into(), engine.info().model.clone().into()), ("engine".into(), "0".into())];
    let mut registry = Registry::with_labels(labels.into_iter());
    registry.register("vllm:request_success", "Ended choices by reason", metrics.vllm_finished.0.clone());
    for (name, help, histogram) in metrics.histograms() {
        registry.register(format!("vllm:{name}"), help, histogram.clone());
    }
    registry.register_collector(Box::new(Engine(engine)));
    registry
}

/// Reads the engine's snapshot at each scrape.
struct Engine(Arc<dyn EngineApi>);

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Engine")
    }
}

impl Collector for Engine {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let (stats, info) = (self.0.stats(), self.0.info());
        let used = usage(&stats, info);
        // Names with `gpu_` are those of older vLLM; production-stack reads them.
        let gauges = [
            ("vllm:num_requests_running", "Requests in the batch", stats.running as f64),
            ("vllm:num_requests_waiting", "Requests in the queue", stats.waiting as f64),
            ("vllm:kv_cache_usage_perc", "Used share of the KV budget, 0 to 1", used),
            ("vllm:gpu_cache_usage_perc", "Old name of vllm:kv_cache_usage_perc", used),
        ];
        encode_gauges(&mut encoder, gauges)?;
        let (queries, hits) = (stats.prompt_tokens, stats.cached_tokens);
        let counters = [
            ("vllm:prompt_tokens", "Prompt tokens taken in", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", stats.generated_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", hits),
            ("vllm:gpu_prefix_cache_queries", "Old name of vllm:prefix_cache_queries", queries),
            ("vllm:gpu_prefix_cache_hits", "Old name of vllm:prefix_cache_hits", hits),
            ("vllm:num_preemptions", "Requests preempted for pages", stats.preemptions),
        ];
        encode_counters(&mut encoder, counters)?;
        let help = "The cache: tokens of a block, blocks that fit if all are quantized, format";
        let labels = [
            ("block_size", info.page_tokens.to_string()),
            ("num_gpu_blocks", info.most_pages().to_string()),
            ("cache_dtype", info.kv_format.clone()),
        ];
        encode_family(&mut encoder, "vllm:cache_config_info", help, [(labels, ConstGauge::new(1u64))])
    }
}
