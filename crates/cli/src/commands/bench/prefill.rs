//! `oscar bench prefill`: whole prompts.

use super::gemm::peak_tflops;
use super::model::{Args, print_profile};
use crate::device::AnyBackend;
use crate::{progress, table};
use anyhow::{Result, bail};
use oscar_backend::{Benchmarks, StepTimes};
use oscar_bench::random_tokens;
use oscar_kernels_cpu::bench::{Timing, time_median};
use oscar_models::DecoderConfig;
use oscar_runner::{Runner, Sequence, StepOutput};
use serde_json::{Value, json};

/// One prompt length and format.
struct Measured {
    kv: String,
    device: &'static str,
    context: usize,
    chunk: usize,
    timing: Timing,
    /// Of one more prompt, whose parts were timed.
    parts: StepTimes,
    work: Work,
    /// TFLOP/s of a large product on this device.
    peak: f64,
    cache_bytes: usize,
}

/// Floating-point operations of a prompt.
#[derive(Clone, Copy)]
struct Work {
    products: f64,
    attention: f64,
}

impl Work {
    fn of(config: &DecoderConfig, tokens: usize) -> Self {
        // The head multiplies the last token only.
        let layers = config.active_parameters() - config.hidden_size * config.vocab_size;
        let pairs = tokens as f64 * (tokens as f64 + 1.0) / 2.0;
        Self {
            products: 2.0 * tokens as f64 * layers as f64,
            attention: 4.0 * (config.cache_layers() * config.query_width()) as f64 * pairs,
        }
    }
}

pub fn run(args: &Args) -> Result<()> {
    args.check()?;
    if args.batch != [1] {
        bail!("--batch: prefill is measured one sequence at a time; leave it out");
    }
    if args.parallel.tensor_parallel > 1 {
        bail!(
            "--tensor-parallel: the parts of a prompt are timed on one rank only; use `oscar bench decode`"
        );
    }
    let (mut rows, formats) = (Vec::new(), args.formats()?);
    for &context in &args.context {
        for &format in &formats {
            let mut runner = args.runner(format, context, 1)?;
            // Once for all: the device is the same.
            let known = rows.first().map(|row: &Measured| row.peak);
            let peak = known.map_or_else(|| peak_tflops(runner.backend()), Ok)?;
            rows.push(measure(args, &mut runner, format.to_string(), context, peak)?);
        }
    }
    match args.json {
        true => rows.iter().for_each(|row| println!("{}", row.json())),
        false => report(&rows),
    }
    Ok(())
}

fn measure(
    args: &Args,
    runner: &mut Runner<AnyBackend>,
    kv: String,
    context: usize,
    peak: f64,
) -> Result<Measured> {
    let tokens = random_tokens(context, runner.config().vocab_size, 1);
    let mut cache_bytes = 0;
    let mut prompt = |runner: &mut Runner<AnyBackend>| {
        let done = runner.prefill(&mut Sequence::new(), &tokens, &mut StepOutput::default(), |_| {});
        cache_bytes = runner.usage().bytes;
        done
    };
    let mut failure = None;
    let timing = time_median(1, args.repetitions.unwrap_or(3), || {
        if let Err(error) = prompt(runner) {
            failure.get_or_insert(error);
        }
    });
    if let Some(error) = failure {
        return Err(error.into());
    }
    if args.profile
        && let Some(device) = runner.backend().as_cuda().map(|cuda| cuda.device().clone())
    {
        device.set_profiling(true)?;
        prompt(runner)?;
        print_profile(&format!("{kv}, a prompt of {context} tokens"), device.set_profiling(false)?);
    }
    runner.backend().time_steps(true)?;
    prompt(runner)?;
    let parts = runner.backend().time_steps(false)?.unwrap_or_default();
    Ok(Measured {
        kv,
        device: runner.backend().name(),
        context,
        chunk: runner.prefill_chunk(),
        timing,
        parts,
        work: Work::of(runner.config(), context),
        peak,
        cache_bytes,
    })
}

impl Measured {
    fn seconds(&self) -> f64 {
        self.timing.median.as_secs_f64()
    }

