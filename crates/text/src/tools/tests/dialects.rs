use super::*;

const WEATHER: &str = r#"{"city": "Zürich 😀 \"old\" {town}", "where": {"a": [1, {"b": "}"}]}, "days": 3}"#;

/// A dialect, a reply and what it says.
struct Case {
    dialect: Dialect,
    text: String,
    reply: Reply,
}

fn case(dialect: Dialect, text: &str, content: &str, calls: &[(&str, &str)]) -> Case {
    let calls =
        calls.iter().map(|(name, arguments)| (name.to_string(), arguments.to_string(), true)).collect();
    let reply = Reply { text: content.to_owned(), calls, ..Reply::default() };
    Case { dialect, text: text.to_owned(), reply }
}

fn cases() -> Vec<Case> {
    use Dialect::*;
    let hermes = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let two = hermes("get_weather", WEATHER) + "\n" + &hermes("now", "{}");
    let both = [("get_weather", WEATHER), ("now", "{}")];
    let qwen = "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n\"old\" </b> <x\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a\", \"b\"]\n</parameter>\n<parameter=verbose>\nTrue\n</parameter>\n</function>\n</tool_call>";
    let qwen_arguments = "{\"city\": \"Zürich\\n\\\"old\\\" </b> <x\", \"days\": 3, \"tags\": [\"a\", \"b\"], \"verbose\": true}";
    let glm = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{\"x\": {\"y\": 1}}</arg_value>\n<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n</tool_call>";
    let glm_arguments = r#"{"city": "7", "where": {"x": {"y": 1}}, "note": null}"#;
    let minimax = "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Genève\n</parameter>\n<parameter name=\"unit\">C</parameter>\n<parameter name=\"other\">[1]</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>";
    let minimax_arguments = "{\"city\": \"Genève\\n\", \"unit\": \"C\", \"other\": [1]}";
    vec![
        case(Hermes, &two, "", &both),
        case(
            Hermes,
            &format!("Let me look.\n\n{two}\n  Done <tool_call"),
            "Let me look.\n  Done <tool_call",
            &both,
        ),
        case(Hermes, &two.replace("</tool_call>", ""), "", &both),
        case(
            Hermes,
            "<tool_call>{\"id\": \"x\", \"type\": \"function\", \"arguments\": {\"a\": 1}, \"extra\": [2.5e3], \"n\": 1, \"name\": \"f\"}</tool_call>",
            "",
            &[("f", "{\"a\": 1}")],
        ),
        case(
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": \\\"é\\\"}\"}</tool_call>",
            "",
            &[("f", "{\"a\": \"é\"}")],
        ),
        case(Hermes, "<tool_call>{\"name\": \"f\"}</tool_call>", "", &[("f", "{}")]),
        case(
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"line\nbreak\t\"}}</tool_call>",
            "",
            &[("f", "{\"a\": \"line\\nbreak\\t\"}")],
        ),
        case(Hermes, qwen, "", &[("get_weather", qwen_arguments)]),
        case(QwenXml, qwen, "", &[("get_weather", qwen_arguments)]),
        case(
            QwenXml,
            &format!("I look.\n{}", &qwen.replace("<tool_call>\n", "").replace("\n</tool_call>", "")),
            "I look.",
            &[("get_weather", qwen_arguments)],
        ),
        case(QwenXml, &two, "", &both),
        case(
            QwenXml,
            "<tool_call>\n<function=now>\n</function>\n<function=now>\n<parameter=x>\n\n</parameter>\n</tool_call>\nafter",
            "after",
            &[("now", "{}"), ("now", "{\"x\": \"\"}")],
        ),
        case(
            Llama,
            &format!(
                "{{\"name\": \"get_weather\", \"parameters\": {WEATHER}}}; {{\"name\": \"now\", \"parameters\": {{}}}}"
            ),
            "",
            &both,
        ),
        case(
            Llama,
            "<|python_tag|>{\"type\": \"function\", \"name\": \"now\", \"parameters\": {}}",
            "",
            &[("now", "{}")],
        ),
        case(Llama, "{\"answer\": [1, 2]} is no call", "{\"answer\": [1, 2]} is no call", &[]),
        case(
            Llama,
            "{\"name\": \"unknown\", \"parameters\": {}}",
            "{\"name\": \"unknown\", \"parameters\": {}}",
            &[],
        ),
        case(
            Mistral,
            &format!(
                "[TOOL_CALLS] [{{\"name\": \"get_weather\", \"arguments\": {WEATHER}, \"id\": \"123456789\"}}, {{\"name\": \"now\", \"arguments\": {{}}}}]"
            ),
            "",
            &both,
        ),
        case(
            Mistral,
            &format!(
                "Sure.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{WEATHER}[TOOL_CALLS]now{{}} and text"
            ),
            "Sure. and text",
            &both,
        ),
        case(Mistral, "[TOOL_CALLS]now[ARGS]{}", "", &[("now", "{}")]),
        case(
            Glm,
            &format!("Look.\n{glm}\n<tool_call>now</tool_call>"),
            "Look.",
            &[("get_weather", glm_arguments), ("now", "{}")],
        ),
        case(Glm, &glm.replace('\n', ""), "", &[("get_weather", glm_arguments)]),
        case(
            MiniMax,
            &format!("{minimax}\nend"),
            "end",
            &[("get_weather", minimax_arguments), ("now", "{}")],
        ),
        case(
            Harmony,
            &format!(
                "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>\n{{}}\n<|call|>"
            ),
            "",
            &both,
        ),
        case(
            Harmony,
            &format!(
                "<|channel|>commentary<|message|>Ich sehe nach: é 😀.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER}<|call|>\n<|start|>assistant<|channel|>final<|message|>Done <|en"
            ),
            "Ich sehe nach: é 😀.Done <|en",
            &both[..1],
        ),
        case(
            Harmony,
            " to=functions.now<|channel|>commentary<|constrain|>json<|message|>{} and text<|return|>",
            " and text",
            &[("now", "{}")],
        ),
        case(Harmony, "<|channel|>final<|message|>{\"a\": 1}<|return|>", "{\"a\": 1}", &[]),
        case(Harmony, "no channel at all", "no channel at all", &[]),
    ]
}

#[test]
fn every_dialect_is_understood() {
    for Case { dialect, text, reply } in cases() {
        let whole = whole(dialect, &text);
        assert_eq!(Reply { malformed: 0, ..whole }, reply, "{dialect:?}: {text}");
    }
}

#[test]
fn the_cut_does_not_matter() {
    for Case { dialect, text, .. } in cases() {
        let options = options(dialect);
        let expected = events(&options, [text.as_str()]);
        assert_eq!(events(&options, characters(&text)), expected, "{dialect:?}: {text}");
        for at in (1..text.len()).filter(|&at| text.is_char_boundary(at)) {
            assert_eq!(events(&options, [&text[..at], &text[at..]]), expected, "{dialect:?} at {at}: {text}");
        }
    }
}

#[test]
fn a_reply_may_end_anywhere() {
    for Case { dialect, text, reply: full } in cases() {
        for at in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
            let part = &text[..at];
            let options = options(dialect);
            let cut = events(&options, [part]);
            assert_eq!(events(&options, characters(part)), cut, "{dialect:?}: {part}");
            let cut = reply(cut);
            for (call, of_full) in cut.calls.iter().zip(&full.calls) {
                assert_eq!(call.0, of_full.0);
                let agree = call.1.char_indices().find(|&(at, c)| !of_full.1[at..].starts_with(c));
                // The beginning of a closing tag counts as text when nothing follows it.
                let surplus = agree.map_or("", |(at, _)| &call.1[at..]);
                let tags = ["\\n</parameter>", "</parameter>", "</arg_value>"];
                assert!(tags.iter().any(|tag| tag.starts_with(surplus)), "{dialect:?}: {part}: {call:?}");
                assert!(!call.2 || call.1 == of_full.1, "{dialect:?}: {part}: {call:?}");
            }
            let incomplete = cut.calls.iter().filter(|call| !call.2).count();
            assert!(incomplete <= cut.malformed, "{dialect:?}: {part}");
        }
    }
}

