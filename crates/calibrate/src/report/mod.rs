//! What a calibration found, for people and for programs: one self-contained page and the same
//! facts as JSON.
//!
//! **Invariant:** both files appear whole or not at all. `report.html` loads nothing (see `oscar_figures`).

mod html;
mod widths;

use crate::bits::BitPlan;
use crate::clip_fit::ClipCurve;
use crate::quality::{HeadQuality, Snr};
use crate::rotation_file::Metadata;
use oscar_figures::write_whole;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Everything a calibration can say about its result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CalibrationReport {
    pub metadata: Metadata,
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Widths of key and value codes that SNRs and clip curves are for.
    pub bits: (u32, u32),
    /// Rows of each head that they were measured on.
    pub sample_rows: usize,
    /// In `[layer][kv_head]` order.
    pub heads: Vec<HeadReport>,
    /// Chosen widths and the harm they were chosen by.
    #[serde(skip)]
    pub widths: Option<BitPlan>,
}

/// One KV head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadReport {
    pub layer: usize,
    pub head: usize,
    /// Directions that share the energy of the query and value statistic, 1 to `head_dim`.
    pub key_participation: f64,
    pub value_participation: f64,
    /// Ascending.
    pub key_eigenvalues: Vec<f64>,
    pub value_eigenvalues: Vec<f64>,
    /// Share of the mean squared logit that the mean key makes, which centring takes off.
    pub mean_key_share: f64,
    #[serde(flatten)]
    pub quality: HeadQuality,
    /// Clip ratios in use, key and value.
    pub clips: (f64, f64),
    pub key_clip_curve: ClipCurve,
    pub value_clip_curve: ClipCurve,
}

impl CalibrationReport {
    /// Mean SNR over heads, in decibels.
    pub fn mean_snr(&self, of: impl Fn(&HeadReport) -> Snr) -> Snr {
        let count = self.heads.len().max(1) as f64;
        let mean = |part: fn(Snr) -> f64| self.heads.iter().map(|h| part(of(h))).sum::<f64>() / count;
        Snr { naive: mean(|s| s.naive), hadamard: mean(|s| s.hadamard), calibrated: mean(|s| s.calibrated) }
    }

    /// The page as text.
    pub fn to_html(&self) -> String {
        html::page(self)
    }

    pub fn to_json(&self) -> serde_json::Result<String> {
        let mut value = serde_json::to_value(self)?;
        if let (Some(plan), Some(fields)) = (&self.widths, value.as_object_mut()) {
            fields.insert("widths".into(), widths::to_json(plan));
        }
        serde_json::to_string_pretty(&value)
    }
}

/// Writes `report.html` and `report.json` into `dir`, which is created; returns their paths.
pub fn write_report(dir: &Path, report: &CalibrationReport) -> io::Result<[PathBuf; 2]> {
    fs::create_dir_all(dir)?;
    let (html, json) = (dir.join("report.html"), dir.join("report.json"));
    write_whole(&html, report.to_html())?;
    write_whole(&json, report.to_json()?)?;
    Ok([html, json])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bits::{HarmMap, WidthTable};
    use crate::clip_fit::{ClipPoint, RATIOS};
    use crate::options::Granularity;

    fn report() -> CalibrationReport {
        let curve = ClipCurve {
            best: 0.92,
            points: RATIOS.map(|ratio| ClipPoint { ratio, error: 0.1 + ratio / 10.0 }).to_vec(),
        };
        let snr = Snr { naive: 3.0, hadamard: 8.0, calibrated: 12.5 };
        let head = |index: usize| HeadReport {
            layer: index / 2,
            head: index % 2,
            key_participation: 10.0 + index as f64,
            value_participation: 60.0,
            key_eigenvalues: (0..64).map(|i| if i == 0 { 0.0 } else { f64::from(i).powi(3) }).collect(),
            value_eigenvalues: (0..64).map(|i| 1.0 + f64::from(i)).collect(),
            mean_key_share: 0.25,
            quality: HeadQuality { logits: snr, values: snr },
            clips: (0.96, 0.92),
            key_clip_curve: curve.clone(),
            value_clip_curve: curve.clone(),
        };
        CalibrationReport {
            metadata: Metadata {
                model_fingerprint: Some("ab".repeat(32)),
                granularity: Granularity::Head,
                statistic: "paper".into(),
                composition: "r_h_pbr".into(),
                centred: true,
                clip: "official".into(),
                clip_bits: (2, 2),
                tokens: 2048,
                sequences: 2,
                sequence_len: 1024,
                text_digest: None,
                tool: "oscar test".into(),
                note: "<script>alert(1)</script> & co".into(),
            },
            layers: 3,
            kv_heads: 2,
            head_dim: 64,
            bits: (2, 2),
            sample_rows: 256,
            heads: (0..6).map(head).collect(),
            widths: Some(BitPlan {
                layers: vec![17, 23],
                tables: vec![("2.50".parse().unwrap(), WidthTable::uniform(2, 2, 2))],
                harm: Some(HarmMap {
                    layers: 2,
                    kv_heads: 2,
                    harm: (0..8).map(|i| [0.4, 0.1, 0.02, 0.001].map(|h| h * (1 + i) as f32)).collect(),
                    error: Vec::new(),
                    absent: vec![None; 4],
                }),
                ..BitPlan::default()
            }),
        }
    }

    /// Every tag that is opened is closed, in order: enough of a check that the page is well
    /// formed.
    fn check_nesting(html: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = html;
        while let Some(start) = rest.find('<') {
            rest = &rest[start + 1..];
            let end = rest.find('>').expect("a tag ends");
            let tag = &rest[..end];
            rest = &rest[end + 1..];
            let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap();
            if tag.starts_with('!') || tag.ends_with('/') || ["meta", "br"].contains(&name) {
                continue;
            }
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name), "</{name}> closes what is open");
            } else {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?} stay open");
    }

    #[test]
    fn the_page_is_whole_and_loads_nothing() {
        let html = report().to_html();
        check_nesting(&html);
        for forbidden in ["http://", "https://", "src=", "@import", "url(", "<script", "<link", "NaN", "inf"]
        {
            assert!(!html.contains(forbidden), "{forbidden}");
        }
        assert!(html.contains("&lt;script&gt;alert(1)&lt;/script&gt; &amp; co"));
        assert!(html.contains("prefers-color-scheme") && html.contains("width=device-width"));
        for section in
            ["Logit SNR", "Value SNR", "Harm", "Widths at 2.50", "Participation", "Spectra", "Clip"]
        {
            assert!(html.contains(section), "{section}");
        }
        assert!(html.contains("+4.5 dB"), "calibrated against Hadamard");
        assert!(html.contains(">17</text>") && html.contains(">23</text>"), "layers that have widths");
    }

    #[test]
    fn files_are_written_whole() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("deep/report");
        let [html, json] = write_report(&dir, &report()).unwrap();
        assert!(fs::read_to_string(html).unwrap().starts_with("<!doctype html>"));
        let value: serde_json::Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
        assert_eq!(value["heads"][5]["logits"]["calibrated"], 12.5);
        assert_eq!(value["metadata"]["granularity"], "head");
        assert_eq!(value["widths"]["tables"][0]["widths"][3], serde_json::json!([2, 2]));
        assert_eq!(value["widths"]["layers"], serde_json::json!([17, 23]));
        assert_eq!(fs::read_dir(dir).unwrap().count(), 2);
    }

    #[test]
    fn an_empty_model_still_has_a_page() {
        let empty = CalibrationReport { layers: 0, heads: Vec::new(), ..report() };
        check_nesting(&empty.to_html());
    }
}
