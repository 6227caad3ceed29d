//! Results of finished probes in a file, so that an interrupted search continues where it stopped.

use super::{HarmOptions, Probe};
use crate::{CalibrateError, CodeRounding, Metadata};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// What a result depends on besides the probe.
#[derive(Clone, Copy)]
pub(super) struct Key<'a> {
    pub options: &'a HarmOptions,
    pub rounding: CodeRounding,
    pub metadata: &'a Metadata,
}

impl Key<'_> {
    /// The name of a measurement on a probe.
    pub fn of(self, probe: &Probe, what: &str) -> String {
        let Self { options, rounding, metadata } = self;
        let (group, scored) = (&probe.group, &probe.scored);
        let mut hash = Sha256::new();
        hash.update(format!("{group}|{scored:?}|{options:?}|{rounding}|{metadata:?}|{what}"));
        probe.tokens.iter().for_each(|t| hash.update(t.to_le_bytes()));
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// Results of finished probes by their key, in a file of lines.
pub(super) struct Checkpoint {
    path: PathBuf,
    known: std::collections::HashMap<String, Value>,
}

impl Checkpoint {
    /// The results of an earlier run, if there was one. A line that an interruption cut off is
    /// skipped.
    pub fn open(path: &Path) -> Result<Self, CalibrateError> {
        let mut checkpoint = Self { path: path.to_owned(), known: Default::default() };
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(checkpoint),
            Err(error) => return Err(checkpoint.failed(error)),
        };
        for line in BufReader::new(file).lines() {
            let line = line.map_err(|error| checkpoint.failed(error))?;
            let Ok(mut value) = serde_json::from_str::<Value>(&line) else { continue };
            if let Some(key) = value["probe"].as_str().map(str::to_owned) {
                checkpoint.known.insert(key, value["harm"].take());
            }
        }
        Ok(checkpoint)
    }

    fn failed(&self, source: io::Error) -> CalibrateError {
        CalibrateError::Checkpoint { path: self.path.clone(), source }
    }

    /// Results that are not measured again.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// The result of a key, or of `measure`, which is then stored.
    pub fn get_or<T: serde::Serialize + serde::de::DeserializeOwned>(
        &mut self,
        key: String,
        measure: impl FnOnce() -> Result<T, CalibrateError>,
    ) -> Result<T, CalibrateError> {
        if let Some(known) = self.known.remove(&key).and_then(|value| serde_json::from_value(value).ok()) {
            return Ok(known);
        }
        let harm = measure()?;
        let line = json!({"probe": key, "harm": harm});
        let out = std::fs::OpenOptions::new().create(true).append(true).open(&self.path);
        out.and_then(|mut out| writeln!(out, "{line}")).map_err(|error| self.failed(error))?;
        Ok(harm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_survive_an_interruption() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("harm.jsonl");
        let mut first = Checkpoint::open(&path).unwrap();
        assert_eq!(first.len(), 0);
        assert_eq!(first.get_or("a".into(), || Ok(vec![1.5f32])).unwrap(), [1.5]);
        assert!(first.get_or("b".into(), || Err::<Vec<f32>, _>(CalibrateError::Cancelled)).is_err());
        // A line that was cut off.
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        write!(file, "{{\"probe\": \"c\", \"ha").unwrap();
        let mut second = Checkpoint::open(&path).unwrap();
        assert_eq!(second.len(), 1);
        let known = second.get_or("a".into(), || Err::<Vec<f32>, _>(CalibrateError::Cancelled)).unwrap();
        assert_eq!(known, [1.5]);
        let missing = dir.path().join("no/such/folder.jsonl");
        let error = Checkpoint::open(&missing).unwrap().get_or("a".into(), || Ok(1)).unwrap_err();
        assert!(error.to_string().contains("folder.jsonl"), "{error}");
    }
}
