//! Every dialect: whole, cut everywhere, cut off everywhere; and whatever the cut, the same events.

mod dialects;
mod harmony;
mod properties;

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;

/// A reply, understood.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reply {
    pub text: String,
    pub reasoning: String,
    /// Name, arguments and whether they are complete.
    pub calls: Vec<(String, String, bool)>,
    pub malformed: usize,
}

pub(super) fn tools() -> Arc<ToolSchemas> {
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    Arc::new(ToolSchemas::from_openai(&[
        tool(
            "get_weather",
            json!({"type": "object", "$defs": {"Unit": {"enum": ["C", "F"]}}, "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"$ref": "#/$defs/Unit"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "verbose": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object"},
            }}),
        ),
        tool("now", json!({"type": "object", "properties": {}})),
    ]))
}

pub(super) fn options(dialect: Dialect) -> ReplyOptions {
    let reasoning = Some(ReasoningTags { open: "<think>".to_owned(), close: "</think>".to_owned() });
    ReplyOptions { reasoning, dialect: Some(dialect), tools: tools() }
}

/// All events of a reply that arrives in pieces, neighbours joined.
pub(super) fn events<'a>(
    options: &ReplyOptions,
    pieces: impl IntoIterator<Item = &'a str>,
) -> (Vec<ReplyEvent>, usize) {
    // Prompts of gpt-oss end inside the header of the first message.
    let harmony = options.dialect == Some(Dialect::Harmony);
    let mut parser = ReplyParser::new(options, if harmony { "<|start|>assistant" } else { "" });
    let mut joined = Sink::new(tools(), false);
    let mut all: Vec<ReplyEvent> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    all.extend(parser.finish());
    for event in all {
        match event {
            ReplyEvent::Text(text) => joined.text(&text),
            ReplyEvent::Reasoning(text) => joined.reasoning(&text),
            ReplyEvent::CallStarted { index, id, name } => {
                assert_eq!(index, joined.calls(), "calls are numbered in order");
                assert!(!joined.started(), "one call at a time");
                joined.start(name, id);
            }
            ReplyEvent::Arguments { index, delta } => {
                assert!(joined.started() && index + 1 == joined.calls(), "arguments belong to the open call");
                joined.arguments(&delta);
            }
            ReplyEvent::CallFinished { index } => {
                assert!(joined.started() && index + 1 == joined.calls());
                joined.finish();
            }
            ReplyEvent::CallBroken { index, text } => {
                assert!(joined.started() && index + 1 == joined.calls());
                joined.break_off(text);
            }
        }
    }
    assert!(!joined.started(), "every call is finished");
    assert_eq!((joined.calls(), joined.complete()), (parser.calls(), parser.complete_calls()));
    (joined.take(), parser.malformed())
}

pub(super) fn reply((events, malformed): (Vec<ReplyEvent>, usize)) -> Reply {
    let mut reply = Reply { malformed, ..Reply::default() };
    for event in events {
        match event {
            ReplyEvent::Text(text) => reply.text += &text,
            ReplyEvent::Reasoning(text) => reply.reasoning += &text,
            ReplyEvent::CallStarted { name, .. } => reply.calls.push((name, String::new(), false)),
            ReplyEvent::Arguments { index, delta } => reply.calls[index].1 += &delta,
            ReplyEvent::CallFinished { index } => reply.calls[index].2 = true,
            ReplyEvent::CallBroken { .. } => {}
        }
    }
    for (_, arguments, complete) in &reply.calls {
        if *complete {
            serde_json::from_str::<serde_json::Map<String, Value>>(arguments).expect(arguments);
        }
    }
    reply
}

/// The text of a whole answer: calls that broke off are text.
pub(super) fn content(events: &[ReplyEvent]) -> String {
    let text = |event: &ReplyEvent| match event {
        ReplyEvent::Text(text) | ReplyEvent::CallBroken { text, .. } => text.clone(),
        _ => String::new(),
    };
    events.iter().map(text).collect()
}

pub(super) fn whole(dialect: Dialect, text: &str) -> Reply {
    reply(events(&options(dialect), [text]))
}

/// Cuts the text into characters.
pub(super) fn characters(text: &str) -> Vec<&str> {
    text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]).collect()
}
