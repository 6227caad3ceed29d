//! Prompts rendered by Jinja2 in Python (`fixtures/chat/cases.py`) must come out the same here.

use std::time::{Duration, UNIX_EPOCH};

use oscar_text::{ChatInput, ChatTemplate, SpecialTokens, TextError};
use serde_json::Value;

fn source(template: &str) -> String {
    let path = format!("{}/tests/fixtures/chat/{template}.jinja", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn render(case: &Value, now: u64) -> Result<String, TextError> {
    let mut special = SpecialTokens::default();
    for (role, token) in case["special"].as_object().unwrap() {
        special.set(role, token.as_str().unwrap());
    }
    let chat = ChatTemplate::from_source(&source(case["template"].as_str().unwrap()), &special)?
        .with_clock(move || UNIX_EPOCH + Duration::from_secs(now));
    chat.render(&ChatInput {
        tools: case.get("tools"),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(false),
        extra: case["extra"].as_object(),
        ..ChatInput::new(&case["messages"])
    })
}

/// Shows the first line that differs, which a whole prompt would bury.
fn difference(ours: &str, python: &str) -> String {
    let lines = ours.lines().zip(python.lines()).find(|(ours, python)| ours != python);
    let (ours, python) = lines.unwrap_or((ours, python));
    format!("  ours:   {ours:?}\n  python: {python:?}")
}

#[test]
fn prompts_equal_those_of_python() {
    let golden: Value = serde_json::from_str(include_str!("fixtures/chat/golden.json")).unwrap();
    let now = golden["now"].as_u64().unwrap();
    let mut wrong = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let outcome = render(case, now);
        let complaint = if let Some(expected) = case["expected"].as_str() {
            match outcome {
                Ok(text) if text == expected => continue,
                Ok(text) => difference(&text, expected),
                Err(error) => format!("  {error}"),
            }
        } else if let Some(expected) = case["raises"].as_str() {
            match outcome {
                Err(TextError::TemplateRaised { message }) if message == expected => continue,
                other => format!("  expected the refusal {expected:?}, got {other:?}"),
            }
        } else {
            match outcome {
                Err(TextError::TemplateRender { .. }) => continue,
                other => format!("  Python fails with {}, we got {other:?}", case["fails"]),
            }
        };
        wrong.push(format!("{} / {}:\n{complaint}", case["template"], case["name"]));
    }
    assert!(wrong.is_empty(), "{} prompts differ:\n{}", wrong.len(), wrong.join("\n"));
}
