//! A small runner with the embedded model.

use oscar_codec::{CacheLayout, CodeLayout, KvFormat, Windows};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::{DecoderConfig, ModelSource, Weights};
use oscar_runner::{KvMemory, Runner, RunnerOptions, Sequence, StepOutput};

pub fn runner(chunk: usize) -> Runner<CpuBackend> {
    let source = ModelSource::Embedded(oscar_embedded::FILES);
    let config = DecoderConfig::load(&source).unwrap();
    let weights = Weights::open(&source).unwrap();
    let (l, h, d) = (config.layers, config.kv_heads, config.head_dim);
    let format = KvFormat::OSCAR2;
    let layout = CacheLayout::new(format, l, h, d, Windows::default(), CodeLayout::CpuTile).unwrap();
    let rotations = format.rotation().data_free(l, h, d).unwrap();
    let backend = CpuBackend::new(Kernels::chosen().unwrap(), 2, Mode::Bf16).unwrap();
    let options = RunnerOptions {
        layout,
        rotations: rotations.as_ref(),
        context: 4096,
        kv_memory: KvMemory::Bytes(1 << 30),
        prefill_chunk: chunk,
    };
    Runner::load(backend, &config, &weights, options, |_| {}).unwrap()
}

pub fn base(runner: &mut Runner<CpuBackend>, tokens: &[u32]) -> Sequence {
    let mut sequence = Sequence::forkable(runner);
    runner.prefill(&mut sequence, tokens, &mut StepOutput::default(), |_| {}).unwrap();
    sequence
}
