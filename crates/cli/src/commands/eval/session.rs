//! A model opened once for many formats: its weights are shared, each format has its own cache.

use super::digest;
use crate::cache::Cache;
use crate::device::AnyBackend;
use crate::options::{CacheArgs, ModelArgs, OpenModel, WeightsArg};
use crate::progress::{self, note};
use crate::served::unmeasured_widths;
use anyhow::{Context, Result, bail};
use oscar_backend::{AttentionKernels, Backend};
use oscar_codec::KvFormat;
use oscar_eval::cases::Case;
use oscar_eval::run::{Method, REFERENCE, Row, run_cases};
use oscar_eval::sandbox::Sandbox;
use oscar_eval::{EvalError, Generator, Journal, Prompts};
use oscar_runner::{KvMemory, Runner, RunnerOptions};
use oscar_text::ModelText;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::str::FromStr;

/// A format under the name of its results. Names become formats only here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    pub name: String,
    pub kv: KvFormat,
}

impl FromStr for Format {
    type Err = oscar_codec::CodecError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let kv: KvFormat = name.parse()?;
        Ok(Self { name: kv.to_string(), kv })
    }
}

/// A format with its cache worked out for the model.
pub struct Prepared {
    pub name: String,
    pub cache: Cache,
}

/// An open model.
pub struct Session {
    pub model: OpenModel,
    pub text: ModelText,
    pub stop_tokens: Vec<u32>,
    cache_args: CacheArgs,
    /// Digest of the rotation file: results of another file are not continued.
    rotation_digest: Option<String>,
    precision: String,
    /// As requested; `None` means as in the checkpoint.
    weights: Option<WeightsArg>,
    /// One runner for each set of rotations so far; other caches with the same rotations share it.
    templates: RefCell<Vec<Runner<AnyBackend>>>,
    /// Longest sequence.
    pub context: usize,
}

impl Session {
    /// Opens the model for sequences of up to `context` tokens (its own limit if absent), which the user set by `flag`.
    pub fn open(
        model_args: &ModelArgs,
        cache_args: &CacheArgs,
        context: Option<usize>,
        flag: &str,
    ) -> Result<Self> {
        let model = model_args.open()?;
        let context = context.unwrap_or(model.config.max_position_embeddings);
        if context > model.config.max_position_embeddings {
            bail!(
                "{flag} {context}: {} addresses {} positions",
                model.name,
                model.config.max_position_embeddings
            );
        }
        let text = model.text()?;
        let stop_tokens = model.generation()?.stop_token_ids(&model.config).to_vec();
        let plain = model.cache(KvFormat::Bf16, cache_args)?;
        let base = plain.runner(&model, model_args.backend()?, cache_args, context, 1, |_| {})?;
        let precision = format!("{:?}", model_args.precision).to_lowercase();
        let rotation_digest = model.rotation_bytes(cache_args)?.map(digest);
        Ok(Self {
            model,
            text,
            stop_tokens,
            cache_args: cache_args.clone(),
            rotation_digest,
            precision,
            weights: model_args.weights,
            templates: RefCell::new(vec![base]),
            context,
        })
    }

    /// The formats with their caches, BF16 first and each once.
    pub fn prepare(&self, formats: &[Format]) -> Result<Vec<Prepared>> {
        self.prepare_or(formats, Err)
    }

    /// [`Self::prepare`]; formats that the model's heads do not allow are left out with a note.
    pub fn prepare_fitting(&self, formats: &[Format]) -> Result<Vec<Prepared>> {
        self.prepare_or(formats, |error| {
            eprintln!("note: left out: {error:#}");
            Ok(())
        })
    }

    fn prepare_or(
        &self,
        formats: &[Format],
        misfit: impl Fn(anyhow::Error) -> Result<()>,
    ) -> Result<Vec<Prepared>> {
        let mut prepared: Vec<Prepared> = Vec::new();
        let reference = Format { name: REFERENCE.to_owned(), kv: KvFormat::Bf16 };
        for format in [&reference].into_iter().chain(formats) {
            if prepared.iter().any(|p| p.name == format.name) {
                continue;
            }
            let cache = self.cache(format.kv);
            match cache.with_context(|| format!("--kv {}", format.name)) {
                Ok(cache) => prepared.push(Prepared { name: format.name.clone(), cache }),
                Err(error) => misfit(error)?,
            }
        }
        Ok(prepared)
    }

