//! `oscar gpu-check`: every CUDA kernel against the scalar reference, then a whole model against the CPU. One command
//! that needs nothing but the GPU; exits non-zero on a difference.

mod cache;
mod decoded;
mod growing;
mod heads;
mod model;
mod new_tokens;
#[cfg(test)]
mod on_cpu;
mod picks;
mod rows;
mod tails;

use crate::table;
use anyhow::{Context, Result, bail};
use oscar_backend::{Backend, HostMatrix, HostValues};
use oscar_kernels_cuda::CudaBackend;
use serde_json::json;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// Which checks to run; all if absent
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// A few small cases of each check, for slow tools like compute-sanitizer
    #[arg(long)]
    small: bool,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Embedding, norms, matrix products, Gram matrices
    Rows,
    /// Append, demotion and attention over pages of every width
    Cache,
    /// Formats without kernels: history coded on the CPU and kept decoded
    Generic,
    /// Prefixes whose BF16 tails were coded to make room
    Tails,
    /// Tokens chosen on the device
    Picks,
    /// The embedded model against the CPU
    Model,
}

/// How much of each check is run.
#[derive(Clone, Copy)]
struct Extent {
    /// Of the many cases of a check, every n-th.
    every: u64,
    /// Nothing large, and only the first steps of what goes on for long.
    small: bool,
}

impl Extent {
    const WHOLE: Self = Self { every: 1, small: false };
    /// Few enough for a tool that makes a kernel a thousand times slower, of every head size and storage.
    const SMALL: Self = Self { every: 13, small: true };

    fn takes(self, case: u64) -> bool {
        case.is_multiple_of(self.every)
    }

    /// Something that counts `size` is run if it is small enough for a small check, or if everything is.
    fn fits(self, size: usize, small: usize) -> bool {
        !self.small || size <= small
    }
}

/// What one kind of check found.
struct Finding {
    name: String,
    cases: usize,
    /// Largest difference as a share of what is allowed; above 1 is a failure.
    worst: f64,
    /// The first case that failed.
    failure: Option<String>,
}

/// Collects findings by name.
#[derive(Default)]
struct Report {
    findings: Vec<Finding>,
}

impl Report {
    /// One case of a check: `difference` may be at most `allowed`. NaN fails.
    fn case(&mut self, name: &str, difference: f64, allowed: f64, what: impl FnOnce() -> String) {
        let index = self.findings.iter().position(|f| f.name == name).unwrap_or_else(|| {
            self.findings.push(Finding { name: name.into(), cases: 0, worst: 0.0, failure: None });
            self.findings.len() - 1
        });
        let finding = &mut self.findings[index];
        finding.cases += 1;
        let share = if allowed > 0.0 { difference / allowed } else { difference * f64::INFINITY };
        let share = if difference == 0.0 { 0.0 } else { share };
        if share.is_nan() || share > finding.worst {
            finding.worst = share;
        }
        // NaN is a difference too.
        if (difference > allowed || difference.is_nan()) && finding.failure.is_none() {
            finding.failure = Some(format!("{}: differs by {difference:.3e}, allowed {allowed:.3e}", what()));
        }
    }
}

pub fn run(args: &Args) -> Result<()> {
    let started = Instant::now();
    let gpu = CudaBackend::open(0).context("gpu-check")?;
    if !args.json {
        println!("{}", gpu.describe());
    }
    let wants = |part| args.only.is_empty() || args.only.contains(&part);
    let extent = if args.small { Extent::SMALL } else { Extent::WHOLE };
    let mut report = Report::default();
    if wants(Part::Rows) {
        rows::check(&gpu, extent, &mut report)?;
    }
    if wants(Part::Cache) {
        cache::check(&gpu, extent, &mut report)?;
        heads::check(&gpu, &mut report)?;
        new_tokens::check(&gpu, extent, &mut report)?;
    }
    if wants(Part::Generic) {
        decoded::check(&gpu, extent, &mut report)?;
    }
    if wants(Part::Tails) {
        tails::check(&gpu, extent, &mut report)?;
    }
    if wants(Part::Picks) {
        picks::check(&gpu, extent, &mut report)?;
    }
    if wants(Part::Model) {
        model::check(extent, &mut report)?;
    }
    let failed: Vec<&Finding> = report.findings.iter().filter(|f| f.failure.is_some()).collect();
    if args.json {
        for f in &report.findings {
            println!(
                "{}",
                json!({"check": f.name, "cases": f.cases, "worst": f.worst, "ok": f.failure.is_none(),
                       "failure": f.failure})
            );
        }
    } else {
        let lines: Vec<Vec<String>> = report
            .findings
            .iter()
            .map(|f| {
                let verdict = if f.failure.is_none() { "ok" } else { "DIFFERS" };
                vec![
                    f.name.clone(),
                    f.cases.to_string(),
                    format!("{:.0} % of allowed", f.worst * 100.0),
                    verdict.into(),
                ]
            })
            .collect();
        println!("\n{}", table::render(&["check", "cases", "largest difference", "verdict"], &lines));
        println!("{:.1} s", started.elapsed().as_secs_f64());
    }
    if !failed.is_empty() {
        for f in &failed {
            eprintln!("{}: {}", f.name, f.failure.as_deref().unwrap_or_default());
        }
        bail!("{} of {} checks differ", failed.len(), report.findings.len());
    }
    Ok(())
}

/// Deterministic numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    /// Uniform in ±1, exactly representable in BF16.
    fn unit(&mut self) -> f32 {
        half::bf16::from_f32((self.next() % 65536) as f32 / 32768.0 - 1.0).to_f32()
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
}

/// Rows on the GPU with these values, which must be exact in BF16: an embedding of row numbers.
fn upload<B: Backend>(gpu: &B, values: &[f32], width: usize) -> Result<B::Rows> {
    let count = values.len() / width;
    let table = gpu.matrix(HostMatrix {
        outputs: count,
        inputs: width,
        values: HostValues::F32(values),
        bias: None,
    })?;
    let tokens: Vec<u32> = (0..count as u32).collect();
    let mut rows = gpu.rows(width);
    gpu.embed(&table, &tokens, &mut rows);
    // The table goes away: the copy must be over.
    gpu.read(&rows, &mut Vec::new())?;
    Ok(rows)
}

fn download<B: Backend>(gpu: &B, rows: &B::Rows) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    gpu.read(rows, &mut values)?;
    Ok(values)
}

/// Largest absolute difference; NaN anywhere is infinite.
fn largest_difference(found: &[f32], expected: &[f64]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let difference = |(f, e): (&f32, &f64)| {
        let d = (f64::from(*f) - e).abs();
        if d.is_nan() { f64::INFINITY } else { d }
    };
    found.iter().zip(expected).map(difference).fold(0.0, f64::max)
}
