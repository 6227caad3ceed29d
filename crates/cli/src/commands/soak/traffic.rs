//! The clients: each does one thing after another, drawn from the same mix.

use super::http::{self, Answer, Pace};
use super::scripts::{Said, Scripts, Turn};
use anyhow::{Context, Result, bail};
use oscar_codec::random::SplitMix64;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";

/// What all clients counted.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub requests: u64,
    pub statuses: BTreeMap<u16, u64>,
    pub unexpected: u64,
    pub unexpected_5xx: u64,
    pub unanswered: u64,
    /// Requests that a restart of the server cut off.
    pub interrupted: u64,
    pub compared: u64,
    /// Those of them that resumed a cached prefix.
    pub compared_hits: u64,
    pub wrong: u64,
    pub approximate: u64,
    pub approximate_changed: u64,
    pub killed: u64,
    /// Milliseconds between two pieces of a stream that is read as fast as it comes.
    pub gaps: Vec<f64>,
    /// The first few things that went wrong.
    pub examples: Vec<String>,
}

#[derive(Default)]
pub struct Tally(Mutex<Counts>);

impl Tally {
    pub fn counts(&self) -> Counts {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Counts {
    fn example(&mut self, text: String) {
        const MOST: usize = 10;
        if self.examples.len() < MOST {
            self.examples.push(text.chars().take(2000).collect());
        }
    }
}

/// The server that clients talk to, which may be another one after a restart.
pub struct Target(Mutex<Life>);

/// One server. The number is odd while it ends and the next one starts.
#[derive(Clone)]
struct Life {
    address: String,
    number: u64,
}

impl Target {
    pub fn new(address: String) -> Self {
        Self(Mutex::new(Life { address, number: 0 }))
    }

    /// From here on a request may fail.
    pub fn down(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).number += 1;
    }

    /// Another server is there.
    pub fn up(&self, address: String) {
        let mut life = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *life = Life { address, number: life.number + 1 };
    }

    fn now(&self) -> Life {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What all clients share.
pub struct Shared<'a> {
    pub target: &'a Target,
    pub scripts: &'a Scripts,
    pub tally: &'a Tally,
    pub stop: &'a AtomicBool,
    pub patience: Duration,
}

pub struct Client<'a> {
    address: String,
    life: u64,
    random: SplitMix64,
    name: String,
    requests: u64,
    patience: Duration,
    scripts: &'a Scripts,
    shared: &'a Shared<'a>,
}

impl<'a> Client<'a> {
    pub fn new(seed: u64, number: u64, shared: &'a Shared<'a>) -> Self {
        let life = shared.target.now();
        Self {
            address: life.address,
            life: life.number,
            random: SplitMix64::new(seed.wrapping_mul(1 << 20).wrapping_add(number)),
            name: format!("soak-{number}"),
            requests: 0,
            patience: shared.patience,
            scripts: shared.scripts,
            shared,
        }
    }

    pub fn run(mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            let life = self.shared.target.now();
            if life.number % 2 == 1 {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
            (self.address, self.life) = (life.address, life.number);
            if let Err(error) = self.act() {
                let was_cut_off = self.was_cut_off();
                self.note(|counts| match was_cut_off {
                    true => counts.interrupted += 1,
                    false => {
                        counts.unanswered += 1;
                        counts.example(format!("{error:#}"));
                    }
                });
            }
        }
    }

    /// The server ended, or was told to, since this request began.
    fn was_cut_off(&self) -> bool {
        self.shared.target.now().number != self.life
    }

    fn note(&self, change: impl FnOnce(&mut Counts)) {
        self.shared.tally.note(change);
    }

    /// Counts an answer, which must have one of the right statuses unless a restart came between.
    fn status(&self, what: &str, answer: &Answer, right: &[u16]) {
        let is_wrong = answer.status != 0 && !right.contains(&answer.status);
        let was_cut_off = is_wrong && self.was_cut_off();
        self.note(|counts| {
            counts.requests += 1;
            *counts.statuses.entry(answer.status).or_default() += 1;
            if was_cut_off {
                counts.interrupted += 1;
            } else if is_wrong {
                counts.unexpected += 1;
                counts.unexpected_5xx += u64::from(answer.status >= 500);
                counts.example(format!("{what}: {} instead of {right:?}: {}", answer.status, answer.body));
            }
        });
    }

