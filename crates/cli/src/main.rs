//! The `oscar` command: parses the command line, calls one command, turns its error into an exit
//! status.
//!
//! Exit status 0: done; 1: failed; 2: wrong usage (clap's own). With `--json`, standard output
//! carries one JSON object on each line and nothing else; progress and logs go to standard error.

mod cache;
mod commands;
mod cpu_experts;
mod device;
mod episodes;
mod host_memory;
mod hub;
mod options;
mod parallel;
mod progress;
mod rotations;
mod served;
mod sizing;
mod store;
mod table;
#[cfg(debug_assertions)]
mod test_fault;
mod transfer;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "oscar",
    version,
    about = "Long-context language models on a 2-bit key-value cache",
    max_term_width = 110
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the OpenAI-compatible API and a web page; without flags, the embedded model
    Serve(Box<commands::serve::Flags>),
    /// Answer a file of requests in the format of OpenAI's batch API; continues where it stopped. Exit status 1 if
    /// a request failed
    Batch(Box<commands::batch::Args>),
    /// Describe this machine: kernels, model checksum, size of each KV format
    Doctor(commands::doctor::Args),
    /// Answer a prompt, a chat file, or hold a conversation
    Run(commands::run::Args),
    /// Show which contexts and batches fit in a given memory, for BF16 and other formats
    Plan(Box<commands::plan::Args>),
    /// Measure kernels and whole models on this machine
    #[command(subcommand)]
    Bench(Box<commands::bench::What>),
    /// Make the rotations (and widths) of a model's cache from a little text
    Calibrate(commands::calibrate::Args),
    /// Measure the cost of KV formats in predictions and answers
    #[command(subcommand)]
    Eval(commands::eval::What),
    /// Compare KV formats on one model: quality, memory and speed, with a report
    Compare(Box<commands::compare::Args>),
    /// Compare every CUDA kernel with the scalar reference and a whole model with the CPU; fails on a difference
    GpuCheck(commands::gpu_check::Args),
    /// Compile the CUDA kernels ahead of time, for machines without NVRTC or for a faster first
    /// start
    Kernels(commands::kernels::Args),
    /// Put a server under hostile load for a while and say whether it left a trace
    #[cfg(unix)]
    Soak(commands::soak::Args),
    /// Read, convert and verify official RotationZoo files
    #[command(subcommand)]
    Zoo(commands::zoo::What),
    /// List, verify and prune a directory of stored KV pages (`oscar serve --store`)
    #[command(subcommand)]
    Store(commands::store::What),
    /// Print completions for a shell
    Completions(commands::manual::CompletionsArgs),
    /// Write the man pages
    Man(commands::manual::ManArgs),
}

/// `println!` panics if standard output cannot be written. A reader that closed the pipe early
/// (`oscar … | head`) is no failure; anything else, such as a full disk, is one.
fn report_failed_output() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let message = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        if message.starts_with("failed printing to stdout") {
            if message.contains("Broken pipe") {
                std::process::exit(0);
            }
            progress::note!("error: {message}");
            std::process::exit(1);
        }
        default(info);
    }));
}

fn main() -> ExitCode {
    report_failed_output();
    let result = match Args::parse().command {
        Command::Serve(flags) => commands::serve::run(&flags),
        Command::Batch(args) => commands::batch::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Run(args) => commands::run::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Bench(what) => commands::bench::run(&what),
        Command::Calibrate(args) => commands::calibrate::run(&args),
        Command::Eval(what) => commands::eval::run(&what),
        Command::Compare(args) => commands::compare::run(&args),
        Command::GpuCheck(args) => commands::gpu_check::run(&args),
        Command::Kernels(args) => commands::kernels::run(&args),
        #[cfg(unix)]
        Command::Soak(args) => commands::soak::run(&args),
        Command::Zoo(what) => commands::zoo::run(&what),
        Command::Store(what) => commands::store::run(&what),
        Command::Completions(args) => commands::manual::completions(&args, Args::command()),
        Command::Man(args) => commands::manual::man(&args, Args::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::note!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
