//! Conversations as tokens: the shared history, and what each question adds to it.

use crate::cases::evaluation_seed;
use crate::error::{EvalError, Result};
use crate::prompts::Prompts;
use oscar_tasks::Filler;
use oscar_tasks::chat::Turn;
use oscar_tasks::chat::sessions::{Dialogue, Variant, dialogue};
use std::ops::Range;

/// One conversation with its questions.
#[derive(Clone, Debug)]
pub struct ConversationCase {
    pub variant: Variant,
    pub context: usize,
    pub seed: u64,
    /// Tokens that all questions share, whole pages.
    pub history: Vec<u32>,
    /// Positions that every view keeps.
    pub protected: Vec<Range<usize>>,
    /// Positions of each message of the history.
    pub utterances: Vec<Range<usize>>,
    pub asks: Vec<Ask>,
}

/// One question.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Tokens between the history and the answer.
    pub tokens: Vec<u32>,
    /// The bare text of the question.
    pub question: Vec<u32>,
    /// The right answer, if there is one.
    pub answer: Option<Vec<u32>>,
    /// Positions of the history that tell it.
    pub needs: Vec<Range<usize>>,
    /// Values that would be an answer to a question that has none.
    pub plausible: Vec<String>,
}

impl ConversationCase {
    /// Names the case in results, the same in every run.
    pub fn key(&self) -> String {
        format!("{}/{}/{}", self.variant.name(), self.context, self.seed)
    }
}

/// Conversations of about `context` tokens, `count` of each variant, in rounds.
pub fn conversation_cases(
    prompts: &Prompts<'_>,
    variants: &[Variant],
    context: usize,
    first_seed: u64,
    count: usize,
    filler: &dyn Filler,
) -> Result<Vec<ConversationCase>> {
    let mut cases = Vec::new();
    for index in 0..count {
        for &variant in variants {
            let seed = evaluation_seed(first_seed, index);
            cases.push(fitted(prompts, variant, context, seed, filler)?);
        }
    }
    Ok(cases)
}

/// The conversation of a seed, as long as the context allows within a few percent.
fn fitted(
    prompts: &Prompts<'_>,
    variant: Variant,
    context: usize,
    seed: u64,
    filler: &dyn Filler,
) -> Result<ConversationCase> {
    let mut budget = context * 4;
    let mut best: Option<ConversationCase> = None;
    for _ in 0..8 {
        let case = tokenized(prompts, dialogue(variant, seed, budget, filler), context)?;
        let size = case.asks.iter().map(|ask| ask.tokens.len()).max().unwrap_or(0) + case.history.len() + 16;
        let fits = size <= context;
        if fits && best.as_ref().is_none_or(|best| best.history.len() < case.history.len()) {
            best = Some(case);
        }
        if fits && size * 20 >= context * 19 {
            break;
        }
        budget = (budget as f64 * context as f64 / size as f64 * 0.98) as usize;
    }
    best.ok_or(EvalError::ContextTooShort { task: variant.name(), context })
}

fn tokenized(prompts: &Prompts<'_>, dialogue: Dialogue, context: usize) -> Result<ConversationCase> {
    let Dialogue { variant, seed, history, protected, inquiries } = dialogue;
    let with = |more: &[Turn]| prompts.chat(&history.iter().chain(more).cloned().collect::<Vec<_>>());
    let all: Vec<Vec<u32>> = inquiries.iter().map(|inquiry| with(&inquiry.turns)).collect::<Result<_>>()?;
    // Turns of the assistant do not open an answer, so the prompts begin alike up to the questions.
    let opening = prompts.chat(&[])?.len();
    let told = with(&[])?.len() - opening;
    let shared = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let common = all.iter().map(|prompt| shared(prompt, &all[0])).min().unwrap_or(0).min(told);
    let len = common / 64 * 64;
    let places = places(prompts, &history, told)?;
    let place = |turn: usize| places[turn].min(len);
    let mut asks = Vec::new();
    for (inquiry, prompt) in inquiries.into_iter().zip(&all) {
        let mut needs = Vec::new();
        for turn in inquiry.needs {
            let range = place(turn)..place(turn + 1);
            needs.extend((!range.is_empty()).then_some(range));
        }
        let answer = inquiry.answer.map(|answer| prompts.tokenizer().encode(&answer, false)).transpose()?;
        let tokens = prompt[len..].to_vec();
        let question = inquiry.turns.last().map_or("", |turn| &turn.text);
        let question = prompts.tokenizer().encode(question, false)?;
        asks.push(Ask { tokens, question, answer, needs, plausible: inquiry.plausible });
    }
    let first = 0..place(protected);
    let utterances = (0..history.len())
        .map(|turn| place(turn)..place(turn + 1))
        .filter(|range| !range.is_empty())
        .collect();
    let protected = if first.is_empty() { Vec::new() } else { vec![first] };
    let history = all.first().map(|prompt| prompt[..len].to_vec()).unwrap_or_default();
    Ok(ConversationCase { variant, context, seed, history, protected, utterances, asks })
}

/// Position of each turn of a conversation of `told` tokens, and its end.
fn places(prompts: &Prompts<'_>, turns: &[Turn], told: usize) -> Result<Vec<usize>> {
    let opening = prompts.chat(&[])?.len();
    // Templates write messages one after the other, so that each can be counted by itself.
    let tokens = |turns: &[Turn]| prompts.chat(turns).map_or(0, |tokens| tokens.len());
    let mut places = vec![0, tokens(&turns[..turns.len().min(1)]).saturating_sub(opening)];
    for pair in turns.windows(2) {
        places.push(places[places.len() - 1] + tokens(pair).saturating_sub(tokens(&pair[..1])));
    }
    match places.last() == Some(&told) {
        true => Ok(places),
        // This template does not: every beginning of the conversation is counted.
        false => (0..=turns.len()).map(|turn| Ok(prompts.chat(&turns[..turn])?.len() - opening)).collect(),
    }
}
