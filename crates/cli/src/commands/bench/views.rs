//! `oscar bench views`: the next turn of a long conversation, on a view of its history and on the whole of it. Both find
//! the history in the prefix cache, and both are measured in turns in one run.

use super::ask::Answer;
use crate::episodes::probe;
use crate::options::{CacheArgs, ModelArgs, OpenModel, at_least_one};
use crate::table;
use anyhow::{Context, Result, bail};
use oscar_backend::Backend;
use oscar_bench::{Percentiles, random_tokens};
use oscar_codec::KvFormat;
use oscar_engine::{
    Engine, EngineApi, EngineHandle, EngineOptions, KvRequest, KvRoute, PostSetting, RequestId, Turn,
};
use oscar_views::{Budget, EpisodeOptions, Eviction, InputEmbeddings};
use serde_json::json;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// KV formats, measured one after the other
    #[arg(long, value_name = "FORMAT[,FORMAT…]", value_delimiter = ',', default_values = ["oscar"])]
    kv: Vec<KvFormat>,
    /// Policies that read views of a whole history: keydiff-post, kvzip, episodes
    #[arg(long, value_name = "POLICY[,POLICY…]", value_delimiter = ',', default_values = ["keydiff-post", "kvzip", "episodes"])]
    evict: Vec<Eviction>,
    /// Rows of the history that a view keeps
    #[arg(long, value_name = "N|SIZE", default_value = "1024")]
    budget: Budget,
    /// Tokens of the conversation before the turn
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = at_least_one)]
    context: usize,
    /// Tokens of the turn's message
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    message_tokens: usize,
    /// Tokens of its answer
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    output_tokens: usize,
    /// Turns of each kind
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    repetitions: usize,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// Tokens of a message of the conversation.
const UTTERANCE: usize = 64;
/// Positions that probes take behind the conversation.
const PROBE_ROOM: usize = 4400;
/// How long views may take.
const PATIENCE: Duration = Duration::from_secs(600);

pub fn run(args: &Args) -> Result<()> {
    let model = args.model.open()?;
    let (positions, most) = (args.positions(), model.config.max_position_embeddings);
    if positions > most {
        bail!(
            "--context {}: with its turn and probes {positions} positions, and the model has {most}",
            args.context
        );
    }
    if let Some(other) = args.evict.iter().find(|eviction| !eviction.keeps_base()) {
        bail!(
            "--evict {other}: it keeps no whole history to compare with; use keydiff-post, kvzip or episodes"
        );
    }
    let mut lines = Vec::new();
    for &kv in &args.kv {
        for &eviction in &args.evict {
            let measured = measure(args, &model, kv, eviction);
            lines.push(report(
                args,
                kv,
                eviction,
                &measured.with_context(|| format!("--kv {kv}, {eviction}"))?,
            )?);
        }
    }
    if !args.json {
        let header = [
            "kv",
            "policy",
            "history",
            "rows read",
            "computed, whole / view",
            "TTFT whole, ms p50/p90",
            "on the view",
            "ratio",
            "between tokens whole, ms",
            "on the view",
            "ratio",
        ];
        println!(
            "a message of {} tokens behind {} cached ones; {} turns of each kind, in turns\n\n{}",
            args.message_tokens,
            args.context,
            args.repetitions,
            table::render(&header, &lines)
        );
    }
    Ok(())
}

impl Args {
    fn positions(&self) -> usize {
        self.context + self.message_tokens + self.output_tokens + PROBE_ROOM
    }
}

/// Times of the turns of one kind.
#[derive(Default)]
struct Times {
    first_ms: Vec<f64>,
    between_ms: Vec<f64>,
    /// Most prompt tokens that a turn computed.
    computed: usize,
}

struct Measured {
    whole: Times,
    view: Times,
    /// Rows of history, and those of them that a turn on a view read.
    history: usize,
    kept: usize,
}

