//! Grammars of free text with calls in it: the text is free, the calls are held to their schemas.
//!
//! Invariant: text never holds what the reader of replies takes for the opening of a call, so every
//! call goes through the grammar.

use super::calls::{CallGrammar, Lark};
use super::{Thinking, literal, marker, special};
use crate::Tokenizer;
use crate::tools::{Dialect, ReasoningTags};

/// The white space that the reader of replies skips: `char::is_whitespace`.
const SPACE: &str =
    "[\\x{9}-\\x{d} \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}]";

/// The grammar of an answer that may hold calls anywhere, or none.
pub(super) fn to_lark(calls: &CallGrammar, tokenizer: &Tokenizer, thinking: &Thinking) -> String {
    let mut lark = Lark::new(tokenizer);
    let block = calls.block(&mut lark);
    let start = match calls.opener() {
        _ if calls.dialect == Dialect::Harmony => in_channels(&mut lark, &block, thinking),
        Some(opener) => around_markers(&mut lark, calls, opener, &block, thinking),
        None => text_or_calls(&mut lark, calls.dialect, &block, thinking),
    };
    format!("start: {start}\n{}", lark.text)
}

/// Messages of reasoning or text, then an answer or a call.
fn in_channels(lark: &mut Lark<'_>, call: &str, thinking: &Thinking) -> String {
    let mark = |text: &str| marker(lark.tokenizer, text);
    let (channel, message, next) =
        (mark("<|channel|>"), mark("<|message|>"), format!("{} \"assistant\"", mark("<|start|>")));
    lark.text += "TEXT: /(.|\\n)*/\n";
    let rest = lark.text_and("TEXT", "<|end|>");
    let note = lark.rule(&format!("{channel} (\"analysis\" | \"commentary\") {message} {rest} {next}"));
    let messages = lark.rule(&format!("{note}* ({call} | {channel} \"final\" {message} TEXT?)"));
    match thinking {
        Thinking::Channels => messages,
        // The prompt ends inside a message.
        _ => format!("TEXT? | {rest} {next} {messages}"),
    }
}

/// Text with blocks of calls, which begin with a marker.
fn around_markers(
    lark: &mut Lark<'_>,
    calls: &CallGrammar,
    opener: &str,
    block: &str,
    thinking: &Thinking,
) -> String {
    text_without(lark, calls.dialect, "");
    let head = lark.text_and("TEXT", opener);
    let rest = match calls.parallel {
        true => lark.rule(&format!("({head} {block})* TEXT?")),
        false => lark.rule(&format!("TEXT? | {head} {block} TEXT?")),
    };
    let think = super::think(lark, thinking);
    match thinking {
        Thinking::None | Thinking::Channels => rest,
        Thinking::Opened(_) => format!("{think} {rest}"),
        Thinking::Allowed(tags) if special(lark.tokenizer, &tags.open).is_some() => {
            format!("({} {think})? {rest}", marker(lark.tokenizer, &tags.open))
        }
        Thinking::Allowed(tags) => {
            // Text would swallow a tag that is no special token.
            lark.text += &opening(tags);
            lark.text += "FRESH: TEXT & ~(THINK ANY)\n";
            let (head, tail) = (lark.text_and("FRESH", opener), if calls.parallel { &rest } else { "TEXT?" });
            format!("THINK {think} {rest} | FRESH? | {head} {block} {tail}")
        }
    }
}

/// The terminal of a tag that opens reasoning: the reader skips the white space before it.
fn opening(tags: &ReasoningTags) -> String {
    format!("THINK: /{SPACE}*/ {}\n", literal(&tags.open))
}

/// Calls as the whole answer, which begins with `{`, or text that does not.
fn text_or_calls(lark: &mut Lark<'_>, dialect: Dialect, calls: &str, thinking: &Thinking) -> String {
    let think = super::think(lark, thinking);
    let (opening, closed) = match thinking {
        Thinking::None | Thinking::Channels => (String::new(), String::new()),
        Thinking::Opened(_) => (think, String::new()),
        Thinking::Allowed(tags) => match special(lark.tokenizer, &tags.open) {
            Some(open) => (format!("({open} {think})?"), String::new()),
            None => {
                lark.text += &self::opening(tags);
                (format!("(THINK {think})?"), " & ~(THINK ANY)".to_owned())
            }
        },
    };
    text_without(lark, dialect, &format!(" & ~(/{SPACE}*/ \"{{\" ANY){closed}"));
    format!("{opening} (TEXT? | {calls})")
}

/// The terminal of text without the openings of calls.
fn text_without(lark: &mut Lark<'_>, dialect: Dialect, more: &str) {
    let openers: Vec<String> = dialect.openers().iter().map(|opener| literal(opener)).collect();
    lark.text +=
        &format!("ANY: /(.|\\n)*/\nOPENER: {}\nTEXT: ANY & ~(ANY OPENER ANY){more}\n", openers.join(" | "));
}
