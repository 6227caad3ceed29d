//! Matrix products of the backend: how the activations go in.

use super::{CpuBackend, CpuMatrix, CpuRows, Scratch};
use crate::Epilogue;
use half::bf16;
use oscar_backend::Write;

impl CpuBackend {
    pub(super) fn plain_linear(&self, weight: &CpuMatrix, x: &CpuRows, out: &mut CpuRows, write: Write) {
        let epilogue = Epilogue { bias: weight.bias.as_deref(), accumulate: write == Write::Add };
        let scratch = &mut self.scratch().gemm;
        weight.packed.linear(
            self.kernels,
            &self.pool,
            &x.values,
            x.count(),
            &mut out.values,
            epilogue,
            scratch,
        );
    }

    /// A product whose activations keep 16 bits of mantissa: each row goes in twice, rounded to BF16 and as what the
    /// rounding lost. A few rows cost no more than reading the weights once.
    pub(super) fn split_linear(&self, weight: &CpuMatrix, x: &CpuRows, out: &mut CpuRows, write: Write) {
        let (rows, inputs, outputs) = (x.count(), weight.packed.inputs(), weight.packed.outputs());
        let Scratch { gemm, parts, sums, .. } = &mut *self.scratch();
        parts.resize(2 * rows * inputs, 0.0);
        self.pool.run_chunks(parts, 2 * inputs, |row, parts| {
            let (high, low) = parts.split_at_mut(inputs);
            for ((high, low), &v) in high.iter_mut().zip(low).zip(&x.values[row * inputs..]) {
                *high = bf16::from_f32(v).to_f32();
                *low = v - *high;
            }
        });
        sums.resize(2 * rows * outputs, 0.0);
        weight.packed.linear(self.kernels, &self.pool, parts, 2 * rows, sums, Epilogue::default(), gemm);
        let sums = &*sums;
        self.pool.run_chunks(&mut out.values, outputs, |row, out| {
            let (high, low) = sums[2 * row * outputs..][..2 * outputs].split_at(outputs);
            for (i, out) in out.iter_mut().enumerate() {
                let sum = high[i] + low[i] + weight.bias.as_ref().map_or(0.0, |b| b[i]);
                *out = if write == Write::Add { *out + sum } else { sum };
            }
        });
    }
}
