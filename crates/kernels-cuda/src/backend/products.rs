//! Matrix products: which kernels a product runs.

use super::constants::CudaVector;
use super::launches::{AddNormParams, BiasParams, RmsNormParams, RoundParams, SwigluParams};
use super::rows::{CudaRows, grow};
use super::{CudaBackend, State};
use crate::error::{CudaError, Result};
use crate::gemm::{CudaMatrix, Fp8Kernels, Product as Gemm, Skinny, SkinnyProduct, Sums};
use crate::memory::{Buffer, DeviceSlice};
use half::bf16;
use oscar_backend::{Gate, Output, Product, WeightFormat};

impl CudaBackend {
    /// Norm, product and gate: in one launch if there are few rows, otherwise one after the other.
    pub(super) fn product(
        &self,
        state: &mut State,
        product: Product<'_, Self>,
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<()> {
        if let Some((result_norm, eps)) = product.result_norm {
            return self.product_with_norm(state, product, (result_norm, eps), x, out);
        }
        let Product { weight, norm, output, .. } = product;
        let gate = match output {
            Output::Gated(gate) => Some(gate),
            _ => None,
        };
        let gated = gate.is_some();
        let rows = x.count();
        let outputs = if gated { 2 * out.width() } else { out.width() };
        let fits = norm.is_none_or(|(norm, _)| norm.len == x.width())
            && (output != Output::Add || out.count() == rows && (rows == 0 || out.values().is_some()));
        if (weight.inputs, weight.outputs) != (x.width(), outputs) || !fits {
            let detail =
                format!("{rows} × {} to {outputs} by {} × {}", x.width(), weight.outputs, weight.inputs);
            return Err(CudaError::Shape { what: "a product", detail });
        }
        // The norm before the output head has its own launch: fusing it was not tried.
        let fuses = norm.is_none() || matches!(output, Output::Replace | Output::Gated(_));
        let gates = gate.is_none_or(|gate| gate == Gate::Silu && Skinny::gates(weight));
        if rows > 0 && x.values().is_some() && Skinny::takes(weight, rows) && fuses && gates {
            return self.skinny_product(weight, norm, x, out, output);
        }
        match (norm, gate) {
            (None, Some(gate)) => {
                let mut gate_up = std::mem::take(&mut state.gate_up);
                // The gated rows of a prompt are rounded anyway. A bias is added in f32.
                let rounds = Self::rounds(rows) && weight.bias.is_none();
                let done = self
                    .linear(state, weight, x, gate_up.set_width(outputs), Output::Replace, rounds)
                    .and_then(|()| self.gate(gate, &gate_up, out));
                state.gate_up = gate_up;
                done
            }
            (None, None) => self.linear(state, weight, x, out, output, false),
            (Some((norm, eps)), _) => {
                let mut normed = std::mem::take(&mut state.normed);
                // Only the head multiplies more than the rounded rows of a prompt.
                let values = !Self::rounds(rows) || output == Output::Logits;
                let done = self
                    .rms_norm(x, norm, eps, normed.set_width(x.width()), values)
                    .and_then(|()| self.product(state, Product::of(weight, output), &normed, out));
                state.normed = normed;
                done
            }
        }
    }

    /// `out += norm(product)`: the product has rows of its own.
    fn product_with_norm(
        &self,
        state: &mut State,
        product: Product<'_, Self>,
        (norm, eps): (&CudaVector, f32),
        x: &CudaRows,
        out: &mut CudaRows,
    ) -> Result<()> {
        let (rows, width) = (x.count(), out.width());
        if product.output != Output::Add || out.count() != rows || norm.len != width {
            let detail = format!("{rows} rows, a norm of {} for {} rows of {width}", norm.len, out.count());
            return Err(CudaError::Shape { what: "a product with a norm of its result", detail });
        }
        let mut result = std::mem::take(&mut state.result);
        let inner = Product { output: Output::Replace, result_norm: None, ..product };
        let done = self.product(state, inner, x, result.set_width(width)).and_then(|()| {
            if rows == 0 {
                return Ok(());
            }
            out.drop_rounded();
            let p = AddNormParams {
                x: result.held_values("a product's result")?.ptr(),
                weight: norm.values.ptr(),
                out: out.held_values("a residual")?.ptr(),
                width: width as u32,
                eps,
            };
            // SAFETY: both have `rows` rows of `width`, and the norm has as many weights (checked).
            unsafe { self.launches.add_rms_norm(rows, p) }
        });
        state.result = result;
        done
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
            x: x.held_values("a product")?,
            out: out.held_values("a product")?,
            norm: norm.map(|(norm, eps)| (norm.values.slice(), eps)),
            add,
            gated: matches!(output, Output::Gated(_)),
        };
        self.skinny(weight)?.enqueue(weight, &product)
    }

