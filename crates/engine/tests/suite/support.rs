//! Runners on the embedded model and on tiny random ones.

use oscar_backend::argmax;
use oscar_codec::{CodeLayout, KvFormat, Windows};
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, SlidingLayers, Weights};
use oscar_runner::{KvMemory, Logits, Runner, RunnerOptions, Sequence, StepOutput, StepRequest};

#[derive(Clone)]
pub struct Setup {
    pub format: KvFormat,
    pub windows: Windows,
    pub threads: usize,
    pub precision: Mode,
    pub chunk: usize,
    pub context: usize,
    pub kv_memory: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            format: KvFormat::Bf16,
            windows: Windows::default(),
            threads: 2,
            precision: Mode::Bf16,
            chunk: 512,
            context: 8192,
            kv_memory: 1 << 30,
        }
    }
}

impl Setup {
    pub fn embedded(&self) -> Runner<CpuBackend> {
        self.runner(&ModelSource::Embedded(oscar_embedded::FILES))
    }

    pub fn runner(&self, source: &ModelSource) -> Runner<CpuBackend> {
        let config = DecoderConfig::load(source).unwrap();
        let weights = Weights::open(source).unwrap();
        let (l, h, d) = (config.cache_layers(), config.kv_heads, config.head_dim);
        let layout = config.cache_layout(self.format, self.windows, CodeLayout::CpuTile).unwrap();
        let rotations = self.format.rotation().data_free(l, h, d).unwrap();
        let backend = CpuBackend::new(Kernels::chosen().unwrap(), self.threads, self.precision).unwrap();
        let options = RunnerOptions {
            layout,
            rotations: rotations.as_ref(),
            context: self.context,
            kv_memory: KvMemory::Bytes(self.kv_memory),
            prefill_chunk: self.chunk,
        };
        Runner::load(backend, &config, &weights, options, |_| {}).unwrap()
    }
}

/// A random model with the embedded one's vocabulary, whose first layer of two slides.
pub fn sliding_model(family: Family, window: usize) -> (tempfile::TempDir, ModelSource) {
    let tiny = tiny_config(family);
    let sliding = tiny.sliding.clone().map(|sliding| SlidingLayers { window, ..sliding });
    random_model(DecoderConfig { sliding, ..tiny })
}

/// A random model with the embedded one's vocabulary.
pub fn tiny_model(family: Family) -> (tempfile::TempDir, ModelSource) {
    random_model(tiny_config(family))
}

fn random_model(tiny: DecoderConfig) -> (tempfile::TempDir, ModelSource) {
    let folder = tempfile::tempdir().unwrap();
    let config = DecoderConfig { vocab_size: 6144, max_position_embeddings: 2048, ..tiny };
    write_random_model(folder.path(), &config, WriteOptions::default(), 5).unwrap();
    let source = ModelSource::Dir(folder.path().to_owned());
    (folder, source)
}

/// Feeds `tokens` and returns the logits of every position.
pub fn all_logits(runner: &mut Runner<CpuBackend>, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut sequence = Sequence::new();
    let (mut all, mut output) = (Vec::new(), StepOutput::default());
    for part in tokens.chunks(chunk) {
        let request = StepRequest { sequence: &mut sequence, tokens: part, logits: Logits::All };
        runner.step(&mut [request], &mut output).unwrap();
        all.extend_from_slice(&output.logits);
    }
    all
}

/// The bits of values, so that a comparison tells zeros and NaNs apart.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Whether a continuation of the stored pages of `prompt`, from token 64 on, gives the logits of a cold
/// run to the bit.
pub fn fork_equals_a_cold_run(runner: &mut Runner<CpuBackend>, prompt: &[u32]) -> bool {
    let cold = all_logits(runner, prompt, prompt.len());
    let (mut sequence, mut output) = (Sequence::forkable(runner), StepOutput::default());
    runner.prefill(&mut sequence, prompt, &mut output, |_| {}).unwrap();
    let mut warm = runner.fork(&sequence, 64).unwrap();
    let request = StepRequest { sequence: &mut warm, tokens: &prompt[64..], logits: Logits::All };
    runner.step(&mut [request], &mut output).unwrap();
    bits(&output.logits) == bits(&cold[64 * runner.config().vocab_size..])
}

/// Greedy continuation of a prompt, ended by `stops` (which are kept) or after `limit` tokens.
pub fn greedy(runner: &mut Runner<CpuBackend>, prompt: &[u32], limit: usize, stops: &[u32]) -> Vec<u32> {
    let mut sequence = Sequence::new();
    let (mut output, mut out) = (StepOutput::default(), Vec::new());
    runner.prefill(&mut sequence, prompt, &mut output, |_| {}).unwrap();
    loop {
        let token = argmax(&output.logits);
        out.push(token);
        if out.len() == limit || stops.contains(&token) {
            return out;
        }
        let request = StepRequest { sequence: &mut sequence, tokens: &[token], logits: Logits::Last };
        runner.step(&mut [request], &mut output).unwrap();
    }
}

/// Log-probability of `token` under a row of logits.
pub fn log_probability(row: &[f32], token: u32) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = row.iter().map(|&l| (l as f64 - max).exp()).sum();
    row[token as usize] as f64 - max - sum.ln()
}
