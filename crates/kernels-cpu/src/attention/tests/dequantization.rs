//! Pages dequantized to rows and to tiles, against the codec.

use super::super::block::MAX_DIM;
use super::super::dequantize::{SidePage, dequantize_page};
use crate::cpu::Variant;
use oscar_codec::page::Scheme;
use oscar_codec::record::RecordCodec;
use oscar_codec::{CodeLayout, KvFormat, PAGE_TOKENS, RowPageCodec, Side, SideSpec};

fn rows(n: usize, seed: u64) -> Vec<f32> {
    let mut random = oscar_codec::random::SeededGaussian::new(seed);
    (0..n).map(|_| random.normal() as f32).collect()
}

/// Rows of the specification as a BF16 tile, against the one dequantized straight from a page.
#[cfg(target_arch = "x86_64")]
fn check_tile(name: &str, page: SidePage<'_>, used: u64, rows: &[f32]) {
    use super::super::avx512::dequantize;
    use super::super::tile::Bf16Tile;
    let SidePage { codec, side, .. } = page;
    if !Variant::Avx512.is_available() || !dequantize::reads(codec, side) {
        return;
    }
    let (mut got, mut want) = (Bf16Tile::default(), Bf16Tile::default());
    match side {
        Side::Key => want.store_keys(Variant::Scalar, rows, codec.head_dim()),
        Side::Value => want.store_values(Variant::Scalar, rows, codec.head_dim()),
    }
    // Room left by an earlier page must not show.
    let mut halves = vec![0x7fc0; 100];
    // SAFETY: AVX-512 is available.
    unsafe { dequantize::dequantize(page, used, &mut halves, &mut got) };
    // Sketches are summed in another order: what is left of it after rounding is a step of BF16 at
    // most, where centroid and sketch do not cancel, and that for the few values beside a boundary
    // of rounding.
    let sketched = match codec.records(side) {
        Some(RecordCodec::TurboQuant(codec)) => codec.instances().iter().any(|i| i.sketch.is_some()),
        _ => false,
    };
    let halves = |tile: &Bf16Tile| -> Vec<f32> {
        tile.bytes().as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect()
    };
    let mut off = 0;
    for (i, (a, b)) in halves(&got).iter().zip(halves(&want)).enumerate() {
        off += usize::from(a.to_bits() != b.to_bits());
        let same =
            if sketched { (a - b).abs() <= b.abs() / 128.0 + 1e-5 } else { a.to_bits() == b.to_bits() };
        assert!(same, "{name} {side:?}, head {}, half {i}: {a} for {b}", codec.head_dim());
    }
    assert!(off * 1000 <= rows.len(), "{name} {side:?}: {off} of {} off by a rounding", rows.len());
}

#[cfg(not(target_arch = "x86_64"))]
fn check_tile(_: &str, _: SidePage<'_>, _: u64, _: &[f32]) {}

/// Three pages of a codec whose groups begin at `origin`, and every variant against the
/// specification.
fn check(name: &str, codec: &RowPageCodec, origin: usize) {
    let d = codec.head_dim();
    let tokens = 3 * PAGE_TOKENS;
    let all = rows(tokens * d, 9);
    let mut pages = vec![vec![0u8; codec.page_bytes()]; 3];
    for side in [Side::Key, Side::Value] {
        match codec.token_groups(side) {
            Some(groups) => {
                let mut first = origin;
                while first + groups.tokens() <= tokens {
                    let rows = &all[first * d..(first + groups.tokens()) * d];
                    codec
                        .quantize_group(side, first, rows, |at, range, bytes| {
                            pages[at.block][range].copy_from_slice(bytes);
                        })
                        .unwrap();
                    first += groups.tokens();
                }
            }
            None => {
                for (page, rows) in pages.iter_mut().zip(all.chunks_exact(PAGE_TOKENS * d)) {
                    codec.quantize_side_rows(side, 0, rows, page).unwrap();
                }
            }
        }
    }
    let pages: Vec<Option<&[u8]>> = pages.iter().map(|p| Some(p.as_slice())).collect();
    // Official parameters multiply out in another order.
    let exact = codec.spec(Side::Key).scheme != Scheme::OfficialAffine;
    for side in [Side::Key, Side::Value] {
        for (block, used) in [(0, 0xffff_ffff_0000_0000u64), (1, u64::MAX), (1, 0x0ff1_0000_8000_0001)] {
            let page = SidePage { codec, side, pages: &pages, block, origin };
            let mut want = vec![0.0; PAGE_TOKENS * d];
            for (token, want) in want.chunks_exact_mut(d).enumerate().filter(|(t, _)| used >> t & 1 == 1) {
                codec.dequantize_token(side, &pages, origin, block * PAGE_TOKENS + token, want).unwrap();
            }
            check_tile(name, page, used, &want);
            for variant in Variant::available() {
                let mut got = vec![f32::NAN; PAGE_TOKENS * d];
                dequantize_page(variant, page, used, &mut got, &mut [0; MAX_DIM]);
                for (token, (got, want)) in got.chunks_exact(d).zip(want.chunks_exact(d)).enumerate() {
                    let same = |(a, b): (&f32, &f32)| {
                        if exact { a.to_bits() == b.to_bits() } else { (a - b).abs() <= 1e-5 }
                    };
                    assert!(
                        got.iter().zip(want).all(same),
                        "{variant} {name} {side:?}, head {d}, token {token}"
                    );
                }
            }
        }
    }
}

#[test]
fn decoding_matches_scalar() {
    for format in KvFormat::all() {
        for d in [64, 80, 96, 128, 256] {
            for layout in [CodeLayout::Logical, CodeLayout::CpuTile, CodeLayout::Official] {
                let Ok(codec) = format.codec(d, layout) else { continue };
                check(&format!("{format} in {layout:?}"), &codec, 32);
            }
        }
    }
}

#[test]
fn groups_of_channels_of_every_width_match_scalar() {
    for (bits, group) in [(1, 32), (2, 32), (2, 64), (3, 32), (3, 128), (4, 64), (5, 32), (5, 128), (8, 32)] {
        let codec = KvFormat::Int { bits, group }.codec(128, CodeLayout::CpuTile).unwrap();
        check(&format!("int{bits}-g{group}"), &codec, 0);
    }
}

#[test]
fn sides_of_different_kinds_are_dequantized_each_its_own_way() {
    let codec =
        RowPageCodec::new(128, SideSpec::BF16, SideSpec::affine(2, 0.9), CodeLayout::CpuTile).unwrap();
    check("bf16 keys", &codec, 0);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn every_coded_format_of_a_usual_head_has_a_kernel_on_avx512() {
    for format in KvFormat::all().into_iter().filter(|format| format.is_coded()) {
        for d in [64, 128, 256] {
            // Groups of 128 channels do not fit a head of 64.
            let Ok(codec) = format.codec(d, CodeLayout::CpuTile) else { continue };
            for side in [Side::Key, Side::Value] {
                assert!(
                    super::super::avx512::dequantize::reads(&codec, side),
                    "{format}, head {d}, {side:?}"
                );
            }
        }
    }
}
