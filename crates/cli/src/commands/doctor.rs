//! `oscar doctor`: everything a bug report should open with, in one screen.

use crate::table;
use anyhow::{Context, Result, bail};
use oscar_backend::Backend;
use oscar_codec::KvFormat;
use oscar_kernels_cpu::Variant;
use oscar_kernels_cuda::CudaBackend;
use oscar_models::{DecoderConfig, ModelSource, Weights};
use serde_json::json;
use sha2::{Digest, Sha256};

#[derive(clap::Args)]
pub struct Args {
    /// Model to describe: a directory or a name in the local Hugging Face cache; the embedded model
    /// if absent
    #[arg(long)]
    model: Option<String>,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// SHA-256 of the shipped weights; a differing digest means a damaged checkout or binary.
const EMBEDDED_WEIGHTS_SHA256: &str = "9489d7b4dc1a6c7b74c6c5da3a8db88362c8c5235a393a2784c54ca46c99e29a";

pub fn run(args: &Args) -> Result<()> {
    let (name, source) = match &args.model {
        Some(name) => (name.clone(), ModelSource::resolve(name)?),
        None => (oscar_embedded::NAME.to_owned(), ModelSource::Embedded(oscar_embedded::FILES)),
    };
    let config = DecoderConfig::load(&source)?;
    let weights = Weights::open(&source)?;
    weights.check(&config)?;
    let checksum = if args.model.is_none() { Some(embedded_checksum()?) } else { None };

    let chosen = Variant::chosen()?;
    let available: Vec<String> = Variant::available().map(|v| v.to_string()).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (cpu, memory) = (cpu_name(), memory_gib());

    let gpu = gpu();

    if args.json {
        let formats: Vec<_> = KvFormat::all()
            .into_iter()
            .filter_map(|f| f.codec(config.head_dim, f.native_layout()).ok().map(|c| json!({"kv": f.to_string(), "bits": c.bits_per_element(), "page_bytes": c.page_bytes()})))
            .collect();
        println!(
            "{}",
            json!({
                "version": env!("CARGO_PKG_VERSION"), "cpu": cpu, "cores": cores, "memory_gib": memory,
                "instruction_sets": available, "kernels": chosen.to_string(), "gpu": gpu, "model": name, "weights_sha256": checksum,
                "parameters": weights.parameter_count(), "formats": formats,
            })
        );
        return Ok(());
    }

    println!("oscar {}", env!("CARGO_PKG_VERSION"));
    println!(
        "machine   {cpu}, {cores} threads{}",
        memory.map_or(String::new(), |m| format!(", {m:.1} GiB memory"))
    );
    println!("kernels   {chosen} (available: {}; override with OSCAR_CPU)", available.join(", "));
    println!("gpu       {gpu}");
    println!(
        "model     {name}: {} with {} layers, {} query and {} KV heads of {}, {:.1} M parameters",
        config.family.architecture(),
        config.layers,
        config.query_heads,
        config.kv_heads,
        config.head_dim,
        weights.parameter_count() as f64 / 1e6
    );
    if let Some(sum) = checksum {
        println!("          weights intact, SHA-256 {}…", &sum[..16]);
    } else {
        println!("          tensors complete and of the right shapes; contents not checked");
    }
    let rotations = source.contains("rotations.safetensors");
    println!(
        "          rotations: {}",
        if rotations { "its own" } else { "none; `oscar calibrate` makes them" }
    );
    println!("\nWhat {name} stores for each token, by KV format (64-token pages, all metadata counted):\n");
    println!("{}", format_table(&config)?);
    Ok(())
}

/// The GPU as `--device auto` finds it, or why it does not.
fn gpu() -> String {
    CudaBackend::open(0).map_or_else(|error| format!("none used: {error}"), |gpu| gpu.describe())
}

fn format_table(config: &DecoderConfig) -> Result<String> {
    let heads = config.cache_layers() * config.kv_heads;
    let mut rows = Vec::new();
    for format in KvFormat::all() {
        let Ok(codec) = format.codec(config.head_dim, format.native_layout()) else { continue };
        let token_bytes = (codec.page_bytes() * heads) as f64 / oscar_codec::PAGE_TOKENS as f64;
        rows.push(vec![
            format.to_string(),
            format!("{:.2}", codec.bits_per_element()),
            format!("{}", codec.page_bytes()),
            format!("{token_bytes:.0}"),
            format!("{:.2}×", 16.0 / codec.bits_per_element()),
            format.describe(),
        ]);
    }
    if rows.is_empty() {
        bail!("no KV format is defined for head size {}", config.head_dim);
    }
    Ok(table::render(
        &["format", "bits/element", "page bytes", "bytes/token", "against BF16", "what it is "],
        &rows,
    ))
}

fn embedded_checksum() -> Result<String> {
    let (_, bytes) = oscar_embedded::FILES
        .iter()
        .find(|(name, _)| *name == "model.safetensors")
        .context("the binary holds no model")?;
    let digest: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    if digest != EMBEDDED_WEIGHTS_SHA256 {
        bail!(
            "the embedded weights are damaged: SHA-256 {digest}, expected {EMBEDDED_WEIGHTS_SHA256}; check out models/oscar-15m again and rebuild"
        );
    }
    Ok(digest)
}

fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, n)| n.trim().to_owned()));
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

pub fn memory_gib() -> Option<f64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: f64 = info
        .lines()
        .find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok())?;
    Some(kib / 1024.0 / 1024.0)
}
