//! Harms of all probes, noted as they are measured, so that an interrupted run goes on where it stopped.

use crate::progress;
use anyhow::{Context, Result};
use oscar_backend::{Backend, Calibrates};
use oscar_calibrate::bits::{HarmOptions, Judge, Probe, ProbeHarm, absent_harm, probe_harm};
use oscar_calibrate::{CodeRounding, RotationFile};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// The harms of all probes; those a checkpoint has are not measured again.
pub fn harms<B: Calibrates>(
    judge: &Judge<'_, B>,
    probes: &[Probe],
    key: Key<'_>,
    checkpoint: &mut Checkpoint,
) -> Result<Vec<ProbeHarm>> {
    let config = judge.transformer.config();
    let passes = key.options.passes(config.layers, config.kv_heads) as u64;
    let bar = progress::bar("measuring harm", probes.len() as u64 * passes);
    let measure = |probe: &Probe| {
        let (name, known) = checkpoint.find(key.of(probe, "widths"));
        match known {
            Some(harm) => {
                bar.inc(passes);
                Ok(harm)
            }
            None => checkpoint.note(name, probe_harm(judge, probe, key.options, || bar.inc(1))?),
        }
    };
    let all = probes.iter().map(measure).collect();
    bar.finish_and_clear();
    all
}

/// Adds to the harms of all probes what these heads do when they keep no history.
pub fn without_history<B: Backend>(
    judge: &Judge<'_, B>,
    probes: &[Probe],
    heads: &[usize],
    key: Key<'_>,
    checkpoint: &mut Checkpoint,
    harms: &mut [ProbeHarm],
) -> Result<()> {
    let passes = heads.len() as u64 + 1;
    eprintln!(
        "{} heads without history: {} passes over whole probes",
        heads.len(),
        probes.len() as u64 * passes
    );
    let bar = progress::bar("leaving out history", probes.len() as u64 * passes);
    for (probe, harm) in probes.iter().zip(harms) {
        let (name, known) = checkpoint.find(key.of(probe, &format!("no history of {heads:?}")));
        let found = match known {
            Some(found) => {
                bar.inc(passes);
                found
            }
            None => checkpoint.note(name, absent_harm(judge, probe, heads, || bar.inc(1))?)?,
        };
        harm.absent = heads.iter().copied().zip(found).collect();
    }
    bar.finish_and_clear();
    Ok(())
}

/// What a result depends on besides the probe.
#[derive(Clone, Copy)]
pub struct Key<'a> {
    pub options: &'a HarmOptions,
    pub rounding: CodeRounding,
    pub file: &'a RotationFile,
}

impl Key<'_> {
    /// The name of what was measured on a probe.
    fn of(self, probe: &Probe, what: &str) -> String {
        let Self { options, rounding, file } = self;
        let (group, scored, metadata) = (&probe.group, &probe.scored, &file.metadata);
        let mut hash = Sha256::new();
        hash.update(format!("{group}|{scored:?}|{options:?}|{rounding}|{metadata:?}|{what}"));
        probe.tokens.iter().for_each(|t| hash.update(t.to_le_bytes()));
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// Results of finished probes by their key, in a file of lines.
pub struct Checkpoint {
    path: PathBuf,
    known: std::collections::HashMap<String, Value>,
}

impl Checkpoint {
    /// A line that was cut off by an interruption is skipped.
    pub fn open(path: &Path) -> Result<Self> {
        let mut checkpoint = Self { path: path.to_owned(), known: Default::default() };
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(checkpoint),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        for line in BufReader::new(file).lines() {
            let line = line.with_context(|| path.display().to_string())?;
            let Ok(mut value) = serde_json::from_str::<Value>(&line) else { continue };
            if let Some(key) = value["probe"].as_str().map(str::to_owned) {
                checkpoint.known.insert(key, value["harm"].take());
            }
        }
        if !checkpoint.known.is_empty() {
            eprintln!("{}: {} results of before are used", path.display(), checkpoint.known.len());
        }
        Ok(checkpoint)
    }

    fn find<T: serde::de::DeserializeOwned>(&mut self, key: String) -> (String, Option<T>) {
        let known = self.known.remove(&key).and_then(|value| serde_json::from_value(value).ok());
        (key, known)
    }

    fn note<T: serde::Serialize>(&mut self, key: String, harm: T) -> Result<T> {
        let line = json!({"probe": key, "harm": harm});
        let mut options = std::fs::OpenOptions::new();
        let out = options.create(true).append(true).open(&self.path);
        out.and_then(|mut out| writeln!(out, "{line}")).with_context(|| self.path.display().to_string())?;
        Ok(harm)
    }
}
