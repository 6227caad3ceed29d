//! Log lines on standard error, as text or JSON.

use tracing_subscriber::EnvFilter;

use crate::LogFormat;

#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    #[error("the log filter `{filter}` is not understood: {reason}; write it like `info,oscar_server=debug`")]
    Filter { filter: String, reason: String },
    #[error("logging was already set up")]
    AlreadySet,
}

/// Sets up logging for the process. `filter` is in the syntax of `RUST_LOG`, for example `info`.
pub fn init_logging(format: LogFormat, filter: &str) -> Result<(), LoggingError> {
    let parsed = EnvFilter::try_new(filter)
        .map_err(|error| LoggingError::Filter { filter: filter.to_owned(), reason: error.to_string() })?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(parsed).with_writer(std::io::stderr);
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
