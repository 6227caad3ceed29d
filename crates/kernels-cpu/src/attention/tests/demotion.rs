//! Demotion against `quantize_tile`, byte for byte.

use super::*;
use crate::attention::demote::has_fast_path;
use crate::attention::{append_rows, demote_tile};
use oscar_codec::{Feedback, Rounding, SideSpec};

/// Demotes a tile of these rows with every variant and compares with the codec.
fn check(name: &str, coded: &RowPageCodec, keys: &[f32], values: &[f32]) {
    let d = coded.head_dim();
    let full = KvFormat::Bf16.codec(d, CodeLayout::CpuTile).unwrap();
    for tile in [0, 3] {
        let mut full_page = vec![0xff; full.page_bytes()];
        append_rows(&full, &mut full_page, tile * TILE_TOKENS, keys, values).unwrap();
        let (mut kept_keys, mut kept_values) = (vec![0.0; keys.len()], vec![0.0; values.len()]);
        full.dequantize_rows(tile * TILE_TOKENS, &full_page, &mut kept_keys, &mut kept_values).unwrap();
        let mut expected = vec![0xa5; coded.page_bytes()];
        coded.quantize_tile(tile, &kept_keys, &kept_values, &mut expected).unwrap();
        for variant in Variant::available() {
            let mut got = vec![0xa5; coded.page_bytes()];
            demote_tile(variant, &full, &full_page, coded, &mut got, tile).unwrap();
            let first = got.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(first, None, "{variant}, {name}, head {d}, tile {tile}: first differing byte");
            // Tasks of the pool run with subnormals flushed, which the sign of a tiny minimum may
            // show: the codec in the same mode is the measure.
            let (mut got, mut expected) = (vec![0xa5; coded.page_bytes()], vec![0xa5; coded.page_bytes()]);
            crate::float_env::with_ftz(|| {
                demote_tile(variant, &full, &full_page, coded, &mut got, tile).unwrap();
                coded.quantize_tile(tile, &kept_keys, &kept_values, &mut expected).unwrap();
            });
            assert!(got == expected, "{variant}, {name}, head {d}, tile {tile}: flushing shows");
        }
    }
}

fn codecs() -> Vec<RowPageCodec> {
    let mut all = Vec::new();
    for d in [32, 64, 80, 96, 128, 256] {
        for bits in [1, 2, 3, 4, 5, 8] {
            for clips in [None, Some((0.96, 0.92)), Some((0.5, 1.0)), Some((0.001, 0.0))] {
                let spec = |clip: Option<f64>, default: f64| SideSpec::affine(bits, clip.unwrap_or(default));
                let key = spec(clips.map(|c| c.0), 0.0);
                let value = spec(clips.map(|c| c.1), 0.0);
                all.extend(RowPageCodec::new(d, key, value, CodeLayout::CpuTile));
            }
        }
    }
    all
}

/// Queries of a few directions, no axis among them.
fn feedback(d: usize) -> Feedback {
    let mut random = Random::new(d as u64);
    let mut metric = vec![0.0; d * d];
    for strength in [9.0, 4.0, 2.0, 1.0, 1.0] {
        let direction: Vec<f64> = (0..d).map(|_| f64::from(random.normal())).collect();
        for i in 0..d {
            for j in 0..d {
                metric[i * d + j] += strength * direction[i] * direction[j];
            }
        }
    }
    Feedback::of_metric(d, &metric).unwrap()
}

#[test]
fn demotion_is_bit_exact() {
    let _ = fast_variants();
    codecs().iter().for_each(check_all_rows);
}

#[test]
fn rounded_demotion_is_bit_exact() {
    for (i, codec) in codecs().into_iter().enumerate().filter(|(_, codec)| codec.spec(Side::Key).clip != 0.5)
    {
        let feedback = (i % 3 > 0).then(|| feedback(codec.head_dim()));
        let rounding = Rounding { unbiased: i % 3 < 2, feedback };
        check_all_rows(&codec.with_rounding(rounding).unwrap());
    }
}

fn check_all_rows(codec: &RowPageCodec) {
    let n = TILE_TOKENS * codec.head_dim();
    let mut random = Random::new(n as u64);
    let mut rows = |make: &dyn Fn(&mut Random, usize) -> f32| -> Vec<f32> {
        (0..n).map(|i| make(&mut random, i)).collect()
    };
    let cases: [(&str, Vec<f32>); 10] = [
        ("random", rows(&|r, _| r.normal())),
        ("large", rows(&|r, _| 3e4 * r.normal())),
        ("offset", rows(&|r, _| 300.0 + r.normal())),
        ("outliers", rows(&|r, i| r.normal() * if i % 37 == 0 { 1e3 } else { 1.0 })),
        ("ties", rows(&|r, _| (3.0 * r.normal()).round() * 0.5)),
        ("constant", rows(&|_, i| (i / 128 % 5) as f32 - 2.0)),
        ("signed zeros", rows(&|r, _| if r.uniform() > 0.0 { 0.0 } else { -0.0 })),
        ("half zeros", rows(&|r, _| if r.uniform() > 0.3 { r.uniform().max(0.0) } else { -0.0 })),
        ("subnormal", rows(&|r, _| 1e-39 * r.normal())),
        (
            "not numbers",
            rows(&|r, i| match i % 29 {
                3 => f32::NAN,
                7 => f32::INFINITY,
                11 => f32::NEG_INFINITY,
                13 => f32::MAX,
                _ => r.normal(),
            }),
        ),
    ];
    for (i, (name, keys)) in cases.iter().enumerate() {
        check(name, codec, keys, &cases[(i + 1) % cases.len()].1);
        check(name, codec, keys, keys);
    }
}

#[test]
fn other_codecs_take_the_scalar_path_and_agree() {
    let mut random = Random::new(12);
    let rows: Vec<f32> = (0..TILE_TOKENS * 64).map(|_| random.normal()).collect();
    for format in ["oscar2-lloyd", "oscar2-official", "int4-g32", "bf16"] {
        let format: KvFormat = format.parse().unwrap();
        let coded = format.codec(64, CodeLayout::CpuTile).unwrap();
        let full = KvFormat::Bf16.codec(64, CodeLayout::CpuTile).unwrap();
        for variant in Variant::available() {
            assert!(!has_fast_path(variant, &full, &coded));
        }
        check(&format.to_string(), &coded, &rows, &rows);
    }
}

#[test]
fn wrong_sizes_are_refused() {
    let full = KvFormat::Bf16.codec(64, CodeLayout::CpuTile).unwrap();
    let coded = KvFormat::OSCAR2.codec(64, CodeLayout::CpuTile).unwrap();
    let other = KvFormat::OSCAR2.codec(128, CodeLayout::CpuTile).unwrap();
    let page = vec![0; full.page_bytes()];
    let variant = Variant::best();
    let mut out = vec![0; coded.page_bytes()];
    assert!(demote_tile(variant, &full, &page, &coded, &mut out, 4).is_err());
    assert!(demote_tile(variant, &full, &page[1..], &coded, &mut out, 0).is_err());
    assert!(demote_tile(variant, &full, &page, &coded, &mut out[1..], 0).is_err());
    let mut out = vec![0; other.page_bytes()];
    assert!(demote_tile(variant, &full, &page, &other, &mut out, 0).is_err());
}
