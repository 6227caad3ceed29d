//! Charts as SVG and reports as HTML pages: everything that calibration, comparison and benchmarks
//! draw.
//!
//! A chart becomes a [`Figure`]. A figure stands inline in a [`Page`] or in a file of its own.
//! Colours come by class from one style sheet, light and dark.
//!
//! **Invariant:** a page or picture loads nothing, and text from outside is always escaped.

mod bars;
mod figure;
mod heat_map;
mod line_chart;
mod numbers;
mod page;
mod scatter;
mod style;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

pub use bars::{Bar, bars};
pub use figure::Figure;
pub use heat_map::{HeatMap, Shades};
pub use line_chart::{LineChart, Series};
pub use numbers::{cost, number};
pub use page::Page;
pub use scatter::{Point, Scatter, pareto_front};

/// Writes a file whole or not at all.
pub fn write_whole(path: &Path, contents: impl AsRef<[u8]>) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let write = || {
        let mut file = File::create(&partial)?;
        file.write_all(contents.as_ref())?;
        file.sync_all()?;
        fs::rename(&partial, path)
    };
    let result = write();
    if result.is_err() {
        // The first error is the one worth telling.
        let _ = fs::remove_file(&partial);
    }
    result
}

/// Text made safe for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
