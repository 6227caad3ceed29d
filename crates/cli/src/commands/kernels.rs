//! `oscar kernels`: the CUDA kernels compiled ahead of time, for machines that have a GPU and no compiler.

use crate::{progress, table};
use anyhow::{Context, Result, bail};
use oscar_kernels_cuda::compile::Compiler;
use oscar_kernels_cuda::images::{Architecture, precompile};
use oscar_kernels_cuda::sources;
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// GPU architectures to compile for, e.g. sm_90 for the H100 and H200; if absent, all of sm_80, sm_86, sm_89, sm_90,
    /// sm_100 and sm_120 that the compiler knows
    #[arg(long, value_name = "ARCH[,ARCH…]", value_delimiter = ',')]
    arch: Vec<Architecture>,
    /// Folder for the compiled kernels; set `OSCAR_CUDA_KERNELS` to it where they are used
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let compiler = Compiler::open()?;
    let (major, minor) = compiler.version();
    let known = |arch: &Architecture| compiler.knows(arch.capability);
    if let Some(arch) = args.arch.iter().find(|arch| !known(arch)) {
        bail!("--arch {arch}: NVRTC {major}.{minor} makes no code for it; install an NVRTC that does");
    }
    let (usual, unknown): (Vec<_>, Vec<_>) = Architecture::usual().partition(known);
    if args.arch.is_empty() && !unknown.is_empty() {
        let names: Vec<String> = unknown.iter().map(Architecture::to_string).collect();
        eprintln!("left out, because NVRTC {major}.{minor} makes no code for it: {}", names.join(", "));
    }
    let wanted = if args.arch.is_empty() { &usual } else { &args.arch };
    std::fs::create_dir_all(&args.out).with_context(|| format!("{}", args.out.display()))?;
    let mut lines = Vec::new();
    for &arch in wanted {
        let began = Instant::now();
        let bar =
            progress::bar("kernels", sources::variants(arch.capability, arch.shared_memory).len() as u64);
        let (images, bytes) = precompile(&compiler, arch, &args.out, || bar.inc(1))?;
        bar.finish_and_clear();
        let seconds = began.elapsed().as_secs_f64();
        if args.json {
            println!(
                "{}",
                json!({"arch": arch.to_string(), "images": images, "bytes": bytes, "seconds": seconds})
            );
        }
        let cells = [arch.to_string(), images.to_string(), progress::bytes(bytes), format!("{seconds:.0} s")];
        lines.push(cells.to_vec());
    }
    if !args.json {
        println!("{}", table::render(&["arch", "images", "size", "compiled in"], &lines));
        println!("OSCAR_CUDA_KERNELS={} makes this version of oscar use them.", args.out.display());
    }
    Ok(())
}
