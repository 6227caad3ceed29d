//! Matrix products of the backend: how the activations go in.

use super::{CpuBackend, CpuMatrix, CpuRows, Mode, shape_error};
use crate::{Epilogue, GemmScratch};
use half::bf16;
use oscar_backend::{Output, Product, Result};

/// Buffers of products, kept from step to step.
#[derive(Default)]
pub(super) struct ProductScratch {
    normed: Vec<f32>,
    gate_up: Vec<f32>,
    gemm: GemmScratch,
    /// Rows of split activations and their products.
    parts: Vec<f32>,
    sums: Vec<f32>,
}

impl CpuBackend {
    pub(super) fn product(
        &self,
        scratch: &mut ProductScratch,
        product: Product<'_, Self>,
        x: &CpuRows,
        out: &mut CpuRows,
    ) -> Result<()> {
        let Product { weight, norm, output, result_norm } = product;
        let (inputs, outputs) = (weight.packed.inputs(), weight.packed.outputs());
        let width = if matches!(output, Output::Gated(_)) { 2 * out.width } else { out.width };
        let fits = output != Output::Add || out.count() == x.count();
        let normed = result_norm.is_none_or(|(norm, _)| output == Output::Add && norm.len() == out.width);
        if (inputs, outputs) != (x.width, width) || !fits || !normed {
            let detail =
                format!("{} rows of {} by {outputs} × {inputs} to {}", x.count(), x.width, out.width);
            return Err(shape_error("a product", detail));
        }
        let mut normed = std::mem::take(&mut scratch.normed);
        let values = match norm {
            None => &x.values,
            Some((norm, eps)) => {
                normed.resize(x.values.len(), 0.0);
                self.kernels.rms_norm(&self.pool, &x.values, norm, eps, &mut normed);
                &normed
            }
        };
        let exact = output == Output::Logits;
        match output {
            Output::Add => match result_norm {
                None => self.linear(scratch, weight, values, &mut out.values, true, exact),
                Some(norm) => self.add_normed(scratch, weight, values, norm, out),
            },
            Output::Replace | Output::Logits => {
                out.resize(x.count());
                self.linear(scratch, weight, values, &mut out.values, false, exact);
            }
            Output::Gated(gate) => {
                let mut gate_up = std::mem::take(&mut scratch.gate_up);
                gate_up.resize(x.count() * outputs, 0.0);
                self.linear(scratch, weight, values, &mut gate_up, false, exact);
                out.resize(x.count());
                self.kernels.gate_rows(&self.pool, gate, &gate_up, out.width, &mut out.values);
                scratch.gate_up = gate_up;
            }
        }
        scratch.normed = normed;
        Ok(())
    }

    /// `out += norm(x · weightᵀ + bias)`.
    fn add_normed(
        &self,
        scratch: &mut ProductScratch,
        weight: &CpuMatrix,
        x: &[f32],
        (norm, eps): (&Vec<f32>, f32),
        out: &mut CpuRows,
    ) {
        let mut results = std::mem::take(&mut scratch.gate_up);
        results.resize(2 * out.values.len(), 0.0);
        let (product, normed) = results.split_at_mut(out.values.len());
        self.linear(scratch, weight, x, product, false, false);
        self.kernels.rms_norm(&self.pool, product, norm, eps, normed);
        self.kernels.add(&self.pool, &mut out.values, normed);
        scratch.gate_up = results;
    }

    /// `out ← x · weightᵀ` on the calling thread's own memory, for many small products in parallel.
    pub(super) fn small_product(&self, weight: &CpuMatrix, x: &[f32], out: &mut [f32]) {
        self.linear(&mut ProductScratch::default(), weight, x, out, false, false);
    }

    /// `out ← x · weightᵀ + bias`, or added to `out`. `exact`: activations keep 16 bits of mantissa
    /// in every mode.
    fn linear(
        &self,
        scratch: &mut ProductScratch,
        weight: &CpuMatrix,
        x: &[f32],
        out: &mut [f32],
        add: bool,
        exact: bool,
    ) {
        match self.mode {
            Mode::Bf16 => self.split_linear(scratch, weight, x, out, add),
            Mode::Fast if exact => self.split_linear(scratch, weight, x, out, add),
            Mode::Fast | Mode::F32 => {
                let epilogue = Epilogue { bias: weight.bias.as_deref(), accumulate: add };
                let rows = x.len() / weight.packed.inputs();
                weight.packed.linear(self.kernels, &self.pool, x, rows, out, epilogue, &mut scratch.gemm);
            }
        }
    }

    /// A product whose activations keep 16 bits of mantissa: each row goes in twice, rounded to
    /// BF16 and as the remainder of that rounding. A few rows cost no more than reading the weights
    /// once.
    fn split_linear(
        &self,
        scratch: &mut ProductScratch,
        weight: &CpuMatrix,
        x: &[f32],
        out: &mut [f32],
        add: bool,
    ) {
        let (inputs, outputs) = (weight.packed.inputs(), weight.packed.outputs());
        let rows = x.len() / inputs;
        let ProductScratch { gemm, parts, sums, .. } = scratch;
        parts.resize(2 * rows * inputs, 0.0);
        self.pool.run_chunks(parts, 2 * inputs, |row, parts| {
            let (high, low) = parts.split_at_mut(inputs);
            for ((high, low), &v) in high.iter_mut().zip(low).zip(&x[row * inputs..]) {
                *high = bf16::from_f32(v).to_f32();
                *low = v - *high;
            }
        });
        sums.resize(2 * rows * outputs, 0.0);
        weight.packed.linear(self.kernels, &self.pool, parts, 2 * rows, sums, Epilogue::default(), gemm);
        let sums = &*sums;
        self.pool.run_chunks(out, outputs, |row, out| {
            let (high, low) = sums[2 * row * outputs..][..2 * outputs].split_at(outputs);
            for (i, out) in out.iter_mut().enumerate() {
                let sum = high[i] + low[i] + weight.bias.as_ref().map_or(0.0, |b| b[i]);
                *out = if add { *out + sum } else { sum };
            }
        });
    }
}
