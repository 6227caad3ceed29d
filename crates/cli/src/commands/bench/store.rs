//! `oscar bench store`: time to first token of a prompt whose pages come from disk, beside the time that it takes
//! to compute them, in one run.

use crate::options::{CacheArgs, ModelArgs, OpenModel, at_least_one};
use crate::store::StoreArgs;
use crate::transfer::TransferArgs;
use crate::{progress, table};
use anyhow::{Context, Result, bail};
use oscar_backend::Backend;
use oscar_bench::random_tokens;
use oscar_codec::KvFormat;
use oscar_engine::{
    Engine, EngineApi, EngineOptions, Event, EventSink, GenerationParams, Request, RequestId, SamplingParams,
    Usage,
};
use oscar_store::StoreStats;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// KV formats, measured one after the other
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["oscar"])]
    kv: Vec<KvFormat>,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 16384, value_parser = at_least_one)]
    prompt_tokens: usize,
    /// Tokens generated after it, which must be the same both times
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

/// What a server that just started needs for one request.
struct Life {
    first_token: f64,
    tokens: Vec<u32>,
    usage: Usage,
    store: StoreStats,
}

pub fn run(args: &Args) -> Result<()> {
    let model = args.model.open()?;
    let most = model.config.max_position_embeddings;
    if args.prompt_tokens + args.output_tokens > most {
        bail!("--prompt-tokens and --output-tokens: together at most {most}, the model's context");
    }
    let mut lines = Vec::new();
    for &kv in &args.kv {
        for repetition in 1..=args.repetitions {
            let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
            let folder = tempfile::tempdir_in(&parent).with_context(|| parent.display().to_string())?;
            let seed = repetition as u64;
            let computed =
                live(args, &model, kv, folder.path(), seed).with_context(|| format!("--kv {kv}"))?;
            let restored =
                live(args, &model, kv, folder.path(), seed).with_context(|| format!("--kv {kv}"))?;
            if computed.tokens != restored.tokens {
                bail!("{kv}: the answer from stored pages differs from the computed one");
            }
            lines.push(report(args, kv, repetition, &computed, &restored));
        }
    }
    if !args.json {
        let header = [
            "kv",
            "prompt",
            "computed, s",
            "from disk, s",
            "ratio",
            "tokens from disk",
            "pages read",
            "bytes read",
        ];
        println!("time to first token\n\n{}", table::render(&header, &lines));
    }
    Ok(())
}

fn report(args: &Args, kv: KvFormat, repetition: usize, computed: &Life, restored: &Life) -> Vec<String> {
    let ratio = restored.first_token / computed.first_token;
    let (pages, bytes) = (restored.store.disk_hits, restored.store.disk_read_bytes);
    if args.json {
        println!(
            "{}",
            json!({"bench": "store", "kv": kv.to_string(), "prompt_tokens": args.prompt_tokens,
                   "repetition": repetition, "computed_s": computed.first_token,
                   "restored_s": restored.first_token, "ratio": ratio,
                   "disk_tokens": restored.usage.by_tier.disk, "pages_read": pages, "bytes_read": bytes,
                   "bytes_written": computed.store.written_bytes})
        );
    }
    vec![
        kv.to_string(),
        args.prompt_tokens.to_string(),
        format!("{:.3}", computed.first_token),
        format!("{:.3}", restored.first_token),
        format!("{ratio:.4}"),
        restored.usage.by_tier.disk.to_string(),
        pages.to_string(),
        progress::bytes(bytes as usize),
    ]
}

struct ChannelSink(Sender<Event>);

impl EventSink for ChannelSink {
    fn send(&self, event: Event) -> bool {
        self.0.send(event).is_ok()
    }
}

/// Starts an engine on the store, asks once, and ends it.
fn live(args: &Args, model: &OpenModel, kv: KvFormat, folder: &Path, seed: u64) -> Result<Life> {
    let cache = model.cache(kv, &args.cache)?;
    let backend = args.model.backend()?;
    if !args.json {
        eprintln!("{kv}: {}", backend.describe());
    }
    let context = args.prompt_tokens + args.output_tokens;
    let runner = cache.runner(model, backend, &args.cache, context, 2, |_| {})?;
    let flags = StoreArgs { store: Some(folder.to_owned()), ..StoreArgs::default() };
    let none = TransferArgs::default();
    let (store, _) = flags.open(&none, &args.model, model, &cache, runner.backend(), true)?;
    let vocab = runner.config().vocab_size;
    let options = EngineOptions { store, ..EngineOptions::new(&model.name) };
    let engine = Engine::start(runner, options).context("the engine thread could not start")?;
    let params = GenerationParams {
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens: args.output_tokens,
        ..GenerationParams::default()
    };
    let prompt = random_tokens(args.prompt_tokens, vocab, seed);
    let request = Request::new(engine.info(), RequestId(1), prompt, params)?;
    let (sender, events) = channel();
    let began = Instant::now();
    engine.submit(request, Box::new(ChannelSink(sender)))?;
    let (mut first_token, mut tokens) = (None, Vec::new());
    let usage = loop {
        match events.recv().context("the engine stopped answering")? {
            Event::Token { token, .. } => {
                first_token.get_or_insert_with(|| began.elapsed().as_secs_f64());
                tokens.push(token);
            }
            Event::Done(usage) => break usage,
            Event::Failed(error) => return Err(error.into()),
            Event::Started { .. } | Event::Embedding(_) | Event::Kept(_) | Event::Finished { .. } => {}
        }
    };
    // Writes everything.
    engine.shutdown();
    let store = engine.stats().store.context("the engine has no store")?;
    Ok(Life { first_token: first_token.context("no token came")?, tokens, usage, store })
}
