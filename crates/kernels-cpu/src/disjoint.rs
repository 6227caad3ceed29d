//! One mutable slice, written by many tasks, each in parts of its own.

use std::marker::PhantomData;
use std::ops::Range;

use crate::pool::ThreadPool;

/// A mutable slice that the tasks of one job share.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`; `part` makes its callers promise that no element is reached
// twice.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// No two parts alive at the same time may overlap.
    ///
    /// # Panics
    /// If the range is not inside the slice.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the borrowed slice by the assertion, unshared by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

impl ThreadPool {
    /// Cuts `slice` into chunks of `chunk` elements (the last may be shorter) and runs `work(index,
    /// chunk)` on each.
    ///
    /// # Panics
    /// If `chunk` is zero, or with the panic of a task.
    pub fn run_chunks<T: Send>(&self, slice: &mut [T], chunk: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        let len = slice.len();
        let shared = Disjoint::new(slice);
        self.run(len.div_ceil(chunk), &|index| {
            let start = index * chunk;
            // SAFETY: each index is run once, and chunks of different indices do not overlap.
            work(index, unsafe { shared.part(start..len.min(start + chunk)) });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_slice_once() {
        let pool = ThreadPool::new(3).unwrap();
        for (len, chunk) in [(0, 5), (1, 5), (10, 5), (103, 10)] {
            let mut values = vec![0_usize; len];
            pool.run_chunks(&mut values, chunk, |index, part| {
                part.iter_mut().enumerate().for_each(|(i, value)| *value += index * chunk + i);
            });
            assert!(values.iter().copied().eq(0..len));
        }
    }
}
