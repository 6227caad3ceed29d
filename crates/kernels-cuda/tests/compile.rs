//! Every kernel compiles for every supported architecture (if NVRTC is installed), and its image is
//! found again.

use oscar_kernels_cuda::compile::Compiler;
use oscar_kernels_cuda::images::{Architecture, Images, precompile};
use oscar_kernels_cuda::sources;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Skipped, aloud, where libnvrtc cannot be loaded, unless `OSCAR_NVRTC` says where it is (as CI
/// does).
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
    let folder = tempfile::tempdir().unwrap();
    let images = Images::Precompiled(folder.path().to_owned());
    for arch in Architecture::usual() {
        let (source, defines) = &sources::variants(arch.capability, arch.shared_memory)[0];
        let missing = images.image(source, defines, arch.capability).unwrap_err().to_string();
        assert!(missing.contains(&format!("oscar kernels --arch {arch}")), "{missing}");
        assert!(images.check(arch.capability, arch.shared_memory).is_err());
    }
    for arch in Architecture::usual() {
        let variants = sources::variants(arch.capability, arch.shared_memory);
        let done = AtomicUsize::new(0);
        let count = || {
            done.fetch_add(1, Ordering::Relaxed);
        };
        let (made, bytes) = precompile(&compiler, arch, folder.path(), count).unwrap();
        assert_eq!((made, done.into_inner()), (variants.len(), variants.len()));
        let bytes_of = |(source, defines)| images.image(source, defines, arch.capability).unwrap().len();
        assert_eq!(variants.iter().map(|(s, d)| (*s, d)).map(bytes_of).sum::<usize>(), bytes);
        images.check(arch.capability, arch.shared_memory).unwrap();
    }
    // A GPU runs the code of an older one of its generation, not of another generation.
    for (capability, kibibytes) in [(87, 163), (103, 227), (121, 99)] {
        images.check(capability, kibibytes << 10).unwrap();
    }
    assert!(images.check(75, 99 << 10).is_err() && images.check(110, 227 << 10).is_err());
    // An incomplete image is reported before anything runs.
    let mut all = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let damaged = all.find(|path| path.to_string_lossy().contains("pick-sm_90-")).unwrap();
    std::fs::write(&damaged, b"").unwrap();
    let missed = images.check(90, 227 << 10).unwrap_err().to_string();
    assert!(missed.contains("pick.cu") && missed.contains("--arch sm_90"), "{missed}");
    // As racecheck gets to see it.
    let decode = sources::variants(90, 227 << 10).into_iter().find(|(s, _)| s.file == "attention_decode.cu");
    let (source, mut defines) = decode.expect("decode attention has variants");
    defines.push(("RACECHECK", 1));
    assert!(!compiler.compile(source, &defines, "sm_90").unwrap().is_empty());
}

#[test]
fn architectures_are_named_as_the_compiler_names_them() {
    for arch in Architecture::ALL {
        assert_eq!(arch.to_string().parse(), Ok(arch));
    }
    let unknown = "sm_70".parse::<Architecture>().unwrap_err();
    assert!(unknown.contains("sm_80") && unknown.contains("sm_120"), "{unknown}");
}
