//! Rows that survive eviction: their bytes, and attention over them.

use crate::support::Random;
use oscar_codec::attention::{AttentionState, PagedContext, attend_context, attend_page};
use oscar_codec::scores::key_weights;
use oscar_codec::{CodeLayout, KvFormat, PAGE_TOKENS, RowPageCodec, Side, Survivors, Windows};

fn random_page(codec: &RowPageCodec, random: &mut Random) -> Vec<u8> {
    let rows = PAGE_TOKENS * codec.head_dim();
    let (keys, values) = (random.rows(rows), random.rows(rows));
    let mut page = vec![0; codec.page_bytes()];
    codec.quantize(&keys, &values, &mut page).unwrap();
    page
}

fn bits_of(codec: &RowPageCodec, page: &[u8], row: usize) -> Vec<u32> {
    let mut values = vec![0.0; codec.head_dim()];
    let mut bits = Vec::new();
    for side in [Side::Key, Side::Value] {
        codec.dequantize_row(side, page, row, &mut values);
        bits.extend(values.iter().map(|v| v.to_bits()));
    }
    bits
}

/// All widths and layouts: a gathered row has the bytes it had, and its neighbours keep theirs.
#[test]
fn gathered_rows_keep_every_bit() {
    let names = ["oscar1", "oscar2", "oscar3", "oscar4", "int8", "int4-g32", "bf16", "fp8", "turboquant3"];
    for name in names {
        for layout in [CodeLayout::CpuTile, CodeLayout::Logical] {
            let format: KvFormat = name.parse().unwrap();
            let Ok(codec) = format.codec(128, layout) else { continue };
            let mut random = Random::new(3);
            let (source, mut target) = (random_page(&codec, &mut random), random_page(&codec, &mut random));
            let before = target.clone();
            let moves = [(0, 17), (63, 0), (5, 5), (31, 62), (32, 1), (47, 48)];
            for (from, to) in moves {
                codec.copy_row((&source, from), (&mut target, to)).unwrap();
            }
            for row in 0..PAGE_TOKENS {
                let expected = match moves.iter().find(|(_, to)| *to == row) {
                    Some(&(from, _)) => bits_of(&codec, &source, from),
                    None => bits_of(&codec, &before, row),
                };
                assert_eq!(bits_of(&codec, &target, row), expected, "{name} {layout:?}, row {row}");
            }
            // Gathering everything gives the page itself, also bytes that no row reads.
            let mut copy = vec![0; codec.page_bytes()];
            (0..PAGE_TOKENS).for_each(|row| codec.copy_row((&source, row), (&mut copy, row)).unwrap());
            assert_eq!(copy, source, "{name} {layout:?}");
        }
    }
}

#[test]
fn rows_in_groups_of_tokens_and_wrong_pages_are_refused() {
    let kivi = "kivi2".parse::<KvFormat>().unwrap().codec(128, CodeLayout::CpuTile).unwrap();
    let page = vec![0; kivi.page_bytes()];
    assert!(!kivi.copies_rows());
    assert!(kivi.copy_row((&page, 0), (&mut page.clone(), 0)).is_err());
    let codec = KvFormat::OSCAR2.codec(128, CodeLayout::CpuTile).unwrap();
    let page = vec![0; codec.page_bytes()];
    assert!(codec.copy_row((&page, 64), (&mut page.clone(), 0)).is_err());
    assert!(codec.copy_row((&page[1..], 0), (&mut page.clone(), 0)).is_err());
}

/// A view of three pages of history: attention and scores are those of the rows that it kept.
#[test]
fn a_view_is_read_as_its_rows_and_an_empty_one_as_nothing() {
    let full = KvFormat::Bf16.codec(64, CodeLayout::CpuTile).unwrap();
    let coded = KvFormat::OSCAR2.codec(64, CodeLayout::CpuTile).unwrap();
    let windows = Windows::new(64, 64).unwrap();
    let mut random = Random::new(21);
    let full_pages: Vec<Vec<u8>> = (0..7).map(|_| random_page(&full, &mut random)).collect();
    let coded_pages: Vec<Vec<u8>> = (0..7).map(|_| random_page(&coded, &mut random)).collect();
    let (query, position, end) = (random.rows(64), 64 * 6 + 10, 256);
    for kept in [vec![], vec![64, 70, 200], (64..256).step_by(2).collect(), (64..256).collect::<Vec<usize>>()]
    {
        let view = Survivors { end, rows: kept.len() };
        let mut pages = vec![vec![0; coded.page_bytes()]; view.pages()];
        for (row, &p) in kept.iter().enumerate() {
            let to = (&mut pages[row / 64][..], row % 64);
            coded.copy_row((&coded_pages[p / 64], p % 64), to).unwrap();
        }
        let mut full_refs = vec![Some(&full_pages[0][..])];
        full_refs.extend(vec![None; view.pages()]);
        full_refs.extend((4..7).map(|b| Some(&full_pages[b][..])));
        let mut coded_refs = vec![None];
        coded_refs.extend(pages.iter().map(|page| Some(&page[..])));
        coded_refs.extend((4..7).map(|b| Some(&coded_pages[b][..])));
        let (full_list, coded_list) = (&full_refs[..], &coded_refs[..]);
        let context = PagedContext {
            full_codec: &full,
            coded_codec: &coded,
            full: full_list,
            coded: coded_list,
            view: Some(view),
        };
        let got = attend_context(&query, 0.125, position, &windows, &context);
        // The same rows one by one.
        let mut expected = AttentionState::empty(64);
        let boundary = windows.boundary(position);
        let rest = (0..64).chain(end..=position).map(|p| (p, (end..boundary).contains(&p)));
        for (p, code) in rest.chain(kept.iter().map(|&p| (p, true))) {
            let (codec, pages) = if code { (&coded, &coded_pages) } else { (&full, &full_pages) };
            attend_page(&query, 0.125, codec, &pages[p / 64], p % 64..p % 64 + 1, &mut expected);
        }
        assert!((got.sum.ln() + got.max - expected.sum.ln() - expected.max).abs() < 1e-5);
        let (mut a, mut b) = (vec![0.0; 64], vec![0.0; 64]);
        got.finish(&mut a);
        expected.finish(&mut b);
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5), "{} rows", kept.len());

        let weights = key_weights(&query, 0.125, position, &windows, &context, None);
        assert_eq!(weights.len(), position + 1 - view.shift(64));
        assert!(weights[view.hole(64)].iter().all(|&w| w == 0.0));
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        let mut row = vec![0.0; 64];
        let lse = expected.sum.ln() + expected.max;
        for (i, &p) in kept.iter().enumerate() {
            coded.dequantize_row(Side::Key, &coded_pages[p / 64], p % 64, &mut row);
            let score = 0.125 * query.iter().zip(&row).map(|(q, k)| q * k).sum::<f32>();
            assert!((weights[64 + i] - (score - lse).exp()).abs() < 1e-6);
        }
        let first = std::slice::from_ref(&(0..1));
        let only = key_weights(&query, 0.125, position, &windows, &context, Some(first));
        assert_eq!((only[0], only[1..].iter().sum::<f32>()), (1.0, 0.0));
    }
}
