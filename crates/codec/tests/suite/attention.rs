//! Reference attention: folded against plain, merging, windows, GQA, long flat tails.

use crate::support::Random;
use oscar_codec::attention::{AttentionState, PagedContext, attend_context, attend_page};
use oscar_codec::{CodeLayout, KvFormat, RowPageCodec, Side, Windows};
use proptest::prelude::*;

fn page(codec: &RowPageCodec, random: &mut Random, tokens: usize) -> (Vec<f32>, Vec<f32>, Vec<u8>) {
    let d = codec.head_dim();
    let (k, v) = (random.rows(tokens * d), random.rows(tokens * d));
    let mut bytes = vec![0; codec.page_bytes()];
    codec.quantize(&k, &v, &mut bytes).unwrap();
    (k, v, bytes)
}

fn output(state: &AttentionState) -> Vec<f32> {
    let mut out = vec![0.0; state.out.len()];
    state.finish(&mut out);
    out
}

fn close(a: &[f32], b: &[f32], tolerance: f32) {
    for (x, y) in a.iter().zip(b) {
        assert!((x - y).abs() <= tolerance, "{x} against {y}");
    }
}

#[test]
fn unquantized_pages_give_textbook_attention() {
    let codec = KvFormat::F32.codec(64, CodeLayout::CpuTile).unwrap();
    let mut random = Random::new(1);
    let (k, v, bytes) = page(&codec, &mut random, 64);
    let q = random.rows(64);
    let mut state = AttentionState::empty(64);
    attend_page(&q, 0.125, &codec, &bytes, 0..64, &mut state);
    let scores: Vec<f64> = k
        .chunks(64)
        .map(|row| row.iter().zip(&q).map(|(a, b)| (*a as f64) * (*b as f64)).sum::<f64>() * 0.125)
        .collect();
    let total: f64 = scores.iter().map(|s| s.exp()).sum();
    let expected: Vec<f32> = (0..64)
        .map(|c| (0..64).map(|t| scores[t].exp() / total * v[t * 64 + c] as f64).sum::<f64>() as f32)
        .collect();
    close(&output(&state), &expected, 1e-5);
}

/// Attention over a page with scale and minimum applied to sums of raw codes, as kernels do it.
fn folded(query: &[f32], scale: f32, codec: &RowPageCodec, page: &[u8]) -> Vec<f32> {
    let d = query.len();
    let level = |side, t, c| codec.level(side, codec.code(side, page, t, c));
    let groups = |side| {
        let width = d / codec.groups(side);
        (0..codec.groups(side)).map(move |g| (g, g * width..(g + 1) * width))
    };
    let score = |t: usize| -> f32 {
        let part = |(g, channels): (usize, std::ops::Range<usize>)| {
            let p = codec.group_params(Side::Key, page, t, g);
            let dot: f32 = channels.clone().map(|c| query[c] * level(Side::Key, t, c)).sum();
            p.scale * dot + p.offset * query[channels].iter().sum::<f32>()
        };
        scale * groups(Side::Key).map(part).sum::<f32>()
    };
    let scores: Vec<f32> = (0..64).map(score).collect();
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut sum, mut out) = (0.0, vec![0.0; d]);
    for (t, s) in scores.into_iter().enumerate() {
        let weight = (s - max).exp();
        sum += weight;
        for (g, channels) in groups(Side::Value) {
            let p = codec.group_params(Side::Value, page, t, g);
            for c in channels {
                out[c] += weight * p.scale * level(Side::Value, t, c) + weight * p.offset;
            }
        }
    }
    out.iter().map(|o| o / sum).collect()
}

#[test]
fn folded_equals_plain_for_every_format_and_group_size() {
    let mut random = Random::new(5);
    for format in
        KvFormat::all().into_iter().chain(["int2-g32".parse().unwrap(), "int4-g64".parse().unwrap()])
    {
        for d in [64, 128] {
            let codec = format.codec(d, format.native_layout());
            // Groups larger than the head do not exist, and only codes placed by a layout are folded.
            let placed = |c: &RowPageCodec| {
                let side = |side| c.spec(side).is_coded() && c.is_mapped(side);
                side(Side::Key) && side(Side::Value)
            };
            let Some(codec) = codec.ok().filter(placed) else { continue };
            let (_, _, bytes) = page(&codec, &mut random, 64);
            for group in [1, 3, 4, 6, 8, 12] {
                let queries = random.rows(group * d);
                for query in queries.chunks_exact(d) {
                    let scale = 1.0 / (d as f32).sqrt();
                    let mut plain = AttentionState::empty(d);
                    attend_page(query, scale, &codec, &bytes, 0..64, &mut plain);
                    close(&output(&plain), &folded(query, scale, &codec, &bytes), 2e-5);
                }
            }
        }
    }
}

