//! Constrained generation: which tokens may come next so that the answer fits a schema, a regular
//! expression or a grammar.
//!
//! The parser is `llguidance`. [`Grammars`] holds a vocabulary and compiles; a [`Constraint`] is a
//! compiled grammar and hands out one [`ConstraintState`] for each answer.
//!
//! Invariant: a state that has accepted the tokens so far always allows another token, or the
//! answer is complete.

mod amid;
mod calls;
mod gbnf;
mod size;
mod vocabulary;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::SimpleVob;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

pub use calls::CallGrammar;
use calls::Lark;

use crate::tools::ReasoningTags;
use crate::{TextError, Tokenizer};

/// Compiled grammars that are kept for the next request with the same one.
const KEPT: usize = 64;

/// Longest source of a grammar in bytes. Compilation has limits of its own; this one bounds the
/// keys kept.
const MAX_SOURCE: usize = 512 << 10;

/// The form an answer must have.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    JsonSchema(Value),
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's variant of Lark, or in llama.cpp's GBNF.
    Source(String),
    /// One or more calls of tools.
    Calls(CallGrammar),
    /// Free text, and calls of tools in it.
    Amid(CallGrammar),
    /// An answer of this form, or calls of tools.
    OrCalls(Box<Grammar>, CallGrammar),
}

/// Reasoning that may stand before the constrained answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Thinking {
    None,
    /// The prompt has opened the reasoning.
    Opened(ReasoningTags),
    /// The model may open it.
    Allowed(ReasoningTags),
    /// The prompt ends in the header of a message in channels, after `<|start|>assistant`. Reasoning
    /// may come in a message of its own; an answer other than calls stands in the channel `final`.
    Channels,
}

/// Compiles grammars for one vocabulary.
pub struct Grammars {
    tokenizer: Tokenizer,
    factory: ParserFactory,
    kept: Mutex<VecDeque<(String, Constraint)>>,
}

/// A compiled grammar; clones share it.
#[derive(Clone)]
pub struct Constraint {
    matcher: Arc<Mutex<Matcher>>,
}

/// How far one answer has got in its grammar.
pub struct ConstraintState {
    matcher: Matcher,
}

