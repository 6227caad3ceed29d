//! `oscar run`: one answer, a chat file, or a conversation in the terminal.

use crate::device::AnyBackend;
use crate::options::{CacheArgs, ModelArgs, OpenModel};
use crate::parallel::ParallelArgs;
use crate::progress;
use crate::served::Served;
use anyhow::{Context, Result, bail};
use oscar_backend::Backend;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, RotationKind, Windows};
use oscar_engine::{Sampler, SamplingParams};
use oscar_runner::{Logits, Runner, Sequence, StepOutput, StepRequest};
use oscar_server::with_tools_in_text;
use oscar_text::{
    ChatInput, ChatTemplate, Dialect, ModelText, ReasoningTags, ReplyEvent, ReplyOptions, ReplyParser,
    StopMatcher, StreamDecoder, ToolSchemas,
};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    parallel: ParallelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// KV-cache format; `oscar doctor` lists them. If absent, oscar with measured widths where the
    /// model has them, else oscar4; bf16 for latent attention (MLA)
    #[arg(long, value_name = "FORMAT")]
    kv: Option<KvFormat>,
    /// The prompt, or @FILE to read it from a file; without --prompt and --chat a conversation
    /// starts
    #[arg(long, value_name = "TEXT|@FILE", conflicts_with = "chat")]
    prompt: Option<String>,
    /// A JSON file with messages: a list, or an object with `messages` and optionally `tools`
    #[arg(long, value_name = "FILE")]
    chat: Option<String>,
    /// A JSON file with tools, as the OpenAI API has them. Calls are listed after the answer; in a conversation your
    /// next line is the result of the call
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    tools: Option<String>,
    /// Continue the prompt as raw text, without the chat template
    #[arg(long, requires = "prompt")]
    raw: bool,
    /// Longest sequence in tokens; the model's own limit if absent
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 512)]
    max_tokens: usize,
    /// Sampling temperature; 0 picks the most likely token; the model's recommendation if absent
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep the smallest set of most likely tokens with at least this total probability
    #[arg(long, value_name = "X")]
    top_p: Option<f32>,
    /// Keep the k most likely tokens; 0 keeps all
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Drop tokens whose probability is below this share of the most likely token's
    #[arg(long, value_name = "X")]
    min_p: Option<f32>,
    /// Seed of the sampler
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Stop when this text appears (may be given several times)
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print one JSON object with the answer and its numbers
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let model = args.model.open()?;
    let text = model.text()?;
    let generation = model.generation()?;
    let mut params = SamplingParams { seed: args.seed, ..OpenModel::default_sampling(&generation) };
    params.temperature = args.temperature.unwrap_or(params.temperature);
    params.top_k = args.top_k.unwrap_or(params.top_k);
    params.top_p = args.top_p.unwrap_or(params.top_p);
    params.min_p = args.min_p.unwrap_or(params.min_p);
    let sampler = Sampler::new(params)?;
    let context = args.context.unwrap_or(model.config.max_position_embeddings);
    let found = match args.kv.map(KvFormat::rotation) {
        None | Some(RotationKind::Calibrated) => model.found_rotations(&args.cache)?,
        Some(_) => None,
    };
    let mut served = Served::choose(args.kv, found.as_ref(), model.config.latent.is_some());
    let cache = model.cache_of(served.format, &args.cache, found.as_ref())?;
    served.warn(&cache.layout);
    let bar = progress::bar("loading", model.config.layers as u64);
    let ranks = args.parallel.ranks(&args.model, &model.config)?;
    let backend = ranks.lead().clone();
    eprintln!("{}: {}", model.name, backend.describe());
    if let Some(weights) = model.describe_weights(&cache, &backend) {
        eprintln!("{weights}");
    }
    eprintln!("cache: {}; rotations: {}", cache.layout.describe(), cache.rotation_origin);
    model.config.describe_delta().iter().for_each(|note| eprintln!("{note}"));
    eprintln!("attention: {}", backend.attention(&cache.layout).description);
    served.note.iter().for_each(|note| eprintln!("{note}"));
    served.advice.iter().for_each(|advice| eprintln!("{advice}"));
    let runner =
        cache.runner(&model, ranks, &args.cache, context, 1, |layers| bar.set_position(layers as u64))?;
    bar.finish_and_clear();
    let tools = args.tools.as_ref().map(|path| read_tools(path)).transpose()?;
    let mut session = Session {
        args,
        tools,
        runner,
        text,
        sampler,
        stop_tokens: generation.stop_token_ids(&model.config).to_vec(),
        sequence: Sequence::new(),
        stored: Vec::new(),
    };

    match (&args.prompt, &args.chat) {
        (Some(prompt), _) => {
            let prompt = match prompt.strip_prefix('@') {
                Some(path) => std::fs::read_to_string(path).with_context(|| format!("--prompt @{path}"))?,
                None => prompt.clone(),
            };
            let tokens = if args.raw {
                session.text.tokenizer.encode(&prompt, true)?
            } else {
                session.render(&[json!({"role": "user", "content": prompt})], None)?
            };
            let outcome = session.answer(&tokens)?;
            session.report(&outcome);
        }
        (None, Some(path)) => {
            let bytes = std::fs::read(path).with_context(|| format!("--chat {path}"))?;
            let chat: Value =
                serde_json::from_slice(&bytes).with_context(|| format!("--chat {path} is not JSON"))?;
            let messages = if chat.is_array() { &chat } else { &chat["messages"] };
            let Some(messages) = messages.as_array().filter(|messages| !messages.is_empty()) else {
                bail!("--chat {path}: expected a list of messages, or an object with `messages`");
            };
            let tokens = session.render(messages, chat.get("tools"))?;
            let outcome = session.answer(&tokens)?;
            session.report(&outcome);
        }
        (None, None) => session.converse()?,
    }
    Ok(())
}

