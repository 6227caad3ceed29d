//! The scalar operations against f64, and every variant against the scalar one, to the last bit.

use super::*;
use crate::Variant;
use crate::kernels::testing::kernels_or_note;

const LENGTHS: [usize; 9] = [1, 7, 16, 31, 32, 33, 80, 1000, 40_000];

fn pool(threads: usize) -> ThreadPool {
    ThreadPool::new(threads).unwrap()
}

fn scalar() -> &'static Kernels {
    Kernels::for_variant(Variant::Scalar).unwrap()
}

/// Reproducible values between `-scale` and `scale`.
fn values(seed: u32, count: usize, scale: f32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() * scale).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn scalar_rms_norm_matches_f64() {
    for width in LENGTHS {
        let (x, weight) = (values(1, 3 * width, 5.0), values(2, width, 2.0));
        let mut out = vec![0.0; x.len()];
        scalar().rms_norm(&pool(1), &x, &weight, 1e-6, &mut out);
        for (row, out) in x.chunks_exact(width).zip(out.chunks_exact(width)) {
            let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
            for i in 0..width {
                let truth = f64::from(row[i]) / (mean + 1e-6).sqrt() * f64::from(weight[i]);
                assert!(
                    (f64::from(out[i]) - truth).abs() <= 2e-6 * truth.abs(),
                    "{width}: {} {truth}",
                    out[i]
                );
            }
        }
    }
}

#[test]
fn rms_norm_of_zeros_is_zero() {
    let mut out = [f32::NAN; 8];
    scalar().rms_norm(&pool(1), &[0.0; 8], &[1.0; 4], 1e-6, &mut out);
    assert_eq!(out, [0.0; 8]);
}

#[test]
fn scalar_gates_match_f64() {
    for kind in Gate::ALL {
        let (gate, up) = (values(3, 10_000, 30.0), values(4, 10_000, 10.0));
        let mut out = vec![0.0; gate.len()];
        scalar().gate_row(kind, &gate, &up, &mut out);
        for i in 0..out.len() {
            let truth = kind.apply(f64::from(gate[i]), f64::from(up[i]));
            // Far below zero the gates vanish; an exponent of tens magnifies the rounding before it.
            let tolerance = if kind == Gate::Silu { 1e-6 * truth.abs() } else { 2e-5 * truth.abs() + 1e-6 };
            let error = (f64::from(out[i]) - truth).abs();
            assert!(error <= tolerance, "{kind:?} {} {}: {} {truth}", gate[i], up[i], out[i]);
        }
        let mut edge = [0.0; 5];
        let (gates, ups) = ([200.0, -200.0, 0.0, f32::NAN, 1.0], [1.0, 1.0, 1.0, 1.0, f32::NAN]);
        scalar().gate_row(kind, &gates, &ups, &mut edge);
        for i in 0..3 {
            let truth = kind.apply(f64::from(gates[i]), 1.0) as f32;
            assert!((edge[i] - truth).abs() <= 1e-6 * truth.abs(), "{kind:?} of {}: {}", gates[i], edge[i]);
        }
        assert!(edge[3].is_nan() && edge[4].is_nan());
    }
}

#[test]
fn fused_rows_equal_separate_halves() {
    let (rows, width) = (50, 700);
    let gate_up = values(5, 2 * rows * width, 4.0);
    for kind in Gate::ALL {
        let (mut fused, mut separate) = (vec![0.0; rows * width], vec![1.0; rows * width]);
        scalar().gate_rows(&pool(2), kind, &gate_up, width, &mut fused);
        for (row, out) in gate_up.chunks_exact(2 * width).zip(separate.chunks_exact_mut(width)) {
            scalar().gate_row(kind, &row[..width], &row[width..], out);
        }
        assert_eq!(bits(&fused), bits(&separate));
    }
}

