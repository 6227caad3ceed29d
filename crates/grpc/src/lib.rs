//! vLLM's gRPC services `vllm.Inference` and `vllm.Control`, with the standard health service. NVIDIA
//! Dynamo's sidecar speaks them to register an engine as a worker.
//!
//! Tokens come in, tokens and their text go out. A request becomes a completion of the HTTP server
//! ([`oscar_server::Frontend`]), so limits, defaults, metrics and draining are the same; `lower` has the
//! way in, `answer` the way out.
//!
//! **Invariant:** knows protobuf as `oscar_server` knows HTTP, and nothing of engines beyond the front
//! end. A field that changes an answer and cannot be followed is refused by its name. The protocol has
//! neither keys nor encryption: the caller decides who can connect.

mod answer;
mod control;
mod inference;
mod lower;
mod serve;
mod transfer;

pub use serve::{GrpcConfig, KvEventSource, serve};
