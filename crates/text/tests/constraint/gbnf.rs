//! llama.cpp's grammars: what it accepts is accepted, and means the same.

use oscar_text::{Grammar, Thinking};
use serde_json::Value;

use super::{Random, allowed, grammars, tokenizer};

/// `grammars/json.gbnf` of llama.cpp.
const JSON: &str = r##"root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"##;

/// Whether the whole text is an answer.
fn fits(grammar: &str, text: &str) -> bool {
    let (tokenizer, grammars) = (tokenizer(), grammars());
    let grammar = Grammar::Source(grammar.to_owned());
    let mut state = grammars.compile(&grammar, &Thinking::None).unwrap_or_else(|e| panic!("{e}")).start();
    let end = tokenizer.token_to_id(tokenizer.special().eos().unwrap()).unwrap();
    let mut takes = |id: u32| allowed(&state.allowed().unwrap()).contains(&id) && state.accept(id).is_ok();
    tokenizer.encode(text, false).unwrap().into_iter().all(&mut takes) && takes(end)
}

#[test]
fn the_json_grammar_of_llama_cpp_works() {
    let (tokenizer, grammars, mut random) = (tokenizer(), grammars(), Random(17));
    let constraint = grammars.compile(&Grammar::Source(JSON.to_owned()), &Thinking::None).unwrap();
    let end = tokenizer.token_to_id(tokenizer.special().eos().unwrap()).unwrap();
    let mut complete = 0;
    let pieces =
        ["{", "}", "[", "]", "\"", ":", ",", "1", "0", ".", "-", "e", "true", "null", " ", "\n", "a", "\\"];
    let pieces: Vec<u32> = pieces.iter().filter_map(|piece| tokenizer.token_to_id(piece)).collect();
    for _ in 0..60 {
        let (mut state, mut ids) = (constraint.start(), Vec::new());
        let done = (0..200).any(|_| {
            let options = allowed(&state.allowed().unwrap());
            if options.contains(&end) {
                return true;
            }
            // Short pieces, so that the answers stay short.
            let short: Vec<u32> = options.iter().copied().filter(|id| pieces.contains(id)).collect();
            ids.push(*random.one(if short.is_empty() { &options } else { &short }));
            state.accept(ids[ids.len() - 1]).unwrap();
            false
        });
        if !done {
            continue;
        }
        let text = tokenizer.decode(&ids, false).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
        assert!(value.is_object());
        complete += 1;
    }
    assert!(complete > 5, "only {complete} walks came to an end");
    assert!(fits(JSON, "{\"a\": [1, -2.5e+3, \"\\u00e9 ü\\n\", {}],\n \"b\": null}"));
    assert!(!fits(JSON, "{\"a\": 1,}"));
}

#[test]
fn rules_may_span_lines() {
    let grammar =
        "root ::= \"a\" (\n  \"x\"\n  \"b:\" \"c\"\n)\n  tail\ntail ::=\n\"!\" |\n\"?\" # end\n| \"::=\"";
    assert!(fits(grammar, "axb:c!") && fits(grammar, "axb:c?") && fits(grammar, "axb:c::="));
    assert!(!fits(grammar, "axb:c"));
}

#[test]
fn character_classes_mean_what_llama_cpp_means() {
    for (class, inside, outside) in [
        ("[[a]", "[a", "]b"),
        ("[a&&b]", "a&b", "c|"),
        ("[a~~b-]", "a~b-", "c,"),
        ("[+--]", "+,-", ".*"),
        ("[a\\/]", "a/", "\\b"),
        ("[/]", "/", "\\"),
        ("[+-]", "+-", ",*"),
        ("[-a]", "-a", "+b"),
        ("[^\\]\\n]", "a[\\", "]"),
        ("[\\x41-\\u0043é\\U0001F600]", "ABCé", "Dea"),
        ("[\\^$.|]", "^$.|", "ab\\"),
        ("[^]", "a]", ""),
    ] {
        let grammar = format!("root ::= {class}");
        for c in inside.chars() {
            assert!(fits(&grammar, &c.to_string()), "{c} in {class}");
        }
        for c in outside.chars() {
            assert!(!fits(&grammar, &c.to_string()), "{c} not in {class}");
        }
    }
    assert!(fits("root ::= \"\\x41\\u00e9\\t\\\"\\[\\/\"", "Aé\t\"[/"));
}

#[test]
fn names_that_differ_stay_different() {
    let grammar = "root ::= A a a-b a_b a0b 1st\nA ::= \"1\"\na ::= \"2\"\na-b ::= \"3\"\na_b ::= \"4\"\na0b ::= \"5\"\n1st ::= \"6\"";
    assert!(fits(grammar, "123456"));
    assert!(!fits(grammar, "213456"));
}

#[test]
fn the_sign_of_gbnf_in_a_literal_of_lark_is_text() {
    assert!(fits("start: \"a ::= \" name\nname: \"b\"", "a ::= b"));
    assert!(fits("start: \"x\"\n  | name \"::=\"\nname: \"b\"", "b::="));
}

#[test]
fn mistakes_are_named() {
    for (grammar, words) in [
        ("root ::= [b-a]", "`b-a`"),
        ("root ::= []", "`[]`"),
        ("root ::= [a", "character class has no end"),
        ("root ::= \"a", "string has no end"),
        ("root ::= \"a\"{2", "repetition has no end"),
        ("root ::= \"\\xg0\"", "`\\xg0`"),
        ("root ::= \"a\"\nroot ::= \"b\"", "`root` is defined twice"),
        ("root ::= Foo", "`Foo` is used but not defined"),
        ("root ::= <think>", "token references"),
    ] {
        let source = Grammar::Source(grammar.to_owned());
        let error = grammars().compile(&source, &Thinking::None).unwrap_err().to_string();
        assert!(error.contains(words), "{grammar}: {error}");
    }
}
