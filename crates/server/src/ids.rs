//! Names for requests and seeds for samplers.
//!
//! Invariant: ids are unique within a process and unlikely to repeat across processes. They are no
//! secrets.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Makes ids from the process's random keys and a counter.
#[derive(Debug, Default)]
pub struct IdSource {
    random: RandomState,
    count: AtomicU64,
}

impl IdSource {
    /// 32 hexadecimal digits: milliseconds first, so that ids sort by time, then noise.
    pub fn name(&self) -> String {
        format!("{:012x}{:04x}{:016x}", unix_millis() & 0xFFFF_FFFF_FFFF, self.noise() & 0xFFFF, self.noise())
    }

    /// A fresh seed, small enough that adding a choice's index cannot overflow.
    pub fn seed(&self) -> u64 {
        self.noise() >> 1
    }

    /// 64 bits that are unlikely to repeat.
    pub fn noise(&self) -> u64 {
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.count.fetch_add(1, Ordering::Relaxed));
        hasher.finish()
    }
}

pub fn unix_seconds() -> u64 {
    unix_millis() / 1000
}

fn unix_millis() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_well_formed() {
        let ids = IdSource::default();
        let names: std::collections::HashSet<String> = (0..1000).map(|_| ids.name()).collect();
        assert_eq!(names.len(), 1000);
        assert!(names.iter().all(|name| name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit())));
    }
}
