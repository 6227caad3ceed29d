//! Constrained answers: random walks through the allowed tokens, checked by rules of our own.

mod amid;
mod gbnf;
mod size;

use std::path::Path;

use oscar_text::{
    CallGrammar, Constraint, Dialect, Grammar, Grammars, ModelText, ReasoningTags, ReplyEvent, ReplyOptions,
    ReplyParser, Thinking, Tokenizer, ToolSchemas,
};
use serde_json::{Map, Value, json};

fn tokenizer() -> Tokenizer {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m");
    let read = |name| std::fs::read(model.join(name)).unwrap();
    let config = read("tokenizer_config.json");
    ModelText::from_files(&read("tokenizer.json"), Some(&config), None).unwrap().tokenizer
}

fn grammars() -> Grammars {
    grammars_of(&tokenizer())
}

fn grammars_of(tokenizer: &Tokenizer) -> Grammars {
    let end = tokenizer.token_to_id(tokenizer.special().eos().unwrap()).unwrap();
    Grammars::new(tokenizer, tokenizer.vocab_size() + 3, &[end]).unwrap()
}

/// A small generator of numbers, the same on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % limit
    }

    fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

fn allowed(mask: &[u32]) -> Vec<u32> {
    let bits = |(word, &bits): (usize, &u32)| {
        (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word as u32 * 32 + bit)
    };
    mask.iter().enumerate().flat_map(bits).collect()
}

/// Goes on by chance until the answer is complete; none if it takes too long.
fn walk(tokenizer: &Tokenizer, constraint: &Constraint, random: &mut Random, limit: usize) -> Option<String> {
    let end = tokenizer.token_to_id(tokenizer.special().eos().unwrap()).unwrap();
    let (mut state, mut ids) = (constraint.start(), Vec::new());
    for _ in 0..limit {
        let options = allowed(&state.allowed().unwrap());
        assert!(!options.is_empty());
        // The end is taken when it is offered, half of the time.
        let token = match options.contains(&end) && random.below(2) == 0 {
            true => end,
            false => *random.one(&options),
        };
        let complete = state.accept(token).unwrap();
        if token != end {
            ids.push(token);
        }
        if complete || token == end {
            return Some(tokenizer.decode(&ids, false).unwrap());
        }
    }
    None
}

/// A random schema whose answers are short.
fn schema(random: &mut Random, depth: usize) -> Value {
    let kinds = if depth == 0 { 7 } else { 10 };
    match random.below(kinds) {
        0 => json!({"type": "string", "maxLength": 4 + random.below(8)}),
        1 => json!({"type": "integer", "minimum": -(random.below(50) as i64), "maximum": random.below(900)}),
        2 => json!({"type": "number", "minimum": 0, "exclusiveMaximum": 1 + random.below(9)}),
        3 => json!({"type": ["boolean", "null"]}),
        4 => json!({"enum": ["red", "grün \"x\"", 5, null, [1, 2]]}),
        5 => json!({"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{3}$"}),
        6 => json!({"const": {"a": [true]}}),
        7 => json!({"type": "array", "items": schema(random, depth - 1), "minItems": 1, "maxItems": 3}),
        8 => json!({"anyOf": [schema(random, depth - 1), schema(random, depth - 1)]}),
        _ => {
            let names: Vec<String> = (0..1 + random.below(4)).map(|i| format!("key_{i}")).collect();
            let required: Vec<&String> = names.iter().filter(|_| random.below(3) > 0).collect();
            let mut properties = Map::new();
            for name in &names {
                properties.insert(name.clone(), schema(random, depth - 1));
            }
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
        }
    }
}