    fn tokens_per_s(&self) -> f64 {
        self.context as f64 / self.seconds()
    }

    /// TFLOP/s of the whole prompt, of its products alone and of its attention alone.
    fn tflops(&self) -> [f64; 3] {
        let Self { work, parts, .. } = self;
        let rate = |work: f64, seconds: f64| work / seconds.max(1e-9) / 1e12;
        [
            rate(work.products + work.attention, self.seconds()),
            rate(work.products, parts.products),
            rate(work.attention, parts.attention),
        ]
    }

    /// Shares of products, attention, coding and the rest.
    fn shares(&self) -> [f64; 4] {
        let StepTimes { products, attention, coding, rest } = self.parts;
        [products, attention, coding, rest].map(|part| part / self.parts.total().max(1e-9))
    }

    fn json(&self) -> Value {
        let us = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let ([whole, products, attention], shares) = (self.tflops(), self.shares());
        json!({
            "bench": "prefill", "kv": self.kv, "device": self.device, "context": self.context, "batch": 1,
            "prefill_chunk": self.chunk, "us": us(self.timing.median), "us_min": us(self.timing.min),
            "us_max": us(self.timing.max), "tokens_per_s": self.tokens_per_s(), "tflops": whole,
            "products_tflops": products, "attention_tflops": attention, "products_share": shares[0],
            "attention_share": shares[1], "coding_share": shares[2], "rest_share": shares[3],
            "peak_tflops": self.peak, "cache_bytes": self.cache_bytes, "peak_rss_bytes": peak_rss(),
        })
    }
}

fn report(rows: &[Measured]) {
    let first = |row: &Measured| rows.iter().find(|r| r.context == row.context).map(Measured::tokens_per_s);
    // A CPU does a few hundred GFLOP/s, a GPU a few hundred TFLOP/s.
    let rate = |row: &Measured, part: usize| {
        let tflops = row.tflops()[part];
        let of_peak = 100.0 * tflops / row.peak;
        if tflops < 10.0 {
            format!("{tflops:.3} ({of_peak:.0} %)")
        } else {
            format!("{tflops:.0} ({of_peak:.0} %)")
        }
    };
    let share = |row: &Measured, part: usize| format!("{:.1} %", 100.0 * row.shares()[part]);
    let table = table::by_columns(
        rows,
        &[
            ("kv", &|row| row.kv.clone()),
            ("context", &|row| row.context.to_string()),
            ("chunk", &|row| row.chunk.to_string()),
            ("ms", &|row| format!("{:.1}", row.seconds() * 1e3)),
            ("spread", &|row| format!("{:.0} %", row.timing.spread * 100.0)),
            ("tokens/s", &|row| format!("{:.0}", row.tokens_per_s())),
            ("× first", &|row| {
                first(row).map_or(String::new(), |f| format!("{:.2}×", row.tokens_per_s() / f))
            }),
            ("TFLOP/s", &|row| rate(row, 0)),
            ("in products", &|row| rate(row, 1)),
            ("in attention", &|row| rate(row, 2)),
            ("products", &|row| share(row, 0)),
            ("attention", &|row| share(row, 1)),
            ("coding", &|row| share(row, 2)),
            ("rest", &|row| share(row, 3)),
            ("cache", &|row| progress::bytes(row.cache_bytes)),
        ],
    );
    println!("{table}");
    if let Some(row) = rows.first() {
        println!("\npeak, a large BF16 product on this device: {:.3} TFLOP/s", row.peak);
    }
    println!(
        "TFLOP/s (share of the peak): of the whole prompt, and of products and attention in the time they take alone. Shares: of one prompt \
         whose operations were timed one by one. Coding: QK-norm, RoPE, rotation, storing, quantization."
    );
    if let Some(peak) = peak_rss() {
        println!("peak resident memory of this process, all rows above: {}", progress::bytes(peak));
    }
}

/// High-water mark of resident memory, where the system tells it.
fn peak_rss() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib: usize = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix("kB")?.trim().parse().ok())?;
    Some(kib * 1024)
}
