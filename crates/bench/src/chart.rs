//! One small drawing of a run: throughput and latencies, a bar for each format.

use crate::{FormatResult, Percentiles};
use oscar_figures::{Bar, Figure, bars, number};

const TOP: f64 = 34.0;
const HEADING: f64 = 26.0;

/// The drawing as an SVG file.
pub fn draw(results: &[FormatResult], headline: &str) -> String {
    let bar = |label: String, class, value| Bar { label, class, value, text: number(value) };
    let throughput = results.iter().map(|r| bar(r.kv.to_string(), "ours", r.outcome.tokens_per_s()));
    let latency = |of: fn(&FormatResult) -> Option<Percentiles>| -> Vec<Bar> {
        let measured = results.iter().filter_map(|r| Some((r.kv, of(r)?)));
        let bars = measured.flat_map(|(kv, p)| {
            [("p50", p.p50, "base"), ("p99", p.p99, "base light")]
                .map(|(name, value, class)| bar(format!("{kv} {name}"), class, value))
        });
        bars.collect()
    };
    let panels: [(&str, Vec<Bar>); 3] = [
        ("output tokens/s", throughput.collect()),
        ("time to first token, ms", latency(|r| r.outcome.ttft_ms)),
        ("time per further token, ms", latency(|r| r.outcome.tpot_ms)),
    ];
    let panels = panels.map(|(title, list)| (title, bars(title, &list)));
    let width = panels.iter().map(|(_, figure)| figure.size().0).fold(0.0, f64::max);
    let height: f64 = panels.iter().map(|(_, figure)| figure.size().1 + HEADING).sum();
    let mut drawing = Figure::new(width, TOP + height, headline);
    drawing.text("tick", (8.0, 18.0), headline);
    let mut y = TOP;
    for (title, figure) in &panels {
        drawing.text("head", (8.0, y + 16.0), title);
        drawing.add(figure, (0.0, y + HEADING));
        y += figure.size().1 + HEADING;
    }
    drawing.file()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outcome;
    use oscar_codec::KvFormat;

    #[test]
    fn every_format_has_its_bars_and_text_is_escaped() {
        let outcome = || Outcome {
            seconds: 1.0,
            ttft_ms: Some(Percentiles { p50: 1.0, p90: 2.0, p99: 4.0 }),
            ..Outcome::default()
        };
        let results = [
            FormatResult {
                kv: KvFormat::Bf16,
                device: "cpu",
                outcome: outcome(),
                over_http: None,
                constrained: None,
            },
            FormatResult {
                kv: KvFormat::Oscar { bits: 2 },
                device: "cpu",
                outcome: outcome(),
                over_http: None,
                constrained: None,
            },
        ];
        let svg = draw(&results, "a < b & c");
        assert!(svg.contains("a &lt; b &amp; c"));
        // The background, two of throughput, four of first tokens; no answer had a second token.
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 4);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert_eq!((svg.matches("<svg").count(), svg.matches("</svg>").count()), (1, 1));
    }
}