struct Session<'a> {
    args: &'a Args,
    /// As the OpenAI API has them.
    tools: Option<Value>,
    runner: Runner<AnyBackend>,
    text: ModelText,
    sampler: Sampler,
    stop_tokens: Vec<u32>,
    sequence: Sequence,
    /// Tokens the sequence holds.
    stored: Vec<u32>,
}

/// The text of an answer under way.
struct Shown {
    /// All that the model wrote.
    written: String,
    /// What of it is shown: the same, or without reasoning and calls where they stand in channels.
    text: String,
    channels: Option<ReplyParser>,
}

impl Shown {
    /// Takes the next piece and returns what of it is shown.
    fn take(&mut self, piece: &str, last: bool) -> String {
        self.written.push_str(piece);
        let shown = match &mut self.channels {
            None => piece.to_owned(),
            Some(channels) => {
                let mut events = channels.push(piece);
                events.extend(last.then(|| channels.finish()).into_iter().flatten());
                let text = |event| if let ReplyEvent::Text(text) = event { text } else { String::new() };
                events.into_iter().map(text).collect()
            }
        };
        self.text.push_str(&shown);
        shown
    }
}

struct Outcome {
    text: String,
    /// Name and arguments of the calls in the text.
    calls: Vec<(String, String)>,
    prompt_tokens: usize,
    reused_tokens: usize,
    generated: usize,
    finish: &'static str,
    prefill: Duration,
    decode: Duration,
}

