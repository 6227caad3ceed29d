//! `oscar soak`: hours of hostile load on a real server, with figures that say whether it left a trace.
//!
//! A server runs as a child process under memory pressure. Clients hold long chats that share and branch prefixes, cancel,
//! hang up, read slowly, send nonsense, and are killed. The server's log pipe is closed once, and the server itself may be
//! killed and started again. Every answer that is not flagged `approximate` is compared with that of a second server
//! which keeps no prefixes.

mod attacks;
mod child;
mod http;
mod isolation;
mod scripts;
mod traffic;
mod watch;

use anyhow::{Context, Result, ensure};
use child::ServerProcess;
use oscar_bench::Percentiles;
use scripts::Scripts;
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use traffic::{Client, Counts, Shared, Tally, Target};
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
    /// How long a client waits for an answer before it counts as unanswered. A busy machine needs more
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    patience: u64,
    /// Ends the server after this time and starts another one: in turn by SIGTERM and by SIGKILL, and every second
    /// server with --exact-hits
    #[arg(long, value_name = "SECONDS")]
    restart_every: Option<u64>,
    /// Restarts at most
    #[arg(long, value_name = "N", requires = "restart_every")]
    restarts: Option<usize>,
    /// Instead of load: rounds of two tenants under --isolate-keys. Prints how long own, foreign and unknown prefixes
    /// take, and fails if a foreign one is found
    #[arg(long, value_name = "ROUNDS", conflicts_with = "restart_every")]
    isolation: Option<usize>,
    /// Instead of load: requests that once took the server down, and 200 slow connections. Prints status, time, memory and
    /// the slowest health check of each
    #[arg(long, conflicts_with_all = ["restart_every", "isolation"])]
    attacks: bool,
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

/// Memory is compared with the first five minutes, or with the first quarter of a shorter life.
const SETTLING: Duration = Duration::from_secs(300);

