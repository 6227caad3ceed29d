//! Row and element operations between the matrix products: norms, sums, activations, conversions.
//!
//! The bodies are written once ([`portable`]), in lanes of fixed width without fused operations,
//! and compiled once per instruction set. So the variants agree to the last bit, and the scalar one
//! is the specification. AVX-512 has bodies of its own for the expansion of weights (`expand`).

pub mod convert;
pub mod exp;
#[cfg(target_arch = "x86_64")]
pub(crate) mod expand;
pub(crate) mod gram;
mod portable;

use half::bf16;
use oscar_backend::Gate;

use crate::kernels::Kernels;
use crate::pool::ThreadPool;

/// Elements one task handles: some microseconds of work.
const TASK_ELEMENTS: usize = 16 << 10;

/// The row and element kernels of one variant.
///
/// `unsafe` as in [`crate::gemm`]: the caller vouches for the variant's instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpsKernels {
    rms_norm_row: unsafe fn(&[f32], &[f32], f32, &mut [f32]),
    rope_row: unsafe fn(&mut [f32], &[f32], &[f32]),
    add: unsafe fn(&mut [f32], &[f32]),
    swiglu: unsafe fn(&[f32], &[f32], &mut [f32]),
    gelu_tanh: unsafe fn(&[f32], &[f32], &mut [f32]),
    clamped: unsafe fn(&[f32], &[f32], &mut [f32]),
    sigmoid_gate: unsafe fn(&[f32], &mut [f32]),
    conv_row: unsafe fn(&[&[f32]], &[f32], &mut [f32]),
    delta_row: unsafe fn(&DeltaRow<'_>, &mut [f32], &mut [f32], &mut [f32]),
    to_bf16: unsafe fn(&[f32], &mut [bf16]),
    from_bf16: unsafe fn(&[bf16], &mut [f32]),
    expand_fp8: unsafe fn(&[u8], &[f32; 16], &mut [u32]),
    expand_mxfp4: unsafe fn(&[u8], &[f32; 16], &mut [u32]),
}

/// One row of the delta rule of one value head.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRow<'a> {
    pub query: &'a [f32],
    pub key: &'a [f32],
    pub value: &'a [f32],
    /// Factor of the state before this row.
    pub decay: f32,
    /// Share of the error that is corrected.
    pub beta: f32,
}

