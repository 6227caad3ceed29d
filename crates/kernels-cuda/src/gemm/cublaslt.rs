//! Large matrix products by cuBLASLt: BF16 operands, f32 sums, which may be rounded at the end.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::library;
use crate::memory::{Buffer, DeviceSlice};
use crate::profile::CUBLASLT;
use cudarc::cublaslt::sys::{self, cublasStatus_t};
use half::bf16;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::mem::size_of_val;
use std::ptr::null_mut;

/// Bytes for algorithms that split the inner dimension; NVIDIA recommends this for Hopper.
const WORKSPACE: usize = 32 << 20;

/// `out[rows][outputs] = x[rows][inputs] · w[outputs][inputs]ᵀ`, all row-major; rows of `out` are
/// `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub rows: usize,
    pub outputs: usize,
    pub inputs: usize,
    pub stride: usize,
    /// Adds to `out`.
    pub add: bool,
}

/// Where a product goes.
#[derive(Clone, Copy)]
pub(crate) enum Sums<'a> {
    F32(DeviceSlice<'a, f32>),
    /// Rounded.
    Bf16(DeviceSlice<'a, bf16>),
}

impl<'a> Sums<'a> {
    fn len(&self) -> usize {
        match self {
            Self::F32(out) => out.len(),
            Self::Bf16(out) => out.len(),
        }
    }

    fn address(&self) -> u64 {
        match self {
            Self::F32(out) => out.ptr().address(),
            Self::Bf16(out) => out.ptr().address(),
        }
    }

    /// Everything from element `first` on.
    pub fn from(&self, first: usize) -> Result<Self> {
        Ok(match self {
            Self::F32(out) => Self::F32(out.part(first..out.len())?),
            Self::Bf16(out) => Self::Bf16(out.part(first..out.len())?),
        })
    }
}

impl Product {
    /// Whether slices of these lengths hold the operands.
    fn fits(self, weights: usize, x: usize, out: usize) -> bool {
        let Self { rows, outputs, inputs, stride, .. } = self;
        let some = rows > 0 && outputs > 0 && inputs > 0;
        some && outputs * inputs <= weights
            && rows * inputs <= x
            && outputs <= stride
            && (rows - 1) * stride + outputs <= out
    }
}

/// The library, with the algorithms chosen so far.
pub(crate) struct CublasLt {
    device: Device,
    handle: sys::cublasLtHandle_t,
    workspace: Buffer,
    /// By product, and whether its sums are rounded.
    plans: HashMap<(Product, bool), Plan>,
}

struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: handles of the library may be used from any thread, by one at a time: `enqueue` takes
// `&mut`.
unsafe impl Send for CublasLt {}

impl CublasLt {
    pub fn open(device: &Device) -> Result<Self> {
        library::CUBLASLT.open()?;
        device.enter()?;
        let mut handle = null_mut();
        // SAFETY: the library is open; one out-parameter.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&mut handle) })?;
        let workspace = device.alloc(WORKSPACE, "the workspace of cuBLASLt")?;
        Ok(Self { device: device.clone(), handle, workspace, plans: HashMap::new() })
    }

    /// Enqueues a product of matrices that begin at the start of these slices.
    pub fn enqueue(
        &mut self,
        product: Product,
        weights: DeviceSlice<'_, bf16>,
        x: DeviceSlice<'_, bf16>,
        out: Sums<'_>,
    ) -> Result<()> {
        if !product.fits(weights.len(), x.len(), out.len()) {
            let detail = format!("{product:?} of {}, {} and {} elements", weights.len(), x.len(), out.len());
            return Err(CudaError::Shape { what: "a product", detail });
        }
        self.device.flush()?;
        self.device.enter()?;
        let key = (product, matches!(out, Sums::Bf16(_)));
        if !self.plans.contains_key(&key) {
            let plan = self.plan(product, key.1)?;
            self.plans.insert(key, plan);
        }
        let plan = &self.plans[&key];
        let (alpha, beta) = (1f32, if product.add { 1f32 } else { 0f32 });
        let (weights, x, out) = (weights.ptr().address(), x.ptr().address(), out.address());
        let enqueue = || {
            // SAFETY: descriptors of this product, operands of its sizes (checked), our own workspace
            // and stream.
            check("cublasLtMatmul", unsafe {
                sys::cublasLtMatmul(
                    self.handle,
                    plan.operation,
                    std::ptr::from_ref(&alpha).cast(),
                    weights as *const c_void,
                    plan.weights,
                    x as *const c_void,
                    plan.x,
                    std::ptr::from_ref(&beta).cast(),
                    out as *const c_void,
                    plan.out,
                    out as *mut c_void,
                    plan.out,
                    &plan.algorithm,
                    self.workspace.ptr::<u8>().address() as *mut c_void,
                    WORKSPACE,
                    self.device.stream().cast(),
                )
            })
        };
        self.device.timed(&mut self.device.recorder(), CUBLASLT, enqueue)
    }

    /// The library counts in columns: our row-major `out` is its column-major `outputs × rows`, so
    /// it multiplies the transposed weights with `x`.
    fn plan(&self, p: Product, rounded: bool) -> Result<Plan> {
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
        let (rows, outputs, inputs, stride) =
            (p.rows as u64, p.outputs as u64, p.inputs as u64, p.stride as i64);
        // CUBLAS_OP_T; the enum belongs to the bindings of another library.
        let transposed: i32 = 1;
        let (mut operation, mut weights, mut x, mut out, mut preference) =
            (null_mut(), null_mut(), null_mut(), null_mut(), null_mut());
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut found = 0;
        let mut results = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: out-parameters of the right types; attributes with their sizes; one result is
        // requested, and read only if one came. There are as many descriptors as shapes in use.
        unsafe {
            check(
                "cublasLtMatmulDescCreate",
                sys::cublasLtMatmulDescCreate(&mut operation, compute, CUDA_R_32F),
            )?;
            check(
                "cublasLtMatmulDescSetAttribute",
                sys::cublasLtMatmulDescSetAttribute(
                    operation,
                    CUBLASLT_MATMUL_DESC_TRANSA,
                    std::ptr::from_ref(&transposed).cast(),
                    size_of_val(&transposed),
                ),
            )?;
            let layout = |at: &mut sys::cublasLtMatrixLayout_t, kind, rows, columns, stride| {
                check(
                    "cublasLtMatrixLayoutCreate",
                    sys::cublasLtMatrixLayoutCreate(at, kind, rows, columns, stride),
                )
            };
            layout(&mut weights, CUDA_R_16BF, inputs, outputs, inputs as i64)?;
            layout(&mut x, CUDA_R_16BF, inputs, rows, inputs as i64)?;
            let sums = if rounded { CUDA_R_16BF } else { CUDA_R_32F };
            layout(&mut out, sums, outputs, rows, stride)?;
            check("cublasLtMatmulPreferenceCreate", sys::cublasLtMatmulPreferenceCreate(&mut preference))?;
            check(
                "cublasLtMatmulPreferenceSetAttribute",
                sys::cublasLtMatmulPreferenceSetAttribute(
                    preference,
                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    std::ptr::from_ref(&WORKSPACE).cast(),
                    size_of_val(&WORKSPACE),
                ),
            )?;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                operation,
                weights,
                x,
                out,
                out,
                preference,
                1,
                results.as_mut_ptr(),
                &mut found,
            );
            let _ = sys::cublasLtMatmulPreferenceDestroy(preference);
            check("cublasLtMatmulAlgoGetHeuristic", status)?;
            if found == 0 {
                return Err(CudaError::Unsupported(format!("cuBLASLt knows no way to multiply {p:?}")));
            }
            Ok(Plan { operation, weights, x, out, algorithm: results.assume_init().algo })
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: our own handle and descriptors, dropped once.
        unsafe {
            for plan in self.plans.values() {
                let _ = sys::cublasLtMatmulDescDestroy(plan.operation);
                for layout in [plan.weights, plan.x, plan.out] {
                    let _ = sys::cublasLtMatrixLayoutDestroy(layout);
                }
            }
            let _ = sys::cublasLtDestroy(self.handle);
        }
    }
}

fn check(call: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: returns a static string for every status.
    let message = unsafe { CStr::from_ptr(sys::cublasLtGetStatusString(status)) };
    Err(CudaError::Library { call, message: message.to_string_lossy().into_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_that_are_too_short_are_refused() {
        let product = Product { rows: 3, outputs: 4, inputs: 8, stride: 6, add: false };
        // Two strides and one row of outputs.
        assert!(product.fits(32, 24, 16));
        assert!(!product.fits(31, 24, 16) && !product.fits(32, 23, 16) && !product.fits(32, 24, 15));
        assert!(!Product { stride: 3, ..product }.fits(100, 100, 100));
        assert!(!Product { rows: 0, ..product }.fits(100, 100, 100));
    }
}
