//! The reference for several ranks: they run one after another in one thread.

use super::{BUDGET, Cache, Model, bits, cpu};
use oscar_backend::{Backend, BackendError, Communicator, Result, Step};
use oscar_cache::{PagePool, SequencePages};
use oscar_codec::KvFormat;
use oscar_kernels_cpu::backend::Mode;
use oscar_models::{StepInput, Transformer};
use oscar_runner::StepOutput;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// What the ranks of a step said in each meeting, kept so that they can run one after another: a
/// rank stops at the first meeting for which not all parts are known yet and runs again later.
#[derive(Default)]
struct Tape(Mutex<Vec<Vec<Option<Vec<f32>>>>>);

struct TapeRank {
    rank: usize,
    ranks: usize,
    tape: Arc<Tape>,
    at: AtomicUsize,
}

impl TapeRank {
    fn meet(&self, part: &[f32]) -> Result<Vec<Vec<f32>>> {
        let at = self.at.fetch_add(1, Ordering::Relaxed);
        let mut tape = self.tape.0.lock().unwrap();
        if tape.len() == at {
            tape.push(vec![None; self.ranks]);
        }
        let mine = tape[at][self.rank].get_or_insert_with(|| part.to_vec());
        assert_eq!(bits(mine), bits(part), "a step that runs again says the same");
        let all: Option<Vec<Vec<f32>>> = tape[at].iter().cloned().collect();
        all.ok_or(BackendError::RankLeft { rank: self.rank, why: "its turn comes".into() })
    }
}

impl Communicator for TapeRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        let parts = self.meet(values)?;
        for (i, value) in values.iter_mut().enumerate() {
            *value = parts[1..].iter().fold(parts[0][i], |sum, part| sum + part[i]);
        }
        Ok(())
    }

    fn all_gather(&self, part: &[f32], visit: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        self.meet(part)?.iter().enumerate().for_each(|(rank, part)| visit(rank, part));
        Ok(())
    }

    fn abandon(&self, _: &str) {}

    fn restart(&self) {
        self.at.store(0, Ordering::Relaxed);
    }
}

/// The logits of a model split over ranks that run one after another in this thread. It shares page
/// tables and the model code with the runner; threads, pools, budgets and sums are its own.
pub fn one_after_another(
    model: &Model,
    format: KvFormat,
    ranks: usize,
    tokens: &[u32],
    chunk: usize,
) -> Vec<f32> {
    let config = &model.config;
    let whole = Cache::whole(config, format);
    let tape = Arc::new(Tape::default());
    let per_rank = config.kv_heads / ranks;
    let mut parts: Vec<_> = (0..ranks)
        .map(|rank| {
            let place = TapeRank { rank, ranks, tape: tape.clone(), at: AtomicUsize::new(0) };
            let backend = cpu(1, Mode::Bf16).with_communicator(place);
            let rotations = whole.rotations.as_ref();
            let built =
                Transformer::build(&backend, config, &model.weights, rotations, 1024, |_| {}).unwrap();
            let cache = Cache::of(config, format, rank * per_rank..(rank + 1) * per_rank);
            let layout = backend.held_layout(&cache.layout);
            let pool = backend.pool(&layout, built.heads(), BUDGET).unwrap();
            let workspace = built.workspace(&backend);
            (backend, built, pool, workspace)
        })
        .collect();
    let layout = parts[0].0.held_layout(&whole.layout);
    let pool = PagePool::new(&layout, BUDGET);
    let mut pages = SequencePages::default();
    let (mut all, mut out) = (Vec::new(), StepOutput::default());
    for tokens in tokens.chunks(chunk) {
        let step_pages = pages.prepare(&layout, &pool, tokens.len()).unwrap();
        let rows = [pages.rows(&step_pages, 0)];
        let wanted: Vec<usize> = (0..tokens.len()).collect();
        let input = StepInput { tokens, logits: &wanted, picks: &[], hidden: &[] };
        tape.0.lock().unwrap().clear();
        // Two sums a layer and the logits.
        for turn in 0.. {
            assert!(turn <= 2 * config.layers + 1, "every turn comes one meeting further");
            let mut done = 0;
            for (rank, (backend, built, storage, workspace)) in parts.iter_mut().enumerate() {
                backend.communicator().unwrap().restart();
                let mut other = StepOutput::default();
                let out = if rank == 0 { &mut out } else { &mut other };
                let mut step = backend.step(&rows, storage).unwrap();
                match built.forward(&mut step, &input, workspace, out, None) {
                    Ok(()) => done += 1,
                    Err(error) => assert!(error.to_string().contains("its turn comes"), "{error}"),
                }
                step.finish().unwrap();
            }
            if done == ranks {
                break;
            }
        }
        pages.commit(&layout, &step_pages);
        all.extend_from_slice(&out.logits);
    }
    all
}