#[test]
fn reasoning_stands_before_and_between_calls() {
    let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let text = format!(
        "<think>\nfirst <tool_call>{{\n</think>\n\nSo:\n{call}\n<think>second</think>\n{call} a <think>text</think>"
    );
    let reply = whole(Dialect::Hermes, &text);
    assert_eq!(reply.reasoning, "first <tool_call>{second");
    assert_eq!(reply.text, "So: a <think>text</think>");
    assert_eq!(reply.calls.len(), 2);
    assert_eq!(reply.malformed, 0);
    let options = options(Dialect::Hermes);
    assert_eq!(events(&options, characters(&text)), events(&options, [text.as_str()]));

    let mut parser = ReplyParser::new(&options, "assistant\n<think>\n");
    let mut events = parser.push("why\n");
    assert!(parser.in_reasoning());
    events.extend(parser.push("</think>\n"));
    assert!(!parser.in_reasoning());
    assert_eq!(events, [ReplyEvent::Reasoning("why".to_owned())]);
    assert!(matches!(&parser.push(call)[..], [ReplyEvent::CallStarted { .. }, ..]));
}

#[test]
fn reasoning_is_told_from_the_answer_without_tools() {
    let options = ReplyOptions { dialect: None, ..options(Dialect::Hermes) };
    let split = |prompt: &str, text: &str| {
        let mut parser = ReplyParser::new(&options, prompt);
        let mut all = parser.push(text);
        all.extend(parser.finish());
        let reply = reply((all, parser.malformed()));
        assert!(reply.calls.is_empty());
        (reply.reasoning, reply.text)
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(split("", "<think>why</think>\n\nbecause"), pair("why", "because"));
    assert_eq!(split("", "no tags <think>x</think>"), pair("", "no tags <think>x</think>"));
    assert_eq!(split("assistant\n<think>\n", "why\n</think>\nso"), pair("why", "so"));
    assert_eq!(split("<think>\n\n</think>\n\n", "direct"), pair("", "direct"));
    assert_eq!(split("", "<think>cut off\n"), pair("cut off\n", ""));
    assert_eq!(split("", "<thi"), pair("", "<thi"));
    assert_eq!(split("", "<think>a</thi"), pair("a</thi", ""));
    assert_eq!(split("", "  <tool_call>\n{}\n "), pair("", "  <tool_call>\n{}\n "));
}

#[test]
fn malformed_calls_are_text_and_counted() {
    let as_text = [
        (Dialect::Hermes, "a <tool_call>\nnot json</tool_call> b"),
        (Dialect::Hermes, "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>"),
        (Dialect::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"),
        (Dialect::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"no object\"}</tool_call>"),
        (Dialect::Hermes, "<tool_call>{\"arguments\": {}}</tool_call>"),
        (Dialect::Hermes, "<tool_call>{'name': 'f'}</tool_call>"),
        (Dialect::Hermes, "<tool_call>"),
        (Dialect::QwenXml, "<function=no name><parameter=a>b</parameter></function>"),
        (Dialect::QwenXml, "<function=f>text</function>"),
        (Dialect::Llama, "{\"name\": \"now\", \"parameters\": 5}"),
        (Dialect::Mistral, "[TOOL_CALLS] no brackets here"),
        (Dialect::Mistral, "[TOOL_CALLS][]"),
        (Dialect::Mistral, "[TOOL_CALLS]a[ARGS]5"),
        (Dialect::Glm, "<tool_call></tool_call>"),
        (Dialect::Glm, "<tool_call>two words\n<arg_key>"),
        (Dialect::MiniMax, "<minimax:tool_call>x</minimax:tool_call>"),
    ];
    for (dialect, text) in as_text {
        let expected = Reply { text: text.to_owned(), malformed: 1, ..Reply::default() };
        assert_eq!(whole(dialect, text), expected, "{dialect:?}");
    }
    let long = format!("<tool_call>{}", "a".repeat(10 * MAX_NAME));
    assert_eq!(whole(Dialect::Glm, &long).text, long);
    let nested = "<tool_call>{\"name\" <tool_call>{\"name\": \"now\"}</tool_call>";
    let reply = whole(Dialect::Hermes, nested);
    assert_eq!((reply.text.as_str(), reply.calls.len(), reply.malformed), ("<tool_call>{\"name\"", 1, 1));
}

#[test]
fn calls_that_break_after_their_start_keep_what_went_out() {
    let cases = [
        (
            Dialect::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1,, \"b\": 2}}</tool_call> end",
            "{\"a\": 1,",
            ", \"b\": 2}}</tool_call> end",
        ),
        (
            Dialect::QwenXml,
            "<function=get_weather><parameter=city>X</parameter> stray </function>",
            "{\"city\": \"X\"",
            " stray </function>",
        ),
        (
            Dialect::QwenXml,
            "<function=get_weather><parameter=city>X</parameter><parameter=days>4",
            "{\"city\": \"X\", \"days\": ",
            "4",
        ),
        (Dialect::Glm, "<tool_call>f<arg_key>a</arg_key>stray", "", "<arg_key>a</arg_key>stray"),
    ];
    for (dialect, text, arguments, rest) in cases {
        let reply = whole(dialect, text);
        assert_eq!((reply.calls.len(), reply.malformed), (1, 1), "{text}");
        assert_eq!((reply.calls[0].1.as_str(), reply.text.as_str()), (arguments, rest), "{text}");
        assert!(!reply.calls[0].2);
        let options = options(dialect);
        let found = events(&options, [text]);
        assert_eq!(events(&options, characters(text)), found, "{text}");
        assert_eq!(content(&found.0), text);
    }
}

#[test]
fn arguments_arrive_while_they_are_written() {
    let mut parser = ReplyParser::new(&options(Dialect::Hermes), "");
    parser.push("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"lo");
    let delta = ReplyEvent::Arguments { index: 0, delta: "ng".to_owned() };
    assert_eq!(parser.push("ng"), [delta]);
    let mut parser = ReplyParser::new(&options(Dialect::QwenXml), "");
    parser.push("<function=get_weather><parameter=city>\nlo");
    let delta = ReplyEvent::Arguments { index: 0, delta: "ng".to_owned() };
    assert_eq!(parser.push("ng"), [delta]);
}

#[test]
fn ids_of_the_model_are_kept() {
    let text = "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}";
    let (all, _) = events(&options(Dialect::Mistral), [text]);
    let started =
        ReplyEvent::CallStarted { index: 0, id: Some("abcdefghi".to_owned()), name: "now".to_owned() };
    assert_eq!(all[0], started);
}

#[test]
fn templates_tell_their_dialect() {
    let fixture = |name: &str| {
        let path = format!("{}/tests/fixtures/chat/{name}_style.jinja", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap()
    };
    let expected = [
        ("qwen", Dialect::Hermes),
        ("glm", Dialect::Glm),
        ("llama", Dialect::Llama),
        ("mistral", Dialect::Mistral),
        ("harmony", Dialect::Harmony),
    ];
    for (name, dialect) in expected {
        let template =
            crate::ChatTemplate::from_source(&fixture(name), &crate::SpecialTokens::default()).unwrap();
        assert_eq!(template.dialect(), Some(dialect), "{name}");
        assert!(template.prints_tools(), "{name}");
    }
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let plain = crate::ChatTemplate::from_source(plain, &crate::SpecialTokens::default()).unwrap();
    assert_eq!((plain.dialect(), plain.prints_tools()), (None, false));
    assert_eq!(Dialect::of_template("<tool_call>\n<function=…>"), Some(Dialect::QwenXml));
    assert_eq!(Dialect::of_template("<minimax:tool_call>"), Some(Dialect::MiniMax));
    let harmony = "<|start|>assistant<|channel|>final<|message|>";
    assert_eq!(Dialect::of_template(harmony), Some(Dialect::Harmony));
}

#[test]
fn parsers_have_names() {
    for dialect in Dialect::ALL {
        assert_eq!(Dialect::from_name(dialect.name()).unwrap(), dialect);
    }
    assert_eq!(Dialect::from_name("qwen3_coder").unwrap(), Dialect::QwenXml);
    assert_eq!(Dialect::from_name("openai").unwrap(), Dialect::Harmony);
    let error = Dialect::from_name("x").unwrap_err().to_string();
    assert!(error.contains("`x`") && error.contains("hermes, qwen3_xml"), "{error}");
}

/// The reader of a key that is too long once took as much text as had arrived, so a call behind it was
/// seen in pieces and not seen whole.
#[test]
fn names_that_are_too_long_read_the_same_in_pieces() {
    let long = "a".repeat(MAX_NAME + 50);
    let spaces = " ".repeat(MAX_NAME + 50);
    let now = "<tool_call>now</tool_call>";
    let texts = [
        (Dialect::Glm, format!("<tool_call>now\n<arg_key>{long}{now}</arg_key>"), 1),
        (Dialect::Glm, format!("<tool_call>{spaces}now\n</tool_call>{now}"), 1),
        (Dialect::Mistral, format!("[TOOL_CALLS]{long}[ARGS]{{}}"), 0),
        (Dialect::Mistral, format!("[TOOL_CALLS]now[CALL_ID]{long}[ARGS]{{}}"), 0),
        (Dialect::QwenXml, format!("<function=now><parameter={long}><function=now></function>"), 1),
        (Dialect::MiniMax, format!("<minimax:tool_call><invoke name=\"{long}\"></invoke>"), 0),
    ];
    for (dialect, text, complete) in texts {
        let expected = whole(dialect, &text);
        assert_eq!(expected.calls.iter().filter(|call| call.2).count(), complete, "{expected:?}");
        assert_eq!(expected.malformed, 1, "{text}");
        assert_eq!(reply(events(&options(dialect), characters(&text))), expected);
    }
}
