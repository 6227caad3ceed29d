//! What defines each rival: its bits, its rotation, its windows, its groups.

use crate::support::Random;
use oscar_codec::attention::{PagedContext, attend_context};
use oscar_codec::{
    CacheLayout, CodeLayout, KvFormat, PAGE_TOKENS, RotationKind, RowPageCodec, Side, Windows,
};

fn format(name: &str) -> KvFormat {
    name.parse().unwrap()
}

fn layout(name: &str, sink: Option<usize>, recent: Option<usize>) -> CacheLayout {
    let format = format(name);
    let windows = format.windows(sink, recent).unwrap();
    CacheLayout::new(format, 6, 2, 128, windows, CodeLayout::CpuTile).unwrap()
}

/// Bits an element of the history, head of 128: codes and everything beside them, by side.
const BITS: [(&str, f64, f64); 21] = [
    ("naive2", 2.25, 2.25),
    ("quarot2", 2.25, 2.25),
    ("saw4", 4.25, 4.25),
    ("saw4-h16", 4.25, 4.25),
    ("kivi2", 3.0, 3.0),
    ("kivi2-g32", 3.0, 3.0),
    ("kivi2-g64", 2.5, 2.5),
    ("kivi2-g128", 2.25, 2.25),
    ("kitty", 2.5625, 2.25),
    ("kitty-pro", 2.8125, 2.25),
    ("turboquant2", 2.125, 2.125),
    ("turboquant2.25", 2.5, 2.5),
    ("turboquant2.5", 2.75, 2.75),
    ("turboquant3", 3.125, 3.125),
    ("turboquant3.5", 3.75, 3.75),
    ("turboquant4", 4.125, 4.125),
    ("turboquant2-prod", 2.25, 2.125),
    ("turboquant3.5-prod", 4.0, 3.75),
    ("turboquant4-prod", 4.25, 4.125),
    ("fp8", 8.125, 8.125),
    ("int8", 8.25, 8.25),
];

#[test]
fn stored_bits_are_exact() {
    for (name, key, value) in BITS {
        let codec = format(name).codec(128, CodeLayout::CpuTile).unwrap();
        assert_eq!((codec.side_bits(Side::Key), codec.side_bits(Side::Value)), (key, value), "{name}");
        assert_eq!(codec.page_bytes() as f64 * 8.0 / (2.0 * 64.0 * 128.0), (key + value) / 2.0, "{name}");
    }
    // Kitty's published mean: 2.281 + ρ.
    let kitty = format("kitty").codec(128, CodeLayout::Logical).unwrap();
    assert_eq!(kitty.bits_per_element(), 2.28125 + 0.125);
}

#[test]
fn bits_with_windows_are_a_function_of_context() {
    for (name, key, value) in BITS {
        let cache = layout(name, Some(64), Some(256));
        let unit = cache.windows().tail(Side::Key).unit;
        for tokens in [1usize, 320, 335, 1000, 8192, 131_072] {
            let full = |unit: usize| {
                let coded = tokens.saturating_sub(320) / unit * unit;
                tokens - coded
            };
            let side = |bits: f64, unit| bits + (16.0 - bits) * full(unit) as f64 / tokens as f64;
            let expected = (side(key, unit) + side(value, 16)) / 2.0;
            assert!((cache.method_bits(tokens) - expected).abs() < 1e-9, "{name} at {tokens}");
            assert!(cache.bits_per_element(tokens) >= cache.method_bits(tokens) - 1e-9);
        }
    }
    // KIVI's own windows: the key tail is 1 … 128 tokens, 129 values stay.
    let kivi = layout("kivi2-g128", None, None);
    for tokens in [1usize, 128, 129, 4096, 4097] {
        let (keys, values) = ((tokens - 1) % 128 + 1, tokens.min(129));
        let expected = 2.25 + 13.75 * (keys + values) as f64 / (2 * tokens) as f64;
        assert!((kivi.method_bits(tokens) - expected).abs() < 1e-9, "at {tokens}");
    }
}

