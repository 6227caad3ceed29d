//! Mixtures of experts of the backend: the router, and how activations go into the products.

use super::{CpuBackend, CpuRows, Mode, shape_error};
use crate::experts::{Activations, Expert, ExpertScratch, ExpertStep, ExpertTable, Slots};
use crate::gemm::{CodedMatrix, ExpertMatrix};
use crate::{Epilogue, GemmScratch, PackedMatrix, Precision, Weights};
use oscar_backend::{ExpertId, ExpertsShape, HostMatrix, HostValues, Result, RouterRule};

/// The experts of one layer and their router.
pub struct CpuExperts {
    hidden: usize,
    width: usize,
    shared_width: usize,
    rule: RouterRule,
    /// In f32: a rounded logit could choose another expert.
    router: PackedMatrix,
    correction: Option<Vec<f32>>,
    /// The shared expert, if any, comes last. `None` until it is loaded.
    experts: Vec<Option<Expert>>,
    routed: usize,
}

/// Buffers of a mixture of experts, kept from step to step.
#[derive(Default)]
pub(super) struct ExpertsScratch {
    normed: Vec<f32>,
    logits: Vec<f32>,
    gemm: GemmScratch,
    step: ExpertScratch,
}

impl CpuExperts {
    /// Bytes of one routed expert, and of the router and the shared expert.
    pub(super) fn bytes(&self) -> (usize, usize) {
        let bytes = |id: usize| self.experts.get(id).and_then(Option::as_ref).map_or(0, Expert::bytes);
        (bytes(0), self.router.bytes() + bytes(self.routed))
    }
}

/// Experts of which all are loaded.
struct Loaded<'a>(Vec<&'a Expert>);

impl ExpertTable for Loaded<'_> {
    fn expert(&self, id: usize) -> &Expert {
        self.0[id]
    }
}

impl CpuBackend {
    pub(super) fn make_experts(&self, shape: &ExpertsShape<'_>) -> Result<CpuExperts> {
        shape.check()?;
        let router = PackedMatrix::pack(
            &self.pool,
            Weights::F32(shape.router),
            shape.experts,
            shape.hidden,
            Precision::F32,
        )
        .map_err(|error| shape_error("a router", error))?;
        let total = shape.experts + usize::from(shape.shared_width > 0);
        Ok(CpuExperts {
            hidden: shape.hidden,
            width: shape.width,
            shared_width: shape.shared_width,
            rule: shape.rule,
            router,
            correction: shape.correction.map(<[f32]>::to_vec),
            experts: (0..total).map(|_| None).collect(),
            routed: shape.experts,
        })
    }

    pub(super) fn put_expert(
        &self,
        experts: &mut CpuExperts,
        id: ExpertId,
        parts: [HostMatrix<'_>; 3],
    ) -> Result<()> {
        let (index, width) = match id {
            ExpertId::Routed(index) if index < experts.routed => (index, experts.width),
            ExpertId::Shared if experts.shared_width > 0 => (experts.routed, experts.shared_width),
            _ => return Err(shape_error("an expert", format!("{id:?} of {}", experts.routed))),
        };
        let wanted = [[width, experts.hidden], [width, experts.hidden], [experts.hidden, width]];
        let shapes = parts.each_ref().map(|part| [part.outputs, part.inputs]);
        if shapes != wanted || parts.iter().any(|part| part.bias.is_some()) {
            return Err(shape_error("an expert", format!("{shapes:?} for {wanted:?}, without biases")));
        }
        let [gate, up, down] = parts.map(|part| self.expert_matrix(part));
        experts.experts[index] = Some(Expert { gate: gate?, up: up?, down: down? });
        Ok(())
    }

    fn expert_matrix(&self, matrix: HostMatrix<'_>) -> Result<ExpertMatrix> {
        let HostMatrix { outputs, inputs, values, .. } = matrix;
        let weights = match values {
            // Codes stay codes unless everything is f32.
            HostValues::Fp8(v) if self.mode != Mode::F32 => {
                let coded = CodedMatrix::pack(&self.pool, v, outputs, inputs);
                return coded.map(ExpertMatrix::Coded).map_err(|error| shape_error("an expert", error));
            }
            HostValues::Fp8(v) => Weights::Fp8(v),
            HostValues::Bf16(v) => Weights::Bf16(v),
            HostValues::F16(v) => Weights::F16(v),
            HostValues::F32(v) => Weights::F32(v),
        };
        PackedMatrix::pack(&self.pool, weights, outputs, inputs, self.mode.weights())
            .map(ExpertMatrix::Packed)
            .map_err(|error| shape_error("an expert", error))
    }

    pub(super) fn run_experts(
        &self,
        scratch: &mut ExpertsScratch,
        experts: &CpuExperts,
        (norm, eps): (&Vec<f32>, f32),
        x: &mut CpuRows,
    ) -> Result<()> {
        let hidden = experts.hidden;
        if x.width != hidden || norm.len() != hidden {
            let detail = format!("rows of {} and a norm of {} for {hidden}", x.width, norm.len());
            return Err(shape_error("a mixture of experts", detail));
        }
        let Some(loaded) = experts.experts.iter().map(Option::as_ref).collect::<Option<Vec<_>>>() else {
            return Err(shape_error("a mixture of experts", "an expert was never loaded"));
        };
        let ExpertsScratch { normed, logits, gemm, step } = scratch;
        let rows = x.count();
        normed.resize(x.values.len(), 0.0);
        self.kernels.rms_norm(&self.pool, &x.values, norm, eps, normed);
        logits.resize(rows * experts.routed, 0.0);
        experts.router.linear(self.kernels, &self.pool, normed, rows, logits, Epilogue::default(), gemm);
        let slots = Slots::route(
            &self.pool,
            &experts.rule,
            logits,
            experts.routed,
            experts.correction.as_deref(),
            experts.shared_width > 0,
        );
        let activations = match self.mode {
            Mode::Bf16 => Activations::SplitBf16,
            Mode::Fast => Activations::Bf16,
            Mode::F32 => Activations::F32,
        };
        let run = ExpertStep {
            kernels: self.kernels,
            pool: &self.pool,
            activations,
            experts: &Loaded(loaded),
            slots: &slots,
        };
        run.run(hidden, normed, &mut x.values, step);
        Ok(())
    }
}
