//! Numbers for Prometheus: latencies with vLLM's bucket edges, request counts, and the engine's own
//! counters, under our names and under vLLM's.
//!
//! Invariant: histograms are filled here as events pass by; what the engine counts is read from its
//! snapshot at each scrape and never counted twice. Only counters, gauges and histograms are
//! registered: parsers of the classic text know no other type.

mod classic;
mod store;
mod vllm;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oscar_engine::{EngineApi, EngineInfo, EngineStats, RouteCounts};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

pub use classic::{MEDIA_TYPE, OPENMETRICS_MEDIA_TYPE, wants_openmetrics};

use crate::generate::Totals;
use crate::{logging, panics, refused};

const FIRST_TOKEN_SECONDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const TOKEN_SECONDS: [f64; 19] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const REQUEST_SECONDS: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    method: String,
    route: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    finished_reason: &'static str,
}

/// The registry and the metrics that are fed from outside of it.
#[derive(Debug)]
pub struct Metrics {
    /// Our names, and vLLM's.
    registries: Vec<Registry>,
    vllm_finished: vllm::Finished,
    http: Family<RouteLabels, Counter>,
    connections: Gauge,
    connections_refused: Counter,
    finished: Family<ReasonLabels, Counter>,
    tool_calls: Counter,
    malformed_tool_calls: Counter,
    first_token: Histogram,
    inter_token: Histogram,
    per_token: Histogram,
    request: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
}

impl Metrics {
    pub fn new(engine: Arc<dyn EngineApi>) -> Self {
        let mut registry = Registry::with_prefix("oscar");
        let info = engine.info();
        let tokens = token_edges(info.context);
        let build: Family<[(&str, String); 4], Gauge> = Family::default();
        let labels = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("model", info.model.clone()),
            ("kv_format", info.kv_format.clone()),
            ("device", info.device.clone()),
        ];
        build.get_or_create(&labels).set(1);
        registry.register("build_info", "What is running", build);
        let metrics = Self {
            http: Family::default(),
            connections: Gauge::default(),
            connections_refused: Counter::default(),
            finished: Family::default(),
            tool_calls: Counter::default(),
            malformed_tool_calls: Counter::default(),
            first_token: Histogram::new(FIRST_TOKEN_SECONDS),
            inter_token: Histogram::new(TOKEN_SECONDS),
            per_token: Histogram::new(TOKEN_SECONDS),
            request: Histogram::new(REQUEST_SECONDS),
            prompt_tokens: Histogram::new(tokens.clone()),
            generation_tokens: Histogram::new(tokens),
            registries: Vec::new(),
            vllm_finished: vllm::Finished::new(),
        };
        registry.register("http_requests", "Responses by route and status", metrics.http.clone());
        registry.register("connections", "Open connections", metrics.connections.clone());
        let help = "Connections closed because all were taken";
        registry.register("connections_refused", help, metrics.connections_refused.clone());
        registry.register_collector(Box::new(ProcessCollector));
        registry.register("request_success", "Ended choices by reason", metrics.finished.clone());
        registry.register("tool_calls", "Tool calls in answers", metrics.tool_calls.clone());
        let help = "Tool calls that were returned as text or broke off";
        registry.register("tool_calls_malformed", help, metrics.malformed_tool_calls.clone());
        for (name, help, histogram) in metrics.histograms() {
            registry.register(name, help, histogram.clone());
        }
        registry.register_collector(Box::new(EngineCollector(engine.clone())));
        let aliases = vllm::registry(&metrics, engine);
        Self { registries: vec![registry, aliases], ..metrics }
    }

    /// Name, help and values of every histogram.
    fn histograms(&self) -> [(&'static str, &'static str, &Histogram); 6] {
        let per_token = "Mean time of a request's tokens after the first";
        [
            ("time_to_first_token_seconds", "From submission to the first token", &self.first_token),
            ("inter_token_latency_seconds", "Between two tokens of a choice", &self.inter_token),
            ("request_time_per_output_token_seconds", per_token, &self.per_token),
            ("e2e_request_latency_seconds", "From submission to the end", &self.request),
            ("request_prompt_tokens", "Prompt tokens of a request", &self.prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a request", &self.generation_tokens),
        ]
    }

    pub fn http(&self, method: &str, route: &str, status: u16) {
        let labels = RouteLabels { method: method.to_owned(), route: route.to_owned(), status };
        self.http.get_or_create(&labels).inc();
    }

    /// Counts a connection as open until the result is dropped.
    pub fn connection(&self) -> OpenConnection {
        self.connections.inc();
        OpenConnection(self.connections.clone())
    }

    pub fn connection_refused(&self) {
        self.connections_refused.inc();
    }

    pub fn finished(&self, finished_reason: &'static str) {
        self.finished.get_or_create(&ReasonLabels { finished_reason }).inc();
        self.vllm_finished.count(finished_reason);
    }

    /// Counts the tool calls of an answer, and those that were not well formed.
    pub fn tool_calls(&self, calls: usize, malformed: usize) {
        self.tool_calls.inc_by(calls as u64);
        self.malformed_tool_calls.inc_by(malformed as u64);
    }

    pub fn first_token(&self, waited: Duration) {
        self.first_token.observe(waited.as_secs_f64());
    }

    pub fn inter_token(&self, waited: Duration) {
        self.inter_token.observe(waited.as_secs_f64());
    }

    /// A request has ended; `decode` is the time since its first token, if a choice had more than
    /// one.
    pub fn request_done(&self, totals: Totals, elapsed: Duration, decode: Option<Duration>, tokens: usize) {
        self.request.observe(elapsed.as_secs_f64());
        self.prompt_tokens.observe(totals.usage.prompt_tokens as f64);
        self.generation_tokens.observe(totals.usage.completion_tokens as f64);
        if let Some(decode) = decode.filter(|_| tokens > 1) {
            self.per_token.observe(decode.as_secs_f64() / (tokens - 1) as f64);
        }
    }

    /// The OpenMetrics text.
    pub fn openmetrics(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        for registry in &self.registries {
            encode_registry(&mut text, registry)?;
        }
        encode_eof(&mut text)?;
        Ok(text)
    }

    /// The classic Prometheus text.
    pub fn classic(&self) -> Result<String, fmt::Error> {
        self.openmetrics().map(|text| classic::text(&text))
    }
}

