//! Memory that costs nothing until it is written: address space reserved for pages.

use std::io;
use std::ptr::NonNull;

/// A zeroed, page-aligned byte range whose memory the system supplies on first touch.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the region owns its memory and hands it out under the usual borrowing rules.
unsafe impl Send for Region {}
// SAFETY: as above; shared access is read-only.
unsafe impl Sync for Region {}

impl Region {
    pub fn reserve(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len });
        }
        // SAFETY: an anonymous private mapping at an address of the kernel's choice aliases
        // nothing.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        #[cfg(target_os = "linux")]
        // SAFETY: advice on our own mapping; a refusal changes nothing, so the result is not
        // needed.
        unsafe {
            libc::madvise(start, len, libc::MADV_HUGEPAGE);
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Self { start, len })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` maps `len` readable bytes (zero until written) owned by self, or dangles
        // for none.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, writable, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: exactly the mapping made in `reserve`; no borrow of it can be alive here.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_reservation_is_zero_and_writable_where_touched() {
        let mut region = Region::reserve(1 << 36).unwrap();
        assert_eq!(region.bytes()[1 << 35], 0);
        region.bytes_mut()[(1 << 36) - 1] = 7;
        assert_eq!(region.bytes()[(1 << 36) - 1], 7);
        assert!(Region::reserve(0).unwrap().bytes().is_empty());
    }

    #[test]
    fn an_impossible_reservation_is_an_error() {
        assert!(Region::reserve(usize::MAX / 2).is_err());
    }
}
