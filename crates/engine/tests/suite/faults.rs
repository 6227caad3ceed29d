//! A device that fails: the requests of the failed step hear of it. The engine goes on, unless the
//! device is lost or the step never ends; then its health says so.

use crate::client::submit;
use crate::support::{Setup, greedy};
use oscar_backend::{
    AttentionKernels, Backend, BackendError, Candidate, DeltaStep, ExpertId, ExpertsShape, Feature,
    HeadShape, HostMatrix, LayerHeads, Pick, PrefillWave, Product, Result, SequenceRows, Step, StepMemory,
    StepSize, Tap,
};
use oscar_codec::{CacheLayout, CodeLayout, HeadRotations, KvFormat, RotationSet, Windows};
use oscar_engine::{
    Constraint, ConstraintState, Engine, EngineApi, EngineHandle, EngineOptions, Event, GenerationParams,
    Health, RequestError, SharedConstraint,
};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, CpuStep, Mode};
use oscar_models::{DecoderConfig, ModelSource, Transformer, Weights};
use oscar_runner::{KvMemory, Runner, RunnerOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const HEALTHY: usize = 0;
const REFUSES: usize = 1;
const PANICS: usize = 2;
const IS_LOST: usize = 3;
const HANGS: usize = 4;

/// The CPU, whose attention fails in layer 3 when told to.
struct Faulty {
    cpu: CpuBackend,
    fault: Arc<AtomicUsize>,
}

impl Backend for Faulty {
    type Rows = <CpuBackend as Backend>::Rows;
    type Matrix = <CpuBackend as Backend>::Matrix;
    type Vector = <CpuBackend as Backend>::Vector;
    type Rope = <CpuBackend as Backend>::Rope;
    type LayerRotation = <CpuBackend as Backend>::LayerRotation;
    type Experts = <CpuBackend as Backend>::Experts;
    type Pool = <CpuBackend as Backend>::Pool;
    type Step<'s> = FaultyStep<'s>;

    fn describe(&self) -> String {
        self.cpu.describe()
    }
    fn attention(&self, layout: &CacheLayout) -> AttentionKernels {
        self.cpu.attention(layout)
    }
    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout {
        self.cpu.held_layout(layout)
    }
    fn reads_codes_in_window(&self, layout: &CacheLayout) -> bool {
        self.cpu.reads_codes_in_window(layout)
    }
    fn multiplies_fp8(&self) -> bool {
        self.cpu.multiplies_fp8()
    }
    fn computes(&self, _: Feature) -> bool {
        false
    }
    fn prefill_chunk(&self, heads: &HeadShape) -> usize {
        self.cpu.prefill_chunk(heads)
    }
    fn prefill_wave(&self, heads: &HeadShape) -> PrefillWave {
        self.cpu.prefill_wave(heads)
    }
    fn wait(&self) -> Result<()> {
        self.cpu.wait()
    }
    fn step_memory(&self, size: &StepSize) -> StepMemory {
        self.cpu.step_memory(size)
    }
    fn free_memory(&self) -> Result<Option<usize>> {
        self.cpu.free_memory()
    }
    fn matrix(&self, weights: HostMatrix<'_>) -> Result<Self::Matrix> {
        self.cpu.matrix(weights)
    }
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize {
        self.cpu.matrix_bytes(matrix)
    }
    fn vector(&self, values: &[f32]) -> Result<Self::Vector> {
        self.cpu.vector(values)
    }
    fn rope(&self, cos: &[f32], sin: &[f32], head_dim: usize) -> Result<Self::Rope> {
        self.cpu.rope(cos, sin, head_dim)
    }
    fn experts(&self, shape: &ExpertsShape<'_>) -> Result<Self::Experts> {
        self.cpu.experts(shape)
    }
    fn load_expert(
        &self,
        experts: &mut Self::Experts,
        id: ExpertId,
        parts: [HostMatrix<'_>; 3],
    ) -> Result<()> {
        self.cpu.load_expert(experts, id, parts)
    }
    fn expert_bytes(&self, experts: &Self::Experts) -> (usize, usize) {
        self.cpu.expert_bytes(experts)
    }
    fn layer_rotation(&self, heads: &[HeadRotations]) -> Result<Self::LayerRotation> {
        self.cpu.layer_rotation(heads)
    }
    fn rows(&self, width: usize) -> Self::Rows {
        self.cpu.rows(width)
    }
    fn pool(&self, layout: &CacheLayout, heads: &HeadShape, budget: usize) -> Result<Self::Pool> {
        self.cpu.pool(layout, heads, budget)
    }
    fn step<'s>(
        &'s self,
        sequences: &'s [SequenceRows<'s>],
        pool: &'s mut Self::Pool,
    ) -> Result<FaultyStep<'s>> {
        Ok(FaultyStep { cpu: self.cpu.step(sequences, pool)?, fault: &self.fault })
    }
}

struct FaultyStep<'s> {
    cpu: CpuStep<'s>,
    fault: &'s AtomicUsize,
}

type Rows = <CpuBackend as Backend>::Rows;
type Matrix = <CpuBackend as Backend>::Matrix;

