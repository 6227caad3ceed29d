//! Many rude clients at once: they hang up, read slowly, send too much or nonsense. The server neither stalls nor
//! answers 5xx, and when they are gone its pages and its memory are back where they were.

use crate::server::{PATIENCE, Server, chat_body};
use serde_json::json;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CLIENTS: u64 = 64;

/// A small generator of test data.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below
    }
}

#[derive(Default)]
struct Tally {
    requests: AtomicU64,
    by_status: Mutex<std::collections::BTreeMap<String, u64>>,
    slowest: Mutex<Duration>,
}

impl Tally {
    fn note(&self, what: &str) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        *self.by_status.lock().unwrap().entry(what.to_owned()).or_default() += 1;
    }
}

/// What a client does with its connection.
enum Manner {
    ReadsAll,
    HangsUpAfter(usize),
    ReadsSlowly,
}

fn story(dice: &mut Dice) -> String {
    let town = dice.roll(12);
    let length = dice.roll(25) + 1;
    format!("The harbour of town {town} lay still in the morning. ").repeat(length)
}

/// A request and how it is read; the statuses that are right for it.
fn rude_request(dice: &mut Dice) -> (Vec<u8>, Manner, &'static [u16]) {
    let ask = |dice: &mut Dice, stream: bool, n: usize| {
        let (most, messages) = (dice.roll(30) + 1, json!([{"role": "user", "content": story(dice)}]));
        let fields = json!({"stream": stream, "max_tokens": most, "n": n, "ignore_eos": true, "messages": messages,
            "temperature": 0.7, "seed": dice.roll(9)});
        chat_body(&fields).to_string().into_bytes()
    };
    let fine: &[u16] = &[200, 429];
    match dice.roll(10) {
        0..3 => (ask(dice, false, 1), Manner::ReadsAll, fine),
        3..5 => (ask(dice, true, 1), Manner::ReadsAll, fine),
        5 => (ask(dice, true, 3), Manner::HangsUpAfter(dice.roll(3000)), fine),
        6 => (ask(dice, false, 2), Manner::HangsUpAfter(0), fine),
        7 => (ask(dice, true, 1), Manner::ReadsSlowly, fine),
        8 => (vec![b'x'; dice.roll(3 << 20) + (1 << 20) + 1], Manner::ReadsAll, &[413]),
        _ => match dice.roll(3) {
            0 => (b"{\"model\": 7".to_vec(), Manner::ReadsAll, &[400]),
            1 => {
                let long = json!({"messages": [{"role": "user", "content": "word ".repeat(5000)}]});
                (chat_body(&long).to_string().into_bytes(), Manner::ReadsAll, &[400])
            }
            _ => (chat_body(&json!({"n": -3})).to_string().into_bytes(), Manner::ReadsAll, &[400]),
        },
    }
}

/// Sends it and reads what the manner allows; the status, if it was read.
fn converse(address: &str, body: &[u8], manner: &Manner, dice: &mut Dice) -> std::io::Result<Option<u16>> {
    let mut stream = TcpStream::connect(address)?;
    // Sixty-three others are ahead of it on a machine that may be busy: the engine's steps tell a stall.
    stream.set_read_timeout(Some(5 * PATIENCE))?;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    // A refusal may come before all is sent.
    if let Err(error) = stream.write_all(body)
        && !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
    {
        return Err(error);
    }
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let most = match manner {
            Manner::ReadsAll => piece.len(),
            Manner::ReadsSlowly => {
                std::thread::sleep(Duration::from_millis(dice.roll(40) as u64));
                200
            }
            Manner::HangsUpAfter(bytes) if answer.len() >= *bytes => return Ok(None),
            Manner::HangsUpAfter(_) => 200,
        };
        match stream.read(&mut piece[..most]) {
            Ok(0) => break,
            Ok(read) => answer.extend_from_slice(&piece[..read]),
            // The server closes on a client that goes on sending what is refused already.
            Err(error) if error.kind() == ErrorKind::ConnectionReset && body.len() > 1 << 20 => break,
            Err(error) => return Err(error),
        }
    }
    if answer.is_empty() {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&answer);
    let status = text.split(' ').nth(1).and_then(|s| s.parse().ok());
    Ok(Some(status.unwrap_or_else(|| panic!("no HTTP answer: {text}"))))
}

