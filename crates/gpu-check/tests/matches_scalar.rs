//! Every kernel against the scalar reference, on GPU 0. Without a GPU each test says that it was
//! skipped (`cargo test -p oscar-gpu-check -- --nocapture` shows it).

use oscar_gpu_check::{Extent, Part, check, open};
use oscar_kernels_cuda::CudaError;
use std::sync::{Mutex, PoisonError};

/// Runs one part, alone on the GPU.
fn run(part: Part) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = match open() {
        Ok(gpu) => gpu,
        Err(error @ (CudaError::NoDriver | CudaError::NoDevice)) => {
            eprintln!("skipped: the check of {} needs a GPU: {error}", part.name());
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let report = check(&gpu, &[part], Extent::WHOLE, |_| {});
    assert!(!report.findings.is_empty(), "nothing was checked");
    let failures: Vec<_> = report.failures().collect();
    assert!(failures.is_empty(), "{failures:#?}");
}

/// A test for each part, and the list of these parts.
macro_rules! parts {
    ($($test:ident: $part:ident,)*) => {
        $(#[test]
        fn $test() {
            run(Part::$part);
        })*

        const TESTED: &[Part] = &[$(Part::$part),*];
    };
}

parts! {
    embed_matches_scalar: Embed,
    rms_norm_matches_scalar: Norm,
    swiglu_matches_scalar: Gate,
    gemm_matches_scalar: Gemm,
    fp8_products_matches_scalar: Fp8Products,
    experts_matches_scalar: Experts,
    gram_matches_scalar: Gram,
    append_matches_scalar: Append,
    fused_append_matches_scalar: FusedAppend,
    demote_matches_scalar: Demote,
    decode_attention_matches_scalar: Decode,
    prefill_attention_matches_scalar: Prefill,
    prefill_attention_by_mma_matches_scalar: PrefillMma,
    simple_attention_matches_scalar: Simple,
    attention_over_dequantized_history_matches_scalar: Dequantized,
    sliding_attention_matches_scalar: Sliding,
    attention_over_codes_in_the_window_matches_scalar: Approximate,
    copy_blocks_matches_scalar: Pages,
    sum_ranks_matches_scalar: Ranks,
    pick_matches_scalar: Pick,
    views_matches_scalar: Views,
    scores_matches_scalar: Scores,
    recode_matches_scalar: Recode,
    divergence_matches_scalar: Divergence,
    model_matches_scalar: Model,
    families_matches_scalar: Families,
    experts_on_the_cpu_matches_scalar: Hybrid,
}

#[test]
fn every_part_has_a_test_and_a_name() {
    assert_eq!(TESTED, Part::all());
    for part in Part::all() {
        assert_eq!(part.name().parse(), Ok(part));
    }
    let unknown = "generic".parse::<Part>().unwrap_err();
    assert!(unknown.contains("decode, prefill, prefill-mma, simple"), "{unknown}");
}
