//! Memory that costs nothing until it is written: address space reserved for pages.

use memmap2::{MmapMut, MmapOptions};
use std::io;

/// A zeroed, page-aligned byte range whose memory the system supplies on first touch; `None` is
/// empty.
pub struct Region(Option<MmapMut>);

impl Region {
    pub fn reserve(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self(None));
        }
        let memory = MmapOptions::new().len(len).no_reserve_swap().map_anon()?;
        // A refusal changes nothing, so the result is not needed.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Ok(Self(Some(memory)))
    }

    pub fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
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
