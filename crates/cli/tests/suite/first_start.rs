//! The first start of a model that comes without rotations, and the ones after it.

use crate::server::{PATIENCE, Server, chat_body};
use crate::support::oscar;
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A checkpoint without rotations, and an empty folder of the user.
struct Machine {
    root: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { root: tempfile::tempdir().unwrap() };
        std::fs::create_dir_all(machine.model()).unwrap();
        for (name, bytes) in oscar_embedded::FILES.iter().filter(|(name, _)| *name != "rotations.safetensors")
        {
            std::fs::write(machine.model().join(name), bytes).unwrap();
        }
        machine
    }

    /// As the Hugging Face cache keeps it.
    fn model(&self) -> PathBuf {
        self.root.path().join("models--some-org--tiny-15m/snapshots/0123")
    }

    fn cache(&self) -> PathBuf {
        self.root.path().join("cache")
    }

    fn flags<'a>(&self, model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let flags =
            ["--model", model, "--port", "0", "--context", "1024", "--threads", "2", "--device", "cpu"];
        [&flags[..], more].concat()
    }

    fn start(&self, more: &[&str]) -> Server {
        let (model, cache) = (self.model(), self.cache());
        let flags = self.flags(model.to_str().unwrap(), more);
        Server::start_in(None, &flags, &[("OSCAR_CACHE_DIR", cache.to_str().unwrap())])
    }

    /// The one file that the user's folder keeps.
    fn kept(&self) -> Option<PathBuf> {
        let mut all = std::fs::read_dir(self.cache().join("rotations")).ok()?.map(|e| e.unwrap().path());
        let one = all.next();
        assert_eq!(all.next(), None, "nothing half-written is left");
        one
    }
}

/// Calibration, format and note of `/server_info`.
fn info(server: &Server) -> (String, String, String) {
    let body = server.get("/server_info").json();
    let text = |field: &str| body[field].as_str().unwrap_or_default().to_owned();
    (text("calibration"), text("kv_cache_dtype"), text("kv_cache_note"))
}

#[test]
fn the_first_start_calibrates_and_the_second_finds_it() {
    let machine = Machine::new();
    let first = machine.start(&[]);
    let (calibration, format, note) = info(&first);
    // Rotations alone do not make two bits safe.
    assert_eq!((calibration.as_str(), format.as_str()), ("rotations", "oscar4"));
    assert!(note.contains("no verified table of widths") && first.seen.contains(&note), "{note}");
    assert_eq!(first.get("/internal/state").json()["info"]["cache_note"], json!(note));
    assert!(first.seen.contains("calibrating"), "{}", first.seen);
    let names: Vec<_> = first.get("/v1/models").json()["data"].as_array().unwrap().clone();
    let names: Vec<_> = names.iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["tiny-15m", "some-org/tiny-15m"]);
    let body = |name: &str| chat_body(&json!({"model": name, "max_tokens": 2}));
    let ask = |name| first.send("POST", "/v1/chat/completions", None, Some(&body(name))).status;
    assert_eq!((ask("tiny-15m"), ask("some-org/tiny-15m"), ask("oscar-15m")), (200, 200, 404));
    drop(first);
    let kept = machine.kept().unwrap();
    let second = machine.start(&[]);
    assert_eq!(info(&second).0, "rotations");
    assert!(!second.seen.contains("calibrating:") && second.seen.contains(kept.to_str().unwrap()));
    drop(second);
    // Other commands find it too.
    let model = machine.model();
    let mut run = Command::new(env!("CARGO_BIN_EXE_oscar"));
    run.args(["run", "--prompt", "Hi", "--max-tokens", "1", "--model", model.to_str().unwrap()]);
    let output = run.env("OSCAR_CACHE_DIR", machine.cache()).stdin(Stdio::null()).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains(kept.to_str().unwrap()), "{output:?}");
}

