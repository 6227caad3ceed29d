//! KV formats side by side: the measurements of each, and their presentation.
//!
//! [`Comparison`] is the whole result, the same in the JSON file and in the page; [`report`] draws
//! it.
//!
//! **Invariant:** a figure that was not measured is absent, never a default.

pub mod report;
pub mod speed;

use crate::conversations::ConversationRow;
use crate::ppl::PplResult;
use crate::run::{REFERENCE, Row, summarize};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A whole comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    pub model: String,
    pub device: String,
    /// The command that reproduces it.
    pub command: String,
    /// What was measured and how, for people.
    pub notes: Vec<String>,
    /// Contexts of needles, bits and memory; text and speed are measured at the last.
    pub contexts: Vec<usize>,
    pub methods: Vec<MethodResult>,
    /// Eviction policies on conversations, if they were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<ConversationRow>,
}

/// Everything measured of one method.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MethodResult {
    pub kv: String,
    pub description: String,
    pub rotations: String,
    /// The kernels that read its pages.
    pub kernel: String,
    /// Pages are dequantized before they are read: exact, but the speed says nothing about the
    /// method.
    pub dequantized: bool,
    /// Stored bits an element of its pages, metadata included.
    pub bits: f64,
    pub sizes: Vec<Size>,
    pub text: Option<Text>,
    pub tasks: Vec<TaskScore>,
    /// Mean over tasks.
    pub task_accuracy: Option<f64>,
    pub needles: Vec<Needle>,
    /// Mean over needles.
    pub needle_accuracy: Option<f64>,
    pub divergence: Option<Divergence>,
    pub speed: Option<Speed>,
}

/// Size of a sequence at one context, windows and metadata included.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Size {
    pub context: usize,
    pub bits: f64,
    pub bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Text {
    pub context: usize,
    pub ppl: f64,
    pub kl: f64,
    pub top1: f64,
    pub n: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskScore {
    pub task: String,
    pub context: usize,
    pub accuracy: f64,
    pub n: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Needle {
    pub context: usize,
    pub depth: f64,
    pub accuracy: f64,
    pub n: usize,
}

/// How long greedy answers agree with those of BF16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Share of answers that equal BF16's to the end.
    pub same: f64,
    /// Mean number of equal tokens before the first difference; equal answers count in full.
    pub tokens: f64,
    /// The same as a share of BF16's answer.
    pub share: f64,
    pub n: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    pub context: usize,
    pub tokens_per_s: f64,
    /// Speed against BF16, measured alternately with it.
    pub ratio: f64,
}

impl Text {
    pub fn new(context: usize, result: PplResult) -> Self {
        Self { context, ppl: result.perplexity, kl: result.kl, top1: result.top1, n: result.scored }
    }
}

impl MethodResult {
    /// Adds the answers to tasks and needles. `reference` are BF16's answers to the same cases, in
    /// the same order.
    pub fn add_answers(&mut self, rows: &[Row], reference: &[Row], long: impl Fn(&Row) -> bool) {
        let (needles, tasks): (Vec<Row>, Vec<Row>) =
            rows.iter().cloned().partition(|row| row.depth.is_some());
        self.tasks = summarize(&tasks)
            .into_iter()
            .map(|s| TaskScore { task: s.task, context: s.context, accuracy: s.accuracy, n: s.n })
            .collect();
        self.task_accuracy = mean(self.tasks.iter().map(|t| t.accuracy));
        self.needles = summarize(&needles)
            .into_iter()
            .filter_map(|s| {
                let depth = needles.iter().find(|row| row.task == s.task)?.depth?;
                Some(Needle { context: s.context, depth, accuracy: s.accuracy, n: s.n })
            })
            .collect();
        self.needle_accuracy = mean(self.needles.iter().map(|n| n.accuracy));
        if self.kv != REFERENCE {
            let pairs = rows.iter().zip(reference).filter(|(_, r)| long(r));
            self.divergence = divergence(pairs);
        }
    }

    /// The results as JSON objects, one for each measurement.
    pub fn json_rows(&self, longest: usize) -> Vec<Value> {
        let (kv, bits) = (&self.kv, self.bits);
        let text = self.text.iter().map(|t| {
            json!({"kv": kv, "bits": bits, "context": t.context, "ppl": t.ppl, "kl": t.kl, "top1": t.top1,
                   "n": t.n})
        });
        let tasks = self.tasks.iter().map(|t| {
            json!({"kv": kv, "bits": bits, "context": t.context, "task": t.task, "accuracy": t.accuracy,
                   "n": t.n})
        });
        let needles = self.needles.iter().map(|n| {
            json!({"kv": kv, "bits": bits, "context": n.context, "task": "needle", "depth": n.depth,
                   "accuracy": n.accuracy, "n": n.n})
        });
        let size = self.size_at(longest);
        let last = json!({"kv": kv, "bits": bits, "context": longest,
                          "bits_with_windows": size.map(|s| s.bits), "cache_bytes": size.map(|s| s.bytes),
                          "divergence": self.divergence, "speed": self.speed, "kernel": self.kernel,
                          "dequantized": self.dequantized});
        text.chain(tasks).chain(needles).chain([last]).collect()
    }

    /// Memory and bits at a context.
    pub fn size_at(&self, context: usize) -> Option<&Size> {
        self.sizes.iter().find(|size| size.context == context)
    }
}

fn divergence<'a>(pairs: impl Iterator<Item = (&'a Row, &'a Row)>) -> Option<Divergence> {
    let (mut same, mut tokens, mut share, mut n) = (0.0, 0.0, 0.0, 0usize);
    for (row, reference) in pairs {
        let length = reference.tokens.len() as f64;
        let kept = row.first_divergence.map_or(length, |d| d as f64);
        same += f64::from(row.same_as_bf16 == Some(true));
        tokens += kept;
        share += if length > 0.0 { (kept / length).min(1.0) } else { 1.0 };
        n += 1;
    }
    let count = n as f64;
    (n > 0).then(|| Divergence { same: same / count, tokens: tokens / count, share: share / count, n })
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_become_tasks_needles_and_divergence() {
        let row = |kv: &str, task: &str, depth, score, tokens: Vec<u32>, first: Option<usize>| Row {
            kv: kv.into(),
            bits: 2.25,
            task: task.into(),
            context: 1024,
            index: 0,
            seed: 0,
            depth,
            score,
            prompt_tokens: 9,
            finished: true,
            answer: String::new(),
            expected: String::new(),
            tokens,
            same_as_bf16: Some(first.is_none()),
            first_divergence: first,
        };
        let reference = [
            row("bf16", "copy", None, 1.0, vec![1; 10], None),
            row("bf16", "copy", None, 1.0, vec![1; 20], None),
            row("bf16", "needle_50", Some(0.5), 1.0, vec![1], None),
        ];
        let rows = [
            row("oscar2", "copy", None, 1.0, vec![1; 10], None),
            row("oscar2", "copy", None, 0.0, vec![1; 20], Some(5)),
            row("oscar2", "needle_50", Some(0.5), 0.0, vec![2], Some(0)),
        ];
        let mut method = MethodResult { kv: "oscar2".into(), ..MethodResult::default() };
        method.add_answers(&rows, &reference, |r| r.task == "copy");
        assert_eq!((method.task_accuracy, method.needle_accuracy), (Some(0.5), Some(0.0)));
        assert_eq!(method.needles[0].depth, 0.5);
        let d = method.divergence.unwrap();
        assert_eq!((d.same, d.tokens, d.share, d.n), (0.5, 7.5, 0.625, 2));
    }
}
