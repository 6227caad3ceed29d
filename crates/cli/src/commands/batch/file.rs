//! The files of a batch: requests and results, one JSON object on each line, as OpenAI's batch API
//! has them.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

/// Routes that a batch may call.
const ROUTES: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// A line of the input.
pub struct Line {
    pub custom_id: String,
    request: Value,
}

impl Line {
    fn parse(text: &str) -> Result<Self> {
        let request: Value = serde_json::from_str(text).context("it is not JSON")?;
        match request.get("custom_id").and_then(Value::as_str) {
            Some(id) if !id.is_empty() => Ok(Self { custom_id: id.to_owned(), request }),
            _ => bail!("custom_id is missing, empty or not a text: give each request one of its own"),
        }
    }

    /// Route and body, or the refusal as the results have it.
    pub fn call(&self) -> Result<(&str, &Value), Value> {
        let refused = |code: &str, message: String| Err(json!({"code": code, "message": message}));
        let text = |field: &str| self.request.get(field).and_then(Value::as_str).unwrap_or_default();
        if text("method") != "POST" {
            return refused("invalid_method", "method: a batch sends POST requests".into());
        }
        let Some(&route) = ROUTES.iter().find(|route| **route == text("url")) else {
            return refused(
                "invalid_url",
                format!("url: '{}' is not one of {}", text("url"), ROUTES.join(", ")),
            );
        };
        match self.request.get("body") {
            Some(body) if body.get("stream").and_then(Value::as_bool) == Some(true) => {
                refused("invalid_request", "body.stream: a batch has whole answers".into())
            }
            Some(body @ Value::Object(_)) => Ok((route, body)),
            _ => refused("invalid_request", "body: the request's JSON object is missing".into()),
        }
    }
}

/// The requests of a file, in order. The file is read once to check it, and again to run it.
pub struct Requests {
    file: File,
}

impl Requests {
    /// Checks every line; returns how many requests there are.
    pub fn open(path: &Path) -> Result<(Self, usize)> {
        let place = || path.display().to_string();
        let check = || -> Result<usize> {
            let mut seen = HashSet::new();
            for (number, line) in lines(File::open(path)?) {
                let place = || format!("line {number}");
                let line = line.and_then(|text| Line::parse(&text)).with_context(place)?;
                if !seen.insert(line.custom_id.clone()) {
                    bail!("line {number}: custom_id '{}' is that of an earlier line", line.custom_id);
                }
            }
            Ok(seen.len())
        };
        let count = check().with_context(place)?;
        Ok((Self { file: File::open(path).with_context(place)? }, count))
    }

    pub fn lines(self) -> impl Iterator<Item = Result<Line>> {
        lines(self.file).map(|(number, line)| {
            line.and_then(|text| Line::parse(&text)).with_context(|| format!("line {number}"))
        })
    }
}

/// Lines that are not blank, with their numbers.
fn lines(file: File) -> impl Iterator<Item = (usize, Result<String>)> {
    let numbered = BufReader::new(file).lines().enumerate().map(|(i, line)| (i + 1, line));
    numbered
        .map(|(number, line)| (number, line.map_err(anyhow::Error::from)))
        .filter(|(_, line)| !line.as_ref().is_ok_and(|text| text.trim().is_empty()))
}

/// The file of results. Every line is written whole and at once; an interruption leaves at most one
/// incomplete line, which the next run removes.
pub struct Results {
    file: File,
    /// Whether each request with a result was answered, by its `custom_id`.
    answered: HashMap<String, bool>,
}

impl Results {
    /// Opens the results of an earlier run, or an empty file.
    pub fn open(path: &Path) -> Result<Self> {
        let open = || -> Result<Self> {
            let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
            let (mut answered, mut whole) = (HashMap::new(), 0);
            let mut reader = BufReader::new(&file);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line)? > 0 {
                if !line.ends_with(b"\n") {
                    break;
                }
                let result: Value = serde_json::from_slice(&line)
                    .context("it holds something else than results of a batch; give another file")?;
                let Some(id) = result["custom_id"].as_str() else {
                    bail!("it holds something else than results of a batch; give another file");
                };
                answered.insert(id.to_owned(), is_answer(&result["response"]));
                whole += line.len() as u64;
                line.clear();
            }
            file.set_len(whole)?;
            Ok(Self { file, answered })
        };
        open().with_context(|| path.display().to_string())
    }

    /// Whether the request was answered; `None` if it has no result yet.
    pub fn answered(&self, custom_id: &str) -> Option<bool> {
        self.answered.get(custom_id).copied()
    }

    /// Writes the result of a request: an answer, or the reason why there was no request.
    pub fn write(&mut self, custom_id: &str, response: Value, error: Value) -> Result<()> {
        let id = format!("batch_req_{}", self.answered.len() + 1);
        let is_answer = is_answer(&response);
        let line = json!({"id": id, "custom_id": custom_id, "response": response, "error": error});
        self.file.write_all(format!("{line}\n").as_bytes()).context("writing results")?;
        self.answered.insert(custom_id.to_owned(), is_answer);
        Ok(())
    }

    /// Puts everything on the disk.
    pub fn finish(self) -> Result<()> {
        self.file.sync_all().context("writing results")
    }
}

fn is_answer(response: &Value) -> bool {
    response["status_code"] == 200
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn input_is_checked_before_any_work() {
        let good = "{\"custom_id\": \"a\"}\n\n{\"custom_id\": \"b\"}";
        assert_eq!(Requests::open(written(good).path()).unwrap().1, 2);
        for (text, problem) in [
            ("{\"custom_id\": \"a\"}\n{", "line 2"),
            ("{\"custom_id\": 3}", "custom_id is missing"),
            ("{\"custom_id\": \"a\"}\n{\"custom_id\": \"a\"}", "line 2: custom_id 'a'"),
            ("{\"custom_id\": \"\"}", "custom_id is missing"),
        ] {
            let error = format!("{:#}", Requests::open(written(text).path()).err().unwrap());
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn requests_that_cannot_be_sent_get_an_error_of_their_own() {
        for (request, code) in [
            (
                json!({"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}),
                "invalid_method",
            ),
            (json!({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}), "invalid_url"),
            (json!({"custom_id": "a", "method": "POST", "url": "/v1/completions"}), "invalid_request"),
            (
                json!({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"stream": true}}),
                "invalid_request",
            ),
        ] {
            let line = Line::parse(&request.to_string()).unwrap();
            assert_eq!(line.call().unwrap_err()["code"], code, "{request}");
        }
    }

    #[test]
    fn results_continue_after_the_last_whole_line() {
        let file = written("{\"custom_id\":\"a\"}\n{\"custom_id\":\"b\",\"resp");
        let mut results = Results::open(file.path()).unwrap();
        assert_eq!((results.answered("a"), results.answered("b")), (Some(false), None));
        results.write("b", json!({"status_code": 200}), Value::Null).unwrap();
        assert_eq!(results.answered("b"), Some(true));
        results.finish().unwrap();
        let text = std::fs::read_to_string(file.path()).unwrap();
        let ids: Vec<_> =
            text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["custom_id"].clone()).collect();
        assert_eq!(ids, ["a", "b"]);
        assert!(Results::open(written("hello\n").path()).is_err(), "a file of something else is not touched");
    }
}
