//! Horizontal bars.

use crate::Figure;

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    pub label: String,
    pub class: &'static str,
    pub value: f64,
    pub text: String,
}

/// Horizontal bars, one a line.
pub fn bars(title: &str, bars: &[Bar]) -> Figure {
    const WIDTH: f64 = 520.0;
    const LINE: f64 = 22.0;
    const NAME: f64 = 128.0;
    const TEXT: f64 = 210.0;
    let highest = bars.iter().map(|b| b.value).fold(0.0, f64::max);
    let mut figure = Figure::new(WIDTH, bars.len() as f64 * LINE + 8.0, title);
    for (i, bar) in bars.iter().enumerate() {
        let y = i as f64 * LINE + 4.0;
        let share = if highest > 0.0 { (bar.value / highest).clamp(0.0, 1.0) } else { 0.0 };
        let length = ((WIDTH - NAME - TEXT) * share).max(1.0);
        figure.text("name end", (NAME - 8.0, y + 13.0), &bar.label);
        figure.rect(&format!("bar {}", bar.class), (NAME, y), (length, LINE - 6.0), 1.0);
        figure.text("tick", (NAME + length + 6.0, y + 12.5), &bar.text);
    }
    figure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_has_its_parts() {
        let list = [("a", 0.0), ("b & c", 2.0), ("d", f64::NAN)].map(|(label, value)| Bar {
            label: label.into(),
            class: "ours",
            value,
            text: "x".into(),
        });
        let svg = bars("t", &list).inline();
        assert_eq!(svg.matches("<rect").count(), 3);
        assert!(svg.contains("b &amp; c") && !svg.contains("NaN"), "{svg}");
    }
}
