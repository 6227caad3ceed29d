//! Outputs against the specification.

use super::*;
use crate::attention::{SPAN_TOKENS, kernel_name_with};
use oscar_codec::SideSpec;

/// Fixed-point queries and weights: 16 bits of the largest.
const CODED: f32 = 2e-4;
/// Queries and weights rounded to BF16.
const ROUNDED: f32 = 4e-3;
/// Queries and weights of one byte: the outputs of coarse codes, whose own error is thirty times as
/// large.
const ONE_BYTE: f32 = 1.5e-2;
/// Dequantized keys and values rounded to BF16 (2⁻⁹ of each) before queries and weights are.
const DECODED: f32 = 1e-2;
/// Only the order of f32 additions differs.
const SAME: f32 = 2e-5;

/// Methods with windows of their own, or that group along tokens, by every kernel.
#[test]
fn rivals_match_scalar() {
    let pool = ThreadPool::new(2).unwrap();
    let d = 128;
    for (name, sink, recent) in [
        ("kivi2", None, None),
        ("kivi2-g64", Some(32), None),
        ("kivi2-g128", Some(64), Some(256)),
        ("kitty", None, None),
        ("quarot2", Some(16), Some(40)),
        ("turboquant2.5", Some(16), Some(40)),
        ("turboquant3-prod", Some(16), Some(40)),
        ("turboquant-3bit_nc", Some(16), Some(40)),
        ("fp8", Some(16), Some(40)),
    ] {
        let format: KvFormat = name.parse().unwrap();
        let windows = format.windows(sink, recent).unwrap();
        for tokens in [1, 130, 257, 700, 2304] {
            let context = Context::demoted(format, d, &windows, tokens);
            let queries = queries(5, d, 1.5, tokens as u64);
            let last = tokens as u32 - 1;
            let positions = [0, 2, 5, 100, 0].map(|back| last.saturating_sub(back));
            let mut positions = positions.to_vec();
            positions.sort_unstable();
            // Codes of the last position's windows are there for the earlier ones too.
            let expected = context.expected(&windows, &queries, &positions);
            for kernel in kernels(Variant::available()) {
                let got = context.attend(kernel, &pool, &windows, &queries, &positions);
                let error = relative_error(&got, &expected);
                let tolerance = if kernel.0 == Variant::Scalar { SAME } else { DECODED };
                assert!(error <= tolerance, "{kernel:?} {name}, {tokens} tokens: error {error:e}");
            }
        }
    }
}

fn check(
    kernel: (Variant, AttentionPrecision),
    format: KvFormat,
    d: usize,
    windows: &Windows,
    lengths: &[usize],
    rows: &[usize],
) {
    let (variant, precision) = kernel;
    let pool = ThreadPool::new(2).unwrap();
    let longest = lengths.iter().copied().max().unwrap();
    let context = Context::random(format, d, longest, d as u64 + longest as u64);
    for &length in lengths {
        for &rows in rows {
            let queries = queries(rows, d, 1.5, rows as u64);
            let positions = vec![length as u32 - 1; rows];
            let got = context.attend(kernel, &pool, windows, &queries, &positions);
            let expected = context.expected(windows, &queries, &positions);
            let error = relative_error(&got, &expected);
            // The BF16 windows are rounded where the variant rounds them, for every format.
            let one_byte = matches!(format, KvFormat::Oscar { bits: ..=2 });
            let dequantized =
                kernel_name_with(variant, precision, &context.coded_codec) == "dequantized first";
            let tolerance = match variant {
                Variant::Scalar => SAME,
                _ if dequantized && format != KvFormat::F32 => DECODED,
                _ if one_byte && precision == AttentionPrecision::Int8 => ONE_BYTE,
                Variant::Avx2 => CODED,
                _ => ROUNDED,
            };
            assert!(
                error <= tolerance,
                "{variant} {precision:?} {format}, head {d}, {rows} rows, {length} tokens: error {error:e}"
            );
        }
    }
}

fn all_shapes(variant: Variant) {
    kernels([variant]).into_iter().for_each(all_shapes_of);
}

