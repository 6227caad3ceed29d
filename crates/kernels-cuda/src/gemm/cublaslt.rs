//! Large matrix products by cuBLASLt: BF16 or block-scaled FP8 operands, f32 sums, which may be
//! rounded at the end.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::library;
use crate::memory::{Buffer, DeviceSlice};
use crate::profile::CUBLASLT;
use cudarc::cublaslt::sys::{self, cublasLtMatmulDescAttributes_t as Attribute, cublasStatus_t};
use half::bf16;
use oscar_backend::FP8_BLOCK;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::mem::size_of_val;
use std::ptr::null_mut;

/// Bytes for algorithms that split the inner dimension; NVIDIA recommends this for Hopper.
pub(crate) const WORKSPACE: usize = 32 << 20;

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

/// Block-scaled products take rows in groups of this size, and the scales of weights too.
pub(crate) const ROW_GROUP: usize = 4;

/// FP8 codes and their scales.
pub(crate) struct ScaledFp8<'a> {
    pub codes: DeviceSlice<'a, u8>,
    pub scales: DeviceSlice<'a, f32>,
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
    /// By product, whether its sums are rounded, and whether its operands are FP8.
    plans: HashMap<(Product, bool, bool), Plan>,
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
        self.check_sizes(product, weights.len(), x.len(), &out)?;
        // SAFETY: the operands have the product's sizes (checked).
        unsafe { self.run(product, weights.ptr().address(), x.ptr().address(), out, None) }
    }

    /// Enqueues a product of FP8 matrices with a scale for 128 × 128 weights and for 128 inputs of a
    /// row. The number of rows must be a multiple of [`ROW_GROUP`].
    pub fn enqueue_fp8(
        &mut self,
        product: Product,
        weights: &ScaledFp8<'_>,
        x: &ScaledFp8<'_>,
        out: Sums<'_>,
    ) -> Result<()> {
        self.check_sizes(product, weights.codes.len(), x.codes.len(), &out)?;
        let columns = product.inputs.div_ceil(FP8_BLOCK);
        let scales = product.outputs.div_ceil(FP8_BLOCK) * columns.next_multiple_of(ROW_GROUP);
        if weights.scales.len() < scales
            || x.scales.len() < columns * product.rows
            || !product.rows.is_multiple_of(ROW_GROUP)
        {
            let found = (weights.scales.len(), x.scales.len());
            return Err(CudaError::Shape {
                what: "a product",
                detail: format!("{product:?}, scales {found:?}"),
            });
        }
        let scales = (weights.scales.ptr().address(), x.scales.ptr().address());
        // SAFETY: operands and scales have the product's sizes (checked).
        unsafe {
            self.run(product, weights.codes.ptr().address(), x.codes.ptr().address(), out, Some(scales))
        }
    }

    fn check_sizes(&self, product: Product, weights: usize, x: usize, out: &Sums<'_>) -> Result<()> {
        if product.fits(weights, x, out.len()) {
            return Ok(());
        }
        let detail = format!("{product:?} of {weights}, {x} and {} elements", out.len());
        Err(CudaError::Shape { what: "a product", detail })
    }

    /// # Safety
    /// `weights` and `x` must be addresses of operands of the product's sizes: BF16, or FP8 with these
    /// scales. So must `out` be.
    unsafe fn run(
        &mut self,
        product: Product,
        weights: u64,
        x: u64,
        out: Sums<'_>,
        scales: Option<(u64, u64)>,
    ) -> Result<()> {
        self.device.flush()?;
        self.device.enter()?;
        let rounded = matches!(out, Sums::Bf16(_));
        let key = (product, rounded, scales.is_some());
        if !self.plans.contains_key(&key) {
            let plan = self.plan(product, rounded, scales)?;
            self.plans.insert(key, plan);
        }
        let plan = &self.plans[&key];
        if let Some(scales) = scales {
            plan.set_scales(scales)?;
        }
        let (alpha, beta) = (1f32, if product.add { 1f32 } else { 0f32 });
        let out = out.address();
        let enqueue = || {
            // SAFETY: descriptors of this product, operands of its sizes (the caller's promise), our
            // own workspace and stream.
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
    fn plan(&self, p: Product, rounded: bool, scales: Option<(u64, u64)>) -> Result<Plan> {
        use sys::cublasLtMatmulMatrixScale_t as Scale;
        use sys::cudaDataType_t::{CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_32F};
        let (rows, outputs, inputs, stride) =
            (p.rows as u64, p.outputs as u64, p.inputs as u64, p.stride as i64);
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let layout = |kind, rows, columns, stride| {
            let mut layout = null_mut();
            // SAFETY: one out-parameter.
            let made = unsafe { sys::cublasLtMatrixLayoutCreate(&mut layout, kind, rows, columns, stride) };
            check("cublasLtMatrixLayoutCreate", made).map(|()| layout)
        };
        let operand = if scales.is_some() { CUDA_R_8F_E4M3 } else { CUDA_R_16BF };
        let mut plan = Plan {
            operation: null_mut(),
            weights: layout(operand, inputs, outputs, inputs as i64)?,
            x: layout(operand, inputs, rows, inputs as i64)?,
            out: layout(if rounded { CUDA_R_16BF } else { CUDA_R_32F }, outputs, rows, stride)?,
            // SAFETY: a plain struct of numbers.
            algorithm: unsafe { std::mem::zeroed() },
        };
        // SAFETY: one out-parameter.
        check("cublasLtMatmulDescCreate", unsafe {
            sys::cublasLtMatmulDescCreate(&mut plan.operation, compute, CUDA_R_32F)
        })?;
        // CUBLAS_OP_T; the enum belongs to the bindings of another library.
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &1i32)?;
        if let Some(scales) = scales {
            let (blocks, vectors) = (
                Scale::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
                Scale::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
            );
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &(blocks as i32))?;
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &(vectors as i32))?;
            plan.set_scales(scales)?;
        }
        plan.algorithm = self.choose(&plan, p)?;
        Ok(plan)
    }

    /// The algorithm that the library recommends.
    fn choose(&self, plan: &Plan, p: Product) -> Result<sys::cublasLtMatmulAlgo_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let mut preference = null_mut();
        let mut found = 0;
        let mut results = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: out-parameters of the right types; an attribute with its size; one result is
        // requested, and read only if one came.
        unsafe {
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
                plan.operation,
                plan.weights,
                plan.x,
                plan.out,
                plan.out,
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
            Ok(results.assume_init().algo)
        }
    }
}

impl Plan {
    /// Addresses of the scales of weights and of rows. The library recommends no algorithm without.
    fn set_scales(&self, (weights, rows): (u64, u64)) -> Result<()> {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &weights)?;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &rows)
    }

    fn set<T>(&self, attribute: Attribute, value: &T) -> Result<()> {
        // SAFETY: our own descriptor; an attribute with its size.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                self.operation,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of_val(value),
            )
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: our own descriptors, dropped once.
        unsafe {
            if !self.operation.is_null() {
                let _ = sys::cublasLtMatmulDescDestroy(self.operation);
            }
            for layout in [self.weights, self.x, self.out] {
                let _ = sys::cublasLtMatrixLayoutDestroy(layout);
            }
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        self.plans.clear();
        // SAFETY: our own handle, dropped once.
        unsafe {
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
