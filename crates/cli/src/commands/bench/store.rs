//! `oscar bench store`: time to first token of a prompt whose pages come from the prefix cache, from host memory or
//! from disk, beside the time that it takes to compute them, in one run.

use super::subject::{Shape, Subject, shape_parser};
use crate::options::{CacheArgs, ModelArgs, at_least_one};
use crate::store::{StoreArgs, StoredModel};
use crate::transfer::TransferArgs;
use crate::{progress, table};
use anyhow::{Context, Result, bail, ensure};
use oscar_backend::Backend;
use oscar_bench::random_tokens;
use oscar_codec::KvFormat;
use oscar_engine::{Engine, EngineApi, EngineHandle, EngineOptions, KvRequest, RequestId, Usage};
use oscar_store::{Store, StoreStats};
use rustix::fs::{Advice, fadvise};
use serde_json::json;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long the store may take to write.
const WRITES: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Random weights of a published model's shape instead of a model
    #[arg(long, value_name = "NAME", conflicts_with = "model", value_parser = shape_parser())]
    shape: Option<Shape>,
    /// KV formats, measured one after the other
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["oscar"])]
    kv: Vec<KvFormat>,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 16384, value_parser = at_least_one)]
    prompt_tokens: usize,
    /// Tokens generated after it. They must be the same every time; on a GPU the computed ones may differ
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    output_tokens: usize,
    /// Times that each is measured, each time with an empty store
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    repetitions: usize,
    /// Folder in which the stores are made, and removed afterwards; that of temporary files if absent
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// One request for the prompt.
struct Answer {
    first_token: f64,
    tokens: Vec<u32>,
    usage: Usage,
    /// The store's numbers afterwards.
    store: StoreStats,
}

/// The same request, with pages from different places.
struct Lives {
    computed: Answer,
    /// From the prefix cache, which is as fast as any store could be.
    cached: Answer,
    ram: Answer,
    /// After a restart.
    disk: Answer,
    /// Bytes a second of plain reading from the files of the store.
    disk_rate: f64,
}

pub fn run(args: &Args) -> Result<()> {
    let subject = Subject::open(&args.model, args.shape.as_ref())?;
    subject.check_context(args.prompt_tokens + args.output_tokens)?;
    let mut lines = Vec::new();
    for &kv in &args.kv {
        for repetition in 1..=args.repetitions {
            let lives =
                measure(args, &subject, kv, repetition as u64).with_context(|| format!("--kv {kv}"))?;
            lines.push(report(args, kv, repetition, &lives));
        }
    }
    if !args.json {
        let header = [
            "kv",
            "prompt",
            "computed, s",
            "prefix cache, s",
            "from RAM, s",
            "from disk, s",
            "disk / computed",
            "bytes read",
            "disk read at",
            "plain reading",
        ];
        println!("time to first token\n\n{}", table::render(&header, &lines));
    }
    Ok(())
}

fn measure(args: &Args, subject: &Subject, kv: KvFormat, seed: u64) -> Result<Lives> {
    let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let folder = tempfile::tempdir_in(&parent).with_context(|| parent.display().to_string())?;
    let prompt = random_tokens(args.prompt_tokens, subject.config().vocab_size, seed);
    let Started { engine, store, on_cpu } = start(args, subject, kv, folder.path(), true)?;
    let computed = ask(args, &engine, &prompt)?;
    let cached = ask(args, &engine, &prompt)?;
    // Behind everything that the answers still had to offer.
    engine.flush_cache();
    ensure!(store.flush(WRITES), "the store did not write everything in time");
    let dropped = store.stats().dropped_writes;
    ensure!(dropped == 0, "the store did not keep up with the prompt: {dropped} pages were dropped");
    let ram = ask(args, &engine, &prompt)?;
    engine.shutdown();
    drop((engine, store));
    let files = files(folder.path())?;
    forget(&files)?;
    let disk_rate = read_plainly(&files)?;
    forget(&files)?;
    let Started { engine, store, .. } = start(args, subject, kv, folder.path(), false)?;
    let disk = ask(args, &engine, &prompt)?;
    engine.shutdown();
    drop((engine, store));
    let lives = Lives { computed, cached, ram, disk, disk_rate };
    for (answer, from) in [(&lives.ram, "host memory"), (&lives.disk, "disk")] {
        if answer.tokens != lives.cached.tokens {
            bail!("{kv}: the answer from pages of {from} differs from that of the prefix cache");
        }
    }
    // On a GPU a computed answer may differ in its rounding: its prompt steps have other rows.
    if on_cpu && lives.cached.tokens != lives.computed.tokens {
        bail!("{kv}: the answer from the prefix cache differs from the computed one");
    }
    Ok(lives)
}