fn all_shapes_of(kernel: (Variant, AttentionPrecision)) {
    let windows = Windows::default();
    for bits in [1, 2, 3, 4] {
        for d in [64, 96, 128, 256] {
            check(kernel, KvFormat::Oscar { bits }, d, &windows, &[337, 700], &[1, 4, 8]);
        }
    }
    for d in [32, 48, 80, 112, 144, 240] {
        check(kernel, KvFormat::OSCAR2, d, &windows, &[400], &[3]);
        check(kernel, KvFormat::Oscar { bits: 4 }, d, &windows, &[400], &[5]);
    }
    check(kernel, KvFormat::OSCAR2, 128, &windows, &[500], &[1, 3, 4, 6, 8, 12, 16]);
    check(kernel, KvFormat::OSCAR2, 128, &windows, &[1, 2, 63, 64, 65, 335, 336, 337, 1000], &[4]);
    check(kernel, KvFormat::OSCAR2, 64, &windows, &[2047, 2048, 2049, 4500], &[2]);
    for (sink, recent) in [(0, 1), (16, 7), (0, 64), (128, 100), (80, 33)] {
        let windows = Windows::new(sink, recent).unwrap();
        check(kernel, KvFormat::OSCAR2, 64, &windows, &[1, 17, 64, 100, 300], &[4]);
    }
    let windows = Windows::new(16, 40).unwrap();
    for format in ["bf16", "f32", "int8", "int4-g32", "oscar2-lloyd", "oscar2-lloyd-official"] {
        check(kernel, format.parse().unwrap(), 64, &windows, &[1, 64, 333], &[3]);
    }
    let official = KvFormat::Oscar2Official;
    check(kernel, official, 64, &windows, &[200], &[3]);
}

#[test]
fn scalar_matches_the_codec() {
    all_shapes(Variant::Scalar);
}

#[test]
fn avx2_matches_scalar() {
    if fast_variants().contains(&Variant::Avx2) {
        all_shapes(Variant::Avx2);
    }
}

#[test]
fn avx512_matches_scalar() {
    if fast_variants().contains(&Variant::Avx512) {
        all_shapes(Variant::Avx512);
    }
}

#[test]
fn amx_matches_scalar() {
    if fast_variants().contains(&Variant::Amx) {
        all_shapes(Variant::Amx);
    }
}

/// Everything quantized but the last token: the integer path by itself, at its own tolerance.
#[test]
fn integer_path_is_accurate_to_its_fixed_point() {
    let pool = ThreadPool::new(1).unwrap();
    let windows = Windows::new(0, 1).unwrap();
    for (variant, precision) in kernels(fast_variants()) {
        for (key_bits, value_bits) in
            [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (1, 3), (5, 5), (5, 2), (8, 8), (2, 8)]
        {
            for d in [64, 128, 256] {
                let mut random = Random::new(d as u64);
                let mut rows = || (0..640 * d).map(|_| random.normal()).collect::<Vec<f32>>();
                let (keys, values) = (rows(), rows());
                // Weights of full pages in f32, so that only the codes are under test.
                let full = KvFormat::F32.codec(d, CodeLayout::CpuTile).unwrap();
                let spec = |bits| SideSpec::affine(bits, 0.95);
                let coded =
                    RowPageCodec::new(d, spec(key_bits), spec(value_bits), CodeLayout::CpuTile).unwrap();
                let context = Context::new(full, coded, &keys, &values);
                let queries = queries(6, d, 2.0, 5);
                let positions = [639; 6];
                let got = context.attend((variant, precision), &pool, &windows, &queries, &positions);
                let expected = context.expected(&windows, &queries, &positions);
                let error = relative_error(&got, &expected);
                let one_byte = precision.one_byte(key_bits) || precision.one_byte(value_bits);
                let dequantized =
                    kernel_name_with(variant, precision, &context.coded_codec) == "dequantized first";
                let tolerance = match (one_byte, dequantized) {
                    (true, _) => ONE_BYTE,
                    (_, true) => DECODED,
                    _ => CODED,
                };
                assert!(
                    error <= tolerance,
                    "{variant} {precision:?} {key_bits}/{value_bits} bits, head {d}: {error:e}"
                );
            }
        }
    }
}