fn check_matches_scalar(variant: Variant) {
    let Some(kernels) = kernels_or_note(variant) else { return };
    let (pool_1, pool_3) = (pool(1), pool(3));
    for len in LENGTHS {
        let (mut a, b) = (values(6, 4 * len, 20.0), values(7, 4 * len, 3.0));
        a[len / 2] = f32::NAN;
        a[3 * len] = f32::INFINITY;
        a[3 * len - 1] = f32::MIN_POSITIVE / 8.0;
        let run = |kernels: &Kernels, pool: &ThreadPool| {
            let mut results = vec![vec![0.0; 4 * len], a.clone()];
            kernels.rms_norm(pool, &a, &b[..len], 1e-5, &mut results[0]);
            kernels.add(pool, &mut results[1], &b);
            for kind in Gate::ALL {
                let mut gated = vec![0.0; 2 * len];
                kernels.gate_rows(pool, kind, &a, len, &mut gated);
                results.push(gated);
                let mut row = vec![0.0; 4 * len];
                kernels.gate_row(kind, &a, &b, &mut row);
                results.push(row);
            }
            let mut narrow = vec![bf16::ZERO; 4 * len];
            kernels.to_bf16(&a, &mut narrow);
            let mut wide = vec![0.0; 4 * len];
            kernels.from_bf16(&narrow, &mut wide);
            results.push(wide);
            results.iter().map(|result| canonical_bits(result)).collect::<Vec<_>>()
        };
        let expected = run(scalar(), &pool_1);
        assert_eq!(run(kernels, &pool_1), expected, "{variant}, {len} elements");
        assert_eq!(run(kernels, &pool_3), expected, "{variant}, {len} elements, three threads");
    }
}

/// Bits, with every NaN the same: which NaN comes out of an operation is nobody's promise.
fn canonical_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }).collect()
}

#[test]
fn avx2_matches_scalar() {
    check_matches_scalar(Variant::Avx2);
}

#[test]
fn avx512_matches_scalar() {
    check_matches_scalar(Variant::Avx512);
}

#[test]
fn amx_matches_scalar() {
    check_matches_scalar(Variant::Amx);
}

#[test]
#[should_panic(expected = "whole rows")]
fn partial_rows_are_refused() {
    scalar().rms_norm(&pool(1), &[0.0; 7], &[1.0; 4], 1e-6, &mut [0.0; 7]);
}

#[test]
#[should_panic(expected = "one length")]
fn different_lengths_are_refused() {
    scalar().add(&pool(1), &mut [0.0; 7], &[0.0; 8]);
}

/// Steps of FP8 codes in all variants, with one scale and with a scale of each output, subnormal
/// products and an odd number of steps among them.
#[test]
fn expanded_fp8_matches_scalar() {
    let codes: Vec<u8> = (0..32 * 17).map(|i| (i * 167 % 256) as u8).collect();
    let uneven: [f32; 16] = std::array::from_fn(|i| 0.003 * (1 + i * 7 % 11) as f32 - 0.01);
    let mut tiny = uneven;
    tiny[3] = 3e-39;
    let mut padded = uneven;
    padded[9..].fill(0.0);
    let scales = [[1.0; 16], [-0.37; 16], [1e-39; 16], [3e36; 16], [0.0; 16], uneven, tiny, padded];
    for kernels in Variant::ALL.into_iter().filter_map(kernels_or_note) {
        for scales in &scales {
            let (mut expected, mut words) = (vec![0; codes.len() / 2], vec![0; codes.len() / 2]);
            scalar().expand_fp8(&codes, scales, &mut expected);
            kernels.expand_fp8(&codes, scales, &mut words);
            assert_eq!(words, expected, "{scales:?}");
        }
    }
    // The scalar one against the codec's values.
    let mut words = vec![0; codes.len() / 2];
    scalar().expand_fp8(&codes, &uneven, &mut words);
    for (i, &code) in codes.iter().enumerate().filter(|(_, code)| **code & 0x7f != 0x7f) {
        let value = bf16::from_bits((words[i / 2] >> (16 * (i % 2))) as u16);
        let truth = bf16::from_f32(oscar_codec::fp8::dequantize(code) * uneven[i % 32 / 2]);
        assert_eq!(value, truth, "{code:#x}");
    }
}

