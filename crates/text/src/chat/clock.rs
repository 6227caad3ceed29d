//! `strftime_now`: the date a template writes into its system prompt.
//!
//! Invariant: the formats follow C `strftime` in the C locale, as Python's
//! `datetime.now().strftime` does for a date without a time zone. The time is UTC, so that a
//! server's prompts do not depend on where it stands.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A moment in the proleptic Gregorian calendar.
struct Civil {
    year: i64,
    /// 1 to 12.
    month: i64,
    /// 1 to 31.
    day: i64,
    hour: i64,
    minute: i64,
    second: i64,
    micros: u32,
    /// 0 is Sunday.
    weekday: i64,
    /// 1 to 366.
    day_of_year: i64,
}

impl Civil {
    fn new(now: SystemTime) -> Self {
        let (seconds, micros) = match now.duration_since(UNIX_EPOCH) {
            Ok(since) => (since.as_secs() as i64, since.subsec_micros()),
            // Before 1970; whole seconds are enough there.
            Err(before) => (-(before.duration().as_secs() as i64), 0),
        };
        let days = seconds.div_euclid(86_400);
        let clock = seconds.rem_euclid(86_400);
        let (year, month, day) = civil_from_days(days);
        Self {
            year,
            month,
            day,
            hour: clock / 3600,
            minute: clock / 60 % 60,
            second: clock % 60,
            micros,
            // 1 January 1970 was a Thursday.
            weekday: (days + 4).rem_euclid(7),
            day_of_year: days - days_from_civil(year, 1, 1) + 1,
        }
    }
}

/// Days since 1970-01-01, counted in eras of 400 years that begin on 1 March, so that the leap day
/// comes last.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let month_from_march = (month + 9) % 12;
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// Year, month and day of a day count; the inverse of [`days_from_civil`].
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

/// Formats a moment; a code it does not know is an error rather than a silent gap in a prompt.
pub(super) fn strftime(format: &str, now: SystemTime) -> Result<String, Error> {
    let civil = Civil::new(now);
    let mut out = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        // glibc: `%-d` leaves out the padding.
        let padded = code != Some('-');
        if !padded {
            code = chars.next();
        }
        let written = match code {
            Some(code) => write_code(&mut out, code, padded, &civil),
            None => None,
        };
        if written.is_none() {
            let code = code.map_or(String::new(), String::from);
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("strftime_now: the format `{format}` has the unknown code `%{code}`"),
            ));
        }
    }
    Ok(out)
}

/// Writes one format code; none if the code is unknown.
fn write_code(out: &mut String, code: char, padded: bool, at: &Civil) -> Option<()> {
    let twelve_hour = (at.hour + 11) % 12 + 1;
    let mut number = |value: i64, width: usize, fill: char| {
        let width = if padded { width } else { 0 };
        match fill {
            '0' => write!(out, "{value:0width$}").ok(),
            _ => write!(out, "{value:width$}").ok(),
        }
    };
    match code {
        'Y' => return number(at.year, 1, '0'),
        'C' => return number(at.year.div_euclid(100), 2, '0'),
        'y' => return number(at.year.rem_euclid(100), 2, '0'),
        'm' => return number(at.month, 2, '0'),
        'd' => return number(at.day, 2, '0'),
        'e' => return number(at.day, 2, ' '),
        'H' => return number(at.hour, 2, '0'),
        'k' => return number(at.hour, 2, ' '),
        'I' => return number(twelve_hour, 2, '0'),
        'l' => return number(twelve_hour, 2, ' '),
        'M' => return number(at.minute, 2, '0'),
        'S' => return number(at.second, 2, '0'),
        'f' => return number(i64::from(at.micros), 6, '0'),
        'j' => return number(at.day_of_year, 3, '0'),
        'w' => return number(at.weekday, 1, '0'),
        'u' => return number((at.weekday + 6) % 7 + 1, 1, '0'),
        'U' => return number((at.day_of_year + 6 - at.weekday) / 7, 2, '0'),
        'W' => return number((at.day_of_year + 6 - (at.weekday + 6) % 7) / 7, 2, '0'),
        'A' => out.push_str(DAYS[at.weekday as usize]),
        'a' => out.push_str(&DAYS[at.weekday as usize][..3]),
        'B' => out.push_str(MONTHS[at.month as usize - 1]),
        'b' | 'h' => out.push_str(&MONTHS[at.month as usize - 1][..3]),
        'p' => out.push_str(if at.hour < 12 { "AM" } else { "PM" }),
        // A date without a time zone has neither name nor offset.
        'Z' | 'z' => {}
        'n' => out.push('\n'),
        't' => out.push('\t'),
        '%' => out.push('%'),
        _ => {
            let parts = match code {
                'F' => "Y-m-d",
                'T' | 'X' => "H:M:S",
                'R' => "H:M",
                'D' | 'x' => "m/d/y",
                'c' => "a b e H:M:S Y",
                'r' => "I:M:S p",
                _ => return None,
            };
            for part in parts.chars() {
                match part.is_ascii_alphabetic() {
                    true => write_code(out, part, true, at)?,
                    false => out.push(part),
                }
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn the_calendar_inverts_itself() {
        for days in (-800_000..800_000).step_by(37).chain(-3..3) {
            let (year, month, day) = civil_from_days(days);
            assert_eq!(days_from_civil(year, month, day), days);
        }
        assert_eq!(civil_from_days(0), (1970, 1, 1));
        assert_eq!(civil_from_days(19_782), (2024, 2, 29));
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
