//! A table of numbers as coloured cells.

use crate::Figure;
use crate::numbers::number;

/// How a value becomes a colour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shades {
    /// One colour, stronger with the value; strongest at this one.
    UpTo(f64),
    /// Five colours from bad to good for shares of 0 to 1, written in percent.
    Share,
}

/// Rows down, columns across.
#[derive(Clone, Debug)]
pub struct HeatMap<'a> {
    pub title: &'a str,
    pub columns: Vec<String>,
    pub rows: Vec<String>,
    /// Row by row; a cell without a value stays empty.
    pub values: Vec<Option<f64>>,
    pub shades: Shades,
}

const CELL: (f64, f64) = (40.0, 20.0);
const SIDE: f64 = 44.0;
const HEAD: f64 = 40.0;
/// Width of a character of the title.
const LETTER: f64 = 7.5;

impl<'a> HeatMap<'a> {
    /// A map whose rows and columns have numbers.
    pub fn numbered(title: &'a str, columns: usize, values: Vec<f64>, highest: f64) -> Self {
        let columns = columns.max(1);
        let names = |count: usize| (0..count).map(|i| i.to_string()).collect();
        Self {
            title,
            columns: names(columns),
            rows: names(values.len().div_ceil(columns)),
            values: values.into_iter().map(Some).collect(),
            shades: Shades::UpTo(highest),
        }
    }

    pub fn figure(&self) -> Figure {
        let width = SIDE + self.columns.len() as f64 * CELL.0;
        let width = width.max(self.title.chars().count() as f64 * LETTER) + 4.0;
        let mut figure = Figure::new(width, HEAD + self.rows.len() as f64 * CELL.1 + 4.0, self.title);
        figure.text("head", (2.0, 14.0), self.title);
        for (i, column) in self.columns.iter().enumerate() {
            figure.text("tick mid", (SIDE + (i as f64 + 0.5) * CELL.0, HEAD - 6.0), column);
        }
        for (r, row) in self.rows.iter().enumerate() {
            figure.text("tick end", (SIDE - 6.0, HEAD + r as f64 * CELL.1 + 13.5), row);
        }
        for (i, &value) in self.values.iter().enumerate() {
            let (r, c) = (i / self.columns.len(), i % self.columns.len());
            self.cell(&mut figure, (SIDE + c as f64 * CELL.0, HEAD + r as f64 * CELL.1), value);
        }
        figure
    }

    fn cell(&self, figure: &mut Figure, (x, y): (f64, f64), value: Option<f64>) {
        let size = (CELL.0 - 1.0, CELL.1 - 1.0);
        let middle = (x + size.0 / 2.0, y + 13.5);
        let Some(value) = value else { return figure.rect("none", (x, y), size, 1.0) };
        match self.shades {
            Shades::UpTo(highest) => {
                let share = if highest > 0.0 { (value / highest).clamp(0.0, 1.0) } else { 0.0 };
                figure.rect("cell", (x, y), size, 0.08 + 0.92 * share);
                let class = if share > 0.55 { "value on mid" } else { "value mid" };
                figure.text(class, middle, &number(value));
            }
            Shades::Share => {
                let level = (value.clamp(0.0, 1.0) * 4.0).round() as u32;
                figure.rect(&format!("heat{level}"), (x, y), size, 1.0);
                figure.text(&format!("in{level} mid"), middle, &format!("{:.0}", 100.0 * value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_maps_have_a_cell_for_every_value() {
        let map = HeatMap::numbered("t", 3, vec![1.0; 7], 2.0);
        assert_eq!(map.figure().inline().matches("<rect").count(), 7);
        assert_eq!(map.rows.len(), 3);
        assert!(HeatMap::numbered("t", 0, vec![], 0.0).figure().inline().ends_with("</svg>"));
        let names = vec!["1K".to_owned(), "2K".to_owned()];
        let values = vec![None, Some(0.5), Some(0.5), None];
        let map = HeatMap { title: "t", columns: names.clone(), rows: names, values, shades: Shades::Share };
        let svg = map.figure().inline();
        assert_eq!((svg.matches("heat2").count(), svg.matches("class=\"none\"").count()), (2, 2));
    }
}
