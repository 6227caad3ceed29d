//! One declaration of every request field. Parsing, validation and `/openapi.json` all come from
//! it.
//!
//! **To add a field**, write one line into a [`request_fields!`] block:
//!
//! ```text
//! /// Text of the OpenAPI document: this comment.
//! pub top_k: Option<i64> = Kind::Integer { min: -1, max: u32::MAX as i64 },
//! ```
//!
//! The name is the JSON name. The type says how the value is read: `Option<T>` for a field that may
//! be absent or null, `T` for a required one; `T` is any [`FieldValue`]. The part behind `=` is
//! needed only where the type alone allows too much. A new kind of value is a new variant of
//! [`Kind`] and an implementation of [`FieldValue`]. Fields in an `ignored` block are documented
//! and skipped.
//!
//! **Invariant:** a field that is not declared is ignored, unless it must be refused
//! ([`crate::refused`]). A value that is read has been checked by
//! its [`Kind`], and an error names the field, the allowed values and the value that was sent.

use oscar_engine::Allowed;
use serde_json::{Map, Value, json};

use crate::body::parse_object;
use crate::error::ApiError;

/// A declared field.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub kind: Kind,
    pub about: &'static str,
    pub required: bool,
}

impl Field {
    /// The field is skipped while the body is read.
    pub fn is_ignored(&self) -> bool {
        self.kind == Kind::Ignored
    }

    /// The error of a value that the kind does not accept: names the first wrong element of a list.
    fn refusal(&self, value: &Value) -> ApiError {
        if let Some((path, expected, element)) = self.kind.wrong_element(value) {
            let problem = format!("must be {expected}, not {}", shown(element));
            return ApiError::param(format!("{}{path}", self.name), problem);
        }
        let expected = match self.kind {
            Kind::Integer { min, max } if value.is_u64() && !value.is_i64() => {
                format!("an integer from {min} to {max}")
            }
            kind => kind.expected(),
        };
        ApiError::param(self.name, format!("must be {expected}, not {}", shown(value)))
    }
}

/// The declarations of fields that another body has: one that is not there does not compile.
pub const fn pick<const N: usize>(names: [&str; N], tables: &[&[Field]]) -> [Field; N] {
    let mut picked = [tables[0][0]; N];
    let mut index = 0;
    while index < N {
        let (mut table, mut found) = (0, false);
        while table < tables.len() {
            let mut at = 0;
            while at < tables[table].len() {
                if same(tables[table][at].name.as_bytes(), names[index].as_bytes()) {
                    picked[index] = tables[table][at];
                    found = true;
                }
                at += 1;
            }
            table += 1;
        }
        assert!(found, "no table has a field of this name");
        index += 1;
    }
    picked
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

/// The values that a field may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Boolean,
    Integer {
        min: i64,
        max: i64,
    },
    Number(Allowed),
    Text,
    Object,
    /// A list of objects.
    Objects,
    TextOrTexts,
    /// Token ids.
    Tokens,
    /// Text, texts, token ids or lists of token ids.
    Prompt,
    /// Checked by the endpoint itself.
    Any,
    /// Accepted and skipped while the body is read.
    Ignored,
}

/// A type that a field can have.
pub trait FieldValue: Sized {
    /// The kind of a field whose declaration names no other.
    const KIND: Kind;

    /// Reads a value that the field's kind has accepted; `None` if the kind does not fit the type.
    fn read(value: Value) -> Option<Self>;
}

/// A declared type: `Option<T>` or, for a required field, `T`.
pub trait FieldType: Sized {
    const KIND: Kind;
    const REQUIRED: bool;

    fn take(field: &Field, body: &mut Map<String, Value>) -> Result<Self, ApiError>;
}

impl<T: FieldValue> FieldType for Option<T> {
    const KIND: Kind = T::KIND;
    const REQUIRED: bool = false;

    fn take(field: &Field, body: &mut Map<String, Value>) -> Result<Self, ApiError> {
        let value = match body.remove(field.name) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value,
        };
        if !field.kind.accepts(&value) {
            return Err(field.refusal(&value));
        }
        let problem = || format!("must be {}, not this", field.kind.expected());
        T::read(value).map(Some).ok_or_else(|| ApiError::param(field.name, problem()))
    }
}

impl<T: FieldValue> FieldType for T {
    const KIND: Kind = T::KIND;
    const REQUIRED: bool = true;

    fn take(field: &Field, body: &mut Map<String, Value>) -> Result<Self, ApiError> {
        <Option<T> as FieldType>::take(field, body)?.ok_or_else(|| ApiError::param(field.name, "is missing"))
    }
}

