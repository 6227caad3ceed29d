//! The server's state and load: for people, for routers (SGLang's and smg's names), for the web
//! page.

use axum::Json;
use axum::extract::State;
use oscar_engine::{EngineInfo, EngineStats};
use serde_json::{Value, json};

use crate::app::Shared;
use crate::ids::unix_seconds;

const VERSION: &str = env!("CARGO_PKG_VERSION");

pub async fn version() -> Json<Value> {
    Json(json!({"version": VERSION, "server": "oscar"}))
}

pub async fn server(State(app): State<Shared>) -> Json<Value> {
    let (info, stats) = (app.engine.info(), app.engine.stats());
    let mut body = json!({
        "version": VERSION,
        "status": if app.is_draining() { "draining" } else { "ready" },
        "uptime_seconds": app.started.elapsed().as_secs_f64(),
        "model_path": info.model,
        "served_model_name": info.model,
        "model_aliases": app.config.model_aliases,
        "device": info.device,
        "attention_backend": info.attention,
        "context_length": info.context,
        "page_size": info.page_tokens,
        "kv_cache_dtype": info.kv_format,
        "kv_bits_per_element": kv_bits(info),
        "calibration": app.config.calibration,
        "kv_cache_note": app.config.cache_note,
        "kv_sink_tokens": info.sink,
        "kv_recent_tokens": info.recent,
        "kv_approximate_hits": info.approximate_hits,
        "kv_state_bytes": info.state_bytes,
        "kv_budget_bytes": info.kv_budget_bytes,
        "max_total_num_tokens": capacity(info),
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "dp_size": 1,
        "tp_size": info.ranks,
    });
    if let Some(events) = &app.config.kv_events {
        body["kv_events"] = json!(events);
    }
    Json(body)
}

pub async fn model(State(app): State<Shared>) -> Json<Value> {
    let info = app.engine.info();
    Json(json!({
        "model_path": info.model,
        "tokenizer_path": info.model,
        "is_generation": true,
        "preferred_sampling_params": null,
        "max_model_len": info.context,
        "vocab_size": info.vocab_size,
        "num_layers": info.layers,
        "has_chat_template": app.text.chat.is_some(),
    }))
}

/// The load of the one replica there is, under the names that routers read.
pub async fn loads(State(app): State<Shared>) -> Json<Value> {
    let (info, stats) = (app.engine.info(), app.engine.stats());
    let used = held_tokens(info, &stats);
    let total = stats.running + stats.waiting;
    let usage = share(stats.cache_bytes, info.kv_budget_bytes);
    let throughput =
        if stats.busy_seconds > 0.0 { stats.generated_tokens as f64 / stats.busy_seconds } else { 0.0 };
    Json(json!({
        "timestamp": unix_seconds(),
        "version": VERSION,
        "dp_rank_count": 1,
        "loads": [{
            "dp_rank": 0,
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": total,
            "num_used_tokens": used,
            "max_total_num_tokens": capacity(info),
            "token_usage": usage,
            "gen_throughput": throughput,
            "cache_hit_rate": hit_rate(&stats),
            "utilization": usage,
            "memory": {"kv_cache_bytes": stats.cache_bytes, "kv_budget_bytes": info.kv_budget_bytes},
            "queues": {"waiting": stats.waiting},
        }],
        "aggregate": {
            "total_running_reqs": stats.running,
            "total_waiting_reqs": stats.waiting,
            "total_reqs": total,
            "total_used_tokens": used,
            "avg_token_usage": usage,
        },
    }))
}

/// Everything the web page draws.
pub async fn state(State(app): State<Shared>) -> Json<Value> {
    let (info, stats) = (app.engine.info(), app.engine.stats());
    let mut body = json!({
        "info": info, "stats": stats, "requests": stats.requests, "draining": app.is_draining(),
        "uptime_seconds": app.started.elapsed().as_secs_f64(),
    });
    body["info"]["version"] = json!(VERSION);
    body["info"]["kv_bits"] = json!(kv_bits(info));
    body["info"]["calibration"] = json!(app.config.calibration);
    body["info"]["cache_note"] = json!(app.config.cache_note);
    body["stats"]["hit_rate"] = json!(hit_rate(&stats));
    Json(body)
}

/// Bits of a cache element, to three decimals.
pub fn kv_bits(info: &EngineInfo) -> f64 {
    (info.kv_bits * 1000.0).round() / 1000.0
}

/// Tokens that would fit if all were quantized.
fn capacity(info: &EngineInfo) -> usize {
    info.most_pages() * info.page_tokens
}

fn held_tokens(info: &EngineInfo, stats: &EngineStats) -> usize {
    (stats.full_pages + stats.coded_pages) * info.page_tokens
}

fn hit_rate(stats: &EngineStats) -> f64 {
    stats.cached_tokens as f64 / stats.prompt_tokens.max(1) as f64
}

fn share(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
