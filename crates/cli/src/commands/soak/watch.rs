//! The server seen from outside: memory, metrics, health.

use super::http;
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

/// Health checks that take longer fail the run.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long the server may take to become idle.
const SETTLE: Duration = Duration::from_secs(300);

#[derive(Default)]
pub struct Watch {
    /// How long memory may still grow to its level.
    settling: Duration,
    /// Seconds and resident bytes.
    samples: Vec<(Duration, usize)>,
    pub slowest_health: Duration,
    pub panics: u64,
    pub preemptions: u64,
    pub evicted: u64,
    pub log_dropped: u64,
}

/// What is left when nothing runs and the cache was flushed.
pub struct Idle {
    pub pages: u64,
    pub failed: u64,
}

impl Watch {
    pub fn new(settling: Duration) -> Self {
        Self { settling, ..Self::default() }
    }

    pub fn health(&mut self, address: &str) -> Result<()> {
        let begun = Instant::now();
        let answer = http::call(address, "/health", "", &[], PATIENCE)?;
        ensure!(answer.status == 200, "/health answers {}", answer.status);
        self.slowest_health = self.slowest_health.max(begun.elapsed());
        Ok(())
    }

    pub fn sample(&mut self, at: Duration, resident: usize) {
        self.samples.push((at, resident));
    }

    /// The largest resident memory while the server settled, and in as long a time at the end.
    pub fn resident(&self) -> (usize, usize) {
        let end = self.samples.last().map_or(Duration::ZERO, |sample| sample.0);
        let most = |wanted: &dyn Fn(Duration) -> bool| {
            self.samples.iter().filter(|sample| wanted(sample.0)).map(|sample| sample.1).max().unwrap_or(0)
        };
        (most(&|at| at <= self.settling), most(&|at| at + self.settling >= end))
    }

    /// Some twenty samples in megabytes.
    pub fn history(&self) -> Vec<usize> {
        self.samples.iter().step_by(self.samples.len() / 20 + 1).map(|sample| sample.1 >> 20).collect()
    }

    pub fn read_metrics(&mut self, address: &str) -> Result<()> {
        let text = metrics(address)?;
        self.panics = number(&text, "oscar_panics_total ")?;
        self.preemptions = number(&text, "oscar_num_preemptions_total ")?;
        self.evicted = number(&text, "oscar_kv_evicted_pages_total ")?;
        self.log_dropped = number(&text, "oscar_log_lines_dropped_total ")?;
        Ok(())
    }
}

/// Waits until nothing runs, empties the cache and counts what is left.
pub fn settle(address: &str) -> Result<Idle> {
    let begun = Instant::now();
    loop {
        let text = metrics(address)?;
        let left =
            number(&text, "oscar_num_requests_running ")? + number(&text, "oscar_num_requests_waiting ")?;
        if left == 0 {
            break;
        }
        ensure!(begun.elapsed() < SETTLE, "{left} requests of clients that have gone are still there");
        std::thread::sleep(Duration::from_millis(100));
    }
    let flushed = http::call(address, "/flush_cache", "{}", &[], PATIENCE)?;
    ensure!(flushed.status == 200, "/flush_cache answers {}", flushed.status);
    let text = metrics(address)?;
    let pages = text.lines().filter(|line| line.starts_with("oscar_kv_pages{"));
    let pages = pages.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
    Ok(Idle { pages: pages as u64, failed: number(&text, "oscar_engine_requests_failed_total ")? })
}

fn metrics(address: &str) -> Result<String> {
    let answer = http::call(address, "/metrics", "", &[], PATIENCE)?;
    ensure!(answer.status == 200, "/metrics answers {}", answer.status);
    Ok(answer.body)
}

fn number(text: &str, name: &str) -> Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|line| line.trim().parse::<f64>().ok());
    Ok(value.with_context(|| format!("no {name}in /metrics"))? as u64)
}
