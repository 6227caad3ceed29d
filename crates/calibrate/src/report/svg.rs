//! Small figures: line charts and heat maps as SVG text. Colours come from the page's style sheet by class.

use std::fmt::Write;

/// Text made safe for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    pub class: &'static str,
    pub points: Vec<(f64, f64)>,
}

/// A line chart. Points that are not finite (or not positive, on a logarithmic axis) are left out.
#[derive(Clone, Debug)]
pub struct LineChart<'a> {
    pub title: &'a str,
    pub x_label: &'a str,
    pub y_label: &'a str,
    pub logarithmic: bool,
    pub width: f64,
    pub height: f64,
    pub series: Vec<Series>,
}

const LEFT: f64 = 46.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 32.0;

impl LineChart<'_> {
    pub fn render(&self) -> String {
        let transform = |y: f64| if self.logarithmic { y.log10() } else { y };
        let visible = |&(x, y): &(f64, f64)| {
            let y = transform(y);
            (x.is_finite() && y.is_finite()).then_some((x, y))
        };
        let all: Vec<(f64, f64)> =
            self.series.iter().flat_map(|s| s.points.iter().filter_map(visible)).collect();
        let (x_low, x_high) = span(all.iter().map(|p| p.0));
        let (y_low, y_high) = padded(span(all.iter().map(|p| p.1)));
        let x_at = |x: f64| LEFT + (x - x_low) / (x_high - x_low) * (self.width - LEFT - RIGHT);
        let y_at = |y: f64| TOP + (y_high - y) / (y_high - y_low) * (self.height - TOP - BOTTOM);

        let mut svg = open(self.width, self.height, self.title);
        for tick in ticks(y_low, y_high) {
            let (y, label) = (y_at(tick), if self.logarithmic { power(tick) } else { number(tick) });
            let right = self.width - RIGHT;
            put(
                &mut svg,
                format_args!(r#"<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1}" y2="{y:.1}"/>"#),
            );
            put(
                &mut svg,
                format_args!(
                    r#"<text class="tick end" x="{:.1}" y="{:.1}">{label}</text>"#,
                    LEFT - 4.0,
                    y + 3.5
                ),
            );
        }
        for tick in ticks(x_low, x_high) {
            let (x, y) = (x_at(tick), self.height - BOTTOM + 13.0);
            put(
                &mut svg,
                format_args!(r#"<text class="tick mid" x="{x:.1}" y="{y:.1}">{}</text>"#, number(tick)),
            );
        }
        for series in &self.series {
            let mut path = String::new();
            for (x, y) in series.points.iter().filter_map(visible) {
                put(&mut path, format_args!("{:.1},{:.1} ", x_at(x), y_at(y)));
            }
            put(
                &mut svg,
                format_args!(r#"<polyline class="{}" points="{}"/>"#, series.class, path.trim_end()),
            );
        }
        let (x, y) = (self.width - RIGHT, self.height - 4.0);
        put(
            &mut svg,
            format_args!(r#"<text class="label end" x="{x}" y="{y}">{}</text>"#, escape(self.x_label)),
        );
        put(
            &mut svg,
            format_args!(r#"<text class="label" x="4" y="12">{}</text></svg>"#, escape(self.y_label)),
        );
        svg
    }
}

/// A table of numbers as coloured cells: rows down, columns across.
#[derive(Clone, Debug)]
pub struct HeatMap<'a> {
    pub title: &'a str,
    pub row_label: &'a str,
    pub columns: usize,
    /// Row by row.
    pub values: Vec<f64>,
    /// The value of the strongest colour; the weakest is 0.
    pub highest: f64,
}

impl HeatMap<'_> {
    pub fn render(&self) -> String {
        const CELL: (f64, f64) = (34.0, 16.0);
        /// The caption has a line of its own above the column numbers, and room for its words.
        const CAPTION: (f64, f64) = (150.0, 16.0);
        let columns = self.columns.max(1);
        let rows = self.values.len().div_ceil(columns);
        let top = TOP + CAPTION.1;
        let width = (LEFT + columns as f64 * CELL.0 + 4.0).max(CAPTION.0);
        let height = top + rows as f64 * CELL.1 + 4.0;
        let mut svg = open(width, height, self.title);
        put(&mut svg, format_args!(r#"<text class="label" x="4" y="12">{}</text>"#, escape(self.row_label)));
        for column in 0..columns {
            let x = LEFT + (column as f64 + 0.5) * CELL.0;
            put(
                &mut svg,
                format_args!(r#"<text class="tick mid" x="{x:.1}" y="{:.1}">{column}</text>"#, top - 6.0),
            );
        }
        for (row, values) in self.values.chunks(columns).enumerate() {
            let y = top + row as f64 * CELL.1;
            let middle = y + 11.5;
            put(
                &mut svg,
                format_args!(r#"<text class="tick end" x="{:.1}" y="{middle:.1}">{row}</text>"#, LEFT - 6.0),
            );
            for (column, &value) in values.iter().enumerate() {
                let x = LEFT + column as f64 * CELL.0;
                let share = if self.highest > 0.0 { (value / self.highest).clamp(0.0, 1.0) } else { 0.0 };
                let (w, h) = (CELL.0 - 1.0, CELL.1 - 1.0);
                put(
                    &mut svg,
                    format_args!(
                        r#"<rect class="cell" x="{x}" y="{y}" width="{w}" height="{h}" fill-opacity="{:.2}"/>"#,
                        0.08 + 0.92 * share
                    ),
                );
                let class = if share > 0.55 { "value on" } else { "value" };
                let x = x + CELL.0 / 2.0;
                put(
                    &mut svg,
                    format_args!(
                        r#"<text class="{class} mid" x="{x:.1}" y="{middle:.1}">{}</text>"#,
                        number(value)
                    ),
                );
            }
        }
        svg.push_str("</svg>");
        svg
    }
}

fn open(width: f64, height: f64, title: &str) -> String {
    format!(
        r#"<svg viewBox="0 0 {width:.0} {height:.0}" style="max-width:{width:.0}px" role="img"><title>{}</title>"#,
        escape(title)
    )
}

fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(text);
}

/// Smallest and largest value, never equal.
fn span(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        (0.0, 1.0)
    } else if high - low < 1e-12 {
        (low - 0.5, high + 0.5)
    } else {
        (low, high)
    }
}

fn padded((low, high): (f64, f64)) -> (f64, f64) {
    let room = (high - low) * 0.05;
    (low - room, high + room)
}

/// Four to nine round numbers inside the span.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * unit).into_iter().find(|&s| s >= rough).unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    (first..).map(|i| i as f64 * step).take_while(|&t| t <= high).take(12).collect()
}

/// A number in few characters.
pub fn number(value: f64) -> String {
    let size = value.abs();
    let text = if size >= 100.0 || size == 0.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 0.01 {
        format!("{value:.2}")
    } else {
        return format!("{value:.0e}");
    };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A tick of a logarithmic axis: a power of ten as such, anything between two of them as the number it is.
fn power(exponent: f64) -> String {
    match exponent.fract().abs() < 1e-9 {
        true => format!("1e{exponent:.0}"),
        false => number(10f64.powf(exponent)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charts_of_anything_are_drawn() {
        for points in [
            vec![],
            vec![(1.0, 5.0)],
            vec![(0.0, 0.0), (1.0, f64::NAN), (2.0, -3.0), (f64::INFINITY, 1.0)],
            vec![(0.0, 1e-30), (1.0, 1e30)],
        ] {
            for logarithmic in [false, true] {
                let chart = LineChart {
                    title: "a < b",
                    x_label: "x",
                    y_label: "y",
                    logarithmic,
                    width: 300.0,
                    height: 160.0,
                    series: vec![Series { class: "c0", points: points.clone() }],
                };
                let svg = chart.render();
                assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && svg.contains("a &lt; b"));
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(-3.0, 2.0), [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]);
        for (low, high) in [(0.1, 0.2), (1e-9, 1e-8), (12345.0, 99999.0)] {
            let ticks = ticks(low, high);
            assert!((3..=12).contains(&ticks.len()) && ticks.iter().all(|t| (low..=high).contains(t)));
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.0, 0.5, 12.0, 123.4, 0.001].map(number), ["0", "0.5", "12", "123", "1e-3"]);
        assert_eq!([-3.0, 0.0, 1.0, -0.8, -2.5].map(power), ["1e-3", "1e0", "1e1", "0.16", "3e-3"]);
    }

    #[test]
    fn heat_maps_have_a_cell_for_every_value() {
        let map = HeatMap { title: "t", row_label: "r", columns: 3, values: vec![1.0; 7], highest: 2.0 };
        assert_eq!(map.render().matches("<rect").count(), 7);
        let empty = HeatMap { values: vec![], ..map };
        assert!(empty.render().ends_with("</svg>"));
    }
}