fn report(args: &Args, kv: KvFormat, repetition: usize, lives: &Lives) -> Vec<String> {
    let Lives { computed, cached, ram, disk, disk_rate } = lives;
    let ratio = disk.first_token / computed.first_token;
    let read = disk.store.disk_read_bytes as f64;
    // A request with all pages in the prefix cache needs the rest of the time too.
    let rate = read / (disk.first_token - cached.first_token).max(1e-9);
    if args.json {
        println!(
            "{}",
            json!({"bench": "store", "kv": kv.to_string(), "prompt_tokens": args.prompt_tokens,
                   "repetition": repetition, "computed_s": computed.first_token,
                   "cached_s": cached.first_token, "ram_s": ram.first_token,
                   "restored_s": disk.first_token, "ratio": ratio,
                   "ram_tokens": ram.usage.by_tier.ram, "disk_tokens": disk.usage.by_tier.disk,
                   "pages_read": disk.store.disk_hits, "bytes_read": disk.store.disk_read_bytes,
                   "disk_bytes_per_s": rate, "plain_disk_bytes_per_s": disk_rate,
                   "same_as_computed": computed.tokens == disk.tokens,
                   "bytes_written": ram.store.written_bytes})
        );
    }
    let per_second = |rate: f64| format!("{}/s", progress::bytes(rate as usize));
    vec![
        kv.to_string(),
        args.prompt_tokens.to_string(),
        format!("{:.3}", computed.first_token),
        format!("{:.3}", cached.first_token),
        format!("{:.3}", ram.first_token),
        format!("{:.3}", disk.first_token),
        format!("{ratio:.4}"),
        progress::bytes(read as usize),
        per_second(rate),
        per_second(*disk_rate),
    ]
}

/// An engine and its store.
struct Started {
    engine: EngineHandle,
    store: Store,
    on_cpu: bool,
}

/// Starts an engine on the store.
fn start(args: &Args, subject: &Subject, kv: KvFormat, folder: &Path, with_ram: bool) -> Result<Started> {
    let cache = subject.cache(kv, &args.cache)?;
    let backend = args.model.backend()?;
    if !args.json {
        eprintln!("{kv}: {}", backend.describe());
    }
    let context = args.prompt_tokens + args.output_tokens;
    let runner = subject.runner(&cache, backend, &args.cache, context, 2)?;
    let ram = with_ram.then_some(usize::MAX);
    let flags = StoreArgs { store: Some(folder.to_owned()), store_ram: ram, ..StoreArgs::default() };
    let weights = match subject {
        Subject::Open(model) => model.weights.fingerprint(),
        Subject::Random { weights, .. } => format!("random {weights:?}"),
    };
    let model = StoredModel { name: subject.name(), weights, config: subject.config() };
    let none = TransferArgs::default();
    let (store, _) = flags.open(&none, &args.model, &model, &cache, runner.backend(), true)?;
    let options = EngineOptions { store: store.clone(), ..EngineOptions::new(subject.name()) };
    let on_cpu = runner.backend().as_cpu().is_some();
    let engine = Engine::start(runner, options).context("the engine thread could not start")?;
    Ok(Started { engine, store: store.context("the flags ask for a store")?, on_cpu })
}

/// Sends the prompt and waits for the whole answer.
fn ask(args: &Args, engine: &EngineHandle, prompt: &[u32]) -> Result<Answer> {
    let whole = KvRequest::default();
    let answer = super::ask::ask(engine, RequestId(1), prompt.to_vec(), args.output_tokens, whole)?;
    let store = engine.stats().store.context("the engine has no store")?;
    let first_token = answer.first_token().as_secs_f64();
    Ok(Answer { first_token, tokens: answer.tokens, usage: answer.usage, store })
}

/// All files below a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut folders, mut files) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    Ok(files)
}

/// Lets the system forget what it keeps of these files in memory.
fn forget(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let file = File::open(path)?;
        file.sync_all()?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

/// Bytes a second of reading files, as many at a time as there are processors up to 16, and nothing else.
fn read_plainly(files: &[PathBuf]) -> Result<f64> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let (next, began) = (Mutex::new(files.iter()), Instant::now());
    let read = || -> std::io::Result<usize> {
        let (mut buffer, mut total) = (vec![0; 8 << 20], 0);
        loop {
            let path = next.lock().map_or(None, |mut files| files.next());
            let Some(path) = path else { return Ok(total) };
            let mut file = File::open(path)?;
            loop {
                match file.read(&mut buffer)? {
                    0 => break,
                    bytes => total += bytes,
                }
            }
        }
    };
    let total: std::io::Result<usize> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(read)).collect();
        let ended = |reader: std::thread::ScopedJoinHandle<'_, std::io::Result<usize>>| {
            reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        readers.into_iter().map(ended).sum()
    });
    Ok(total? as f64 / began.elapsed().as_secs_f64())
}