#[test]
fn boundary_layers_stay_in_bf16_and_are_counted() {
    for (name, inner) in [("turboquant-3bit_nc", 3.1875), ("turboquant-k3v4", 3.6875)] {
        let cache = layout(name, None, None);
        let table = cache.coded().unwrap();
        for layer in 0..6 {
            let expected = if (2..4).contains(&layer) { inner } else { 16.0 };
            assert_eq!(table.codec(layer, 1).bits_per_element(), expected, "{name}, layer {layer}");
        }
        assert_eq!(cache.page_bits(), (2.0 * inner + 4.0 * 16.0) / 6.0);
    }
    let cache =
        CacheLayout::new(format("turboquant-3bit_nc"), 3, 1, 64, Windows::default(), CodeLayout::Logical);
    assert_eq!(cache.unwrap().page_bits(), 16.0, "three layers are all boundary");
}

#[test]
fn each_method_has_its_own_rotation() {
    let matrices = |name: &str| {
        let set = format(name).rotation().data_free(2, 2, 128).unwrap();
        set.map(|set| {
            let head = set.get(1, 1).unwrap().clone();
            assert!(head.key.orthogonality_error() < 1e-6 && head.value.orthogonality_error() < 1e-6);
            (head.key, head.value)
        })
    };
    let hadamard = matrices("quarot2").unwrap();
    assert_eq!(hadamard.0, hadamard.1, "QuaRot rotates both sides alike");
    assert!(hadamard.0.matrix().iter().all(|v| (v.abs() - 1.0 / 128f32.sqrt()).abs() < 1e-6));
    for name in ["saw4", "saw4-h16", "turboquant-3bit_nc", "turboquant-k3v4"] {
        let (key, value) = matrices(name).unwrap();
        let identity = oscar_codec::Rotation::identity(128).unwrap();
        assert_eq!(value, identity, "{name} leaves values alone");
        assert_ne!(key, identity);
    }
    let (key, _) = matrices("saw4-h16").unwrap();
    assert!(key.matrix()[16..128].iter().all(|&v| v == 0.0) && key.matrix()[15].abs() == 0.25);
    let (key, value) = matrices("turboquant3").unwrap();
    assert_ne!(key, value);
    assert_eq!((key, value), matrices("turboquant3").unwrap(), "seeded");
    // Split channels: each instance is rotated within itself.
    let (key, _) = matrices("turboquant2.5").unwrap();
    assert!(key.matrix()[64..128].iter().all(|&v| v == 0.0));
    for name in ["naive2", "kivi2", "kitty", "fp8"] {
        assert_eq!(format(name).rotation(), RotationKind::None, "{name}");
    }
}

#[test]
fn naive2_is_int2_byte_for_byte() {
    let mut random = Random::new(1);
    let rows = random.rows(64 * 128);
    let page = |name: &str| {
        let codec = format(name).codec(128, CodeLayout::CpuTile).unwrap();
        let mut page = vec![0; codec.page_bytes()];
        codec.quantize(&rows, &rows, &mut page).unwrap();
        page
    };
    assert_eq!(page("naive2"), page("int2"));
    assert_ne!(page("naive2"), page("quarot2"));
}

