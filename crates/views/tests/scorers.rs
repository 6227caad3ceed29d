//! Scorers on the embedded model: against float references, and what they keep.

mod support;

use oscar_backend::{CacheHead, HeadHistory};
use oscar_cache::view_end;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, Windows};
use oscar_runner::{Sequence, StepOutput};
use oscar_views::{Budget, Evict, HeadSplit, History, Probe, Ranking, observe, score, select};
use support::{base, runner};

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i.wrapping_mul(2654435761) >> 7) % 6000 + 3).collect()
}

/// Every scorer, with prompts in different chunks: equal rows. Scoring leaves no pages behind.
#[test]
fn every_scorer_keeps_the_same_rows_for_any_chunks() {
    let tokens = tokens(832);
    let probe = Probe { repeat: tokens[..9].to_vec(), ..Probe::default() };
    let kept = |chunk: usize| {
        let mut runner = runner(chunk);
        let sequence = base(&mut runner, &tokens);
        let before = runner.usage();
        let history = History { sequence: &sequence, tokens: &tokens, len: 832, observed: None };
        let all: Vec<Vec<Vec<u32>>> = Evict::NAMES
            .iter()
            .map(|&(evict, name)| {
                let scores = score(&mut runner, &history, evict, &probe).unwrap();
                assert_eq!(runner.usage(), before, "{name} leaves pages behind");
                assert!(scores.rows.iter().flatten().all(|s| s.is_finite()), "{name}");
                let (budget, protected) = (Budget::Rows(100), std::slice::from_ref(&(200..210)));
                let selected = select(runner.layout(), &scores, budget, HeadSplit::Adaptive, protected);
                assert_eq!((selected.chosen, selected.protected), (1200, 120), "{name}");
                assert!(selected.kept.iter().all(|head| (200..210).all(|p| head.contains(&p))), "{name}");
                selected.kept
            })
            .collect();
        all
    };
    let expected = kept(512);
    assert!(kept(96) == expected);
    let recent: Vec<u32> = (200..210).chain(view_end_rows()).collect();
    assert!(expected[0].iter().all(|head| *head == recent), "recent keeps the newest rows");
    for (i, (_, name)) in Evict::NAMES.iter().enumerate().skip(1) {
        assert!(expected[i] != expected[0], "{name} is not recent");
    }
}

/// The last hundred rows of the history of 832 tokens.
fn view_end_rows() -> std::ops::Range<u32> {
    let format = KvFormat::OSCAR2;
    let layout = CacheLayout::new(format, 6, 2, 128, Windows::default(), CodeLayout::CpuTile).unwrap();
    let end = view_end(&layout, 832) as u32;
    end - 100..end
}

/// Observing a prompt changes nothing, and gives `h2o` and `expected` what a replay gives.
#[test]
fn observed_prompts_score_like_replayed_ones() {
    let tokens = tokens(640);
    let mut runner = runner(512);
    let mut watched = Sequence::forkable(&runner);
    let observed = observe(&mut runner, &mut watched, &tokens).unwrap();
    let plain = base(&mut runner, &tokens);
    for evict in [Evict::H2o, Evict::Expected] {
        let history = History { sequence: &watched, tokens: &tokens, len: 640, observed: Some(&observed) };
        let seen = score(&mut runner, &history, evict, &Probe::default()).unwrap();
        let history = History { sequence: &plain, observed: None, ..history };
        let again = score(&mut runner, &history, evict, &Probe::default()).unwrap();
        assert!(seen.rows == again.rows, "{evict}");
        assert_eq!((seen.probe_tokens, again.probe_tokens), (0, 640));
    }
}

/// `keydiff` against its definition on the dequantized keys.
#[test]
fn keydiff_matches_its_definition() {
    let tokens = tokens(640);
    let mut runner = runner(512);
    let sequence = base(&mut runner, &tokens);
    let history = History { sequence: &sequence, tokens: &tokens, len: 640, observed: None };
    let scores = score(&mut runner, &history, Evict::KeyDiff, &Probe::default()).unwrap();
    let head = CacheHead { layer: 3, kv_head: 1 };
    let until = view_end(runner.layout(), 640);
    let keys = runner.history(&sequence, HeadHistory::whole(head, until)).unwrap().keys;
    let unit = |key: &[f32]| {
        let norm = key.iter().map(|k| k * k).sum::<f32>().sqrt();
        key.iter().map(|k| k / norm).collect::<Vec<f32>>()
    };
    let units: Vec<Vec<f32>> = keys.chunks_exact(128).map(unit).collect();
    let mean: Vec<f32> = (0..128).map(|i| units.iter().map(|u| u[i]).sum::<f32>()).collect();
    let mean = unit(&mean);
    for (u, score) in units.iter().zip(&scores.rows[7]) {
        let cosine: f32 = u.iter().zip(&mean).map(|(a, b)| a * b).sum();
        assert!((f64::from(-cosine) - score).abs() < 1e-5);
    }
    // Pieces of any size give equal scores.
    for (piece, calls) in [(1000, 12), (200, 12 * 4), (64, 12 * 10)] {
        let mut ranking = Ranking::new(&runner, &history).in_pieces(piece);
        let mut count = 1;
        while !ranking.advance(&runner, &history).unwrap() {
            count += 1;
        }
        assert!(ranking.scores() == scores, "pieces of {piece}");
        assert_eq!((count, until - 64), (calls, 320), "pieces of {piece}");
    }
}

/// On a view that already evicted rows, policies that need the whole history are refused.
#[test]
fn policies_that_need_the_whole_history_refuse_a_view() {
    let tokens = tokens(832);
    let mut runner = runner(512);
    let sequence = base(&mut runner, &tokens[..640]);
    let mut view = runner.derive(&sequence, 640, vec![vec![64, 100, 101]; 12]).unwrap();
    runner.prefill(&mut view, &tokens[640..], &mut StepOutput::default(), |_| {}).unwrap();
    let history = History { sequence: &view, tokens: &tokens, len: 832, observed: None };
    for (evict, name) in Evict::NAMES {
        let found = score(&mut runner, &history, evict, &Probe::default());
        match evict {
            Evict::H2o | Evict::Expected | Evict::KvZip => {
                assert!(found.unwrap_err().to_string().contains("whole history"), "{name}");
            }
            _ => {
                let scores = found.unwrap();
                let rows = scores.positions[0].len();
                assert_eq!(
                    (scores.positions[0][..3].to_vec(), scores.rows[0].len()),
                    (vec![64, 100, 101], rows)
                );
            }
        }
    }
}
