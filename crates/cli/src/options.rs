//! Flags that mean the same in every command, and what they resolve to.

use crate::cache::Cache;
use crate::cpu_experts::CpuExperts;
use crate::device::AnyBackend;
use crate::hub;
use anyhow::{Context, Result, bail};
use oscar_backend::{Backend, WeightFormat};
use oscar_codec::{KvFormat, Windows};
use oscar_engine::SamplingParams;
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::{DecoderConfig, GenerationConfig, Holding, ModelName, ModelSource, Weights};
use oscar_runner::KvMemory;
use oscar_text::ModelText;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// The formats that the user names, or those of `default` that are offered for the model.
pub fn formats(config: &DecoderConfig, asked: &[KvFormat], default: &[&str]) -> Result<Vec<KvFormat>> {
    if !asked.is_empty() {
        return Ok(asked.to_vec());
    }
    let default = default.iter().map(|name| name.parse()).collect::<Result<Vec<KvFormat>, _>>()?;
    Ok(default.into_iter().filter(|&format| config.check_format(format).is_ok()).collect())
}

/// Which model, on which device.
#[derive(clap::Args, Clone, Serialize)]
pub struct ModelArgs {
    /// Model: a directory, or a name on the Hugging Face hub (org/name[@revision]), downloaded if
    /// the local cache lacks it; the embedded model if absent
    #[arg(long, value_name = "DIR|NAME")]
    pub model: Option<String>,
    /// Do not download anything; HF_HUB_OFFLINE=1 does the same
    #[arg(long)]
    pub offline: bool,
    /// Device; auto takes a GPU if there is one
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// Number of threads; all cores if absent
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Precision of weights and activations in matrix products
    #[arg(long, value_enum, default_value = "bf16")]
    pub precision: PrecisionArg,
    /// Weights of the layers: bf16 expands an FP8 checkpoint, fp8 quantizes others while loading;
    /// as in the checkpoint if absent
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub weights: Option<WeightsArg>,
    /// Activations of prompts that multiply FP8 weights on a GPU; fp8 is faster and less exact
    #[arg(long, value_enum, default_value = "bf16")]
    pub activations: WeightsArg,
    /// Use the GPU as if it had only this much memory, e.g. 32G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(serialize_with = "serialize_optional_size")]
    pub gpu_memory_limit: Option<usize>,
    /// Compute the experts of N layers on the CPU, from host memory: the last layers that have experts,
    /// or all. auto leaves as many on the GPU as fit beside the other weights and the KV pages
    #[arg(long, value_name = "auto|N|all")]
    #[serde(serialize_with = "serialize_optional_display")]
    pub cpu_experts: Option<CpuExperts>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    Auto,
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrecisionArg {
    /// BF16 weights, activations with 16 bits of mantissa
    Bf16,
    /// BF16 weights and activations: faster prefill, less exact
    Fast,
    /// Everything in F32, for verification
    F32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsArg {
    /// BF16
    Bf16,
    /// E4M3; a scale for every 128 × 128 weights, or for 128 activations of a token
    Fp8,
}

impl WeightsArg {
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }

    pub fn format(self) -> WeightFormat {
        match self {
            Self::Bf16 => WeightFormat::Bf16,
            Self::Fp8 => WeightFormat::Fp8,
        }
    }
}

/// How the cache is stored.
#[derive(clap::Args, Clone, Serialize)]
pub struct CacheArgs {
    /// Rotations of the cache: a file made by `oscar calibrate`, or `hadamard`; the model's own
    /// file if absent
    #[arg(long, value_name = "FILE|hadamard")]
    pub rotations: Option<String>,
    #[arg(long, value_name = "N", help = window_help("Tokens at the beginning kept in BF16 (a multiple of 16)", Windows::default().sink()))]
    pub sink: Option<usize>,
    #[arg(long, value_name = "N", help = window_help("Most recent tokens kept in BF16", Windows::default().recent()))]
    pub recent: Option<usize>,
    /// Prompt tokens processed in one step, the first one up to a third longer; if absent 512 on a
    /// CPU, about 8192 on a GPU (4096 below 64 GiB)
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub prefill_chunk: Option<usize>,
    /// Memory for KV pages, e.g. 512M or 8G; by default as much as the context needs (`serve`: a
    /// share of what is free; `bench serve`: 4 BF16 requests)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(serialize_with = "serialize_optional_size")]
    pub kv_memory: Option<usize>,
}

impl CacheArgs {
    /// Prompt tokens of a step of this model on this device.
    pub fn prefill_chunk(&self, backend: &AnyBackend, config: &DecoderConfig) -> usize {
        self.prefill_chunk.unwrap_or_else(|| backend.prefill_chunk(&config.heads()))
    }

