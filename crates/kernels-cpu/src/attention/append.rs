//! Storing fresh rows in BF16 pages.

use oscar_codec::page::Scheme;
use oscar_codec::{CodeLayout, CodecError, PAGE_TOKENS, RowPageCodec, Side};

use crate::ops::convert::f32_to_bf16;

/// Stores rows `first_token..` of a BF16 page in [`CodeLayout::CpuTile`] order, rounded to nearest
/// even, exactly as
/// `codec.quantize_rows` does. Other codecs go through that function. Rows that are keys and values in
/// one are stored once.
///
/// # Errors
/// When sizes do not match the codec or the rows do not fit the page.
pub fn append_rows(
    codec: &RowPageCodec,
    page: &mut [u8],
    first_token: usize,
    keys: &[f32],
    values: &[f32],
) -> Result<(), CodecError> {
    let d = codec.head_dim();
    let bf16 = |side| codec.spec(side).scheme == Scheme::Bf16;
    let shared = codec.shares_rows();
    let tokens = keys.len() / d;
    let regular = codec.layout() == CodeLayout::CpuTile
        && bf16(Side::Key)
        && (shared || bf16(Side::Value))
        && keys.len() == tokens * d
        && values.len() == keys.len()
        && page.len() == codec.page_bytes()
        && first_token + tokens <= PAGE_TOKENS;
    if !regular {
        return codec.quantize_rows(first_token, keys, values, page);
    }
    let (key_half, value_half) = page.split_at_mut(codec.codes_range(Side::Value).start);
    for (i, (key, value)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
        let token = first_token + i;
        // Keys: [tile][channel pair][16 tokens][2], so a pair is one 4-byte store every 64 bytes.
        let lines = key_half[token / 16 * 32 * d..][..32 * d].chunks_exact_mut(64);
        for (pair, line) in key.chunks_exact(2).zip(lines) {
            let bits = u32::from(f32_to_bf16(pair[0])) | u32::from(f32_to_bf16(pair[1])) << 16;
            line[4 * (token % 16)..][..4].copy_from_slice(&bits.to_le_bytes());
        }
        if shared {
            continue;
        }
        // Values: [token pair][channel][2].
        let lanes = value_half[token / 2 * 4 * d..][..4 * d].chunks_exact_mut(4);
        let half = 2 * (token % 2);
        for (&v, lane) in value.iter().zip(lanes) {
            lane[half..half + 2].copy_from_slice(&f32_to_bf16(v).to_le_bytes());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::KvFormat;
    use oscar_codec::page::SideSpec;

    #[test]
    fn append_matches_the_codec_bit_for_bit() {
        let special =
            [0.0, -0.0, f32::NAN, f32::INFINITY, -f32::INFINITY, 1e-40, -3e-39, f32::MAX, 1.003_906_2];
        for d in [32, 80, 128, 256] {
            let codec = KvFormat::Bf16.codec(d, CodeLayout::CpuTile).unwrap();
            for (first, n) in [(0, 64), (0, 1), (13, 1), (31, 7), (63, 1), (5, 0)] {
                let value = |i: usize| match i % 7 {
                    0 => special[i / 7 % special.len()],
                    _ => ((i * 7919 % 1009) as f32 - 504.0) / 77.0,
                };
                let keys: Vec<f32> = (0..n * d).map(value).collect();
                let values: Vec<f32> = (0..n * d).map(|i| value(i + 3)).collect();
                let (mut ours, mut theirs) = (vec![7; codec.page_bytes()], vec![7; codec.page_bytes()]);
                append_rows(&codec, &mut ours, first, &keys, &values).unwrap();
                codec.quantize_rows(first, &keys, &values, &mut theirs).unwrap();
                assert_eq!(ours, theirs, "head {d}, rows {first}+{n}");
            }
        }
    }

    #[test]
    fn shared_rows_are_stored_as_the_codec_does() {
        let spec = |side| KvFormat::Bf16.side_spec(side);
        let codec = RowPageCodec::new(576, spec(Side::Key), SideSpec::SHARED, CodeLayout::CpuTile).unwrap();
        let rows: Vec<f32> = (0..3 * 576).map(|i| (i as f32).sin()).collect();
        let (mut ours, mut theirs) = (vec![7; codec.page_bytes()], vec![7; codec.page_bytes()]);
        assert_eq!(ours.len(), 64 * 1152);
        append_rows(&codec, &mut ours, 15, &rows, &rows).unwrap();
        codec.quantize_rows(15, &rows, &rows, &mut theirs).unwrap();
        assert_eq!(ours, theirs);
    }

    #[test]
    fn other_codecs_and_bad_sizes_go_through_the_codec() {
        let codec = KvFormat::F32.codec(32, CodeLayout::CpuTile).unwrap();
        let mut page = vec![0; codec.page_bytes()];
        append_rows(&codec, &mut page, 3, &[1.5; 32], &[2.5; 32]).unwrap();
        let mut row = [0.0; 32];
        codec.dequantize_row(Side::Value, &page, 3, &mut row);
        assert_eq!(row, [2.5; 32]);
        let codec = KvFormat::Bf16.codec(32, CodeLayout::CpuTile).unwrap();
        let mut page = vec![0; codec.page_bytes()];
        assert!(append_rows(&codec, &mut page, 64, &[0.0; 32], &[0.0; 32]).is_err());
        assert!(append_rows(&codec, &mut page, 0, &[0.0; 32], &[0.0; 64]).is_err());
        assert!(append_rows(&codec, &mut page[1..], 0, &[0.0; 32], &[0.0; 32]).is_err());
    }
}
