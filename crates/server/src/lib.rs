//! The only crate that speaks HTTP: the OpenAI API, operations and the web page, over an engine it
//! knows by trait alone.
//!
//! A request travels `middleware -> routes/<endpoint>/prepare -> generate -> EngineApi`. `prepare`
//! parses the body into the fields declared in `types`, refuses what `validate` refuses, and makes
//! requests for the engine. The answer comes back as events that [`generate`] turns into text and
//! the endpoint into JSON or server-sent events.
//!
//! **Invariant:** no tensor, page or kernel is known here; everything the engine is asked goes
//! through [`oscar_engine::EngineApi`], so the whole crate is tested with an engine that has no
//! model. Nothing a client sends can panic the server or make it answer 5xx.

mod app;
mod body;
mod config;
mod connections;
mod constraint;
mod error;
mod frontend;
mod generate;
mod ids;
mod in_process;
mod json;
mod keys;
mod limits;
mod logging;
mod metrics;
mod middleware;
mod origin;
#[cfg(feature = "otel")]
mod otel;
mod panics;
mod refused;
mod routes;
mod schema;
mod serve;
mod starting;
#[cfg(feature = "tls")]
mod tls;
mod tools;

pub use app::router;
pub use config::{
    DeskAddress, ExposedError, GenerationDefaults, KvEvents, LogFormat, Reasoning, ServerConfig,
    ToolCallParser, TransferConfig,
};
pub use error::ApiError;
pub use frontend::Frontend;
pub use generate::{Finish, Generation, Output, Totals};
pub use in_process::{InProcess, InProcessAnswer};
pub use keys::{ApiKey, KeyError, Keys, Quota, Role};
#[cfg(feature = "otel")]
pub use logging::init_logging_and_traces;
pub use logging::{LogGuard, LoggingError, check_log_filter, init_logging};
#[cfg(feature = "otel")]
pub use otel::{TraceError, TraceOptions};
pub use serve::{serve, serve_frontend, serve_on};
pub use starting::{StartProgress, Starting};
#[cfg(feature = "tls")]
pub use tls::{Tls, TlsError};
pub use tools::with_tools_in_text;
