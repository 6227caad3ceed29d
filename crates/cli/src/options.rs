//! Flags that mean the same in every command, and what they resolve to.

use crate::device::AnyBackend;
use anyhow::{Context, Result, bail};
use oscar_backend::{Backend, WeightFormat};
use oscar_calibrate::bits::{Freedom, solve};
use oscar_calibrate::{CodeRounding, RotationFile};
use oscar_codec::{
    CacheLayout, CodeLayout, FormatTable, KvFormat, MeanBits, RotationKind, RotationSet, RowPageCodec, Side,
    SideSpec, Windows,
};
use oscar_engine::SamplingParams;
use oscar_kernels_cpu::Kernels;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::{DecoderConfig, GenerationConfig, Holding, ModelSource, Weights};
use oscar_runner::{KvMemory, Runner, RunnerOptions};
use oscar_text::ModelText;
use serde::Serialize;
use std::io::Cursor;
use std::path::Path;

/// The cache format if the user names none.
pub const DEFAULT_KV: &str = "oscar";

/// Which model, on which device.
#[derive(clap::Args, Clone, Serialize)]
pub struct ModelArgs {
    /// Model: a directory, or a name in the local Hugging Face cache (org/name[@revision]); the
    /// embedded model if absent
    #[arg(long, value_name = "DIR|NAME")]
    pub model: Option<String>,
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
    /// Prompt tokens processed in one step; 512 on a CPU and 3960 on a GPU if absent
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub prefill_chunk: Option<usize>,
    /// Memory for KV pages, e.g. 512M or 8G; by default as much as the context needs (`serve`: a
    /// share of what is free; `bench serve`: 4 BF16 requests)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    #[serde(serialize_with = "serialize_optional_size")]
    pub kv_memory: Option<usize>,
}

impl CacheArgs {
    /// Prompt tokens of a step on this device.
    pub fn prefill_chunk(&self, backend: &AnyBackend) -> usize {
        self.prefill_chunk.unwrap_or_else(|| backend.default_prefill_chunk())
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

pub fn serialize_display<T: std::fmt::Display, S: serde::Serializer>(
    value: &T,
    to: S,
) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
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
        digits.trim().parse().map_err(|_| format!("'{text}' is no size: write e.g. 512M or 8G"))?;
    if !(number.is_finite() && number > 0.0) {
        return Err(format!("'{text}' is no size: it must be positive"));
    }
    Ok((number * unit as f64) as usize)
}

/// A model's files, opened and checked but not yet on a device.
pub struct OpenModel {
    pub name: String,
    pub source: ModelSource,
    pub config: DecoderConfig,
    pub weights: Weights,
}

/// File name under which a model directory carries its rotations.
const MODEL_ROTATIONS: &str = "rotations.safetensors";

impl ModelArgs {
    pub fn open(&self) -> Result<OpenModel> {
        let (name, source) = match &self.model {
            Some(name) => (model_name(name), resolve(name)?),
            None => (oscar_embedded::NAME.to_owned(), ModelSource::Embedded(oscar_embedded::FILES)),
        };
        let config = DecoderConfig::load(&source)?;
        let weights = Weights::open(&source)?;
        weights.check(&config)?;
        let weights = match self.weights {
            Some(asked) => weights.delivered_as(asked.format()),
            None => weights,
        };
        Ok(OpenModel { name, source, config, weights })
    }

