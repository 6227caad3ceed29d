//! Log lines on standard error, as text or JSON. A log that cannot be written never stops the
//! server.

mod writer;

use std::io::{self, IsTerminal};
use std::time::Duration;

use tracing_subscriber::EnvFilter;

use self::writer::LogWriter;
use crate::LogFormat;

pub use writer::dropped;

#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    #[error("the log filter `{filter}` is not understood: {reason}; write it like `info,oscar_server=debug`")]
    Filter { filter: String, reason: String },
    #[error("logging was already set up")]
    AlreadySet,
    #[error("the thread that writes the log could not start: {0}")]
    Thread(#[from] io::Error),
}

/// On drop, writes the lines that are still queued, within half a second, and sends spans.
#[derive(Debug)]
#[must_use = "the last lines are lost unless this lives as long as the server"]
pub struct LogGuard(LogWriter);

impl Drop for LogGuard {
    fn drop(&mut self) {
        #[cfg(feature = "otel")]
        crate::otel::flush(Duration::from_secs(2));
        self.0.flush(Duration::from_millis(500));
    }
}

/// Whether `filter` has the syntax of `RUST_LOG`, for example `info`.
pub fn check_log_filter(filter: &str) -> Result<(), LoggingError> {
    parse_filter(filter).map(drop)
}

fn parse_filter(filter: &str) -> Result<EnvFilter, LoggingError> {
    EnvFilter::try_new(filter)
        .map_err(|error| LoggingError::Filter { filter: filter.to_owned(), reason: error.to_string() })
}

/// Sets up logging, and sends the spans of requests and steps to a collector.
#[cfg(feature = "otel")]
pub fn init_logging_and_traces(
    format: LogFormat,
    filter: &str,
    traces: &crate::TraceOptions,
) -> Result<LogGuard, LoggingError> {
    use tracing_subscriber::Layer;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;

    let filter = parse_filter(filter)?;
    let writer = LogWriter::start(io::stderr())?;
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(in_colour())
        .log_internal_errors(false)
        .with_writer(writer.clone());
    let lines = match format {
        LogFormat::Text => lines.with_target(false).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    };
    let outcome = tracing_subscriber::registry().with(lines).with(crate::otel::start(traces)?).try_init();
    crate::panics::watch();
    outcome.map(|()| LogGuard(writer)).map_err(|_| LoggingError::AlreadySet)
}

fn in_colour() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Sets up logging for the process, in colour on a terminal alone. Panics are counted from now on.
pub fn init_logging(format: LogFormat, filter: &str) -> Result<LogGuard, LoggingError> {
    let filter = parse_filter(filter)?;
    let writer = LogWriter::start(io::stderr())?;
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(in_colour())
        // Reporting a failed log line on standard error would panic where that is closed.
        .log_internal_errors(false)
        .with_writer(writer.clone());
    let outcome = match format {
        LogFormat::Text => subscriber.with_target(false).try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
    crate::panics::watch();
    outcome.map(|()| LogGuard(writer)).map_err(|_| LoggingError::AlreadySet)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_filter_is_quoted() {
        let error = init_logging(LogFormat::Text, "oscar=loud").unwrap_err();
        assert!(error.to_string().contains("oscar=loud"), "{error}");
    }
}
