//! Which instruction sets this crate has kernels for, and which one this process uses.
//!
//! Invariant: a choice is made once, and a wish that cannot be met is an error that names the
//! alternatives. Nothing ever falls back to a slower variant silently.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use thiserror::Error;

/// Environment variable that overrides the choice, by variant name.
pub const OVERRIDE: &str = "OSCAR_CPU";

/// An instruction set with kernels of its own, slowest first.
///
/// All names exist on every architecture, so that a wish can be understood and refused with a
/// reason; off x86-64 only [`Variant::Scalar`] is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Variant {
    /// Portable code: the specification of every other variant.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ, VNNI, BF16 and VBMI.
    Avx512,
    /// AMX tiles (BF16 and INT8) on top of [`Variant::Avx512`].
    Amx,
}

/// Why a variant could not be chosen.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CpuError {
    #[error("unknown CPU variant '{name}' (from {OVERRIDE}?); available here: {available}")]
    Unknown { name: String, available: String },
    #[error("CPU variant '{variant}' is not available on this machine; available here: {available}")]
    Unavailable { variant: Variant, available: String },
}

impl Variant {
    /// Every variant, slowest first.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Amx];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// Whether this processor and operating system can run the variant. Detected once.
    pub fn is_available(self) -> bool {
        static DETECTED: OnceLock<[bool; 4]> = OnceLock::new();
        DETECTED.get_or_init(|| Self::ALL.map(detect))[self as usize]
    }

    /// The variants this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|variant| variant.is_available())
    }

    /// The fastest variant this machine can run.
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self::Scalar)
    }

    /// The variant asked for by name, or the best one if none is.
    pub fn select(wish: Option<&str>) -> Result<Self, CpuError> {
        match wish {
            None => Ok(Self::best()),
            Some(name) => name.parse::<Self>()?.require(),
        }
    }

    /// The variant of this process: that of the environment variable `OSCAR_CPU`, or the best.
    /// Decided once.
    pub fn chosen() -> Result<Self, CpuError> {
        static CHOICE: OnceLock<Result<Variant, CpuError>> = OnceLock::new();
        CHOICE
            .get_or_init(|| {
                let wish = std::env::var_os(OVERRIDE).map(|value| value.to_string_lossy().into_owned());
                Self::select(wish.as_deref())
            })
            .clone()
    }

    /// The variant itself if it can run here.
    pub fn require(self) -> Result<Self, CpuError> {
        if self.is_available() {
            Ok(self)
        } else {
            Err(CpuError::Unavailable { variant: self, available: available_names() })
        }
    }

    /// One line for the start banner: the variant and what it was chosen among.
    pub fn describe(self) -> String {
        format!("{} (available: {})", self, available_names())
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Variant {
    type Err = CpuError;

    fn from_str(name: &str) -> Result<Self, CpuError> {
        Self::ALL
            .into_iter()
            .find(|variant| variant.name() == name)
            .ok_or_else(|| CpuError::Unknown { name: name.to_owned(), available: available_names() })
    }
}

fn available_names() -> String {
    Variant::available().map(Variant::name).collect::<Vec<_>>().join(", ")
}

#[cfg(not(target_arch = "x86_64"))]
fn detect(variant: Variant) -> bool {
    variant == Variant::Scalar
}

#[cfg(target_arch = "x86_64")]
fn detect(variant: Variant) -> bool {
    match variant {
        Variant::Scalar => true,
        Variant::Avx2 => {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        }
        Variant::Avx512 => {
            detect(Variant::Avx2)
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vnni")
                && is_x86_feature_detected!("avx512bf16")
                && is_x86_feature_detected!("avx512vbmi")
        }
        Variant::Amx => detect(Variant::Avx512) && amx::cpu_has_tiles() && amx::kernel_grants_tiles(),
    }
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    /// CPUID leaf 7 EDX: AMX-BF16 (22), AMX-TILE (24), AMX-INT8 (25).
    const AMX_BITS: u32 = 1 << 22 | 1 << 24 | 1 << 25;

    pub(super) fn cpu_has_tiles() -> bool {
        // `is_x86_feature_detected!("amx-*")` is not stable yet. SAFETY: every x86-64 processor has
        // CPUID; leaf 7 is only read if leaf 0 says that it exists. (Newer compilers call these
        // intrinsics safe.)
        #[allow(unused_unsafe)]
        unsafe {
            __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & AMX_BITS == AMX_BITS
        }
    }

    /// Asks Linux to let this process use the 8 KiB of tile registers; without it the first tile
    /// instruction is fatal. The permission holds for all threads of the process.
    #[cfg(target_os = "linux")]
    pub(super) fn kernel_grants_tiles() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: arch_prctl takes two integers here and touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn kernel_grants_tiles() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_are_ordered_slowest_first_and_names_round_trip() {
        assert!(Variant::ALL.is_sorted());
        for variant in Variant::ALL {
            assert_eq!(variant.name().parse(), Ok(variant));
            assert_eq!(Variant::ALL[variant as usize], variant);
        }
    }

    #[test]
    fn scalar_is_available_everywhere_and_best_is_available() {
        assert!(Variant::Scalar.is_available());
        assert!(Variant::best().is_available());
        assert_eq!(Variant::select(None), Ok(Variant::best()));
    }

    #[test]
    fn amx_implies_avx512_implies_avx2() {
        assert!(!Variant::Amx.is_available() || Variant::Avx512.is_available());
        assert!(!Variant::Avx512.is_available() || Variant::Avx2.is_available());
    }

    #[test]
    fn unknown_name_is_refused_with_the_alternatives() {
        for name in ["", "AVX2", "sse9", "amx "] {
            let message = Variant::select(Some(name)).unwrap_err().to_string();
            assert!(message.contains(&format!("'{name}'")) && message.contains("scalar"), "{message}");
        }
    }

    #[test]
    fn unavailable_variant_is_refused_not_replaced() {
        for variant in Variant::ALL {
            let selected = Variant::select(Some(variant.name()));
            if variant.is_available() {
                assert_eq!(selected, Ok(variant));
            } else {
                let message = selected.unwrap_err().to_string();
                assert!(message.contains(variant.name()) && message.contains("scalar"), "{message}");
            }
        }
    }

    #[test]
    fn description_names_choice_and_alternatives() {
        let line = Variant::Scalar.describe();
        assert!(line.starts_with("scalar (available: scalar"), "{line}");
    }
}
