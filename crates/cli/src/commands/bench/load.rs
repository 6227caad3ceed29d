//! `oscar bench load`: seconds from a checkpoint in the page cache to a model that could serve.

use super::subject::{Shape, shape_parser};
use crate::options::{CacheArgs, ModelArgs, at_least_one};
use crate::{progress, table};
use anyhow::{Context, Result};
use oscar_backend::Backend;
use oscar_codec::KvFormat;
use oscar_models::tiny::large::write_large_model;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Write a random checkpoint of a published model's shape first, unless --dir has one
    #[arg(long, value_name = "NAME", conflicts_with = "model", requires = "dir", value_parser = shape_parser())]
    shape: Option<Shape>,
    /// Folder of that checkpoint; it is kept
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Shards of that checkpoint
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    shards: usize,
    /// KV formats; those with rotations have them folded into the weights
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["bf16", "oscar"])]
    kv: Vec<KvFormat>,
    /// Longest sequence in tokens
    #[arg(long, value_name = "N", default_value_t = 32768, value_parser = at_least_one)]
    context: usize,
    /// Times that each is loaded
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = at_least_one)]
    repetitions: usize,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// Seconds of the parts of loading.
struct Times {
    /// Opening and checking the files; rotations.
    open: f64,
    /// Opening the device with its first kernels.
    device: f64,
    /// Weights, pages and the kernels of the cache.
    weights: f64,
}

impl Times {
    fn total(&self) -> f64 {
        self.open + self.device + self.weights
    }
}

pub fn run(args: &Args) -> Result<()> {
    let mut model = args.model.clone();
    if let (Some(shape), Some(dir)) = (&args.shape, &args.dir) {
        if !dir.join("config.json").is_file() {
            let began = Instant::now();
            let bytes = write_large_model(dir, &shape.config, args.shards)?;
            let seconds = began.elapsed().as_secs_f64();
            eprintln!("wrote {} to {} in {seconds:.1} s", progress::bytes(bytes as usize), dir.display());
        }
        model.model = Some(dir.to_str().context("--dir must be UTF-8")?.to_owned());
    }
    let mut lines = Vec::new();
    for &kv in &args.kv {
        for repetition in 1..=args.repetitions {
            let (times, bytes, device) = load(args, &model, kv)?;
            let rate = bytes as f64 / times.weights;
            if args.json {
                println!(
                    "{}",
                    json!({"bench": "load", "kv": kv.to_string(), "device": device, "repetition": repetition,
                           "bytes": bytes, "open_s": times.open, "device_s": times.device,
                           "weights_s": times.weights, "total_s": times.total(), "gbps": rate / 1e9})
                );
            }
            lines.push(vec![
                kv.to_string(),
                device.to_owned(),
                progress::bytes(bytes),
                format!("{:.2}", times.open),
                format!("{:.2}", times.device),
                format!("{:.2}", times.weights),
                format!("{:.2}", times.total()),
                format!("{:.2}", rate / 1e9),
            ]);
        }
    }
    if !args.json {
        let header =
            ["kv", "device", "files", "open s", "device s", "weights and kernels s", "total s", "GB/s"];
        println!("{}", table::render(&header, &lines));
    }
    Ok(())
}

fn load(args: &Args, model: &ModelArgs, kv: KvFormat) -> Result<(Times, usize, &'static str)> {
    let began = Instant::now();
    let open = model.open()?;
    let cache = open.cache(kv, &args.cache)?;
    let opened = Instant::now();
    let backend = model.backend()?;
    let ready = Instant::now();
    let (name, bytes) = (backend.name(), open.weights.total_bytes());
    if !args.json {
        eprintln!("{kv}: {}", backend.describe());
    }
    let context = args.context.min(open.config.max_position_embeddings);
    let bar = progress::bytes_bar("loading", bytes);
    let runner =
        cache.runner(&open, backend, &args.cache, context, 1, |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    let done = Instant::now();
    drop(runner);
    let seconds = |from: Instant, to: Instant| (to - from).as_secs_f64();
    let times =
        Times { open: seconds(began, opened), device: seconds(opened, ready), weights: seconds(ready, done) };
    Ok((times, bytes as usize, name))
}
