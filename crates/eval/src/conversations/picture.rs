//! Accuracy by the share of rows kept, a line for each policy.

use super::{ConversationRow, FULL, Unit};
use oscar_figures::Figure;

const SIZE: (f64, f64) = (560.0, 360.0);
const LEFT: f64 = 46.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 40.0;

/// The picture of the rows of the first format and context.
pub fn picture(rows: &[ConversationRow]) -> Figure {
    let mut figure = Figure::new(SIZE.0, SIZE.1, "Right answers by rows kept");
    let Some(first) = rows.first() else { return figure };
    let all: Vec<&ConversationRow> = rows
        .iter()
        .filter(|row| row.task == "all" && row.unit == Unit::Rows)
        .filter(|row| (&row.kv, row.context) == (&first.kv, first.context))
        .collect();
    let mut percents: Vec<f64> = all.iter().map(|row| row.percent).collect();
    percents.sort_by(f64::total_cmp);
    percents.dedup();
    let (right, base) = (SIZE.0 - RIGHT, SIZE.1 - BOTTOM);
    let x_at = |percent: f64| {
        let place = percents.iter().position(|p| *p == percent).unwrap_or(0) as f64;
        LEFT + place / (percents.len() - 1).max(1) as f64 * (right - LEFT)
    };
    let y_at = |accuracy: f64| base - accuracy * (base - TOP);
    for tick in 0..=5 {
        let accuracy = f64::from(tick) / 5.0;
        figure.line("grid", (LEFT, y_at(accuracy)), (right, y_at(accuracy)));
        figure.text("tick end", (LEFT - 4.0, y_at(accuracy) + 3.5), &format!("{accuracy:.1}"));
    }
    for &percent in &percents {
        figure.text("tick mid", (x_at(percent), base + 14.0), &format!("{percent} %"));
    }
    let whole = all.iter().find(|row| row.policy == FULL).map_or(1.0, |row| row.accuracy);
    let mut policies: Vec<&str> = Vec::new();
    for row in all.iter().filter(|row| row.policy != FULL) {
        if !policies.contains(&row.policy.as_str()) {
            policies.push(&row.policy);
        }
    }
    // The label of a line stands at its lowest budget, one above the other where lines meet.
    let mut labels: Vec<(f64, &str)> = Vec::new();
    for (i, policy) in policies.iter().enumerate() {
        let mut line: Vec<(f64, f64)> =
            all.iter().filter(|row| row.policy == *policy).map(|row| (row.percent, row.accuracy)).collect();
        line.push((100.0, whole));
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
        let class = ["ours", "theirs", "base", "thin", "front"][i % 5];
        figure.polyline(class, line.iter().map(|&(percent, accuracy)| (x_at(percent), y_at(accuracy))));
        // Labels stand at the middle budget, right of the picture, with a leader.
        let middle = line[line.len() / 2];
        labels.push((y_at(middle.1), policy));
    }
    labels.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut next = TOP;
    for (y, policy) in labels {
        let place = y.max(next);
        next = place + 13.0;
        let at = percents.get(percents.len() / 2).copied().unwrap_or(100.0);
        figure.line("lead", (x_at(at), y), (right + 4.0, place));
        figure.text("name", (right + 6.0, place + 3.5), policy);
    }
    let title = format!("Share of right answers, {} tokens, --kv {}", first.context, first.kv);
    figure.text("head", (LEFT, 16.0), &title);
    figure.text("label end", (right, SIZE.1 - 6.0), "rows of the quantized history that are kept");
    figure
}
