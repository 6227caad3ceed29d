//! The page.

use super::{CalibrationReport, HeadReport, widths};
use crate::clip_fit::ClipCurve;
use crate::quality::Snr;
use oscar_figures::{HeatMap, LineChart, Page, Series, number};

/// Colours of the lines of a chart of SNRs.
const LEGEND: [(&str, &str); 3] = [("base", "no rotation"), ("theirs", "Hadamard"), ("ours", "calibrated")];

/// Points of a spectrum that are drawn.
const SPECTRUM_POINTS: usize = 48;

pub(super) fn page(report: &CalibrationReport) -> String {
    let mut page = Page::new("OSCAR calibration", "OSCAR calibration");
    summary(report, &mut page);
    snr_section(report, "Logit SNR", |h| h.quality.logits, LOGITS, &mut page);
    snr_section(report, "Value SNR", |h| h.quality.values, VALUES, &mut page);
    if let Some(plan) = &report.widths {
        widths::widths(plan, report.head_dim, &mut page);
    }
    participation(report, &mut page);
    spectra(report, &mut page);
    clip_curves(report, &mut page);
    table(report, &mut page);
    page.finish()
}

const LOGITS: &str = "Signal over error of the attention scores, in decibels, by layer and head: each key's error is \
weighted by the queries that will meet it. More is better; 3 dB halve the error.";
const VALUES: &str = "Signal over error of the values, each row weighted by the energy of its key's scores.";

/// A title and what it shows of a head.
type Part<'a, T> = (&'static str, fn(&'a HeadReport) -> T);

fn summary(report: &CalibrationReport, page: &mut Page) {
    let m = &report.metadata;
    let (logits, values) = (report.mean_snr(|h| h.quality.logits), report.mean_snr(|h| h.quality.values));
    let gain = |snr: Snr| format!("{:+.1} dB", snr.calibrated - snr.hadamard);
    let tiles = [
        (format!("{:.1} dB", logits.calibrated), format!("logit SNR at {} bits", report.bits.0)),
        (gain(logits), "logits against Hadamard".to_owned()),
        (gain(values), "values against Hadamard".to_owned()),
        (m.tokens.to_string(), "tokens of calibration".to_owned()),
    ];
    page.tiles(&tiles);
    page.push("<details><summary>How it was made</summary>");
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
    page.table(&["", " "], facts.map(|(name, value)| ("", vec![name.to_owned(), value])));
    page.push("</details>\n");
}

fn snr_section(
    report: &CalibrationReport,
    title: &str,
    of: impl Fn(&HeadReport) -> Snr,
    text: &str,
    page: &mut Page,
) {
    page.section(title, text);
    page.legend(&LEGEND);
    let line = |class, part: fn(Snr) -> f64| Series {
        class,
        points: report
            .heads
            .iter()
            .map(|h| (h.layer as f64 + h.head as f64 / report.kv_heads.max(1) as f64, part(of(h))))
            .collect(),
    };
    let series =
        vec![line("base", |s| s.naive), line("theirs", |s| s.hadamard), line("ours", |s| s.calibrated)];
    let chart = LineChart {
        title,
        x_label: "layer (heads side by side)",
        y_label: "dB",
        logarithmic: false,
        width: 960.0,
        height: 260.0,
        series,
    };
    page.put(format_args!("{}\n", chart.figure().inline()));
}

fn participation(report: &CalibrationReport, page: &mut Page) {
    page.section(
        "Participation ratio",
        "Directions that share the energy: of the queries that keys must serve, and of what attention reads from values. \
         Few directions mean that a rotation has much to gain. Rows are layers, columns KV heads.",
    );
    let sides: [Part<'_, f64>; 2] =
        [("keys (query statistic)", |h| h.key_participation), ("values", |h| h.value_participation)];
    let maps = sides.map(|(title, of)| {
        let values = report.heads.iter().map(of).collect();
        HeatMap::numbered(title, report.kv_heads, values, report.head_dim as f64).figure()
    });
    page.figures("small", maps);
}

fn spectra(report: &CalibrationReport, page: &mut Page) {
    page.section(
        "Spectra",
        "Eigenvalues by layer, largest first, relative to the largest, one line a head: blue is the query statistic, \
         orange the value statistic. Logarithmic.",
    );
    let charts = (0..report.layers).map(|layer| {
        let mut series = Vec::new();
        for head in report.heads.iter().filter(|h| h.layer == layer) {
            series.push(Series { class: "thin theirs", points: spectrum_points(&head.value_eigenvalues) });
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
        chart.figure()
    });
    page.figures("small", charts);
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

fn clip_curves(report: &CalibrationReport, page: &mut Page) {
    page.section(
        "Clip curves",
        "Error left at each clip ratio as a share of the signal, thin lines for heads, the thick one their mean. \
         A ratio of 1 stands for no clipping.",
    );
    let sides: [Part<'_, &ClipCurve>; 2] =
        [("keys: logit error", |h| &h.key_clip_curve), ("values: weighted error", |h| &h.value_clip_curve)];
    let charts = sides.map(|(title, of)| {
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
            series.push(Series { class: "theirs", points: mean });
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
        chart.figure()
    });
    page.figures("small", charts);
}

fn table(report: &CalibrationReport, page: &mut Page) {
    page.push("<h2>Every head</h2>\n<details><summary>Table</summary>");
    let header = [
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
    ];
    let rows = report.heads.iter().map(|h| {
        let (l, v) = (h.quality.logits, h.quality.values);
        let mut cells = vec![h.layer.to_string(), h.head.to_string()];
        let snrs = [l.naive, l.hadamard, l.calibrated, v.naive, v.hadamard, v.calibrated];
        cells.extend(snrs.map(|value| format!("{value:.1}")));
        cells.extend([h.key_participation, h.value_participation].map(number));
        cells.push(format!("{:.0}\u{a0}%", 100.0 * h.mean_key_share));
        cells.extend([h.clips.0, h.clips.1].map(|clip| clip.to_string()));
        ("", cells)
    });
    page.table(&header, rows);
    page.push("</details>\n");
}
