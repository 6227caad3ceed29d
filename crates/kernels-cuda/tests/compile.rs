//! Every kernel compiles for every architecture we support, where NVRTC is at hand.

use oscar_kernels_cuda::compile::Compiler;
use oscar_kernels_cuda::sources;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Skipped, aloud, where libnvrtc cannot be loaded, unless `OSCAR_NVRTC` says where it is (as CI does).
#[test]
fn all_kernels_compile_for_all_architectures() {
    let compiler = match Compiler::open() {
        Ok(compiler) => compiler,
        Err(error) if std::env::var_os("OSCAR_NVRTC").is_none() => {
            eprintln!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    // Each architecture with the shared memory that its GPUs give a block.
    let targets = [("sm_80", 163 << 10), ("sm_89", 99 << 10), ("sm_90", 227 << 10), ("sm_100", 227 << 10)];
    let mut jobs: Vec<_> = targets
        .into_iter()
        .flat_map(|(arch, shared)| sources::variants(shared).into_iter().map(move |(s, d)| (arch, s, d)))
        .collect();
    // As racecheck gets to see it.
    let watched =
        jobs.iter().find(|(arch, source, _)| *arch == "sm_90" && source.file == "attention_decode.cu");
    let (arch, source, mut defines) = watched.cloned().expect("decode attention has variants");
    defines.push(("RACECHECK", 1));
    jobs.push((arch, source, defines));
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((arch, source, defines)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match compiler.compile(source, defines, arch) {
                        Ok(image) => assert!(!image.is_empty()),
                        Err(error) => failures.lock().unwrap().push(format!("{defines:?}: {error}")),
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
