//! Sequences that read a part of their history.

use crate::support::Setup;
use oscar_backend::{Reduce, Scoring, argmax};
use oscar_cache::view_end;
use oscar_codec::{KvFormat, Windows};
use oscar_kernels_cpu::backend::CpuBackend;
use oscar_runner::{Logits, Runner, Sequence, StepOutput, StepRequest};

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) % 6000 + 3).collect()
}

fn runner(format: KvFormat, windows: Windows) -> Runner<CpuBackend> {
    Setup { format, windows, ..Setup::default() }.embedded()
}

/// Prefills a sequence that can be forked at its end, which is the end of a page.
fn base(runner: &mut Runner<CpuBackend>, prompt: &[u32]) -> Sequence {
    let mut sequence = Sequence::forkable(runner);
    runner.prefill(&mut sequence, prompt, &mut StepOutput::default(), |_| {}).unwrap();
    sequence
}

fn logits(
    runner: &mut Runner<CpuBackend>,
    sequence: &mut Sequence,
    tokens: &[u32],
    chunk: usize,
) -> Vec<u32> {
    let mut out = StepOutput::default();
    let mut all = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let request = StepRequest { sequence: &mut *sequence, tokens, logits: Logits::All };
        runner.step(&mut [request], &mut out).unwrap();
        all.extend(out.logits.iter().map(|l| l.to_bits()));
    }
    all
}

/// The same positions for every layer and head.
fn same(heads: usize, positions: impl Iterator<Item = usize> + Clone) -> Vec<Vec<u32>> {
    (0..heads).map(|_| positions.clone().map(|p| p as u32).collect()).collect()
}

#[test]
fn a_view_of_everything_answers_like_its_base_to_the_bit() {
    let prompt = tokens(1280, 1);
    let more = tokens(400, 2);
    for bits in 1..=4 {
        let mut runner = runner(KvFormat::Oscar { bits }, Windows::default());
        let mut whole = base(&mut runner, &prompt);
        let end = view_end(runner.layout(), prompt.len());
        assert_eq!(end, 1024);
        let mut view = runner.derive(&whole, prompt.len(), same(12, 64..end)).unwrap();
        assert_eq!(view.len(), prompt.len());
        let expected = logits(&mut runner, &mut whole, &more, 100);
        assert!(logits(&mut runner, &mut view, &more, 37) == expected, "{bits} bits");
    }
}

/// A view's answer depends on the rows that it kept: not on chunks, and not on the base's later life.
#[test]
fn answers_of_a_view_do_not_depend_on_chunks_forks_or_its_base() {
    let (prompt, more) = (tokens(1024, 3), tokens(330, 4));
    let mut runner = runner(KvFormat::OSCAR2, Windows::default());
    let whole = base(&mut runner, &prompt);
    let end = view_end(runner.layout(), prompt.len());
    // Heads keep different rows, one of them none.
    let kept: Vec<Vec<u32>> =
        (0..12).map(|h| (64..end as u32).filter(|p| h > 0 && p % h == 0).collect()).collect();
    let mut view = runner.derive(&whole, prompt.len(), kept.clone()).unwrap();
    let mut again = runner.derive(&whole, prompt.len(), kept.clone()).unwrap();
    let mut fork = runner.fork(&view, prompt.len()).unwrap();
    let mut base_answer = runner.fork(&whole, prompt.len()).unwrap();
    let base_answer = logits(&mut runner, &mut base_answer, &more, 330);
    drop(whole);
    let expected = logits(&mut runner, &mut view, &more, 330);
    assert!(expected != base_answer, "evicted rows change logits");
    assert!(logits(&mut runner, &mut again, &more, 7) == expected);
    drop((view, again));
    assert!(logits(&mut runner, &mut fork, &more, 64) == expected);
    // A view of a view: rows that the first evicted stay evicted.
    let len = fork.len() / 64 * 64;
    let whole = base(&mut runner, &prompt);
    let mut view = runner.derive(&whole, prompt.len(), kept.clone()).unwrap();
    logits(&mut runner, &mut view, &more[..len - prompt.len()], 64);
    let later = view_end(runner.layout(), len);
    let all: Vec<Vec<u32>> =
        kept.iter().map(|k| k.iter().copied().chain(end as u32..later as u32).collect()).collect();
    let mut second = runner.derive(&view, len, all).unwrap();
    // Its rows lie in other pages, so sums are rounded differently.
    let floats = |bits: Vec<u32>| bits.into_iter().map(f32::from_bits).collect::<Vec<f32>>();
    let expected = floats(logits(&mut runner, &mut view, &more[..100], 100));
    let got = floats(logits(&mut runner, &mut second, &more[..100], 9));
    let size = |x: &mut dyn Iterator<Item = f32>| x.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let error =
        size(&mut got.iter().zip(&expected).map(|(a, b)| a - b)) / size(&mut expected.iter().copied());
    assert!(error < 0.02, "{error}");
}

