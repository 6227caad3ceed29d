//! `oscar gpu-check`: every CUDA kernel against the scalar reference, then a whole model against
//! the CPU. Needs only the GPU; exits non-zero on a difference.

use crate::table;
use anyhow::{Context, Result, bail};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use oscar_backend::Backend;
use oscar_gpu_check::{Extent, Part, Report, check, open};
use serde_json::json;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// Parts to check; all if absent
    #[arg(long, value_delimiter = ',', value_parser = parts())]
    only: Vec<Part>,
    /// A few small cases of each check, for slow tools like compute-sanitizer
    #[arg(long)]
    small: bool,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

fn parts() -> impl TypedValueParser<Value = Part> {
    let values = Part::all().map(|part| PossibleValue::new(part.name()).help(part.describe()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Part>())
}

pub fn run(args: &Args) -> Result<()> {
    let started = Instant::now();
    let gpu = open().context("gpu-check")?;
    if !args.json {
        println!("{}", gpu.describe());
    }
    let parts = if args.only.is_empty() { Part::all().to_vec() } else { args.only.clone() };
    let extent = if args.small { Extent::SMALL } else { Extent::WHOLE };
    let report = check(&gpu, &parts, extent, |part| {
        eprintln!("{:6.1} s  {part}", started.elapsed().as_secs_f64());
    });
    if args.json {
        for f in &report.findings {
            let ok = f.failure.is_none();
            let line =
                json!({"check": f.name, "cases": f.cases, "worst": f.worst, "ok": ok, "failure": f.failure});
            println!("{line}");
        }
    } else {
        print_table(&report);
        println!("{:.1} s", started.elapsed().as_secs_f64());
    }
    let failed = report.failures().count();
    for f in report.failures() {
        eprintln!("{}: {}", f.name, f.failure.as_deref().unwrap_or_default());
    }
    if failed > 0 {
        bail!("{failed} of {} checks differ", report.findings.len());
    }
    Ok(())
}

fn print_table(report: &Report) {
    let line = |f: &oscar_gpu_check::Finding| {
        let verdict = if f.failure.is_none() { "ok" } else { "DIFFERS" };
        vec![
            f.name.clone(),
            f.cases.to_string(),
            format!("{:.0} % of allowed", f.worst * 100.0),
            verdict.into(),
        ]
    };
    let lines: Vec<Vec<String>> = report.findings.iter().map(line).collect();
    println!("\n{}", table::render(&["check", "cases", "largest difference", "verdict"], &lines));
}