    /// The user's budget, or room for `sequences` sequences of `tokens` tokens.
    pub fn kv_memory(&self, sequences: usize, tokens: usize) -> KvMemory {
        self.kv_memory.map_or(KvMemory::Sequences { count: sequences, tokens }, KvMemory::Bytes)
    }
}

pub fn at_least_one(text: &str) -> Result<usize, String> {
    let number: usize = text.parse().map_err(|e| format!("{e}"))?;
    if number == 0 { Err("must be at least 1".into()) } else { Ok(number) }
}

/// Help of a window whose default depends on the format.
fn window_help(what: &str, default: usize) -> String {
    format!("{what}; {default}, or the value that the format's source publishes, if absent")
}

/// The shortest text that [`parse_size`] reads as `bytes`.
fn size_text(bytes: usize) -> String {
    let unit = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let unit = unit.into_iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| bytes.to_string(), |(shift, letter)| format!("{}{letter}", bytes >> shift))
}

pub fn serialize_optional_size<S: serde::Serializer>(
    bytes: &Option<usize>,
    to: S,
) -> Result<S::Ok, S::Error> {
    bytes.map(size_text).serialize(to)
}

pub fn serialize_optional_display<T: std::fmt::Display, S: serde::Serializer>(
    value: &Option<T>,
    to: S,
) -> Result<S::Ok, S::Error> {
    value.as_ref().map(ToString::to_string).serialize(to)
}

/// Bytes from `123`, `64K`, `512M`, `8G` (binary units, an optional `iB` or `B` behind).
pub fn parse_size(text: &str) -> Result<usize, String> {
    let lower = text.trim().to_ascii_lowercase();
    let stem = lower.strip_suffix("ib").or(lower.strip_suffix('b')).unwrap_or(&lower);
    let (digits, unit) = match stem.chars().last() {
        Some('k') => (&stem[..stem.len() - 1], 1u64 << 10),
        Some('m') => (&stem[..stem.len() - 1], 1 << 20),
        Some('g') => (&stem[..stem.len() - 1], 1 << 30),
        Some('t') => (&stem[..stem.len() - 1], 1 << 40),
        _ => (stem, 1),
    };
    let number: f64 =
        digits.trim().parse().map_err(|_| format!("'{text}' is not a size: write e.g. 512M or 8G"))?;
    if !(number.is_finite() && number > 0.0) {
        return Err(format!("'{text}' is not a size: it must be positive"));
    }
    Ok((number * unit as f64) as usize)
}

/// A model's files, opened and checked but not yet on a device.
pub struct OpenModel {
    /// Its short name.
    pub name: String,
    /// `org/name` on the hub, if that is known.
    pub repository: Option<String>,
    pub source: ModelSource,
    pub config: DecoderConfig,
    pub weights: Arc<Weights>,
}

impl ModelArgs {
    pub fn open(&self) -> Result<OpenModel> {
        let ((name, repository), source) = match &self.model {
            Some(name) => (model_names(name), hub::resolve(name, self.may_download())?),
            None => ((oscar_embedded::NAME.to_owned(), None), ModelSource::Embedded(oscar_embedded::FILES)),
        };
        let config = DecoderConfig::load(&source)?;
        self.check_experts(&config)?;
        let weights = Weights::open(&source)?;
        weights.check(&config)?;
        let weights = match self.weights {
            Some(asked) => weights.delivered_as(asked.format()),
            None => weights,
        };
        Ok(OpenModel { name, repository, source, config, weights: Arc::new(weights) })
    }