impl Grammars {
    /// `vocab_size` is the model's, which may exceed the tokenizer's; `end_tokens` end an answer
    /// that is complete.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize, end_tokens: &[u32]) -> Result<Self, TextError> {
        let factory = vocabulary::factory(tokenizer, vocab_size, end_tokens)?;
        Ok(Self { tokenizer: tokenizer.clone(), factory, kept: Mutex::default() })
    }

    /// Compiles a grammar, or finds it compiled.
    pub fn compile(&self, grammar: &Grammar, thinking: &Thinking) -> Result<Constraint, TextError> {
        size::check(grammar)?;
        if *thinking != Thinking::None {
            // Reasoning is always allowed, so a grammar without any answer shows only without it.
            self.compile(grammar, &Thinking::None)?;
        }
        if let Grammar::Amid(calls) = grammar {
            // Text without calls is always allowed too, so schemas that no call fits show only alone.
            self.compile(&Grammar::Calls(calls.clone()), &Thinking::None)?;
        }
        let grammar = self.lower(grammar, thinking)?;
        let key = serde_json::to_string(&grammar)
            .map_err(|error| TextError::Grammar { reason: error.to_string() })?;
        if key.len() > MAX_SOURCE {
            let reason = format!("it has {} bytes, more than the {MAX_SOURCE} allowed", key.len());
            return Err(TextError::Grammar { reason });
        }
        if let Some(found) = self.find(&key) {
            return Ok(found);
        }
        let parser = self
            .factory
            .create_parser(grammar)
            .map_err(|error| TextError::Grammar { reason: explain(&error.to_string()) })?;
        let mut matcher = Matcher::new(Ok(parser));
        // A grammar without any answer is refused here rather than in the middle of the work.
        matcher
            .compute_mask_or_eos()
            .map_err(|error| TextError::Grammar { reason: explain(&error.to_string()) })?;
        let constraint = Constraint { matcher: Arc::new(Mutex::new(matcher)) };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.truncate(KEPT - 1);
        kept.push_front((key, constraint.clone()));
        Ok(constraint)
    }

    fn find(&self, key: &str) -> Option<Constraint> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(other, _)| other == key)?;
        let entry = kept.remove(at)?;
        let found = entry.1.clone();
        kept.push_front(entry);
        Some(found)
    }

    fn lower(&self, grammar: &Grammar, thinking: &Thinking) -> Result<TopLevelGrammar, TextError> {
        if let Grammar::Amid(calls) = grammar {
            let lark = amid::to_lark(calls, &self.tokenizer, thinking);
            return Ok(TopLevelGrammar::from_lark(lark));
        }
        let calls = |calls: &CallGrammar| Grammar::Calls(calls.clone());
        let parts = match grammar {
            Grammar::OrCalls(form, or) => vec![(**form).clone(), calls(or)],
            single => vec![single.clone()],
        };
        let mut bodies = parts.iter().map(|part| self.body(part)).collect::<Result<Vec<_>, _>>()?;
        if bodies.len() == 1 && *thinking == Thinking::None {
            return Ok(TopLevelGrammar { grammars: bodies, max_tokens: None });
        }
        let mark = |text: &str| marker(&self.tokenizer, text);
        let mut names = Vec::new();
        for (index, (body, part)) in bodies.iter_mut().zip(&parts).enumerate() {
            let channel = match (thinking, part) {
                (Thinking::Channels, Grammar::Calls(_)) => String::new(),
                (Thinking::Channels, _) => {
                    format!("{} \"final\" {} ", mark("<|channel|>"), mark("<|message|>"))
                }
                _ => String::new(),
            };
            names.push(format!("{channel}@body{index}"));
            body.name = Some(format!("body{index}"));
        }
        let mut lark = Lark::new(&self.tokenizer);
        let think = think(&mut lark, thinking);
        let opening = match thinking {
            Thinking::None => String::new(),
            Thinking::Opened(_) => think,
            Thinking::Allowed(tags) => format!("({} {think})?", mark(&tags.open)),
            Thinking::Channels => {
                format!("({} \"analysis\" {} {think})?", mark("<|channel|>"), mark("<|message|>"))
            }
        };
        let lark = format!("start: {opening} ({})\n{}", names.join(" | "), lark.text);
        bodies.insert(0, GrammarWithLexer::from_lark(lark));
        Ok(TopLevelGrammar { grammars: bodies, max_tokens: None })
    }

    fn body(&self, grammar: &Grammar) -> Result<GrammarWithLexer, TextError> {
        Ok(match grammar {
            Grammar::JsonObject => GrammarWithLexer::from_json_schema(plain_json(json!({"type": "object"}))),
            Grammar::JsonSchema(schema) => GrammarWithLexer::from_json_schema(plain_json(schema.clone())),
            Grammar::Regex(regex) => GrammarWithLexer::from_regex(regex),
            Grammar::Choice(options) => {
                let options: Vec<String> = options.iter().map(|option| literal(option)).collect();
                GrammarWithLexer::from_lark(format!("start: {}\n", options.join(" | ")))
            }
            Grammar::Source(source) if gbnf::is_gbnf(source) => {
                GrammarWithLexer::from_lark(gbnf::to_lark(source)?)
            }
            Grammar::Source(source) => GrammarWithLexer::from_lark(source.clone()),
            Grammar::Calls(calls) => GrammarWithLexer::from_lark(calls.to_lark(&self.tokenizer)),
            Grammar::Amid(_) | Grammar::OrCalls(..) => {
                return Err(TextError::Grammar { reason: "alternatives cannot be nested".to_owned() });
            }
        })
    }
}

impl Constraint {
    /// The state of a new answer.
    pub fn start(&self) -> ConstraintState {
        let matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner);
        ConstraintState { matcher: matcher.deep_clone() }
    }
}

impl ConstraintState {
    /// The tokens that may come next: bit `i % 32` of word `i / 32` is set for token `i`.
    pub fn allowed(&mut self) -> Result<Vec<u32>, TextError> {
        let mask: SimpleVob = self.matcher.compute_mask_or_eos().map_err(|error| stopped(&error))?;
        Ok(mask.as_slice().to_vec())
    }