#[test]
fn refused_views_take_nothing_and_say_why() {
    let prompt = tokens(640, 5);
    for name in ["kivi2", "kitty", "bf16"] {
        let format: KvFormat = name.parse().unwrap();
        let mut runner = runner(format, format.windows(None, None).unwrap());
        let sequence = base(&mut runner, &prompt);
        let before = runner.usage();
        let error = runner.derive(&sequence, 640, same(12, 64..65)).unwrap_err().to_string();
        assert!(error.contains("cannot be evicted"), "{name}: {error}");
        assert_eq!(runner.usage(), before);
    }
    let mut odd = runner(KvFormat::OSCAR2, Windows::new(16, 128).unwrap());
    let sequence = base(&mut odd, &prompt);
    let error = odd.derive(&sequence, 640, same(12, 64..65)).unwrap_err().to_string();
    assert!(error.contains("--sink"), "{error}");
}

/// Scores of a prompt do not depend on its chunks, and weigh what attention reads.
#[test]
fn scores_do_not_depend_on_chunks() {
    let prompt = tokens(700, 6);
    let scores = |chunk: usize, reduce| {
        let mut runner = Setup { format: KvFormat::OSCAR2, chunk, ..Setup::default() }.embedded();
        let mut sequence = Sequence::forkable(&runner);
        let mut scoring =
            Scoring { queries: 0..0, until: 384, over: None, reduce, scores: vec![Vec::new(); 12] };
        runner.score(&mut sequence, &prompt, 10, &mut scoring).unwrap();
        scoring.scores
    };
    let expected = scores(512, Reduce::Sum);
    assert!(expected.iter().all(|head| head.len() == 320 && head.iter().any(|&s| s > 0)));
    assert!(scores(100, Reduce::Sum) == expected);
    let largest = scores(512, Reduce::Max);
    assert!(scores(64, Reduce::Max) == largest);
    let one = Scoring::ONE as u64;
    for (max, sum) in largest.iter().flatten().zip(expected.iter().flatten()) {
        assert!(max <= sum && *max <= one);
    }
}

/// Derived, forked and dropped sequences leave nothing behind.
#[test]
fn page_accounting_closes_after_random_views() {
    let mut runner = Setup { format: KvFormat::OSCAR2, context: 2048, ..Setup::default() }.embedded();
    let prompt = tokens(768, 7);
    let whole = base(&mut runner, &prompt);
    let alone = runner.usage();
    let end = view_end(runner.layout(), prompt.len());
    let (mut held, mut state) = (Vec::new(), 12345u64);
    for _ in 0..150 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let pick = (state >> 33) as usize;
        match pick % 4 {
            0 | 1 => {
                let step = 1 + pick / 4 % 97;
                let kept = (0..12).map(|h| (64..end as u32).step_by(step + h).collect()).collect();
                held.push(runner.derive(&whole, prompt.len(), kept).unwrap());
            }
            2 if !held.is_empty() => {
                let fork = runner.fork(&held[pick / 4 % held.len()], prompt.len()).unwrap();
                held.push(fork);
            }
            _ if !held.is_empty() => {
                held.swap_remove(pick / 4 % held.len());
            }
            _ => {}
        }
        held.truncate(40);
    }
    assert!(runner.usage().view_pages > 0 && runner.usage().bytes > alone.bytes);
    held.clear();
    assert_eq!(runner.usage(), alone);
    let mut out = StepOutput::default();
    let mut fork = runner.fork(&whole, prompt.len()).unwrap();
    runner.prefill(&mut fork, &[5], &mut out, |_| {}).unwrap();
    let after = argmax(&out.logits);
    drop(fork);
    let mut whole = whole;
    runner.prefill(&mut whole, &[5], &mut out, |_| {}).unwrap();
    assert_eq!(argmax(&out.logits), after, "views do not touch their base");
}