/// A group of fields, declared by [`request_fields!`].
pub trait Fields: Sized {
    const FIELDS: &'static [Field];

    /// Moves the fields out of a body.
    fn take(body: &mut Map<String, Value>) -> Result<Self, ApiError>;
}

/// A whole body: one or more groups of fields.
pub trait RequestBody: Sized {
    const TABLES: &'static [&'static [Field]];

    /// Reads a body whose values may take `memory` bytes.
    fn parse(bytes: &[u8], memory: usize) -> Result<Self, ApiError> {
        Self::from_object(parse_object(bytes, Self::TABLES, memory)?)
    }

    /// Reads the fields of an object; others are ignored.
    fn from_object(body: Map<String, Value>) -> Result<Self, ApiError>;
}

macro_rules! body_of_groups {
    ($($group:ident),+) => {
        impl<$($group: Fields),+> RequestBody for ($($group,)+) {
            const TABLES: &'static [&'static [Field]] = &[$($group::FIELDS),+];

            fn from_object(mut body: Map<String, Value>) -> Result<Self, ApiError> {
                Ok(($($group::take(&mut body)?,)+))
            }
        }
    };
}

body_of_groups!(A);
body_of_groups!(A, B);
body_of_groups!(A, B, C);
body_of_groups!(A, B, C, D);

