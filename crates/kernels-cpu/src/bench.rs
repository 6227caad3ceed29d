//! Timing of small pieces of work, for benchmarks that have to print an honest number.

use std::time::{Duration, Instant};

/// Durations of repeated runs of the same work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    pub median: Duration,
    pub mean: Duration,
    pub min: Duration,
    pub max: Duration,
    /// `(max - min) / median`: how much the machine was disturbed.
    pub spread: f64,
}

impl Timing {
    /// Summary of measured durations; `None` if there are none.
    pub fn from_samples(samples: &mut [Duration]) -> Option<Self> {
        samples.sort_unstable();
        let (min, max) = (*samples.first()?, *samples.last()?);
        let median = samples[samples.len() / 2];
        let mean = samples.iter().sum::<Duration>() / samples.len() as u32;
        let spread = (max - min).as_secs_f64() / median.as_secs_f64().max(1e-12);
        Some(Self { median, mean, min, max, spread })
    }
}

/// Runs `work` `warmup` times untimed, then `repetitions` times (at least once) timed one by one.
pub fn time_median(warmup: usize, repetitions: usize, mut work: impl FnMut()) -> Timing {
    for _ in 0..warmup {
        work();
    }
    let mut samples: Vec<Duration> = (0..repetitions.max(1))
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed()
        })
        .collect();
    Timing::from_samples(&mut samples).expect("at least one sample was taken")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_of_known_samples() {
        let mut samples = [60, 10, 20].map(Duration::from_millis);
        let timing = Timing::from_samples(&mut samples).unwrap();
        assert_eq!(timing.min, Duration::from_millis(10));
        assert_eq!(timing.median, Duration::from_millis(20));
        assert_eq!(timing.mean, Duration::from_millis(30));
        assert_eq!(timing.max, Duration::from_millis(60));
        assert!((timing.spread - 2.5).abs() < 1e-9);
        assert_eq!(Timing::from_samples(&mut []), None);
    }

    #[test]
    fn counts_warmup_and_repetitions() {
        let mut runs = 0;
        let timing = time_median(2, 5, || runs += 1);
        assert_eq!(runs, 7);
        assert!(timing.min <= timing.median && timing.median <= timing.max);
        time_median(0, 0, || runs += 1);
        assert_eq!(runs, 8);
    }
}