pub fn run(args: &Args) -> Result<()> {
    if let Some(address) = &args.victim {
        return traffic::victim(address);
    }
    let patience = Duration::from_secs(args.patience);
    if let Some(rounds) = args.isolation {
        return isolation::run(&args.serve, rounds, args.seed, patience, args.json);
    }
    if args.attacks {
        return attacks::run(&args.serve, patience, args.json);
    }
    let mut server = ServerProcess::start(&args.serve)?;
    // The reference computes every prompt from its beginning. It has room for whatever the other can serve.
    let cold_flags =
        ["--no-prefix-cache".to_owned(), "--kv-memory=512M".to_owned(), "--log=error".to_owned()];
    let replaced = |flag: &str| ["--kv-memory", "--log", "--store"].iter().any(|name| flag.starts_with(name));
    let kept = args.serve.iter().filter(|flag| !replaced(flag));
    let cold = ServerProcess::start(&kept.cloned().chain(cold_flags).collect::<Vec<_>>())?;
    let scripts = Scripts::new(args.conversations.max(1), cold.address.clone());
    let tally = Tally::default();
    let stop = AtomicBool::new(false);
    let target = Target::new(server.address.clone());
    let shared = Shared { target: &target, scripts: &scripts, tally: &tally, stop: &stop, patience };
    let mut files_before = server.open_files()?;
    let mut watch = Watch::new(patience, SETTLING);
    let mut restarts = Restarts::default();
    std::thread::scope(|scope| -> Result<()> {
        for number in 0..args.clients {
            let client = Client::new(args.seed, number as u64, &shared);
            scope.spawn(move || client.run());
        }
        let watched = observe(args, &mut server, &target, &mut watch, &mut restarts);
        stop.store(true, Ordering::Relaxed);
        watched
    })?;
    if restarts.done > 0 {
        files_before = restarts.files;
    }
    let end = watch::settle(&server.address, patience)?;
    let files_after = settled_files(&server, files_before)?;
    let resident_idle = server.resident_bytes()?;
    watch.end_life(&server.address)?;
    let exit = server.end_while_streaming(patience)?;
    drop(cold);

    let mut counts = tally.counts();
    let gap = Percentiles::of(std::mem::take(&mut counts.gaps));
    let inter_token = gap.map(|p| json!({"p50": p.p50.round(), "p99": p.p99.round()}));
    let memory: Vec<_> = watch
        .lives()
        .iter()
        .map(|life| json!({"first_mb": life.first >> 20, "last_mb": life.last >> 20, "seconds": life.lived.as_secs()}))
        .collect();
    let figures = json!({
        "seconds": args.seconds, "clients": args.clients, "requests": counts.requests, "statuses": counts.statuses,
        "panics": watch.panics, "unexpected_5xx": counts.unexpected_5xx, "unexpected": counts.unexpected,
        "unanswered": counts.unanswered, "compared": counts.compared, "compared_hits": counts.compared_hits,
        "wrong": counts.wrong, "approximate_answers": counts.approximate,
        "approximate_changed": counts.approximate_changed, "victims_killed": counts.killed,
        "inter_token_ms": inter_token,
        "restarts": restarts.done, "interrupted": counts.interrupted,
        "slowest_restart_ms": restarts.slowest.as_millis() as u64, "preemptions": watch.preemptions,
        "evicted_pages": watch.evicted, "log_lines_dropped": watch.log_dropped,
        "slowest_health_ms": watch.slowest_health.as_millis() as u64, "resident": memory,
        "resident_idle_mb": resident_idle >> 20, "resident_mb": watch.history(), "files_before": files_before,
        "files_after": files_after, "pages_at_idle": end.pages, "requests_failed": end.failed,
        "exit_status": exit,
    });
    match args.json {
        true => println!("{figures}"),
        false => println!("{}", line(&figures)),
    }
    for example in &counts.examples {
        eprintln!("{example}");
    }
    judge(&counts, &watch)?;
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

/// Fails if the clients saw something wrong, or the memory of a server that lived long enough grew.
fn judge(counts: &Counts, watch: &Watch) -> Result<()> {
    ensure!(watch.panics == 0 && counts.unexpected_5xx == 0, "the server panicked or answered 5xx");
    ensure!(counts.wrong == 0, "{} answers differ from a cold run and are not flagged", counts.wrong);
    ensure!(counts.unexpected == 0 && counts.unanswered == 0, "requests got a wrong status or no answer");
    // A server that lived for less than twice the settling time was still filling its buffers.
    for life in watch.lives().iter().filter(|life| life.lived >= 2 * SETTLING) {
        let (first, last) = (life.first, life.last);
        ensure!(last <= first + first / 10, "memory grew from {first} to {last} bytes");
    }
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

/// What the restarts of the server brought.
#[derive(Default)]
struct Restarts {
    done: usize,
    /// From the end of one server to the first answer of the next.
    slowest: Duration,
    /// Files that the last server had open before clients came.
    files: usize,
}

/// Watches the server while the clients are at work. A third of the way through, its log pipe is closed.
fn observe(
    args: &Args,
    server: &mut ServerProcess,
    target: &Target,
    watch: &mut Watch,
    restarts: &mut Restarts,
) -> Result<()> {
    let duration = Duration::from_secs(args.seconds);
    let begun = Instant::now();
    let mut started = Instant::now();
    let mut log_closed = false;
    while begun.elapsed() < duration {
        if !log_closed && begun.elapsed() > duration / 3 {
            server.close_log();
            log_closed = true;
        }
        let is_due =
            args.restart_every.is_some_and(|seconds| started.elapsed() >= Duration::from_secs(seconds));
        if is_due && args.restarts.is_none_or(|most| restarts.done < most) {
            restart(args, server, target, watch, restarts).context("restarting the server")?;
            started = Instant::now();
        }
        watch.health(&server.address).context("the server does not answer health checks")?;
        watch.sample(begun.elapsed(), server.resident_bytes()?);
        std::thread::sleep(Duration::from_millis(500).min(duration.saturating_sub(begun.elapsed())));
    }
    Ok(())
}

fn restart(
    args: &Args,
    server: &mut ServerProcess,
    target: &Target,
    watch: &mut Watch,
    restarts: &mut Restarts,
) -> Result<()> {
    let patience = Duration::from_secs(args.patience);
    watch.end_life(&server.address)?;
    target.down();
    if restarts.done.is_multiple_of(2) {
        let status = server.terminate(patience)?;
        ensure!(status == 0, "the server ended with status {status} after SIGTERM");
    } else {
        server.kill()?;
    }
    let ended = Instant::now();
    restarts.done += 1;
    let exact = (restarts.done % 2 == 1).then(|| "--exact-hits".to_owned());
    *server = ServerProcess::start(&args.serve.iter().cloned().chain(exact).collect::<Vec<_>>())?;
    watch.health(&server.address)?;
    restarts.slowest = restarts.slowest.max(ended.elapsed());
    restarts.files = server.open_files()?;
    target.up(server.address.clone());
    Ok(())
}

/// The figures in one line for people.
fn line(figures: &serde_json::Value) -> String {
    let text = |name: &str| figures[name].to_string();
    let lives = figures["resident"].as_array().into_iter().flatten();
    let memory: Vec<String> = lives
        .map(|life| format!("{} -> {} MB in {} s", life["first_mb"], life["last_mb"], life["seconds"]))
        .collect();
    format!(
        "soak {} s, {} clients, {} requests: {} panics, {} unexpected 5xx, {} unanswered, {} wrong of {} compared ({} \
         prefix hits), {} approximate answers ({} changed), between tokens {} ms at the median and {} at the 99th percentile, {} preemptions, {} clients killed, {} restarts ({} requests \
         cut off); resident {}, {} MB idle; files {} -> {}; {} pages at idle",
        text("seconds"),
        text("clients"),
        text("requests"),
        text("panics"),
        text("unexpected_5xx"),
        text("unanswered"),
        text("wrong"),
        text("compared"),
        text("compared_hits"),
        text("approximate_answers"),
        text("approximate_changed"),
        figures["inter_token_ms"]["p50"],
        figures["inter_token_ms"]["p99"],
        text("preemptions"),
        text("victims_killed"),
        text("restarts"),
        text("interrupted"),
        memory.join(", "),
        text("resident_idle_mb"),
        text("files_before"),
        text("files_after"),
        text("pages_at_idle"),
    )
}
