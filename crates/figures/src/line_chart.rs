//! Lines over two axes.

use crate::Figure;
use crate::numbers::{number, padded, power, ticks};

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
    pub fn figure(&self) -> Figure {
        let transform = |y: f64| if self.logarithmic { y.log10() } else { y };
        let visible = |&(x, y): &(f64, f64)| {
            let y = transform(y);
            (x.is_finite() && y.is_finite()).then_some((x, y))
        };
        let all: Vec<(f64, f64)> =
            self.series.iter().flat_map(|s| s.points.iter().filter_map(visible)).collect();
        let (x_low, x_high) = padded(all.iter().map(|p| p.0), 0.0, 0.0);
        let (y_low, y_high) = padded(all.iter().map(|p| p.1), 0.05, 0.0);
        let (right, base) = (self.width - RIGHT, self.height - BOTTOM);
        let x_at = |x: f64| LEFT + (x - x_low) / (x_high - x_low) * (right - LEFT);
        let y_at = |y: f64| TOP + (y_high - y) / (y_high - y_low) * (base - TOP);

        let mut figure = Figure::new(self.width, self.height, self.title);
        for tick in ticks(y_low, y_high) {
            let (y, label) = (y_at(tick), if self.logarithmic { power(tick) } else { number(tick) });
            figure.line("grid", (LEFT, y), (right, y));
            figure.text("tick end", (LEFT - 4.0, y + 3.5), &label);
        }
        for tick in ticks(x_low, x_high) {
            figure.text("tick mid", (x_at(tick), base + 13.0), &number(tick));
        }
        for series in &self.series {
            let points = series.points.iter().filter_map(visible);
            figure.polyline(series.class, points.map(|(x, y)| (x_at(x), y_at(y))));
        }
        figure.text("label end", (right, self.height - 4.0), self.x_label);
        figure.text("label", (4.0, 12.0), self.y_label);
        figure
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
                let svg = chart.figure().inline();
                assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && svg.contains("a &lt; b"));
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
    }
}
