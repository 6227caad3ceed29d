//! Probes: pieces of text and tasks that the model should predict as well as with an exact cache.

use super::documents::message;
use super::{Subject, WidthOptions};
use crate::bits::Probe;
use crate::error::CalibrateError;
use oscar_backend::Backend;
use oscar_codec::Windows;
use oscar_tasks::{CALIBRATION_SEEDS_FROM, GrammarFiller, Task, Turn};
use oscar_text::{ChatInput, ModelText};
use serde_json::{Map, Value, json};
use std::fmt;
use std::str::FromStr;

/// The least number of tokens before the scored ones: twice the BF16 windows, so that queries read
/// codes.
const LEAST_HISTORY: usize = 640;
/// Most positions of an answer that are scored, and positions of a text.
const SCORED: usize = 96;
const TEXT_SCORED: usize = 128;
/// Tokens of a repeated passage, and those at its beginning that are not scored: the model has to
/// notice the repetition first.
const ECHO: usize = 96;
const ECHO_LEAD: usize = 24;
/// Distances of a repetition: far, near, middle.
const DISTANCES: usize = 3;

/// A kind of probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    /// The end of a window of text.
    Text,
    /// A passage of the text, repeated two recent windows after the original (`near`), eight
    /// (`middle`), or as far away as the probe allows (`far`). It shows at which distance a head is
    /// needed, and any language model can do it.
    Echo,
    /// A task with its answer.
    Task(Task),
}

impl ProbeKind {
    /// The kinds that tables are chosen on. Long copying is indispensable: the heads that carry it
    /// are quiet in everything else.
    pub fn defaults() -> Vec<Self> {
        let tasks = [Task::Copy, Task::RunningSum, Task::NiahUuid, Task::NiahLines];
        [Self::Text, Self::Echo].into_iter().chain(tasks.map(Self::Task)).collect()
    }

    /// Kinds that choose nothing and only verify.
    const VERIFYING: [Self; 2] = [Self::Task(Task::NiahMultiquery), Self::Task(Task::Memory)];
}

impl fmt::Display for ProbeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Echo => "echo",
            Self::Task(task) => task.name(),
        })
    }
}

impl FromStr for ProbeKind {
    type Err = CalibrateError;

    fn from_str(name: &str) -> Result<Self, CalibrateError> {
        match name {
            "text" => Ok(Self::Text),
            "echo" => Ok(Self::Echo),
            name => match Task::parse(name) {
                Ok(task) => Ok(Self::Task(task)),
                Err(error) => {
                    let problem = format!("{name} (`text`, `echo` or a task): {error}");
                    Err(CalibrateError::option("--probe-kinds", problem))
                }
            },
        }
    }
}

pub(super) fn check_tokens<B: Backend>(
    tokens: usize,
    subject: &Subject<'_, B>,
) -> Result<(), CalibrateError> {
    let least = LEAST_HISTORY + TEXT_SCORED;
    let positions = subject.config.max_position_embeddings;
    let problem = match tokens {
        _ if tokens < least => format!("{tokens}: at least {least}, or nothing would be quantized"),
        _ if tokens > positions => {
            format!("{tokens} is more than the {positions} positions of {}", subject.name)
        }
        _ => return Ok(()),
    };
    Err(CalibrateError::option("--probe-tokens", problem))
}

/// Makes probes.
pub(super) struct Prober<'a, B: Backend> {
    pub subject: &'a Subject<'a, B>,
    pub options: &'a WidthOptions,
    /// Tokens that text probes are cut from.
    pub text: &'a [u32],
    pub seed: u64,
}

