//! Every variant against the scalar specification, the specification against f64, and the promise
//! that a row does not feel its neighbours.

use std::panic::{AssertUnwindSafe, catch_unwind};

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::Variant;
use crate::kernels::testing::kernels_or_note;

/// Rows, inputs, outputs: strips, panels, groups and tiles that do not come out even, and some that
/// do.
const SHAPES: [(usize, usize, usize); 14] = [
    (1, 1, 1),
    (1, 80, 17),
    (3, 80, 17),
    (7, 80, 17),
    (33, 80, 17),
    (1, 384, 128),
    (2, 33, 64),
    (6, 2048, 80),
    (5, 31, 200),
    (16, 64, 64),
    (31, 96, 72),
    (32, 1100, 64),
    (100, 520, 48),
    (193, 1056, 130),
];

/// A reproducible stream of numbers.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Between -1 and 1.
    fn fractions(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next() as f32 / (1_u64 << 30) as f32 - 1.0).collect()
    }

    /// From -3 to 3. Sums of products of these are exact in every order, so any difference is a
    /// mistake of indexing.
    fn integers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| (self.next() % 7) as f32 - 3.0).collect()
    }
}

fn pool(threads: usize) -> ThreadPool {
    ThreadPool::new(threads).unwrap()
}

fn product(kernels: &Kernels, pool: &ThreadPool, matrix: &PackedMatrix, x: &[f32], m: usize) -> Vec<f32> {
    let mut y = vec![f32::NAN; m * matrix.outputs()];
    let mut scratch = GemmScratch::default();
    matrix.linear(kernels, pool, x, m, &mut y, Epilogue::default(), &mut scratch);
    y
}

