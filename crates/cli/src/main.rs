//! The `oscar` command: parses what the user typed, calls one command, turns its error into an exit status.
//!
//! Exit status 0: done; 1: failed; 2: wrong usage (clap's own). With `--json`, standard output carries one JSON
//! object a line and nothing else; progress and logs go to standard error.

mod commands;
mod options;
mod progress;
mod table;

use clap::{Parser, Subcommand};
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
    /// What this machine has, which kernels were chosen, whether the model is intact, what each KV format costs
    Doctor(commands::doctor::Args),
    /// Answer a prompt, a chat file, or hold a conversation
    Run(commands::run::Args),
    /// Which contexts and batches fit in a given memory, BF16 beside each format
    Plan(commands::plan::Args),
    /// Measure kernels and whole models on this machine
    Bench(commands::bench::Args),
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Run(args) => commands::run::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
