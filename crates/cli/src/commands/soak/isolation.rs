//! What one tenant can learn about the prompts of another under `--isolate-keys`.
//!
//! In every round tenant A sends a prompt. Then, in an order drawn for the round, A sends it again (an own prefix), B sends
//! it (a foreign prefix), and B sends one of the same length that nobody sent (an unknown prefix). B must be told of no
//! cached token. Times are reported as distributions. The area under the ROC curve is the probability that a foreign prefix
//! is faster than an unknown one: 0.5 means that times tell nothing.

use super::child::ServerProcess;
use super::http;
use anyhow::{Result, ensure};
use oscar_codec::random::SplitMix64;
use serde_json::{Value, json};
use std::io::Write;
use std::time::{Duration, Instant};

const KEYS: [(&str, &str); 2] = [("tenant-a", "key-of-tenant-a"), ("tenant-b", "key-of-tenant-b")];

/// The kinds of prefix that are timed.
const KINDS: [&str; 3] = ["own", "foreign", "unknown"];

pub fn run(serve: &[String], rounds: usize, seed: u64, patience: Duration, as_json: bool) -> Result<()> {
    let mut file = tempfile::NamedTempFile::new()?;
    for (name, key) in KEYS {
        writeln!(file, "user {name} {key}")?;
    }
    file.flush()?;
    let keys = [format!("--api-key-file={}", file.path().display()), "--isolate-keys".to_owned()];
    let server = ServerProcess::start(&serve.iter().cloned().chain(keys).collect::<Vec<_>>())?;
    let mut random = SplitMix64::new(seed);
    let mut times = [const { Vec::new() }; 3];
    let mut cached = [0; 3];
    for _ in 0..rounds {
        let known = prompt(&mut random);
        let unknown = prompt(&mut random);
        ask(&server.address, KEYS[0].1, &known, patience)?;
        let mut order = [0, 1, 2];
        for last in (1..order.len()).rev() {
            order.swap(last, random.below(last + 1));
        }
        for kind in order {
            let (tenant, text) = [(0, &known), (1, &known), (1, &unknown)][kind];
            let (seconds, tokens) = ask(&server.address, KEYS[tenant].1, text, patience)?;
            times[kind].push(seconds);
            cached[kind] += tokens;
        }
    }
    let mut figures = json!({"rounds": rounds});
    for ((kind, times), cached) in KINDS.iter().zip(&mut times).zip(cached) {
        times.sort_by(f64::total_cmp);
        figures[kind] = json!({"cached_tokens": cached, "p10_ms": quantile(times, 0.1), "p50_ms": quantile(times, 0.5),
            "p90_ms": quantile(times, 0.9)});
    }
    let [own, foreign, unknown] = &times;
    figures["own_faster_than_unknown"] = json!(area(own, unknown));
    figures["foreign_faster_than_unknown"] = json!(area(foreign, unknown));
    match as_json {
        true => println!("{figures}"),
        false => print(&figures),
    }
    ensure!(cached[0] > 0, "an own prefix is not found, so nothing was compared");
    ensure!(cached[1] == 0 && cached[2] == 0, "a tenant was told of cached tokens that are not its own");
    Ok(())
}

fn print(figures: &Value) {
    println!("{:<8} {:>8} {:>8} {:>8} {:>14}", "prefix", "p10 ms", "p50 ms", "p90 ms", "cached tokens");
    for kind in KINDS {
        let of = &figures[kind];
        let ms = |name: &str| of[name].as_f64().unwrap_or_default();
        println!(
            "{kind:<8} {:>8.1} {:>8.1} {:>8.1} {:>14}",
            ms("p10_ms"),
            ms("p50_ms"),
            ms("p90_ms"),
            of["cached_tokens"]
        );
    }
    println!(
        "probability of being faster than an unknown prefix: own {:.3}, foreign {:.3} (0.5 tells nothing)",
        figures["own_faster_than_unknown"].as_f64().unwrap_or_default(),
        figures["foreign_faster_than_unknown"].as_f64().unwrap_or_default()
    );
}

/// A prompt of a fixed number of words that share no beginning with another one.
fn prompt(random: &mut SplitMix64) -> Vec<u32> {
    const TOKENS: usize = 768;
    (0..TOKENS).map(|_| 300 + random.below(4000) as u32).collect()
}

/// Seconds to the first token, which is the whole answer, and the cached tokens that were reported.
fn ask(address: &str, key: &str, prompt: &[u32], patience: Duration) -> Result<(f64, u64)> {
    let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0}).to_string();
    let key = format!("Bearer {key}");
    let begun = Instant::now();
    let answer = http::call(address, "/v1/completions", &body, &[("Authorization", &key)], patience)?;
    let seconds = begun.elapsed().as_secs_f64();
    ensure!(answer.status == 200, "{}: {}", answer.status, answer.body);
    let answer: Value = serde_json::from_str(&answer.body)?;
    Ok((seconds, answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)))
}

/// A quantile of sorted seconds, in milliseconds.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (share * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).map_or(0.0, |seconds| 1000.0 * seconds)
}

/// Probability that one of `a` is smaller than one of `b`; equal ones count half.
fn area(a: &[f64], b: &[f64]) -> f64 {
    let pairs = a.iter().flat_map(|x| b.iter().map(move |y| (x, y)));
    let smaller: f64 = pairs
        .map(|(x, y)| {
            if x < y {
                1.0
            } else if x == y {
                0.5
            } else {
                0.0
            }
        })
        .sum();
    smaller / (a.len() * b.len()).max(1) as f64
}