fn packed(pool: &ThreadPool, w: &[f32], outputs: usize, inputs: usize, precision: Precision) -> PackedMatrix {
    PackedMatrix::pack(pool, Weights::F32(w), outputs, inputs, precision).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Any order of `n` additions of exact or rounded products stays within `(n + 1) · 2⁻²⁴ · Σ|x·w|`
/// of the true sum (to first order), so two orders differ by at most twice that. Flushed subnormals
/// add less than 2⁻¹²⁶ each.
fn bound(n: usize, sum_of_magnitudes: f64) -> f64 {
    (n + 2) as f64 * 2_f64.powi(-24) * sum_of_magnitudes + n as f64 * 2_f64.powi(-126)
}

fn check_matches_scalar(variant: Variant) {
    let Some(kernels) = kernels_or_note(variant) else { return };
    let scalar = Kernels::for_variant(Variant::Scalar).unwrap();
    let pool = pool(2);
    let mut numbers = Numbers(7);
    for (m, inputs, outputs) in SHAPES {
        for precision in [Precision::Bf16, Precision::F32] {
            let (x, w) = (numbers.integers(m * inputs), numbers.integers(outputs * inputs));
            let matrix = packed(&pool, &w, outputs, inputs, precision);
            let expected = product(scalar, &pool, &matrix, &x, m);
            let actual = product(kernels, &pool, &matrix, &x, m);
            assert_eq!(actual, expected, "{variant} {precision:?} {m}×{inputs}×{outputs}, integers");

            let (x, w) = (numbers.fractions(m * inputs), numbers.fractions(outputs * inputs));
            let matrix = packed(&pool, &w, outputs, inputs, precision);
            let expected = product(scalar, &pool, &matrix, &x, m);
            let actual = product(kernels, &pool, &matrix, &x, m);
            for (at, (&a, &e)) in actual.iter().zip(&expected).enumerate() {
                let (x, w) = (&x[at / outputs * inputs..], &w[at % outputs * inputs..]);
                let magnitudes = (0..inputs).map(|i| f64::from(x[i] * w[i]).abs() * 1.01).sum::<f64>();
                let limit = 2.0 * bound(inputs, magnitudes);
                let error = (f64::from(a) - f64::from(e)).abs();
                assert!(
                    error <= limit,
                    "{variant} {precision:?} {m}×{inputs}×{outputs} at {at}: {a} for {e}"
                );
            }
        }
    }
}

#[test]
fn scalar_matches_f64() {
    let scalar = Kernels::for_variant(Variant::Scalar).unwrap();
    let pool = pool(1);
    let mut numbers = Numbers(1);
    for (m, inputs, outputs) in SHAPES {
        for precision in [Precision::Bf16, Precision::F32] {
            let (x, w) = (numbers.fractions(m * inputs), numbers.fractions(outputs * inputs));
            let matrix = packed(&pool, &w, outputs, inputs, precision);
            let y = product(scalar, &pool, &matrix, &x, m);
            let stored = |value: f32| match precision {
                Precision::Bf16 => bf16::from_f32(value).to_f64(),
                Precision::F32 => f64::from(value),
            };
            for row in 0..m {
                for output in 0..outputs {
                    let (x, w) = (&x[row * inputs..][..inputs], &w[output * inputs..][..inputs]);
                    let products = x.iter().zip(w).map(|(&x, &w)| stored(x) * stored(w));
                    let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                    let error = (f64::from(y[row * outputs + output]) - sum).abs();
                    assert!(error <= bound(inputs, size), "{m}×{inputs}×{outputs} at {row}, {output}");
                }
            }
        }
    }
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

/// Rows one by one on one thread, against batches of all heights, places and thread counts: equal
/// to the bit.
fn check_rows_are_independent(variant: Variant) {
    let Some(kernels) = kernels_or_note(variant) else { return };
    let (pool_1, pool_3) = (pool(1), pool(3));
    let mut numbers = Numbers(3);
    for (inputs, outputs) in [(1100, 200), (80, 17), (2048, 64)] {
        for precision in [Precision::Bf16, Precision::F32] {
            let rows = 131;
            let (x, w) = (numbers.fractions(rows * inputs), numbers.fractions(outputs * inputs));
            let matrix = packed(&pool_3, &w, outputs, inputs, precision);
            let alone: Vec<u32> = x
                .chunks_exact(inputs)
                .flat_map(|row| bits(&product(kernels, &pool_1, &matrix, row, 1)))
                .collect();
            let mut first = 0;
            for m in (1..=40).chain([96, 97, 131]) {
                first = if first + m > rows { 0 } else { first };
                let x = &x[first * inputs..][..m * inputs];
                for pool in [&pool_1, &pool_3] {
                    let batch = bits(&product(kernels, pool, &matrix, x, m));
                    let expected = &alone[first * outputs..][..m * outputs];
                    assert!(
                        batch == expected,
                        "{variant} {precision:?} {inputs}→{outputs}: {m} from {first}"
                    );
                }
                first += m;
            }
        }
    }
}

#[test]
fn scalar_rows_are_independent() {
    check_rows_are_independent(Variant::Scalar);
}

#[test]
fn avx2_rows_are_independent() {
    check_rows_are_independent(Variant::Avx2);
}

#[test]
fn avx512_rows_are_independent() {
    check_rows_are_independent(Variant::Avx512);
}

#[test]
fn amx_rows_are_independent() {
    check_rows_are_independent(Variant::Amx);
}

#[test]
fn bias_and_accumulation_apply_to_every_output() {
    let pool = pool(2);
    let (m, inputs, outputs) = (37, 80, 145);
    let mut numbers = Numbers(5);
    let (x, w) = (numbers.integers(m * inputs), numbers.integers(outputs * inputs));
    let (bias, before) = (numbers.integers(outputs), numbers.integers(m * outputs));
    let matrix = packed(&pool, &w, outputs, inputs, Precision::Bf16);
    for variant in Variant::available() {
        let kernels = Kernels::for_variant(variant).unwrap();
        let plain = product(kernels, &pool, &matrix, &x, m);
        for (with_bias, accumulate) in [(false, true), (true, false), (true, true)] {
            let mut y = before.clone();
            let epilogue = Epilogue { bias: with_bias.then_some(&bias[..]), accumulate };
            matrix.linear(kernels, &pool, &x, m, &mut y, epilogue, &mut GemmScratch::default());
            for at in 0..y.len() {
                let bias = if with_bias { bias[at % outputs] } else { 0.0 };
                let residual = if accumulate { before[at] } else { 0.0 };
                assert_eq!(y[at], plain[at] + bias + residual, "{variant} bias {with_bias} at {at}");
            }
        }
    }
}

#[test]
fn a_poisoned_row_and_a_dirty_scratch_stay_with_their_row() {
    let pool = pool(2);
    let (m, inputs, outputs) = (40, 81, 70);
    let mut numbers = Numbers(9);
    let (mut x, w) = (numbers.integers(m * inputs), numbers.integers(outputs * inputs));
    let matrix = packed(&pool, &w, outputs, inputs, Precision::Bf16);
    for variant in Variant::available() {
        let kernels = Kernels::for_variant(variant).unwrap();
        let clean = product(kernels, &pool, &matrix, &x, m);
        let mut scratch = GemmScratch::default();
        let mut y = vec![0.0; m * outputs];
        let poison = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        for (row, value) in [3, 17, 39].into_iter().zip(poison) {
            x[row * inputs..][..inputs].fill(value);
        }
        matrix.linear(kernels, &pool, &x, m, &mut y, Epilogue::default(), &mut scratch);
        for row in 0..m {
            let (y, clean) = (&y[row * outputs..][..outputs], &clean[row * outputs..][..outputs]);
            if [3, 17, 39].contains(&row) {
                assert!(y.iter().all(|y| !y.is_finite()), "{variant} row {row}");
            } else {
                assert_eq!(y, clean, "{variant} row {row}");
            }
        }
        // The scratch now holds NaN rows; a smaller product must not see them.
        let x = numbers.integers(2 * inputs);
        let expected = product(kernels, &pool, &matrix, &x, 2);
        let mut y = vec![0.0; 2 * outputs];
        matrix.linear(kernels, &pool, &x, 2, &mut y, Epilogue::default(), &mut scratch);
        assert_eq!(y, expected, "{variant}");
    }
}

#[test]
fn wrong_lengths_are_refused_and_no_rows_are_fine() {
    let pool = pool(1);
    let kernels = Kernels::for_variant(Variant::Scalar).unwrap();
    let matrix = packed(&pool, &[1.0; 12], 3, 4, Precision::F32);
    let attempt = |x: usize, m: usize, y: usize, bias: usize| {
        let (x, mut y, bias) = (vec![0.0; x], vec![0.0; y], vec![0.0; bias]);
        let epilogue = Epilogue { bias: Some(&bias), accumulate: false };
        catch_unwind(AssertUnwindSafe(|| {
            matrix.linear(kernels, &pool, &x, m, &mut y, epilogue, &mut GemmScratch::default());
        }))
    };
    assert!(attempt(8, 2, 6, 3).is_ok());
    assert!(attempt(0, 0, 0, 3).is_ok());
    assert!(attempt(7, 2, 6, 3).is_err());
    assert!(attempt(8, 2, 7, 3).is_err());
    assert!(attempt(8, 2, 6, 4).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_shape_is_exact_on_integers(m in 1_usize..70, inputs in 1_usize..300, outputs in 1_usize..150, seed: u64) {
        let pool = pool(2);
        let mut numbers = Numbers(seed);
        let (x, w) = (numbers.integers(m * inputs), numbers.integers(outputs * inputs));
        for precision in [Precision::Bf16, Precision::F32] {
            let matrix = packed(&pool, &w, outputs, inputs, precision);
            for variant in Variant::available() {
                let y = product(Kernels::for_variant(variant).unwrap(), &pool, &matrix, &x, m);
                for at in 0..y.len() {
                    let (x, w) = (&x[at / outputs * inputs..][..inputs], &w[at % outputs * inputs..][..inputs]);
                    let expected: f32 = x.iter().zip(w).map(|(x, w)| x * w).sum();
                    prop_assert_eq!(y[at], expected, "{} {:?} at {}", variant, precision, at);
                }
            }
        }
    }
}
