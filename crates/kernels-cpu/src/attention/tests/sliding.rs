//! Sliding windows and attention sinks: every kernel against the specification, and row by row.

use super::*;

/// A sink for each row.
fn sinks(rows: usize) -> Vec<f32> {
    (0..rows).map(|row| [-30.0, -1.0, 0.5, 2.0, 20.0][row % 5]).collect()
}

fn expected(
    context: &Context,
    windows: &Windows,
    queries: &[f32],
    positions: &[u32],
    sinks: &[f32],
) -> Vec<f32> {
    let d = context.full_codec.head_dim();
    let mut out = vec![0.0; queries.len()];
    context.with_pages(|pages| {
        let rows = queries.chunks_exact(d).zip(positions).zip(sinks);
        for (((query, &t), &sink), out) in rows.zip(out.chunks_exact_mut(d)) {
            let mut state = attend_context(query, 1.0 / (d as f32).sqrt(), t as usize, windows, pages);
            state.add_sink(sink);
            state.finish(out);
        }
    });
    out
}

#[test]
fn windows_and_sinks_match_scalar() {
    let pool = ThreadPool::new(2).unwrap();
    let d = 64;
    for (name, tolerance) in [("bf16", 4e-3), ("oscar4", 4e-3), ("oscar2", 1.5e-2), ("oscar2-lloyd", 1e-2)] {
        let format: KvFormat = name.parse().unwrap();
        let context = Context::random(format, d, 2300, 3);
        let positions: Vec<u32> =
            [0, 7, 8, 63, 64, 65, 100, 700, 701, 2047, 2048, 2049, 2055, 2056, 2299].to_vec();
        let queries = queries(positions.len(), d, 1.5, 8);
        let sinks = sinks(positions.len());
        for window in [1, 8, 100, 1024, 4096] {
            let windows = Windows::new(16, 40).unwrap().sliding(Some(window));
            let expected = expected(&context, &windows, &queries, &positions, &sinks);
            let plain = context.expected(&windows, &queries, &positions);
            for kernel in kernels(Variant::available()) {
                let tolerance = if kernel.0 == Variant::Scalar { 2e-5 } else { tolerance };
                let run =
                    |sinks| context.attend_with_sinks(kernel, &pool, &windows, &queries, &positions, sinks);
                for (got, expected) in [(run(Some(&sinks)), &expected), (run(None), &plain)] {
                    let error = relative_error(&got, expected);
                    assert!(error <= tolerance, "{kernel:?} {name}, window {window}: error {error:e}");
                }
            }
        }
    }
}

#[test]
fn chunks_threads_and_neighbours_do_not_show() {
    for kernel in kernels(Variant::available()) {
        for name in ["oscar2", "oscar4", "bf16", "oscar2-lloyd"] {
            let format: KvFormat = name.parse().unwrap();
            for window in [8, 128, 1024] {
                let windows = Windows::default().sliding(Some(window));
                let chunk: Vec<u32> = (2040..2056).flat_map(|p| [p, p]).collect();
                row_alone::check(kernel, format, 64, &windows, &chunk, 4);
                let windows = Windows::new(16, 30).unwrap().sliding(Some(window));
                let scattered = [0, 0, 1, 15, 16, 63, 64, 65, 300, 335, 336, 336, 337];
                row_alone::check(kernel, format, 64, &windows, &scattered, 5);
            }
        }
        for name in ["kivi2-g128", "kitty"] {
            let format: KvFormat = name.parse().unwrap();
            let windows = format.windows(None, None).unwrap().sliding(Some(200));
            let chunk: Vec<u32> = (600..630).collect();
            let context = Context::demoted(format, 128, &windows, 640);
            row_alone::check_context(kernel, format, &context, &windows, &chunk, 4);
        }
    }
}