/// An independent check of the keywords above.
fn valid(root: &Value, schema: &Value, value: &Value) -> bool {
    if let Some(reference) = schema["$ref"].as_str() {
        return valid(root, root.pointer(&reference[1..]).unwrap(), value);
    }
    if let Some(options) = schema["anyOf"].as_array() {
        return options.iter().any(|option| valid(root, option, value));
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    if let Some(expected) = schema.get("const") {
        return expected == value;
    }
    let is = |name: &str| match name {
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    };
    let typed = match &schema["type"] {
        Value::String(name) => is(name),
        Value::Array(names) => names.iter().any(|name| is(name.as_str().unwrap())),
        _ => true,
    };
    let number = value.as_f64().unwrap_or(0.0);
    let bounds = schema["minimum"].as_f64().is_none_or(|bound| number >= bound)
        && schema["maximum"].as_f64().is_none_or(|bound| number <= bound)
        && schema["exclusiveMaximum"].as_f64().is_none_or(|bound| number < bound);
    let text = value.as_str().unwrap_or_default();
    let length = schema["maxLength"].as_u64().is_none_or(|most| text.chars().count() as u64 <= most);
    let pattern = schema.get("pattern").is_none() || {
        let (letters, digits) = text.split_once('-').unwrap_or_default();
        (2..=4).contains(&letters.len())
            && letters.chars().all(|c| ('a'..='c').contains(&c))
            && digits.len() == 3
            && digits.chars().all(|c| c.is_ascii_digit())
    };
    let items = value.as_array().is_none_or(|items| {
        schema["minItems"].as_u64().is_none_or(|least| items.len() as u64 >= least)
            && schema["maxItems"].as_u64().is_none_or(|most| items.len() as u64 <= most)
            && items.iter().all(|item| schema.get("items").is_none_or(|schema| valid(root, schema, item)))
    });
    let members = value.as_object().is_none_or(|members| {
        let required = schema["required"].as_array();
        members.iter().all(|(name, member)| match schema["properties"].get(name) {
            Some(property) => valid(root, property, member),
            None => schema["additionalProperties"] != false,
        }) && required
            .is_none_or(|names| names.iter().all(|name| members.contains_key(name.as_str().unwrap())))
    });
    typed && bounds && length && pattern && items && members
}

#[test]
fn answers_fit_their_schema() {
    let (tokenizer, grammars, mut random) = (tokenizer(), grammars(), Random(7));
    let mut complete = 0;
    for round in 0..200 {
        let mut schema = schema(&mut random, 3);
        if round % 5 == 0 {
            let inner = schema;
            schema = json!({"type": "object", "$defs": {"inner": inner}, "required": ["a", "b"],
                "additionalProperties": false,
                "properties": {"a": {"$ref": "#/$defs/inner"}, "b": {"type": "array", "maxItems": 2,
                    "items": {"$ref": "#/$defs/inner"}}}});
        }
        let constraint = grammars.compile(&Grammar::JsonSchema(schema.clone()), &Thinking::None).unwrap();
        let Some(text) = walk(&tokenizer, &constraint, &mut random, 400) else { continue };
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(valid(&schema, &schema, &value), "{text} does not fit {schema}");
        complete += 1;
    }
    assert!(complete > 180, "only {complete} walks came to an end");
}

#[test]
fn other_forms_are_kept_too() {
    let (tokenizer, grammars, mut random) = (tokenizer(), grammars(), Random(3));
    let mut run = |grammar: Grammar| {
        let constraint = grammars.compile(&grammar, &Thinking::None).unwrap();
        walk(&tokenizer, &constraint, &mut random, 500).unwrap()
    };
    for _ in 0..5 {
        let choice = run(Grammar::Choice(vec!["ja".to_owned(), "nein \"\\".to_owned()]));
        assert!(["ja", "nein \"\\"].contains(&choice.as_str()), "{choice}");
        let number = run(Grammar::Regex("[1-9][0-9]{2,5}".to_owned()));
        assert!(number.parse::<u32>().unwrap() >= 100);
        let lark = run(Grammar::Source("start: \"a\" (\"b\" | \"c\")~2\n".to_owned()));
        assert!(lark.len() == 3 && lark.starts_with('a'), "{lark}");
        let gbnf = "# a comment\nroot ::= greeting \" \" [a-z]{2,3} tail-end?\ngreeting ::= \"hi\" |\n  \"yo\"\ntail-end ::= (\"!\" | \"?\")+";
        let text = run(Grammar::Source(gbnf.to_owned()));
        let (greeting, rest) = text.split_once(' ').unwrap();
        assert!(["hi", "yo"].contains(&greeting), "{text}");
        assert!(rest.trim_end_matches(['!', '?']).len() >= 2, "{text}");
    }
}

#[test]
fn reasoning_may_stand_before_the_answer() {
    let (tokenizer, grammars, mut random) = (tokenizer(), grammars(), Random(11));
    let tags = ReasoningTags { open: "<think>".to_owned(), close: "</think>".to_owned() };
    let yes = Grammar::Choice(vec!["yes".to_owned()]);
    let accepts = |thinking: &Thinking, text: &str| {
        let mut state = grammars.compile(&yes, thinking).unwrap().start();
        let ids = tokenizer.encode(text, false).unwrap();
        let fits = |&id: &u32| allowed(&state.allowed().unwrap()).contains(&id) && state.accept(id).is_ok();
        ids.iter().all(fits)
    };
    let calls = CallGrammar {
        dialect: Dialect::Hermes,
        tools: vec![("now".to_owned(), json!({"type": "object", "properties": {}}))],
        parallel: true,
    };
    let either = Grammar::OrCalls(Box::new(yes.clone()), calls);
    for thinking in [Thinking::None, Thinking::Allowed(tags.clone())] {
        let constraint = grammars.compile(&either, &thinking).unwrap();
        let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
        for text in ["yes", call] {
            let mut state = constraint.start();
            for id in tokenizer.encode(text, false).unwrap() {
                assert!(allowed(&state.allowed().unwrap()).contains(&id), "{text}");
                state.accept(id).unwrap();
            }
        }
    }
    let (opened, may) = (Thinking::Opened(tags.clone()), Thinking::Allowed(tags));
    assert!(accepts(&opened, "why {\n not</think>\n\nyes"));
    assert!(accepts(&may, "<think>why</think>yes"));
    assert!(accepts(&may, "yes"));
    assert!(!accepts(&may, "why"));
    assert!(!accepts(&Thinking::None, "<think>"));
    let direct = grammars.compile(&yes, &Thinking::None).unwrap();
    assert_eq!(walk(&tokenizer, &direct, &mut random, 9).as_deref(), Some("yes"));
}

/// Constrained answers of gpt-oss stand in channels, behind reasoning in one of its own.
#[test]
fn channels_hold_constrained_answers() {
    let (tokenizer, grammars, mut random) = (tokenizer(), grammars(), Random(13));
    let tools = vec![("now".to_owned(), json!({"type": "object", "properties": {}}))];
    let calls = CallGrammar { dialect: Dialect::Harmony, tools, parallel: true };
    let yes = Grammar::Choice(vec!["yes".to_owned()]);
    let either = Grammar::OrCalls(Box::new(yes.clone()), calls.clone());
    let accepts = |grammar: &Grammar, text: &str| {
        let mut state = grammars.compile(grammar, &Thinking::Channels).unwrap().start();
        let ids = tokenizer.encode(text, false).unwrap();
        let fits = |&id: &u32| allowed(&state.allowed().unwrap()).contains(&id) && state.accept(id).is_ok();
        ids.iter().all(fits)
    };
    let thought = "<|channel|>analysis<|message|>why {\n not<|end|><|start|>assistant";
    let answer = "<|channel|>final<|message|>yes";
    let call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}";
    for before in ["", thought] {
        assert!(accepts(&yes, &format!("{before}{answer}")));
        assert!(!accepts(&yes, &format!("{before}{call}")));
        assert!(accepts(&Grammar::Calls(calls.clone()), &format!("{before}{call}")));
        assert!(!accepts(&Grammar::Calls(calls.clone()), &format!("{before}{answer}")));
        for text in [answer, call] {
            assert!(accepts(&either, &format!("{before}{text}")), "{text}");
        }
    }
    assert!(!accepts(&yes, "yes"));
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": false});
    let constraint = grammars.compile(&Grammar::JsonSchema(schema), &Thinking::Channels).unwrap();
    let options = ReplyOptions {
        reasoning: Some(ReasoningTags { open: String::new(), close: String::new() }),
        dialect: Some(Dialect::Harmony),
        ..ReplyOptions::default()
    };
    let mut complete = 0;
    for _ in 0..60 {
        let Some(text) = walk(&tokenizer, &constraint, &mut random, 80) else { continue };
        let mut parser = ReplyParser::new(&options, "<|start|>assistant");
        let events = [parser.push(&text), parser.finish()].concat();
        let Some(ReplyEvent::Text(answer)) = events.last() else { panic!("{text}") };
        assert!(serde_json::from_str::<Value>(answer).unwrap()["a"].is_boolean(), "{text}");
        complete += 1;
    }
    assert!(complete > 0);
}

