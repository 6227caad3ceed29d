//! The server as its clients see it, over an engine that recites a script.

mod bounds;
mod broken_calls;
mod browsers;
mod chat;
mod client;
mod completions;
mod connections;
mod embeddings;
mod fake;
mod fields;
mod fuzz;
mod harmony;
mod logs;
mod messages;
mod metrics;
mod operations;
mod prometheus;
mod readiness;
mod refusals;
mod render;
mod responses;
mod routes;
mod sockets;
mod tenants;
#[cfg(feature = "tls")]
mod tls;
mod tools;
