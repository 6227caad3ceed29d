//! Pages: partial fills, tiles, layouts, hostile rows, wrong sizes.

use crate::support::Random;
use oscar_codec::{
    CodeLayout, Composition, HeadRotations, KvFormat, Rotation, RotationSet, RowPageCodec, Side,
};
use proptest::prelude::*;

fn formats() -> Vec<KvFormat> {
    let mut all = KvFormat::all();
    all.push("int4-g32".parse().unwrap());
    // Formats that group keys along tokens cannot be coded row by row: see `rivals`.
    all.retain(|f| f.codec(128, f.native_layout()).is_ok_and(|c| c.token_groups(Side::Key).is_none()));
    all
}

struct Encoded {
    codec: RowPageCodec,
    keys: Vec<f32>,
    values: Vec<f32>,
    page: Vec<u8>,
}

/// A page of random rows, where the format exists in that layout.
fn encoded(format: KvFormat, d: usize, layout: CodeLayout, seed: u64) -> Option<Encoded> {
    let codec = format.codec(d, layout).ok()?;
    let mut random = Random::new(seed);
    let (keys, values) = (random.rows(64 * d), random.rows(64 * d));
    let mut page = vec![0; codec.page_bytes()];
    codec.quantize(&keys, &values, &mut page).unwrap();
    Some(Encoded { codec, keys, values, page })
}

#[test]
fn every_layout_holds_the_same_page() {
    for format in formats() {
        for d in [64, 96, 128, 256] {
            let Some(Encoded { codec: logical, page, .. }) = encoded(format, d, CodeLayout::Logical, 3)
            else {
                continue;
            };
            for layout in [CodeLayout::Official, CodeLayout::CpuTile, CodeLayout::GpuTile] {
                let Some(Encoded { codec, page: direct, .. }) = encoded(format, d, layout, 3) else {
                    continue;
                };
                let (other, moved) = logical.relayout(&page, layout).unwrap();
                assert_eq!(other, codec);
                assert_eq!(moved, direct, "{format} in {layout:?}, head {d}");
                let (_, back) = other.relayout(&moved, CodeLayout::Logical).unwrap();
                assert_eq!(back, page, "{format} back from {layout:?}");
            }
        }
    }
}

#[test]
fn tiles_fill_a_page_as_one_encode_does() {
    for format in formats() {
        for layout in [CodeLayout::Logical, CodeLayout::CpuTile, CodeLayout::GpuTile] {
            let Some(Encoded { codec, keys, values, page: whole }) = encoded(format, 128, layout, 11) else {
                continue;
            };
            let mut page = vec![0; codec.page_bytes()];
            for tile in [2, 0, 3, 1] {
                let rows = tile * 16 * 128..(tile + 1) * 16 * 128;
                codec.quantize_tile(tile, &keys[rows.clone()], &values[rows], &mut page).unwrap();
            }
            assert_eq!(page, whole, "{format} {layout:?}");
            // A partial page decodes to the same rows as the full one.
            let mut part = vec![0xaa; codec.page_bytes()];
            codec.quantize(&keys[..21 * 128], &values[..21 * 128], &mut part).unwrap();
            let (mut k, mut v) = (vec![0.0; 21 * 128], vec![0.0; 21 * 128]);
            let (mut k2, mut v2) = (k.clone(), v.clone());
            codec.dequantize_rows(0, &part, &mut k, &mut v).unwrap();
            codec.dequantize_rows(0, &whole, &mut k2, &mut v2).unwrap();
            assert_eq!((k, v), (k2, v2));
        }
    }
}

#[test]
fn hostile_rows_are_defined() {
    let subnormal = f32::from_bits(1);
    let rows: Vec<Vec<f32>> = vec![
        vec![f32::NAN; 128],
        vec![f32::INFINITY; 128],
        vec![f32::NEG_INFINITY; 128],
        vec![0.0; 128],
        vec![-0.0; 128],
        vec![3.5; 128],
        vec![subnormal; 128],
        (0..128).map(|i| if i % 2 == 0 { subnormal } else { -subnormal }).collect(),
        (0..128).map(|i| 10_000.0 + (i % 7) as f32).collect(),
        (0..128).map(|i| if i == 5 { f32::MAX } else { 1.0 }).collect(),
        (0..128).map(|i| if i % 3 == 0 { f32::NAN } else { i as f32 }).collect(),
        (0..128).map(|i| if i % 2 == 0 { f32::MAX } else { f32::MIN }).collect(),
    ];
    for format in formats().into_iter().filter(|f| f.is_coded()) {
        let codec = format.codec(128, format.native_layout()).unwrap();
        for row in &rows {
            let mut page = vec![0; codec.page_bytes()];
            codec.quantize(row, row, &mut page).unwrap();
            let (mut k, mut v) = (vec![0.0; 128], vec![0.0; 128]);
            codec.dequantize_rows(0, &page, &mut k, &mut v).unwrap();
            assert!(
                k.iter().chain(&v).all(|x| x.is_finite()),
                "{format}: {:?} gave {:?}",
                &row[..3],
                &k[..3]
            );
            if row.iter().all(|x| x.abs() < 1e-30) {
                // fp32 official scale is floored at 1e-8/3, the Lloyd–Max deviation at 1e-4.
                assert!(k.iter().all(|x| x.abs() < 3e-4), "{format}: zeros stay near zero, got {}", k[0]);
            }
        }
    }
}

