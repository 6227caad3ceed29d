//! `oscar serve` as its clients see it: the real binary on a socket of this machine.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const KEY: &str = "a-key-for-tests";

/// A server of the embedded model; ends with the test.
struct Server {
    child: Child,
    address: String,
    /// Kept open: a closed pipe would fail the server's log lines.
    _log: BufReader<ChildStderr>,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Answer {
    status: u16,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{}: {e}", self.body))
    }
}

impl Server {
    /// Starts on a free port and reads the address it prints.
    fn start(keys: Option<&str>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oscar"));
        command.args(["serve", "--port", "0", "--threads", "1", "--context", "2048", "--log", "error"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .env_remove("OSCAR_API_KEYS");
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
        Self { child, address, _log: log }
    }

    /// One request on a connection of its own, which the server closes.
    fn open(&self, method: &str, path: &str, key: Option<&str>, body: Option<&Value>) -> TcpStream {
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

    fn send(&self, method: &str, path: &str, key: Option<&str>, body: Option<&Value>) -> Answer {
        read_answer(self.open(method, path, key, body))
    }

    fn get(&self, path: &str) -> Answer {
        self.send("GET", path, None, None)
    }

    fn chat(&self, fields: &Value) -> Answer {
        self.send("POST", "/v1/chat/completions", None, Some(&chat_body(fields)))
    }

    fn terminate(&self) {
        let sent = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "the server did not end after SIGTERM");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn chat_body(fields: &Value) -> Value {
    let mut body = json!({"model": "oscar-15m", "temperature": 0,
                          "messages": [{"role": "user", "content": "Who are you?"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn read_answer(mut stream: TcpStream) -> Answer {
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
        let (size, rest) = body.split_once("\r\n").expect("a chunk begins with its size");
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return text;
        }
        text.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
}

/// What the `data:` lines of a stream carry.
fn stream_data(body: &str) -> Vec<&str> {
    body.lines().filter_map(|line| line.strip_prefix("data: ")).collect()
}

#[test]
fn plain_http_gets_answers_streams_hits_and_numbers() {
    let server = Server::start(None);
    assert_eq!(server.get("/health").status, 200);

    let answer = server.chat(&json!({}));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let content = answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(content.starts_with("I am a small language model"), "{content}");

    let stream = server.chat(&json!({"stream": true}));
    let data = stream_data(&stream.body);
    assert_eq!(data.last(), Some(&"[DONE]"), "{}", stream.body);
    let pieces: Vec<Value> =
        data[..data.len() - 1].iter().map(|piece| serde_json::from_str(piece).unwrap()).collect();
    let streamed: String =
        pieces.iter().filter_map(|p| p["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, content);

    let long = json!({"max_tokens": 4, "messages": [
        {"role": "user", "content": "The harbour lay still in the morning. ".repeat(20)}]});
    let cached =
        |answer: &Answer| answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let (cold, hit) = (server.chat(&long), server.chat(&long));
    assert!(cached(&cold) < cached(&hit) && cached(&hit) >= 64, "{} then {}", cold.body, hit.body);
    assert_eq!(cold.json()["choices"], hit.json()["choices"], "a hit changes nothing");

    let metrics = server.get("/metrics");
    assert_eq!(metrics.status, 200);
    assert!(metrics.body.contains("oscar") && metrics.body.trim_end().ends_with("# EOF"), "{}", metrics.body);
    let refused = server.chat(&json!({"temperature": -1}));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("temperature")));
}

#[test]
fn keys_of_the_environment_guard_everything_but_health() {
    let server = Server::start(Some(&format!("another,{KEY}")));
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/v1/models").status, 401);
    assert_eq!(server.send("GET", "/v1/models", Some("wrong"), None).status, 401);
    let models = server.send("GET", "/v1/models", Some(KEY), None);
    assert_eq!((models.status, &models.json()["data"][0]["id"]), (200, &json!("oscar-15m")));
}

#[cfg(unix)]
#[test]
fn sigterm_lets_running_answers_finish() {
    let mut server = Server::start(None);
    let body = chat_body(&json!({"stream": true, "ignore_eos": true, "max_tokens": 300}));
    let stream = server.open("POST", "/v1/chat/completions", None, Some(&body));
    // The first bytes say that the answer is on its way.
    assert!(stream.peek(&mut [0; 16]).unwrap() > 0);
    server.terminate();
    let answer = read_answer(stream);
    let data = stream_data(&answer.body);
    assert_eq!(data.last(), Some(&"[DONE]"), "{}", answer.body);
    let last: Value = serde_json::from_str(data[data.len() - 2]).unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length", "{last}");
    assert_eq!(server.wait().code(), Some(0));
}

/// The `openai` package in a fresh environment, or why there is none.
fn install_openai(folder: &Path) -> Result<std::path::PathBuf, String> {
    let run = |program: &Path, args: &[&str]| {
        let out = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        match out.status.success() {
            true => Ok(()),
            false => Err(format!("{} {args:?}: {}", program.display(), String::from_utf8_lossy(&out.stderr))),
        }
    };
    run(Path::new("python3"), &["-m", "venv", folder.to_str().unwrap()])?;
    let python = folder.join("bin/python");
    let install =
        ["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "openai"];
    run(&python, &install)?;
    Ok(python)
}

/// Without Python or network there is nothing to test with, which CI does not accept.
#[cfg(unix)]
#[test]
fn the_official_openai_client_is_content() {
    let folder = tempfile::tempdir().unwrap();
    let python = match install_openai(folder.path()) {
        Ok(python) => python,
        Err(why) if std::env::var_os("CI").is_some() => {
            panic!("the openai client cannot be installed: {why}")
        }
        Err(why) => {
            eprintln!("NOT TESTED with the openai client, which cannot be installed here: {why}");
            return;
        }
    };
    let server = Server::start(Some(KEY));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/openai_client.py");
    let out = Command::new(python)
        .arg(script)
        .args([&format!("http://{}", server.address), KEY])
        .env_remove("OPENAI_BASE_URL")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("is content"), "{stdout}");
}
