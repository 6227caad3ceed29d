//! Results as they arrive, one JSON object on each line, so that an interrupted run can resume.
//!
//! The first line names the command and the configuration; every other line is the result of one
//! case. **Invariant:** a case is recorded once. A line that was cut off while it was written is
//! dropped, and its case runs again. Results of another configuration are refused, never mixed.

use crate::error::{EvalError, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Field that names a line's case.
const CASE: &str = "case";
/// Field of the first line that names the command.
const COMMAND: &str = "oscar";

/// Results by case, kept in a file if one is given.
pub struct Journal {
    file: Option<(PathBuf, File)>,
    rows: HashMap<String, Value>,
}

impl Journal {
    /// Opens or creates the record of `command` under `config`; without a path results live in
    /// memory only.
    pub fn open(path: Option<&Path>, command: &str, config: &Value) -> Result<Self> {
        let Some(path) = path else { return Ok(Self { file: None, rows: HashMap::new() }) };
        let error = |source| EvalError::File { path: path.to_owned(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(error)?;
        let bytes = std::fs::read(path).map_err(error)?;
        // A line without an end was being written when the program stopped.
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
        let rows = read_rows(path, &bytes[..whole], command, config)?;
        file.set_len(whole as u64).map_err(error)?;
        file.seek(SeekFrom::End(0)).map_err(error)?;
        let mut journal = Self { file: Some((path.to_owned(), file)), rows };
        if whole == 0 {
            journal.write(&json!({COMMAND: command, "config": config}))?;
        }
        Ok(journal)
    }

    /// The result of a case, if it was recorded and has the requested form.
    pub fn get<T: DeserializeOwned>(&self, case: &str) -> Option<T> {
        self.rows.get(case).and_then(|row| serde_json::from_value(row.clone()).ok())
    }

    pub fn contains(&self, case: &str) -> bool {
        self.rows.contains_key(case)
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Records a case's result on disk at once. The row must be an object.
    pub fn record(&mut self, case: &str, row: &impl Serialize) -> Result<()> {
        let mut line = Map::new();
        line.insert(CASE.to_owned(), Value::from(case));
        if let Ok(Value::Object(fields)) = serde_json::to_value(row) {
            line.extend(fields);
        }
        let line = Value::Object(line);
        self.write(&line)?;
        self.rows.insert(case.to_owned(), line);
        Ok(())
    }

    fn write(&mut self, line: &Value) -> Result<()> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        // One write for the whole line: an interruption cuts off at most this line.
        let text = format!("{line}\n");
        file.write_all(text.as_bytes())
            .and_then(|()| file.flush())
            .map_err(|source| EvalError::File { path: path.clone(), source })
    }
}

fn read_rows(path: &Path, bytes: &[u8], command: &str, config: &Value) -> Result<HashMap<String, Value>> {
    let mut rows = HashMap::new();
    for (index, line) in bytes.split(|&b| b == b'\n').enumerate() {
        if line.is_empty() {
            continue;
        }
        let broken =
            |problem: String| EvalError::BrokenJournal { path: path.to_owned(), line: index + 1, problem };
        let value: Value = serde_json::from_slice(line).map_err(|e| broken(e.to_string()))?;
        if index == 0 {
            check_header(path, &value, command, config)?;
            continue;
        }
        let Some(case) = value[CASE].as_str().map(str::to_owned) else {
            return Err(broken(format!("it has no `{CASE}`")));
        };
        rows.insert(case, value);
    }
    Ok(rows)
}

fn check_header(path: &Path, header: &Value, command: &str, config: &Value) -> Result<()> {
    let other = |difference| EvalError::OtherConfiguration { path: path.to_owned(), difference };
    match header[COMMAND].as_str() {
        None => {
            return Err(EvalError::BrokenJournal {
                path: path.to_owned(),
                line: 1,
                problem: "it does not begin with a configuration".into(),
            });
        }
        Some(found) if found != command => {
            return Err(other(format!("it was written by `oscar {found}`, this is `oscar {command}`")));
        }
        Some(_) => {}
    }
    let fields = |v: &Value| v.as_object().cloned().unwrap_or_default();
    let (old, new) = (fields(&header["config"]), fields(config));
    for name in old.keys().chain(new.keys()) {
        let (was, is) = (old.get(name).unwrap_or(&Value::Null), new.get(name).unwrap_or(&Value::Null));
        if was != is {
            return Err(other(format!("{name} was {was}, now it is {is}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path, config: &Value) -> Result<Journal> {
        Journal::open(Some(path), "eval tasks", config)
    }

    #[test]
    fn an_interrupted_record_goes_on_without_its_cut_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        let config = json!({"model": "m", "seed": 1});
        {
            let mut journal = open(&path, &config).unwrap();
            journal.record("a", &json!({"score": 1})).unwrap();
            journal.record("b", &json!({"score": 0})).unwrap();
        }
        let whole = std::fs::read(&path).unwrap();
        for cut in 1..20 {
            std::fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            let mut journal = open(&path, &config).unwrap();
            assert!(journal.contains("a") && !journal.contains("b"), "cut {cut}");
            journal.record("b", &json!({"score": 0})).unwrap();
            drop(journal);
            assert_eq!(std::fs::read(&path).unwrap(), whole, "cut {cut}");
        }
        let journal = open(&path, &config).unwrap();
        assert_eq!((journal.len(), journal.get::<Value>("b").unwrap()["score"].as_u64()), (2, Some(0)));
    }

    #[test]
    fn a_file_cut_in_its_first_line_starts_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, "{\"oscar\": \"ev").unwrap();
        assert!(open(&path, &json!({})).unwrap().is_empty());
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("{\"oscar\":\"eval tasks\""));
    }

    #[test]
    fn other_configurations_and_other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        open(&path, &json!({"seed": 1})).unwrap().record("a", &json!({"x": 1})).unwrap();
        let refusal = |config: Value| open(&path, &config).err().unwrap().to_string();
        assert!(refusal(json!({"seed": 2})).contains("seed was 1, now it is 2"));
        assert!(refusal(json!({"seed": 1, "raw": true})).contains("raw was null"));
        let error = Journal::open(Some(&path), "eval ppl", &json!({"seed": 1})).err().unwrap();
        assert!(error.to_string().contains("`oscar eval tasks`"), "{error}");
        for (text, needle) in [
            ("notes\n", "line 1"),
            ("{\"a\":1}\n", "configuration"),
            ("{\"oscar\":\"eval tasks\",\"config\":{}}\nx\n", "line 2"),
        ] {
            std::fs::write(&path, text).unwrap();
            let message = refusal(json!({}));
            assert!(message.contains(needle) && message.contains("delete this one"), "{message}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "a refused file is not touched");
        }
    }
}