    /// The cache of a format, with a warning if it lacks measured widths.
    fn cache(&self, format: KvFormat) -> Result<Cache> {
        if matches!(format, KvFormat::OscarMixed { .. }) {
            let found = self.model.found_rotations(&self.cache_args)?;
            if let Some(warning) = unmeasured_widths(format, found.as_ref()) {
                note!("{warning}");
            }
        }
        self.model.cache(format, &self.cache_args)
    }

    /// Prompt tokens of a step.
    pub fn prefill_chunk(&self) -> usize {
        self.templates.borrow()[0].prefill_chunk()
    }

    /// A runner of this format with room for `sequences` sequences, unless the user set a budget.
    pub fn runner(&self, format: &Prepared, sequences: usize) -> Result<Runner<AnyBackend>> {
        let chunk = self.prefill_chunk();
        let mut templates = self.templates.borrow_mut();
        let layout = &format.cache.layout;
        let rotations = format.cache.rotations.as_ref();
        let options = |kv_memory| RunnerOptions {
            layout: layout.clone(),
            rotations,
            context: self.context,
            kv_memory,
            prefill_chunk: chunk,
        };
        let weights = &self.model.weights;
        if !templates.iter().any(|runner| runner.rotations() == rotations) {
            let template = templates[0]
                .with_cache(weights, options(KvMemory::Bytes(layout.unquantized_block_bytes())))?;
            templates.push(template);
        }
        let same = templates.iter().find(|runner| runner.rotations() == rotations).unwrap_or(&templates[0]);
        Ok(same.with_cache(weights, options(self.cache_args.kv_memory(sequences.max(1), self.context)))?)
    }

    /// The rows of each format, which answers `batch` cases at once.
    pub fn ask(
        &self,
        doing: &'static str,
        cases: &[Case],
        formats: &[Prepared],
        batch: usize,
        prompts: &Prompts<'_>,
        sandbox: Option<&Sandbox>,
        journal: &mut Journal,
    ) -> Result<Vec<Vec<Row>>> {
        let methods = formats.iter().map(|format| Method {
            kv: format.name.clone(),
            bits: format.cache.layout.page_bits(),
            start: Box::new(move || {
                let runner = self.runner(format, batch).map_err(|e| EvalError::Start(format!("{e:#}")))?;
                Generator::start(runner, self.stop_tokens.clone(), batch)
            }),
        });
        let methods: Vec<Method<'_>> = methods.collect();
        let bar = progress::bar(doing, (cases.len() * methods.len()) as u64);
        let rows = run_cases(cases, &methods, prompts, sandbox, journal, |_| bar.inc(1))?;
        bar.finish_and_clear();
        Ok(rows)
    }

    /// The device, the form of FP8 weights on it, and the kernels that read a format's pages.
    pub fn describe(&self, format: &Prepared) -> (String, AttentionKernels) {
        let templates = self.templates.borrow();
        let backend = templates[0].backend();
        let weights = self.model.describe_weights(&format.cache, backend);
        let device = [Some(backend.describe()), weights].into_iter().flatten().collect::<Vec<_>>().join("; ");
        (device, backend.attention(&format.cache.layout))
    }

    /// The part of a configuration that decides what a model answers, with what the command adds.
    pub fn config(&self, more: Value) -> Value {
        let mut config = json!({
            "model": self.model.name,
            "fingerprint": self.model.weights.fingerprint(),
            "precision": self.precision,
            "sink": self.cache_args.sink,
            "recent": self.cache_args.recent,
            "rotations": self.cache_args.rotations,
            "rotation_file": self.rotation_digest,
        });
        if let Some(weights) = self.weights {
            config["weights"] = json!(weights);
        }
        if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
            config.extend(more);
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_normalized_and_unknown_ones_refused() {
        assert_eq!(" OSCAR2 ".parse::<Format>().unwrap().name, "oscar2");
        assert!("oscar9".parse::<Format>().unwrap_err().to_string().contains("oscar9"));
    }
}
