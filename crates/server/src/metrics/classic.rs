//! The classic Prometheus text format (`text/plain; version=0.0.4`), made from the OpenMetrics text.
//!
//! Both formats name the samples alike. They differ in the comments: OpenMetrics names a counter
//! without `_total` there and ends with `# EOF`. Go's parser of the classic format fails on any type
//! that it does not know, so the registry must hold counters, gauges and histograms only.

use std::fmt::Write;

/// The media type of [`text`].
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The media type of the OpenMetrics text.
pub const OPENMETRICS_MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The same metrics in the classic format.
pub fn text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len() + 1024);
    let mut lines = open_metrics.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(help) = line.strip_prefix("# HELP ") else {
            if line != "# EOF" && !line.starts_with("# UNIT ") {
                text.push_str(line);
                text.push('\n');
            }
            continue;
        };
        // The encoder writes the type right after the help.
        let kind = lines.next_if(|next| next.starts_with("# TYPE ")).unwrap_or_default();
        let kind = kind.rsplit(' ').next().unwrap_or_default();
        let (name, help) = help.split_once(' ').unwrap_or((help, ""));
        let suffix = if kind == "counter" { "_total" } else { "" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}");
    }
    text
}

/// Whether the value of an `Accept` header prefers OpenMetrics over the classic text. Without a word
/// about OpenMetrics the classic text is sent: most readers know only that.
pub fn wants_openmetrics(accept: &str) -> bool {
    let quality = |wanted: &str| {
        let ranges = accept.split(',').map(|range| {
            let mut parts = range.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default();
            let quality = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok());
            (name, quality.unwrap_or(1.0))
        });
        ranges.filter(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, q)| q).reduce(f32::max)
    };
    let open = quality("application/openmetrics-text").unwrap_or(0.0);
    open > 0.0 && open >= quality("text/plain").unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_get_their_suffix_and_the_end_mark_goes() {
        let open = "# HELP a_b Some words.\n# TYPE a_b counter\na_b_total{x=\"# EOF\"} 3\n\
                    # HELP c A gauge.\n# TYPE c gauge\nc 1.5\n# EOF\n";
        let classic = "# HELP a_b_total Some words.\n# TYPE a_b_total counter\na_b_total{x=\"# EOF\"} 3\n\
                       # HELP c A gauge.\n# TYPE c gauge\nc 1.5\n";
        assert_eq!(text(open), classic);
    }

    #[test]
    fn openmetrics_is_sent_only_if_it_is_preferred() {
        for accept in [
            "application/openmetrics-text",
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
             text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        ] {
            assert!(wants_openmetrics(accept), "{accept}");
        }
        for accept in [
            "",
            "*/*",
            "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "text/plain;version=0.0.4,application/openmetrics-text;q=0.5",
            "application/openmetrics-text;q=0",
        ] {
            assert!(!wants_openmetrics(accept), "{accept}");
        }
    }
}
