//! Jobs of loading, on several threads.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// Most threads of loading: each holds a layer's matrices in f32 for a moment.
const MOST_THREADS: usize = 16;

/// Runs `job(0)` to `job(count - 1)` and returns their results in that order. `done` is called in
/// this thread after every job. The first error ends the work; jobs that run are waited for.
pub(crate) fn in_parallel<T: Send, E: Send>(
    count: usize,
    job: impl Fn(usize) -> Result<T, E> + Sync,
    mut done: impl FnMut(usize),
) -> Result<Vec<T>, E> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS).min(count);
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<E>> = Mutex::new(None);
    let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
    let (sender, receiver) = mpsc::channel();
    let work = |sender: mpsc::Sender<(usize, T)>| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            match job(index) {
                // The receiver lives until all senders are gone.
                Ok(result) => drop(sender.send((index, result))),
                Err(error) => {
                    next.store(count, Ordering::Relaxed);
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let sender = sender.clone();
            scope.spawn(|| work(sender));
        }
        drop(sender);
        for (index, result) in receiver {
            results[index] = Some(result);
            done(index);
        }
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_and_each_is_reported_once() {
        let mut seen = Vec::new();
        let squares = in_parallel(100, |i| Ok::<_, ()>(i * i), |i| seen.push(i)).unwrap();
        assert_eq!(squares, (0..100).map(|i| i * i).collect::<Vec<_>>());
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
        assert_eq!(in_parallel(0, |_| Ok::<(), ()>(()), |_| {}), Ok(Vec::new()));
    }

    #[test]
    fn an_error_ends_the_work() {
        let ran = AtomicUsize::new(0);
        let job = |i: usize| {
            ran.fetch_add(1, Ordering::Relaxed);
            if i == 3 { Err("three") } else { Ok(i) }
        };
        assert_eq!(in_parallel(1 << 20, job, |_| {}), Err("three"));
        assert!(ran.into_inner() < 1 << 20, "jobs after the error were left out");
    }
}
