//! Chat templates, tokenizer files, and replies with tool calls.

use crate::{corpus, folder};
use oscar_codec::random::SplitMix64;
use oscar_fuzz::fuzz;
use oscar_text::{
    ChatInput, ChatTemplate, Dialect, ReasoningTags, ReplyEvent, ReplyOptions, ReplyParser, SpecialTokens,
    Tokenizer, TokenizerConfig, ToolSchemas,
};
use serde_json::json;
use std::sync::Arc;

#[test]
fn templates() {
    let mut templates = corpus("../text/tests/fixtures/chat", ".jinja");
    templates.extend(corpus("corpus/template", ".jinja"));
    let messages = json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "{}"}, {"role": "user", "content": "And now?"}]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    fuzz("templates", &templates, 3000, |bytes| {
        let source = String::from_utf8_lossy(bytes);
        let Ok(template) = ChatTemplate::from_source(&source, &SpecialTokens::default()) else { return };
        let input = ChatInput { tools: Some(&tools), ..ChatInput::new(&messages) };
        let _ = template.with_step_limit(100_000).render(&input);
    });
}

#[test]
fn tokenizer_files() {
    let whole = std::fs::read(folder("corpus/tokenizer.json")).unwrap();
    fuzz("tokenizer_files", &[whole], 3000, |bytes| {
        if let Ok(tokenizer) = Tokenizer::from_json(bytes, &TokenizerConfig::default()) {
            let _ = tokenizer.encode("Some text <|x|> 12", true).map(|ids| tokenizer.decode(&ids, false));
        }
    });
}

#[test]
fn tokenizer_configurations() {
    let config = std::fs::read(folder("../../models/oscar-15m/tokenizer_config.json")).unwrap();
    fuzz("tokenizer_configurations", &[config], 10_000, |bytes| {
        let _ = TokenizerConfig::from_json(bytes);
    });
}

/// A reply reads the same in one piece and in many.
#[test]
fn replies() {
    let tags = ReasoningTags { open: "<think>".into(), close: "</think>".into() };
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    let tools = Arc::new(ToolSchemas::from_openai(&["f", "g", "now"].map(tool)));
    fuzz("replies", &corpus("corpus/reply", ".txt"), 4000, |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let mut random = SplitMix64::new(bytes.len() as u64);
        for dialect in Dialect::ALL {
            let (reasoning, tools) = (Some(tags.clone()), tools.clone());
            let options = ReplyOptions { reasoning, dialect: Some(dialect), tools };
            let prompt = if dialect.has_channels() { "<|start|>assistant" } else { "" };
            let mut parser = ReplyParser::new(&options, prompt);
            let (mut rest, mut seen) = (&*text, Vec::new());
            while !rest.is_empty() {
                let cut = rest.ceil_char_boundary(1 + random.below(7));
                seen.extend(parser.push(&rest[..cut]));
                rest = &rest[cut..];
            }
            seen.extend(parser.finish());
            let mut whole = ReplyParser::new(&options, prompt);
            let mut expected = whole.push(&text);
            expected.extend(whole.finish());
            assert_eq!(shown(&seen), shown(&expected), "{dialect:?}");
            assert_eq!(
                (parser.calls(), parser.malformed(), parser.in_reasoning()),
                (whole.calls(), whole.malformed(), whole.in_reasoning()),
                "{dialect:?}"
            );
        }
    });
}

/// Everything that the events show, with the borders between texts, reasoning and calls.
fn shown(events: &[ReplyEvent]) -> Vec<(u8, String)> {
    let mut joined: Vec<(u8, String)> = Vec::new();
    for event in events {
        let (kind, text) = match event {
            ReplyEvent::Text(text) => (0, text.clone()),
            ReplyEvent::Reasoning(text) => (1, text.clone()),
            ReplyEvent::CallStarted { id, name, .. } => (2, format!("{name} {id:?}")),
            ReplyEvent::Arguments { delta, .. } => (3, delta.clone()),
            ReplyEvent::CallFinished { .. } => (4, String::new()),
            ReplyEvent::CallBroken { text, .. } => (5, text.clone()),
        };
        match joined.last_mut() {
            Some((last, so_far)) if *last == kind => so_far.push_str(&text),
            _ => joined.push((kind, text)),
        }
    }
    joined
}
