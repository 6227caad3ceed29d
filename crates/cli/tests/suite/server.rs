//! The real `oscar serve` on a socket of this machine, and the least of an HTTP client.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub const PATIENCE: Duration = Duration::from_secs(120);

/// A server of the embedded model; ends with the test.
pub struct Server {
    child: Child,
    pub address: String,
    /// What it said until it served.
    pub seen: String,
    /// Kept open, but not read: the server's log lines go nowhere.
    log: Option<BufReader<ChildStderr>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Answer {
    pub status: u16,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{}: {e}", self.body))
    }
}

impl Server {
    /// Starts on a free port and reads the address it prints.
    pub fn start(keys: Option<&str>) -> Self {
        Self::start_with(keys, &["--port", "0", "--context", "2048", "--threads", "1"])
    }

    pub fn start_with(keys: Option<&str>, flags: &[&str]) -> Self {
        Self::start_in(keys, flags, &[])
    }

    /// The same with further variables in the environment.
    pub fn start_in(keys: Option<&str>, flags: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oscar"));
        command.arg("serve").args(flags);
        if !flags.contains(&"--log") {
            command.args(["--log", "error"]);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .env_remove("OSCAR_API_KEYS")
            .env_remove("OSCAR_OPERATOR_KEYS")
            // The cache of the user who runs the tests is not theirs.
            .env("OSCAR_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"))
            .env("HF_HUB_OFFLINE", "1")
            .envs(variables.iter().copied());
        if let Some(keys) = keys {
            command.env("OSCAR_API_KEYS", keys);
        }
        let mut child = command.spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut seen = String::new();
        let address = loop {
            let begin = seen.len();
            assert!(log.read_line(&mut seen).unwrap() > 0, "the server ended before it served:\n{seen}");
            if let Some((_, rest)) = seen[begin..].split_once(" on http://") {
                break rest.split_whitespace().next().unwrap().to_owned();
            }
        };
        Self { child, address, seen, log: Some(log) }
    }

    /// A server that was started elsewhere.
    pub fn of(child: Child, address: String) -> Self {
        Self { child, address, seen: String::new(), log: None }
    }

    /// Closes the pipe that the log is written to.
    pub fn close_log(&mut self) {
        self.log = None;
    }

    /// One request on a connection of its own, which the server closes.
    pub fn open(&self, method: &str, path: &str, key: Option<&str>, body: Option<&Value>) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let body = body.map(Value::to_string).unwrap_or_default();
        let key = key.map(|k| format!("Authorization: Bearer {k}\r\n")).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{key}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).unwrap();
        stream
    }

    pub fn send(&self, method: &str, path: &str, key: Option<&str>, body: Option<&Value>) -> Answer {
        read_answer(self.open(method, path, key, body))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, None, None)
    }

    pub fn chat(&self, fields: &Value) -> Answer {
        self.send("POST", "/v1/chat/completions", None, Some(&chat_body(fields)))
    }

    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// A number of `/metrics`, without labels.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "the server did not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

pub fn chat_body(fields: &Value) -> Value {
    let mut body = json!({"model": "oscar-15m", "temperature": 0,
                          "messages": [{"role": "user", "content": "Who are you?"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

pub fn read_answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP answer: {text}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Answer { status, body: if chunked { unchunked(body) } else { body.to_owned() } }
}

/// The text of a chunked body, which must end with its empty chunk.
fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    loop {
        let chunk = body.split_once("\r\n").and_then(|(size, rest)| {
            let size = usize::from_str_radix(size, 16).ok()?;
            Some((rest.get(..size)?, rest.get(size + 2..)?))
        });
        let Some((chunk, rest)) = chunk else { panic!("cut off after {text:?}, with {body:?}") };
        if chunk.is_empty() {
            return text;
        }
        text.push_str(chunk);
        body = rest;
    }
}

/// What the `data:` lines of a stream carry.
pub fn stream_data(body: &str) -> Vec<&str> {
    body.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
}