#[test]
fn forced_calls_are_read_by_the_parser_of_their_dialect() {
    let (tokenizer, grammars, mut random) = (tokenizer(), grammars(), Random(5));
    let parameters = json!({"type": "object", "additionalProperties": false, "required": ["city", "days"], "properties": {
        "city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]}, "deep": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}}}});
    let tools = vec![
        ("get_weather".to_owned(), parameters.clone()),
        ("now".to_owned(), json!({"type": "object", "properties": {}, "additionalProperties": false})),
    ];
    let described: Vec<Value> = tools
        .iter()
        .map(|(name, parameters)| json!({"type": "function", "function": {"name": name, "parameters": parameters}}))
        .collect();
    let schemas = std::sync::Arc::new(ToolSchemas::from_openai(&described));
    for dialect in Dialect::ALL {
        let mut complete = 0;
        for parallel in [false, true] {
            let grammar = Grammar::Calls(CallGrammar { dialect, tools: tools.clone(), parallel });
            let constraint = grammars.compile(&grammar, &Thinking::None).unwrap();
            for _ in 0..16 {
                let Some(text) = walk(&tokenizer, &constraint, &mut random, 600) else { continue };
                complete += 1;
                let options =
                    ReplyOptions { reasoning: None, dialect: Some(dialect), tools: schemas.clone() };
                let mut parser = ReplyParser::new(&options, "");
                let events = [parser.push(&text), parser.finish()].concat();
                assert_eq!(parser.malformed(), 0, "{dialect:?}: {text}");
                assert!(parser.calls() == 1 || parallel && parser.calls() > 1, "{dialect:?}: {text}");
                let mut arguments = vec![(String::new(), String::new()); parser.calls()];
                for event in events {
                    match event {
                        ReplyEvent::CallStarted { index, name, .. } => arguments[index].0 = name,
                        ReplyEvent::Arguments { index, delta } => arguments[index].1 += &delta,
                        ReplyEvent::CallFinished { .. } => {}
                        other => panic!("{dialect:?}: {other:?} in {text}"),
                    }
                }
                for (name, arguments) in arguments {
                    let value: Value = serde_json::from_str(&arguments).unwrap();
                    let free_text = matches!(dialect, Dialect::QwenXml | Dialect::Glm | Dialect::MiniMax);
                    let mut schema = tools.iter().find(|tool| tool.0 == name).unwrap().1.clone();
                    if free_text && name == "get_weather" {
                        schema["properties"]["city"] = json!({"type": "string"});
                    }
                    assert!(valid(&schema, &schema, &value), "{dialect:?}: {arguments}");
                }
            }
        }
        assert!(complete > 3, "{dialect:?}: only {complete} walks came to an end");
    }
}

#[test]
fn what_cannot_be_kept_is_refused_by_name() {
    let grammars = grammars();
    let refusal = |grammar: Grammar| grammars.compile(&grammar, &Thinking::None).unwrap_err().to_string();
    let schema = |schema: Value| refusal(Grammar::JsonSchema(schema));
    for (value, word) in [
        (json!({"type": "object", "dependentSchemas": {"a": {"type": "object"}}}), "dependentSchemas"),
        (json!({"type": "string", "format": "no-such-format"}), "no-such-format"),
        (json!({"type": "wrong"}), "wrong"),
        (json!({"not": {"type": "string"}}), "not"),
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"$ref": "#/$defs/missing"}), "missing"),
    ] {
        let message = schema(value.clone());
        assert!(message.contains(word), "{value}: {message}");
    }
    // One sentence each, which names what to change. Reasoning before the answer makes no
    // difference.
    let tags = ReasoningTags { open: "<think>".to_owned(), close: "</think>".to_owned() };
    let overlapping = json!({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]});
    for (grammar, sentence) in [
        (
            Grammar::Regex("(?=a)b".to_owned()),
            "the regular expression `(?=a)b`: look-around, including look-ahead and look-behind, is not \
             supported; change the pattern",
        ),
        (
            Grammar::JsonSchema(json!({"type": "string", "pattern": "(a)\\1"})),
            "the regular expression `(a)\\1`: backreferences are not supported; change the pattern",
        ),
        (
            Grammar::Regex("a\\b".to_owned()),
            "word boundaries, and line boundaries inside a pattern, are not supported in regular expressions; \
             change the pattern",
        ),
        (
            Grammar::JsonSchema(overlapping),
            "`oneOf` is not supported where an answer may fit two of its schemas; use `anyOf`",
        ),
        (
            Grammar::JsonSchema(json!({"$ref": "#"})),
            "no answer fits it; a rule or `$ref` that refers to itself needs an alternative that ends",
        ),
        (
            Grammar::Source("root ::= foo | \"a\"".to_owned()),
            "GBNF: the rule `foo` is used but not defined; add `foo ::= …`",
        ),
        (
            Grammar::JsonSchema(json!({"type": "array", "uniqueItems": true})),
            "the keyword `uniqueItems` is not supported; remove it from the schema",
        ),
        (
            Grammar::JsonSchema(json!({"type": "array", "uniqueItems": true, "unevaluatedItems": false})),
            "the keywords `unevaluatedItems`, `uniqueItems` are not supported; remove them from the schema",
        ),
    ] {
        for thinking in [Thinking::None, Thinking::Allowed(tags.clone())] {
            let message = grammars.compile(&grammar, &thinking).unwrap_err().to_string();
            assert_eq!(message, format!("the grammar or schema cannot be used: {sentence}"));
        }
    }
    let distinct = json!({"oneOf": [{"type": "string"}, {"type": "integer"}]});
    grammars.compile(&Grammar::JsonSchema(distinct), &Thinking::None).unwrap();
    assert!(refusal(Grammar::Regex("(".to_owned())).contains("cannot be used"));
    assert!(refusal(Grammar::Source("start: missing\n".to_owned())).contains("missing"));
    assert!(refusal(Grammar::Source("root ::= <token>".to_owned())).contains("token"));
    assert!(refusal(Grammar::Source("other ::= \"a\"".to_owned())).contains("root"));
    let large = json!({"enum": (0..100_000).map(|i| format!("number {i}")).collect::<Vec<_>>()});
    assert!(schema(large).contains("bytes"));
}

#[test]
fn states_are_independent_and_grammars_are_kept() {
    let (tokenizer, grammars) = (tokenizer(), grammars());
    let grammar = Grammar::Choice(vec!["ab".to_owned(), "cd".to_owned()]);
    let constraint = grammars.compile(&grammar, &Thinking::None).unwrap();
    let (mut one, mut two) = (constraint.start(), constraint.start());
    let before = two.allowed().unwrap();
    let a = tokenizer.token_to_id("a").unwrap();
    one.accept(a).unwrap();
    assert_eq!(two.allowed().unwrap(), before);
    assert_ne!(one.allowed().unwrap(), before);
    let again = grammars.compile(&grammar, &Thinking::None).unwrap();
    assert_eq!(again.start().allowed().unwrap(), before);
    let mut refused = constraint.start();
    assert!(refused.accept(tokenizer.token_to_id("z").unwrap()).is_err());
}