impl DeltaStep<Faulty> for FaultyStep<'_> {}

impl Step<Faulty> for FaultyStep<'_> {
    fn embed(&mut self, table: &Matrix, tokens: &[u32], scale: f32, out: &mut Rows) -> Result<()> {
        self.cpu.embed(table, tokens, scale, out)
    }
    fn select(&mut self, x: &Rows, rows: &[usize], out: &mut Rows) -> Result<()> {
        self.cpu.select(x, rows, out)
    }
    fn product(&mut self, product: Product<'_, Faulty>, x: &Rows, out: &mut Rows) -> Result<()> {
        let Product { weight, norm, output, result_norm } = product;
        self.cpu.product(Product { weight, norm, output, result_norm }, x, out)
    }
    fn experts(
        &mut self,
        experts: &<CpuBackend as Backend>::Experts,
        norm: (&Vec<f32>, f32),
        x: &mut Rows,
    ) -> Result<()> {
        self.cpu.experts(experts, norm, x)
    }
    fn attend(
        &mut self,
        heads: LayerHeads<'_, Faulty>,
        qkv: &mut Rows,
        out: &mut Rows,
        tap: Option<&mut dyn Tap>,
    ) -> Result<()> {
        let LayerHeads { layer, qk_norm, rope, rotation, window, sinks } = heads;
        match self.fault.load(Ordering::SeqCst) {
            REFUSES if layer == 3 => {
                Err(BackendError::Unsupported { device: "faulty".into(), why: "told to".into() })
            }
            PANICS if layer == 3 => panic!("expected by the test"),
            IS_LOST => Err(BackendError::Device { device: "faulty".into(), why: "fell off the bus".into() }),
            HANGS => {
                while self.fault.load(Ordering::SeqCst) == HANGS {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(BackendError::Unsupported { device: "faulty".into(), why: "it hung".into() })
            }
            _ => {
                let heads = LayerHeads { layer, qk_norm, rope, rotation, window, sinks };
                self.cpu.attend(heads, qkv, out, tap)
            }
        }
    }
    fn read(&mut self, x: &Rows, rows: &[usize], out: &mut Vec<f32>) -> Result<()> {
        self.cpu.read(x, rows, out)
    }
    fn pick(&mut self, logits: &Rows, rows: &[(usize, Pick)], out: &mut Vec<Vec<Candidate>>) -> Result<()> {
        self.cpu.pick(logits, rows, out)
    }
    fn finish(self) -> Result<()> {
        self.cpu.finish()
    }
}

fn windows() -> Windows {
    Windows::new(32, 80).unwrap()
}

/// An engine on a device that fails as `fault` says.
fn engine(fault: &Arc<AtomicUsize>, options: EngineOptions) -> EngineHandle {
    let source = ModelSource::Embedded(oscar_embedded::FILES);
    let (config, weights) = (DecoderConfig::load(&source).unwrap(), Weights::open(&source).unwrap());
    let (l, h, d) = (config.layers, config.kv_heads, config.head_dim);
    let rotations = RotationSet::hadamard(l, h, d).unwrap();
    let runner_options = RunnerOptions {
        layout: CacheLayout::new(KvFormat::OSCAR2, l, h, d, windows(), CodeLayout::CpuTile).unwrap(),
        rotations: Some(&rotations),
        context: 1024,
        kv_memory: KvMemory::Bytes(1 << 26),
        prefill_chunk: 100,
    };
    let cpu = CpuBackend::new(Kernels::chosen().unwrap(), 2, Mode::Bf16).unwrap();
    let backend = Faulty { cpu, fault: fault.clone() };
    let runner = Runner::load(backend, &config, &weights, runner_options, |_| {}).unwrap();
    Engine::start(runner, options).unwrap()
}

