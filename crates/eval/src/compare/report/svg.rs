//! The figures as SVG text: scatter plots with a Pareto front, bars and heat maps. Colours come by
//! class from a style sheet.

use crate::compare::pareto_front;
use std::fmt::Write;

/// Text made safe for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

pub fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(text);
}

/// A labelled point.
#[derive(Clone, Debug)]
pub struct Point {
    pub label: String,
    /// Class of its mark: `ours` or `theirs`.
    pub class: &'static str,
    pub x: f64,
    pub y: f64,
}

/// Points over a logarithmic axis of bits, with the front of those that nothing beats.
#[derive(Clone, Debug)]
pub struct Scatter<'a> {
    pub title: &'a str,
    pub y_label: &'a str,
    /// Logarithmic, and less is better; otherwise linear, and more is better.
    pub y_is_cost: bool,
    pub points: Vec<Point>,
}

const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 40.0;
/// Width of a character and height of a line of a label.
const LABEL: (f64, f64) = (7.0, 13.0);

/// A rectangle: left, top, right, bottom.
type Area = (f64, f64, f64, f64);

fn overlap(a: &Area, b: &Area) -> bool {
    a.0 < b.2 && b.0 < a.2 && a.1 < b.3 && b.1 < a.3
}

impl Scatter<'_> {
    /// The figure as one `svg` element.
    pub fn render(&self) -> String {
        let mut svg = open(WIDTH, HEIGHT, self.title);
        svg.push_str(&self.content());
        svg.push_str("</svg>");
        svg
    }

    /// What is inside the element, for figures made of several.
    pub fn content(&self) -> String {
        let usable =
            |p: &&Point| p.x > 0.0 && p.x.is_finite() && p.y.is_finite() && (!self.y_is_cost || p.y > 0.0);
        let points: Vec<&Point> = self.points.iter().filter(usable).collect();
        let vertical = |y: f64| if self.y_is_cost { y.log10() } else { y };
        let (x_low, x_high) = padded(points.iter().map(|p| p.x.log2()), 0.12);
        // An octave at least, so that formats of one width still stand over a scale.
        let more = (1.0 - (x_high - x_low)).max(0.0) / 2.0;
        let (x_low, x_high) = (x_low - more, x_high + more);
        let (y_low, y_high) = padded(points.iter().map(|p| vertical(p.y)), 0.1);
        let x_at = |x: f64| LEFT + (x.log2() - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT);
        let y_at = |y: f64| TOP + (y_high - vertical(y)) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM);

        let mut svg = String::new();
        put(&mut svg, format_args!(r#"<text class="head" x="8" y="18">{}</text>"#, escape(self.title)));
        for tick in self.ticks(y_low, y_high) {
            let y = y_at(tick);
            let label = if self.y_is_cost { cost(tick) } else { percent(tick) };
            put(
                &mut svg,
                format_args!(
                    r#"<line class="grid" x1="{LEFT}" x2="{:.0}" y1="{y:.1}" y2="{y:.1}"/>"#,
                    WIDTH - RIGHT
                ),
            );
            put(
                &mut svg,
                format_args!(
                    r#"<text class="tick end" x="{:.0}" y="{:.1}">{label}</text>"#,
                    LEFT - 6.0,
                    y + 4.0
                ),
            );
        }
        for bits in [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0_f64] {
            if (x_low..=x_high).contains(&bits.log2()) {
                let (x, y) = (x_at(bits), HEIGHT - BOTTOM);
                put(
                    &mut svg,
                    format_args!(r#"<line class="grid" x1="{x:.1}" x2="{x:.1}" y1="{TOP}" y2="{y:.0}"/>"#),
                );
                put(
                    &mut svg,
                    format_args!(r#"<text class="tick mid" x="{x:.1}" y="{:.0}">{bits}</text>"#, y + 15.0),
                );
            }
        }
        put(
            &mut svg,
            format_args!(
                r#"<text class="tick end" x="{:.0}" y="{:.0}">stored bits an element, metadata counted</text>"#,
                WIDTH - RIGHT,
                HEIGHT - 6.0
            ),
        );
        put(
            &mut svg,
            format_args!(
                r#"<text class="tick" x="8" y="{:.0}">{}</text>"#,
                HEIGHT - 6.0,
                escape(self.y_label)
            ),
        );

        let sign = if self.y_is_cost { 1.0 } else { -1.0 };
        let front = pareto_front(&points.iter().map(|p| (p.x, sign * p.y)).collect::<Vec<_>>());
        let mut line = String::new();
        for pair in front.windows(2) {
            let (a, b) = (points[pair[0]], points[pair[1]]);
            put(
                &mut line,
                format_args!("{:.1},{:.1} {:.1},{:.1} ", x_at(a.x), y_at(a.y), x_at(b.x), y_at(a.y)),
            );
        }
        if let Some(&last) = front.last() {
            put(&mut line, format_args!("{:.1},{:.1}", x_at(points[last].x), y_at(points[last].y)));
        }
        put(&mut svg, format_args!(r#"<polyline class="front" points="{}"/>"#, line.trim_end()));

        let mut taken: Vec<Area> = points
            .iter()
            .map(|p| (x_at(p.x) - 5.0, y_at(p.y) - 5.0, x_at(p.x) + 5.0, y_at(p.y) + 5.0))
            .collect();
        let mut order: Vec<usize> = (0..points.len()).collect();
        order.sort_by(|&i, &j| y_at(points[i].y).total_cmp(&y_at(points[j].y)));
        for i in order {
            let p = points[i];
            let on_front = if front.contains(&i) { " best" } else { "" };
            let (x, y) = (x_at(p.x), y_at(p.y));
            let value = if self.y_is_cost { cost(p.y) } else { percent(p.y) };
            put(
                &mut svg,
                format_args!(
                    r#"<circle class="{}{on_front}" cx="{x:.1}" cy="{y:.1}" r="5"><title>{}: {} bits, {value}</title></circle>"#,
                    p.class,
                    escape(&p.label),
                    number(p.x)
                ),
            );
            let (area, left) = place_label((x, y), &p.label, &taken);
            let middle = (area.1 + area.3) / 2.0;
            if (middle - y).abs() > 9.0 {
                let end = if left { area.2 } else { area.0 };
                put(
                    &mut svg,
                    format_args!(
                        r#"<line class="lead" x1="{x:.1}" y1="{y:.1}" x2="{end:.1}" y2="{middle:.1}"/>"#
                    ),
                );
            }
            put(
                &mut svg,
                format_args!(
                    r#"<text class="name {}{on_front}" x="{:.1}" y="{:.1}">{}</text>"#,
                    p.class,
                    area.0,
                    middle + 4.0,
                    escape(&p.label)
                ),
            );
            taken.push(area);
        }
        svg
    }

    fn ticks(&self, low: f64, high: f64) -> Vec<f64> {
        if !self.y_is_cost {
            return ticks(low, high).into_iter().filter(|t| (0.0..=1.0).contains(t)).collect();
        }
        let decades = low.floor() as i32..=high.ceil() as i32;
        // Over many decades their beginnings are enough.
        let within: &[f64] = if high - low > 2.2 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let all = decades.flat_map(|d| within.iter().map(move |m| m * 10f64.powi(d)));
        all.filter(|t| (low..=high).contains(&t.log10())).collect()
    }
}

/// A free place beside a point: to the right or left, as near its height as possible.
fn place_label((x, y): (f64, f64), label: &str, taken: &[Area]) -> (Area, bool) {
    let width = label.chars().count() as f64 * LABEL.0;
    let area = |left: bool, shift: f64| -> Area {
        let start = if left { x - 9.0 - width } else { x + 9.0 };
        (start, y + shift - LABEL.1 / 2.0, start + width, y + shift + LABEL.1 / 2.0)
    };
    let inside =
        |a: &Area| a.0 >= LEFT - 4.0 && a.2 <= WIDTH && a.1 >= TOP - 12.0 && a.3 <= HEIGHT - BOTTOM + 2.0;
    for step in 0..40 {
        let distance = f64::from(step / 2 + step % 2) * 7.0 * if step % 2 == 0 { 1.0 } else { -1.0 };
        for left in [false, true] {
            let candidate = area(left, distance);
            if inside(&candidate) && !taken.iter().any(|t| overlap(t, &candidate)) {
                return (candidate, left);
            }
        }
    }
    (area(false, 0.0), false)
}

/// One bar.
#[derive(Clone, Debug)]
pub struct Bar {
    pub label: String,
    pub class: &'static str,
    pub value: f64,
    pub text: String,
}

/// Horizontal bars, one a line.
pub fn bars(title: &str, bars: &[Bar]) -> String {
    const LINE: f64 = 22.0;
    const NAME: f64 = 128.0;
    const TEXT: f64 = 210.0;
    let height = bars.len() as f64 * LINE + 8.0;
    let highest = bars.iter().map(|b| b.value).fold(0.0, f64::max);
    let mut svg = open(WIDTH, height, title);
    for (i, bar) in bars.iter().enumerate() {
        let y = i as f64 * LINE + 4.0;
        let share = if highest > 0.0 { (bar.value / highest).clamp(0.0, 1.0) } else { 0.0 };
        let length = (WIDTH - NAME - TEXT) * share;
        put(
            &mut svg,
            format_args!(
                r#"<text class="name end" x="{:.0}" y="{:.1}">{}</text>"#,
                NAME - 8.0,
                y + 13.0,
                escape(&bar.label)
            ),
        );
        put(
            &mut svg,
            format_args!(
                r#"<rect class="bar {}" x="{NAME}" y="{y:.1}" width="{:.1}" height="{:.0}" rx="2"/>"#,
                bar.class,
                length.max(1.0),
                LINE - 6.0
            ),
        );
        put(
            &mut svg,
            format_args!(
                r#"<text class="tick" x="{:.1}" y="{:.1}">{}</text>"#,
                NAME + length.max(1.0) + 6.0,
                y + 12.5,
                escape(&bar.text)
            ),
        );
    }
    svg.push_str("</svg>");
    svg
}

/// A small table of shares as coloured cells: rows are depths, columns contexts.
pub fn heat_map(
    title: &str,
    columns: &[String],
    rows: &[String],
    cell: impl Fn(usize, usize) -> Option<f64>,
) -> String {
    const CELL: (f64, f64) = (44.0, 24.0);
    const SIDE: f64 = 44.0;
    const HEAD: f64 = 42.0;
    let width = SIDE + columns.len() as f64 * CELL.0 + 4.0;
    let height = HEAD + rows.len() as f64 * CELL.1 + 4.0;
    let mut svg = open(width, height, title);
    put(&mut svg, format_args!(r#"<text class="head" x="2" y="14">{}</text>"#, escape(title)));
    for (i, column) in columns.iter().enumerate() {
        let x = SIDE + (i as f64 + 0.5) * CELL.0;
        put(
            &mut svg,
            format_args!(
                r#"<text class="tick mid" x="{x:.1}" y="{:.0}">{}</text>"#,
                HEAD - 6.0,
                escape(column)
            ),
        );
    }
    for (r, row) in rows.iter().enumerate() {
        let y = HEAD + r as f64 * CELL.1;
        put(
            &mut svg,
            format_args!(
                r#"<text class="tick end" x="{:.0}" y="{:.1}">{}</text>"#,
                SIDE - 6.0,
                y + 16.0,
                escape(row)
            ),
        );
        for c in 0..columns.len() {
            let x = SIDE + c as f64 * CELL.0;
            let (w, h) = (CELL.0 - 2.0, CELL.1 - 2.0);
            let Some(share) = cell(r, c) else {
                put(
                    &mut svg,
                    format_args!(
                        r#"<rect class="none" x="{x:.0}" y="{y:.0}" width="{w}" height="{h}" rx="3"/>"#
                    ),
                );
                continue;
            };
            let level = (share.clamp(0.0, 1.0) * 4.0).round() as u32;
            put(
                &mut svg,
                format_args!(
                    r#"<rect class="heat{level}" x="{x:.0}" y="{y:.0}" width="{w}" height="{h}" rx="3"/>"#
                ),
            );
            put(
                &mut svg,
                format_args!(
                    r#"<text class="in{level} mid" x="{:.1}" y="{:.1}">{:.0}</text>"#,
                    x + w / 2.0,
                    y + 15.5,
                    100.0 * share
                ),
            );
        }
    }
    svg.push_str("</svg>");
    svg
}

/// An `svg` element of its own; close it with `</svg>`.
pub fn open(width: f64, height: f64, title: &str) -> String {
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" style="max-width:{width:.0}px" role="img"><title>{}</title>"#,
        escape(title)
    )
}

/// Size of a scatter plot.
pub const SCATTER_SIZE: (f64, f64) = (WIDTH, HEIGHT);

/// Smallest and largest value with room on both sides, never equal.
fn padded(values: impl Iterator<Item = f64>, room: f64) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return (0.0, 1.0);
    }
    let room = ((high - low) * room).max(0.04);
    (low - room, high + room)
}

/// Round numbers inside the span.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * unit).into_iter().find(|&s| s >= rough).unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    (first..).map(|i| i as f64 * step).take_while(|&t| t <= high).take(12).collect()
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// A small number without an exponent where that is readable.
pub fn cost(value: f64) -> String {
    match value {
        _ if value >= 0.1 => format!("{value:.2}"),
        _ if value >= 0.01 => format!("{value:.3}"),
        _ if value >= 0.001 => format!("{value:.4}"),
        _ if value >= 0.00009 => format!("{value:.5}"),
        _ => format!("{value:.0e}"),
    }
}

fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(label: &str, x: f64, y: f64) -> Point {
        Point { label: label.into(), class: "ours", x, y }
    }

    #[test]
    fn scatter_plots_of_anything_are_drawn() {
        for points in [
            vec![],
            vec![point("one", 2.25, 0.01)],
            vec![point("a<b", 2.25, 0.0), point("c", 16.0, f64::NAN), point("d", 0.0, 1.0)],
            vec![point("same", 2.25, 0.5); 12],
        ] {
            for y_is_cost in [true, false] {
                let svg =
                    Scatter { title: "t & u", y_label: "y", y_is_cost, points: points.clone() }.render();
                assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && svg.contains("t &amp; u"));
                assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("a<b"), "{svg}");
            }
        }
    }

    #[test]
    fn labels_avoid_each_other() {
        let mut taken: Vec<Area> = Vec::new();
        for i in 0..12 {
            let (area, _) = place_label((200.0, 180.0 + f64::from(i % 3)), "turboquant3", &taken);
            assert!(!taken.iter().any(|t| overlap(t, &area)), "label {i}");
            taken.push(area);
        }
    }

    #[test]
    fn bars_and_heat_maps_have_their_parts() {
        let list = [("a", 0.0), ("b", 2.0)].map(|(label, value)| Bar {
            label: label.into(),
            class: "ours",
            value,
            text: "x".into(),
        });
        assert_eq!(bars("t", &list).matches("<rect").count(), 2);
        let names = ["1K".to_owned(), "2K".to_owned()];
        let map = heat_map("t", &names, &names, |r, c| (r != c).then_some(0.5));
        assert_eq!((map.matches("heat2").count(), map.matches("class=\"none\"").count()), (2, 2));
    }

    #[test]
    fn costs_are_short() {
        assert_eq!(
            [0.5, 0.0123, 0.00456, 0.00065, 0.00001].map(cost),
            ["0.50", "0.012", "0.0046", "0.00065", "1e-5"]
        );
    }
}
