//! `strftime_now`: the date a template writes into its system prompt.
//!
//! Invariant: the formats follow C `strftime` in the C locale, as Python's
//! `datetime.now().strftime` does for a date without a time zone. The time is UTC, so that a
//! server's prompts do not depend on where it stands.

use std::fmt::Write;
use std::time::SystemTime;

use chrono::{DateTime, Utc};
use minijinja::{Error, ErrorKind};

/// Formats a moment; a code it does not know is an error rather than a silent gap in a prompt.
pub(super) fn strftime(format: &str, now: SystemTime) -> Result<String, Error> {
    let moment = DateTime::<Utc>::from(now).naive_utc();
    let mut out = String::with_capacity(format.len() + 16);
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        // glibc: `%-d` leaves out the padding.
        let flag = usize::from(rest[at + 1..].starts_with('-'));
        let code = rest[at + 1 + flag..].chars().next();
        let end = at + 1 + flag + code.map_or(0, char::len_utf8);
        let written = match code {
            // A date without a time zone has neither name nor offset.
            Some('Z' | 'z') => Ok(()),
            // Python counts microseconds, chrono nanoseconds.
            Some('f') => write!(out, "{}", moment.format("%6f")),
            _ => write!(out, "{}", moment.format(&rest[at..end])),
        };
        written.map_err(|_| {
            let code = code.map_or(String::new(), String::from);
            let message = format!("strftime_now: the format `{format}` has the unknown code `%{code}`");
            Error::new(ErrorKind::InvalidOperation, message)
        })?;
        rest = &rest[end..];
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// Expected texts come from Python's `datetime.utcfromtimestamp(...).strftime(...)`.
    #[test]
    fn formats_agree_with_python() {
        let all = "%Y-%m-%d %H:%M:%S|%d %b %Y|%A, %B %e, %y|%a %I:%M %p|%j %U %W %w %u|%-d.%-m.|%F %T %D %R|%c|%%|%Z%z|%f";
        assert_eq!(
            strftime(all, at(1_709_168_709)).unwrap(),
            "2024-02-29 01:05:09|29 Feb 2024|Thursday, February 29, 24|Thu 01:05 AM|060 08 09 4 4|29.2.|2024-02-29 01:05:09 02/29/24 01:05|Thu Feb 29 01:05:09 2024|%||000000"
        );
        assert_eq!(
            strftime(all, at(1_767_484_799)).unwrap(),
            "2026-01-03 23:59:59|03 Jan 2026|Saturday, January  3, 26|Sat 11:59 PM|003 00 00 6 6|3.1.|2026-01-03 23:59:59 01/03/26 23:59|Sat Jan  3 23:59:59 2026|%||000000"
        );
    }

    #[test]
    fn an_unknown_code_is_named() {
        for (format, code) in [("%Y %Q", "%Q"), ("100%", "%"), ("%-", "%")] {
            let message = strftime(format, at(0)).unwrap_err().to_string();
            assert!(message.contains(&format!("`{code}`")), "{message}");
        }
    }
}