#[test]
fn windows_are_the_published_ones_unless_the_user_says_otherwise() {
    let windows = |name: &str, sink, recent| format(name).windows(sink, recent).unwrap();
    let kivi = windows("kivi2", None, None);
    // The query after a flush reads one key in full: its own. Values slide by one.
    assert_eq!(kivi.side_boundary(Side::Key, 127), 0);
    assert_eq!(kivi.side_boundary(Side::Key, 128), 128);
    assert_eq!((kivi.side_boundary(Side::Value, 300), kivi.side_boundary(Side::Value, 301)), (172, 173));
    assert_eq!(kivi.sink(), 0);
    // KIVI*: a sink before KIVI's own residual.
    let star = windows("kivi2-g128", Some(32), None);
    assert_eq!((star.sink(), star.side_boundary(Side::Key, 32 + 128)), (32, 32 + 128));
    let kitty = windows("kitty", None, None);
    assert_eq!((kitty.sink(), kitty.side_boundary(Side::Key, 32 + 127)), (32, 32));
    assert_eq!(kitty.side_boundary(Side::Key, 32 + 128), 32 + 128);
    assert_eq!(kitty.side_boundary(Side::Value, 32 + 255), 32);
    assert_eq!(kitty.side_boundary(Side::Value, 32 + 256), 32 + 128);
    // Given windows hold for both sides; keys still go by whole groups.
    let given = windows("kivi2-g128", Some(64), Some(256));
    assert_eq!(
        (given.side_boundary(Side::Key, 500), given.side_boundary(Side::Value, 500)),
        (64 + 128, 64 + 176)
    );
    for name in ["naive2", "quarot2", "saw4", "turboquant2", "turboquant-k3v4", "fp8", "oscar2", "int4"] {
        assert_eq!(windows(name, None, None), Windows::default(), "{name}");
    }
    assert!(format("kivi2").windows(Some(10), None).is_err());
}

