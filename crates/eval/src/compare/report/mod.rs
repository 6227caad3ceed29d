//! A comparison as one page that loads nothing, as a picture, and as a table.

mod html;

use super::{Comparison, MethodResult};
use crate::conversations::ConversationRow;
use crate::run::REFERENCE;
use oscar_figures::{Figure, Point, Scatter};

impl Comparison {
    /// The page as text: inline styles and figures, no scripts.
    pub fn to_html(&self) -> String {
        html::page(self)
    }

    /// Bits against KL and against task accuracy as one SVG file.
    pub fn to_picture(&self) -> String {
        const CAPTION: f64 = 26.0;
        let title = format!("KV-cache formats on {}", self.model);
        let figures: Vec<Figure> = [kl_figure(self), accuracy_figure(self)].into_iter().flatten().collect();
        let row = Figure::row(&title, &figures);
        let (width, height) = row.size();
        let mut picture = Figure::new(width, height + CAPTION, &title);
        picture.add(&row, (0.0, 0.0));
        // The command is printed in full beside the picture; here only as far as there is room.
        let caption = format!("{}, dashed: what nothing beats. {}", self.model, self.command);
        let mut cut: String = caption.chars().take((width / 6.0) as usize).collect();
        if cut.len() < caption.len() {
            cut.push_str(" …");
        }
        picture.text("tick", (8.0, height + CAPTION - 9.0), &cut);
        picture.file()
    }

    /// Header and rows of the table of eviction policies; no rows if none were measured.
    pub fn policy_table(&self) -> (Vec<&'static str>, Vec<Vec<String>>) {
        let header = vec!["kv", "policy ", "rows", "context", "right", "KL", "questions"];
        let all = self.policies.iter().filter(|row| row.task == "all");
        let cells = |row: &ConversationRow| {
            let (right, kl) = (format!("{:.1}", 100.0 * row.accuracy), format!("{:.4}", row.kl));
            let rows = format!("{:.3}", row.rows);
            vec![
                row.kv.clone(),
                row.policy.clone(),
                rows,
                row.context.to_string(),
                right,
                kl,
                row.n.to_string(),
            ]
        };
        (header, all.map(cells).collect())
    }

    /// Header and rows of the table.
    pub fn table(&self) -> (Vec<&'static str>, Vec<Vec<String>>) {
        let last = self.contexts.last().copied().unwrap_or(0);
        let header = vec![
            "kv",
            "bits",
            "with windows",
            "ppl",
            "KL",
            "top-1",
            "tasks",
            "needles",
            "same as BF16",
            "diverges at",
            "memory",
            "speed",
            "kernel ",
        ];
        let percent = |share: Option<f64>| share.map_or_else(String::new, |s| format!("{:.1}", 100.0 * s));
        let rows = self
            .methods
            .iter()
            .map(|m| {
                let size = m.size_at(last);
                vec![
                    m.kv.clone(),
                    format!("{:.2}", m.bits),
                    size.map_or_else(String::new, |s| format!("{:.2}", s.bits)),
                    m.text.map_or_else(String::new, |t| format!("{:.2}", t.ppl)),
                    m.text.map_or_else(String::new, |t| format!("{:.5}", t.kl)),
                    percent(m.text.map(|t| t.top1)),
                    percent(m.task_accuracy),
                    percent(m.needle_accuracy),
                    percent(m.divergence.map(|d| d.same)),
                    m.divergence.map_or_else(String::new, |d| match d.same < 1.0 {
                        true => format!("{:.0}", d.tokens),
                        false => "never".to_owned(),
                    }),
                    size.map_or_else(String::new, |s| bytes(s.bytes)),
                    m.speed.map_or_else(String::new, |s| format!("{:.2}×", s.ratio)),
                    if m.dequantized { "dequantized first".to_owned() } else { "own".to_owned() },
                ]
            })
            .collect();
        (header, rows)
    }
}

fn point(method: &MethodResult, y: f64) -> Point {
    Point { label: method.kv.clone(), class: class(method), x: method.bits, y }
}

fn class(method: &MethodResult) -> &'static str {
    match method.kv.as_str() {
        REFERENCE => "base",
        name if name.starts_with("oscar") => "ours",
        _ => "theirs",
    }
}

fn kl_figure(comparison: &Comparison) -> Option<Figure> {
    let others = comparison.methods.iter().filter(|m| m.kv != REFERENCE);
    let points: Vec<Point> = others.filter_map(|m| m.text.map(|t| point(m, t.kl))).collect();
    scatter("KL divergence from BF16 (lower is better)", "nats, logarithmic", true, points)
}

fn accuracy_figure(comparison: &Comparison) -> Option<Figure> {
    let points: Vec<Point> =
        comparison.methods.iter().filter_map(|m| m.task_accuracy.map(|a| point(m, a))).collect();
    scatter("Task accuracy, exact match (higher is better)", "mean over tasks", false, points)
}