    /// A product of many rows, or of a shape that the kernel for few rows does not take, by
    /// cuBLASLt. [`Output::Logits`] keeps 16 bits of the activations' mantissa. With `rounds`, `out`
    /// is BF16 only.
    fn linear(
        &self,
        state: &mut State,
        weight: &CudaMatrix,
        x: &CudaRows,
        out: &mut CudaRows,
        output: Output,
        rounds: bool,
    ) -> Result<()> {
        let (rows, add, exact) = (x.count(), output == Output::Add, output == Output::Logits);
        if rows > 0 && x.values().is_some() && Skinny::takes(weight, rows) {
            return self.skinny_product(weight, None, x, out, output);
        }
        match add {
            true => out.drop_rounded(),
            false => out.resize(&self.device, rows, !rounds, rounds)?,
        }
        if rows == 0 {
            return Ok(());
        }
        let State { cublaslt, high, low, expanded, fp8_operands, .. } = state;
        let count = rows * x.width();
        let mut low_parts: Option<DeviceSlice<'_, bf16>> = None;
        let rounded = match x.rounded().filter(|_| !exact) {
            Some(rounded) => rounded,
            None => {
                let high = grow(&self.device, high, count * 2, "activations")?.0.slice();
                if exact {
                    low_parts = Some(grow(&self.device, low, count * 2, "activations")?.0.slice());
                }
                let p = RoundParams {
                    x: x.held_values("a product")?.ptr(),
                    high: high.ptr(),
                    low: low_parts.map(|low| low.ptr()),
                    count: count as u64,
                };
                // SAFETY: `x` and both buffers have `count` elements.
                unsafe { self.launches.round(p) }?;
                high
            }
        };
        if let (Some(products), WeightFormat::Fp8, false) = (&self.fp8_activations, weight.format(), exact) {
            products.product(cublaslt, fp8_operands, weight, (rows, rounded), out.padded_sums()?, add)?;
            return self.add_bias(weight, out);
        }
        let result = match out.rounded() {
            Some(rounded) => Sums::Bf16(rounded),
            None => Sums::F32(out.held_values("a product")?),
        };
        for panel in weight.panels() {
            let (outputs, inputs, stride) = (panel.len(), weight.inputs, weight.outputs);
            let weights = self.panel(weight, &panel, expanded)?;
            let out = result.from(panel.start)?;
            let product = Gemm { rows, outputs, inputs, stride, add };
            cublaslt.enqueue(product, weights, rounded, out)?;
            if let Some(low) = low_parts {
                cublaslt.enqueue(Gemm { add: true, ..product }, weights, low, out)?;
            }
        }
        self.add_bias(weight, out)
    }

    /// Adds the bias of a product, if it has one.
    fn add_bias(&self, weight: &CudaMatrix, out: &CudaRows) -> Result<()> {
        let Some(bias) = &weight.bias else { return Ok(()) };
        let (width, rows) = (weight.outputs as u32, out.count() as u32);
        let p = BiasParams { bias: bias.ptr(), out: out.held_values("a product")?.ptr(), width, rows };
        // SAFETY: `out` has `rows` rows of `width`, and the bias has `width` numbers.
        unsafe { self.launches.bias(p) }
    }

    /// The result is BF16 in steps of many rows, and f32 with `values`.
    pub(super) fn rms_norm(
        &self,
        x: &CudaRows,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaRows,
        values: bool,
    ) -> Result<()> {
        if weight.len != x.width() || out.width() != x.width() {
            let detail = format!("{} weights for rows of {}", weight.len, x.width());
            return Err(CudaError::Shape { what: "a norm", detail });
        }
        out.resize(&self.device, x.count(), values, Self::rounds(x.count()))?;
        if x.count() == 0 {
            return Ok(());
        }
        let p = RmsNormParams {
            x: x.held_values("a norm")?.ptr(),
            weight: weight.values.ptr(),
            out: out.values().map(|out| out.ptr()),
            rounded: out.rounded_ptr(),
            width: x.width() as u32,
            eps,
        };
        // SAFETY: `x` and `out` have the same number of rows of `width`, and the norm has `width`
        // weights (checked).
        unsafe { self.launches.rms_norm(x.count(), p) }
    }

    /// Rows of `gate_up` are `[gate | up]`; `out` gets what the gate makes of both.
    pub(super) fn gate(&self, gate: Gate, gate_up: &CudaRows, out: &mut CudaRows) -> Result<()> {
        if gate_up.width() != 2 * out.width() {
            let detail = format!("{} for rows of {}", gate_up.width(), out.width());
            return Err(CudaError::Shape { what: "a gate", detail });
        }
        let (rows, rounds) = (gate_up.count(), Self::rounds(gate_up.count()));
        out.resize(&self.device, rows, !rounds, rounds)?;
        if rows == 0 {
            return Ok(());
        }
        let p = SwigluParams {
            gate_up: gate_up.values().map(|rows| rows.ptr()),
            rounded_gate_up: gate_up.rounded_ptr(),
            out: out.values().map(|out| out.ptr()),
            rounded: out.rounded_ptr(),
            width: out.width() as u32,
            rows: rows as u32,
        };
        if p.gate_up.is_none() && p.rounded_gate_up.is_none() {
            return Err(CudaError::Shape { what: "a gate", detail: "its rows hold nothing".into() });
        }
        // SAFETY: `gate_up` has `rows` rows of 2 · `width` in one of its forms (checked), `out` as many
        // of `width`.
        unsafe { self.launches.gate(gate, p) }
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

    /// Some outputs of a matrix in BF16: its own, or a buffer that they are expanded into.
    pub(crate) fn panel<'a>(
        &self,
        weight: &'a CudaMatrix,
        outputs: &std::ops::Range<usize>,
        expanded: &'a mut Option<Buffer>,
    ) -> Result<DeviceSlice<'a, bf16>> {
        if weight.format() == WeightFormat::Bf16 {
            return weight.weights.slice().part(outputs.start * weight.inputs..outputs.end * weight.inputs);
        }
        let bytes = 2 * outputs.len() * weight.inputs;
        let (room, _) = grow(&self.device, expanded, bytes, "FP8 weights expanded for a prompt")?;
        self.fp8_kernels()?.expand(weight, outputs, room)?;
        Ok(room.slice())
    }
}
