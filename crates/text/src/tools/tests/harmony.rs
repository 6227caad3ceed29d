//! Messages in channels: what the tables of all dialects do not show.

use super::*;

const HEADER: &str = "<|start|>assistant";

fn read(options: &ReplyOptions, prompt: &str, text: &str) -> Reply {
    let mut parser = ReplyParser::new(options, prompt);
    let mut all = parser.push(text);
    all.extend(parser.finish());
    reply((all, parser.malformed()))
}

fn harmony() -> ReplyOptions {
    options(Dialect::Harmony)
}

#[test]
fn channels_tell_reasoning_calls_and_text_apart() {
    let text = "<|channel|>analysis<|message|>Need the\ntime, é.<|end|><|start|>assistant<|channel|>commentary to=functions.now \
                <|constrain|>json<|message|>{\"a\": {\"b\": [\"}<|\"]}}<|call|><|start|>assistant<|channel|>analysis<|message|>Good.\
                <|end|><|start|>assistant<|channel|>final<|message|>It is noon 😀.<|return|>";
    let expected = Reply {
        text: "It is noon 😀.".to_owned(),
        reasoning: "Need the\ntime, é.Good.".to_owned(),
        calls: vec![("now".to_owned(), "{\"a\": {\"b\": [\"}<|\"]}}".to_owned(), true)],
        malformed: 0,
    };
    let options = harmony();
    assert_eq!(reply(events(&options, [text])), expected);
    for at in (1..text.len()).filter(|&at| text.is_char_boundary(at)) {
        assert_eq!(events(&options, [&text[..at], &text[at..]]), events(&options, [text]), "at {at}");
    }
    let mut parser = ReplyParser::new(&options, HEADER);
    parser.push("<|channel|>analysis<|message|>hm");
    assert!(parser.in_reasoning());
    parser.push("<|end|>");
    assert!(!parser.in_reasoning());
}

#[test]
fn arguments_go_out_while_they_are_written() {
    let mut parser = ReplyParser::new(&harmony(), HEADER);
    let events =
        parser.push("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{\"a\": \"lo");
    assert!(matches!(&events[0], ReplyEvent::CallStarted { name, .. } if name == "now"));
    let delta = ReplyEvent::Arguments { index: 0, delta: "ng".to_owned() };
    assert_eq!(parser.push("ng"), [delta]);
}

/// The engine keeps the stop token `<|call|>` to itself, so a call ends with its object.
#[test]
fn a_call_is_complete_without_its_end() {
    let text = "<|channel|>commentary to=functions.now<|message|>{}";
    assert_eq!(read(&harmony(), HEADER, text).calls, [("now".to_owned(), "{}".to_owned(), true)]);
    let cut = read(&harmony(), HEADER, "<|channel|>commentary to=functions.now<|message|>{\"a");
    assert_eq!((cut.calls[0].2, cut.malformed, cut.text.as_str()), (false, 1, ""));
}

#[test]
fn the_prompt_may_have_begun_the_message() {
    let options = harmony();
    let read = |prompt: &str, text: &str| {
        let reply = read(&options, prompt, text);
        (reply.reasoning, reply.text)
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    let final_ = "<|start|>assistant<|channel|>final<|message|>";
    assert_eq!(read(&format!("{final_}It is"), " noon<|return|>"), pair("", " noon"));
    assert_eq!(read("a long text that goes on", " here"), pair("", " here"));
    let analysis = "<|start|>assistant<|channel|>analysis<|message|>";
    assert_eq!(
        read(analysis, "why<|end|><|start|>assistant<|channel|>final<|message|>so"),
        pair("why", "so")
    );
    assert_eq!(read("<|start|>assistant<|channel|>", "final<|message|>so"), pair("", "so"));
    assert_eq!(read("<|start|>user<|message|>hi<|end|>", &format!("{final_}so")), pair("", "so"));
}

/// As with tags: what is not told apart stays as the model wrote it.
#[test]
fn reasoning_stays_in_the_text_where_it_is_not_wanted_apart() {
    let options = ReplyOptions { reasoning: None, ..harmony() };
    let text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so";
    let reply = read(&options, HEADER, text);
    assert_eq!(reply.text, "<|channel|>analysis<|message|>why<|end|>so");
    assert_eq!((reply.reasoning.as_str(), reply.malformed), ("", 0));
}

#[test]
fn calls_without_tools_are_text() {
    let options = ReplyOptions { tools: Arc::default(), ..harmony() };
    let text = "<|channel|>commentary to=functions.now<|message|>{}<|call|>";
    let expected = Reply { text: text.to_owned(), malformed: 1, ..Reply::default() };
    assert_eq!(read(&options, HEADER, text), expected);
}

#[test]
fn malformed_messages_are_text_and_counted() {
    let long = "x".repeat(MAX_NAME);
    for text in [
        "<|channel|>commentary to=functions.now<|message|>no object<|call|>".to_owned(),
        "<|channel|>commentary to=functions.now<|message|>".to_owned(),
        "<|channel|>commentary to=functions.now".to_owned(),
        "<|channel|>commentary to=functions.now<|call|>".to_owned(),
        "<|channel|>commentary to=functions.<|message|>{}<|call|>".to_owned(),
        "<|channel|>commentary to=functions.now to=functions.now<|message|>{}".to_owned(),
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>".to_owned(),
        "<|channel|>dreams<|message|>é<|end|>".to_owned(),
        "<|channel|>final json é<|message|>x<|return|>".to_owned(),
        "<|channel|><|message|>x".to_owned(),
        "<|start|>user<|message|>hi<|end|>".to_owned(),
        format!("<|channel|>{long}<|message|>x"),
    ] {
        // Behind a message, because white space and markup before the first one belong to the prompt.
        let whole = format!("<|channel|>final<|message|>a<|end|>{text}");
        let reply = read(&harmony(), HEADER, &whole);
        let expected = Reply { text: format!("a{text}"), malformed: 1, ..Reply::default() };
        assert_eq!(reply, expected, "{text}");
        let (one, many) = (events(&harmony(), [whole.as_str()]), events(&harmony(), characters(&whole)));
        assert_eq!(one, many, "{text}");
    }
    let after = "<|channel|>commentary to=functions.now<|message|>{\"a\": 1,, 2}<|call|>";
    let reply = read(&harmony(), HEADER, after);
    assert_eq!(reply.calls, [("now".to_owned(), "{\"a\": 1,".to_owned(), false)]);
    assert_eq!((reply.text.as_str(), reply.malformed), (", 2}<|call|>", 1));
    let (one, many) = (events(&harmony(), [after]), events(&harmony(), characters(after)));
    assert_eq!(one, many);
    assert_eq!(content(&one.0), after);
}

/// A header without a recipient that the limit of tokens cuts off is no text.
#[test]
fn plain_headers_may_be_cut_off() {
    let header = "<|start|>assistant<|channel|>final<|message|>";
    for at in "<|start|>".len()..header.len() {
        let text = format!("<|channel|>analysis<|message|>hm<|end|>{}", &header[..at]);
        let reply = read(&harmony(), HEADER, &text);
        assert_eq!((reply.reasoning.as_str(), reply.text.as_str(), reply.malformed), ("hm", "", 0), "{text}");
    }
}