    /// Refuses `--cpu-experts` where this model does not have them.
    pub fn check_experts(&self, config: &DecoderConfig) -> Result<()> {
        self.cpu_experts.map_or(Ok(()), |experts| experts.check(config))
    }

    /// Whether files may be downloaded for this model: it has a name on the hub, and neither
    /// --offline nor HF_HUB_OFFLINE forbids it.
    pub fn may_download(&self) -> bool {
        let named = self.model.as_deref().is_some_and(|name| !Path::new(name).is_dir());
        named && !self.offline && !hub::offline_by_environment()
    }

    /// How a device of this kind stores weights: F32 mode widens all of them, a GPU keeps FP8.
    pub fn holding(&self, keeps_fp8: bool) -> Holding {
        let element_bytes = if self.precision == PrecisionArg::F32 { 4 } else { 2 };
        // The CPU keeps experts as codes unless everything is f32.
        let fp8_experts = self.precision != PrecisionArg::F32;
        // A GPU expands MXFP4.
        let mxfp4_experts = fp8_experts && !keeps_fp8;
        Holding { fp8: keeps_fp8, fp8_experts, mxfp4_experts, element_bytes }
    }

    /// The requested device; `auto` takes a GPU if one can be used.
    pub fn backend(&self) -> Result<AnyBackend> {
        if self.device == Device::Cuda && self.precision == PrecisionArg::F32 {
            bail!("--precision f32 is for verification on the CPU: use it with --device cpu");
        }
        let gpu = match self.device {
            Device::Cuda => Some(AnyBackend::cuda()?),
            // F32 runs on the CPU only.
            Device::Auto if self.precision != PrecisionArg::F32 => AnyBackend::cuda_if_usable(),
            Device::Auto | Device::Cpu => None,
        };
        let Some(mut gpu) = gpu else {
            return Ok(AnyBackend::Cpu(Box::new(self.cpu(self.cpu_threads()?)?)));
        };
        if let Some(bytes) = self.gpu_memory_limit {
            gpu.device().limit_memory(bytes)?;
        }
        if self.activations == WeightsArg::Fp8 {
            gpu.quantize_activations().context("--activations fp8")?;
        }
        let experts = match self.cpu_experts {
            None => None,
            Some(_) => Some(CpuBackend::beside_gpu(Kernels::chosen()?, self.cpu_threads()?, self.mode())?),
        };
        let backend = AnyBackend::gpu(gpu, experts);
        if let (Some(layers), Some(hybrid)) =
            (self.cpu_experts.and_then(CpuExperts::layers), backend.as_hybrid())
        {
            hybrid.place(layers);
        }
        Ok(backend)
    }

    /// Threads on the CPU: those asked for, or all cores.
    pub fn cpu_threads(&self) -> Result<usize> {
        let threads =
            self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        check_threads(threads)?;
        Ok(threads)
    }

    /// The CPU with this number of threads.
    pub fn cpu(&self, threads: usize) -> Result<CpuBackend> {
        if self.activations == WeightsArg::Fp8 {
            bail!("--activations fp8 needs a GPU: the CPU multiplies FP8 weights with 16-bit activations");
        }
        if self.gpu_memory_limit.is_some() {
            bail!("--gpu-memory-limit: no GPU is used");
        }
        if self.cpu_experts.is_some() {
            bail!("--cpu-experts: no GPU is used, so all experts are on the CPU anyway; leave it out");
        }
        CpuBackend::new(Kernels::chosen()?, threads, self.mode()).context("the thread pool could not start")
    }

    fn mode(&self) -> Mode {
        match self.precision {
            PrecisionArg::Bf16 => Mode::Bf16,
            PrecisionArg::Fast => Mode::Fast,
            PrecisionArg::F32 => Mode::F32,
        }
    }
}

/// More threads than any machine has are a typing error; starting them would fail half-way.
pub fn check_threads(threads: usize) -> Result<()> {
    if !(1..=1024).contains(&threads) {
        bail!("--threads {threads}: between 1 and 1024");
    }
    Ok(())
}

