//! Experts on the CPU beside a GPU: one layer bit for bit, then a small random model against the CPU.

use crate::model::{self, NARROW};
use crate::{Extent, Numbers, Report, download, upload, without_cache};
use anyhow::{Context, Result};
use oscar_backend::{
    Backend, ExpertFormat, ExpertId, ExpertsShape, Gate, HostMatrix, HostValues, RouterRule, RouterScores,
    Step,
};
use oscar_codec::{CodeLayout, KvFormat, RotationSet};
use oscar_hybrid::HybridBackend;
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_kernels_cuda::CudaBackend;
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, MoeConfig, Weights};
use oscar_runner::{KvMemory, Runner, RunnerOptions};

const CONTEXT: usize = 1024;

fn cpu() -> Result<CpuBackend> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(CpuBackend::new(Kernels::chosen()?, threads, Mode::Bf16)?)
}

/// GPU 0 with all experts on the CPU.
fn hybrid() -> Result<HybridBackend<CudaBackend>> {
    let hybrid = HybridBackend::with_host(crate::open()?, cpu()?);
    hybrid.place(usize::MAX);
    Ok(hybrid)
}

pub fn check(extent: Extent, report: &mut Report) -> Result<()> {
    let rows: &[usize] = if extent.small { &[1, 40] } else { &[1, 3, 16, 40, 3000] };
    for &rows in rows {
        one_layer(rows, report).with_context(|| format!("{rows} rows"))?;
    }
    models_on(cpu, hybrid, extent, report)
}

/// Random models on any two backends.
pub fn models_on<C: Backend, B: Backend>(
    cpu: impl Fn() -> Result<C>,
    beside: impl Fn() -> Result<B>,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    for family in [Family::Qwen3Moe, Family::Glm4Moe] {
        for format in ["bf16", "oscar2"] {
            let what = || format!("{}, {format}", family.architecture());
            model((cpu()?, beside()?), family, format.parse()?, extent, report).with_context(what)?;
        }
    }
    Ok(())
}

/// Rows go to the host, through the CPU's experts and back: all bits are the CPU's.
fn one_layer(rows: usize, report: &mut Report) -> Result<()> {
    const HIDDEN: usize = 256;
    const WIDTH: usize = 64;
    const EXPERTS: usize = 8;
    let mut numbers = Numbers::new(4);
    let router = numbers.vector(EXPERTS * HIDDEN);
    let rule =
        RouterRule { chosen: 2, scores: RouterScores::Softmax, normalize: true, factor: 1.0, groups: None };
    let shape = ExpertsShape {
        following: 0,
        experts: EXPERTS,
        hidden: HIDDEN,
        width: WIDTH,
        shared_width: 0,
        format: ExpertFormat::Bf16,
        rule,
        gate: Gate::Silu,
        router: &router,
        correction: None,
        router_bias: None,
        shared_gate: None,
    };
    let (hybrid, cpu) = (hybrid()?, cpu()?);
    let (mut beside, mut alone) = (hybrid.experts(&shape)?, cpu.experts(&shape)?);
    for expert in 0..EXPERTS {
        let sizes = [[WIDTH, HIDDEN], [WIDTH, HIDDEN], [HIDDEN, WIDTH]];
        let values = sizes.map(|[outputs, inputs]| numbers.vector(outputs * inputs));
        let part = |i: usize| {
            let [outputs, inputs] = sizes[i];
            HostMatrix { outputs, inputs, values: HostValues::F32(&values[i]), bias: None }
        };
        let parts = [part(0), part(1), part(2)];
        hybrid.load_expert(&mut beside, ExpertId::Routed(expert), parts)?;
        cpu.load_expert(&mut alone, ExpertId::Routed(expert), parts)?;
    }
    let (norm, mut expected) = (numbers.vector(HIDDEN), numbers.vector(rows * HIDDEN));
    let (mut x, on_device) = (upload(&hybrid, &expected, HIDDEN)?, hybrid.vector(&norm)?);
    for round in 0..3 {
        without_cache(&hybrid, |step| Ok(step.experts(&beside, (&on_device, 1e-6), &mut x)?))?;
        cpu.add_experts(&alone, (&norm, 1e-6), &mut expected)?;
        let found = download(&hybrid, &x, rows)?;
        let different = found.iter().zip(&expected).filter(|(f, e)| f.to_bits() != e.to_bits()).count();
        let different = different + found.len().abs_diff(expected.len());
        report.case("experts on the CPU", different as f64, 0.0, || format!("{rows} rows, round {round}"));
    }
    Ok(())
}

/// A random model of this family on both devices. All experts of a row are chosen, so that rounding
/// cannot choose another one.
fn model<C: Backend, B: Backend>(
    (cpu, beside): (C, B),
    family: Family,
    format: KvFormat,
    extent: Extent,
    report: &mut Report,
) -> Result<()> {
    let tiny = tiny_config(family);
    let moe = tiny.moe.clone().context("a family with experts")?;
    let rule = RouterRule { chosen: moe.experts, ..moe.rule };
    let config = DecoderConfig {
        layers: 3,
        hidden_size: 128,
        intermediate_size: 128,
        head_dim: 64,
        rotary_dim: tiny.rotary_dim.map(|_| 32),
        moe: Some(MoeConfig { rule, ..moe }),
        ..tiny
    };
    let dir = tempfile::tempdir()?;
    write_random_model(dir.path(), &config, WriteOptions::default(), 11)?;
    let source = ModelSource::Dir(dir.path().to_owned());
    let (config, weights) = (DecoderConfig::load(&source)?, Weights::open(&source)?);
    let mut on_cpu = runner(cpu, &config, &weights, format)?;
    let mut beside = runner(beside, &config, &weights, format)?;
    let (generated, steps) = if extent.small { (2, 3) } else { (40, 40) };
    let text: Vec<u32> = (0..300).map(|i: u32| i * 89 % 127 + 1).collect();
    for length in [1, 14, 200] {
        let name = format!("{} with experts on the CPU,", config.family.architecture());
        model::compare(&mut on_cpu, &mut beside, &text[..length], generated, format, &name, report)?;
    }
    model::interleaved(&mut beside, &text, steps, format, report)
}

fn runner<B: Backend>(
    backend: B,
    config: &DecoderConfig,
    weights: &Weights,
    format: KvFormat,
) -> Result<Runner<B>> {
    let (sink, recent) = NARROW;
    let windows = format.windows(Some(sink), Some(recent))?;
    let hadamard = RotationSet::hadamard(config.layers, config.kv_heads, config.head_dim)?;
    let options = RunnerOptions {
        layout: config.cache_layout(format, windows, CodeLayout::Logical)?,
        rotations: format.is_coded().then_some(&hadamard),
        context: CONTEXT,
        kv_memory: KvMemory::Sequences { count: 3, tokens: CONTEXT },
        prefill_chunk: 64,
    };
    Ok(Runner::load(backend, config, weights, options, |_| {})?)
}
