//! `oscar completions` and `oscar man`: written from the flags themselves.

use anyhow::{Context, Result};
use clap_complete::Shell;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct CompletionsArgs {
    /// Shell whose completions are printed
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(clap::Args)]
pub struct ManArgs {
    /// Directory for the pages, one for each command
    #[arg(value_name = "DIR")]
    out: PathBuf,
}

pub fn completions(args: &CompletionsArgs, mut command: clap::Command) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "oscar", &mut text);
    print!("{}", String::from_utf8_lossy(&text));
    Ok(())
}

pub fn man(args: &ManArgs, command: clap::Command) -> Result<()> {
    let place = || args.out.display().to_string();
    std::fs::create_dir_all(&args.out).with_context(place)?;
    clap_mangen::generate_to(command, &args.out).with_context(place)
}
