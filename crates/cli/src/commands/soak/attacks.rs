//! Requests that once took the server down, and connections that say nothing.
//!
//! Each attack is sent while health checks go on. The table says how it was answered, how long that took, how much memory
//! it took, and how long the slowest health check took. Then a normal client is timed alone and beside connections that
//! are slow or silent, in turns.

use super::child::ServerProcess;
use super::http;
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Connections of the second part.
const SLOW: usize = 200;

/// Turns of the second part, and requests in each.
const TURNS: usize = 12;
const REQUESTS: usize = 10;

/// An attack: requests sent at the same time.
struct Attack {
    name: &'static str,
    path: &'static str,
    body: String,
    times: usize,
}

pub fn run(serve: &[String], patience: Duration, as_json: bool) -> Result<()> {
    let server = ServerProcess::start(serve)?;
    normal(&server.address, patience)?;
    let mut rows = Vec::new();
    for attack in attacks() {
        rows.push(measure(&server, &attack, patience)?);
    }
    let (alone, beside) = beside_slow_connections(&server.address, patience)?;
    let figures = json!({"attacks": rows, "slow_connections": SLOW, "alone_ms": alone, "beside_ms": beside,
        "ratio": beside / alone});
    match as_json {
        true => println!("{figures}"),
        false => print(&figures),
    }
    for row in &rows {
        let status = row["status"].as_u64().unwrap_or(0);
        ensure!((400..500).contains(&status), "{}: answered {status}, not 4xx", row["attack"]);
    }
    Ok(())
}

fn print(figures: &Value) {
    println!("{:<42} {:>6} {:>9} {:>10} {:>10}", "attack", "status", "answer ms", "memory MB", "health ms");
    for row in figures["attacks"].as_array().into_iter().flatten() {
        let name = row["attack"].as_str().unwrap_or_default();
        let number = |key: &str| row[key].as_u64().unwrap_or_default();
        println!(
            "{name:<42} {:>6} {:>9} {:>10} {:>10}",
            number("status"),
            number("ms"),
            number("memory_mb"),
            number("health_ms")
        );
    }
    println!(
        "a normal client: {:.1} ms alone, {:.1} ms beside {SLOW} slow or silent connections, ratio {:.3} (medians)",
        figures["alone_ms"].as_f64().unwrap_or_default(),
        figures["beside_ms"].as_f64().unwrap_or_default(),
        figures["ratio"].as_f64().unwrap_or_default()
    );
}

fn attacks() -> Vec<Attack> {
    const MILLION: usize = 1_000_000;
    let text = |piece: &str, bytes: usize| format!(r#"{{"prompt":"{}"}}"#, piece.repeat(bytes / piece.len()));
    let chat = |content: &str, more: &str| {
        format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}],"max_tokens":1{more}}}"#)
    };
    let objects = format!("[{}0]", r#"{"a":0},"#.repeat(31 * MILLION / 8));
    let digits = "1234567890";
    let of = |name, path, body, times| Attack { name, path, body, times };
    vec![
        of(
            "29 KB: log-probabilities of 128 choices",
            "/v1/completions",
            json!({"prompt": vec![100; 5000], "max_tokens": 0, "prompt_logprobs": 20, "n": 128}).to_string(),
            1,
        ),
        of("31 MB of digits", "/v1/completions", text(digits, 31 * MILLION), 1),
        of("31 MB of one letter", "/v1/completions", text("a", 31 * MILLION), 1),
        of(
            "31 MB of digits in a chat",
            "/v1/chat/completions",
            chat(&digits.repeat(31 * MILLION / 10), ""),
            1,
        ),
        of("8 bodies of 1 MB of digits", "/v1/completions", text(digits, MILLION), 8),
        of(
            "2 MB to tokenize, with pieces",
            "/tokenize",
            text(digits, 2 * MILLION).replacen('{', r#"{"with_pieces":true,"#, 1),
            1,
        ),
        of(
            "31 MB of template variables",
            "/v1/chat/completions",
            chat("Hi", &format!(r#","chat_template_kwargs":{{"a":{objects}}}"#)),
            1,
        ),
        of("31 MB of tools", "/v1/chat/completions", chat("Hi", &format!(r#","tools":{objects}"#)), 1),
        of(
            "31 MB of token ids",
            "/v1/completions",
            format!(r#"{{"prompt":[{}1]}}"#, "1,".repeat(31 * MILLION / 2)),
            1,
        ),
        of("100,000 open brackets", "/v1/completions", "[".repeat(100_000), 1),
    ]
}

/// Sends one attack while health checks go on.
fn measure(server: &ServerProcess, attack: &Attack, patience: Duration) -> Result<Value> {
    let before = server.resident_bytes()?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| -> Result<(Duration, usize)> {
            let (mut slowest, mut most) = (Duration::ZERO, before);
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let answer = http::call(&server.address, "/health", "", &[], patience)?;
                ensure!(answer.status == 200, "/health answers {}", answer.status);
                slowest = slowest.max(begun.elapsed());
                most = most.max(server.resident_bytes()?);
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok((slowest, most))
        });
        let senders: Vec<_> = (0..attack.times)
            .map(|_| {
                scope.spawn(|| -> Result<(u16, Duration)> {
                    let begun = Instant::now();
                    let answer = http::call(&server.address, attack.path, &attack.body, &[], patience)?;
                    Ok((answer.status, begun.elapsed()))
                })
            })
            .collect();
        let outcomes: Vec<_> = senders.into_iter().map(|sender| joined(sender.join())).collect();
        stop.store(true, Ordering::Relaxed);
        let (health, most) = joined(watching.join())?;
        let (mut worst, mut slowest) = (0, Duration::ZERO);
        for outcome in outcomes {
            let (status, took) = outcome?;
            worst = worst.max(status);
            slowest = slowest.max(took);
        }
        Ok(json!({"attack": attack.name, "status": worst, "ms": slowest.as_millis() as u64,
            "memory_mb": (most - before) >> 20, "health_ms": health.as_millis() as u64}))
    })
}

fn joined<T>(outcome: std::thread::Result<Result<T>>) -> Result<T> {
    outcome.unwrap_or_else(|_| anyhow::bail!("a client panicked"))
}

/// Median milliseconds of a normal client: alone, and beside slow and silent connections.
fn beside_slow_connections(address: &str, patience: Duration) -> Result<(f64, f64)> {
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        for _ in 0..REQUESTS {
            alone.push(normal(address, patience)?);
        }
        let mut slow = Vec::new();
        for number in 0..SLOW {
            let mut stream = TcpStream::connect(address)?;
            let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n";
            match number % 3 {
                0 => stream.write_all(head.as_bytes())?,
                1 => stream.write_all(
                    format!("{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{")
                        .as_bytes(),
                )?,
                _ => {}
            }
            slow.push(stream);
        }
        for _ in 0..REQUESTS {
            beside.push(normal(address, patience)?);
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    Ok((median(alone), median(beside)))
}

/// Milliseconds of a short chat.
fn normal(address: &str, patience: Duration) -> Result<f64> {
    let body = json!({"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8});
    let begun = Instant::now();
    let answer = http::call(address, "/v1/chat/completions", &body.to_string(), &[], patience)?;
    ensure!(answer.status == 200, "a normal client is answered {}: {}", answer.status, answer.body);
    Ok(1000.0 * begun.elapsed().as_secs_f64())
}
