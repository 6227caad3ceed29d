//! One model over several ranks, beside the same model on one.

mod tape;

use oscar_backend::{Backend, BlockId, Communicator, Pick, Result, RowEviction, WeightFormat, argmax};
use oscar_codec::{CacheLayout, CodeLayout, FormatTable, FullPageId, KvFormat, RotationSet, Windows};
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_kernels_cpu::{Kernels, ThreadRank};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Weights};
use oscar_runner::{KvMemory, Logits, Ranks, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tape::one_after_another;

const BUDGET: usize = 64 << 20;

struct Model {
    config: DecoderConfig,
    weights: Weights,
    _folder: Option<tempfile::TempDir>,
}

impl Model {
    fn tiny(config: DecoderConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_random_model(folder.path(), &config, WriteOptions::default(), 7).unwrap();
        let source = ModelSource::Dir(folder.path().to_path_buf());
        Self { config, weights: Weights::open(&source).unwrap(), _folder: Some(folder) }
    }

    /// Four KV heads, so that four ranks can share it; odd sizes elsewhere.
    fn four_heads(family: Family) -> Self {
        let tiny = tiny_config(family);
        // Mixtral's is that of its experts.
        let intermediate_size = if family == Family::Mixtral { tiny.intermediate_size } else { 99 };
        let config =
            DecoderConfig { query_heads: 8, kv_heads: 4, intermediate_size, vocab_size: 131, ..tiny };
        Self::tiny(config)
    }

    fn embedded() -> Self {
        let source = ModelSource::Embedded(oscar_embedded::FILES);
        let (config, weights) = (DecoderConfig::load(&source).unwrap(), Weights::open(&source).unwrap());
        Self { config, weights, _folder: None }
    }

    fn runner(&self, ranks: Ranks<CpuBackend>, cache: &Cache, chunk: usize) -> Runner<CpuBackend> {
        let options = RunnerOptions {
            layout: cache.layout.clone(),
            rotations: cache.rotations.as_ref(),
            context: 1024,
            kv_memory: KvMemory::Bytes(BUDGET),
            prefill_chunk: chunk,
        };
        Runner::load(ranks, &self.config, &self.weights, options, |_| {}).unwrap()
    }
}

/// A cache of some KV heads of a model.
struct Cache {
    layout: CacheLayout,
    rotations: Option<RotationSet>,
}

/// Widths by layer and head: all that a head can have, none the same for two ranks.
const WIDTHS: [(u32, u32); 8] = [(2, 2), (3, 4), (0, 0), (1, 1), (4, 3), (1, 2), (2, 3), (0, 0)];

impl Cache {
    /// `oscar` with a table of widths, or any other format, for these KV heads out of `whole`.
    fn of(config: &DecoderConfig, format: KvFormat, heads: std::ops::Range<usize>) -> Self {
        let (layers, d) = (config.layers, config.head_dim);
        let windows = Windows::new(16, 32).unwrap();
        let layout = CacheLayout::new(format, layers, heads.len(), d, windows, CodeLayout::CpuTile).unwrap();
        // A rotation of its own for every head.
        let rotation = |i: usize| oscar_codec::Rotation::random(d, &[d], i as u64).unwrap();
        let all = (0..layers).flat_map(|layer| heads.clone().map(move |head| (layer, head)));
        let rotations = all.clone().map(|(layer, head)| {
            let i = layer * config.kv_heads + head;
            let mean = (0..d).map(|c| (c + i) as f32 * 1e-3).collect();
            oscar_codec::HeadRotations {
                key: rotation(2 * i),
                value: rotation(2 * i + 1),
                key_mean: Some(mean),
            }
        });
        let rotations = format
            .is_coded()
            .then(|| RotationSet::per_head(layers, heads.len(), d, rotations.collect()).unwrap());
        let layout = match format {
            KvFormat::OscarMixed { .. } => {
                let widths: Vec<_> = all
                    .map(|(layer, head)| WIDTHS[(layer * config.kv_heads + head) % WIDTHS.len()])
                    .collect();
                let table =
                    FormatTable::from_widths(layers, heads.len(), d, &widths, CodeLayout::CpuTile).unwrap();
                layout.with_coded_table(table)
            }
            _ => layout,
        };
        Self { layout, rotations }
    }

    fn whole(config: &DecoderConfig, format: KvFormat) -> Self {
        Self::of(config, format, 0..config.kv_heads)
    }
}

const MIXED: KvFormat = KvFormat::OscarMixed { mean: None };

fn cpu(threads: usize, mode: Mode) -> CpuBackend {
    CpuBackend::new(Kernels::chosen().unwrap(), threads, mode).unwrap()
}

fn threads(ranks: usize, mode: Mode) -> Ranks<CpuBackend> {
    if ranks == 1 {
        return cpu(1, mode).into();
    }
    let ranks = ThreadRank::all(ranks).into_iter().map(|rank| cpu(1, mode).with_communicator(rank));
    Ranks::try_from(ranks.collect::<Vec<_>>()).unwrap()
}

fn tokens(count: usize, vocab: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * i * 31 + i * 17 + 3) % vocab) as u32).collect()
}

