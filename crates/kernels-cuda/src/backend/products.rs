//! Matrix products: which kernels a product runs.

use super::constants::CudaVector;
use super::launches::{Bias, RmsNorm, Round, Swiglu};
use super::rows::{CudaRows, grow};
use super::{CudaBackend, State};
use crate::error::{CudaError, Result};
use crate::gemm::{CudaMatrix, Fp8Kernels, Product as Gemm, Skinny, SkinnyProduct};
use crate::memory::Buffer;
use oscar_backend::{Output, Product, WeightFormat};

impl CudaBackend {
    /// Norm, product and gate: in one launch if there are few rows, otherwise one after the other.
    pub(super) fn product(
        &self,
        state: &mut State,
        product: Product<'_, Self>,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<()> {
        let Product { weight, norm, output } = product;
        let (rows, gated) = (x.count(), output == Output::Gated);
        let outputs = if gated { 2 * out.width() } else { out.width() };
        let fits = norm.is_none_or(|(norm, _)| norm.len == x.width())
            && (output != Output::Add || out.count() == rows && (rows == 0 || out.values() != 0));
        if (weight.inputs, weight.outputs) != (x.width(), outputs) || !fits {
            let detail =
                format!("{rows} × {} to {outputs} by {} × {}", x.width(), weight.outputs, weight.inputs);
            return Err(CudaError::Shape { what: "a product", detail });
        }
        // The norm before the output head has its own launch: fusing it was not tried.
        let fuses = norm.is_none() || matches!(output, Output::Replace | Output::Gated);
        let gates = !gated || Skinny::gates(weight);
        if rows > 0 && x.values() != 0 && Skinny::takes(weight, rows) && fuses && gates {
            return self.skinny_product(weight, norm, x, out, output);
        }
        match norm {
            None if gated => {
                let mut gate_up = std::mem::take(&mut state.gate_up);
                let done = self
                    .linear(state, weight, x, gate_up.set_width(outputs), Output::Replace)
                    .and_then(|()| self.swiglu(&gate_up, out));
                state.gate_up = gate_up;
                done
            }
            None => self.linear(state, weight, x, out, output),
            Some((norm, eps)) => {
                let mut normed = std::mem::take(&mut state.normed);
                let done = self
                    .rms_norm(x, norm, eps, normed.set_width(x.width()))
                    .and_then(|()| self.product(state, Product { weight, norm: None, output }, &normed, out));
                state.normed = normed;
                done
            }
        }
    }

    /// A product of few rows in one launch, with the norm before it and the gate behind it.
    fn skinny_product(
        &self,
        weight: &CudaMatrix,
        norm: Option<(&CudaVector, f32)>,
        x: &CudaRows,
        out: &mut CudaRows,
        output: Output,
    ) -> Result<()> {
        let add = output == Output::Add;
        if !add {
            out.resize(&self.device, x.count(), true, false)?;
        }
        out.drop_rounded();
        let product = SkinnyProduct {
            rows: x.count(),
            x: x.values(),
            out: out.values(),
            norm: norm.map(|(norm, eps)| (norm.values.address(), eps)),
            add,
            gated: output == Output::Gated,
        };
        self.skinny(weight)?.enqueue(weight, &product)
    }

    /// A product of many rows, or of a shape that the kernel for few rows does not take, by cuBLASLt.
    /// [`Output::Logits`] keeps 16 bits of the activations' mantissa.
    fn linear(
        &self,
        state: &mut State,
        weight: &CudaMatrix,
        x: &CudaRows,
        out: &mut CudaRows,
        output: Output,
    ) -> Result<()> {
        let (rows, add, exact) = (x.count(), output == Output::Add, output == Output::Logits);
        if rows > 0 && x.values() != 0 && Skinny::takes(weight, rows) {
            return self.skinny_product(weight, None, x, out, output);
        }
        if !add {
            out.resize(&self.device, rows, true, false)?;
        }
        out.drop_rounded();
        if rows == 0 {
            return Ok(());
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
            let product = Gemm { rows, outputs, inputs, stride, add };
            cublaslt.enqueue(product, weights, rounded, out)?;
            if exact {
                let low = low.as_ref().map_or(0, Buffer::address);
                cublaslt.enqueue(Gemm { add: true, ..product }, weights, low, out)?;
            }
        }
        if let Some(bias) = &weight.bias {
            let (width, rows) = (weight.outputs as u32, rows as u32);
            self.launches.bias(&Bias { bias: bias.address(), out: out.values(), width, rows })?;
        }
        Ok(())
    }

    pub(super) fn rms_norm(
        &self,
        x: &CudaRows,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaRows,
    ) -> Result<()> {
        if weight.len != x.width() || out.width() != x.width() {
            let detail = format!("{} weights for rows of {}", weight.len, x.width());
            return Err(CudaError::Shape { what: "a norm", detail });
        }
        out.resize(&self.device, x.count(), true, Self::rounds(x.count()))?;
        let p = RmsNorm {
            x: x.values(),
            weight: weight.values.address(),
            out: out.values(),
            rounded: out.rounded(),
            width: x.width() as u32,
            eps,
        };
        self.launches.rms_norm(x.count(), &p)
    }

    /// Rows of `gate_up` are `[gate | up]`; `out ← silu(gate) · up`.
    pub(super) fn swiglu(&self, gate_up: &CudaRows, out: &mut CudaRows) -> Result<()> {
        if gate_up.width() != 2 * out.width() {
            let detail = format!("{} for rows of {}", gate_up.width(), out.width());
            return Err(CudaError::Shape { what: "a gate", detail });
        }
        let (rows, rounds) = (gate_up.count(), Self::rounds(gate_up.count()));
        out.resize(&self.device, rows, !rounds, rounds)?;
        let p = Swiglu {
            gate_up: gate_up.values(),
            out: out.values(),
            rounded: out.rounded(),
            width: out.width() as u32,
            rows: rows as u32,
        };
        self.launches.swiglu(&p)
    }

    /// The kernels for few rows and this matrix.
    pub(crate) fn skinny(&self, weight: &CudaMatrix) -> Result<&Skinny> {
        match weight.format() {
            WeightFormat::Bf16 => Ok(&self.skinny),
            WeightFormat::Fp8 => Ok(&self.fp8_kernels()?.skinny),
        }
    }

    /// The kernels of FP8 weights; compiled for the first such matrix.
    pub(super) fn fp8_kernels(&self) -> Result<&Fp8Kernels> {
        if let Some(kernels) = self.fp8.get() {
            return Ok(kernels);
        }
        let kernels = Fp8Kernels::new(&self.device, &self.kernels)?;
        Ok(self.fp8.get_or_init(|| kernels))
    }

    /// Address of some outputs of a matrix in BF16: its own, or a buffer that they are expanded into.
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
}
