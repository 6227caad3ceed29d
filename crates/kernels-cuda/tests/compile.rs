//! Every kernel compiles for every architecture we support, where NVRTC is at hand.

use oscar_kernels_cuda::compile::Compiler;
use oscar_kernels_cuda::sources;

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
    let mut failures = Vec::new();
    for arch in ["sm_80", "sm_89", "sm_90", "sm_100"] {
        for (source, defines) in sources::variants() {
            match compiler.compile(source, &defines, arch) {
                Ok(image) => assert!(!image.is_empty()),
                Err(error) => failures.push(error.to_string()),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