#[test]
fn wrong_sizes_are_refused_by_name() {
    let codec = KvFormat::OSCAR2.codec(128, CodeLayout::CpuTile).unwrap();
    let mut page = vec![0; codec.page_bytes()];
    let rows = vec![0.0; 16 * 128];
    for (error, needle) in [
        (codec.quantize(&rows, &rows[1..], &mut page), "values"),
        (codec.quantize(&rows[1..], &rows[1..], &mut page), "keys"),
        (codec.quantize(&vec![0.0; 65 * 128], &vec![0.0; 65 * 128], &mut page), "65 tokens"),
        (codec.quantize_rows(60, &rows, &rows, &mut page), "76 tokens"),
        (codec.quantize_tile(4, &rows, &rows, &mut page), "tile 4"),
        (codec.quantize_tile(0, &rows[..128], &rows[..128], &mut page), "tile"),
        (codec.quantize(&rows, &rows, &mut page[1..]), "4608"),
    ] {
        let message = error.unwrap_err().to_string();
        assert!(message.contains(needle), "'{message}' should mention '{needle}'");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// P only permutes channels, so with one group a head it cannot change the error of a row.
    #[test]
    fn permutation_is_a_no_op_for_whole_head_groups(seed in 0u64..10_000) {
        let mut random = Random::new(seed);
        let d = 64;
        let basis = oscar_codec::hadamard::matrix(d);
        let with = Rotation::compose(Composition::RHPbr, d, &basis).unwrap();
        let without = Rotation::compose(Composition::RH, d, &basis).unwrap();
        let row = random.rows(d);
        let codec = KvFormat::OSCAR2.codec(d, CodeLayout::Logical).unwrap();
        let error = |r: &Rotation| {
            let (mut x, mut page) = (vec![0.0; d], vec![0; codec.page_bytes()]);
            r.apply(&row, &mut x);
            codec.quantize(&x, &x, &mut page).unwrap();
            let (mut k, mut v) = (vec![0.0; d], vec![0.0; d]);
            codec.dequantize_rows(0, &page, &mut k, &mut v).unwrap();
            x.iter().zip(&k).map(|(a, b)| ((a - b) as f64).powi(2)).sum::<f64>()
        };
        let (a, b) = (error(&with), error(&without));
        prop_assert!((a - b).abs() <= 1e-5 * a.max(1e-9), "{a} against {b}");
    }

    #[test]
    fn any_bits_of_input_give_finite_rows(bits in prop::collection::vec(any::<u32>(), 128), which in 0usize..60) {
        let all = formats();
        let format = all[which % all.len()];
        if format.is_coded() {
            let row: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
            let codec = format.codec(128, format.native_layout()).unwrap();
            let mut page = vec![0; codec.page_bytes()];
            codec.quantize(&row, &row, &mut page).unwrap();
            let (mut k, mut v) = (vec![0.0; 128], vec![0.0; 128]);
            codec.dequantize_rows(0, &page, &mut k, &mut v).unwrap();
            prop_assert!(k.iter().chain(&v).all(|x| x.is_finite()));
        }
    }

    /// Encoding what was dequantized gives the same page, for every unclipped affine width.
    #[test]
    fn encode_of_decode_is_idempotent(seed in 0u64..10_000, bits in prop::sample::select(vec![2u8, 3, 4])) {
        let format = KvFormat::Int { bits, group: 0 };
        let Encoded { codec, page, .. } = encoded(format, 64, CodeLayout::CpuTile, seed).unwrap();
        let (mut k, mut v) = (vec![0.0; 64 * 64], vec![0.0; 64 * 64]);
        codec.dequantize_rows(0, &page, &mut k, &mut v).unwrap();
        let mut again = vec![0; codec.page_bytes()];
        codec.quantize(&k, &v, &mut again).unwrap();
        prop_assert_eq!(page, again);
    }
}

#[test]
fn key_mean_survives_broadcast_and_side_names_do_not_mix() {
    let heads = HeadRotations {
        key: Rotation::hadamard(64).unwrap(),
        value: Rotation::identity(64).unwrap(),
        key_mean: Some(vec![0.5; 64]),
    };
    let set = RotationSet::per_layer(2, 64, vec![heads.clone()]).unwrap();
    assert_eq!(set.get(0, 1).unwrap(), &heads);
    assert_ne!(KvFormat::OSCAR2.side_spec(Side::Key).clip, KvFormat::OSCAR2.side_spec(Side::Value).clip);
}
