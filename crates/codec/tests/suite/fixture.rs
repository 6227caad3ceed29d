//! Bit-exactness with the official quantizer, from rows and results recorded with the official
//! code.

use oscar_codec::page::Scheme;
use oscar_codec::{CodeLayout, KvFormat, RowPageCodec, Side, SideSpec};
use safetensors::SafeTensors;

const FIXTURE: &[u8] = include_bytes!("../fixtures/calibration_layer.safetensors");

fn floats(t: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    t.tensor(name)
        .unwrap()
        .data()
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

#[test]
fn official_codec_reproduces_the_recorded_bytes() {
    let t = SafeTensors::deserialize(FIXTURE).unwrap();
    let (keys, values) = (floats(&t, "k_rotated"), floats(&t, "v_rotated"));
    let codec = KvFormat::Oscar2Official.codec(128, CodeLayout::Official).unwrap();
    let mut page = vec![0; codec.page_bytes()];
    codec.quantize(&keys, &values, &mut page).unwrap();
    for (side, prefix) in [(Side::Key, "k"), (Side::Value, "v")] {
        let packed = t.tensor(&format!("{prefix}_packed")).unwrap();
        assert_eq!(&page[codec.codes_range(side)][..16 * 32], packed.data(), "{prefix}: packed bytes");
        let codes = t.tensor(&format!("{prefix}_codes")).unwrap();
        for (i, &code) in codes.data().iter().enumerate() {
            assert_eq!(
                codec.code(side, &page, i / 128, i % 128),
                code,
                "{prefix}: row {} channel {}",
                i / 128,
                i % 128
            );
        }
        // Scale and zero to the last bit: the same fp32 operations in the same order.
        let (scales, zeros) = (floats(&t, &format!("{prefix}_scale")), floats(&t, &format!("{prefix}_zero")));
        let params = &page[codec.params_range(side)];
        for token in 0..16 {
            let at = |i: usize| f32::from_le_bytes(params[(2 * token + i) * 4..][..4].try_into().unwrap());
            assert_eq!(at(0).to_bits(), scales[token].to_bits(), "{prefix}: scale of row {token}");
            assert_eq!(at(1).to_bits(), zeros[token].to_bits(), "{prefix}: zero of row {token}");
        }
    }
}

#[test]
fn golden_ramp_row() {
    // x_i = ((37 i mod 128) − 63.5)/16 clipped at index 122: published scale, zero and first bytes.
    let row: Vec<f32> = (0..128).map(|i| ((37 * i % 128) as f32 - 63.5) / 16.0).collect();
    let spec = SideSpec { scheme: Scheme::OfficialAffine, bits: 2, group: 0, clip: 0.96 };
    let codec = RowPageCodec::new(128, spec, spec, CodeLayout::Official).unwrap();
    let mut page = vec![0; codec.page_bytes()];
    codec.quantize(&row, &row, &mut page).unwrap();
    assert_eq!(page[..8], [164, 41, 78, 147, 228, 121, 94, 164]);
    let p = codec.group_params(Side::Key, &page, 0, 0);
    assert_eq!((p.scale, p.offset), (2.5625, -1.5 * 2.5625));
}

#[test]
fn our_format_differs_from_the_official_one_only_by_rounding_of_the_pair() {
    let t = SafeTensors::deserialize(FIXTURE).unwrap();
    let (keys, values) = (floats(&t, "k_rotated"), floats(&t, "v_rotated"));
    let dequantize = |format: KvFormat| {
        let codec = format.codec(128, format.native_layout()).unwrap();
        let mut page = vec![0; codec.page_bytes()];
        codec.quantize(&keys, &values, &mut page).unwrap();
        let (mut k, mut v) = (vec![0.0; keys.len()], vec![0.0; keys.len()]);
        codec.dequantize_rows(0, &page, &mut k, &mut v).unwrap();
        (k, v)
    };
    let (ours, official) = (dequantize(KvFormat::OSCAR2), dequantize(KvFormat::Oscar2Official));
    let error = |rows: &[f32], dequantized: &[f32]| -> f64 {
        rows.iter().zip(dequantized).map(|(a, b)| ((a - b) as f64).powi(2)).sum()
    };
    assert!(error(&keys, &ours.0) < error(&keys, &official.0) * 1.001);
    assert!(error(&values, &ours.1) < error(&values, &official.1) * 1.001);
}