    fn act(&mut self) -> Result<()> {
        match self.random.below(100) {
            0..45 => self.ask(false, Pace::Fast),
            45..63 => self.ask(true, Pace::Fast),
            63..68 => self.ask(true, Pace::Slow),
            68..76 => {
                let bytes = self.random.below(4000);
                self.ask(true, Pace::Leave(bytes))
            }
            76..80 => self.ask(false, Pace::Leave(0)),
            80..84 => self.cancel(),
            84..88 => self.sampled(),
            88..96 => self.nonsense(),
            96..98 => self.silence(),
            98 => self.victim(),
            _ => self.look(),
        }
    }

    fn next_name(&mut self) -> String {
        self.requests += 1;
        format!("{}-{}", self.name, self.requests)
    }

    /// One turn of a conversation, compared with the cold answer if it is read to its end.
    fn ask(&mut self, stream: bool, pace: Pace) -> Result<()> {
        let turn = self.scripts.draw(&mut self.random);
        let mut body = self.scripts.request(&turn)?;
        body["stream"] = json!(stream);
        body["stream_options"] = json!({"include_usage": true});
        // A prefix that nobody else has keeps its tail until it is used: these answers are exact.
        if self.random.below(5) < 2 {
            body["cache_salt"] = json!(self.next_name());
        }
        let mut connection = http::send(&self.address, CHAT, &body.to_string(), &[])?;
        connection.set_read_timeout(Some(self.patience))?;
        let answer = http::read(&mut connection, pace)?;
        self.status("chat", &answer, &[200, 429]);
        match answer.status {
            200 if stream => {
                if pace == Pace::Fast {
                    self.note(|counts| counts.gaps.extend(&answer.gaps));
                }
                self.compare_stream(&turn, &answer.body)
            }
            200 => {
                let answer: Value = serde_json::from_str(&answer.body)?;
                let said = Said::of_answer(&answer).context("an answer without a choice")?;
                self.compare(&turn, &said, &answer["usage"])
            }
            429 => {
                std::thread::sleep(Duration::from_millis(200));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn compare_stream(&self, turn: &Turn, body: &str) -> Result<()> {
        let mut data: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        if data.pop() != Some("[DONE]") {
            bail!("a stream without its end: {body:.200}");
        }
        let chunks =
            data.iter().map(|chunk| serde_json::from_str(chunk)).collect::<Result<Vec<Value>, _>>()?;
        let usage = chunks.last().map(|chunk| chunk["usage"].clone()).unwrap_or_default();
        let said = Said::of_stream(&chunks).context("a stream without an end of its choice")?;
        self.compare(turn, &said, &usage)
    }

    fn compare(&self, turn: &Turn, said: &Said, usage: &Value) -> Result<()> {
        let cold = self.scripts.cold(turn)?;
        let is_approximate = usage["prompt_tokens_details"]["approximate"] == true;
        let agrees = said.agrees(&cold);
        if !agrees && said.finish == "abort" && self.was_cut_off() {
            self.note(|counts| counts.interrupted += 1);
            return Ok(());
        }
        let is_hit = usage["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0);
        self.note(|counts| match (is_approximate, agrees) {
            (true, _) => {
                counts.approximate += 1;
                counts.approximate_changed += u64::from(!agrees);
            }
            (false, true) => {
                counts.compared += 1;
                counts.compared_hits += u64::from(is_hit);
            }
            (false, false) => {
                counts.compared += 1;
                counts.compared_hits += u64::from(is_hit);
                counts.wrong += 1;
                counts.example(format!("{turn:?} {usage}: {said:?} instead of {cold:?}"));
            }
        });
        Ok(())
    }

    /// A request that is aborted from another connection while it runs.
    fn cancel(&mut self) -> Result<()> {
        let name = self.next_name();
        let turn = self.scripts.draw(&mut self.random);
        let mut body = self.scripts.request(&turn)?;
        body["max_tokens"] = json!(400);
        body["ignore_eos"] = json!(true);
        let mut connection = http::send(&self.address, CHAT, &body.to_string(), &[("x-request-id", &name)])?;
        connection.set_read_timeout(Some(self.patience))?;
        std::thread::sleep(Duration::from_millis(self.random.below(1500) as u64));
        let abort = json!({"rid": name}).to_string();
        let aborted = http::call(&self.address, "/abort_request", &abort, &[], self.patience)?;
        self.status("abort", &aborted, &[200]);
        self.status("aborted", &http::read(&mut connection, Pace::Fast)?, &[200, 429]);
        Ok(())
    }

    /// Several choices, drawn at random: branches that nobody else takes.
    fn sampled(&mut self) -> Result<()> {
        let turn = self.scripts.draw(&mut self.random);
        let mut body = self.scripts.request(&turn)?;
        body["n"] = json!(3);
        body["temperature"] = json!(0.9);
        body["max_tokens"] = json!(40);
        body["cache_salt"] = json!(format!("salt-{}", self.random.below(3)));
        let answer = http::call(&self.address, CHAT, &body.to_string(), &[], self.patience)?;
        self.status("sampled", &answer, &[200, 429]);
        Ok(())
    }

    /// Requests that must be refused, and at little cost.
    fn nonsense(&mut self) -> Result<()> {
        let good = r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}"#;
        let digits = || "7".repeat(900_000);
        let (path, body, headers, right): (&str, String, &[(&str, &str)], &[u16]) = match self.random.below(9)
        {
            0 => (CHAT, "{\"model\": 7".into(), &[], &[400]),
            1 => (CHAT, "x".repeat(40 << 20), &[], &[413]),
            2 => ("/v1/completions", json!({"prompt": digits()}).to_string(), &[], &[400]),
            3 => ("/tokenize", json!({"prompt": digits(), "with_pieces": true}).to_string(), &[], &[400]),
            4 => {
                let prompt: Vec<usize> = (0..3000).map(|token| 3 + token % 3000).collect();
                let body = json!({"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 20, "n": 128});
                ("/v1/completions", body.to_string(), &[], &[400])
            }
            5 => (CHAT, good.into(), &[("Content-Type", "text/plain")], &[415]),
            6 => (CHAT, good.into(), &[("Origin", "https://evil.example")], &[403]),
            7 => (CHAT, good.into(), &[("Host", "attacker.example")], &[421]),
            _ => (CHAT, json!({"messages": [], "n": -3}).to_string(), &[], &[400]),
        };
        let answer = http::call(&self.address, path, &body, headers, self.patience)?;
        // Large bodies of many clients at once may be too many.
        let right = if body.len() > 64 << 10 { [right, &[429]].concat() } else { right.to_vec() };
        self.status("nonsense", &answer, &right);
        Ok(())
    }

    /// A connection that says nothing, or not enough, for a while.
    fn silence(&mut self) -> Result<()> {
        use std::io::Write;
        let mut connection = std::net::TcpStream::connect(&self.address)?;
        if self.random.below(2) == 0 {
            connection.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")?;
        }
        std::thread::sleep(Duration::from_millis(self.random.below(3000) as u64));
        self.note(|counts| counts.requests += 1);
        Ok(())
    }

    /// A client process that is killed while it waits for its answer.
    fn victim(&mut self) -> Result<()> {
        let program = std::env::current_exe()?;
        let mut command = Command::new(program);
        command.args(["soak", "--victim", &self.address]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.stdin(Stdio::null()).spawn()?;
        std::thread::sleep(Duration::from_millis(self.random.below(2000) as u64));
        child.kill()?;
        child.wait()?;
        self.note(|counts| counts.killed += 1);
        Ok(())
    }

    fn look(&mut self) -> Result<()> {
        for path in ["/health", "/metrics", "/internal/state", "/v1/models"] {
            self.status(path, &http::call(&self.address, path, "", &[], self.patience)?, &[200]);
        }
        Ok(())
    }
}

/// What a victim does until it is killed.
pub fn victim(address: &str) -> Result<()> {
    let body = json!({"messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 1500,
        "ignore_eos": true, "stream": true});
    let mut connection = http::send(address, CHAT, &body.to_string(), &[])?;
    http::read(&mut connection, Pace::Slow)?;
    Ok(())
}
