//! `oscar batch`: answers a file of requests in the format of OpenAI's batch API. A run that was
//! stopped continues where it stopped.

mod file;

use crate::commands::serve::LoadArgs;
use crate::progress::{self, note};
use crate::transfer::TransferArgs;
use anyhow::{Context, Result, bail};
use file::{Requests, Results};
use oscar_server::{InProcess, LogFormat, ServerConfig, StartProgress, init_logging};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::task::JoinSet;

#[derive(clap::Args)]
pub struct Args {
    /// Requests, one on each line: `custom_id`, `method`, `url` (/v1/chat/completions or
    /// /v1/completions) and `body`
    #[arg(value_name = "IN.jsonl")]
    input: PathBuf,
    /// Results; those of an earlier run are kept, and their requests are not sent again
    #[arg(value_name = "OUT.jsonl")]
    output: PathBuf,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: &Args) -> Result<()> {
    let _log = init_logging(LogFormat::Text, "warn")?;
    let (requests, count) = Requests::open(&args.input)?;
    let mut results = Results::open(&args.output)?;
    let mut loaded = args.load.load(&TransferArgs::default(), &StartProgress::default())?;
    // One more than runs at once, so that the engine never waits for the next request.
    let in_flight = args.load.max_batch + 1;
    loaded.options.max_queue = loaded.options.max_queue.max(in_flight);
    let mut config = ServerConfig { access_log: false, request_timeout: None, ..ServerConfig::default() };
    loaded.introduce(&mut config);
    let (engine, text, defaults) = loaded.start()?;
    let server = InProcess::new(config, engine, Arc::new(text), defaults);
    let bar = progress::bar("requests", count as u64);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (mut failed, mut earlier) = (0, 0);
    runtime.block_on(async {
        let mut running = JoinSet::new();
        for line in requests.lines() {
            let line = line?;
            if let Some(answered) = results.answered(&line.custom_id) {
                earlier += usize::from(answered);
                failed += usize::from(!answered);
                bar.inc(1);
                continue;
            }
            let (route, body) = match line.call() {
                Ok((route, body)) => (route.to_owned(), body.clone()),
                Err(refusal) => {
                    failed += 1;
                    results.write(&line.custom_id, Value::Null, refusal)?;
                    bar.inc(1);
                    continue;
                }
            };
            while running.len() >= in_flight {
                failed += usize::from(!store(running.join_next().await, &mut results)?);
                bar.inc(1);
            }
            let server = server.clone();
            running.spawn(async move { (line.custom_id.clone(), server.post(&route, &body).await) });
        }
        while let Some(done) = running.join_next().await {
            failed += usize::from(!store(Some(done), &mut results)?);
            bar.inc(1);
        }
        anyhow::Ok(())
    })?;
    results.finish()?;
    bar.finish_and_clear();
    note!("{count} requests: {} answered now, {earlier} before, {failed} failed", count - earlier - failed);
    if failed > 0 {
        bail!(
            "{failed} of {count} requests failed; to ask them again, remove their lines from {} and start again",
            args.output.display()
        );
    }
    Ok(())
}

type Answered = (String, oscar_server::InProcessAnswer);

/// Writes an answer; says whether it is a success.
fn store(done: Option<Result<Answered, tokio::task::JoinError>>, results: &mut Results) -> Result<bool> {
    let Some(done) = done else { return Ok(true) };
    let (custom_id, answer) = done.context("a request ended without an answer")?;
    if answer.status == 503 {
        bail!("the engine has stopped: {}; start again to continue", answer.body["error"]["message"]);
    }
    let response =
        json!({"status_code": answer.status, "request_id": answer.request_id, "body": answer.body});
    results.write(&custom_id, response, Value::Null)?;
    Ok(answer.status == 200)
}
