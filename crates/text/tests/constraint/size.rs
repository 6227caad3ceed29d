//! Large schemas: followed to their end, or refused before the answer begins.

use oscar_text::{CallGrammar, Dialect, Grammar, Thinking};
use serde_json::{Map, Value, json};

use super::{Random, allowed, grammars, tokenizer, walk};

fn object(count: usize) -> Value {
    let properties: Map<String, Value> =
        (0..count).map(|i| (format!("field_{i}"), json!({"type": "boolean"}))).collect();
    json!({"type": "object", "properties": properties, "additionalProperties": false})
}

#[test]
fn many_optional_members_are_followed() {
    let (tokenizer, grammars, mut random) = (tokenizer(), grammars(), Random(19));
    let constraint = grammars.compile(&Grammar::JsonSchema(object(2000)), &Thinking::None).unwrap();
    let mut state = constraint.start();
    let text = "{\"field_3\": true, \"field_700\": false, \"field_1999\": true}";
    for id in tokenizer.encode(text, false).unwrap() {
        assert!(allowed(&state.allowed().unwrap()).contains(&id));
        state.accept(id).unwrap();
    }
    // Whatever the beginning, there is a way on.
    walk(&tokenizer, &constraint, &mut random, 60);
}

#[test]
fn too_many_are_refused_by_the_name_of_the_keyword() {
    let grammars = grammars();
    let nested = json!({"type": "array", "items": {"anyOf": [object(1001), object(1000)]}});
    let calls =
        CallGrammar { dialect: Dialect::Hermes, tools: vec![("f".to_owned(), object(2001))], parallel: true };
    for grammar in [Grammar::JsonSchema(object(2001)), Grammar::JsonSchema(nested), Grammar::Amid(calls)] {
        let error = grammars.compile(&grammar, &Thinking::None).unwrap_err().to_string();
        assert!(error.contains("`properties` have 2001 optional members"), "{error}");
    }
    let mut required = object(2001);
    required["required"] = json!(["field_0"]);
    grammars.compile(&Grammar::JsonSchema(required), &Thinking::None).unwrap();
}
