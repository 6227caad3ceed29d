//! One byte of queries and weights adds next to nothing to the error of one- and two-bit codes.

use super::*;

/// Rows of a context: keys, values and queries.
struct Case {
    name: &'static str,
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
}

const TOKENS: usize = 1024;
const QUERIES: usize = 8;

fn cases(d: usize) -> Vec<Case> {
    let mut random = Random::new(d as u64 + 7);
    let mut rows = |count: usize, make: &dyn Fn(&mut Random, usize, usize) -> f32| -> Vec<f32> {
        (0..count * d).map(|i| make(&mut random, i / d, i % d)).collect()
    };
    let normal = |r: &mut Random, _: usize, _: usize| r.normal();
    let mut case = |name,
                    keys: &dyn Fn(&mut Random, usize, usize) -> f32,
                    values: &dyn Fn(&mut Random, usize, usize) -> f32,
                    queries: &dyn Fn(&mut Random, usize, usize) -> f32| Case {
        name,
        keys: rows(TOKENS, keys),
        values: rows(TOKENS, values),
        queries: rows(QUERIES, queries),
    };
    // Scores of unrelated tokens stay near zero, so `at` gives the rows at some tokens keys along
    // the query.
    let along = |token: usize, every: usize, size: f32, r: &mut Random| {
        if token.is_multiple_of(every) { size + 0.3 * r.normal() } else { r.normal() }
    };
    vec![
        case("random", &normal, &normal, &normal),
        case("sharp", &normal, &normal, &|r, _, _| 4.0 * r.normal()),
        case("even weights", &normal, &normal, &|_, _, _| 0.0),
        case("nearly even weights", &normal, &normal, &|r, _, _| 0.05 * r.normal()),
        case("one large query channel", &normal, &normal, &|r, row, c| {
            if c == 5 * row { 12.0 } else { 0.4 * r.normal() }
        }),
        case("query channels at the rounding edge", &normal, &normal, &|r, _, c| {
            if c == 3 { 2.0 } else { (2.0 / 255.0) * (1.0 + 2.0 * (2.0 * r.uniform()).round()) }
        }),
        case(
            "large key channels",
            &|r, _, c| r.normal() * if c % 37 == 0 { 8.0 } else { 1.0 },
            &normal,
            &normal,
        ),
        case("offset keys", &|r, _, _| 5.0 + r.normal(), &normal, &|r, _, _| 0.5 * r.normal()),
        case("offset values", &normal, &|r, _, _| 20.0 + r.normal(), &normal),
        case(
            "scales of values far apart",
            &normal,
            &|r, t, _| r.normal() * [1.0, 0.01, 30.0, 0.3][t % 4],
            &normal,
        ),
        case("one token of each page", &|r, t, _| along(t, 64, 0.6, r), &normal, &|r, _, _| {
            1.0 + 0.2 * r.normal()
        }),
        case(
            "a token far ahead of even ones",
            &|r, t, _| if t % 64 == 9 { 0.55 } else { 0.02 * r.normal() },
            &normal,
            &|r, _, _| 1.0 + 0.1 * r.normal(),
        ),
    ]
}

fn deviation(a: &[f32], b: &[f32]) -> f64 {
    assert!(a.iter().all(|v| v.is_finite()), "an output is not finite");
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    (squares / a.len() as f64).sqrt()
}

#[test]
fn the_codes_own_error_dwarfs_that_of_one_byte() {
    let pool = ThreadPool::new(2).unwrap();
    // The last token alone is unquantised, and in f32, so that only the codes are under test.
    let windows = Windows::new(0, 1).unwrap();
    let positions = [TOKENS as u32 - 1; QUERIES];
    for d in [64, 128, 256] {
        let codec = |format: KvFormat| format.codec(d, CodeLayout::CpuTile).unwrap();
        for Case { name, keys, values, queries } in cases(d) {
            let exact = Context::new(codec(KvFormat::F32), codec(KvFormat::F32), &keys, &values);
            let exact = exact.expected(&windows, &queries, &positions);
            for bits in [1, 2] {
                let context =
                    Context::new(codec(KvFormat::F32), codec(KvFormat::Oscar { bits }), &keys, &values);
                let of_codes = context.expected(&windows, &queries, &positions);
                let own = deviation(&of_codes, &exact);
                for variant in [Variant::Avx2, Variant::Avx512] {
                    if !variant.is_available() {
                        eprintln!("skipped: {variant} is not available on this machine");
                        continue;
                    }
                    let kernel = (variant, AttentionPrecision::Int8);
                    let got = context.attend(kernel, &pool, &windows, &queries, &positions);
                    let added = deviation(&got, &of_codes);
                    eprintln!("{variant}, {bits} bits, head {d}, {name}: {:.2} %", 100.0 * added / own);
                    assert!(
                        added < 0.05 * own,
                        "{variant}, {bits} bits, head {d}, {name}: {added:e} beside {own:e} of the codes"
                    );
                }
            }
        }
    }
}