/// Logits of all positions, read in chunks.
fn all_logits(runner: &mut Runner<CpuBackend>, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut sequence = Sequence::new();
    let (mut all, mut output) = (Vec::new(), StepOutput::default());
    for part in tokens.chunks(chunk) {
        let request = StepRequest { sequence: &mut sequence, tokens: part, logits: Logits::All };
        runner.step(&mut [request], &mut output).unwrap();
        all.extend_from_slice(&output.logits);
    }
    all
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn threads_give_the_bits_of_ranks_that_run_one_after_another() {
    bits_agree(&Model::four_heads(Family::Qwen3), &[KvFormat::Bf16, KvFormat::OSCAR2, MIXED]);
}

#[test]
fn experts_of_threads_give_the_bits_of_ranks_that_run_one_after_another() {
    // The second has a shared expert and a dense layer.
    for family in [Family::Qwen3Moe, Family::Glm4Moe] {
        bits_agree(&Model::four_heads(family), &[MIXED]);
    }
}

fn bits_agree(model: &Model, formats: &[KvFormat]) {
    let tokens = tokens(150, model.config.vocab_size);
    for &format in formats {
        let cache = Cache::whole(&model.config, format);
        for ranks in [2, 4] {
            let expected = one_after_another(model, format, ranks, &tokens, 64);
            let mut runner = model.runner(threads(ranks, Mode::Bf16), &cache, 64);
            for (run, chunk) in [64, 64, 150, 7].into_iter().enumerate() {
                let found = all_logits(&mut runner, &tokens, chunk);
                assert!(
                    bits(&found) == bits(&expected),
                    "{format}, {ranks} ranks, run {run}, chunks of {chunk}"
                );
            }
        }
    }
}

#[test]
fn another_cache_of_the_same_ranks_gives_the_same_bits() {
    let model = Model::four_heads(Family::Qwen2);
    let tokens = tokens(100, model.config.vocab_size);
    let cache = Cache::whole(&model.config, MIXED);
    let expected = all_logits(&mut model.runner(threads(2, Mode::Bf16), &cache, 64), &tokens, 64);
    let plain = model.runner(threads(2, Mode::Bf16), &Cache::whole(&model.config, KvFormat::Bf16), 64);
    let options = RunnerOptions {
        layout: cache.layout.clone(),
        rotations: cache.rotations.as_ref(),
        context: 1024,
        kv_memory: KvMemory::Bytes(BUDGET),
        prefill_chunk: 64,
    };
    let mut other = plain.with_cache(&model.weights, options).unwrap();
    assert_eq!((plain.ranks(), other.ranks()), (2, 2));
    assert!(bits(&all_logits(&mut other, &tokens, 64)) == bits(&expected));
}

/// Largest difference of two lists of logits, and how many rows have the same most likely token of
/// those in which it leads by more than twice that.
fn compare(one: &[f32], split: &[f32], vocab: usize) -> (f32, usize) {
    let difference = one.iter().zip(split).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let mut clear = 0;
    for (a, b) in one.chunks_exact(vocab).zip(split.chunks_exact(vocab)) {
        let best = argmax(a) as usize;
        let second = (0..vocab).filter(|&t| t != best).map(|t| a[t]).fold(f32::NEG_INFINITY, f32::max);
        if a[best] - second > 2.0 * difference {
            assert_eq!(argmax(b) as usize, best);
            clear += 1;
        }
    }
    (difference, clear)
}

#[test]
fn logits_are_those_of_one_rank_up_to_rounding() {
    let bias =
        DecoderConfig { output_bias: true, qkv_bias: true, mlp_bias: true, ..tiny_config(Family::Llama) };
    let bias = DecoderConfig { query_heads: 8, kv_heads: 4, intermediate_size: 99, ..bias };
    let models = [
        Model::four_heads(Family::Qwen3),
        Model::four_heads(Family::Qwen2),
        Model::four_heads(Family::Mistral),
        Model::tiny(bias),
        Model::four_heads(Family::Qwen3Moe),
        Model::four_heads(Family::Mixtral),
        Model::four_heads(Family::Glm4Moe),
    ];
    for model in &models {
        let (family, vocab) = (model.config.family, model.config.vocab_size);
        let tokens = tokens(120, vocab);
        // A sum in another order moves a key across a rounding boundary of BF16, or of a code, now
        // and then. With AMX kernels the differences are at most 4.1e-6, 1.3e-3 and 1.1e-3.
        for (mode, format, bound) in
            [(Mode::F32, KvFormat::F32, 2e-5), (Mode::Bf16, KvFormat::Bf16, 1e-2), (Mode::Bf16, MIXED, 2e-2)]
        {
            let cache = Cache::whole(&model.config, format);
            let one = all_logits(&mut model.runner(threads(1, mode), &cache, 64), &tokens, 64);
            for ranks in [2, 4] {
                let split = all_logits(&mut model.runner(threads(ranks, mode), &cache, 64), &tokens, 64);
                let (difference, clear) = compare(&one, &split, vocab);
                println!("{family:?} {format}, {ranks} ranks: {difference:.1e}, {clear} of {}", tokens.len());
                assert!(difference < bound, "{family:?} {format}, {ranks} ranks: {difference}");
                assert!(2 * clear > tokens.len(), "{family:?} {format}: {clear} rows have a clear favourite");
            }
        }
    }
}

#[test]
fn fp8_weights_are_split_as_they_expand() {
    let Model { config, weights, _folder } = Model::four_heads(Family::Llama);
    let model = Model { config, weights: weights.delivered_as(WeightFormat::Fp8), _folder };
    let cache = Cache::whole(&model.config, KvFormat::F32);
    let tokens = tokens(40, model.config.vocab_size);
    let one = all_logits(&mut model.runner(threads(1, Mode::F32), &cache, 64), &tokens, 64);
    let split = all_logits(&mut model.runner(threads(2, Mode::F32), &cache, 64), &tokens, 64);
    assert!(compare(&one, &split, model.config.vocab_size).0 < 2e-5);
}

/// Greedy tokens with a batch of two sequences, by picks; and the hidden state of the last step.
fn greedy(runner: &mut Runner<CpuBackend>, prompts: [&[u32]; 2], count: usize) -> (Vec<[u32; 2]>, Vec<f32>) {
    let mut sequences = [Sequence::new(), Sequence::new()];
    let mut out = StepOutput::default();
    let mut next: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.to_vec()).collect();
    let mut chosen = Vec::new();
    for _ in 0..count {
        let mut requests: Vec<StepRequest<'_>> = sequences
            .iter_mut()
            .zip(&next)
            .map(|(sequence, tokens)| StepRequest { sequence, tokens, logits: Logits::Pick(Pick::Top(3)) })
            .collect();
        runner.step(&mut requests, &mut out).unwrap();
        let best = [out.picked[0][0].1, out.picked[1][0].1];
        assert!(out.picked.iter().all(|list| list.len() == 3 && list[0].0 >= list[1].0));
        next = best.iter().map(|&token| vec![token]).collect();
        chosen.push(best);
    }
    let [sequence, _] = &mut sequences;
    let request = StepRequest { sequence, tokens: &next[0], logits: Logits::Hidden };
    runner.step(&mut [request], &mut out).unwrap();
    (chosen, out.hidden)
}

