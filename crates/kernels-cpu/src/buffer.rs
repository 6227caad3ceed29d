//! Memory for kernels: zeroed, aligned to a cache line, on huge pages where it is large.
//!
//! Invariant: the content is always initialised, and its address is a multiple of [`ALIGNMENT`].

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;

/// A cache line, which is also the widest vector and one row of a tile.
pub const ALIGNMENT: usize = 64;
/// Buffers of at least this size start on, and ask for, huge pages: fewer misses in the address
/// cache.
const HUGE_PAGE: usize = 2 << 20;

/// A fixed-size array of 32-bit words, viewed as whatever plain type the kernel needs.
pub struct Buffer {
    start: NonNull<u32>,
    words: usize,
}

// SAFETY: the buffer owns its memory, and only hands it out under the usual borrowing rules.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared access is read-only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `words` zeroed 32-bit words.
    pub fn zeroed(words: usize) -> Self {
        if words == 0 {
            return Self { start: NonNull::dangling(), words: 0 };
        }
        let layout = Self::layout(words);
        // SAFETY: the layout is not of size zero.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }.cast::<u32>()) else {
            handle_alloc_error(layout)
        };
        ask_for_huge_pages(start, layout.size());
        // SAFETY: the allocation holds `words` words, and zero is a valid u32.
        unsafe { start.write_bytes(0, words) };
        Self { start, words }
    }

    fn layout(words: usize) -> Layout {
        let bytes = words.checked_mul(4).expect("buffer size overflows the address space");
        let alignment = if bytes >= HUGE_PAGE { HUGE_PAGE } else { ALIGNMENT };
        Layout::from_size_align(bytes, alignment).expect("buffer size overflows the address space")
    }

    pub fn words(&self) -> &[u32] {
        // SAFETY: `start` points to `words` initialised words owned by self (or dangles, aligned,
        // for none).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }

    pub fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `words`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.words) }
    }

    /// Makes room for at least `words` words. Growing discards the content; memory is never given
    /// back, so that steady work allocates nothing.
    pub fn reserve(&mut self, words: usize) {
        if self.words < words {
            *self = Self::zeroed(words);
        }
    }

    pub fn bytes(&self) -> usize {
        self.words * 4
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.words != 0 {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(self.start.as_ptr().cast(), Self::layout(self.words)) };
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} words)", self.words)
    }
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages(start: NonNull<u32>, bytes: usize) {
    if bytes >= HUGE_PAGE {
        // SAFETY: the range is a fresh allocation of ours, aligned to the huge page. This is
        // advice: a refusal costs speed only, so the result is of no interest.
        unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_: NonNull<u32>, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_huge_buffers_are_zeroed_and_aligned() {
        for words in [0, 1, 17, HUGE_PAGE / 4 + 3] {
            let buffer = Buffer::zeroed(words);
            assert_eq!(buffer.words().len(), words);
            assert!(buffer.words().iter().all(|&word| word == 0));
            assert!(words == 0 || buffer.words().as_ptr().addr().is_multiple_of(ALIGNMENT));
        }
    }

    #[test]
    fn reserve_grows_and_never_shrinks() {
        let mut buffer = Buffer::default();
        buffer.reserve(100);
        buffer.words_mut()[99] = 7;
        buffer.reserve(10);
        assert_eq!((buffer.words().len(), buffer.words()[99]), (100, 7));
        assert_eq!(buffer.bytes(), 400);
    }
}
