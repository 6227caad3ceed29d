//! JSON values whose memory is bounded while they are read.
//!
//! A value takes many times the bytes of its text: `{"a":0},` are 8 bytes in a body and some 500 in
//! memory. A limit on the body alone therefore bounds little.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Bytes of one value, apart from its text.
pub const VALUE: usize = size_of::<Value>();

/// Bytes of one entry of an object, apart from its texts: value, key, hash and index.
const ENTRY: usize = VALUE + size_of::<String>() + 2 * size_of::<usize>();

/// Bytes of an object with a first entry: the map makes room for four, and for an index.
const OBJECT: usize = 4 * ENTRY;

/// Memory that is left for values.
pub struct Budget(Cell<usize>);

impl Budget {
    pub fn new(bytes: usize) -> Self {
        Self(Cell::new(bytes))
    }

    pub fn is_spent(&self) -> bool {
        self.0.get() == 0
    }

    fn take<E: Error>(&self, bytes: usize) -> Result<(), E> {
        let left = self.0.get().saturating_sub(bytes);
        self.0.set(left);
        match left {
            0 => Err(E::custom("the values take too much memory")),
            _ => Ok(()),
        }
    }
}

/// Reads one value within a budget.
#[derive(Clone, Copy)]
pub struct Bounded<'a>(pub &'a Budget);

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.0.take(VALUE).map(|()| Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.0.take(VALUE).map(|()| Value::Bool(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.0.take(VALUE).map(|()| value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.0.take(VALUE).map(|()| value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.0.take(VALUE)?;
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number is not finite"))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        self.0.take(VALUE + text.len()).map(|()| Value::String(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        self.0.take(VALUE)?;
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(self)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        self.0.take(VALUE)?;
        let mut fields = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            if fields.is_empty() {
                self.0.take(OBJECT)?;
            }
            self.0.take(ENTRY - VALUE + name.len())?;
            fields.insert(name, entries.next_value_seed(self)?);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, bytes: usize) -> Result<Value, String> {
        let mut reader = serde_json::Deserializer::from_str(text);
        Bounded(&Budget::new(bytes)).deserialize(&mut reader).map_err(|error| error.to_string())
    }

    #[test]
    fn values_read_as_without_a_budget() {
        let text = r#"{"a": [1, -2, 3.5, null, true, "x\ny"], "b": {"c": {}}, "a2": [], "big": 18446744073709551615, "a": 7}"#;
        assert_eq!(read(text, 1 << 20).unwrap(), serde_json::from_str::<Value>(text).unwrap());
    }

    #[test]
    fn more_memory_than_allowed_is_refused() {
        let ids = format!("[{}1]", "1,".repeat(999));
        assert!(read(&ids, 1100 * VALUE).is_ok());
        assert!(read(&ids, 900 * VALUE).unwrap_err().contains("too much memory"));
        assert!(read(&format!("\"{}\"", "x".repeat(1000)), 1000).is_err());
        let objects = format!("[{}0]", "{\"a\":0},".repeat(1000));
        assert!(read(&objects, 10 * objects.len()).is_err());
    }
}