impl<B: Backend> Prober<'_, B> {
    /// Probes that tables are chosen on: rounds, each with one probe of each kind.
    pub fn choosing(&self) -> Result<Vec<Vec<Probe>>, CalibrateError> {
        (0..self.options.probes).map(|index| self.round(&self.options.kinds, index, 0)).collect()
    }

    /// Probes that only verify: other windows of the text, other seeds, and more kinds.
    pub fn verifying(&self) -> Result<Vec<Probe>, CalibrateError> {
        let mut kinds = self.options.kinds.clone();
        let tasks = kinds.iter().any(|kind| matches!(kind, ProbeKind::Task(_)));
        let more = ProbeKind::VERIFYING.into_iter().filter(|kind| tasks && !kinds.contains(kind));
        let more: Vec<ProbeKind> = more.collect();
        kinds.extend(more);
        let rounds = self.options.probes.div_ceil(2);
        let rounds = (0..rounds).map(|index| self.round(&kinds, index, 1)).collect::<Result<Vec<_>, _>>()?;
        let mut probes = rounds.concat();
        self.complete(&mut probes, 1)?;
        Ok(probes)
    }

    /// One of each kind of the probes that tables are chosen on, at every distance.
    pub fn distances(&self, choosing: &[Vec<Probe>]) -> Result<Vec<Probe>, CalibrateError> {
        let mut probes: Vec<Probe> = Vec::new();
        for probe in choosing.iter().flatten() {
            if !probes.iter().any(|known| known.group == probe.group) {
                probes.push(probe.clone());
            }
        }
        self.complete(&mut probes, 0)?;
        Ok(probes)
    }

    /// Adds the distances of `echo` that few rounds leave out.
    fn complete(&self, probes: &mut Vec<Probe>, half: usize) -> Result<(), CalibrateError> {
        if !self.options.kinds.contains(&ProbeKind::Echo) {
            return Ok(());
        }
        for distance in 0..DISTANCES {
            let probe = self.echo_probe(distance % self.options.probes, half, distance)?;
            if !probes.iter().any(|known| known.group == probe.group) {
                probes.push(probe);
            }
        }
        Ok(())
    }

    /// One probe of each kind.
    fn round(&self, kinds: &[ProbeKind], index: usize, half: usize) -> Result<Vec<Probe>, CalibrateError> {
        let probe = |&kind: &ProbeKind| match kind {
            ProbeKind::Text => self.text_probe(index, half),
            ProbeKind::Echo => self.echo_probe(index, half, index % DISTANCES),
            ProbeKind::Task(task) => self.task_probe(task, index, half),
        };
        kinds.iter().map(probe).collect()
    }

    /// A window of the text. The halves take every other window.
    fn window(&self, index: usize, half: usize) -> Result<&[u32], CalibrateError> {
        let (text, count) = (self.text, 2 * self.options.probes);
        let window = self.options.probe_tokens.min(text.len() / count.max(1));
        if window < LEAST_HISTORY + TEXT_SCORED {
            let problem = format!(
                "the text has {} tokens, too few for {count} text probes: give more with --text, lower \
                 --probes, or leave `text` and `echo` out of --probe-kinds",
                text.len()
            );
            return Err(CalibrateError::option("--probes", problem));
        }
        Ok(&text[(2 * index + half) * window..][..window])
    }

    fn text_probe(&self, index: usize, half: usize) -> Result<Probe, CalibrateError> {
        let tokens = self.window(index, half)?.to_vec();
        let scored = tokens.len() - TEXT_SCORED..tokens.len();
        Ok(Probe { group: "text".into(), tokens, scored })
    }

    /// A window of the text whose last tokens repeat a passage of it.
    fn echo_probe(&self, index: usize, half: usize, distance: usize) -> Result<Probe, CalibrateError> {
        let mut tokens = self.window(index, half)?.to_vec();
        let windows = Windows::default();
        let end = tokens.len() - ECHO;
        // The passage must have left the recent window when the repetition begins.
        let farthest = end - windows.sink();
        let (group, distance) = match distance {
            0 => ("echo_far", farthest),
            1 => ("echo_near", 2 * windows.recent()),
            _ => ("echo_middle", 8 * windows.recent()),
        };
        let from = end - distance.min(farthest);
        let passage = tokens[from..from + ECHO].to_vec();
        tokens[end..].copy_from_slice(&passage);
        let scored = end + ECHO_LEAD..tokens.len() - 1;
        Ok(Probe { group: group.into(), tokens, scored })
    }

    /// A task of about the wanted length, scored on a part of its right answer.
    fn task_probe(&self, task: Task, index: usize, half: usize) -> Result<Probe, CalibrateError> {
        let Self { subject, options, seed, .. } = self;
        // Far from the cases of the calibration text, which count up from zero.
        let seed = CALIBRATION_SEEDS_FROM + (seed << 20) + (1 << 19) + (half * options.probes + index) as u64;
        // The share of the answer at which the scored part begins.
        let at = (index as f64 + 0.5 * half as f64) / options.probes as f64;
        // Characters a token differ by model and by task, and some tasks draw a short case now and
        // then: go down from a size that is too long until one fits.
        let mut characters = options.probe_tokens * 8;
        while characters > options.probe_tokens {
            let case = task.case(seed, characters, &GrammarFiller)?;
            characters = characters * 31 / 32;
            let prompt = prompt_tokens(subject.text, case.question())?;
            let answer = subject.text.tokenizer.encode(&case.answer, false)?;
            let first = (answer.len().saturating_sub(SCORED) as f64 * at) as usize;
            // The last scored position predicts what follows the answer.
            let tokens: Vec<u32> =
                prompt.iter().chain(&answer).copied().take(prompt.len() + first + SCORED).collect();
            if tokens.len() <= options.probe_tokens && prompt.len() + first >= LEAST_HISTORY {
                let scored = prompt.len() + first - 1..tokens.len();
                return Ok(Probe { group: task.name().into(), scored, tokens });
            }
        }
        let (task, most) = (task.name(), options.probe_tokens);
        let problem = format!(
            "no {task} task fits {most} tokens: raise --probe-tokens, or leave {task} out of --probe-kinds"
        );
        Err(CalibrateError::option("--probe-kinds", problem))
    }
}

/// A conversation as the model reads it; models without a chat template get it as plain text.
fn prompt_tokens(text: &ModelText, turns: &[Turn]) -> Result<Vec<u32>, CalibrateError> {
    let rendered = match &text.chat {
        Some(template) => {
            let messages: Value = turns.iter().map(message).collect();
            let extra = Map::from_iter([("enable_thinking".to_owned(), json!(false))]);
            template.render(&ChatInput { extra: Some(&extra), ..ChatInput::new(&messages) })?
        }
        None => {
            let turns: Vec<&str> = turns.iter().map(|t| t.text.as_str()).collect();
            format!("{}\n\nAnswer: ", turns.join("\n\n"))
        }
    };
    Ok(text.tokenizer.encode(&rendered, text.chat.is_none())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_names() {
        for kind in ProbeKind::defaults().into_iter().chain(ProbeKind::VERIFYING) {
            assert_eq!(kind.to_string().parse::<ProbeKind>().unwrap(), kind);
        }
        let error = "juggling".parse::<ProbeKind>().unwrap_err().to_string();
        assert!(error.contains("--probe-kinds") && error.contains("juggling"), "{error}");
    }
}
