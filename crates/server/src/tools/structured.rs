//! The fields that ask for an answer of a certain form, in the words of OpenAI, vLLM, SGLang and
//! llama.cpp.

use oscar_text::Grammar;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::schema::{Kind, request_fields, shown};

request_fields! {
    /// The fields that ask for a form.
    pub struct FormFields {
        /// `text`, `json_object`, or `json_schema` with a schema that the answer fits
        response_format: Option<Value> = Kind::Object,
        /// One of `json`, `regex`, `choice`, `grammar` or `json_object`, as vLLM has it
        structured_outputs: Option<Value> = Kind::Object,
        /// A JSON schema that the answer fits
        guided_json: Option<Value>,
        /// A regular expression that the answer matches
        guided_regex: Option<Value> = Kind::Text,
        /// Texts, one of which is the answer
        guided_choice: Option<Value>,
        /// A grammar in Lark or GBNF
        guided_grammar: Option<Value> = Kind::Text,
        /// A JSON schema that the answer fits
        json_schema: Option<Value>,
        /// A regular expression that the answer matches
        regex: Option<Value> = Kind::Text,
        /// A grammar in Lark or GBNF
        ebnf: Option<Value> = Kind::Text,
        /// A grammar in Lark or GBNF
        grammar: Option<Value> = Kind::Text,
    }
}

/// Parts of `structured_outputs` that choose an implementation, or the white space that is written
/// anyway.
const SETTINGS: &[&str] = &["disable_fallback", "disable_any_whitespace", "backend", "_backend"];

impl FormFields {
    /// The form that the answer must have and the field that asks for it; none if the answer is
    /// free.
    pub fn answer_form(&self) -> Result<Option<(String, Grammar)>, ApiError> {
        let mut forms: Vec<(String, Grammar)> = Vec::new();
        if let Some(format) = &self.response_format
            && let Some(grammar) = response_format(format)?
        {
            forms.push(("response_format".to_owned(), grammar));
        }
        if let Some(Value::Object(outputs)) = &self.structured_outputs {
            for (kind, value) in outputs {
                let param = format!("structured_outputs.{kind}");
                match kind.as_str() {
                    _ if value.is_null() || SETTINGS.contains(&kind.as_str()) => {}
                    "json_object" if value == true => forms.push((param, Grammar::JsonObject)),
                    "json_object" | "disable_additional_properties" if value == false => {}
                    "whitespace_pattern" => {
                        let problem = "is not supported; JSON is written with one space after `,` and `:`";
                        return Err(ApiError::param(param, problem));
                    }
                    "json" | "regex" | "choice" | "grammar" => {
                        forms.push((param.clone(), one_form(&param, kind, value)?));
                    }
                    _ => {
                        let problem = "is not supported; use json, regex, choice or grammar";
                        return Err(ApiError::param(param, problem));
                    }
                }
            }
        }
        let direct = [
            ("guided_json", "json", &self.guided_json),
            ("guided_regex", "regex", &self.guided_regex),
            ("guided_choice", "choice", &self.guided_choice),
            ("guided_grammar", "grammar", &self.guided_grammar),
            ("json_schema", "json", &self.json_schema),
            ("regex", "regex", &self.regex),
            ("ebnf", "grammar", &self.ebnf),
            ("grammar", "grammar", &self.grammar),
        ];
        for (name, kind, value) in direct {
            if let Some(value) = value {
                forms.push((name.to_owned(), one_form(name, kind, value)?));
            }
        }
        match forms.len() {
            0 | 1 => Ok(forms.pop()),
            _ => {
                let problem = format!("cannot be combined with {}: an answer has one form", forms[0].0);
                Err(ApiError::param(forms[1].0.clone(), problem))
            }
        }
    }
}

/// A constrained answer ends when it is complete.
pub fn refuse_ignore_eos(param: &str, ignore_eos: Option<bool>) -> Result<(), ApiError> {
    match ignore_eos {
        Some(true) => {
            let problem = format!("cannot be combined with {param}: such an answer ends when it is complete");
            Err(ApiError::param("ignore_eos", problem))
        }
        _ => Ok(()),
    }
}