fn storm(server: &Server, duration: Duration, seed: u64, tally: &Tally) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (stop, address) = (&stop, server.address.clone());
            scope.spawn(move || {
                let mut dice = Dice((seed + client + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                while !stop.load(Ordering::Relaxed) {
                    let (body, manner, allowed) = rude_request(&mut dice);
                    let begun = Instant::now();
                    match converse(&address, &body, &manner, &mut dice) {
                        Ok(Some(status)) => {
                            assert!(allowed.contains(&status), "{status} where {allowed:?} is right");
                            tally.note(&status.to_string());
                        }
                        Ok(None) => tally.note("hung up"),
                        Err(error) => panic!("a client was left without an answer: {error}"),
                    }
                    let mut slowest = tally.slowest.lock().unwrap();
                    *slowest = begun.elapsed().max(*slowest);
                }
            });
        }
        // The engine must get on the whole time.
        let begun = Instant::now();
        let mut steps = (server.metric("oscar_engine_steps_total"), Instant::now());
        while begun.elapsed() < duration {
            std::thread::sleep(Duration::from_millis(500));
            let now = server.metric("oscar_engine_steps_total");
            if now > steps.0 {
                steps = (now, Instant::now());
            }
            if steps.1.elapsed() > PATIENCE {
                stop.store(true, Ordering::Relaxed);
                panic!("the engine has stalled after {now} steps");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Waits until nothing runs, empties the cache, and says how much memory is resident.
fn settle(server: &Server) -> usize {
    let begun = Instant::now();
    while server.metric("oscar_num_requests_running") + server.metric("oscar_num_requests_waiting") > 0.0 {
        assert!(begun.elapsed() < 5 * PATIENCE, "requests of clients that have gone are still there");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(server.send("POST", "/flush_cache", None, None).status, 200);
    let metrics = server.get("/metrics").body;
    for line in metrics.lines().filter(|line| line.starts_with("oscar_kv_pages{")) {
        assert!(line.ends_with(" 0"), "a page is leaked: {line}");
    }
    server.resident_bytes()
}

fn soak(duration: Duration) {
    let server = Server::start_with(
        None,
        &[
            "--port",
            "0",
            "--context",
            "2048",
            "--kv-memory",
            "16M",
            "--max-body-bytes",
            "1M",
            "--threads",
            "2",
        ],
    );
    let tally = Tally::default();
    // The first part fills the page pool and every buffer once.
    storm(&server, duration / 4, 1, &tally);
    let before = settle(&server);
    storm(&server, duration * 3 / 4, 1000, &tally);
    let after = settle(&server);
    println!(
        "{} requests in {} s: {:?}; slowest {:.1} s; resident {} MB, then {} MB; {} preemptions, {} evicted, {} demoted tail pages",
        tally.requests.load(Ordering::Relaxed),
        duration.as_secs(),
        tally.by_status.lock().unwrap(),
        tally.slowest.lock().unwrap().as_secs_f64(),
        before >> 20,
        after >> 20,
        server.metric("oscar_num_preemptions_total"),
        server.metric("oscar_kv_evicted_pages_total"),
        server.metric("oscar_kv_demoted_tail_pages_total"),
    );
    assert!(after < before + before / 8 + (24 << 20), "memory grew from {before} to {after} bytes");
    assert_eq!(server.metric("oscar_engine_requests_failed_total"), 0.0);
    let answer = server.chat(&json!({}));
    assert_eq!(answer.status, 200, "{}", answer.body);
}

#[test]
fn rude_clients_leave_nothing_behind() {
    soak(Duration::from_secs(16));
}

/// `OSCAR_SOAK_SECONDS=600 cargo test --release -p oscar-cli --test suite -- --ignored --nocapture soak_for_minutes`
#[test]
#[ignore = "minutes"]
fn soak_for_minutes() {
    let seconds = std::env::var("OSCAR_SOAK_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(600);
    soak(Duration::from_secs(seconds));
}
