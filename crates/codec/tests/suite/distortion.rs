//! Distortion of Gaussian rows of 128, against the published simulation.

use crate::support::Random;
use oscar_codec::lloyd_max::Variant;
use oscar_codec::page::Scheme;
use oscar_codec::{CodeLayout, RowPageCodec, SideSpec};

fn snr_db(spec: SideSpec) -> f64 {
    let codec = RowPageCodec::new(128, spec, spec, CodeLayout::Logical).unwrap();
    let mut random = Random::new(7);
    let (mut signal, mut noise) = (0f64, 0f64);
    for _ in 0..24 {
        let keys = random.rows(64 * 128);
        let values = random.rows(64 * 128);
        let mut page = vec![0; codec.page_bytes()];
        codec.quantize(&keys, &values, &mut page).unwrap();
        let (mut k, mut v) = (vec![0.0; keys.len()], vec![0.0; keys.len()]);
        codec.dequantize_rows(0, &page, &mut k, &mut v).unwrap();
        for (x, y) in keys.iter().chain(&values).zip(k.iter().chain(&v)) {
            signal += (*x as f64).powi(2);
            noise += (*x as f64 - *y as f64).powi(2);
        }
    }
    10.0 * (signal / noise).log10()
}

#[test]
fn gaussian_rows_lose_what_theory_says() {
    let lloyd = |variant, clip| SideSpec { scheme: Scheme::LloydMax(variant), bits: 2, group: 0, clip };
    for (name, spec, expected) in [
        ("min-max", SideSpec::affine(2, 0.0), 6.0),
        ("clip 0.96", SideSpec::affine(2, 0.96), 8.1),
        ("clip 0.92", SideSpec::affine(2, 0.92), 8.95),
        ("Lloyd-Max", lloyd(Variant::Exact, 0.0), 9.35),
        ("Lloyd-Max, official ratio", lloyd(Variant::OfficialRatio, 0.96), 8.51),
        ("groups of 32", SideSpec { group: 32, ..SideSpec::affine(2, 0.0) }, 8.11),
    ] {
        let snr = snr_db(spec);
        assert!((snr - expected).abs() < 0.1, "{name}: {snr:.2} dB, expected {expected}");
    }
}

#[test]
fn more_bits_lose_less() {
    let snr: Vec<f64> = [1, 2, 3, 4, 8].map(|bits| snr_db(SideSpec::affine(bits, 0.0))).to_vec();
    assert!(snr.windows(2).all(|pair| pair[1] > pair[0] + 1.0), "{snr:?}");
    // One bit at mean ± mean absolute deviation: 1 − 2/π of the variance is lost, 4.4 dB.
    assert!((snr[0] - 4.4).abs() < 0.15, "{snr:?}");
}
