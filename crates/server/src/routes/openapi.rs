//! `GET /openapi.json`, made from the table of routes and the declarations that parse the bodies.

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use super::{Access, ROUTES, Route};
use crate::app::Shared;
use crate::refused;
use crate::schema::Field;

pub async fn document(State(app): State<Shared>) -> Json<Value> {
    let mut paths = Map::new();
    for route in ROUTES {
        // OpenAPI has no word for a parameter that spans several segments.
        let entry = paths.entry(route.path.replace("{*", "{")).or_insert_with(|| json!({}));
        entry[route.method] = operation(route);
    }
    Json(json!({
        "openapi": "3.1.0",
        "info": {
            "title": "OSCAR",
            "version": env!("CARGO_PKG_VERSION"),
            "description": format!(
                "The OpenAI API of {}, whose key-value cache is {}.", app.engine.info().model,
                app.engine.info().kv_format
            ),
        },
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": error_schema()},
        },
    }))
}

fn operation(route: &Route) -> Value {
    let refused = json!({
        "description": "Refused; the error says what is wrong and where",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    });
    let mut operation = json!({
        "summary": route.about,
        "responses": {"200": {"description": "Done"}, "4XX": refused},
    });
    if route.path.ends_with("id}") {
        let schema = json!({"type": "string"});
        operation["parameters"] = json!([{"name": "id", "in": "path", "required": true, "schema": schema}]);
    }
    if route.access == Access::Anyone {
        operation["security"] = json!([]);
    }
    if !route.fields.is_empty() {
        operation["requestBody"] = json!({
            "required": true,
            "content": {"application/json": {"schema": body_schema(route.fields)}},
        });
    }
    operation
}

/// The fields that are read, those that are refused unless they change nothing (`x-refused`), and
/// those that are accepted and not read (`x-ignored`). Any other field is accepted, not read, and
/// counted.
fn body_schema(tables: &[&[Field]]) -> Value {
    let mut properties = Map::new();
    let fields: Vec<&Field> = tables.iter().copied().flatten().collect();
    for field in &fields {
        let mut schema = field.kind.json_schema();
        schema["description"] = json!(field.about);
        if field.is_ignored() {
            schema["x-ignored"] = json!(true);
        }
        // As in the reader of bodies, the first declaration of a name is the one that counts.
        properties.entry(field.name).or_insert(schema);
    }
    properties.extend(refused::described(tables));
    let required: Vec<&str> = fields.iter().filter(|field| field.required).map(|field| field.name).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": true})
}

fn error_schema() -> Value {
    let nullable = json!({"type": ["string", "null"]});
    json!({"type": "object", "properties": {"error": {"type": "object", "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": nullable, "code": nullable}}}})
}
