//! Schemas that are too large to be followed are refused before the answer begins.

use serde_json::Value;

use super::Grammar;
use crate::TextError;

/// Most optional members of all objects in a schema. Each may come next at one place of an answer.
pub(super) const MAX_OPTIONAL: usize = 2000;

/// Refuses a grammar with a schema of more optional members.
pub(super) fn check(grammar: &Grammar) -> Result<(), TextError> {
    match grammar {
        Grammar::JsonSchema(schema) => one(schema),
        Grammar::Calls(calls) | Grammar::Amid(calls) => {
            calls.tools.iter().try_for_each(|(_, schema)| one(schema))
        }
        Grammar::OrCalls(form, calls) => {
            check(form)?;
            calls.tools.iter().try_for_each(|(_, schema)| one(schema))
        }
        Grammar::JsonObject | Grammar::Regex(_) | Grammar::Choice(_) | Grammar::Source(_) => Ok(()),
    }
}

fn one(schema: &Value) -> Result<(), TextError> {
    match optional(schema) {
        count if count > MAX_OPTIONAL => {
            let reason = format!(
                "its `properties` have {count} optional members, more than the {MAX_OPTIONAL} allowed; put members \
                 into `required`, or split the schema"
            );
            Err(TextError::Grammar { reason })
        }
        _ => Ok(()),
    }
}

fn optional(value: &Value) -> usize {
    match value {
        Value::Object(members) => {
            let own = members.get("properties").and_then(Value::as_object).map_or(0, |properties| {
                let required = members.get("required").and_then(Value::as_array).map_or(0, Vec::len);
                properties.len().saturating_sub(required)
            });
            own + members.values().map(optional).sum::<usize>()
        }
        Value::Array(items) => items.iter().map(optional).sum(),
        _ => 0,
    }
}
