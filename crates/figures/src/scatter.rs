//! Formats as points: stored bits against quality, with the front of those that nothing beats.

use crate::numbers::{cost, padded, percent, ticks};
use crate::{Figure, escape};

/// A labelled point.
#[derive(Clone, Debug)]
pub struct Point {
    pub label: String,
    /// Class of its mark: `ours`, `theirs` or `base`.
    pub class: &'static str,
    pub x: f64,
    pub y: f64,
}

/// Points over a logarithmic axis of bits.
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
/// Bits that may stand under the horizontal axis.
const BITS: [f64; 12] = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0];

/// A rectangle: left, top, right, bottom.
type Area = (f64, f64, f64, f64);

fn overlap(a: &Area, b: &Area) -> bool {
    a.0 < b.2 && b.0 < a.2 && a.1 < b.3 && b.1 < a.3
}

/// Indices of the points that no other beats: less `x` at no more `y`, or less `y` at no more `x`.
pub fn pareto_front(points: &[(f64, f64)]) -> Vec<usize> {
    let beaten = |&(x, y): &(f64, f64)| points.iter().any(|&(a, b)| a <= x && b <= y && (a < x || b < y));
    let mut front: Vec<usize> = (0..points.len()).filter(|&i| !beaten(&points[i])).collect();
    front.sort_by(|&i, &j| points[i].0.total_cmp(&points[j].0));
    front
}

/// From values to positions: ranges after the logarithms.
struct Axes {
    x: (f64, f64),
    y: (f64, f64),
    y_is_cost: bool,
}

impl Axes {
    fn of(points: &[&Point], y_is_cost: bool) -> Self {
        let (x_low, x_high) = padded(points.iter().map(|p| p.x.log2()), 0.12, 0.04);
        // An octave at least, so that formats of one width still stand over a scale.
        let more = (1.0 - (x_high - x_low)).max(0.0) / 2.0;
        let mut axes = Self { x: (x_low - more, x_high + more), y: (0.0, 1.0), y_is_cost };
        axes.y = padded(points.iter().map(|p| axes.vertical(p.y)), 0.1, 0.04);
        axes
    }

    fn vertical(&self, y: f64) -> f64 {
        if self.y_is_cost { y.log10() } else { y }
    }

    fn x_at(&self, x: f64) -> f64 {
        LEFT + (x.log2() - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y_at(&self, y: f64) -> f64 {
        TOP + (self.y.1 - self.vertical(y)) / (self.y.1 - self.y.0) * (HEIGHT - TOP - BOTTOM)
    }

    fn at(&self, p: &Point) -> (f64, f64) {
        (self.x_at(p.x), self.y_at(p.y))
    }

    fn label(&self, y: f64) -> String {
        if self.y_is_cost { cost(y) } else { percent(y) }
    }

    fn y_ticks(&self) -> Vec<f64> {
        let (low, high) = self.y;
        if !self.y_is_cost {
            return ticks(low, high).into_iter().filter(|t| (0.0..=1.0).contains(t)).collect();
        }
        let decades = low.floor() as i32..=high.ceil() as i32;
        // Over many decades their beginnings are enough.
        let within: &[f64] = if high - low > 2.2 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let all = decades.flat_map(|d| within.iter().map(move |m| m * 10f64.powi(d)));
        all.filter(|t| (low..=high).contains(&t.log10())).collect()
    }

    fn draw(&self, figure: &mut Figure) {
        for tick in self.y_ticks() {
            let y = self.y_at(tick);
            figure.line("grid", (LEFT, y), (WIDTH - RIGHT, y));
            figure.text("tick end", (LEFT - 6.0, y + 4.0), &self.label(tick));
        }
        let base = HEIGHT - BOTTOM;
        for bits in BITS.into_iter().filter(|bits| (self.x.0..=self.x.1).contains(&bits.log2())) {
            let x = self.x_at(bits);
            figure.line("grid", (x, TOP), (x, base));
            figure.text("tick mid", (x, base + 15.0), &bits.to_string());
        }
    }
}

impl Scatter<'_> {
    pub fn figure(&self) -> Figure {
        let usable =
            |p: &&Point| p.x > 0.0 && p.x.is_finite() && p.y.is_finite() && (!self.y_is_cost || p.y > 0.0);
        let points: Vec<&Point> = self.points.iter().filter(usable).collect();
        let axes = Axes::of(&points, self.y_is_cost);
        let mut figure = Figure::new(WIDTH, HEIGHT, self.title);
        figure.text("head", (8.0, 18.0), self.title);
        axes.draw(&mut figure);
        figure.text("tick end", (WIDTH - RIGHT, HEIGHT - 6.0), "stored bits an element, metadata counted");
        figure.text("tick", (8.0, HEIGHT - 6.0), self.y_label);

        let sign = if self.y_is_cost { 1.0 } else { -1.0 };
        let front = pareto_front(&points.iter().map(|p| (p.x, sign * p.y)).collect::<Vec<_>>());
        let corners = front.windows(2).flat_map(|pair| {
            let (a, b) = (points[pair[0]], points[pair[1]]);
            [axes.at(a), (axes.x_at(b.x), axes.y_at(a.y))]
        });
        figure.polyline("front", corners.chain(front.last().map(|&last| axes.at(points[last]))));
        draw_points(&mut figure, &axes, &points, &front);
        figure
    }
}

/// Marks, then labels where there is room, from top to bottom.
fn draw_points(figure: &mut Figure, axes: &Axes, points: &[&Point], front: &[usize]) {
    let mark = |p: &&Point| {
        let (x, y) = axes.at(p);
        (x - 5.0, y - 5.0, x + 5.0, y + 5.0)
    };
    let mut taken: Vec<Area> = points.iter().map(mark).collect();
    let mut order: Vec<usize> = (0..points.len()).collect();
    order.sort_by(|&i, &j| axes.y_at(points[i].y).total_cmp(&axes.y_at(points[j].y)));
    for i in order {
        let p = points[i];
        let class = format!("{}{}", p.class, if front.contains(&i) { " best" } else { "" });
        let (x, y) = axes.at(p);
        let bits = format!("{:.3}", p.x);
        figure.put(format_args!(
            r#"<circle class="{class}" cx="{x:.1}" cy="{y:.1}" r="5"><title>{}: {} bits, {}</title></circle>"#,
            escape(&p.label),
            bits.trim_end_matches('0').trim_end_matches('.'),
            axes.label(p.y)
        ));
        let (area, left) = place_label((x, y), &p.label, &taken);
        let middle = (area.1 + area.3) / 2.0;
        if (middle - y).abs() > 9.0 {
            figure.line("lead", (x, y), (if left { area.2 } else { area.0 }, middle));
        }
        figure.text(&format!("name {class}"), (area.0, middle + 4.0), &p.label);
        taken.push(area);
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
                let scatter = Scatter { title: "t & u", y_label: "y", y_is_cost, points: points.clone() };
                let svg = scatter.figure().inline();
                assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && svg.contains("t &amp; u"));
                assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("a<b"), "{svg}");
            }
        }
    }

    #[test]
    fn the_front_is_what_nothing_beats() {
        let points = [(2.25, 0.01), (2.25, 0.05), (4.25, 0.001), (3.0, 0.02), (2.125, 0.03), (4.25, 0.001)];
        assert_eq!(pareto_front(&points), [4, 0, 2, 5]);
        assert!(pareto_front(&[]).is_empty());
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
}