    /// Takes the next token; true if the answer is complete and nothing may follow.
    pub fn accept(&mut self, token: u32) -> Result<bool, TextError> {
        if self.matcher.is_stopped() {
            return Ok(true);
        }
        self.matcher.consume_token(token).map_err(|error| stopped(&error))?;
        Ok(self.matcher.is_stopped())
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("tokenizer", &self.tokenizer).finish()
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish()
    }
}

impl fmt::Debug for ConstraintState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConstraintState").finish()
    }
}

/// The rule of reasoning, its end and what separates it from the answer; nothing where no reasoning
/// may stand.
fn think(lark: &mut Lark<'_>, thinking: &Thinking) -> String {
    let (close, rest) = match thinking {
        Thinking::None => return String::new(),
        Thinking::Opened(tags) | Thinking::Allowed(tags) => (tags.close.as_str(), "BREAK?".to_owned()),
        Thinking::Channels => ("<|end|>", format!("{} \"assistant\"", marker(lark.tokenizer, "<|start|>"))),
    };
    lark.text += "THOUGHT: /(.|\\n)*/\nBREAK: /[\\n]{1,2}/\n";
    let thought = lark.text_and("THOUGHT", close);
    lark.rule(&format!("{thought} {rest}"))
}

fn stopped(error: &dyn fmt::Display) -> TextError {
    TextError::Grammar { reason: explain(&error.to_string()) }
}

/// One sentence of the parser's words, without the dump of its state. Words that name its own
/// options and states become advice.
fn explain(text: &str) -> String {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    if first.ends_with("regex parse error:") {
        // Long patterns, and those of several lines, which come in a frame, are not repeated.
        let short = |line: &&str| line.len() <= 80 && !line.starts_with("~~");
        let pattern = lines.next().filter(short).map(|line| format!(" `{line}`")).unwrap_or_default();
        let reason = lines.find_map(|line| line.strip_prefix("error: ")).unwrap_or("it cannot be read");
        return format!("the regular expression{pattern}: {reason}; change the pattern");
    }
    match first {
        _ if first.contains("lookarounds not supported") => {
            "word boundaries, and line boundaries inside a pattern, are not supported in regular expressions; \
             change the pattern"
                .to_owned()
        }
        _ if first.contains("oneOf constraints are not supported") => {
            "`oneOf` is not supported where an answer may fit two of its schemas; use `anyOf`".to_owned()
        }
        _ if first.contains("NoExtensionBias") => {
            "no answer fits it; a rule or `$ref` that refers to itself needs an alternative that ends".to_owned()
        }
        _ if first.contains("Current row has") || first.contains("Too many items") => {
            "it leaves too many ways to go on at one place of the answer; split it, or make members `required`"
                .to_owned()
        }
        _ if first.contains("too big (limit") || first.contains("fuel") => {
            "it is too large to be followed; send a smaller schema or grammar".to_owned()
        }
        _ => match first.split_once("Unimplemented keys: ") {
            Some((_, keys)) => refused_keywords(keys),
            None => first.to_owned(),
        },
    }
}

/// Names keywords that the parser lists as `["a", "b"]`.
fn refused_keywords(list: &str) -> String {
    let mut names: Vec<String> = serde_json::from_str(list).unwrap_or_else(|_| vec![list.to_owned()]);
    names.sort_unstable();
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.as_slice() {
        [one] => format!("the keyword {one} is not supported; remove it from the schema"),
        many => format!("the keywords {} are not supported; remove them from the schema", many.join(", ")),
    }
}

/// A schema whose JSON is written with the spaces of Python's `json.dumps`, as models were trained
/// on it, and no others: free white space would let an answer go on for ever.
fn plain_json(mut schema: Value) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Value::Object(members) = &mut schema {
        let style = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        members.insert("x-guidance".to_owned(), style);
    }
    schema
}

/// A text as Lark writes it.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A marker as Lark writes it: its token if it is a special one, else its text.
fn marker(tokenizer: &Tokenizer, text: &str) -> String {
    special(tokenizer, text).unwrap_or_else(|| literal(text))
}

fn special(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    let id = tokenizer.token_to_id(text).filter(|&id| tokenizer.is_special(id))?;
    Some(format!("<[{id}]>"))
}
