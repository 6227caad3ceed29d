use proptest::prelude::*;

use super::*;

/// Two of them are longer than any name may be.
const LONG: &str = match str::from_utf8(&[b'a'; 150]) {
    Ok(text) => text,
    Err(_) => "",
};

const FRAGMENTS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<function=now>",
    "<function=",
    "</function>",
    "<parameter=city>",
    "</parameter>",
    "<arg_key>city</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=\"now\">",
    "<parameter name=\"days\">",
    "</invoke>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "{\"name\": \"now\"",
    ", \"arguments\": {",
    ", \"parameters\": ",
    "\"a\": ",
    "{\"",
    "\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    ";",
    ":",
    "\n",
    " ",
    "now",
    LONG,
    "5",
    "é",
    "😀",
    "<",
    ">",
    "\\",
    "\u{1}",
    "<|start|>",
    "assistant",
    "<|channel|>",
    "analysis",
    "final",
    "commentary to=functions.now ",
    "<|constrain|>json",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|start|>assistant<|channel|>final<|message|>",
    "<|channel|>analysis<|message|>",
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>",
    "{\"name\": \"now\", \"arguments\": {}}",
    "{\"name\": \"now\", \"parameters\": {\"x\": [1, {}]}}",
];

fn any_text() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(FRAGMENTS), 0..24).prop_map(|parts| parts.concat())
}

/// Everything an event shows.
fn shown(event: &ReplyEvent) -> String {
    match event {
        ReplyEvent::Text(text) | ReplyEvent::Reasoning(text) => text.clone(),
        ReplyEvent::CallStarted { id, name, .. } => name.clone() + id.as_deref().unwrap_or_default(),
        ReplyEvent::Arguments { delta, .. } => delta.clone(),
        ReplyEvent::CallFinished { .. } | ReplyEvent::CallBroken { .. } => String::new(),
    }
}

/// Whether `part` can be got from `text` by leaving characters out.
fn is_subsequence(part: &str, text: &str) -> bool {
    let mut rest = text.chars();
    part.chars().all(|c| rest.any(|other| other == c))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]
    #[test]
    fn the_cut_does_not_matter_and_nothing_is_lost(
        text in any_text(),
        dialect in prop::sample::select(Dialect::ALL.to_vec()),
        cuts in prop::collection::vec(1usize..12, 1..8),
        reasons: bool,
    ) {
        let mut options = options(dialect);
        if !reasons {
            options.reasoning = None;
        }
        let mut pieces = Vec::new();
        let (mut rest, mut cut) = (text.as_str(), cuts.iter().cycle());
        while !rest.is_empty() {
            let size = *cut.next().unwrap();
            let at = rest.char_indices().nth(size).map_or(rest.len(), |(at, _)| at);
            pieces.push(&rest[..at]);
            rest = &rest[at..];
        }
        let expected = events(&options, [text.as_str()]);
        prop_assert_eq!(&events(&options, pieces), &expected);
        let thinks = expected.0.iter().any(|event| matches!(event, ReplyEvent::Reasoning(_)));
        let shown: String = expected.0.iter().map(shown).collect();
        let content = content(&expected.0);
        let reply = reply(expected);
        if dialect != Dialect::Harmony && !reply.calls.iter().any(|call| call.2) && (!reasons || !text.contains("think>")) {
            prop_assert_eq!(&content, &text, "a whole answer without complete calls is its text");
        }
        prop_assert!(is_subsequence(&reply.text, &text), "text out of nowhere: {:?}", reply.text);
        if reply.calls.is_empty() && dialect != Dialect::Harmony {
            prop_assert!(is_subsequence(&reply.reasoning, &text));
            if !reasons {
                prop_assert_eq!(&reply.text, &text);
            } else if !thinks && !text.contains("<think>") {
                prop_assert_eq!(&reply.text, &text);
            }
        } else {
            // Only markup and white space may go: every character that no markup uses is still
            // there.
            for c in ['é', '😀'] {
                prop_assert_eq!(shown.matches(c).count(), text.matches(c).count(), "{} in {}", c, text);
            }
        }
    }
}
