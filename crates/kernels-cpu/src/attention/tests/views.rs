//! Attention and scores over views: fast variants against the codec, and against the whole history.

use super::*;
use crate::attention::{ScoreTask, add_scores};
use crate::kernels::Kernels;
use oscar_codec::Survivors;
use oscar_codec::scores::key_weights;

/// The pages of a context seen through a view of the first `end` positions.
fn with_view<R>(
    context: &Context,
    sink: usize,
    end: usize,
    kept: &[usize],
    work: impl FnOnce(&PagedContext<'_>) -> R,
) -> R {
    let view = Survivors { end, rows: kept.len() };
    let codec = &context.coded_codec;
    let mut pages = vec![vec![0xff; codec.page_bytes()]; view.pages()];
    for (row, &p) in kept.iter().enumerate() {
        let to = (&mut pages[row / PAGE_TOKENS][..], row % PAGE_TOKENS);
        codec.copy_row((&context.coded[p / PAGE_TOKENS], p % PAGE_TOKENS), to).unwrap();
    }
    let (sink, end) = (sink / PAGE_TOKENS, end / PAGE_TOKENS);
    let mut full: Vec<Option<&[u8]>> = context.full[..sink].iter().map(|p| Some(&p[..])).collect();
    full.extend(vec![None; view.pages()]);
    full.extend(context.full[end..].iter().map(|p| Some(&p[..])));
    let mut coded: Vec<Option<&[u8]>> = vec![None; sink];
    coded.extend(pages.iter().map(|p| Some(&p[..])));
    coded.extend(context.coded[end..].iter().map(|p| Some(&p[..])));
    work(&PagedContext {
        full_codec: &context.full_codec,
        coded_codec: codec,
        full: &full,
        coded: &coded,
        view: Some(view),
    })
}

fn attend_view(
    kernel: (Variant, AttentionPrecision),
    pages: &PagedContext<'_>,
    windows: &Windows,
    queries: &[f32],
    positions: &[u32],
) -> Vec<f32> {
    let d = pages.full_codec.head_dim();
    let mut out = vec![f32::NAN; queries.len()];
    let scale = 1.0 / (d as f32).sqrt();
    let task = AttendTask { queries, positions, scale, windows, context: pages, sinks: None, out: &mut out };
    attend(kernel.0, &ThreadPool::new(2).unwrap(), &mut [task], &mut Scratch::new(kernel.1));
    out
}

const LEN: usize = 2500;

fn selections() -> Vec<Vec<usize>> {
    let end = 64 * 30;
    vec![vec![], vec![64], (64..end).step_by(3).collect(), (700..764).collect(), (64..end - 1).collect()]
}

#[test]
fn views_match_scalar_in_every_variant() {
    let (windows, end) = (Windows::default(), 64 * 30);
    for kernel in kernels(Variant::available()) {
        for bits in [1, 2, 3, 4] {
            let context = Context::random(KvFormat::Oscar { bits }, 128, LEN, 5);
            let queries = queries(5, 128, 1.5, 9);
            let positions =
                vec![LEN as u32 - 3, LEN as u32 - 2, LEN as u32 - 1, LEN as u32 - 1, LEN as u32 - 1];
            for kept in selections() {
                let (got, expected) = with_view(&context, 64, end, &kept, |pages| {
                    let got = attend_view(kernel, pages, &windows, &queries, &positions);
                    let mut expected = vec![0.0; queries.len()];
                    for (i, &t) in positions.iter().enumerate() {
                        let query = &queries[i * 128..][..128];
                        let state = attend_context(query, 128f32.sqrt().recip(), t as usize, &windows, pages);
                        state.finish(&mut expected[i * 128..][..128]);
                    }
                    (got, expected)
                });
                let error = relative_error(&got, &expected);
                // The bound of the one-byte kernels over a whole history.
                assert!(error < 2e-2, "{kernel:?}, {bits} bits, {} rows: {error:e}", kept.len());
            }
        }
    }
}

/// A view that keeps everything is the history, bit for bit.
#[test]
fn a_view_of_everything_is_the_history() {
    let (windows, end) = (Windows::default(), 64 * 30);
    let context = Context::random(KvFormat::OSCAR2, 128, LEN, 6);
    let queries = queries(4, 128, 1.5, 10);
    let positions = vec![LEN as u32 - 1; 4];
    let all: Vec<usize> = (64..end).collect();
    for kernel in kernels(Variant::available()) {
        let base = context.attend(kernel, &ThreadPool::new(1).unwrap(), &windows, &queries, &positions);
        let view =
            with_view(&context, 64, end, &all, |p| attend_view(kernel, p, &windows, &queries, &positions));
        assert_eq!(base, view, "{kernel:?}");
    }
}

#[test]
fn scores_match_the_codec() {
    let (windows, end) = (Windows::default(), 64 * 30);
    let context = Context::random(KvFormat::OSCAR2, 128, LEN, 7);
    let queries = queries(6, 128, 1.5, 11);
    // The first query reads some tiles in BF16 that the last reads quantized.
    let positions: Vec<u32> = [0, 1, 20, 70, 71, 90].map(|i| LEN as u32 - 91 + i).to_vec();
    let pool = ThreadPool::new(2).unwrap();
    for kept in selections() {
        for over in [None, Some(vec![0..64, 100..130, 400..2600])] {
            with_view(&context, 64, end, &kept, |pages| {
                let hole = pages.compaction(64).1;
                let shift = pages.compaction(64).0;
                let scored: Vec<usize> = (64..LEN - 91 - shift).filter(|p| !hole.contains(p)).collect();
                let mut expected = vec![0.0f32; scored.len()];
                let scale = 128f32.sqrt().recip();
                for (query, &t) in queries.chunks_exact(128).zip(&positions) {
                    let weights = key_weights(query, scale, t as usize, &windows, pages, over.as_deref());
                    scored.iter().zip(&mut expected).for_each(|(&p, e)| *e = e.max(weights[p]));
                }
                for variant in Variant::available() {
                    let kernels = Kernels::for_variant(variant).unwrap();
                    let task = ScoreTask {
                        queries: &queries,
                        positions: &positions,
                        scale,
                        windows: &windows,
                        context: pages,
                        over: over.as_deref(),
                    };
                    let mut scores = vec![0; scored.len()];
                    let one = (1u64 << 40) as f32;
                    add_scores(kernels, &pool, &task, &scored, &mut scores, |score, w| {
                        *score = (*score).max((w * one) as u64);
                    });
                    for (got, expected) in scores.iter().zip(&expected) {
                        let got = *got as f32 / one;
                        assert!((got - expected).abs() < 1e-5, "{variant}: {got} and {expected}");
                    }
                }
            });
        }
    }
}