/// Zero-width heads read their windows: what a context of these tokens alone gives.
#[test]
fn absent_history_is_not_read() {
    let pool = ThreadPool::new(2).unwrap();
    let d = 64;
    let mut random = Random::new(11);
    let tokens = 2 * SPAN_TOKENS + 100;
    let mut rows = || (0..tokens * d).map(|_| random.normal()).collect::<Vec<f32>>();
    let (keys, values) = (rows(), rows());
    let full = KvFormat::Bf16.codec(d, CodeLayout::CpuTile).unwrap();
    let absent = RowPageCodec::new(d, SideSpec::ABSENT, SideSpec::ABSENT, CodeLayout::CpuTile).unwrap();
    let context = Context::new(full.clone(), absent, &keys, &values);
    let queries = queries(3, d, 1.5, 4);
    // With a sink, and without: then whole spans hold nothing.
    for (sink, recent) in [(64, 256), (0, 40)] {
        let windows = Windows::new(sink, recent).unwrap();
        for last in [30, 700, tokens - 1] {
            let positions = [last as u32; 3];
            let kept: Vec<usize> = (0..=last).filter(|&j| !windows.reads_code(last, j)).collect();
            let pick = |rows: &[f32]| -> Vec<f32> {
                kept.iter().flat_map(|&j| rows[j * d..(j + 1) * d].to_vec()).collect()
            };
            let alone = Context::new(full.clone(), full.clone(), &pick(&keys), &pick(&values));
            let end = [kept.len() as u32 - 1; 3];
            let expected = alone.expected(&Windows::unlimited(), &queries, &end);
            assert!(relative_error(&context.expected(&windows, &queries, &positions), &expected) <= SAME);
            for kernel in kernels(Variant::available()) {
                let got = context.attend(kernel, &pool, &windows, &queries, &positions);
                let tolerance = if kernel.0 == Variant::Scalar { SAME } else { ROUNDED };
                let error = relative_error(&got, &expected);
                assert!(error <= tolerance, "{kernel:?}, {sink}/{recent}, query {last}: {error:e}");
            }
        }
    }
}

/// Everything in BF16.
#[test]
fn bf16_path_is_accurate() {
    let pool = ThreadPool::new(1).unwrap();
    let windows = Windows::default();
    for variant in fast_variants() {
        for d in [32, 48, 80, 128, 256] {
            for rows in [1, 3, 8, 12] {
                let context = Context::random(KvFormat::Bf16, d, 700, 9);
                let queries = queries(rows, d, 1.0, 6);
                let positions = vec![698; rows];
                let got = context.attend(
                    (variant, AttentionPrecision::default()),
                    &pool,
                    &windows,
                    &queries,
                    &positions,
                );
                let error = relative_error(&got, &context.expected(&windows, &queries, &positions));
                let tolerance = if variant == Variant::Avx2 { SAME } else { ROUNDED };
                assert!(error <= tolerance, "{variant}, head {d}, {rows} rows: {error:e}");
            }
        }
    }
}

/// Keys with a huge common offset, zero rows and zero queries.
#[test]
fn offsets_and_zeros_do_no_harm() {
    let (d, tokens) = (128, 500);
    let pool = ThreadPool::new(1).unwrap();
    let windows = Windows::new(16, 32).unwrap();
    let mut random = Random::new(3);
    let offset: Vec<f32> = (0..tokens * d).map(|_| 40.0 + 0.25 * random.normal()).collect();
    let zeros = vec![0.0; tokens * d];
    let values: Vec<f32> = (0..tokens * d).map(|_| random.normal()).collect();
    let constant: Vec<f32> = (0..tokens).flat_map(|t| vec![(t % 7) as f32; d]).collect();
    for (variant, precision) in kernels(fast_variants()) {
        for (name, keys, values, tolerance) in [
            ("offset keys", &offset, &values, 2e-2),
            ("zero keys", &zeros, &values, ROUNDED),
            ("zero values", &values, &zeros, 0.0),
            ("constant rows", &values, &constant, ROUNDED),
        ] {
            let context = Context::of(KvFormat::OSCAR2, d, keys, values);
            let mut queries = queries(4, d, 0.3, 8);
            queries[d..2 * d].fill(0.0);
            queries[2 * d..3 * d].fill(1e-38);
            let positions = [tokens as u32 - 1; 4];
            let got = context.attend((variant, precision), &pool, &windows, &queries, &positions);
            let error = relative_error(&got, &context.expected(&windows, &queries, &positions));
            assert!(error <= tolerance, "{variant} {precision:?}, {name}: {error:e}");
        }
    }
}

/// One token far above a long flat tail: the tail's mass must survive, and so must the token.
#[test]
fn a_dominant_token_over_a_flat_tail() {
    let (d, tokens) = (64, 32 * 1024);
    let pool = ThreadPool::new(2).unwrap();
    let windows = Windows::new(0, 1).unwrap();
    for (at, lead) in [(100, 9.0_f32), (tokens - 200, 9.0), (5000, 13.0), (5000, 60.0), (5000, 300.0)] {
        // Scores are `lead` at one token and 0 elsewhere; the tail's values are all 1, the token's
        // −1.
        let mut keys = vec![0.0; tokens * d];
        let mut values = vec![1.0; tokens * d];
        keys[at * d..(at + 1) * d].fill(lead / 8.0);
        values[at * d..(at + 1) * d].fill(-1.0);
        let context = Context::of(KvFormat::OSCAR2, d, &keys, &values);
        let query = vec![1.0; d];
        let positions = [tokens as u32 - 1];
        let expected = context.expected(&windows, &query, &positions);
        for (variant, precision) in kernels(Variant::available()) {
            let got = context.attend((variant, precision), &pool, &windows, &query, &positions);
            let difference = got.iter().zip(&expected).map(|(g, e)| (g - e).abs()).fold(0.0, f32::max);
            assert!(
                difference < 1e-3,
                "{variant} {precision:?}, lead {lead} at {at}: {} for {}",
                got[0],
                expected[0]
            );
        }
    }
}