#[test]
fn two_ranks_continue_text_as_one_does_on_the_embedded_model() {
    let model = Model::embedded();
    let (long, short) = (tokens(300, model.config.vocab_size), tokens(9, 500));
    for format in [KvFormat::Bf16, KvFormat::Oscar { bits: 4 }] {
        let cache = Cache::whole(&model.config, format);
        let run =
            |ranks| greedy(&mut model.runner(threads(ranks, Mode::Bf16), &cache, 512), [&long, &short], 12);
        let ((one, hidden), (two, split)) = (run(1), run(2));
        assert_eq!(one, two, "{format}");
        let size = hidden.iter().map(|v| v.abs()).fold(0.0, f32::max);
        let difference = hidden.iter().zip(&split).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference < 0.02 * size, "{format}: hidden states of up to {size} differ by {difference}");
    }
}

/// A rank that panics once, at its third meeting.
struct Panics {
    inner: ThreadRank,
    left: AtomicUsize,
    armed: Arc<AtomicBool>,
}

impl Communicator for Panics {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 && self.armed.swap(false, Ordering::Relaxed) {
            panic!("a test broke rank {}", self.rank());
        }
        self.inner.all_reduce(values)
    }

    fn all_gather(&self, part: &[f32], visit: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        self.inner.all_gather(part, visit)
    }

    fn abandon(&self, why: &str) {
        self.inner.abandon(why);
    }

    fn restart(&self) {
        self.left.store(3, Ordering::Relaxed);
        self.inner.restart();
    }
}

