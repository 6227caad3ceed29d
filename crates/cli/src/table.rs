//! Plain-text tables: columns as wide as their widest cell, numbers to the right.

/// Renders rows under a header. The first column and columns whose header ends in a space (cut off) are text and
/// left-aligned, the others right-aligned.
pub fn render(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header[column].trim_end().chars().count()]).max().unwrap_or(0)
    };
    let is_text: Vec<bool> = header.iter().enumerate().map(|(i, h)| i == 0 || h.ends_with(' ')).collect();
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &[String]| {
        let padded: Vec<String> = cells
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(i, (cell, &w))| if is_text[i] { format!("{cell:<w$}") } else { format!("{cell:>w$}") })
            .collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut out = vec![line(&header.iter().map(|h| h.trim_end().to_owned()).collect::<Vec<_>>())];
    out.push(widths.iter().map(|&w| "─".repeat(w)).collect::<Vec<_>>().join("  "));
    out.extend(rows.iter().map(|row| line(row)));
    out.join("\n")
}

/// A column: its header, as [`render`] takes it, and the cell of a row.
pub type Column<'a, Row> = (&'static str, &'a dyn Fn(&Row) -> String);

/// Renders a line for each of `rows`.
pub fn by_columns<Row>(rows: &[Row], columns: &[Column<'_, Row>]) -> String {
    let header: Vec<&str> = columns.iter().map(|(header, _)| *header).collect();
    let line = |row: &Row| columns.iter().map(|(_, cell)| cell(row)).collect();
    render(&header, &rows.iter().map(line).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["a".to_owned(), "10".to_owned()], vec!["long".to_owned(), "5".to_owned()]];
        assert_eq!(super::render(&["name", "n"], &rows), "name   n\n────  ──\na     10\nlong   5");
    }
}
