//! Free text with calls in it.

use super::{Random, allowed, grammars_of, tokenizer, walk};
use oscar_text::{
    CallGrammar, Dialect, Grammar, ModelText, ReasoningTags, ReplyOptions, ReplyParser, Thinking, Tokenizer,
    ToolSchemas,
};
use serde_json::{Value, json};
use std::path::Path;

/// The tokenizer of the embedded model with more special tokens.
fn tokenizer_with(special: &[&str]) -> Tokenizer {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m");
    let mut json: Value =
        serde_json::from_slice(&std::fs::read(model.join("tokenizer.json")).unwrap()).unwrap();
    let first = tokenizer().vocab_size();
    let added = json["added_tokens"].as_array_mut().unwrap();
    added.extend(special.iter().enumerate().map(|(i, text)| {
        json!({"id": first + i, "content": text, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    }));
    let config = std::fs::read(model.join("tokenizer_config.json")).unwrap();
    ModelText::from_files(json.to_string().as_bytes(), Some(&config), None).unwrap().tokenizer
}

/// Text is free; a call in it, outside of reasoning, keeps to the schema of a strict tool.
#[test]
fn calls_amid_free_text_keep_their_schemas() {
    calls_keep_their_schemas(tokenizer(), false);
}

#[test]
fn calls_amid_free_text_keep_their_schemas_where_markers_are_special_tokens() {
    let mut markers = vec!["<think>", "</think>"];
    markers.extend(Dialect::ALL.iter().flat_map(|dialect| dialect.special_tokens()));
    // Not tokens of any model.
    markers.retain(|marker| !["<function=", "</function>", "</parameter>"].contains(marker));
    markers.sort_unstable();
    markers.dedup();
    calls_keep_their_schemas(tokenizer_with(&markers), true);
}

fn calls_keep_their_schemas(tokenizer: Tokenizer, special: bool) {
    let (grammars, mut random) = (grammars_of(&tokenizer), Random(17));
    let end = tokenizer.token_to_id(tokenizer.special().eos().unwrap()).unwrap();
    let parameters = json!({"type": "object", "additionalProperties": false, "required": ["days"],
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 14}}});
    let strict = ("get_weather".to_owned(), parameters);
    let tags = ReasoningTags { open: "<think>".to_owned(), close: "</think>".to_owned() };
    for (dialect, parallel) in Dialect::ALL.into_iter().flat_map(|d| [(d, false), (d, true)]) {
        let calls = |tools: Vec<(String, Value)>| CallGrammar { dialect, tools, parallel };
        let grammar = Grammar::Amid(calls(vec![strict.clone(), ("any".to_owned(), Value::Null)]));
        // Whether the tokens of `text` are allowed, and whether the answer may end then.
        let accepts = |thinking: &Thinking, text: &str| {
            let mut state = grammars.compile(&grammar, thinking).unwrap().start();
            let ids = tokenizer.encode(text, false).unwrap();
            let fits =
                |&id: &u32| allowed(&state.allowed().unwrap()).contains(&id) && state.accept(id).is_ok();
            ids.iter().all(fits).then(|| allowed(&state.allowed().unwrap()).contains(&end))
        };
        let form = Grammar::Calls(CallGrammar { parallel: false, ..calls(vec![strict.clone()]) });
        let form = grammars.compile(&form, &Thinking::None).unwrap();
        let call = (0..).find_map(|_| walk(&tokenizer, &form, &mut random, 600)).unwrap();
        let channels = dialect == Dialect::Harmony;
        let says = |text: &str| match channels {
            true => format!("<|channel|>final<|message|>{text}"),
            false => text.to_owned(),
        };
        let none = if channels { Thinking::Channels } else { Thinking::None };
        assert_eq!(accepts(&none, &says("It rains <now>.\n")), Some(true), "{dialect:?}");
        let wrong = [call.replace("days", "dais"), call.replace("get_weather", "get_wether")];
        let before: &[&str] = match dialect {
            // A call is the whole answer.
            Dialect::Llama => &[""],
            Dialect::Harmony => &["", "<|channel|>analysis<|message|>why<|end|><|start|>assistant"],
            _ => &["", "I look.\n"],
        };
        for before in before {
            assert_eq!(accepts(&none, &format!("{before}{call}")), Some(true), "{dialect:?}: {call}");
            for wrong in &wrong {
                assert_eq!(accepts(&none, &format!("{before}{wrong}")), None, "{dialect:?}: {wrong}");
            }
        }
        if !channels {
            // A marker that is a special token is no text, also in reasoning.
            let idea = if special { "days" } else { &wrong[0] };
            for (thinking, opened) in
                [(Thinking::Opened(tags.clone()), ""), (Thinking::Allowed(tags.clone()), "<think>")]
            {
                let thought = format!("{opened}Perhaps {idea}?</think>\n\n");
                for answer in ["It rains.", &call] {
                    let text = format!("{thought}{answer}");
                    assert_eq!(accepts(&thinking, &text), Some(true), "{dialect:?}: {text}");
                }
                assert_eq!(accepts(&thinking, &format!("{thought}{}", wrong[1])), None, "{dialect:?}");
            }
            let may = Thinking::Allowed(tags.clone());
            assert_eq!(accepts(&may, &call), Some(true), "{dialect:?}");
            assert_eq!(accepts(&may, "It rains."), Some(true), "{dialect:?}");
            assert_eq!(accepts(&may, &wrong[0]), None, "{dialect:?}");
        }
        if !matches!(dialect, Dialect::Llama | Dialect::Harmony) {
            let twice = accepts(&none, &format!("{call} and\n{call}\nDone."));
            assert_eq!(twice, parallel.then_some(true), "{dialect:?}");
        }
        let free = match dialect {
            Dialect::Hermes => "<tool_call>\n{\"name\": \"any\", \"arguments\": {\"x\": [1]}}\n</tool_call>",
            Dialect::Llama => "{\"name\": \"any\", \"parameters\": {\"x\": [1]}}",
            Dialect::Mistral if special => "[TOOL_CALLS]any[ARGS]{\"x\": [1]}",
            Dialect::Mistral => "[TOOL_CALLS] [{\"name\": \"any\", \"arguments\": {\"x\": [1]}}]",
            Dialect::QwenXml => {
                "<tool_call>\n<function=any>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
            }
            Dialect::Glm => "<tool_call>any\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            Dialect::MiniMax => {
                "<minimax:tool_call>\n<invoke name=\"any\">\n<parameter name=\"x\">1</parameter>\n</invoke>\n</minimax:tool_call>"
            }
            Dialect::Harmony => {
                "<|channel|>commentary to=functions.any <|constrain|>json<|message|>{\"x\": [1]}"
            }
        };
        assert_eq!(accepts(&none, free), Some(true), "{dialect:?}");
    }
}

