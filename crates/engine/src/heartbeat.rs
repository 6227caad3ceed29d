//! The heartbeat of the engine thread: what it has been doing, and for how long.
//!
//! **Invariant:** reading never waits for the engine thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A step may take this many times as long as the longest one before it.
const TIMES_LONGEST: u64 = 10;

pub struct Heartbeat {
    origin: Instant,
    /// Microseconds after `origin` at which the current work began, plus one; 0 while there is none.
    busy_since: AtomicU64,
    /// Microseconds of the longest work so far.
    longest: AtomicU64,
    limit: Option<Duration>,
}

impl Heartbeat {
    pub fn new(limit: Option<Duration>) -> Self {
        Self { origin: Instant::now(), busy_since: 0.into(), longest: 0.into(), limit }
    }

    /// Runs one piece of work.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let begun = self.now();
        self.busy_since.store(begun + 1, Ordering::Release);
        let result = work();
        self.longest.fetch_max(self.now() - begun, Ordering::AcqRel);
        self.busy_since.store(0, Ordering::Release);
        result
    }

    /// How long the current work has been running, if that is too long.
    pub fn stuck_for(&self) -> Option<Duration> {
        let limit = self.limit?;
        let begun = self.busy_since.load(Ordering::Acquire).checked_sub(1)?;
        let time = Duration::from_micros(self.now().saturating_sub(begun));
        let longest = Duration::from_micros(self.longest.load(Ordering::Acquire) * TIMES_LONGEST);
        (time > limit.max(longest)).then_some(time)
    }

    fn now(&self) -> u64 {
        self.origin.elapsed().as_micros() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_work_that_is_too_long_is_stuck() {
        let heartbeat = Heartbeat::new(Some(Duration::ZERO));
        assert_eq!(heartbeat.stuck_for(), None, "idle");
        let pause = Duration::from_millis(2);
        heartbeat.during(|| {
            std::thread::sleep(pause);
            assert!(heartbeat.stuck_for().is_some_and(|time| time >= pause));
        });
        assert_eq!(heartbeat.stuck_for(), None, "idle again");
        // A step may take ten times as long as the longest before it.
        heartbeat.during(|| assert_eq!(heartbeat.stuck_for(), None));
        let patient = Heartbeat::new(None);
        patient.during(|| {
            std::thread::sleep(pause);
            assert_eq!(patient.stuck_for(), None);
        });
    }
}
