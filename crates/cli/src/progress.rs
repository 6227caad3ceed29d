//! Progress on standard error, silent where that is no terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar that counts to `total`; draws nothing when standard error is no terminal.
pub fn bar(label: &'static str, total: u64) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} ({per_sec}, {eta} left)") {
        bar.set_style(style);
    }
    bar.with_message(label)
}

/// A bar that counts bytes and shows their rate.
pub fn bytes_bar(label: &'static str, total: u64) -> ProgressBar {
    let bar = bar(label, total);
    let template = "{msg} {wide_bar} {bytes}/{total_bytes} ({bytes_per_sec}, {eta} left)";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// Bytes for people: `1.25 MiB`.
pub fn bytes(n: usize) -> String {
    let n = n as f64;
    match n {
        _ if n < 1024.0 => format!("{n} B"),
        _ if n < 1024.0 * 1024.0 => format!("{:.1} KiB", n / 1024.0),
        _ if n < 1024.0 * 1024.0 * 1024.0 => format!("{:.2} MiB", n / 1024.0 / 1024.0),
        _ => format!("{:.2} GiB", n / 1024.0 / 1024.0 / 1024.0),
    }
}

/// Prints a line on standard error. One that is closed or full is no reason to stop, as it is for `eprintln!`.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}
pub(crate) use note;