fn scatter(title: &str, y_label: &str, y_is_cost: bool, points: Vec<Point>) -> Option<Figure> {
    (!points.is_empty()).then(|| Scatter { title, y_label, y_is_cost, points }.figure())
}

/// Bytes for people.
fn bytes(n: usize) -> String {
    let n = n as f64;
    if n < 1048576.0 { format!("{:.0} KiB", n / 1024.0) } else { format!("{:.2} MiB", n / 1048576.0) }
}

/// A number of tokens for people: `4K`, `1.5K`, `300`.
fn tokens(n: usize) -> String {
    match n {
        _ if n >= 1024 && n.is_multiple_of(1024) => format!("{}K", n / 1024),
        _ if n >= 10_000 => format!("{:.1}K", n as f64 / 1024.0),
        _ => n.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use crate::conversations::Unit;

    pub fn sample() -> Comparison {
        let method = |kv: &str, bits: f64, kl: f64, accuracy: f64| MethodResult {
            kv: kv.into(),
            description: "a <method>".into(),
            rotations: "none".into(),
            kernel: "k".into(),
            dequantized: kv == "kivi2",
            bits,
            sizes: vec![Size { context: 2048, bits: bits + 1.0, bytes: 3 << 20 }],
            text: Some(Text { context: 2048, ppl: 9.0, kl, top1: 0.9, n: 100 }),
            tasks: vec![TaskScore { task: "copy".into(), context: 1024, accuracy, n: 4 }],
            task_accuracy: Some(accuracy),
            needles: vec![Needle { context: 2048, depth: 0.5, accuracy, n: 1 }],
            needle_accuracy: Some(accuracy),
            divergence: (kv != "bf16").then_some(Divergence { same: 0.5, tokens: 10.0, share: 0.6, n: 2 }),
            speed: Some(Speed { context: 2048, tokens_per_s: 100.0, ratio: 1.0 }),
        };
        Comparison {
            model: "tiny & small".into(),
            device: "cpu".into(),
            command: "oscar compare".into(),
            notes: vec!["a note".into()],
            contexts: vec![1024, 2048],
            methods: vec![
                method("bf16", 16.0, 0.0, 1.0),
                method("oscar2", 2.25, 0.01, 0.75),
                method("kivi2", 2.25, 0.03, 0.5),
            ],
            policies: vec![ConversationRow {
                kv: "oscar2".into(),
                policy: "keydiff-uniform".into(),
                rows: 0.25,
                context: 4096,
                task: "all".into(),
                accuracy: 0.625,
                kl: 0.1,
                n: 16,
                percent: 25.0,
                unit: Unit::Rows,
                survival: None,
                abstention: None,
                length: None,
                bytes: 1.0,
                held: 1.0,
                probe_tokens: 0.0,
                routed: None,
                routes: None,
            }],
        }
    }

    #[test]
    fn answers_that_never_diverge_have_no_point_of_divergence() {
        let mut comparison = sample();
        comparison.methods[2].divergence = Some(Divergence { same: 1.0, tokens: 10.0, share: 1.0, n: 2 });
        let (header, rows) = comparison.table();
        let column = header.iter().position(|name| *name == "diverges at").unwrap();
        let cells: Vec<&str> = rows.iter().map(|row| row[column].as_str()).collect();
        assert_eq!(cells, ["", "10", "never"]);
    }

    #[test]
    fn the_page_is_self_contained_and_complete() {
        let page = sample().to_html();
        for part in [
            "<!doctype html>",
            "viewport",
            "prefers-color-scheme:dark",
            "oscar2",
            "dequantized first",
            "tiny &amp; small",
            "a note",
            "oscar compare",
        ] {
            assert!(page.contains(part), "{part} is missing");
        }
        for bad in ["<script", "http://fonts", "https://", "src=", "<link", "a <method>", "NaN"] {
            assert!(!page.contains(bad), "{bad} is in the page");
        }
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    }

    #[test]
    fn the_picture_stands_alone() {
        let picture = sample().to_picture();
        assert!(picture.starts_with("<svg xmlns=") && picture.ends_with("</svg>"));
        assert!(picture.contains("<style>") && picture.matches("<circle").count() == 5);
    }

    #[test]
    fn empty_comparisons_are_drawn() {
        let nothing = Comparison { methods: vec![], contexts: vec![], ..sample() };
        assert!(nothing.to_html().contains("</html>") && nothing.to_picture().ends_with("</svg>"));
        let bare = MethodResult { kv: "int8".into(), bits: 8.25, ..MethodResult::default() };
        let unmeasured = Comparison { methods: vec![bare], ..sample() };
        assert!(unmeasured.to_html().contains("int8"));
        assert_eq!(unmeasured.table().1[0][0], "int8");
    }

    #[test]
    fn comparisons_survive_json() {
        let text = serde_json::to_string(&sample()).unwrap();
        assert_eq!(serde_json::from_str::<Comparison>(&text).unwrap(), sample());
    }
}
