//! Kernels that have not passed their checks on a device. They run only where somebody asks for them.

use oscar_backend::Feature;

/// Why rows are not evicted.
pub(super) const VIEWS: &str = "eviction is not released on GPUs, because `oscar gpu-check --only views` has not run on \
     one: leave --kv-budget out, use --device cpu, or set OSCAR_CUDA_VIEWS=on";

/// The parts of Gemma 3 and gpt-oss.
pub(super) const FAMILIES: [Feature; 6] = [
    Feature::SlidingWindow,
    Feature::AttentionSinks,
    Feature::ResultNorm,
    Feature::EmbeddingScale,
    Feature::OtherGates,
    Feature::ExpertBiases,
];

/// Why no weights of rows are added up.
pub(super) const SCORES: &str = "attention weights of single rows are not released on GPUs, because `oscar gpu-check --only \
     scores` has not run on one: use keydiff-post, keydiff or recent, use --device cpu, or set OSCAR_CUDA_SCORES=on";

/// Which of them may run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unreleased {
    /// Mixtures of experts: single layers passed (`oscar gpu-check --only experts`), whole models
    /// (`--only families`) have not been checked against the present bounds.
    pub experts: bool,
    /// Views (`--only views`).
    pub views: bool,
    /// What Gemma 3 and gpt-oss need ([`FAMILIES`]; `--only sliding` and `--only families`).
    pub families: bool,
    /// Attention weights of single rows (`--only scores`).
    pub scores: bool,
}

impl Unreleased {
    pub const ALL: Self = Self { experts: true, views: true, families: true, scores: true };

    /// What the environment asks for.
    pub fn from_environment() -> Self {
        let on = |name| std::env::var(name).as_deref() == Ok("on");
        Self {
            experts: on("OSCAR_CUDA_EXPERTS"),
            views: on("OSCAR_CUDA_VIEWS"),
            families: on("OSCAR_CUDA_FAMILIES"),
            scores: on("OSCAR_CUDA_SCORES"),
        }
    }
}