/// The names of a model: the last component of a repository or path, and the repository if it is
/// known. A snapshot in the Hugging Face cache has the name of its repository.
fn model_names(name: &str) -> (String, Option<String>) {
    let cached = Path::new(name).components().find_map(|part| {
        let repository = part.as_os_str().to_str()?.strip_prefix("models--")?;
        Some(repository.replacen("--", "/", 1))
    });
    let is_folder = Path::new(name).is_dir();
    let repository = cached.or_else(|| {
        ModelName::parse(name).filter(|_| !is_folder && name.contains('/')).map(|model| model.repository)
    });
    let whole = repository.clone().unwrap_or_else(|| name.to_owned());
    let last = Path::new(&whole).file_name().map(|last| last.to_string_lossy().into_owned());
    (last.unwrap_or(whole), repository)
}

impl OpenModel {
    pub fn text(&self) -> Result<ModelText> {
        self.text_with(None)
    }

    /// Tokenizer and chat template; `template` replaces the model's own.
    pub fn text_with(&self, template: Option<&Path>) -> Result<ModelText> {
        let tokenizer = self.source.read_required("tokenizer.json")?;
        let config = self.source.read("tokenizer_config.json")?;
        let template = match template {
            Some(path) => {
                let place = || format!("--chat-template {}", path.display());
                Some(std::fs::read(path).with_context(place)?.into())
            }
            None => self.source.read("chat_template.jinja")?,
        };
        Ok(ModelText::from_files(&tokenizer, config.as_deref(), template.as_deref())?)
    }

    pub fn generation(&self) -> Result<GenerationConfig> {
        Ok(GenerationConfig::load(&self.source)?)
    }

    /// Sampling if the user says nothing: the model's recommendation, else sampling without
    /// changes.
    pub fn default_sampling(generation: &GenerationConfig) -> SamplingParams {
        let greedy = generation.do_sample == Some(false);
        SamplingParams {
            temperature: if greedy { 0.0 } else { generation.temperature.unwrap_or(1.0) },
            top_k: generation.top_k.unwrap_or(0) as usize,
            top_p: generation.top_p.unwrap_or(1.0),
            min_p: generation.min_p.unwrap_or(0.0),
            repetition_penalty: generation.repetition_penalty.unwrap_or(1.0),
            ..SamplingParams::default()
        }
    }

    /// How FP8 weights are held on this device with this cache, and the tensors that are not used;
    /// nothing if there are none.
    pub fn describe_weights(&self, cache: &Cache, backend: &AnyBackend) -> Option<String> {
        let rotated = cache.rotations.is_some();
        let fp8 = self.weights.describe_fp8(&self.config, rotated, backend.multiplies_fp8());
        let ignored = self.weights.ignored(&self.config);
        let unused = (!ignored.is_empty()).then(|| format!("tensors not used: {}", ignored.join(", ")));
        fp8.into_iter().chain(unused).reduce(|a, b| format!("{a}\n{b}"))
    }
}

#[cfg(test)]
mod tests {
    use super::{model_names, parse_size, size_text};

    #[test]
    fn models_are_known_by_their_short_name_and_their_repository() {
        let names = |name: &str| {
            let (short, repository) = model_names(name);
            (short, repository.unwrap_or_default())
        };
        let own = |short: &str, repository: &str| (short.to_owned(), repository.to_owned());
        assert_eq!(names("Qwen/Qwen3-8B"), own("Qwen3-8B", "Qwen/Qwen3-8B"));
        assert_eq!(names("Qwen/Qwen3-8B@main"), own("Qwen3-8B", "Qwen/Qwen3-8B"));
        let snapshot = "/hub/models--Qwen--Qwen3-8B/snapshots/0123abc";
        assert_eq!(names(snapshot), own("Qwen3-8B", "Qwen/Qwen3-8B"));
        assert_eq!(names("/models/mine"), own("mine", ""));
        assert_eq!(names("gpt2"), own("gpt2", ""));
    }

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_size("10"), Ok(10));
        for bad in ["", "G", "-1G", "4X", "nan"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        for (bytes, text) in
            [(1000, "1000"), (1536, "1536"), (3 << 29, "1536M"), (32 << 20, "32M"), (1 << 40, "1T")]
        {
            assert_eq!((size_text(bytes).as_str(), parse_size(text)), (text, Ok(bytes)));
        }
    }
}