/// Scores spread so wide that most weights underflow.
#[test]
fn underflow_is_not_a_problem() {
    let (d, tokens) = (64, 3000);
    let pool = ThreadPool::new(1).unwrap();
    let context = Context::random(KvFormat::Oscar { bits: 4 }, d, tokens, 77);
    let queries = queries(4, d, 60.0, 12);
    let positions = [tokens as u32 - 1; 4];
    for variant in fast_variants() {
        let got = context.attend(
            (variant, AttentionPrecision::default()),
            &pool,
            &Windows::default(),
            &queries,
            &positions,
        );
        assert!(got.iter().all(|v| v.is_finite()));
        if variant == Variant::Avx2 {
            let error = relative_error(&got, &context.expected(&Windows::default(), &queries, &positions));
            assert!(error < 2e-2, "{variant}: {error:e}");
        }
    }
}

/// After an approximate prefix hit: blocks in the window that have codes alone.
#[test]
fn codes_in_the_window_are_read_by_every_variant() {
    let d = 64;
    codes_in_the_window(&Context::random(KvFormat::OSCAR2, d, 700, 5), d);
}

/// The same for a zero-width head, which reads nothing before the end of the tail but the sink.
#[test]
fn a_zero_width_head_reads_no_codes_in_the_window_in_every_variant() {
    let d = 64;
    let full = KvFormat::Bf16.codec(d, CodeLayout::CpuTile).unwrap();
    let absent = RowPageCodec::new(d, SideSpec::ABSENT, SideSpec::ABSENT, CodeLayout::CpuTile).unwrap();
    let (keys, values) = (queries(700, d, 1.0, 8), queries(700, d, 1.0, 9));
    codes_in_the_window(&Context::new(full, absent, &keys, &values), d);
}

fn codes_in_the_window(context: &Context, d: usize) {
    let pool = ThreadPool::new(2).unwrap();
    let queries = queries(6, d, 1.0, 3);
    let positions = [640, 650, 660, 670, 690, 699];
    let windows = Windows::default();
    let whole = context.expected(&windows, &queries, &positions);
    context.with_pages(|context| {
        let mut full = context.full.to_vec();
        full[1..9].fill(None);
        let context = PagedContext { full: &full, ..*context };
        let scale = 1.0 / (d as f32).sqrt();
        let mut expected = vec![0.0; queries.len()];
        for ((query, &position), out) in
            queries.chunks_exact(d).zip(&positions).zip(expected.chunks_exact_mut(d))
        {
            attend_context(query, scale, position as usize, &windows, &context).finish(out);
        }
        assert!(relative_error(&whole, &expected) > 1e-2, "the tail matters here");
        for (variant, precision) in kernels(fast_variants()) {
            let mut out = vec![f32::NAN; queries.len()];
            let task = AttendTask {
                queries: &queries,
                positions: &positions,
                scale,
                windows: &windows,
                context: &context,
                sinks: None,
                out: &mut out,
            };
            attend(variant, &pool, &mut [task], &mut Scratch::new(precision));
            let error = relative_error(&out, &expected);
            assert!(error < 2e-2, "{variant}: {error:e}");
        }
    });
}

#[test]
#[should_panic(expected = "coded page of block 1 is absent")]
fn an_absent_page_is_a_bug_of_the_caller() {
    let context = Context::random(KvFormat::OSCAR2, 32, 400, 1);
    let pool = ThreadPool::new(1).unwrap();
    context.with_pages(|context| {
        let missing: Vec<Option<&[u8]>> = vec![None; context.coded.len()];
        let context = PagedContext { coded: &missing, ..*context };
        let (queries, mut out) = ([0.5; 32], [0.0; 32]);
        let task = AttendTask {
            queries: &queries,
            positions: &[399],
            scale: 1.0,
            windows: &Windows::default(),
            context: &context,
            sinks: None,
            out: &mut out,
        };
        attend(Variant::Scalar, &pool, &mut [task], &mut Scratch::default());
    });
}