#[test]
fn a_damaged_or_foreign_file_is_named_and_left_aside() {
    let machine = Machine::new();
    drop(machine.start(&["--calibrate", "rotations"]));
    let kept = machine.kept().unwrap();
    let good = std::fs::read(&kept).unwrap();
    // A file of other weights under this model's name: the fingerprint inside tells.
    let text = String::from_utf8_lossy(&good[..8192]).into_owned();
    let at = text.find("model_fingerprint").unwrap() + "model_fingerprint\":\"".len();
    let mut foreign = good.clone();
    foreign[at] = if foreign[at] == b'0' { b'1' } else { b'0' };
    for (bytes, reason) in [(&good[..good.len() / 2], ""), (&foreign[..], "the model's are"), (b"x", "")] {
        std::fs::write(&kept, bytes).unwrap();
        let server = machine.start(&["--calibrate", "no"]);
        assert_eq!((info(&server).0.as_str(), info(&server).1.as_str()), ("none", "oscar4"));
        let line = server.seen.lines().find(|line| line.contains(kept.to_str().unwrap())).unwrap().to_owned();
        assert!(line.starts_with("warning") && line.contains(reason), "{line}");
    }
    // It is made again where that is allowed.
    let server = machine.start(&["--calibrate", "rotations"]);
    assert_eq!(info(&server).0, "rotations");
    drop(server);
    assert_eq!(std::fs::read(&kept).unwrap(), good, "the same text gives the same file");
    // Given by flag it ends the program.
    std::fs::write(&kept, &foreign).unwrap();
    let model = machine.model();
    let output = oscar(&[
        "serve",
        "--port",
        "0",
        "--model",
        model.to_str().unwrap(),
        "--rotations",
        kept.to_str().unwrap(),
    ]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(message.contains("--rotations") && message.contains("the model's are"), "{message}");
}

#[test]
fn a_folder_that_cannot_be_written_is_no_reason_to_fail() {
    let machine = Machine::new();
    std::fs::write(machine.cache(), "a file, not a folder").unwrap();
    let server = machine.start(&["--calibrate", "rotations"]);
    assert_eq!(info(&server).0, "rotations");
    assert!(server.seen.contains("cannot be kept"), "{}", server.seen);
    assert_eq!(server.chat(&json!({"model": "tiny-15m", "max_tokens": 2})).status, 200);
}

#[test]
fn a_format_that_is_asked_for_is_served_with_a_warning() {
    let machine = Machine::new();
    let server = machine.start(&["--kv", "oscar2", "--calibrate", "no"]);
    let (calibration, format, note) = info(&server);
    assert_eq!((calibration.as_str(), format.as_str()), ("none", "oscar2"));
    assert!(note.starts_with("warning: --kv oscar2") && server.seen.contains(&note), "{note}");
    assert_eq!(machine.kept(), None);
}

#[test]
fn a_start_that_was_killed_does_no_harm() {
    let machine = Machine::new();
    let (model, cache) = (machine.model(), machine.cache());
    let mut child = Command::new(env!("CARGO_BIN_EXE_oscar"))
        .arg("serve")
        .args(machine.flags(model.to_str().unwrap(), &["--calibrate", "widths"]))
        .env("OSCAR_CACHE_DIR", &cache)
        .env("HF_HUB_OFFLINE", "1")
        .env_remove("OSCAR_API_KEYS")
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let address = log.next().unwrap().unwrap();
    let address = address.split_once("http://").unwrap().1.split(';').next().unwrap().to_owned();
    assert!(
        log.by_ref().map(Result::unwrap).any(|line| line.contains("calibrating widths")),
        "it calibrates"
    );
    let server = Server::of(child, address);
    let answer = server.get("/health");
    let body = answer.json();
    assert_eq!((answer.status, body["status"].as_str()), (503, Some("starting")), "{body}");
    server.signal("-KILL");
    drop(server);
    // The rotations were kept before the widths began.
    let server = machine.start(&["--calibrate", "no"]);
    assert_eq!(info(&server).0, "rotations");
    assert!(PATIENCE.as_secs() > 0 && Path::new(&cache).is_dir());
}

#[test]
fn a_chat_template_of_the_users_replaces_the_models() {
    let machine = Machine::new();
    let file = machine.root.path().join("own.jinja");
    std::fs::write(&file, "Q: {{ messages[0].content }} A:").unwrap();
    let server = machine.start(&["--calibrate", "no", "--chat-template", file.to_str().unwrap()]);
    let send = |path, body| server.send("POST", path, None, Some(&body)).json();
    let tokens =
        send("/tokenize", json!({"messages": [{"role": "user", "content": "why?"}]}))["tokens"].clone();
    let text = send("/detokenize", json!({"tokens": tokens}));
    assert_eq!(text["prompt"].as_str().or(text["text"].as_str()), Some("Q: why? A:"), "{text}");
}

#[test]
fn a_model_that_is_nowhere_is_refused_in_one_line() {
    let output = Command::new(env!("CARGO_BIN_EXE_oscar"))
        .args(["serve", "--port", "0", "--offline", "--model", "no-org/no-model"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = message.lines().find(|line| line.starts_with("error:")).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(line.contains("no-org/no-model") && line.contains("switched off"), "{message}");
    assert_eq!(message.lines().last(), Some(line), "{message}");
}