/// Declares a group of request fields; see the [module](self).
macro_rules! request_fields {
    (
        $(#[doc = $doc:literal])*
        $vis:vis struct $group:ident {
            $($(#[doc = $about:literal])+ $field_vis:vis $name:ident: $type:ty $(= $kind:expr)?,)*
        }
        $(ignored { $($(#[doc = $ignored_about:literal])+ $ignored:ident,)* })?
    ) => {
        $(#[doc = $doc])*
        #[derive(Debug)]
        $vis struct $group {
            $($(#[doc = $about])+ $field_vis $name: $type,)*
        }

        impl $crate::schema::Fields for $group {
            const FIELDS: &'static [$crate::schema::Field] = &[
                $($crate::schema::request_fields!(@field $name, $type, concat!($($about),+) $(, $kind)?),)*
                $($($crate::schema::request_fields!(@field
                    $ignored, Option<serde_json::Value>, concat!($($ignored_about),+),
                    $crate::schema::Kind::Ignored
                ),)*)?
            ];

            fn take(
                body: &mut serde_json::Map<String, serde_json::Value>,
            ) -> Result<Self, $crate::error::ApiError> {
                let mut fields = Self::FIELDS.iter();
                let mut next = || fields.next().expect("FIELDS has every field, in order");
                Ok(Self { $($name: $crate::schema::FieldType::take(next(), body)?),* })
            }
        }
    };
    (@field $name:ident, $type:ty, $about:expr) => {
        $crate::schema::request_fields!(@field $name, $type, $about,
            <$type as $crate::schema::FieldType>::KIND)
    };
    (@field $name:ident, $type:ty, $about:expr, $kind:expr) => {
        $crate::schema::Field {
            name: stringify!($name),
            kind: $kind,
            about: $about.trim_ascii(),
            required: <$type as $crate::schema::FieldType>::REQUIRED,
        }
    };
}
pub(crate) use request_fields;

impl Kind {
    pub const COUNT: Self = Self::Integer { min: 0, max: i64::MAX };
    pub const AT_LEAST_ONE: Self = Self::Integer { min: 1, max: i64::MAX };

    pub fn accepts(&self, value: &Value) -> bool {
        match *self {
            Self::Boolean => value.is_boolean(),
            Self::Integer { min, max } => value.as_i64().is_some_and(|number| (min..=max).contains(&number)),
            // As f32, since that is what the engine gets: a tiny number may become 0.
            Self::Number(allowed) => value.as_f64().is_some_and(|number| allowed.contains(number as f32)),
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

    /// The first element that makes a list wrong: its path behind the field's name, what it must
    /// be, and the element.
    fn wrong_element<'a>(&self, value: &'a Value) -> Option<(String, &'static str, &'a Value)> {
        const TOKEN: &str = "a token id";
        let items = value.as_array()?;
        let first = |expected, accepts: fn(&Value) -> bool| {
            let index = items.iter().position(|item| !accepts(item))?;
            Some((format!("[{index}]"), expected, &items[index]))
        };
        match *self {
            Self::Objects => first("an object", Value::is_object),
            Self::TextOrTexts => first("a string", Value::is_string),
            Self::Tokens => first(TOKEN, is_token),
            // The first element says which of the lists is meant.
            Self::Prompt => match items.first()? {
                Value::String(_) => first("a string like the first element", Value::is_string),
                Value::Number(_) => first(TOKEN, is_token),
                Value::Array(_) => {
                    let inner = |(index, list)| {
                        let (path, expected, item) = Self::Tokens.wrong_element(list)?;
                        Some((format!("[{index}]{path}"), expected, item))
                    };
                    let lists = first("a list of token ids like the first element", Value::is_array);
                    lists.or_else(|| items.iter().enumerate().find_map(inner))
                }
                _ => first("a string, a token id or a list of token ids", |_| false),
            },
            _ => None,
        }
    }

    /// The allowed values, in words that complete "must be".
    pub fn expected(&self) -> String {
        match *self {
            Self::Boolean => "true or false".to_owned(),
            Self::Integer { min: i64::MIN, max: i64::MAX } => "an integer".to_owned(),
            Self::Integer { min, max: i64::MAX } => format!("an integer of at least {min}"),
            Self::Integer { min, max } => format!("an integer from {min} to {max}"),
            Self::Number(allowed) => format!("a number {allowed}"),
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
            Self::Number(Allowed { min, max, above }) => {
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

/// Types that are read as serde reads them.
macro_rules! field_values {
    ($($type:ty: $kind:expr,)*) => {$(
        impl FieldValue for $type {
            const KIND: Kind = $kind;

            fn read(value: Value) -> Option<Self> {
                serde_json::from_value(value).ok()
            }
        }
    )*};
}

field_values! {
    bool: Kind::Boolean,
    i64: Kind::Integer { min: i64::MIN, max: i64::MAX },
    usize: Kind::COUNT,
    f32: Kind::Number(Allowed { min: f32::MIN, max: f32::MAX, above: false }),
    String: Kind::Text,
    Vec<u32>: Kind::Tokens,
    Map<String, Value>: Kind::Object,
    Vec<Map<String, Value>>: Kind::Objects,
    Value: Kind::Any,
}

/// One string reads as a list of one.
impl FieldValue for Vec<String> {
    const KIND: Kind = Kind::TextOrTexts;

    fn read(value: Value) -> Option<Self> {
        match value {
            Value::String(text) => Some(vec![text]),
            list => serde_json::from_value(list).ok(),
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
        let tenth = Kind::Number(Allowed { min: 0.0, max: 1.0, above: true });
        let cases = [
            (Kind::Boolean, json!(true), true),
            (Kind::Boolean, json!("true"), false),
            (Kind::Integer { min: 0, max: 5 }, json!(5), true),
            (Kind::Integer { min: 0, max: 5 }, json!(6), false),
            (Kind::Integer { min: 0, max: 5 }, json!(-1), false),
            (Kind::Integer { min: 0, max: i64::MAX }, json!(u64::MAX), false),
            (Kind::Integer { min: 0, max: 5 }, json!(1.5), false),
            (tenth, json!(0), false),
            (tenth, json!(1e-60), false),
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

    request_fields! {
        /// Fields of the tests.
        struct Sample {
            /// How many,
            /// in words
            count: Option<i64> = Kind::Integer { min: 1, max: 3 },
            /// Some words
            words: Vec<String>,
        }
        ignored {
            /// For nobody
            note,
        }
    }

    #[test]
    fn errors_name_the_field() {
        let check =
            |body: Value| <(Sample,)>::parse(body.to_string().as_bytes(), 1 << 20).map(|(sample,)| sample);
        let sample = check(json!({"words": "x", "count": null, "unknown": []})).unwrap();
        assert_eq!((sample.count, sample.words), (None, vec!["x".to_owned()]));
        let sample = check(json!({"words": ["x", "y"], "count": 3, "note": 5})).unwrap();
        assert_eq!((sample.count, sample.words.len()), (Some(3), 2));
        let ApiError::Invalid { message, param, .. } = check(json!({"count": 9, "words": "x"})).unwrap_err()
        else {
            panic!("wrong error")
        };
        assert_eq!(param.as_deref(), Some("count"));
        assert_eq!(message, "count: must be an integer from 1 to 3, not 9");
        assert!(check(json!({"count": 1})).unwrap_err().to_string().contains("words: is missing"));
    }

    #[test]
    fn a_declaration_gives_the_document_too() {
        let [count, words, note] = Sample::FIELDS else { panic!("three fields") };
        assert_eq!((count.name, count.about, count.required), ("count", "How many, in words", false));
        assert_eq!(count.kind.json_schema(), json!({"type": "integer", "minimum": 1, "maximum": 3}));
        assert_eq!((words.name, words.kind, words.required), ("words", Kind::TextOrTexts, true));
        assert_eq!((note.name, note.about, note.is_ignored()), ("note", "For nobody", true));
    }
}