fn measure(args: &Args, model: &OpenModel, kv: KvFormat, eviction: Eviction) -> Result<Measured> {
    let cache = model.cache(kv, &args.cache)?;
    let backend = args.model.backend()?;
    if !args.json {
        eprintln!("{kv}: {}", backend.describe());
    }
    // Branches of the conversation and its views lie beside it.
    let runner = cache.runner(model, backend, &args.cache, args.positions(), 8, |_| {})?;
    let vocab = runner.config().vocab_size;
    let embeddings = InputEmbeddings::new(model.weights.clone())?;
    let post = PostSetting { probe: probe(&model.text()?)?, embeddings, episodes: EpisodeOptions::default() };
    let options = EngineOptions { post: Some(post), ..EngineOptions::new(&model.name) };
    let engine = Engine::start(runner, options).context("the engine thread could not start")?;
    let history = random_tokens(args.context, vocab, 1);
    let on_view = |turn| KvRequest {
        budget: Some(args.budget),
        evict: Some(eviction),
        turn: Some(turn),
        ..KvRequest::default()
    };
    let mut asked = 0;
    let mut ask = |view: bool| -> Result<Answer> {
        asked += 1;
        let question = random_tokens(args.message_tokens, vocab, asked + 1);
        let utterances = (0..args.context).step_by(UTTERANCE);
        let utterances = utterances.map(|at| at..(at + UTTERANCE).min(args.context)).collect();
        let prompt = [&history[..], &question].concat();
        let turn = Turn { start: args.context, utterances, question };
        let kv = if view { on_view(turn) } else { KvRequest::default() };
        let answered = super::ask::ask(&engine, RequestId(asked), prompt, args.output_tokens, kv)?;
        settle(&engine)?;
        Ok(answered)
    };
    // Views are made after the first turn.
    ask(true)?;
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let mut measured = Measured { whole: Times::default(), view: Times::default(), history: 0, kept: 0 };
    for repetition in 0..2 * args.repetitions {
        // Either kind comes first every other time.
        let view = (repetition + repetition / 2) % 2 == 1;
        let answered = ask(view)?;
        let times = if view { &mut measured.view } else { &mut measured.whole };
        times.first_ms.push(ms(answered.first_token()));
        times.between_ms.push(ms(answered.between_tokens()));
        times.computed = times.computed.max(args.context + args.message_tokens - answered.cached);
        if answered.cached + UTTERANCE < args.context {
            bail!(
                "only {} of {} tokens came from the cache: raise --kv-memory",
                answered.cached,
                args.context
            );
        }
        if !view {
            continue;
        }
        match answered.usage.kv {
            Some(kv) if matches!(kv.route, Some(KvRoute::View { .. })) => {
                (measured.history, measured.kept) = (kv.history, kv.kept);
            }
            _ => bail!(
                "no view was made: lower --budget or raise --context, or raise --kv-memory if views found no room"
            ),
        }
    }
    engine.shutdown();
    Ok(measured)
}

/// Waits until the work that a turn left in the background is done.
fn settle(engine: &EngineHandle) -> Result<()> {
    let begun = Instant::now();
    while engine.stats().view_jobs > 0 || engine.stats().running > 0 {
        if begun.elapsed() > PATIENCE {
            bail!("the views are not ready after {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn report(args: &Args, kv: KvFormat, eviction: Eviction, measured: &Measured) -> Result<Vec<String>> {
    let of = |values: &[f64]| Percentiles::of(values.to_vec()).context("nothing was measured");
    let Measured { whole, view, history, kept } = measured;
    let (whole_first, view_first) = (of(&whole.first_ms)?, of(&view.first_ms)?);
    let (whole_between, view_between) = (of(&whole.between_ms)?, of(&view.between_ms)?);
    let (first, between) = (view_first.p50 / whole_first.p50, view_between.p50 / whole_between.p50);
    if args.json {
        println!(
            "{}",
            json!({"bench": "views", "kv": kv.to_string(), "policy": eviction.name(), "context": args.context,
                   "message_tokens": args.message_tokens, "repetitions": args.repetitions, "history": history,
                   "computed_whole": whole.computed, "computed_view": view.computed,
                   "rows": kept, "ttft_ms_whole_p50": whole_first.p50, "ttft_ms_whole_p90": whole_first.p90,
                   "ttft_ms_view_p50": view_first.p50, "ttft_ms_view_p90": view_first.p90, "ttft_ratio": first,
                   "inter_token_ms_whole_p50": whole_between.p50, "inter_token_ms_view_p50": view_between.p50,
                   "inter_token_ratio": between})
        );
    }
    let both = |p: Percentiles| format!("{:.2} / {:.2}", p.p50, p.p90);
    Ok(vec![
        kv.to_string(),
        eviction.to_string(),
        history.to_string(),
        kept.to_string(),
        format!("{} / {}", whole.computed, view.computed),
        both(whole_first),
        both(view_first),
        format!("{first:.2}"),
        format!("{:.2}", whole_between.p50),
        format!("{:.2}", view_between.p50),
        format!("{between:.2}"),
    ])
}