fn wait_for(mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_lost_device_ends_the_engine() {
    let fault = Arc::new(AtomicUsize::new(HEALTHY));
    let engine = engine(&fault, EngineOptions::new("test"));
    let params = GenerationParams { max_tokens: 500, ..GenerationParams::default() };
    let first = submit(&engine, &[5, 6, 7], params.clone()).unwrap();
    assert!(matches!(first.events.recv().unwrap(), Event::Started { .. }));
    assert_eq!(engine.health(), Health::Alive);
    fault.store(IS_LOST, Ordering::SeqCst);
    let Some(Event::Failed(RequestError::Engine(message))) = first.events.iter().last() else {
        panic!("the request must fail");
    };
    assert!(message.contains("fell off the bus"), "{message}");
    wait_for(|| matches!(engine.health(), Health::Dead { reason } if reason.contains("fell off the bus")));
    // The device is well again, but its contents are lost.
    fault.store(HEALTHY, Ordering::SeqCst);
    assert!(submit(&engine, &[5, 6, 7], params).is_err());
    assert_eq!(engine.flush_cache(), 0);
    engine.shutdown();
}

/// A constraint that breaks the engine's thread.
struct Bomb;

impl Constraint for Bomb {
    fn parameter(&self) -> &str {
        "bomb"
    }

    fn start(&self) -> Box<dyn ConstraintState> {
        panic!("expected by the test")
    }
}

#[test]
fn a_thread_that_dies_is_noticed_and_its_requests_hear_of_it() {
    let engine = engine(&Arc::new(AtomicUsize::new(HEALTHY)), EngineOptions::new("test"));
    let params = GenerationParams { max_tokens: 900, ..GenerationParams::default() };
    let other = submit(&engine, &[5, 6, 7], params.clone()).unwrap();
    let constraint = Some(SharedConstraint(Arc::new(Bomb)));
    let call = submit(&engine, &[8, 9], GenerationParams { constraint, ..params }).unwrap();
    wait_for(|| matches!(engine.health(), Health::Dead { .. }));
    assert!(matches!(engine.health(), Health::Dead { reason } if reason.contains("expected")));
    assert!(other.events.iter().any(|event| matches!(event, Event::Failed(_))), "no silence");
    drop(call);
    engine.shutdown();
}

#[test]
fn a_step_that_does_not_end_is_stuck_and_one_that_ends_is_not() {
    let fault = Arc::new(AtomicUsize::new(HEALTHY));
    let stuck_after = Some(Duration::from_millis(1));
    let engine = engine(&fault, EngineOptions { stuck_after, ..EngineOptions::new("test") });
    assert_eq!(engine.health(), Health::Alive);
    fault.store(HANGS, Ordering::SeqCst);
    let call = submit(&engine, &[5, 6, 7], GenerationParams::default()).unwrap();
    wait_for(|| matches!(engine.health(), Health::Stuck { .. }));
    assert_eq!(engine.stats().failed, 0, "numbers are read without waiting for the engine");
    fault.store(HEALTHY, Ordering::SeqCst);
    assert!(call.finish(&engine, None).failed.is_some());
    wait_for(|| engine.health() == Health::Alive);
    engine.shutdown();
    assert_eq!(engine.health(), Health::Alive, "an engine that was told to end has not failed");
}

#[test]
fn a_failed_step_fails_its_requests_and_nothing_else() {
    let fault = Arc::new(AtomicUsize::new(HEALTHY));
    let engine = engine(&fault, EngineOptions::new("test"));
    let windows = windows();

    let prompt: Vec<u32> = (0..230).map(|i| i * 23 % 6000 + 3).collect();
    let params = GenerationParams { max_tokens: 10, ..GenerationParams::default() };
    let mut reference =
        Setup { format: KvFormat::OSCAR2, windows, context: 1024, ..Setup::default() }.embedded();
    let expected = greedy(&mut reference, &prompt, 10, &[]);
    let mut failures = 0;
    for state in [HEALTHY, REFUSES, PANICS, REFUSES, HEALTHY] {
        fault.store(state, Ordering::SeqCst);
        // Half of them find a prefix in the cache; failed ones must not spoil it.
        for first in [7, prompt[0]] {
            let mut prompt = prompt.clone();
            prompt[0] = first;
            let outcome = submit(&engine, &prompt, params.clone()).unwrap().finish(&engine, None);
            match (state, outcome.failed) {
                (HEALTHY, failed) => {
                    assert_eq!(failed, None);
                    if first != 7 {
                        assert_eq!(outcome.answers[&0].tokens, expected);
                    }
                }
                (REFUSES, Some(RequestError::Engine(message))) => assert!(message.contains("told to")),
                (PANICS, Some(RequestError::Engine(message))) => assert!(message.contains("expected")),
                (_, failed) => panic!("{failed:?}"),
            }
            failures += u64::from(state != HEALTHY);
            let stats = engine.stats();
            assert_eq!((stats.failed, stats.running, stats.waiting), (failures, 0, 0));
            assert_eq!(stats.full_pages, stats.cached_full_pages, "failed requests hold nothing");
        }
    }
    assert_eq!(engine.health(), Health::Alive);
    engine.flush_cache();
    assert_eq!(engine.stats().full_pages + engine.stats().coded_pages, 0);
    engine.shutdown();
}

/// As on a GPU: a family that needs what the device lacks is refused by name.
#[test]
fn a_model_that_the_device_cannot_compute_is_refused_before_it_is_loaded() {
    for (name, says) in [
        ("gemma3_text", "Gemma3ForCausalLM has sliding windows, norms behind attention"),
        ("gpt_oss_mxfp4", "GptOssForCausalLM has sliding windows, attention sinks, gates other than silu"),
    ] {
        let source = crate::families::fixture(name).source;
        let (config, weights) = (DecoderConfig::load(&source).unwrap(), Weights::open(&source).unwrap());
        let cpu = CpuBackend::new(Kernels::chosen().unwrap(), 1, Mode::Bf16).unwrap();
        let backend = Faulty { cpu, fault: Arc::default() };
        let refusal = Transformer::build(&backend, &config, &weights, None, 64, |_| panic!("loads"));
        let message = refusal.err().unwrap().to_string();
        assert!(message.contains(says) && message.contains("--device cpu"), "{message}");
    }
}
