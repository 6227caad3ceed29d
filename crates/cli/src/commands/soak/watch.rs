//! The server seen from outside: memory, metrics, health.

use super::http;
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

#[derive(Default)]
pub struct Watch {
    /// How long a server may take to answer, and to become idle.
    patience: Duration,
    /// How long memory may still grow to its level.
    settling: Duration,
    /// Seconds and resident bytes of the present server.
    samples: Vec<(Duration, usize)>,
    /// Largest resident memory at first and at last, of each server.
    lives: Vec<Memory>,
    /// Resident megabytes over all servers.
    history: Vec<usize>,
    pub slowest_health: Duration,
    pub panics: u64,
    pub preemptions: u64,
    pub evicted: u64,
    pub log_dropped: u64,
}

/// Resident memory of one server in bytes: the largest while it settled, and in as long a time at
/// the end of its life.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub first: usize,
    pub last: usize,
    pub lived: Duration,
}

/// What is left when nothing runs and the cache was flushed.
pub struct Idle {
    pub pages: u64,
    pub failed: u64,
}

impl Watch {
    pub fn new(patience: Duration, settling: Duration) -> Self {
        Self { patience, settling, ..Self::default() }
    }

    pub fn health(&mut self, address: &str) -> Result<()> {
        let begun = Instant::now();
        let answer = http::call(address, "/health", "", &[], self.patience)?;
        ensure!(answer.status == 200, "/health answers {}", answer.status);
        self.slowest_health = self.slowest_health.max(begun.elapsed());
        Ok(())
    }

    pub fn sample(&mut self, at: Duration, resident: usize) {
        self.samples.push((at, resident));
        self.history.push(resident >> 20);
    }

    /// Adds the figures of a server that is about to end.
    pub fn end_life(&mut self, address: &str) -> Result<()> {
        let text = metrics(address, self.patience)?;
        self.panics += number(&text, "oscar_panics_total ")?;
        self.preemptions += number(&text, "oscar_num_preemptions_total ")?;
        self.evicted += number(&text, "oscar_kv_evicted_pages_total ")?;
        self.log_dropped += number(&text, "oscar_log_lines_dropped_total ")?;
        let samples = std::mem::take(&mut self.samples);
        let (begin, end) = match (samples.first(), samples.last()) {
            (Some(first), Some(last)) => (first.0, last.0),
            _ => return Ok(()),
        };
        let lived = end - begin;
        let settling = self.settling.min(lived / 4);
        let most = |wanted: &dyn Fn(Duration) -> bool| {
            samples.iter().filter(|sample| wanted(sample.0)).map(|sample| sample.1).max().unwrap_or(0)
        };
        let (first, last) = (most(&|at| at <= begin + settling), most(&|at| at + settling >= end));
        self.lives.push(Memory { first, last, lived });
        Ok(())
    }

    /// Some twenty samples in megabytes.
    pub fn history(&self) -> Vec<usize> {
        self.history.iter().step_by(self.history.len() / 20 + 1).copied().collect()
    }

    /// The memory of every server that has ended.
    pub fn lives(&self) -> &[Memory] {
        &self.lives
    }
}

/// Waits until nothing runs, empties the cache and counts what is left.
pub fn settle(address: &str, patience: Duration) -> Result<Idle> {
    let begun = Instant::now();
    loop {
        let text = metrics(address, patience)?;
        let left =
            number(&text, "oscar_num_requests_running ")? + number(&text, "oscar_num_requests_waiting ")?;
        if left == 0 {
            break;
        }
        ensure!(begun.elapsed() < patience, "{left} requests of clients that have gone are still there");
        std::thread::sleep(Duration::from_millis(100));
    }
    let flushed = http::call(address, "/flush_cache", "{}", &[], patience)?;
    ensure!(flushed.status == 200, "/flush_cache answers {}", flushed.status);
    let text = metrics(address, patience)?;
    let pages = text.lines().filter(|line| line.starts_with("oscar_kv_pages{"));
    let pages = pages.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
    Ok(Idle { pages: pages as u64, failed: number(&text, "oscar_engine_requests_failed_total ")? })
}

fn metrics(address: &str, patience: Duration) -> Result<String> {
    let answer = http::call(address, "/metrics", "", &[], patience)?;
    ensure!(answer.status == 200, "/metrics answers {}", answer.status);
    Ok(answer.body)
}

fn number(text: &str, name: &str) -> Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|line| line.trim().parse::<f64>().ok());
    Ok(value.with_context(|| format!("no {name}in /metrics"))? as u64)
}