/// The pages of a sequence as demotion leaves them after the query at the last position.
struct Sequence {
    full_codec: RowPageCodec,
    coded_codec: RowPageCodec,
    full: Vec<Vec<u8>>,
    coded: Vec<Vec<u8>>,
    windows: Windows,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Sequence {
    fn new(name: &str, windows: Windows, tokens: usize) -> Self {
        let d = 128;
        let mut random = Random::new(tokens as u64);
        let (keys, values) = (random.rows(tokens * d), random.rows(tokens * d));
        let full_codec = KvFormat::F32.codec(d, CodeLayout::Logical).unwrap();
        let coded_codec = format(name).codec(d, CodeLayout::Logical).unwrap();
        let blocks = tokens.div_ceil(PAGE_TOKENS);
        let mut full = vec![vec![0; full_codec.page_bytes()]; blocks];
        for (b, page) in full.iter_mut().enumerate() {
            let rows = b * 64 * d..((b + 1) * 64).min(tokens) * d;
            full_codec.quantize(&keys[rows.clone()], &values[rows], page).unwrap();
        }
        let mut coded = vec![vec![0; coded_codec.page_bytes()]; blocks];
        let end = |side| windows.side_boundary(side, tokens - 1);
        let group = coded_codec.token_groups(Side::Key).map_or(16, |g| g.tokens());
        for first in (windows.sink()..end(Side::Key)).step_by(group) {
            let rows = &keys[first * d..(first + group) * d];
            coded_codec
                .quantize_group(Side::Key, first, rows, |at, range, bytes| {
                    coded[at.block][range].copy_from_slice(bytes);
                })
                .unwrap();
        }
        for position in windows.sink()..end(Side::Value) {
            let row = &values[position * d..(position + 1) * d];
            coded_codec
                .quantize_side_rows(Side::Value, position % 64, row, &mut coded[position / 64])
                .unwrap();
        }
        Self { full_codec, coded_codec, full, coded, windows, keys, values }
    }

    fn with_context<T>(&self, use_it: impl FnOnce(&PagedContext<'_>) -> T) -> T {
        let full: Vec<Option<&[u8]>> = self.full.iter().map(|p| Some(p.as_slice())).collect();
        let coded: Vec<Option<&[u8]>> = self.coded.iter().map(|p| Some(p.as_slice())).collect();
        let (full_codec, coded_codec) = (&self.full_codec, &self.coded_codec);
        use_it(&PagedContext { full_codec, coded_codec, full: &full, coded: &coded, view: None })
    }
}

#[test]
fn attention_reads_each_side_as_its_window_says() {
    let d = 128;
    let mut random = Random::new(77);
    let query = random.rows(d);
    for (name, sink, recent, tokens) in [
        ("kivi2-g32", None, None, 300),
        ("kivi2-g128", None, None, 257),
        ("kivi2-g128", Some(64), Some(100), 500),
        ("kivi2-g64", Some(16), Some(40), 300),
        ("kitty", None, None, 450),
    ] {
        let windows = format(name).windows(sink, recent).unwrap();
        let sequence = Sequence::new(name, windows, tokens);
        let t = tokens - 1;
        let state = sequence.with_context(|c| attend_context(&query, 0.1, t, &windows, c));
        let mut got = vec![0.0; d];
        state.finish(&mut got);
        // The same by hand: decode every token of each side from where the rule says, softmax in
        // f64.
        let rows = |side: Side| -> Vec<Vec<f32>> {
            (0..tokens)
                .map(|j| {
                    let mut row = vec![0.0; d];
                    if sequence.windows.reads_side_as_code(side, t, j) {
                        sequence.with_context(|c| {
                            c.coded_codec
                                .dequantize_token(side, c.coded, windows.sink(), j, &mut row)
                                .unwrap();
                        });
                    } else {
                        let rows = if side == Side::Key { &sequence.keys } else { &sequence.values };
                        row.copy_from_slice(&rows[j * d..(j + 1) * d]);
                    }
                    row
                })
                .collect()
        };
        let (keys, values) = (rows(Side::Key), rows(Side::Value));
        let weights: Vec<f64> = keys
            .iter()
            .map(|k| k.iter().zip(&query).map(|(a, b)| f64::from(a * b)).sum::<f64>() * 0.1)
            .map(f64::exp)
            .collect();
        let total: f64 = weights.iter().sum();
        for c in 0..d {
            let expected: f64 =
                weights.iter().zip(&values).map(|(w, v)| w * f64::from(v[c])).sum::<f64>() / total;
            assert!(
                (f64::from(got[c]) - expected).abs() < 2e-5,
                "{name}, channel {c}: {} {expected}",
                got[c]
            );
        }
    }
}

#[test]
fn groups_that_span_pages_need_all_their_pages() {
    let windows = format("kivi2-g128").windows(Some(0), Some(1)).unwrap();
    let sequence = Sequence::new("kivi2-g128", windows, 129);
    let mut row = vec![0.0; 128];
    let only_first = [Some(sequence.coded[0].as_slice())];
    let codec = &sequence.coded_codec;
    let error = codec.dequantize_token(Side::Key, &only_first, 0, 5, &mut row).unwrap_err();
    assert!(error.to_string().contains("page of block"), "{error}");
    codec.dequantize_token(Side::Value, &only_first, 0, 5, &mut row).unwrap();
    assert!(codec.spans_pages(0) && format("kitty").codec(128, CodeLayout::Logical).unwrap().spans_pages(32));
    let small = format("kivi2-g32").codec(128, CodeLayout::Logical).unwrap();
    assert!(!small.spans_pages(64) && small.spans_pages(16));
    // One page cannot hold such a group, and says so.
    let mut page = vec![0; codec.page_bytes()];
    let error = codec.quantize(&vec![0.0; 64 * 128], &vec![0.0; 64 * 128], &mut page).unwrap_err();
    assert!(error.to_string().contains("128 tokens"), "{error}");
}

#[test]
fn a_head_that_a_method_does_not_fit_is_refused_by_name() {
    let error = format("kivi2-g128").codec(64, CodeLayout::CpuTile).unwrap_err().to_string();
    assert!(error.contains("128") && error.contains("64"), "{error}");
    for name in ["saw5", "kivi2-g48", "turboquant5", "turboquant2.7", "kitty-x", "quarot"] {
        let error = name.parse::<KvFormat>().unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("quarot2"), "{error}");
    }
    for (alias, name) in [
        ("turboquant2-mse", "turboquant2"),
        ("turboquant_3bit_nc", "turboquant-3bit_nc"),
        ("turboquant-k3v4_nc", "turboquant-k3v4"),
        ("KIVI2-G64", "kivi2-g64"),
    ] {
        assert_eq!(format(alias), format(name));
    }
}