/// Used share of the KV budget.
fn usage(stats: &EngineStats, info: &EngineInfo) -> f64 {
    share(stats.cache_bytes, info.kv_budget_bytes)
}

fn share(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// 1, 2, 5, 10, ... up to the context.
fn token_edges(context: usize) -> Vec<f64> {
    let decades = std::iter::successors(Some(1usize), |power| power.checked_mul(10));
    let edges = decades.flat_map(|power| [1, 2, 5].map(|digit| power.saturating_mul(digit)));
    let mut edges: Vec<f64> =
        edges.take_while(|&edge| edge <= context.max(1)).map(|edge| edge as f64).collect();
    edges.dedup();
    edges
}

/// See [`Metrics::connection`].
#[derive(Debug)]
pub struct OpenConnection(Gauge);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Counters of the whole process.
#[derive(Debug)]
struct ProcessCollector;

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let counters = [
            ("panics", "Panics, each answered with 500", panics::count()),
            ("unknown_request_fields", "Request fields that nothing reads", refused::skipped()),
            ("log_lines_dropped", "Log lines that could not be written in time", logging::dropped()),
        ];
        encode_counters(&mut encoder, counters)
    }
}

/// Counters without labels: name, help and value of each.
fn encode_counters<'a>(
    encoder: &mut DescriptorEncoder<'_>,
    counters: impl IntoIterator<Item = (&'a str, &'a str, u64)>,
) -> Result<(), fmt::Error> {
    for (name, help, value) in counters {
        let counter = ConstCounter::new(value);
        counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
    }
    Ok(())
}

/// Gauges without labels: name, help and value of each.
fn encode_gauges<'a, N>(
    encoder: &mut DescriptorEncoder<'_>,
    gauges: impl IntoIterator<Item = (&'a str, &'a str, N)>,
) -> Result<(), fmt::Error>
where
    ConstGauge<N>: EncodeMetric,
{
    for (name, help, value) in gauges {
        let gauge = ConstGauge::new(value);
        gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
    }
    Ok(())
}

/// A family of counters or gauges: its labels and value for each of `values`.
fn encode_family<M: EncodeMetric, L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (L, M)>,
) -> Result<(), fmt::Error> {
    let mut values = values.into_iter().peekable();
    let Some((_, first)) = values.peek() else { return Ok(()) };
    let mut family = encoder.encode_descriptor(name, help, None, first.metric_type())?;
    values.try_for_each(|(labels, value)| value.encode(family.encode_family(&labels)?))
}

/// Reads the engine's snapshot at each scrape.
struct EngineCollector(Arc<dyn EngineApi>);

