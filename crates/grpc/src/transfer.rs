//! `kv_transfer_params`: a protobuf Struct there, a JSON object here.

use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value as Field};
use serde_json::{Map, Value};
use tonic::Status;

/// Deepest nesting that is read. Ours are flat.
const DEPTH: usize = 8;

/// The JSON object of a Struct.
pub fn to_json(params: Struct) -> Result<Value, Status> {
    object(params, DEPTH)
        .ok_or_else(|| Status::invalid_argument("kv.kv_transfer_params: is nested too deeply"))
}

fn object(params: Struct, depth: usize) -> Option<Value> {
    let field = |(name, value)| Some((name, json(value, depth)?));
    params.fields.into_iter().map(field).collect::<Option<Map<_, _>>>().map(Value::Object)
}

fn json(value: Field, depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    match value.kind {
        None | Some(Kind::NullValue(_)) => Some(Value::Null),
        Some(Kind::BoolValue(value)) => Some(Value::Bool(value)),
        Some(Kind::NumberValue(value)) => Some(Value::from(value)),
        Some(Kind::StringValue(value)) => Some(Value::String(value)),
        Some(Kind::ListValue(list)) => {
            list.values.into_iter().map(|value| json(value, depth)).collect::<Option<_>>().map(Value::Array)
        }
        Some(Kind::StructValue(params)) => object(params, depth),
    }
}

/// The Struct of a JSON object; an empty one of anything else.
pub fn to_struct(value: Value) -> Struct {
    let fields = match value {
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, field(value))).collect(),
        _ => Default::default(),
    };
    Struct { fields }
}

fn field(value: Value) -> Field {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(value),
        Value::Number(value) => Kind::NumberValue(value.as_f64().unwrap_or_default()),
        Value::String(value) => Kind::StringValue(value),
        Value::Array(list) => Kind::ListValue(ListValue { values: list.into_iter().map(field).collect() }),
        Value::Object(_) => Kind::StructValue(to_struct(value)),
    };
    Field { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_come_back_as_they_went() {
        let params = json!({"do_remote_prefill": true, "remote_host": "a", "remote_port": 14579.0, "x": null,
                            "y": [1.5, {"z": []}]});
        assert_eq!(to_json(to_struct(params.clone())).unwrap(), params);
        let mut deep = json!(1.0);
        for _ in 0..20 {
            deep = json!({"deeper": deep});
        }
        assert!(to_json(to_struct(deep)).is_err());
    }
}
