//! The floating-point mode the kernels run in: subnormal numbers are flushed to zero.
//!
//! A softmax tail is full of subnormals, and a processor may need a hundred cycles for each. BF16
//! dot-product and tile instructions flush them in any case, so flushing everywhere is also what
//! makes the variants agree. Rounding stays to nearest even; nothing else of the mode changes.

/// Runs `work` with subnormals flushed on this thread, and restores the thread's mode afterwards.
pub fn with_ftz<R>(work: impl FnOnce() -> R) -> R {
    struct Restore(Mode);
    impl Drop for Restore {
        fn drop(&mut self) {
            set_mode(self.0);
        }
    }
    let before = mode();
    if before & FLUSH == FLUSH {
        return work();
    }
    let _restore = Restore(before);
    set_mode(before | FLUSH);
    work()
}

/// Flushes subnormals on this thread from here on: for threads that only run kernels.
pub fn flush_subnormals() {
    set_mode(mode() | FLUSH);
}

/// Whether this thread flushes subnormals.
pub fn flushes_subnormals() -> bool {
    FLUSH != 0 && mode() & FLUSH == FLUSH
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::asm;

    pub(super) type Mode = u32;
    /// MXCSR: flush results to zero (bit 15), treat subnormal inputs as zero (bit 6).
    pub(super) const FLUSH: Mode = 1 << 15 | 1 << 6;

    pub(super) fn mode() -> Mode {
        let mut value: u32 = 0;
        // SAFETY: stores the 32-bit MXCSR register to a local of that size; SSE is part of x86-64.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
        value
    }

    pub(super) fn set_mode(value: Mode) {
        // SAFETY: loads MXCSR from a local. The value was read from MXCSR and differs in the two
        // flush bits only, so rounding and exception masks, which compiled code relies on, are as
        // before.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use std::arch::asm;

    pub(super) type Mode = u64;
    /// FPCR: flush to zero (bit 24), inputs and results.
    pub(super) const FLUSH: Mode = 1 << 24;

    pub(super) fn mode() -> Mode {
        let value: u64;
        // SAFETY: reads the floating-point control register, which user code may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nomem, nostack, preserves_flags)) };
        value
    }

    pub(super) fn set_mode(value: Mode) {
        // SAFETY: writes back what `mode` read, differing in the flush bit only.
        unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    pub(super) type Mode = u32;
    /// No such mode is known here: kernels run with subnormals.
    pub(super) const FLUSH: Mode = 0;

    pub(super) fn mode() -> Mode {
        0
    }

    pub(super) fn set_mode(_: Mode) {}
}

use arch::{FLUSH, Mode, mode, set_mode};

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    fn halve_the_smallest_normal() -> f32 {
        black_box(f32::MIN_POSITIVE) * black_box(0.5)
    }

    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn with_ftz_flushes_inside_and_restores_outside() {
        assert!(halve_the_smallest_normal() > 0.0);
        with_ftz(|| {
            assert!(flushes_subnormals());
            assert_eq!(halve_the_smallest_normal(), 0.0);
            with_ftz(|| assert!(flushes_subnormals()));
            assert!(flushes_subnormals());
        });
        assert!(!flushes_subnormals());
        assert!(halve_the_smallest_normal() > 0.0);
    }

    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn with_ftz_restores_after_a_panic() {
        let caught = std::panic::catch_unwind(|| with_ftz(|| panic!("expected by the test")));
        assert!(caught.is_err());
        assert!(!flushes_subnormals());
    }
}