impl Session<'_> {
    /// The prompt of a conversation. `tools` of a chat file come before those of `--tools`.
    fn render(&self, messages: &[Value], tools: Option<&Value>) -> Result<Vec<u32>> {
        let Some(template) = &self.text.chat else {
            bail!("this model has no chat template: use --raw to continue plain text");
        };
        let (tools, mut messages) = (tools.or(self.tools.as_ref()), messages.to_vec());
        let prints_tools = template.prints_tools();
        if tools.is_some() && !prints_tools {
            with_tools_in_text(&mut messages, tools);
        }
        let messages = Value::Array(messages);
        let tools = tools.filter(|_| prints_tools);
        let prompt = template.render(&ChatInput { tools, ..ChatInput::new(&messages) })?;
        // The template writes special tokens itself.
        Ok(self.text.tokenizer.encode(&prompt, false)?)
    }

    /// The dialect in which answers are read: that of the tools, or of the channels that all answers
    /// of the model have.
    fn dialect(&self) -> Option<Dialect> {
        if self.args.raw {
            return None;
        }
        let own = self.text.chat.as_ref().and_then(ChatTemplate::dialect);
        match self.tools {
            Some(_) => Some(own.unwrap_or(Dialect::Hermes)),
            None => own.filter(|dialect| dialect.has_channels()),
        }
    }

    /// A reader of an answer.
    fn reader(&self, dialect: Dialect) -> ReplyParser {
        let tools = self.tools.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let tags = ReasoningTags { open: String::new(), close: String::new() };
        let options = ReplyOptions {
            // Channels tell reasoning apart without tags.
            reasoning: dialect.has_channels().then_some(tags),
            dialect: Some(dialect),
            tools: Arc::new(ToolSchemas::from_openai(tools)),
        };
        ReplyParser::new(&options, if dialect.has_channels() { "<|start|>assistant" } else { "" })
    }

    /// The calls in an answer, if there are tools.
    fn calls(&self, text: &str) -> Vec<(String, String)> {
        let Some(dialect) = self.dialect().filter(|_| self.tools.is_some()) else { return Vec::new() };
        let mut parser = self.reader(dialect);
        let mut events = parser.push(text);
        events.extend(parser.finish());
        let mut calls: Vec<(String, String)> = Vec::new();
        for event in events {
            match event {
                ReplyEvent::CallStarted { name, .. } => calls.push((name, String::new())),
                ReplyEvent::Arguments { delta, .. } => {
                    calls.last_mut().into_iter().for_each(|call| call.1 += &delta);
                }
                // It is among the text that was printed.
                ReplyEvent::CallBroken { .. } => drop(calls.pop()),
                ReplyEvent::Text(_) | ReplyEvent::Reasoning(_) | ReplyEvent::CallFinished { .. } => {}
            }
        }
        calls
    }

    /// Generates after `prompt`, streaming to standard output unless JSON was asked for.
    fn answer(&mut self, prompt: &[u32]) -> Result<Outcome> {
        if prompt.is_empty() {
            bail!("the prompt has no tokens: give some text");
        }
        // Tokens that the cache already holds are not computed again; at least one token must be.
        let reusable = prompt.len() > self.stored.len() && prompt.starts_with(&self.stored);
        if !reusable {
            self.sequence = Sequence::new();
            self.stored.clear();
        }
        let reused_tokens = self.stored.len();
        let fresh = &prompt[reused_tokens..];
        let mut step = StepOutput::default();
        let started = Instant::now();
        let bar = progress::bar("reading the prompt", fresh.len() as u64);
        self.runner.prefill(&mut self.sequence, fresh, &mut step, |done| bar.set_position(done as u64))?;
        bar.finish_and_clear();
        self.stored.extend_from_slice(fresh);
        let prefill = started.elapsed();

        let mut sampler = self.sampler.for_prompt(prompt);
        let pick = sampler.pick();
        let dialect = self.dialect();
        let markup = dialect.map_or(&[][..], Dialect::special_tokens);
        let mut decoder = StreamDecoder::new(&self.text.tokenizer, true).keeping(markup);
        let mut stops = StopMatcher::new(self.args.stop.clone(), false)?;
        let channels = dialect.filter(|dialect| dialect.has_channels()).map(|dialect| self.reader(dialect));
        let mut shown = Shown { written: String::new(), text: String::new(), channels };
        let (mut generated, mut finish) = (0, "length");
        let room = self.runner.context().saturating_sub(prompt.len());
        let started = Instant::now();
        while generated < self.args.max_tokens.min(room) {
            let token = match step.picked.first() {
                Some(list) => sampler.sample_among(list),
                None => sampler.sample(&step.logits),
            };
            generated += 1;
            if self.stop_tokens.contains(&token) {
                finish = "stop";
                break;
            }
            let output = stops.push(&decoder.push(token)?);
            self.emit(&output.emit, false, &mut shown)?;
            if output.stopped.is_some() {
                finish = "stop";
                break;
            }
            if generated < self.args.max_tokens.min(room) {
                let wanted = pick.map_or(Logits::Last, Logits::Pick);
                let request = StepRequest { sequence: &mut self.sequence, tokens: &[token], logits: wanted };
                self.runner.step(&mut [request], &mut step)?;
                self.stored.push(token);
            }
        }
        let decode = started.elapsed();
        let tail = stops.push(&decoder.flush()?).emit + &stops.flush();
        self.emit(&tail, true, &mut shown)?;
        let calls = self.calls(&shown.written);
        Ok(Outcome {
            text: shown.text,
            calls,
            prompt_tokens: prompt.len(),
            reused_tokens,
            generated,
            finish,
            prefill,
            decode,
        })
    }

    fn emit(&self, piece: &str, last: bool, shown: &mut Shown) -> Result<()> {
        let piece = shown.take(piece, last);
        if !self.args.json {
            let mut out = std::io::stdout().lock();
            out.write_all(piece.as_bytes()).and_then(|()| out.flush()).context("writing the answer")?;
        }
        Ok(())
    }

    fn report(&self, o: &Outcome) {
        let layout = self.runner.layout();
        let bytes = self.runner.usage().bytes;
        let tokens = self.sequence.len();
        let rate = |n: usize, d: Duration| n as f64 / d.as_secs_f64().max(1e-9);
        let (read, steps) = (o.prompt_tokens - o.reused_tokens, o.generated.saturating_sub(1));
        let bits = bytes as f64 * 8.0 / layout.elements(tokens.max(1)) as f64;
        let bf16 = bf16_bytes(layout, tokens);
        if self.args.json {
            println!(
                "{}",
                json!({
                    "text": o.text, "tool_calls": listed(&o.calls), "finish_reason": o.finish, "kv": layout.format().to_string(),
                    "prompt_tokens": o.prompt_tokens, "generated_tokens": o.generated,
                    "prefill_tokens_per_s": rate(read, o.prefill), "tokens_per_s": rate(steps, o.decode),
                    "cache_bytes": bytes, "bf16_cache_bytes": bf16, "bits": bits,
                })
            );
            return;
        }
        println!();
        for (name, arguments) in &o.calls {
            eprintln!("[call of {name} with {arguments}]");
        }
        eprintln!(
            "\n[prompt {} tokens{}, {:.0} tokens/s · generated {} tokens, {:.1} tokens/s · cache {} for {tokens} tokens, \
             {bits:.2} bits an element; BF16 would take {}]",
            o.prompt_tokens,
            if o.reused_tokens > 0 {
                format!(" ({} from the cache)", o.reused_tokens)
            } else {
                String::new()
            },
            rate(read, o.prefill),
            o.generated,
            rate(steps, o.decode),
            progress::bytes(bytes),
            progress::bytes(bf16),
        );
    }

    fn converse(&mut self) -> Result<()> {
        if self.args.json {
            bail!("--json needs --prompt or --chat");
        }
        if self.text.chat.is_none() {
            bail!("this model has no chat template: use --raw with --prompt to continue plain text");
        }
        let interactive = std::io::stdin().is_terminal();
        if interactive {
            eprintln!("Write a message and press Enter; an empty line or Ctrl-D ends the conversation.");
        }
        let mut messages: Vec<Value> = Vec::new();
        let mut called: Option<String> = None;
        loop {
            if interactive {
                match &called {
                    Some(name) => eprint!("\nresult of {name}> "),
                    None => eprint!("\n> "),
                }
            }
            let mut line = String::new();
            if std::io::stdin().lock().read_line(&mut line)? == 0 || line.trim().is_empty() {
                return Ok(());
            }
            let role = if called.is_some() { "tool" } else { "user" };
            messages.push(json!({"role": role, "content": line.trim_end()}));
            let tokens = self.render(&messages, None)?;
            let outcome = self.answer(&tokens)?;
            self.report(&outcome);
            called = outcome.calls.first().map(|(name, _)| name.clone());
            let mut message = json!({"role": "assistant", "content": outcome.text});
            if let Some((name, arguments)) = outcome.calls.first()
                && self.dialect().is_some_and(Dialect::has_channels)
            {
                let arguments = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
                message["tool_calls"] = json!([{"function": {"name": name, "arguments": arguments}}]);
            }
            messages.push(message);
        }
    }
}

