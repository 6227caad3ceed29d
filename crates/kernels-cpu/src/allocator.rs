//! Memory that the allocator holds back.

/// Gives memory that nobody uses back to the system, where the allocator keeps it (glibc): after a
/// burst of large requests a process would otherwise stay as large as it ever was. Takes
/// milliseconds.
pub fn release_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim takes no pointer and may be called from any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    #[test]
    fn freed_memory_goes_back() {
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
        };
        // Small pieces with one that stays above them: the allocator cannot return them by itself.
        let pieces: Vec<Vec<u8>> = (0..64 << 10).map(|_| vec![1; 1000]).collect();
        let last = vec![1u8; 1000];
        let full = resident();
        drop(pieces);
        super::release_free_memory();
        assert!(resident() + (40 << 20) < full, "{} of {full} bytes are still there", resident());
        drop(last);
    }
}