/// Compiles the portable bodies for an instruction set.
macro_rules! compiled_for {
    ($variant:ident $(, $features:literal)?) => {
        pub(crate) mod $variant {
            use super::{DeltaRow, OpsKernels, bf16, portable};

            pub(crate) const KERNELS: OpsKernels = OpsKernels {
                rms_norm_row,
                rope_row,
                add,
                swiglu,
                gelu_tanh,
                clamped,
                sigmoid_gate,
                conv_row,
                delta_row,
                to_bf16,
                from_bf16,
                expand_fp8,
                expand_mxfp4,
            };

            $(#[target_feature(enable = $features)])?
            fn rms_norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
                portable::rms_norm_row(x, weight, eps, out);
            }
            $(#[target_feature(enable = $features)])?
            fn rope_row(head: &mut [f32], cos: &[f32], sin: &[f32]) {
                portable::rope_row(head, cos, sin);
            }
            $(#[target_feature(enable = $features)])?
            fn add(y: &mut [f32], x: &[f32]) {
                portable::add(y, x);
            }
            $(#[target_feature(enable = $features)])?
            fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
                portable::swiglu(gate, up, out);
            }
            $(#[target_feature(enable = $features)])?
            fn gelu_tanh(gate: &[f32], up: &[f32], out: &mut [f32]) {
                portable::gelu_tanh(gate, up, out);
            }
            $(#[target_feature(enable = $features)])?
            fn clamped(gate: &[f32], up: &[f32], out: &mut [f32]) {
                portable::clamped(gate, up, out);
            }
            $(#[target_feature(enable = $features)])?
            fn sigmoid_gate(gate: &[f32], x: &mut [f32]) {
                portable::sigmoid_gate(gate, x);
            }
            $(#[target_feature(enable = $features)])?
            fn conv_row(rows: &[&[f32]], weights: &[f32], out: &mut [f32]) {
                portable::conv_row(rows, weights, out);
            }
            $(#[target_feature(enable = $features)])?
            fn delta_row(row: &DeltaRow<'_>, state: &mut [f32], error: &mut [f32], out: &mut [f32]) {
                portable::delta_row(row, state, error, out);
            }
            $(#[target_feature(enable = $features)])?
            fn to_bf16(x: &[f32], out: &mut [bf16]) {
                portable::to_bf16(x, out);
            }
            $(#[target_feature(enable = $features)])?
            fn from_bf16(x: &[bf16], out: &mut [f32]) {
                portable::from_bf16(x, out);
            }
            $(#[target_feature(enable = $features)])?
            fn expand_fp8(codes: &[u8], scales: &[f32; 16], words: &mut [u32]) {
                portable::expand_fp8(codes, scales, words);
            }
            $(#[target_feature(enable = $features)])?
            fn expand_mxfp4(codes: &[u8], factors: &[f32; 16], words: &mut [u32]) {
                portable::expand_mxfp4(codes, factors, words);
            }
        }
    };
}

compiled_for!(scalar);
#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq");
#[cfg(target_arch = "x86_64")]
pub(crate) const AVX512: OpsKernels =
    OpsKernels { expand_fp8: expand::fp8, expand_mxfp4: expand::mxfp4, ..avx512::KERNELS };

// SAFETY of all calls of a kernel below: `Kernels` exist only for variants this processor can run.
impl Kernels {
    /// Root-mean-square norm of each row of `x`: `x / sqrt(mean(x²) + eps) · weight`. A row is as
    /// long as `weight`.
    ///
    /// # Panics
    /// If `x` is not whole rows, or `out` not of the length of `x`.
    pub fn rms_norm(&self, pool: &ThreadPool, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        assert!(width > 0 && x.len().is_multiple_of(width), "x must be whole rows of {width}");
        assert_eq!(x.len(), out.len(), "out must be as long as x");
        let chunk = rows_per_task(width) * width;
        pool.run_chunks(out, chunk, |index, out| {
            let x = &x[index * chunk..][..out.len()];
            for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                // SAFETY: see above.
                unsafe { (self.ops.rms_norm_row)(x, weight, eps, out) };
            }
        });
    }

    /// [`Kernels::rms_norm`] of one row, on this thread.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn rms_norm_row(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert!(x.len() == weight.len() && x.len() == out.len(), "x, weight and out must be of one length");
        // SAFETY: see above.
        unsafe { (self.ops.rms_norm_row)(x, weight, eps, out) };
    }

    /// Rotary embedding of one head in place, halves paired: `(a, b) → (a·cos − b·sin, b·cos +
    /// a·sin)`.
    ///
    /// # Panics
    /// If `cos` and `sin` are not half as long as `head`.
    pub fn rope_row(&self, head: &mut [f32], cos: &[f32], sin: &[f32]) {
        assert!(
            2 * cos.len() == head.len() && cos.len() == sin.len(),
            "cos and sin must be half a head long"
        );
        // SAFETY: see above.
        unsafe { (self.ops.rope_row)(head, cos, sin) };
    }

    /// `y += x`, element by element.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn add(&self, pool: &ThreadPool, y: &mut [f32], x: &[f32]) {
        assert_eq!(y.len(), x.len(), "both sides of a sum must be of one length");
        pool.run_chunks(y, TASK_ELEMENTS, |index, y| {
            // SAFETY: see above.
            unsafe { (self.ops.add)(y, &x[index * TASK_ELEMENTS..][..y.len()]) };
        });
    }

    /// What `gate` makes of two rows, element by element, on this thread: see [`Gate::apply`].
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn gate_row(&self, kind: Gate, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len(), "gate, up and out must be of one length");
        let kernel = match kind {
            Gate::Silu => self.ops.swiglu,
            Gate::GeluTanh => self.ops.gelu_tanh,
            Gate::Clamped => self.ops.clamped,
        };
        // SAFETY: see above.
        unsafe { kernel(gate, up, out) };
    }

    /// `x · σ(gate)`, element by element, on this thread.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn sigmoid_gate(&self, gate: &[f32], x: &mut [f32]) {
        assert_eq!(gate.len(), x.len(), "gate and x must be of one length");
        // SAFETY: see above.
        unsafe { (self.ops.sigmoid_gate)(gate, x) };
    }

    /// `silu(Σ weights[tap] · rows[tap])`, each channel by itself, on this thread.
    ///
    /// # Panics
    /// If a row is not as long as `out`, or `weights` not as long as all rows.
    pub fn conv_row(&self, rows: &[&[f32]], weights: &[f32], out: &mut [f32]) {
        assert!(
            rows.iter().all(|row| row.len() == out.len()) && weights.len() == rows.len() * out.len(),
            "rows and out must be of one length, with a weight for each element"
        );
        // SAFETY: see above.
        unsafe { (self.ops.conv_row)(rows, weights, out) };
    }

    /// A row of the gated delta rule, on this thread: `S ← decay·S`, `S ← S + key ⊗ beta·(value − Sᵀkey)`,
    /// `out = Sᵀquery` with `S` = `state`, `[key][value]`. Leaves the correction of the values in `error`.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn delta_row(&self, row: &DeltaRow<'_>, state: &mut [f32], error: &mut [f32], out: &mut [f32]) {
        let (keys, values) = (row.key.len(), row.value.len());
        assert!(
            row.query.len() == keys
                && state.len() == keys * values
                && (error.len(), out.len()) == (values, values)
                && values > 0,
            "the state must have a row for each key channel and a column for each value channel"
        );
        // SAFETY: see above.
        unsafe { (self.ops.delta_row)(row, state, error, out) };
    }

    /// Expands steps of FP8 codes, `[16 outputs][2 inputs]`, into pairs of BF16: `code · scale` of
    /// its output, rounded. Codes must be numbers.
    ///
    /// # Panics
    /// If `words` is not half as long as `codes`, or not whole steps.
    pub fn expand_fp8(&self, codes: &[u8], scales: &[f32; 16], words: &mut [u32]) {
        assert!(
            codes.len() == 2 * words.len() && words.len().is_multiple_of(16),
            "a word for every two codes, in whole steps"
        );
        // SAFETY: see above.
        unsafe { (self.ops.expand_fp8)(codes, scales, words) };
    }

    /// Expands steps of MXFP4 codes, a byte of two inputs for each of 16 outputs, into pairs of BF16:
    /// `code · factor` of its output, which is exact.
    ///
    /// # Panics
    /// If `words` is not as long as `codes`, or not whole steps.
    pub fn expand_mxfp4(&self, codes: &[u8], factors: &[f32; 16], words: &mut [u32]) {
        assert!(
            codes.len() == words.len() && words.len().is_multiple_of(16),
            "a word for every byte, in whole steps"
        );
        // SAFETY: see above.
        unsafe { (self.ops.expand_mxfp4)(codes, factors, words) };
    }

    /// [`Kernels::gate_row`] on rows that hold `width` gate values followed by `width` up values, as
    /// one fused matrix product leaves them.
    ///
    /// # Panics
    /// If `out` is not whole rows of `width`, or `gate_up` not twice as long.
    pub fn gate_rows(&self, pool: &ThreadPool, kind: Gate, gate_up: &[f32], width: usize, out: &mut [f32]) {
        assert!(width > 0 && out.len().is_multiple_of(width), "out must be whole rows of {width}");
        assert_eq!(gate_up.len(), 2 * out.len(), "gate_up must hold gate and up for every output");
        let rows = rows_per_task(width);
        pool.run_chunks(out, rows * width, |index, out| {
            let gate_up = &gate_up[2 * index * rows * width..][..2 * out.len()];
            for (gate_up, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
                let (gate, up) = gate_up.split_at(width);
                self.gate_row(kind, gate, up, out);
            }
        });
    }

    /// Rounds to BF16, to nearest even; NaN stays NaN.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn to_bf16(&self, x: &[f32], out: &mut [bf16]) {
        assert_eq!(x.len(), out.len(), "both sides of a conversion must be of one length");
        // SAFETY: see above.
        unsafe { (self.ops.to_bf16)(x, out) };
    }

    /// Widens BF16 to f32, exactly.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn from_bf16(&self, x: &[bf16], out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "both sides of a conversion must be of one length");
        // SAFETY: see above.
        unsafe { (self.ops.from_bf16)(x, out) };
    }
}

fn rows_per_task(width: usize) -> usize {
    (TASK_ELEMENTS / width).max(1)
}

#[cfg(test)]
mod tests;
