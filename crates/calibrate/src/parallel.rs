//! Independent pieces of work on several threads, results in order.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads to use: as asked, or all the machine has.
pub(crate) fn thread_count(asked: usize) -> usize {
    if asked > 0 { asked } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Runs `work` on every item and returns the results in the order of the items. An error ends it
/// early; of several, that of the first item is returned.
pub(crate) fn map<T: Send, R: Send, E: Send>(
    threads: usize,
    items: Vec<T>,
    work: impl Fn(usize, T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let count = items.len();
    let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    let results: Vec<Mutex<Option<Result<R, E>>>> = (0..count).map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index).and_then(|item| item.lock().ok()?.take()) else {
                        return;
                    };
                    let result = work(index, item);
                    if result.is_err() {
                        next.store(count, Ordering::Relaxed);
                    }
                    if let Ok(mut slot) = results[index].lock() {
                        *slot = Some(result);
                    }
                }
            });
        }
    });
    // Items are claimed in order, so everything before the first error has a result.
    results.into_iter().filter_map(|slot| slot.into_inner().ok().flatten()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order() {
        let doubled: Result<Vec<usize>, ()> = map(3, (0..100).collect(), |_, n: usize| Ok(2 * n));
        assert_eq!(doubled.unwrap(), (0..100).map(|n| 2 * n).collect::<Vec<_>>());
        assert!(map(4, Vec::<u8>::new(), |_, n| Ok::<_, ()>(n)).unwrap().is_empty());
    }

    #[test]
    fn an_error_is_returned() {
        let result = map(3, (0..100).collect(), |_, n: usize| if n == 40 { Err(n) } else { Ok(n) });
        assert_eq!(result.unwrap_err(), 40);
    }
}
