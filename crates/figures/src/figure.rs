//! A drawing: its size and its shapes.

use crate::escape;
use crate::style::PICTURE;
use std::fmt::{Arguments, Write};

/// A drawing under construction or done. Positions are `(x, y)` from the upper left corner.
#[derive(Clone, Debug)]
pub struct Figure {
    title: String,
    width: f64,
    height: f64,
    content: String,
}

impl Figure {
    pub fn new(width: f64, height: f64, title: &str) -> Self {
        Self { title: title.to_owned(), width, height, content: String::new() }
    }

    pub(crate) fn put(&mut self, text: Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.content.write_fmt(text);
    }

    pub fn text(&mut self, class: &str, (x, y): (f64, f64), text: &str) {
        self.put(format_args!(r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{}</text>"#, escape(text)));
    }

    pub fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        self.put(format_args!(
            r#"<line class="{class}" x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}"/>"#
        ));
    }

    pub fn polyline(&mut self, class: &str, points: impl Iterator<Item = (f64, f64)>) {
        let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.put(format_args!(r#"<polyline class="{class}" points="{}"/>"#, points.join(" ")));
    }

    /// A rectangle with rounded corners; `opacity` is that of its colour.
    pub fn rect(&mut self, class: &str, (x, y): (f64, f64), (w, h): (f64, f64), opacity: f64) {
        self.put(format_args!(
            r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{w:.1}" height="{h:.1}" rx="2""#
        ));
        if opacity < 1.0 {
            self.put(format_args!(r#" fill-opacity="{opacity:.2}""#));
        }
        self.put(format_args!("/>"));
    }

    /// Figures side by side.
    pub fn row(title: &str, figures: &[Self]) -> Self {
        let width = figures.iter().map(|f| f.width).sum();
        let height = figures.iter().map(|f| f.height).fold(0.0, f64::max);
        let mut all = Self::new(width, height, title);
        let mut x = 0.0;
        for figure in figures {
            all.add(figure, (x, 0.0));
            x += figure.width;
        }
        all
    }

    /// Draws `other` with its upper left corner at a position.
    pub fn add(&mut self, other: &Self, (x, y): (f64, f64)) {
        self.put(format_args!(r#"<g transform="translate({x:.0} {y:.0})">{}</g>"#, other.content));
    }

    pub fn size(&self) -> (f64, f64) {
        (self.width, self.height)
    }

    /// An element for a page, which brings the style sheet.
    pub fn inline(&self) -> String {
        self.element("", "")
    }

    /// A file that stands alone.
    pub fn file(&self) -> String {
        let paper = format!(
            r#"<style>{PICTURE}</style><rect class="paper" width="{:.0}" height="{:.0}"/>"#,
            self.width, self.height
        );
        self.element(r#"xmlns="http://www.w3.org/2000/svg" "#, &paper)
    }

    fn element(&self, namespace: &str, before: &str) -> String {
        let Self { width, height, content, .. } = self;
        let title = escape(&self.title);
        format!(
            r#"<svg {namespace}viewBox="0 0 {width:.0} {height:.0}" style="max-width:{width:.0}px" role="img"><title>{title}</title>{before}{content}</svg>"#
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_nest_and_text_is_escaped() {
        let mut a = Figure::new(100.0, 50.0, "a < b");
        a.text("tick", (1.0, 2.0), "<script>");
        let row = Figure::row("both", &[a.clone(), a.clone()]);
        assert_eq!(row.size(), (200.0, 50.0));
        for svg in [a.inline(), a.file(), row.file()] {
            assert!(
                svg.starts_with("<svg ") && svg.ends_with("</svg>") && !svg.contains("<script>"),
                "{svg}"
            );
            assert_eq!((svg.matches("<svg").count(), svg.matches("</svg>").count()), (1, 1));
        }
        assert!(a.inline().contains("a &lt; b") && !a.inline().contains("http"));
        assert_eq!(row.file().matches("&lt;script&gt;").count(), 2);
    }
}
