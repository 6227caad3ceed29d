//! Matrix products of the backend: which way a product goes.

use super::launches::{Bias, Round};
use super::rows::{CudaRows, grow};
use super::{CudaBackend, State};
use crate::error::{CudaError, Result};
use crate::gemm::{CudaMatrix, Product, Skinny, SkinnyProduct, SkinnyShape};
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
            let product = SkinnyProduct { rows, x: x.values(), out: out.values(), add, gated: false };
            return self.skinny.enqueue(self.skinny_shape(weight, rows), weight, &product);
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

    fn skinny_shape(&self, weight: &CudaMatrix, rows: usize) -> SkinnyShape {
        SkinnyShape::choose(rows, weight.outputs, self.device.properties().multiprocessors)
    }

    /// Product and gate in one launch: for few rows. `false` if these are not.
    pub(super) fn gated(&self, x: &CudaRows, weight: &CudaMatrix, out: &mut CudaRows) -> Result<bool> {
        let rows = x.count();
        let fits = rows > 0
            && x.values() != 0
            && Skinny::takes(weight, rows)
            && Skinny::gates(weight)
            && (weight.inputs, weight.outputs) == (x.width(), 2 * out.width());
        if fits {
            out.resize(&self.device, rows, true, false)?;
            let product = SkinnyProduct { rows, x: x.values(), out: out.values(), add: false, gated: true };
            self.skinny.enqueue(self.skinny_shape(weight, rows), weight, &product)?;
        }
        Ok(fits)
    }
}