#[test]
fn expanded_mxfp4_matches_scalar() {
    let codes: Vec<u8> = (0..=255).chain(0..16).collect();
    let factors: [f32; 16] = std::array::from_fn(|i| oscar_backend::mxfp4_factor(i as u8 * 15));
    for kernels in Variant::ALL.into_iter().filter_map(kernels_or_note) {
        let (mut expected, mut words) = (vec![0; codes.len()], vec![0; codes.len()]);
        scalar().expand_mxfp4(&codes, &factors, &mut expected);
        kernels.expand_mxfp4(&codes, &factors, &mut words);
        assert_eq!(words, expected);
    }
}

/// The delta rule, its convolution and the output gate against f64.
#[test]
fn scalar_delta_rule_matches_f64() {
    let (keys, dims, taps) = (48, 40, 4);
    let mut state = values(1, keys * dims, 0.5);
    let mut exact: Vec<f64> = state.iter().map(|&s| f64::from(s)).collect();
    let (mut error, mut out) = (vec![0.0; dims], vec![0.0; dims]);
    for step in 0..30 {
        let [query, key] = [10, 20].map(|seed| values(seed + step, keys, 0.2));
        let value = values(30 + step, dims, 1.0);
        let (decay, beta) = (0.9 + 0.003 * step as f32, 0.5);
        let row = DeltaRow { query: &query, key: &key, value: &value, decay, beta };
        scalar().delta_row(&row, &mut state, &mut error, &mut out);
        exact.iter_mut().for_each(|s| *s *= f64::from(decay));
        let dot = |exact: &[f64], x: &[f32], v: usize| -> f64 {
            (0..keys).map(|k| exact[k * dims + v] * f64::from(x[k])).sum()
        };
        for v in 0..dims {
            let delta = f64::from(beta) * (f64::from(value[v]) - dot(&exact, &key, v));
            (0..keys).for_each(|k| exact[k * dims + v] += f64::from(key[k]) * delta);
            let truth = dot(&exact, &query, v);
            assert!((f64::from(out[v]) - truth).abs() < 1e-5, "step {step}: {} {truth}", out[v]);
        }
    }
    let (rows, weights) = (values(3, taps * dims, 2.0), values(4, taps * dims, 1.0));
    let parts: Vec<&[f32]> = rows.chunks(dims).collect();
    scalar().conv_row(&parts, &weights, &mut out);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for c in 0..dims {
        let product = |tap: usize| f64::from(rows[tap * dims + c]) * f64::from(weights[tap * dims + c]);
        let sum: f64 = (0..taps).map(product).sum();
        assert!((f64::from(out[c]) - sum * sigmoid(sum)).abs() < 1e-5, "{c}");
    }
    let (gate, before) = (values(5, dims, 6.0), values(6, dims, 2.0));
    let mut gated = before.clone();
    scalar().sigmoid_gate(&gate, &mut gated);
    for (c, found) in gated.into_iter().enumerate() {
        let truth = f64::from(before[c]) * sigmoid(f64::from(gate[c]));
        assert!((f64::from(found) - truth).abs() < 1e-6, "{c}");
    }
}

fn check_delta_rule(variant: Variant) {
    let Some(kernels) = kernels_or_note(variant) else { return };
    for (keys, dims) in [(1, 1), (16, 24), (128, 128), (33, 70)] {
        let run = |kernels: &Kernels| {
            let mut state = values(7, keys * dims, 0.5);
            let (mut error, mut out) = (vec![0.0; dims], vec![0.0; dims]);
            let (query, key, value) = (values(8, keys, 0.3), values(9, keys, 0.3), values(10, dims, 2.0));
            let row = DeltaRow { query: &query, key: &key, value: &value, decay: 0.97, beta: 0.4 };
            (0..3).for_each(|_| kernels.delta_row(&row, &mut state, &mut error, &mut out));
            kernels.conv_row(&[&value, &out], &values(11, 2 * dims, 1.0), &mut error);
            kernels.sigmoid_gate(&value, &mut error);
            [bits(&state), bits(&out), bits(&error)]
        };
        assert!(run(kernels) == run(scalar()), "{variant}, {keys} × {dims}");
    }
}

#[test]
fn avx2_delta_rule_matches_scalar() {
    check_delta_rule(Variant::Avx2);
}

#[test]
fn avx512_delta_rule_matches_scalar() {
    check_delta_rule(Variant::Avx512);
    check_delta_rule(Variant::Amx);
}
