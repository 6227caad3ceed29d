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