#[test]
fn a_rank_that_panics_fails_the_step_and_the_next_one_works() {
    let model = Model::four_heads(Family::Qwen3);
    let cache = Cache::whole(&model.config, MIXED);
    let tokens = tokens(100, model.config.vocab_size);
    let expected = all_logits(&mut model.runner(threads(4, Mode::Bf16), &cache, 64), &tokens, 64);
    for broken in [0, 2, 3] {
        let armed = Arc::new(AtomicBool::new(true));
        let ranks = ThreadRank::all(4).into_iter().map(|inner| {
            let armed = if inner.rank() == broken { armed.clone() } else { Arc::default() };
            cpu(1, Mode::Bf16).with_communicator(Panics { inner, left: AtomicUsize::new(3), armed })
        });
        let ranks = Ranks::try_from(ranks.collect::<Vec<_>>()).unwrap();
        let mut runner = model.runner(ranks, &cache, 64);
        let mut sequence = Sequence::new();
        let mut out = StepOutput::default();
        let mut step = |sequence: &mut Sequence| {
            let request = StepRequest { sequence, tokens: &tokens[..64], logits: Logits::All };
            runner.step(&mut [request], &mut out)
        };
        let error = step(&mut sequence).unwrap_err().to_string();
        assert!(error.contains(&format!("rank {broken} of the model panicked")), "{error}");
        assert!(error.contains(&format!("a test broke rank {broken}")), "{error}");
        assert_eq!(sequence.len(), 0, "the step did not happen");
        step(&mut sequence).unwrap();
        assert!(bits(&all_logits(&mut runner, &tokens, 64)) == bits(&expected), "after rank {broken} broke");
    }
}

#[test]
fn what_several_ranks_cannot_do_is_refused_by_name() {
    let model = Model::four_heads(Family::Llama);
    let cache = Cache::whole(&model.config, KvFormat::OSCAR2);
    let options = || RunnerOptions {
        layout: cache.layout.clone(),
        rotations: cache.rotations.as_ref(),
        context: 256,
        kv_memory: KvMemory::Bytes(BUDGET),
        prefill_chunk: 64,
    };
    let load = |ranks: Ranks<CpuBackend>, model: &Model| {
        Runner::<CpuBackend>::load(ranks, &model.config, &model.weights, options(), |_| {}).map(|_| ())
    };
    let error = load(threads(3, Mode::Bf16), &model).unwrap_err().to_string();
    assert!(error.contains("4 KV heads do not divide by 3; 1, 2, 4 works"), "{error}");
    let error = load(threads(2, Mode::Bf16), &Model::tiny(tiny_config(Family::MiniMaxM2))).unwrap_err();
    assert!(error.to_string().contains("minimax_m2 is not split yet"), "{error}");
    // One rank without its others would wait for ever.
    let alone = cpu(1, Mode::Bf16).with_communicator(ThreadRank::all(2).remove(0));
    let error = load(alone.into(), &model).unwrap_err().to_string();
    assert!(error.contains("1 of them were given"), "{error}");

    let mut runner = model.runner(threads(2, Mode::Bf16), &cache, 64);
    let block = BlockId::Full(FullPageId(0));
    let error = runner.read_blocks(&mut [(block, &mut Vec::new())]).unwrap_err().to_string();
    assert!(error.contains("the page store does not work on several ranks"), "{error}");
    assert!(runner.write_blocks(&[(block, &[])]).unwrap_err().to_string().contains("page store"));
    let error = runner.derive(&Sequence::new(), 0, Vec::new()).unwrap_err().to_string();
    assert!(error.contains("eviction of rows does not work on several ranks"), "{error}");
    assert!(
        !runner.backend().copies_blocks()
            && matches!(runner.backend().evicts_rows(runner.layout()), RowEviction::Never(_))
    );
}
