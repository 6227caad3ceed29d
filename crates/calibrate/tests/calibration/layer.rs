//! One recorded layer: statistics, spectra and rotations as published, and the facts of the paper.

use crate::support::{GRID, TOKENS, fixture, statistics};
use oscar_calibrate::Statistic;
use oscar_calibrate::quality::{key_error, measure, recode};
use oscar_calibrate::sample::rotate_rows;
use oscar_calibrate::spectrum::Spectrum;
use oscar_calibrate::symmetric::Symmetric;
use oscar_codec::{CodeLayout, Composition, HeadRotations, KvFormat, Rotation};

const D: usize = 128;

/// Largest difference of a matrix from the published one, relative to its largest entry.
fn difference(found: &Symmetric, published: &[f32]) -> f64 {
    let largest = published.iter().fold(0.0f64, |m, &v| m.max(f64::from(v).abs()));
    let found = found.to_full();
    assert_eq!(found.len(), published.len());
    found.iter().zip(published).fold(0.0f64, |m, (a, &b)| m.max((a - f64::from(b)).abs())) / largest
}

fn layer_mean(matrices: impl Iterator<Item = Symmetric>) -> Symmetric {
    let mut mean = Symmetric::zeros(D);
    matrices.for_each(|m| mean.add_scaled(&m, 0.5));
    mean
}

#[test]
fn covariances_are_the_published_ones_whatever_the_chunks() {
    let c_q = fixture("c_q");
    for (statistic, name) in [(Statistic::Coded, "c_s_coded"), (Statistic::Paper, "c_s_paper")] {
        let published = fixture(name);
        for chunk in [192, 50, 1] {
            let (heads, _) = statistics(statistic, chunk);
            for (h, head) in heads.iter().enumerate() {
                let part = h * D * D..(h + 1) * D * D;
                let error = difference(&head.query, &c_q[part.clone()]);
                assert!(error < 1e-5, "query, head {h}, chunks of {chunk}: {error:.2e}");
                let error = difference(&head.value, &published[part]);
                assert!(error < 1e-5, "{name}, head {h}, chunks of {chunk}: {error:.2e}");
            }
        }
    }
}

#[test]
fn token_weights_are_the_published_ones() {
    let (heads, _) = statistics(Statistic::Coded, 64);
    let (k, published) = (fixture("k"), fixture("v_weights"));
    for (h, head) in heads.iter().enumerate() {
        let energy: Vec<f64> =
            (0..TOKENS).map(|t| head.query.quadratic(&k[(t * GRID.kv_heads + h) * D..][..D])).collect();
        let scale = TOKENS as f64 / energy.iter().sum::<f64>();
        for (t, w) in energy.iter().enumerate() {
            let truth = f64::from(published[h * TOKENS + t]);
            assert!((w * scale - truth).abs() <= 1e-5 * truth.abs().max(1.0), "head {h}, token {t}");
        }
    }
}

#[test]
fn plain_statistics_and_means_are_what_they_say() {
    let (heads, samples) = statistics(Statistic::Plain, 37);
    let (k, v) = (fixture("k"), fixture("v"));
    for (h, head) in heads.iter().enumerate() {
        let of = |x: &[f32], t: usize, c: usize| f64::from(x[(t * GRID.kv_heads + h) * D + c]);
        for (i, j) in [(0, 0), (5, 90), (127, 127), (64, 3)] {
            let second =
                |x: &[f32]| (0..TOKENS).map(|t| of(x, t, i) * of(x, t, j)).sum::<f64>() / TOKENS as f64;
            assert!((head.value.get(i, j) - second(&v)).abs() < 1e-5 * head.value.trace());
        }
        for c in 0..D {
            let mean = (0..TOKENS).map(|t| of(&k, t, c)).sum::<f64>() / TOKENS as f64;
            assert!((head.key_mean[c] - mean).abs() < 1e-9 + 1e-9 * mean.abs());
        }
        // Every sampled row is one of the recorded rows, rounded to BF16.
        for row in samples[h].keys.chunks_exact(D) {
            let near = |t: usize| {
                (0..D).all(|c| (f64::from(row[c]) - of(&k, t, c)).abs() <= of(&k, t, c).abs() / 250.0)
            };
            assert!((64..TOKENS).any(near), "a sampled key is none of the recorded ones");
        }
    }
}

#[test]
fn layer_spectra_and_rotations_are_the_official_ones() {
    let (heads, _) = statistics(Statistic::Coded, 192);
    let query = layer_mean(heads.iter().map(|h| h.query.clone()));
    let value = layer_mean(heads.iter().map(|h| h.value.clone()));
    for (matrix, eigenvalues, rotation) in
        [(&query, "eig_q_layer", "rotation_k_layer"), (&value, "eig_s_layer", "rotation_v_layer")]
    {
        let spectrum = Spectrum::of(matrix).unwrap();
        let published = fixture(eigenvalues);
        let largest = f64::from(published[D - 1]);
        for (i, (&found, &truth)) in spectrum.values.iter().zip(&published).enumerate() {
            assert!((found - f64::from(truth)).abs() < 1e-5 * largest, "{eigenvalues}[{i}]: {found} {truth}");
        }
        // Signs of eigenvectors are free, RᵀCR is not: it is PᵀHᵀΛHP for every choice of them.
        let ours = spectrum.rotation(Composition::RHPbr).unwrap();
        let official = Rotation::from_matrix(D, fixture(rotation)).unwrap();
        let (a, b) = (matrix.rotated(&ours).to_full(), matrix.rotated(&official).to_full());
        let worst = a.iter().zip(&b).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
        assert!(worst < 1e-5 * largest, "{rotation}: RᵀCR differs by {worst:.2e} of {largest:.2e}");
    }
}