/// A context of `len` positions in both forms, and the answer of a query at its end.
fn context_answer(len: usize, split: usize, windows: &Windows) -> (Vec<f32>, Vec<f32>) {
    let full = KvFormat::Bf16.codec(64, CodeLayout::CpuTile).unwrap();
    let coded = KvFormat::OSCAR2.codec(64, CodeLayout::CpuTile).unwrap();
    let mut random = Random::new(9);
    let (k, v) = (random.rows(len * 64), random.rows(len * 64));
    let quantize = |codec: &RowPageCodec| -> Vec<Vec<u8>> {
        k.chunks(64 * 64)
            .zip(v.chunks(64 * 64))
            .map(|(k, v)| {
                let mut bytes = vec![0; codec.page_bytes()];
                codec.quantize(k, v, &mut bytes).unwrap();
                bytes
            })
            .collect()
    };
    let (full_pages, coded_pages) = (quantize(&full), quantize(&coded));
    let q = random.rows(64);
    let full_refs: Vec<Option<&[u8]>> = full_pages.iter().map(|p| Some(p.as_slice())).collect();
    let coded_refs: Vec<Option<&[u8]>> = coded_pages.iter().map(|p| Some(p.as_slice())).collect();
    let context = PagedContext {
        full_codec: &full,
        coded_codec: &coded,
        full: &full_refs,
        coded: &coded_refs,
        view: None,
    };
    let whole = attend_context(&q, 0.125, len - 1, windows, &context);
    // The same read position by position in two halves, merged late half first.
    let mut halves = [AttentionState::empty(64), AttentionState::empty(64)];
    for j in windows.first_visible(len - 1)..len {
        let (codec, pages) =
            if windows.reads_code(len - 1, j) { (&coded, &coded_pages) } else { (&full, &full_pages) };
        let state = &mut halves[usize::from(j >= split)];
        attend_page(&q, 0.125, codec, &pages[j / 64], j % 64..j % 64 + 1, state);
    }
    let [early, mut late] = halves;
    late.merge(&early);
    (output(&whole), output(&late))
}

#[test]
fn a_query_reads_code_exactly_between_sink_and_boundary() {
    for len in [1, 63, 64, 65, 320, 335, 336, 337, 700] {
        for windows in [Windows::default(), Windows::new(0, 16).unwrap(), Windows::new(16, 100).unwrap()] {
            let (whole, by_position) = context_answer(len, len / 3, &windows);
            close(&whole, &by_position, 2e-5);
        }
    }
}

#[test]
fn a_sliding_layer_reads_its_window_by_the_same_rule() {
    for len in [1, 8, 9, 64, 65, 130, 337, 700] {
        for windows in [Windows::default(), Windows::new(0, 16).unwrap(), Windows::new(16, 100).unwrap()] {
            for window in [1, 8, 64, 200, 1000] {
                let sliding = windows.sliding(Some(window));
                let first = sliding.first_visible(len - 1);
                let (whole, by_position) = context_answer(len, first + (len - first) / 3, &sliding);
                close(&whole, &by_position, 2e-5);
            }
        }
    }
}

/// Centred keys shift every score by `scale·q·μ`; the sink must move with them.
#[test]
fn a_sink_takes_its_share_also_beside_centred_keys() {
    let mut random = Random::new(21);
    let (keys, values, query, mean) =
        (random.rows(40 * 32), random.rows(40 * 32), random.rows(32), random.rows(32));
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    let (scale, sink) = (0.25, 0.7f32);
    let scores: Vec<f32> = keys.chunks(32).map(|key| scale * dot(&query, key)).collect();
    let total = scores.iter().map(|s| s.exp()).sum::<f32>() + sink.exp();
    let expected: Vec<f32> = (0..32)
        .map(|c| scores.iter().zip(values.chunks(32)).map(|(s, v)| s.exp() * v[c]).sum::<f32>() / total)
        .collect();
    let centred: Vec<f32> =
        keys.chunks(32).flat_map(|key| key.iter().zip(&mean).map(|(k, m)| k - m)).collect();
    for (keys, sink) in [(keys.as_slice(), sink), (&centred, sink - scale * dot(&query, &mean))] {
        let codec = KvFormat::F32.codec(32, CodeLayout::Logical).unwrap();
        let mut page = vec![0; codec.page_bytes()];
        codec.quantize(keys, &values, &mut page).unwrap();
        let mut state = AttentionState::empty(32);
        attend_page(&query, scale, &codec, &page, 0..40, &mut state);
        state.add_sink(sink);
        close(&output(&state), &expected, 1e-5);
    }
    let mut nothing = AttentionState::empty(32);
    nothing.add_sink(3.0);
    assert_eq!(output(&nothing), [0.0; 32]);
}

