//! A row's output is the same bits alone, in a chunk, in a batch and on any number of threads.

use super::*;
use proptest::prelude::*;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Rows at different positions in one call, against each row by itself.
pub(super) fn check(
    kernel: (Variant, AttentionPrecision),
    format: KvFormat,
    d: usize,
    windows: &Windows,
    positions: &[u32],
    seed: u64,
) {
    let tokens = *positions.last().unwrap() as usize + 1;
    let context = Context::random(format, d, tokens, seed);
    check_context(kernel, format, &context, windows, positions, seed);
}

pub(super) fn check_context(
    kernel: (Variant, AttentionPrecision),
    format: KvFormat,
    context: &Context,
    windows: &Windows,
    positions: &[u32],
    seed: u64,
) {
    let d = context.full_codec.head_dim();
    let mut queries = queries(positions.len(), d, 2.0, seed);
    // A spike: this query needs its low bytes also against narrow codes.
    queries[d / 3] = 90.0;
    let one = ThreadPool::new(1).unwrap();
    let three = ThreadPool::new(3).unwrap();
    let together = context.attend(kernel, &one, windows, &queries, positions);
    let threaded = context.attend(kernel, &three, windows, &queries, positions);
    assert_eq!(bits(&together), bits(&threaded), "{kernel:?} {format}: threads show");
    for (row, &position) in positions.iter().enumerate() {
        let query = &queries[row * d..(row + 1) * d];
        let alone = context.attend(kernel, &three, windows, query, &[position]);
        let part = &together[row * d..(row + 1) * d];
        assert_eq!(bits(&alone), bits(part), "{kernel:?} {format}: row {row} at {position} differs alone");
    }
}

#[test]
fn chunks_threads_and_neighbours_do_not_show() {
    let _ = fast_variants();
    for kernel in kernels(Variant::available()) {
        for format in ["oscar1", "oscar2", "oscar3", "oscar4", "bf16", "oscar2-lloyd"] {
            let format: KvFormat = format.parse().unwrap();
            // A chunk of prefill, two heads a token, across the boundary of a span.
            let chunk: Vec<u32> = (2040..2056).flat_map(|p| [p, p]).collect();
            check(kernel, format, 64, &Windows::default(), &chunk, 4);
            let scattered = [0, 0, 1, 15, 16, 63, 64, 65, 300, 335, 336, 336, 337];
            check(kernel, format, 64, &Windows::new(16, 30).unwrap(), &scattered, 5);
        }
        for name in ["kivi2-g128", "kitty", "turboquant2", "quarot2"] {
            let format: KvFormat = name.parse().unwrap();
            let windows = format.windows(None, None).unwrap();
            let chunk: Vec<u32> = (2030..2060).flat_map(|p| [p, p]).collect();
            let context = Context::demoted(format, 128, &windows, 2060);
            check_context(kernel, format, &context, &windows, &chunk, 4);
        }
        let long: Vec<u32> = (0..150).map(|i| 3 * i).collect();
        check(kernel, KvFormat::OSCAR2, 32, &Windows::default(), &long, 6);
    }
}

/// Together these rows are enough for AMX tiles; a row alone is read by AVX-512.
#[test]
fn amx_codes_match_avx512() {
    if !Variant::Amx.is_available() {
        eprintln!("skipped: amx is not available on this machine");
        return;
    }
    let windows = Windows::new(16, 40).unwrap();
    // 50 rows are seven blocks, the last with two rows; their boundaries lie inside of a page.
    let positions: Vec<u32> = (0..50).map(|row| 420 + row / 2).collect();
    for d in [64, 128, 192, 256] {
        for (key, value) in [(1, 1), (2, 2), (2, 4), (3, 1), (4, 3), (5, 5), (8, 8)] {
            let full = KvFormat::Bf16.codec(d, CodeLayout::CpuTile).unwrap();
            let spec = |bits| oscar_codec::SideSpec::affine(bits, 0.0);
            let coded = RowPageCodec::new(d, spec(key), spec(value), CodeLayout::CpuTile).unwrap();
            let mut random = Random::new(d as u64);
            let mut rows = || (0..450 * d).map(|_| random.normal()).collect::<Vec<f32>>();
            let context = Context::new(full, coded, &rows(), &rows());
            for precision in AttentionPrecision::ALL {
                let kernel = (Variant::Amx, precision);
                check_context(kernel, KvFormat::OSCAR2, &context, &windows, &positions, 7);
            }
        }
    }
}

#[test]
fn other_tasks_in_the_call_do_not_show() {
    let pool = ThreadPool::new(2).unwrap();
    let windows = Windows::default();
    let d = 64;
    let a = Context::random(KvFormat::OSCAR2, d, 2500, 1);
    let b = Context::random(KvFormat::Oscar { bits: 4 }, d, 700, 2);
    let (queries_a, queries_b) = (queries(4, d, 1.0, 1), queries(6, d, 1.0, 2));
    let (positions_a, positions_b) = ([2499_u32; 4], [500, 501, 502, 600, 699, 699]);
    for kernel in kernels(Variant::available()) {
        let (mut out_a, mut out_b) = (vec![0.0; 4 * d], vec![0.0; 6 * d]);
        let mut scratch = Scratch::new(kernel.1);
        for _ in 0..2 {
            a.with_pages(|context_a| {
                b.with_pages(|context_b| {
                    let task = |queries, positions, context, out| AttendTask {
                        queries,
                        positions,
                        scale: 1.0 / 8.0,
                        windows: &windows,
                        context,
                        sinks: None,
                        out,
                    };
                    let mut tasks = [
                        task(&queries_a[..], &positions_a[..], context_a, &mut out_a[..]),
                        task(&queries_b, &positions_b, context_b, &mut out_b),
                        task(&[], &[], context_b, &mut []),
                    ];
                    attend(kernel.0, &pool, &mut tasks, &mut scratch);
                });
            });
        }
        assert_eq!(bits(&out_a), bits(&a.attend(kernel, &pool, &windows, &queries_a, &positions_a)));
        assert_eq!(bits(&out_b), bits(&b.attend(kernel, &pool, &windows, &queries_b, &positions_b)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_rows_together_equal_each_alone(
        mut positions in prop::collection::vec(0_u32..900, 1..20),
        sink in 0_usize..6,
        recent in 1_usize..300,
        bits in 1_u8..=4,
        d in prop::sample::select(vec![32_usize, 64, 96]),
        seed in 0_u64..1000,
    ) {
        positions.sort_unstable();
        let windows = Windows::new(16 * sink, recent).unwrap();
        for kernel in kernels(Variant::available()) {
            check(kernel, KvFormat::Oscar { bits }, d, &windows, &positions, seed);
        }
    }
}
