//! Log lines on standard error, as text or JSON.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::LogFormat;

#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    #[error("the log filter `{filter}` is not understood: {reason}; write it like `info,oscar_server=debug`")]
    Filter { filter: String, reason: String },
    #[error("logging was already set up")]
    AlreadySet,
}

/// Is `filter` in the syntax of `RUST_LOG`, for example `info`?
pub fn check_log_filter(filter: &str) -> Result<(), LoggingError> {
    parse_filter(filter).map(drop)
}

fn parse_filter(filter: &str) -> Result<EnvFilter, LoggingError> {
    EnvFilter::try_new(filter)
        .map_err(|error| LoggingError::Filter { filter: filter.to_owned(), reason: error.to_string() })
}

/// Sets up logging for the process, in colour on a terminal alone.
pub fn init_logging(format: LogFormat, filter: &str) -> Result<(), LoggingError> {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(parse_filter(filter)?)
        .with_ansi(
            std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
        )
        .with_writer(std::io::stderr);
    let outcome = match format {
        LogFormat::Text => subscriber.with_target(false).try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
    outcome.map_err(|_| LoggingError::AlreadySet)
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
