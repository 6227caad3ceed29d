//! Latent rows, which are keys and values in one, against the specification.

use super::*;
use oscar_codec::SideSpec;

/// Rows of 512 and 64 channels, as DeepSeek has them, and shorter ones.
const ROWS: [usize; 4] = [32, 80, 320, 576];

fn context(format: KvFormat, row: usize, tokens: usize) -> Context {
    let codec = RowPageCodec::new(row, format.side_spec(Side::Key), SideSpec::SHARED, CodeLayout::CpuTile);
    let (codec, mut random) = (codec.unwrap(), Random::new(row as u64));
    let rows: Vec<f32> = (0..tokens * row).map(|_| random.normal()).collect();
    Context::new(codec.clone(), codec, &rows, &rows)
}

/// Every variant: all heads of one token, of several tokens, and more tokens than a span has.
#[test]
fn every_variant_matches_scalar_on_latent_rows() {
    let (pool, windows) = (ThreadPool::new(2).unwrap(), Windows::unlimited());
    for format in [KvFormat::Bf16, KvFormat::F32] {
        for row in ROWS {
            for (tokens, count) in [(1, 20), (63, 5), (64, 8), (130, 33), (2150, 4)] {
                let context = context(format, row, tokens);
                let queries = queries(count, row, 1.5, count as u64);
                // The last token's heads, and those of tokens before it.
                let positions: Vec<u32> =
                    (0..count).map(|i| tokens.saturating_sub(1 + (count - 1 - i) / 4) as u32).collect();
                let expected = context.expected(&windows, &queries, &positions);
                for kernel in kernels(Variant::available()) {
                    let got = context.attend(kernel, &pool, &windows, &queries, &positions);
                    let error = relative_error(&got, &expected);
                    // AVX-512 and AMX round queries and weights to BF16.
                    let tolerance = match (kernel.0, format) {
                        (Variant::Scalar | Variant::Avx2, _) | (_, KvFormat::F32) => 2e-5,
                        _ => 4e-3,
                    };
                    assert!(
                        error <= tolerance,
                        "{kernel:?} {format}, rows of {row}, {tokens} tokens, {count} queries: {error:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_of_latent_attention_depends_on_that_row_alone() {
    let windows = Windows::unlimited();
    let (one, two) = (ThreadPool::new(1).unwrap(), ThreadPool::new(2).unwrap());
    let (row, tokens) = (576, 2100);
    let context = context(KvFormat::Bf16, row, tokens);
    let queries = queries(70, row, 1.5, 3);
    let positions: Vec<u32> = (0..70).map(|i| (tokens - 35 + i / 2) as u32).collect();
    for kernel in kernels(Variant::available()) {
        let all = context.attend(kernel, &two, &windows, &queries, &positions);
        for first in [0, 9, 69] {
            let alone = context.attend(
                kernel,
                &one,
                &windows,
                &queries[first * row..][..row],
                &positions[first..=first],
            );
            assert!(alone == all[first * row..][..row], "{kernel:?}, query {first}");
        }
    }
}
