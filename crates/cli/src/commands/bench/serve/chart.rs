//! One small drawing of a run: throughput and latencies, a bar for each format.

use super::FormatResult;
use std::fmt::Write;

const PANEL_WIDTH: f64 = 250.0;
const PANEL_HEIGHT: f64 = 150.0;
const MARGIN: f64 = 24.0;
const TOP: f64 = 64.0;

/// A bar: what stands under it, how high, how dark.
struct Bar {
    label: String,
    value: f64,
    colour: &'static str,
}

/// The drawing as an SVG document.
pub fn draw(results: &[FormatResult], headline: &str) -> String {
    let throughput = results.iter().map(|r| Bar {
        label: r.kv.to_string(),
        value: r.outcome.tokens_per_s(),
        colour: "#2a7f62",
    });
    let latency = |of: fn(&FormatResult) -> Option<&super::Percentiles>| -> Vec<Bar> {
        let bars = |r: &FormatResult| {
            of(r).map(|p| {
                [("p50", p.p50, "#3f6fb5"), ("p99", p.p99, "#9db8de")].map(|(name, value, colour)| Bar {
                    label: format!("{} {name}", r.kv),
                    value,
                    colour,
                })
            })
        };
        results.iter().filter_map(bars).flatten().collect()
    };
    let panels = [
        ("output tokens/s", throughput.collect()),
        ("time to first token, ms", latency(|r| r.outcome.ttft_ms.as_ref())),
        ("time per further token, ms", latency(|r| r.outcome.tpot_ms.as_ref())),
    ];
    let width = panels.len() as f64 * (PANEL_WIDTH + MARGIN) + MARGIN;
    let height = TOP + PANEL_HEIGHT + 48.0;
    let mut body = String::new();
    for (i, (title, bars)) in panels.iter().enumerate() {
        draw_panel(&mut body, MARGIN + i as f64 * (PANEL_WIDTH + MARGIN), title, bars);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"11\" fill=\"#222\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"{MARGIN}\" y=\"24\" font-size=\"12\">{}</text>\n{body}</svg>\n",
        escape(headline)
    )
}

fn draw_panel(body: &mut String, left: f64, title: &str, bars: &[Bar]) {
    let base = TOP + PANEL_HEIGHT;
    let highest = bars.iter().map(|b| b.value).fold(f64::MIN_POSITIVE, f64::max);
    let slot = PANEL_WIDTH / bars.len().max(1) as f64;
    let bar_width = (slot * 0.7).min(56.0);
    // Writing to a string cannot fail.
    let _ = writeln!(
        body,
        "<text x=\"{left}\" y=\"{:.1}\" font-weight=\"600\">{}</text>",
        TOP - 14.0,
        escape(title)
    );
    for (i, bar) in bars.iter().enumerate() {
        let middle = left + (i as f64 + 0.5) * slot;
        let tall = bar.value / highest * (PANEL_HEIGHT - 16.0);
        let (x, y, number) = (middle - bar_width / 2.0, base - tall, short(bar.value));
        let _ = writeln!(
            body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{bar_width:.1}\" height=\"{tall:.1}\" fill=\"{}\"/>\
             <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{number}</text>",
            bar.colour,
            y - 3.0
        );
        for (line, word) in bar.label.split(' ').enumerate() {
            let _ = writeln!(
                body,
                "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"10\">{}</text>",
                base + 14.0 + 12.0 * line as f64,
                escape(word)
            );
        }
    }
    let _ = writeln!(
        body,
        "<line x1=\"{left}\" y1=\"{base}\" x2=\"{}\" y2=\"{base}\" stroke=\"#888\"/>",
        left + PANEL_WIDTH
    );
}

/// Three digits are enough on a bar.
fn short(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::load::{Outcome, Percentiles};
    use super::*;
    use oscar_codec::KvFormat;

    #[test]
    fn every_format_has_its_bars_and_text_is_escaped() {
        let outcome = || Outcome {
            seconds: 1.0,
            ttft_ms: Some(Percentiles { p50: 1.0, p90: 2.0, p99: 4.0 }),
            ..Outcome::default()
        };
        let results = [
            FormatResult { kv: KvFormat::Bf16, outcome: outcome(), over_http: None },
            FormatResult { kv: KvFormat::Oscar { bits: 2 }, outcome: outcome(), over_http: None },
        ];
        let svg = draw(&results, "a < b & c");
        assert!(svg.contains("a &lt; b &amp; c"));
        // The background, two of throughput, four of first tokens; no answer had a second token.
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 4);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!((svg.matches("<svg").count(), svg.matches("</svg>").count()), (1, 1));
    }
}