/// Tools of a file: a list, or an object with `tools`.
fn read_tools(path: &str) -> Result<Value> {
    let bytes = std::fs::read(path).with_context(|| format!("--tools {path}"))?;
    let file: Value =
        serde_json::from_slice(&bytes).with_context(|| format!("--tools {path} is not JSON"))?;
    let tools = if file.is_array() { file } else { file["tools"].clone() };
    let is_tool = |tool: &Value| tool["function"]["name"].is_string();
    match tools.as_array() {
        Some(list) if !list.is_empty() && list.iter().all(is_tool) => Ok(tools),
        _ => bail!(
            "--tools {path}: expected a list of {{\"type\": \"function\", \"function\": {{\"name\": …}}}}, or an object with \
             `tools`"
        ),
    }
}

fn listed(calls: &[(String, String)]) -> Vec<Value> {
    calls.iter().map(|(name, arguments)| json!({"name": name, "arguments": arguments})).collect()
}

fn bf16_bytes(layout: &CacheLayout, tokens: usize) -> usize {
    let (layers, row, order) = (layout.layers(), layout.head_dim(), CodeLayout::CpuTile);
    let full = match layout.shares_rows() {
        true => CacheLayout::latent(KvFormat::Bf16, layers, row, order),
        false => CacheLayout::new(KvFormat::Bf16, layers, layout.kv_heads(), row, Windows::default(), order),
    };
    full.map_or(0, |l| l.with_sliding_of(layout).with_states(layout.state_bytes()).sequence_bytes(tokens))
}