impl fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineCollector")
    }
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let (stats, info) = (self.0.stats(), self.0.info());
        encode_counters(&mut encoder, counters(&stats))?;
        let busy = ConstCounter::new(stats.busy_seconds);
        let help = "Seconds spent inside engine steps";
        busy.encode(encoder.encode_descriptor("engine_busy_seconds", help, None, busy.metric_type())?)?;

        let hits = stats.cached_tokens as f64 / (stats.prompt_tokens.max(1)) as f64;
        let gauges: [(&str, &str, f64); 10] = [
            ("num_requests_running", "Requests in the batch", stats.running as f64),
            ("num_requests_waiting", "Requests in the queue", stats.waiting as f64),
            ("kv_cache_usage_perc", "Used share of the KV budget", usage(&stats, info)),
            ("kv_cache_bytes", "Bytes of KV cache in use", stats.cache_bytes as f64),
            ("kv_cache_bf16_bytes", "What the same tokens would take in BF16", stats.bf16_bytes as f64),
            ("kv_cache_budget_bytes", "Bytes the KV cache may use", info.kv_budget_bytes as f64),
            (
                "kv_bits_per_element",
                "Stored bits an element of quantized pages, metadata included",
                info.kv_bits,
            ),
            (
                "kv_effective_bits_per_element",
                "Stored bits an element of everything held now, BF16 windows included",
                16.0 * share(stats.cache_bytes, stats.bf16_bytes),
            ),
            ("prefix_cache_hit_rate", "Share of prompt tokens found in the cache", hits),
            ("model_context_tokens", "Longest sequence", info.context as f64),
        ];
        encode_gauges(&mut encoder, gauges)?;

        let mut pages = vec![
            ("bf16", "all", stats.full_pages),
            ("coded", "all", stats.coded_pages),
            ("bf16", "prefix_cache", stats.cached_full_pages),
            ("coded", "prefix_cache", stats.cached_coded_pages),
        ];
        if info.sliding_window.is_some() {
            pages.push(("sliding", "all", stats.sliding_pages));
            pages.push(("sliding", "prefix_cache", stats.cached_sliding_pages));
        }
        if info.state_bytes > 0 {
            pages.push(("state", "all", stats.states));
            pages.push(("state", "prefix_cache", stats.cached_states));
        }
        let help = "Pages by format; holder prefix_cache counts those no running request uses";
        let pages = pages.into_iter().map(|(format, holder, count)| {
            ([("format", format), ("holder", holder)], ConstGauge::new(count as u64))
        });
        encode_family(&mut encoder, "kv_pages", help, pages)?;
        let RouteCounts { episode, union, global, full } = stats.routes;
        let help = "Turns by the view of their history that they read; full: no view was ready";
        let routes = [("episode", episode), ("union", union), ("global", global), ("full", full)];
        let routes = routes.map(|(kind, count)| ([("kind", kind)], ConstCounter::new(count)));
        encode_family(&mut encoder, "kv_routes", help, routes)?;
        store::encode(&stats, &mut encoder)
    }
}

/// Names without the `_total` that the text format adds.
fn counters(stats: &EngineStats) -> [(&'static str, &'static str, u64); 20] {
    [
        ("engine_steps", "Engine steps", stats.steps),
        ("prompt_tokens", "Prompt tokens taken in", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated", stats.generated_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.cached_tokens),
        ("num_preemptions", "Requests preempted for pages", stats.preemptions),
        ("kv_demoted_tokens", "Tokens demoted from BF16 to code", stats.demoted_tokens),
        ("kv_approximate_hits", "Prefix hits that read quantized rows alone", stats.approximate_hits),
        ("kv_evicted_pages", "Pages evicted from the prefix cache", stats.evicted_pages),
        ("kv_compactions", "Histories compacted because of a budget", stats.compactions),
        ("kv_evicted_rows", "Rows of single heads that compactions left out", stats.evicted_rows),
        ("kv_kept_rows", "Rows of single heads that compactions kept", stats.kept_rows),
        ("kv_protected_rows", "Kept rows of protected messages", stats.protected_rows),
        ("kv_views", "Views of whole histories that were made", stats.views),
        ("kv_probe_tokens", "Tokens computed to score whole histories", stats.probe_tokens),
        ("kv_replayed_tokens", "Tokens computed in the background on a base", stats.replayed_tokens),
        ("kv_view_jobs_failed", "Conversations that got no views", stats.view_jobs_failed),
        ("engine_requests_finished", "Requests that ran to their end", stats.finished),
        ("engine_requests_cancelled", "Requests cancelled", stats.cancelled),
        ("engine_requests_failed", "Requests that failed", stats.failed),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_edges_are_1_2_5_up_to_the_context() {
        assert_eq!(token_edges(100), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(token_edges(0), [1.0]);
    }

    #[test]
    fn edges_ascend() {
        for edges in [&FIRST_TOKEN_SECONDS[..], &TOKEN_SECONDS, &REQUEST_SECONDS] {
            assert!(edges.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }
}
