//! The page.

use super::svg::{HeatMap, LineChart, Series, escape, number};
use super::{CalibrationReport, HeadReport, widths};
use crate::clip_fit::ClipCurve;
use crate::quality::Snr;
use std::fmt::Write;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#626b76;--line:#d9dee4;--paper:#fff;--card:#f6f8fa;--a:#9aa4af;--b:#d9822b;--c:#2f6feb}\
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#98a2ad;--line:#333a42;--paper:#14171a;--card:#1d2126;--a:#77818c;--b:#e39a4d;--c:#6ea0ff}}\
body{margin:0 auto;max-width:1080px;padding:16px;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}\
h1{font-size:1.4rem;margin:.2em 0}h2{font-size:1.1rem;margin:2em 0 .3em}p{color:var(--soft);margin:.3em 0 1em}\
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:1em 0}\
.tile{background:var(--card);border-radius:8px;padding:10px 12px}.tile b{display:block;font-size:1.35rem}.tile span{color:var(--soft);font-size:.85rem}\
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(260px,1fr));gap:8px}.wide{overflow-x:auto}\
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:10px}.end{text-anchor:end}.mid{text-anchor:middle}\
.grid{stroke:var(--line)}polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}.s0{stroke:var(--a)}.s1{stroke:var(--b)}.s2{stroke:var(--c);stroke-width:2}\
.thin{stroke:var(--c);stroke-width:.8;stroke-opacity:.35}.thinv{stroke:var(--b);stroke-width:.8;stroke-opacity:.45}\
.cell{fill:var(--c)}svg text.value{font-size:9px;fill:var(--ink)}svg text.on{fill:#fff}\
.key i{display:inline-block;width:1.2em;height:3px;margin:0 .4em .25em 1em}\
table{border-collapse:collapse;font-size:.85rem}td,th{padding:3px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
th{color:var(--soft);font-weight:600}.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}";

const LEGEND: &str = "<p class=\"key\"><i style=\"background:var(--a)\"></i>no rotation\
<i style=\"background:var(--b)\"></i>Hadamard<i style=\"background:var(--c)\"></i>calibrated</p>";

/// Points of a spectrum that are drawn.
const SPECTRUM_POINTS: usize = 48;

pub(super) fn page(report: &CalibrationReport) -> String {
    let mut out = String::with_capacity(1 << 18);
    out.push_str("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    out.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">");
    out.push_str("<title>OSCAR calibration</title><style>");
    out.push_str(STYLE);
    out.push_str("</style></head><body>\n<h1>OSCAR calibration</h1>\n");
    summary(report, &mut out);
    snr_section(report, "Logit SNR", |h| h.quality.logits, LOGITS, &mut out);
    snr_section(report, "Value SNR", |h| h.quality.values, VALUES, &mut out);
    if let Some(plan) = &report.widths {
        widths::widths(plan, report.head_dim, &mut out);
    }
    participation(report, &mut out);
    spectra(report, &mut out);
    clip_curves(report, &mut out);
    table(report, &mut out);
    out.push_str("</body></html>\n");
    out
}

const LOGITS: &str = "Signal over error of the attention scores, in decibels, by layer and head: each key's error is \
weighted by the queries that will meet it. More is better; 3 dB halve the error.";
const VALUES: &str = "Signal over error of the values, each row weighted by the energy of its key's scores.";

/// A title and what it shows of a head.
type Figure<'a, T> = (&'static str, fn(&'a HeadReport) -> T);

pub(super) fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(text);
}

pub(super) fn section(out: &mut String, title: &str, text: &str) {
    put(out, format_args!("<h2>{title}</h2>\n<p>{text}</p>\n"));
}

fn summary(report: &CalibrationReport, out: &mut String) {
    let m = &report.metadata;
    let (logits, values) = (report.mean_snr(|h| h.quality.logits), report.mean_snr(|h| h.quality.values));
    let gain = |snr: Snr| format!("{:+.1} dB", snr.calibrated - snr.hadamard);
    let tiles = [
        (format!("{:.1} dB", logits.calibrated), format!("logit SNR at {} bits", report.bits.0)),
        (gain(logits), "logits against Hadamard".to_owned()),
        (gain(values), "values against Hadamard".to_owned()),
        (m.tokens.to_string(), "tokens of calibration".to_owned()),
    ];
    out.push_str("<div class=\"tiles\">");
    for (value, label) in tiles {
        put(out, format_args!("<div class=\"tile\"><b>{value}</b><span>{label}</span></div>"));
    }
    out.push_str("</div>\n<details><summary>How it was made</summary><table class=\"facts\">");
    let yes = |flag| if flag { "yes" } else { "no" }.to_owned();
    let unknown = || "not known".to_owned();
    let facts = [
        ("model", m.model_fingerprint.clone().unwrap_or_else(unknown)),
        ("shape", format!("{} layers, {} KV heads of {}", report.layers, report.kv_heads, report.head_dim)),
        ("rotation", format!("one a {}, {}", m.granularity, m.composition)),
        ("value statistic", m.statistic.clone()),
        ("keys centred", yes(m.centred)),
        ("clip ratios", m.clip.clone()),
        ("text", format!("{} sequences of up to {} tokens", m.sequences, m.sequence_len)),
        ("text digest", m.text_digest.clone().unwrap_or_else(unknown)),
        ("measured on", format!("{} rows of each head", report.sample_rows)),
        ("made by", m.tool.clone()),
        ("note", m.note.clone()),
    ];
    for (name, value) in facts {
        put(out, format_args!("<tr><td>{name}</td><td>{}</td></tr>", escape(&value)));
    }
    out.push_str("</table></details>\n");
}

fn snr_section(
    report: &CalibrationReport,
    title: &str,
    of: impl Fn(&HeadReport) -> Snr,
    text: &str,
    out: &mut String,
) {
    section(out, title, text);
    out.push_str(LEGEND);
    let line = |class, part: fn(Snr) -> f64| Series {
        class,
        points: report
            .heads
            .iter()
            .map(|h| (h.layer as f64 + h.head as f64 / report.kv_heads.max(1) as f64, part(of(h))))
            .collect(),
    };
    let series = vec![line("s0", |s| s.naive), line("s1", |s| s.hadamard), line("s2", |s| s.calibrated)];
    let chart = LineChart {
        title,
        x_label: "layer (heads side by side)",
        y_label: "dB",
        logarithmic: false,
        width: 960.0,
        height: 260.0,
        series,
    };
    put(out, format_args!("{}\n", chart.render()));
}

fn participation(report: &CalibrationReport, out: &mut String) {
    section(
        out,
        "Participation ratio",
        "Directions that share the energy: of the queries that keys must serve, and of what attention reads from values. \
         Few directions mean that a rotation has much to gain. Rows are layers, columns KV heads.",
    );
    out.push_str("<div class=\"grid2\">");
    let sides: [Figure<'_, f64>; 2] =
        [("keys (query statistic)", |h| h.key_participation), ("values", |h| h.value_participation)];
    for (title, of) in sides {
        let map = HeatMap {
            title,
            row_label: title,
            columns: report.kv_heads,
            values: report.heads.iter().map(of).collect(),
            highest: report.head_dim as f64,
        };
        put(out, format_args!("<div class=\"wide\">{}</div>", map.render()));
    }
    out.push_str("</div>\n");
}

fn spectra(report: &CalibrationReport, out: &mut String) {
    section(
        out,
        "Spectra",
        "Eigenvalues by layer, largest first, relative to the largest, one line a head: blue is the query statistic, \
         orange the value statistic. Logarithmic.",
    );
    out.push_str("<div class=\"grid2\">");
    for layer in 0..report.layers {
        let mut series = Vec::new();
        for head in report.heads.iter().filter(|h| h.layer == layer) {
            series.push(Series { class: "thinv", points: spectrum_points(&head.value_eigenvalues) });
            series.push(Series { class: "thin", points: spectrum_points(&head.key_eigenvalues) });
        }
        let title = format!("layer {layer}");
        let chart = LineChart {
            title: &title,
            x_label: "rank",
            y_label: &title,
            logarithmic: true,
            width: 300.0,
            height: 170.0,
            series,
        };
        put(out, format_args!("<div>{}</div>", chart.render()));
    }
    out.push_str("</div>\n");
}

/// Descending, relative to the largest, evenly thinned.
fn spectrum_points(ascending: &[f64]) -> Vec<(f64, f64)> {
    let largest = ascending.last().copied().unwrap_or(0.0);
    let count = ascending.len();
    let shown = count.min(SPECTRUM_POINTS);
    (0..shown)
        .map(|i| i * (count - 1) / (shown - 1).max(1))
        .map(|rank| (rank as f64 + 1.0, ascending[count - 1 - rank] / largest))
        // Below single precision there is only rounding.
        .filter(|&(_, y)| y > 1e-8)
        .collect()
}

fn clip_curves(report: &CalibrationReport, out: &mut String) {
    section(
        out,
        "Clip curves",
        "Error left at each clip ratio as a share of the signal, thin lines for heads, the thick one their mean. \
         A ratio of 1 stands for no clipping.",
    );
    out.push_str("<div class=\"grid2\">");
    let sides: [Figure<'_, &ClipCurve>; 2] =
        [("keys: logit error", |h| &h.key_clip_curve), ("values: weighted error", |h| &h.value_clip_curve)];
    for (title, of) in sides {
        let curve = |points: &ClipCurve| -> Vec<(f64, f64)> {
            points.points.iter().map(|p| (if p.ratio == 0.0 { 1.0 } else { p.ratio }, p.error)).collect()
        };
        let mut series: Vec<Series> =
            report.heads.iter().map(|h| Series { class: "thin", points: curve(of(h)) }).collect();
        if let Some(first) = series.first() {
            let heads = series.len() as f64;
            let mean = (0..first.points.len())
                .map(|i| (first.points[i].0, series.iter().map(|s| s.points[i].1).sum::<f64>() / heads))
                .collect();
            series.push(Series { class: "s1", points: mean });
        }
        let chart = LineChart {
            title,
            x_label: "clip ratio",
            y_label: title,
            logarithmic: true,
            width: 460.0,
            height: 240.0,
            series,
        };
        put(out, format_args!("<div>{}</div>", chart.render()));
    }
    out.push_str("</div>\n");
}

fn table(report: &CalibrationReport, out: &mut String) {
    out.push_str("<h2>Every head</h2>\n<details><summary>Table</summary><div class=\"wide\"><table><tr>");
    for title in [
        "layer",
        "head",
        "logits none",
        "Hadamard",
        "calibrated",
        "values none",
        "Hadamard",
        "calibrated",
        "PR keys",
        "PR values",
        "mean key",
        "clip K",
        "clip V",
    ] {
        put(out, format_args!("<th>{title}</th>"));
    }
    out.push_str("</tr>");
    for h in &report.heads {
        let (l, v) = (h.quality.logits, h.quality.values);
        put(out, format_args!("<tr><td>{}</td><td>{}</td>", h.layer, h.head));
        for value in [l.naive, l.hadamard, l.calibrated, v.naive, v.hadamard, v.calibrated] {
            put(out, format_args!("<td>{value:.1}</td>"));
        }
        for value in [h.key_participation, h.value_participation] {
            put(out, format_args!("<td>{}</td>", number(value)));
        }
        put(out, format_args!("<td>{:.0}&nbsp;%</td>", 100.0 * h.mean_key_share));
        put(out, format_args!("<td>{}</td><td>{}</td></tr>", h.clips.0, h.clips.1));
    }
    out.push_str("</table></div></details>\n");
}