/// Text that the reader takes for a call is no text for the grammar, whatever white space and
/// reasoning stand before it.
#[test]
fn what_reads_as_a_call_is_no_text() {
    let tokenizer = tokenizer();
    let grammars = grammars_of(&tokenizer);
    let tags = ReasoningTags { open: "<think>".to_owned(), close: "</think>".to_owned() };
    let parameters = json!({"type": "object", "additionalProperties": false, "required": ["days"],
        "properties": {"days": {"type": "integer"}}});
    let schemas = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let tools = std::sync::Arc::new(ToolSchemas::from_openai(schemas.as_array().unwrap()));
    let wrong = "{\"name\": \"f\", \"parameters\": {\"day\": 1}}";
    let white: String = ('\0'..='\u{ffff}').filter(|c| c.is_whitespace()).collect();
    let mut befores: Vec<String> = white.chars().map(String::from).collect();
    befores.extend(
        ["", " \u{a0}\n", "<think>a</think>", "\n<think>a</think>\n", "\u{3000}<think>a</think>\u{a0}"]
            .map(String::from),
    );
    for thinking in [Thinking::None, Thinking::Allowed(tags.clone())] {
        let calls = CallGrammar {
            dialect: Dialect::Llama,
            tools: vec![("f".to_owned(), parameters.clone())],
            parallel: true,
        };
        let constraint = grammars.compile(&Grammar::Amid(calls), &thinking).unwrap();
        for before in &befores {
            let text = format!("{before}{wrong}");
            let mut state = constraint.start();
            let ids = tokenizer.encode(&text, false).unwrap();
            let passes = ids
                .iter()
                .all(|&id| allowed(&state.allowed().unwrap()).contains(&id) && state.accept(id).is_ok());
            let reasoning = (thinking != Thinking::None).then(|| tags.clone());
            let options = ReplyOptions { reasoning, dialect: Some(Dialect::Llama), tools: tools.clone() };
            let mut parser = ReplyParser::new(&options, "");
            parser.push(&text);
            parser.finish();
            assert!(!passes || parser.calls() == 0, "{thinking:?}: {text:?}");
        }
        let mut state = constraint.start();
        let text = "\u{a0}It rains {\"a\": 1}.";
        let ids = tokenizer.encode(text, false).unwrap();
        assert!(
            ids.iter()
                .all(|&id| allowed(&state.allowed().unwrap()).contains(&id) && state.accept(id).is_ok()),
            "{thinking:?}"
        );
    }
}