fn response_format(format: &Value) -> Result<Option<Grammar>, ApiError> {
    let schema_at = |param: &str, schema: &Value| schema_of(param, schema).map(Grammar::JsonSchema).map(Some);
    match format["type"].as_str() {
        Some("text") => Ok(None),
        // llama.cpp takes a schema here as well.
        Some("json_object") => match format.get("schema").filter(|schema| !schema.is_null()) {
            Some(schema) => schema_at("response_format.schema", schema),
            None => Ok(Some(Grammar::JsonObject)),
        },
        Some("json_schema") => {
            let nested = format.get("json_schema").and_then(|outer| outer.get("schema"));
            // The Responses API has the schema one level up.
            match nested.or_else(|| format.get("schema")) {
                Some(schema) => schema_at("response_format.json_schema.schema", schema),
                None => Err(ApiError::param("response_format.json_schema.schema", "is missing")),
            }
        }
        _ => {
            let problem =
                format!("{} is not supported; use text, json_object or json_schema", shown(&format["type"]));
            Err(ApiError::param("response_format.type", problem))
        }
    }
}

fn one_form(param: &str, kind: &str, value: &Value) -> Result<Grammar, ApiError> {
    let text = || match value {
        Value::String(text) => Ok(text.clone()),
        other => Err(ApiError::param(param, format!("must be a string, not {}", shown(other)))),
    };
    match kind {
        "json" => schema_of(param, value).map(Grammar::JsonSchema),
        "regex" => text().map(Grammar::Regex),
        "grammar" => text().map(Grammar::Source),
        _ => {
            let options: Option<Vec<String>> = value
                .as_array()
                .map(|options| options.iter().filter_map(Value::as_str).map(str::to_owned).collect());
            match options {
                Some(options)
                    if !options.is_empty() && Some(options.len()) == value.as_array().map(Vec::len) =>
                {
                    Ok(Grammar::Choice(options))
                }
                _ => Err(ApiError::param(param, "must be a list of strings with at least one of them")),
            }
        }
    }
}

/// A schema as it is, or as a string of JSON.
fn schema_of(param: &str, value: &Value) -> Result<Value, ApiError> {
    let parsed = match value {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|error| ApiError::param(param, format!("is no JSON: {error}")))?,
        other => other.clone(),
    };
    match parsed {
        Value::Object(_) => Ok(parsed),
        Value::Bool(true) => Ok(json!({})),
        other => Err(ApiError::param(param, format!("must be a JSON schema, not {}", shown(&other)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::RequestBody;

    fn form(body: Value) -> Result<Option<Grammar>, String> {
        let form = |body: Value| -> Result<Option<Grammar>, ApiError> {
            let (fields,) = <(FormFields,)>::from_object(body.as_object().unwrap().clone())?;
            Ok(fields.answer_form()?.map(|(_, grammar)| grammar))
        };
        form(body).map_err(|error| match error {
            ApiError::Invalid { param, .. } => param.unwrap_or_default(),
            other => panic!("{other}"),
        })
    }

    #[test]
    fn every_spelling_is_understood() {
        let schema = json!({"type": "object"});
        let wrapped = Ok(Some(Grammar::JsonSchema(schema.clone())));
        let text = schema.to_string();
        for body in [
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            json!({"guided_json": schema}),
            json!({"guided_json": text}),
            json!({"json_schema": text, "guided_regex": null}),
            json!({"structured_outputs": {"json": schema, "regex": null, "backend": "auto"}}),
        ] {
            assert_eq!(form(body.clone()), wrapped, "{body}");
        }
        assert_eq!(form(json!({"response_format": {"type": "text"}})), Ok(None));
        assert_eq!(form(json!({"response_format": {"type": "json_object"}})), Ok(Some(Grammar::JsonObject)));
        assert_eq!(form(json!({"structured_outputs": {"json_object": true}})), Ok(Some(Grammar::JsonObject)));
        assert_eq!(form(json!({"guided_choice": ["a"]})), Ok(Some(Grammar::Choice(vec!["a".to_owned()]))));
        assert_eq!(
            form(json!({"grammar": "root ::= \"a\""})),
            Ok(Some(Grammar::Source("root ::= \"a\"".to_owned())))
        );
    }

    #[test]
    fn wrong_forms_are_named() {
        for (body, name) in [
            (json!({"response_format": {"type": "grammar"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (json!({"guided_json": 5}), "guided_json"),
            (json!({"guided_json": "{"}), "guided_json"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_choice": ["a", 1]}), "guided_choice"),
            (json!({"guided_regex": 1}), "guided_regex"),
            (json!({"structured_outputs": {"structural_tag": {}}}), "structured_outputs.structural_tag"),
            (json!({"guided_regex": "a", "guided_json": {}}), "guided_regex"),
            (json!({"response_format": {"type": "json_object"}, "regex": "a"}), "regex"),
        ] {
            assert_eq!(form(body.clone()), Err(name.to_owned()), "{body}");
        }
    }
}
