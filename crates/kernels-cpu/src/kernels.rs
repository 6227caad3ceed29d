//! Dispatch: one table of functions per instruction set.
//!
//! Invariant: a `&Kernels` can only be had for a variant that this processor runs. That is what
//! makes calling its functions sound, and why the fields are private to the crate.

use crate::bandwidth::ReadKernel;
use crate::cpu::{CpuError, Variant};
use crate::gemm::tile::GemmKernels;
use crate::ops::OpsKernels;
use crate::ops::gram::GramKernel;
use crate::{bandwidth, gemm, ops};

/// The kernels of one variant. Tests and benchmarks may hold several side by side.
#[derive(Debug)]
pub struct Kernels {
    variant: Variant,
    pub(crate) gemm: GemmKernels,
    pub(crate) ops: OpsKernels,
    pub(crate) gram: GramKernel,
    pub(crate) read: ReadKernel,
}

static SCALAR: Kernels = Kernels {
    variant: Variant::Scalar,
    gemm: gemm::scalar::KERNELS,
    ops: ops::scalar::KERNELS,
    gram: ops::gram::scalar,
    read: bandwidth::scalar::read,
};

#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = Kernels {
    variant: Variant::Avx2,
    gemm: gemm::avx2::KERNELS,
    ops: ops::avx2::KERNELS,
    gram: ops::gram::avx2,
    read: bandwidth::avx2::read,
};

#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = Kernels {
    variant: Variant::Avx512,
    gemm: gemm::avx512::KERNELS,
    ops: ops::AVX512,
    gram: ops::gram::avx512,
    read: bandwidth::avx512::read,
};

#[cfg(target_arch = "x86_64")]
static AMX: Kernels = Kernels {
    variant: Variant::Amx,
    gemm: gemm::amx::KERNELS,
    ops: ops::AVX512,
    gram: ops::gram::avx512,
    read: bandwidth::avx512::read,
};

impl Kernels {
    /// The kernels of a variant.
    ///
    /// # Errors
    /// If this machine cannot run it.
    pub fn for_variant(variant: Variant) -> Result<&'static Self, CpuError> {
        Ok(match variant.require()? {
            #[cfg(target_arch = "x86_64")]
            Variant::Avx2 => &AVX2,
            #[cfg(target_arch = "x86_64")]
            Variant::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Variant::Amx => &AMX,
            // Elsewhere `require` lets only the scalar variant through.
            _ => &SCALAR,
        })
    }

    /// The kernels of [`Variant::chosen`].
    ///
    /// # Errors
    /// If the environment asks for a variant that is unknown or cannot run here.
    pub fn chosen() -> Result<&'static Self, CpuError> {
        Self::for_variant(Variant::chosen()?)
    }

    pub fn variant(&self) -> Variant {
        self.variant
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// The kernels to test, or a printed note that this machine cannot.
    pub(crate) fn kernels_or_note(variant: Variant) -> Option<&'static Kernels> {
        let kernels = Kernels::for_variant(variant);
        if let Err(error) = &kernels {
            eprintln!("SKIPPED: {error}");
        }
        kernels.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_each_available_variant_is_its_own() {
        for variant in Variant::ALL {
            match Kernels::for_variant(variant) {
                Ok(kernels) => assert_eq!(kernels.variant(), variant),
                Err(error) => assert!(!variant.is_available(), "{error}"),
            }
        }
    }
}
