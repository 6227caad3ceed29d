//! A report: one HTML page that loads nothing.

use crate::style::PAGE;
use crate::{Figure, escape};
use std::fmt::{Arguments, Write};

/// A page under construction.
pub struct Page(String);

impl Page {
    /// A page with a title for the window and a heading.
    pub fn new(title: &str, heading: &str) -> Self {
        let (title, heading) = (escape(title), escape(heading));
        Self(format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
             <title>{title}</title><style>{PAGE}</style></head><body>\n<h1>{heading}</h1>\n"
        ))
    }

    /// Adds HTML as it is: texts from outside must be escaped.
    pub fn put(&mut self, html: Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.0.write_fmt(html);
    }

    pub fn push(&mut self, html: &str) {
        self.0.push_str(html);
    }

    pub fn section(&mut self, title: &str, text: &str) {
        self.put(format_args!("<h2>{}</h2>\n<p>{}</p>\n", escape(title), escape(text)));
    }

    /// Headline numbers: value and label.
    pub fn tiles(&mut self, tiles: &[(String, String)]) {
        self.push("<div class=\"tiles\">");
        for (value, label) in tiles {
            let (value, label) = (escape(value), escape(label));
            self.put(format_args!("<div class=\"tile\"><b>{value}</b><span>{label}</span></div>"));
        }
        self.push("</div>\n");
    }

    /// Colours and what they stand for.
    pub fn legend(&mut self, entries: &[(&str, &str)]) {
        self.push("<p class=\"key\">");
        for (class, label) in entries {
            self.put(format_args!("<i class=\"{class}\"></i>{}", escape(label)));
        }
        self.push("</p>");
    }

    /// Figures in a grid whose columns have the width of a class: `pair`, `small` or `maps`.
    pub fn figures(&mut self, class: &str, figures: impl IntoIterator<Item = Figure>) {
        self.put(format_args!("<div class=\"{class}\">"));
        for figure in figures {
            self.put(format_args!("<div class=\"figure\">{}</div>", figure.inline()));
        }
        self.push("</div>\n");
    }

    /// A table. A row is its class and its cells; a column whose title ends with a space is
    /// left-aligned text, as in tables on the terminal. A line break in a title is kept.
    pub fn table<'a>(&mut self, header: &[&str], rows: impl IntoIterator<Item = (&'a str, Vec<String>)>) {
        let class = |i: usize| if header[i].ends_with(' ') { " class=\"text\"" } else { "" };
        self.push("<div class=\"wide\"><table><tr>");
        for (i, title) in header.iter().enumerate() {
            let title = escape(title.trim_end()).replace('\n', "<br>");
            self.put(format_args!("<th{}>{title}</th>", class(i)));
        }
        self.push("</tr>");
        for (row_class, cells) in rows {
            self.put(format_args!("<tr class=\"{row_class}\">"));
            for (i, cell) in cells.iter().enumerate().take(header.len()) {
                self.put(format_args!("<td{}>{}</td>", class(i), escape(cell)));
            }
            self.push("</tr>");
        }
        self.push("</table></div>\n");
    }

    pub fn finish(mut self) -> String {
        self.push("</body></html>\n");
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_escape_their_texts_and_load_nothing() {
        let mut page = Page::new("a < b", "c & d");
        page.section("<i>", "\"");
        page.tiles(&[("<1>".into(), "<2>".into())]);
        page.legend(&[("ours", "<3>")]);
        page.table(&["x", "y\nz ", "<4>"], [("ours", vec!["<5>".into(), "6".into(), "7".into()])]);
        page.figures("pair", [Figure::new(10.0, 10.0, "<8>")]);
        let html = page.finish();
        for n in 1..=5 {
            assert!(html.contains(&format!("&lt;{n}&gt;")), "{n}");
            assert!(!html.contains(&format!("<{n}>")), "{n}");
        }
        assert!(
            html.contains("<th class=\"text\">y<br>z</th>") && html.contains("<td class=\"text\">6</td>")
        );
        assert!(html.contains("<title>a &lt; b</title>") && html.contains("<h1>c &amp; d</h1>"));
        for forbidden in ["http://", "https://", "src=", "@import", "url(", "<script", "<link"] {
            assert!(!html.contains(forbidden), "{forbidden}");
        }
        assert!(html.contains("prefers-color-scheme:dark") && html.ends_with("</html>\n"));
    }
}
