//! The bodies of the operations, inlined into one function per instruction set.
//!
//! Sums run in [`LANES`] separate lanes that are folded in a fixed order, and nothing is fused, so
//! that every vector width gives the same bits.

use half::bf16;
use oscar_backend::Gate;
use oscar_codec::affine;

use super::DeltaRow;
use super::convert::{f32_from_bf16, f32_to_bf16};
use super::exp::exp;

/// Two of the widest vectors: enough independent sums to hide the latency of an addition.
const LANES: usize = 32;

#[inline(always)]
pub(super) fn rms_norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt();
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += chunk[lane] * chunk[lane];
        }
    }
    for (sum, &x) in sums.iter_mut().zip(rest) {
        *sum += x * x;
    }
    affine::halve(sums)
}

#[inline(always)]
pub(super) fn rope_row(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[inline(always)]
pub(super) fn add(y: &mut [f32], x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, &x)| *y += x);
}

#[inline(always)]
pub(super) fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

/// `0.5 · (1 + tanh u) = 1 / (1 + exp(−2u))`.
#[inline(always)]
pub(super) fn gelu_tanh(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // −2 · √(2/π).
    const FACTOR: f32 = -1.595_769_2;
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        let inner = FACTOR * (gate + 0.044_715 * (gate * gate * gate));
        *out = gate / (1.0 + exp(inner)) * up;
    }
}

#[inline(always)]
pub(super) fn clamped(gate: &[f32], up: &[f32], out: &mut [f32]) {
    const LIMIT: f32 = Gate::CLAMP;
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        // Comparisons that NaN fails keep it.
        let gate = if gate > LIMIT { LIMIT } else { gate };
        let up = if up > LIMIT { LIMIT } else { up };
        let up = if up < -LIMIT { -LIMIT } else { up };
        *out = gate / (1.0 + exp(-Gate::CLAMPED_SLOPE * gate)) * (up + 1.0);
    }
}

#[inline(always)]
pub(super) fn sigmoid_gate(gate: &[f32], x: &mut [f32]) {
    x.iter_mut().zip(gate).for_each(|(x, &gate)| *x /= 1.0 + exp(-gate));
}

#[inline(always)]
pub(super) fn conv_row(rows: &[&[f32]], weights: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (row, weights) in rows.iter().zip(weights.chunks_exact(out.len())) {
        for ((out, &x), &weight) in out.iter_mut().zip(*row).zip(weights) {
            *out += weight * x;
        }
    }
    out.iter_mut().for_each(|out| *out /= 1.0 + exp(-*out));
}

/// Reads the state twice: once for what it answers to the key, once to correct that and to answer the
/// query.
#[inline(always)]
pub(super) fn delta_row(row: &DeltaRow<'_>, state: &mut [f32], error: &mut [f32], out: &mut [f32]) {
    let &DeltaRow { query, key, value, decay, beta } = row;
    error.fill(0.0);
    for (&key, state) in key.iter().zip(state.chunks_exact_mut(value.len())) {
        for (state, error) in state.iter_mut().zip(error.iter_mut()) {
            *state *= decay;
            *error += *state * key;
        }
    }
    error.iter_mut().zip(value).for_each(|(error, &value)| *error = beta * (value - *error));
    out.fill(0.0);
    let pairs = key.iter().zip(query);
    for ((&key, &query), state) in pairs.zip(state.chunks_exact_mut(value.len())) {
        for ((state, &error), out) in state.iter_mut().zip(error.iter()).zip(out.iter_mut()) {
            *state += key * error;
            *out += *state * query;
        }
    }
}

#[inline(always)]
pub(super) fn to_bf16(x: &[f32], out: &mut [bf16]) {
    out.iter_mut().zip(x).for_each(|(out, &x)| *out = bf16::from_bits(f32_to_bf16(x)));
}

#[inline(always)]
pub(super) fn from_bf16(x: &[bf16], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out = f32_from_bf16(x.to_bits()));
}

/// The value of an E4M3 code that is a number.
#[inline(always)]
fn e4m3(code: u32) -> f32 {
    let magnitude = code & 0x7f;
    // Subnormals of E4M3 count in steps of 2^-9; their f32 form is normal.
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let value = if magnitude < 8 { magnitude as f32 * (1.0 / 512.0) } else { normal };
    f32::from_bits(value.to_bits() | (code & 0x80) << 24)
}

/// The BF16 of every magnitude of E4M3 times a scale.
#[inline(always)]
pub(super) fn scaled_magnitudes(scale: f32, words: &mut [u16; 128]) {
    for magnitude in 0..128 {
        words[magnitude] = f32_to_bf16(e4m3(magnitude as u32) * scale);
    }
}

#[inline(always)]
pub(super) fn expand_fp8(codes: &[u8], scales: &[f32; 16], words: &mut [u32]) {
    // Flat loops: compilers turn them into vectors, which they do not do for pairs of codes.
    let scales: [f32; 32] = std::array::from_fn(|i| scales[i / 2]);
    let steps = codes.as_chunks::<32>().0.iter().zip(words.as_chunks_mut::<16>().0);
    for (codes, words) in steps {
        let mut halves = [0_u16; 32];
        for i in 0..32 {
            halves[i] = f32_to_bf16(e4m3(u32::from(codes[i])) * scales[i]);
        }
        for lane in 0..16 {
            words[lane] = u32::from(halves[2 * lane]) | u32::from(halves[2 * lane + 1]) << 16;
        }
    }
}

/// The value of an E2M1 code.
#[inline(always)]
pub(super) fn e2m1(code: u32) -> f32 {
    let magnitude = code & 7;
    let normal = f32::from_bits((magnitude << 22) + (126 << 23));
    let value = if magnitude < 2 { magnitude as f32 * 0.5 } else { normal };
    f32::from_bits(value.to_bits() | (code & 8) << 28)
}

#[inline(always)]
pub(super) fn expand_mxfp4(codes: &[u8], factors: &[f32; 16], words: &mut [u32]) {
    let steps = codes.as_chunks::<16>().0.iter().zip(words.as_chunks_mut::<16>().0);
    for (codes, words) in steps {
        for lane in 0..16 {
            let code = u32::from(codes[lane]);
            // BF16 holds the products exactly: the lower half of their bits is zero.
            let (first, second) = (e2m1(code) * factors[lane], e2m1(code >> 4) * factors[lane]);
            words[lane] = first.to_bits() >> 16 | second.to_bits() & 0xffff_0000;
        }
    }
}
