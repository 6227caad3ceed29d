//! One description of every request field: the validator reads it, and so does `/openapi.json`.
//!
//! Invariant: a field that is absent or null passes; a field that is not described is ignored. After
//! [`check`] the typed structures of an endpoint deserialize without surprises.

use serde_json::{Map, Value, json};

use crate::error::ApiError;

/// A request field.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub kind: Kind,
    pub about: &'static str,
    pub required: bool,
}

/// What a field may hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Boolean,
    Integer {
        min: i64,
        max: i64,
    },
    Number {
        min: f64,
        max: f64,
        /// `min` itself is not allowed.
        above: bool,
    },
    Text,
    Object,
    /// A list of objects.
    Objects,
    TextOrTexts,
    /// Token ids.
    Tokens,
    /// Text, texts, token ids or lists of token ids.
    Prompt,
    /// Looked at by the endpoint itself.
    Any,
    /// Accepted and thrown away.
    Ignored,
}

impl Field {
    pub const fn new(name: &'static str, kind: Kind, about: &'static str) -> Self {
        Self { name, kind, about, required: false }
    }

    /// Is the field skipped while the body is read?
    pub fn is_ignored(&self) -> bool {
        self.kind == Kind::Ignored
    }

    pub const fn required(mut self) -> Self {
        self.required = true;
        self
    }
}

/// Checks every described field that is present.
pub fn check(tables: &[&[Field]], body: &Map<String, Value>) -> Result<(), ApiError> {
    for field in tables.iter().copied().flatten() {
        match body.get(field.name) {
            None | Some(Value::Null) if field.required => {
                return Err(ApiError::param(field.name, "is missing"));
            }
            None | Some(Value::Null) => {}
            Some(value) if field.kind.accepts(value) => {}
            Some(value) => {
                let problem = format!("must be {}, not {}", field.kind.expected(), shown(value));
                return Err(ApiError::param(field.name, problem));
            }
        }
    }
    Ok(())
}

impl Kind {
    pub fn accepts(&self, value: &Value) -> bool {
        match *self {
            Self::Boolean => value.is_boolean(),
            Self::Integer { min, max } => value.as_i64().is_some_and(|number| (min..=max).contains(&number)),
            Self::Number { min, max, above } => value
                .as_f64()
                .is_some_and(|number| number <= max && if above { number > min } else { number >= min }),
            Self::Text => value.is_string(),
            Self::Object => value.is_object(),
            Self::Objects => all(value, Value::is_object),
            Self::TextOrTexts => value.is_string() || all(value, Value::is_string),
            Self::Tokens => all(value, is_token),
            Self::Prompt => {
                value.is_string()
                    || all(value, Value::is_string)
                    || all(value, is_token)
                    || all(value, |list| all(list, is_token))
            }
            Self::Any | Self::Ignored => true,
        }
    }

    /// What is allowed, in words that complete "must be".
    pub fn expected(&self) -> String {
        match *self {
            Self::Boolean => "true or false".to_owned(),
            Self::Integer { min, max: i64::MAX } => format!("an integer of at least {min}"),
            Self::Integer { min: i64::MIN, .. } => "an integer".to_owned(),
            Self::Integer { min, max } => format!("an integer from {min} to {max}"),
            Self::Number { min, max, above: true } => format!("a number above {min} and at most {max}"),
            Self::Number { min, max, above: false } => format!("a number from {min} to {max}"),
            Self::Text => "a string".to_owned(),
            Self::Object => "an object".to_owned(),
            Self::Objects => "a list of objects".to_owned(),
            Self::TextOrTexts => "a string or a list of strings".to_owned(),
            Self::Tokens => "a list of token ids".to_owned(),
            Self::Prompt => {
                "a string, a list of strings, a list of token ids, or a list of such lists".to_owned()
            }
            Self::Any | Self::Ignored => "any JSON".to_owned(),
        }
    }

    /// The same as JSON Schema.
    pub fn json_schema(&self) -> Value {
        let text = json!({"type": "string"});
        let tokens =
            json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": u32::MAX}});
        match *self {
            Self::Boolean => json!({"type": "boolean"}),
            Self::Integer { min, max } => {
                let mut schema = json!({"type": "integer"});
                if min != i64::MIN {
                    schema["minimum"] = json!(min);
                }
                if max != i64::MAX {
                    schema["maximum"] = json!(max);
                }
                schema
            }
            Self::Number { min, max, above } => {
                let lower = if above { "exclusiveMinimum" } else { "minimum" };
                json!({"type": "number", lower: min, "maximum": max})
            }
            Self::Text => text,
            Self::Object => json!({"type": "object"}),
            Self::Objects => json!({"type": "array", "items": {"type": "object"}}),
            Self::TextOrTexts => json!({"oneOf": [text, {"type": "array", "items": text}]}),
            Self::Tokens => tokens,
            Self::Prompt => json!({"oneOf": [
                text, {"type": "array", "items": text}, tokens, {"type": "array", "items": tokens}]}),
            Self::Any | Self::Ignored => json!({}),
        }
    }
}

fn all(value: &Value, test: impl Fn(&Value) -> bool) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(test))
}

fn is_token(value: &Value) -> bool {
    value.as_u64().is_some_and(|id| u32::try_from(id).is_ok())
}

/// A value as it may be quoted in a message: whole if short, else its type.
pub fn shown(value: &Value) -> String {
    const LONGEST: usize = 40;
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.len() <= LONGEST => value.to_string(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_accept_what_they_say() {
        let tenth = Kind::Number { min: 0.0, max: 1.0, above: true };
        let cases = [
            (Kind::Boolean, json!(true), true),
            (Kind::Boolean, json!("true"), false),
            (Kind::Integer { min: 0, max: 5 }, json!(5), true),
            (Kind::Integer { min: 0, max: 5 }, json!(6), false),
            (Kind::Integer { min: 0, max: 5 }, json!(-1), false),
            (Kind::Integer { min: 0, max: i64::MAX }, json!(u64::MAX), false),
            (Kind::Integer { min: 0, max: 5 }, json!(1.5), false),
            (tenth, json!(0), false),
            (tenth, json!(1), true),
            (tenth, json!("1"), false),
            (Kind::TextOrTexts, json!("a"), true),
            (Kind::TextOrTexts, json!(["a", 1]), false),
            (Kind::Tokens, json!([1, 2]), true),
            (Kind::Tokens, json!([1u64 << 32]), false),
            (Kind::Prompt, json!([[1], []]), true),
            (Kind::Prompt, json!([[1], "a"]), false),
            (Kind::Objects, json!([{}]), true),
            (Kind::Objects, json!({}), false),
        ];
        for (kind, value, accepted) in cases {
            assert_eq!(kind.accepts(&value), accepted, "{kind:?} {value}");
        }
    }

    #[test]
    fn errors_name_the_field() {
        const TABLE: &[Field] = &[
            Field::new("count", Kind::Integer { min: 1, max: 3 }, ""),
            Field::new("words", Kind::TextOrTexts, "").required(),
        ];
        let check = |body: Value| check(&[TABLE], body.as_object().unwrap());
        assert!(check(json!({"words": "x", "count": null, "unknown": []})).is_ok());
        let ApiError::Invalid { message, param, .. } = check(json!({"count": 9, "words": "x"})).unwrap_err()
        else {
            panic!("wrong error")
        };
        assert_eq!(param.as_deref(), Some("count"));
        assert_eq!(message, "count: must be an integer from 1 to 3, not 9");
        assert!(check(json!({"count": 1})).unwrap_err().to_string().contains("words: is missing"));
    }
}
