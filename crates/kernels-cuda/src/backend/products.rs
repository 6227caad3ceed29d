//! Matrix products of the backend: which way a product goes.

use super::constants::CudaVector;
use super::launches::{Bias, Round};
use super::rows::{CudaRows, grow};
use super::{CudaBackend, State};
use crate::error::{CudaError, Result};
use crate::gemm::{CudaMatrix, Fp8Kernels, Product, Skinny, SkinnyProduct};
use crate::memory::Buffer;
use oscar_backend::WeightFormat;

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
            return self.skinny(weight)?.enqueue(weight, &product);
        }
        let State { cublaslt, high, low, expanded, .. } = state;
        let mut rounded = x.rounded();
        if rounded == 0 || exact {
            let count = rows * x.width();
            grow(&self.device, high, count * 2, "activations")?;
            if exact {
                grow(&self.device, low, count * 2, "activations")?;
            }
            rounded = high.as_ref().map_or(0, Buffer::address);
            let low = low.as_ref().filter(|_| exact).map_or(0, Buffer::address);
            self.launches.round(&Round { x: x.values(), high: rounded, low, count: count as u64 })?;
        }
        for panel in weight.panels() {
            let (outputs, inputs, stride) = (panel.len(), weight.inputs, weight.outputs);
            let weights = self.panel(weight, &panel, expanded)?;
            let out = out.values() + 4 * panel.start as u64;
            let product = Product { rows, outputs, inputs, stride, add };
            cublaslt.enqueue(product, weights, rounded, out)?;
            if exact {
                let low = low.as_ref().map_or(0, Buffer::address);
                cublaslt.enqueue(Product { add: true, ..product }, weights, low, out)?;
            }
        }
        if let Some(bias) = &weight.bias {
            let (width, rows) = (weight.outputs as u32, rows as u32);
            self.launches.bias(&Bias { bias: bias.address(), out: out.values(), width, rows })?;
        }
        Ok(())
    }

    /// The kernels for few rows and this matrix.
    pub(crate) fn skinny(&self, weight: &CudaMatrix) -> Result<&Skinny> {
        match weight.format() {
            WeightFormat::Bf16 => Ok(&self.skinny),
            WeightFormat::Fp8 => Ok(&self.fp8_kernels()?.skinny),
        }
    }

    /// The kernels of FP8 weights; they are compiled when the first such matrix comes.
    pub(super) fn fp8_kernels(&self) -> Result<&Fp8Kernels> {
        if let Some(kernels) = self.fp8.get() {
            return Ok(kernels);
        }
        let kernels = Fp8Kernels::new(&self.device, &self.kernels)?;
        Ok(self.fp8.get_or_init(|| kernels))
    }

    /// Address of some outputs of a matrix in BF16: its own, or room that they are expanded into.
    pub(crate) fn panel(
        &self,
        weight: &CudaMatrix,
        outputs: &std::ops::Range<usize>,
        expanded: &mut Option<Buffer>,
    ) -> Result<u64> {
        if weight.format() == WeightFormat::Bf16 {
            return Ok(weight.weights.address() + 2 * (outputs.start * weight.inputs) as u64);
        }
        grow(&self.device, expanded, 2 * outputs.len() * weight.inputs, "FP8 weights expanded for a prompt")?;
        let Some(room) = expanded else { return Ok(0) };
        self.fp8_kernels()?.expand(weight, outputs, room)?;
        Ok(room.address())
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
                let product = SkinnyProduct { rows, x, out, norm, add: false, gated };
                self.skinny(weight)?.enqueue(weight, &product)
            });
        }
        fits
    }
}
