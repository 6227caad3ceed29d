//! The reports as a person sees them: opened in Chromium, on a desk and on a phone.

use crate::python;
use crate::support::succeed;
use std::path::Path;

/// Runs the command that writes `report.html` into a folder, and looks at what it wrote.
fn look_at_report(args: &[&str], folder_option: &str, plots: usize) {
    let Some(chromium) = python::chromium() else { return };
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("report");
    succeed(&[args, &[folder_option, folder.to_str().unwrap()]].concat());
    let report = folder.join("report.html");
    let args = [chromium, report.to_str().unwrap(), &plots.to_string()];
    python::run_script(Path::new("python3"), "report.py", &args);
}

#[test]
fn the_report_of_a_comparison_renders_in_chromium() {
    let mut args = vec!["compare", "--kv", "oscar2,int2,kivi2-g32", "--context", "448", "--windows", "1"];
    args.extend(["--score-from", "400", "--task-context", "448", "--tasks", "niah_single,copy"]);
    args.extend(["--limit", "1", "--depths", "20,80"]);
    // Two fronts, a heat map for each of four formats, long answers, memory, speed.
    look_at_report(&args, "--out", 2 + 4 + 3);
}

#[test]
fn the_report_of_a_calibration_renders_in_chromium() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("r.safetensors");
    let args = ["calibrate", "--tokens", "1024", "--out", file.to_str().unwrap()];
    // SNR and participation of both sides, a spectrum for each of six layers, clip curves of both sides.
    look_at_report(&args, "--report", 4 + 6 + 2);
}
