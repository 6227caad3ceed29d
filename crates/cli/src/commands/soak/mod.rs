//! `oscar soak`: hours of hostile load on a real server, with figures that say whether it left a trace.
//!
//! A server runs as a child process under memory pressure. Clients hold long chats that share and branch prefixes, cancel,
//! hang up, read slowly, send nonsense, and are killed; the server's log pipe is closed once. Every answer that is not
//! flagged `demoted_tail` is compared with that of a second server which keeps no prefixes.

mod child;
mod http;
mod scripts;
mod traffic;
mod watch;

use anyhow::{Context, Result, ensure};
use child::ServerProcess;
use scripts::Scripts;
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use traffic::{Client, Tally};
use watch::Watch;

#[derive(clap::Args)]
pub struct Args {
    /// How long clients are at work
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Clients at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    clients: usize,
    /// Conversations; each has 4 turns with 2 ways to go on
    #[arg(long, value_name = "N", default_value_t = 16)]
    conversations: usize,
    /// Seed of the clients' choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    /// One request to a server, sent by a client that will be killed
    #[arg(long, value_name = "ADDRESS", hide = true)]
    victim: Option<String>,
    /// Settings of the server, as for `oscar serve`
    #[arg(last = true, value_name = "SERVE FLAGS", default_values = ["--context=4096", "--kv-memory=24M"])]
    serve: Vec<String>,
}

/// Memory is compared with the first five minutes, or with the first quarter of a shorter run.
const SETTLING: Duration = Duration::from_secs(300);

pub fn run(args: &Args) -> Result<()> {
    if let Some(address) = &args.victim {
        return traffic::victim(address);
    }
    let mut server = ServerProcess::start(&args.serve)?;
    // The reference computes every prompt from its beginning. It has room for whatever the other can serve.
    let cold_flags =
        ["--no-prefix-cache".to_owned(), "--kv-memory=512M".to_owned(), "--log=error".to_owned()];
    let kept =
        args.serve.iter().filter(|flag| !flag.starts_with("--kv-memory") && !flag.starts_with("--log"));
    let cold = ServerProcess::start(&kept.cloned().chain(cold_flags).collect::<Vec<_>>())?;
    let scripts = Scripts::new(args.conversations.max(1), cold.address.clone());
    let tally = Tally::default();
    let stop = AtomicBool::new(false);
    let files_before = server.open_files()?;
    let duration = Duration::from_secs(args.seconds);
    let mut watch = Watch::new(SETTLING.min(duration / 4));
    std::thread::scope(|scope| -> Result<()> {
        for number in 0..args.clients {
            let client = Client::new(&server.address, args.seed, number as u64, &scripts, &tally, &stop);
            scope.spawn(move || client.run());
        }
        let watched = observe(&server, duration, &mut watch);
        stop.store(true, Ordering::Relaxed);
        watched
    })?;
    let end = watch::settle(&server.address)?;
    let files_after = settled_files(&server, files_before)?;
    let resident_idle = server.resident_bytes()?;
    watch.read_metrics(&server.address)?;
    let exit = server.end_while_streaming()?;
    drop(cold);

    let counts = tally.counts();
    let (first, last) = watch.resident();
    let figures = json!({
        "seconds": args.seconds, "clients": args.clients, "requests": counts.requests, "statuses": counts.statuses,
        "panics": watch.panics, "unexpected_5xx": counts.unexpected_5xx, "unexpected": counts.unexpected,
        "unanswered": counts.unanswered, "compared": counts.compared, "wrong": counts.wrong,
        "demoted_tail_answers": counts.demoted, "demoted_tail_changed": counts.demoted_changed,
        "victims_killed": counts.killed, "preemptions": watch.preemptions, "evicted_pages": watch.evicted,
        "log_lines_dropped": watch.log_dropped, "slowest_health_ms": watch.slowest_health.as_millis() as u64,
        "resident_first_mb": first >> 20, "resident_last_mb": last >> 20, "resident_idle_mb": resident_idle >> 20,
        "resident_mb": watch.history(), "files_before": files_before, "files_after": files_after,
        "pages_at_idle": end.pages, "requests_failed": end.failed, "exit_status": exit,
    });
    match args.json {
        true => println!("{figures}"),
        false => println!("{}", line(&figures)),
    }
    for example in &counts.examples {
        eprintln!("{example}");
    }
    ensure!(watch.panics == 0 && counts.unexpected_5xx == 0, "the server panicked or answered 5xx");
    ensure!(counts.wrong == 0, "{} answers differ from a cold run and are not flagged", counts.wrong);
    ensure!(counts.unexpected == 0 && counts.unanswered == 0, "requests got a wrong status or no answer");
    // A short run is still filling its buffers when it ends.
    let slack = if duration < 4 * SETTLING { 32 << 20 } else { 0 };
    ensure!(last <= first + first / 10 + slack, "memory grew from {first} to {last} bytes");
    ensure!(
        end.pages == 0 && end.failed == 0,
        "{} pages are held at idle, {} requests failed",
        end.pages,
        end.failed
    );
    ensure!(files_after <= files_before + 2, "{files_before} files were open before, {files_after} after");
    ensure!(exit == 0, "the server ended with status {exit}");
    Ok(())
}

/// Open files once those of the last connections are closed.
fn settled_files(server: &ServerProcess, before: usize) -> Result<usize> {
    for _ in 0..100 {
        if server.open_files()? <= before {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    server.open_files()
}

/// Watches the server while the clients are at work; a third of the way through its log pipe is closed.
fn observe(server: &ServerProcess, duration: Duration, watch: &mut Watch) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < duration {
        if begun.elapsed() > duration / 3 {
            server.close_log();
        }
        watch.health(&server.address).context("the server does not answer health checks")?;
        watch.sample(begun.elapsed(), server.resident_bytes()?);
        std::thread::sleep(Duration::from_millis(500).min(duration.saturating_sub(begun.elapsed())));
    }
    Ok(())
}

/// The figures in one line for people.
fn line(figures: &serde_json::Value) -> String {
    let text = |name: &str| figures[name].to_string();
    format!(
        "soak {} s, {} clients, {} requests: {} panics, {} unexpected 5xx, {} wrong of {} compared, {} demoted-tail \
         answers ({} changed), {} preemptions; resident {} MB at first, {} MB at last, {} MB idle; files {} -> {}; {} \
         pages at idle",
        text("seconds"),
        text("clients"),
        text("requests"),
        text("panics"),
        text("unexpected_5xx"),
        text("wrong"),
        text("compared"),
        text("demoted_tail_answers"),
        text("demoted_tail_changed"),
        text("preemptions"),
        text("resident_first_mb"),
        text("resident_last_mb"),
        text("resident_idle_mb"),
        text("files_before"),
        text("files_after"),
        text("pages_at_idle"),
    )
}