#[test]
fn blocks_without_rows_are_read_as_code_and_so_is_everything_before_them() {
    let (full, coded) = (
        KvFormat::Bf16.codec(64, CodeLayout::CpuTile).unwrap(),
        KvFormat::OSCAR2.codec(64, CodeLayout::CpuTile).unwrap(),
    );
    let mut random = Random::new(11);
    let page = |codec: &RowPageCodec, k: &[f32], v: &[f32]| {
        let mut bytes = vec![0; codec.page_bytes()];
        codec.quantize(k, v, &mut bytes).unwrap();
        bytes
    };
    let rows: Vec<_> = (0..6).map(|_| (random.rows(64 * 64), random.rows(64 * 64))).collect();
    let full_pages: Vec<Vec<u8>> = rows.iter().map(|(k, v)| page(&full, k, v)).collect();
    let coded_pages: Vec<Vec<u8>> = rows.iter().map(|(k, v)| page(&coded, k, v)).collect();
    let q = random.rows(64);
    let mut full_refs: Vec<Option<&[u8]>> = full_pages.iter().map(|p| Some(p.as_slice())).collect();
    let coded_refs: Vec<Option<&[u8]>> = coded_pages.iter().map(|p| Some(p.as_slice())).collect();
    full_refs[3] = None;
    let context = PagedContext {
        full_codec: &full,
        coded_codec: &coded,
        full: &full_refs,
        coded: &coded_refs,
        view: None,
    };
    assert_eq!(context.coded_until(), 256);
    // The windows alone would read everything from 80 on in BF16.
    let windows = Windows::new(64, 300).unwrap();
    let got = attend_context(&q, 0.125, 383, &windows, &context);
    let mut expected = AttentionState::empty(64);
    for block in 0..6 {
        let (codec, pages) =
            if (1..4).contains(&block) { (&coded, &coded_pages) } else { (&full, &full_pages) };
        attend_page(&q, 0.125, codec, &pages[block], 0..64, &mut expected);
    }
    assert_eq!(output(&got), output(&expected));
}

#[test]
fn a_flat_tail_of_128k_tokens_keeps_its_mass() {
    // One loud token among 131071 whispers: the tail's share must not vanish.
    let codec = KvFormat::OSCAR2.codec(64, CodeLayout::CpuTile).unwrap();
    let mut tail = vec![0; codec.page_bytes()];
    codec.quantize(&vec![0.0; 64 * 64], &vec![1.0; 64 * 64], &mut tail).unwrap();
    let mut head = vec![0; codec.page_bytes()];
    let loud: Vec<f32> = (0..64).map(|c| if c == 0 { 12.0 } else { 0.0 }).collect();
    codec.quantize(&loud, &vec![0.0; 64], &mut head).unwrap();
    let mut key = vec![0.0; 64];
    let mut value = vec![0.0; 64];
    codec.dequantize_rows(0, &head, &mut key, &mut value).unwrap();
    let q: Vec<f32> = (0..64).map(|c| if c == 0 { 1.0 } else { 0.0 }).collect();
    let mut state = AttentionState::empty(64);
    attend_page(&q, 1.0, &codec, &head, 0..1, &mut state);
    for _ in 0..2048 {
        attend_page(&q, 1.0, &codec, &tail, 0..64, &mut state);
    }
    let tail_mass = 131072.0 / (131072.0 + (key[0] as f64).exp());
    assert!((output(&state)[3] as f64 - tail_mass).abs() < 1e-3 * tail_mass);
}

#[test]
fn an_empty_state_finishes_to_zeros_and_merges_as_nothing() {
    let mut a = AttentionState::empty(4);
    a.merge(&AttentionState::empty(4));
    assert_eq!(output(&a), [0.0; 4]);
    let b = AttentionState { max: 2.0, sum: 4.0, out: vec![4.0, 8.0, 0.0, -4.0] };
    a.merge(&b);
    assert_eq!(output(&a), [1.0, 2.0, 0.0, -1.0]);
}

proptest! {
    #[test]
    fn merge_order_does_not_matter(
        parts in prop::collection::vec((-40.0f32..40.0, 0.1f32..50.0, prop::collection::vec(-3.0f32..3.0, 4)), 2..8), rotation in 0usize..8,
    ) {
        let states: Vec<AttentionState> = parts
            .iter()
            .map(|(max, sum, out)| AttentionState { max: *max, sum: *sum, out: out.iter().map(|v| v * sum).collect() })
            .collect();
        let mut forward = AttentionState::empty(4);
        states.iter().for_each(|s| forward.merge(s));
        let mut rotated = states.clone();
        rotated.rotate_left(rotation % states.len());
        // Fold as a tree: pairs first, then the pairs' results.
        let mut tree = AttentionState::empty(4);
        for pair in rotated.chunks(2) {
            let mut both = pair[0].clone();
            pair[1..].iter().for_each(|s| both.merge(s));
            tree.merge(&both);
        }
        let (a, b) = (output(&forward), output(&tree));
        for (x, y) in a.iter().zip(&b) {
            prop_assert!((x - y).abs() < 1e-4, "{x} against {y}");
        }
    }
}
