//! Matrix products of the backend: which way a product goes.

use super::constants::CudaVector;
use super::launches::{Bias, Round};
use super::rows::{CudaRows, grow};
use super::{CudaBackend, State};
use crate::error::{CudaError, Result};
use crate::gemm::{CudaMatrix, Product, Skinny, SkinnyProduct};
use crate::memory::Buffer;

impl CudaBackend {
    /// `out ← x · wᵀ`; `exact` keeps 16 bits of the activations' mantissa whatever the number of rows.
    pub(super) fn product(
        &self,
        state: &mut State,
        weight: &CudaMatrix,
        x: &CudaRows,
        out: &mut CudaRows,
        add: bool,
        exact: bool,
    ) -> Result<()> {
        let rows = x.count();
        if (weight.inputs, weight.outputs) != (x.width(), out.width()) {
            let detail = format!("{}→{} by {} × {}", x.width(), out.width(), weight.outputs, weight.inputs);
            return Err(CudaError::Shape { what: "a product", detail });
        }
        if !add {
            out.resize(&self.device, rows, true, false)?;
        }
        out.written();
        if rows == 0 {
            return Ok(());
        }
        if Skinny::takes(weight, rows) && x.values() != 0 {
            let (x, out) = (x.values(), out.values());
            let product = SkinnyProduct { rows, x, out, norm: None, add, gated: false };
            return self.skinny.enqueue(weight, &product);
        }
        let product = Product { rows, outputs: weight.outputs, inputs: weight.inputs, add };
        let State { cublaslt, high, low, .. } = state;
        let mut rounded = x.rounded();
        if rounded == 0 || exact {
            let count = rows * x.width();
            grow(&self.device, high, count * 2)?;
            if exact {
                grow(&self.device, low, count * 2)?;
            }
            rounded = high.as_ref().map_or(0, Buffer::address);
            let low = low.as_ref().filter(|_| exact).map_or(0, Buffer::address);
            self.launches.round(&Round { x: x.values(), high: rounded, low, count: count as u64 })?;
        }
        let weights = weight.weights.address();
        cublaslt.enqueue(product, weights, rounded, out.values())?;
        if exact {
            let low = low.as_ref().map_or(0, Buffer::address);
            cublaslt.enqueue(Product { add: true, ..product }, weights, low, out.values())?;
        }
        if let Some(bias) = &weight.bias {
            let (width, rows) = (weight.outputs as u32, rows as u32);
            self.launches.bias(&Bias { bias: bias.address(), out: out.values(), width, rows })?;
        }
        Ok(())
    }

    /// A product of few rows in one launch, with a norm of `x` before it and a gate behind it where asked: an operation
    /// without a result. `false`, and nothing done, if this one does not go so.
    pub(super) fn fuse(
        &self,
        norm: Option<(&CudaVector, f32)>,
        weight: &CudaMatrix,
        x: &CudaRows,
        out: &mut CudaRows,
        gated: bool,
    ) -> bool {
        let (rows, outputs) = (x.count(), out.width() * (1 + usize::from(gated)));
        let fits = rows > 0
            && x.values() != 0
            && Skinny::takes(weight, rows)
            && (!gated || Skinny::gates(weight))
            && (weight.inputs, weight.outputs) == (x.width(), outputs)
            && norm.is_none_or(|(n, _)| n.len == x.width());
        if fits {
            self.enqueue(|_| {
                out.resize(&self.device, rows, true, false)?;
                let norm = norm.map(|(n, eps)| (n.values.address(), eps));
                let (x, out) = (x.values(), out.values());
                self.skinny.enqueue(weight, &SkinnyProduct { rows, x, out, norm, add: false, gated })
            });
        }
        fits
    }
}