#[test]
fn hadamard_spreads_every_spectrum_evenly() {
    let (heads, _) = statistics(Statistic::Paper, 192);
    for head in &heads {
        let spectrum = Spectrum::of(&head.query).unwrap();
        let spread = head.query.rotated(&spectrum.rotation(Composition::RH).unwrap());
        let even = head.query.trace() / D as f64;
        for i in 0..D {
            assert!((spread.get(i, i) - even).abs() < 1e-4 * even, "diag(HᵀΛH) is tr Λ / d everywhere");
        }
        let ratio = spectrum.participation_ratio();
        assert!((1.0..=D as f64).contains(&ratio), "{ratio}");
    }
}

/// Orthogonal matrices by Gram–Schmidt on pseudo-random columns.
fn random_rotation(seed: u64) -> Rotation {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    let mut rows: Vec<Vec<f64>> = (0..D).map(|_| (0..D).map(|_| next()).collect()).collect();
    for i in 0..D {
        for _ in 0..2 {
            for j in 0..i {
                let (done, rest) = rows.split_at_mut(i);
                let dot: f64 = rest[0].iter().zip(&done[j]).map(|(a, b)| a * b).sum();
                rest[0].iter_mut().zip(&done[j]).for_each(|(a, b)| *a -= dot * b);
            }
            let norm = rows[i].iter().map(|v| v * v).sum::<f64>().sqrt();
            rows[i].iter_mut().for_each(|v| *v /= norm);
        }
    }
    Rotation::from_matrix(D, rows.into_iter().flatten().map(|v| v as f32).collect()).unwrap()
}

/// Theorem 1: with errors frozen in the ambient basis, the largest where the spectrum is smallest, no rotation has a
/// smaller tr(RᵀC_Q R E) than the eigenbasis.
#[test]
fn the_eigenbasis_minimizes_the_frozen_error() {
    let (heads, _) = statistics(Statistic::Paper, 192);
    let error: Vec<f64> = (0..D).map(|i| 1.0 / (1.0 + i as f64)).collect();
    for head in &heads {
        let surrogate = |rotation: &Rotation| {
            let rotated = head.query.rotated(rotation);
            (0..D).map(|i| rotated.get(i, i) * error[i]).sum::<f64>()
        };
        let own = surrogate(&Spectrum::of(&head.query).unwrap().rotation(Composition::Plain).unwrap());
        let hadamard = surrogate(&Rotation::hadamard(D).unwrap());
        assert!(own < hadamard, "{own} {hadamard}");
        for seed in 1..=20 {
            let other = surrogate(&random_rotation(seed));
            assert!(own < other, "rotation {seed}: {own} {other}");
        }
    }
}

#[test]
fn calibrated_rotations_beat_hadamard_on_logits() {
    let (heads, samples) = statistics(Statistic::Paper, 192);
    for (head, sample) in heads.iter().zip(&samples) {
        let rotation =
            |matrix: &Symmetric| Spectrum::of(matrix).unwrap().rotation(Composition::RHPbr).unwrap();
        let mean: Vec<f32> = head.key_mean.iter().map(|&v| v as f32).collect();
        let (key, value) = (rotation(&head.query), rotation(&head.value));
        let hadamard = Rotation::hadamard(D).unwrap();
        let codec = KvFormat::OSCAR2.codec(D, CodeLayout::Logical).unwrap();
        let error = |rotation: &Rotation, mean: Option<&[f32]>| {
            let rows = rotate_rows(&sample.keys, mean, rotation);
            let (decoded, _) = recode(&codec, &rows, &rows).unwrap();
            key_error(&rows, &decoded, &head.query.rotated(rotation))
        };
        let (free, own, centred) = (error(&hadamard, None), error(&key, None), error(&key, Some(&mean)));
        assert!(own < free, "calibrated {own:.3} against Hadamard {free:.3}");
        assert!(centred < free, "centred {centred:.3} against Hadamard {free:.3}");

        let own = HeadRotations { key, value, key_mean: Some(mean) };
        let quality = measure(sample, &head.query, &own, (0.96, 0.92), (2, 2)).unwrap();
        let logits = quality.logits;
        println!("logits {logits:?}, values {:?}", quality.values);
        assert!(logits.calibrated > logits.hadamard && logits.calibrated > logits.naive, "{logits:?}");
    }
}