    /// How a device of this kind stores weights: F32 mode widens all of them, a GPU keeps FP8.
    pub fn holding(&self, keeps_fp8: bool) -> Holding {
        let element_bytes = if self.precision == PrecisionArg::F32 { 4 } else { 2 };
        Holding { fp8: keeps_fp8, element_bytes }
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
        if let Some(gpu) = gpu {
            if let Some(bytes) = self.gpu_memory_limit {
                gpu.limit_gpu_memory(bytes)?;
            }
            return if self.activations == WeightsArg::Fp8 { gpu.with_fp8_activations() } else { Ok(gpu) };
        }
        if self.activations == WeightsArg::Fp8 {
            bail!("--activations fp8 needs a GPU: the CPU multiplies FP8 weights with 16-bit activations");
        }
        if self.gpu_memory_limit.is_some() {
            bail!("--gpu-memory-limit: no GPU is used");
        }
        let threads =
            self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        check_threads(threads)?;
        let precision = match self.precision {
            PrecisionArg::Bf16 => Mode::Bf16,
            PrecisionArg::Fast => Mode::Fast,
            PrecisionArg::F32 => Mode::F32,
        };
        let cpu = CpuBackend::new(Kernels::chosen()?, threads, precision)
            .context("the thread pool could not start")?;
        Ok(AnyBackend::Cpu(Box::new(cpu)))
    }
}

/// More threads than any machine has are a typing error; starting them would fail half-way.
pub fn check_threads(threads: usize) -> Result<()> {
    if !(1..=1024).contains(&threads) {
        bail!("--threads {threads}: between 1 and 1024");
    }
    Ok(())
}

#[cfg(not(feature = "hub"))]
fn resolve(name: &str) -> Result<ModelSource> {
    Ok(ModelSource::resolve(name)?)
}

/// Looks for the model here, then on the hub.
#[cfg(feature = "hub")]
fn resolve(name: &str) -> Result<ModelSource> {
    Ok(oscar_models::hub::resolve_or_download(name, &mut Bars::default())?)
}

/// A progress bar for each file that is downloaded.
#[cfg(feature = "hub")]
#[derive(Default)]
pub struct Bars(Option<indicatif::ProgressBar>);

#[cfg(feature = "hub")]
impl oscar_models::hub::DownloadProgress for Bars {
    fn begin_file(&mut self, file: &str, bytes: u64) {
        eprintln!("downloading {file}");
        self.0 = Some(crate::progress::bar("downloading", bytes));
    }
    fn advance(&mut self, bytes: u64) {
        if let Some(bar) = &self.0 {
            bar.inc(bytes);
        }
    }
    fn end_file(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}

/// The last component of a path or repository name.
fn model_name(name: &str) -> String {
    Path::new(name).file_name().map_or_else(|| name.to_owned(), |n| n.to_string_lossy().into_owned())
}

impl OpenModel {
    pub fn text(&self) -> Result<ModelText> {
        let tokenizer = self.source.read_required("tokenizer.json")?;
        let config = self.source.read("tokenizer_config.json")?;
        let template = self.source.read("chat_template.jinja")?;
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

    /// How FP8 weights are held on this device with this cache; nothing if there are none.
    pub fn describe_weights(&self, cache: &Cache, backend: &AnyBackend) -> Option<String> {
        let rotated = cache.rotations.is_some();
        self.weights.describe_fp8(&self.config, rotated, backend.multiplies_fp8())
    }

    /// The cache layout of a format, with the clip ratios of the rotation file if it has them.
    pub fn cache(&self, format: KvFormat, args: &CacheArgs) -> Result<Cache> {
        let c = &self.config;
        if let (kind, Some(file)) = (format.rotation(), &args.rotations)
            && kind != RotationKind::Calibrated
        {
            eprintln!("note: --rotations {file} is not used: {format} has its own ({})", kind.describe());
        }
        let windows = format.windows(args.sink, args.recent)?;
        let layout = CacheLayout::new(format, c.layers, c.kv_heads, c.head_dim, windows, CodeLayout::CpuTile)
            .or_else(|_| {
                CacheLayout::new(format, c.layers, c.kv_heads, c.head_dim, windows, CodeLayout::Logical)
            })?;
        let (rotations, origin, layout) = match format.rotation() {
            RotationKind::Calibrated => self.rotations(format, args, layout)?,
            kind => (kind.data_free(c.layers, c.kv_heads, c.head_dim)?, kind.describe(), layout),
        };
        Ok(Cache { layout, rotations, rotation_origin: origin })
    }

    /// The bytes of the rotation file for calibrated formats; none for Hadamard rotations.
    pub fn rotation_bytes(&self, args: &CacheArgs) -> Result<Option<Vec<u8>>> {
        match args.rotations.as_deref() {
            Some("hadamard") => Ok(None),
            Some(path) => Ok(Some(std::fs::read(path).with_context(|| format!("--rotations {path}"))?)),
            None => Ok(self.source.read(MODEL_ROTATIONS)?.map(|bytes| bytes.to_vec())),
        }
    }

    fn rotations(
        &self,
        format: KvFormat,
        args: &CacheArgs,
        layout: CacheLayout,
    ) -> Result<(Option<RotationSet>, String, CacheLayout)> {
        let c = &self.config;
        let hadamard = || RotationSet::hadamard(c.layers, c.kv_heads, c.head_dim);
        let (file, origin) = match args.rotations.as_deref() {
            Some("hadamard") => {
                refuse_mean(format)?;
                return Ok((Some(hadamard()?), "Hadamard (as asked)".into(), layout));
            }
            Some(path) => (RotationFile::load(Path::new(path))?, path.to_owned()),
            None => match self.source.read(MODEL_ROTATIONS)? {
                Some(bytes) => {
                    let length = bytes.len() as u64;
                    (
                        RotationFile::read(&mut Cursor::new(bytes), length).context(MODEL_ROTATIONS)?,
                        "calibrated, the model's own".into(),
                    )
                }
                None => {
                    refuse_mean(format)?;
                    let note =
                        "Hadamard: the model has no rotations of its own, make them with `oscar calibrate`";
                    return Ok((Some(hadamard()?), note.into(), layout));
                }
            },
        };
        file.check_model(&self.weights.fingerprint(), c)?;
        if let KvFormat::OscarMixed { mean } = format {
            let (layout, widths) = with_widths(layout, mean, &file)?;
            return Ok((Some(file.rotations), format!("{origin}; {widths}"), layout));
        }
        let layout = with_clips(layout, format, &file)?;
        Ok((Some(file.rotations), origin, layout))
    }
}

/// The layout with the file's widths for a mean, and their origin.
fn with_widths(
    layout: CacheLayout,
    mean: Option<MeanBits>,
    file: &RotationFile,
) -> Result<(CacheLayout, String)> {
    let wanted = mean.unwrap_or(MeanBits::DEFAULT);
    let (table, origin) = match (file.bits.table(wanted), &file.bits.harm) {
        (Some(table), _) => (table.clone(), format!("widths by measured harm, {wanted} bits")),
        (None, Some(harm)) => (
            solve(harm, wanted, layout.head_dim(), &Freedom::default())?,
            format!(
                "widths for {wanted} bits from the file's harms, not verified (verified: {})",
                file.bits.means()
            ),
        ),
        (None, None) if mean.is_none() => {
            let note = "2 bits everywhere: the rotations have no widths, choose them with `oscar calibrate --bits 2.25`";
            return Ok((layout, note.into()));
        }
        (None, None) => bail!(
            "--kv oscar:{wanted}: the rotations have no table of widths; make one with `oscar calibrate --bits {wanted}`, \
             or use oscar2"
        ),
    };
    let Some(uniform) = layout.coded() else { return Ok((layout, origin)) };
    let formats = table.formats(layout.head_dim(), uniform.codec(0, 0).layout())?;
    let formats = formats.with_roundings(file.roundings(file.bits.rounding)?)?;
    let origin = match file.bits.rounding {
        CodeRounding::Nearest => origin,
        CodeRounding::Shaped => format!("{origin}, query-aware rounding"),
    };
    Ok((layout.with_coded_table(formats), origin))
}

/// Widths belong to a model's calibrated rotations: without these there is no table.
fn refuse_mean(format: KvFormat) -> Result<()> {
    match format {
        KvFormat::OscarMixed { mean: Some(mean) } => {
            bail!("--kv oscar:{mean} needs calibrated rotations with widths: `oscar calibrate --bits {mean}`")
        }
        _ => Ok(()),
    }
}

/// The layout with the file's clip ratios, if they were chosen for this format's width.
fn with_clips(layout: CacheLayout, format: KvFormat, file: &RotationFile) -> Result<CacheLayout> {
    let KvFormat::Oscar { bits } = format else { return Ok(layout) };
    let (bits, Some(table)) = (u32::from(bits), layout.coded()) else { return Ok(layout) };
    if file.metadata.clip_bits != (bits, bits) {
        if file.metadata.clip != "official" {
            eprintln!(
                "note: the file's clip ratios were fitted for other widths than {format}; the defaults are used"
            );
        }
        return Ok(layout);
    }
    let (layers, heads) = (layout.layers(), layout.kv_heads());
    let codecs = (0..layers * heads)
        .map(|i| {
            let codec = table.codec(i / heads, i % heads);
            let spec = |side, clip| SideSpec { clip, ..codec.spec(side) };
            let (key, value) = (spec(Side::Key, file.clips.key[i]), spec(Side::Value, file.clips.value[i]));
            RowPageCodec::new(layout.head_dim(), key, value, codec.layout())
        })
        .collect::<Result<_, _>>()?;
    Ok(layout.with_coded_table(FormatTable::new(layers, heads, codecs)?))
}

/// A cache layout and the rotations it needs.
pub struct Cache {
    pub layout: CacheLayout,
    pub rotations: Option<RotationSet>,
    pub rotation_origin: String,
}

impl Cache {
    /// Loads the model for this cache, with room for `sequences` sequences of `context` tokens unless the user set
    /// a budget.
    pub fn runner(
        &self,
        model: &OpenModel,
        backend: AnyBackend,
        args: &CacheArgs,
        context: usize,
        sequences: usize,
        progress: impl FnMut(usize),
    ) -> Result<Runner<AnyBackend>> {
        let options = RunnerOptions {
            layout: self.layout.clone(),
            rotations: self.rotations.as_ref(),
            context,
            kv_memory: args.kv_memory(sequences, context),
            prefill_chunk: args.prefill_chunk(&backend),
        };
        Ok(Runner::load(backend, &model.config, &model.weights, options, progress)?)
    }
}

#[cfg(test)]
mod tests {
    use super::{parse_size, size_text};

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
