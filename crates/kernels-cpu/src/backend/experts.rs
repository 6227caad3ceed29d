//! Mixtures of experts of the backend: the router, and how activations go into the products.

use super::{CpuBackend, CpuRows, Mode, shape_error};
use crate::experts::{Activations, Expert, ExpertScratch, ExpertStep, ExpertTable, Slots};
use crate::gemm::{CodedMatrix, ExpertMatrix, MxMatrix};
use crate::{Epilogue, GemmScratch, PackedMatrix, Precision, Weights};
use oscar_backend::{ExpertId, ExpertsShape, Gate, HostMatrix, HostValues, Result, RouterRule};

/// The experts of one layer and their router.
pub struct CpuExperts {
    hidden: usize,
    width: usize,
    shared_width: usize,
    rule: RouterRule,
    gate: Gate,
    /// In f32: a rounded logit could choose another expert.
    router: PackedMatrix,
    correction: Option<Vec<f32>>,
    router_bias: Option<Vec<f32>>,
    /// Weights of the gate on the shared expert.
    shared_gate: Option<Vec<f32>>,
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

/// `σ(gate · x)` for each row.
fn shared_weights(rows: &[f32], gate: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(gate).map(|(x, g)| x * g).sum::<f32>();
    rows.chunks_exact(gate.len()).map(|row| 1.0 / (1.0 + (-dot(row)).exp())).collect()
}

/// The experts of a layer, all loaded.
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
            gate: shape.gate,
            router,
            correction: shape.correction.map(<[f32]>::to_vec),
            router_bias: shape.router_bias.map(<[f32]>::to_vec),
            shared_gate: shape.shared_gate.map(<[f32]>::to_vec),
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
        let biased = |part: &HostMatrix<'_>| part.bias.is_none_or(|bias| bias.len() == part.outputs);
        if shapes != wanted || !parts.iter().all(biased) {
            return Err(shape_error("an expert", format!("{shapes:?} or its biases for {wanted:?}")));
        }
        let biases = parts.each_ref().map(|part| part.bias.map(<[f32]>::to_vec));
        let [gate, up, down] = parts.map(|part| self.expert_matrix(part));
        experts.experts[index] = Some(Expert { gate: gate?, up: up?, down: down?, biases });
        Ok(())
    }

    fn expert_matrix(&self, matrix: HostMatrix<'_>) -> Result<ExpertMatrix> {
        let HostMatrix { outputs, inputs, values, .. } = matrix;
        // Codes stay codes unless everything is f32.
        let coded = match values {
            HostValues::Fp8(v) if self.mode != Mode::F32 => {
                CodedMatrix::pack(&self.pool, v, outputs, inputs).map(ExpertMatrix::Coded)
            }
            HostValues::Mxfp4(v) if self.mode != Mode::F32 => {
                MxMatrix::pack(&self.pool, v, outputs, inputs).map(ExpertMatrix::Mxfp4)
            }
            _ => return self.pack("an expert", &matrix).map(ExpertMatrix::Packed),
        };
        coded.map_err(|error| shape_error("an expert", error))
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
        let epilogue = Epilogue { bias: experts.router_bias.as_deref(), accumulate: false };
        experts.router.linear(self.kernels, &self.pool, normed, rows, logits, epilogue, gemm);
        let shared = (experts.shared_width > 0).then(|| match &experts.shared_gate {
            None => vec![1.0; rows],
            Some(gate) => shared_weights(normed, gate),
        });
        let slots = Slots::route(
            &self.pool,
            &experts.rule,
            logits,
            experts.routed,
            experts.correction.as_deref(),
            shared.as_deref(),
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
            gate: experts.gate,
            experts: &Loaded(loaded),
            slots: &slots,
        };
        run.run(hidden, normed, &mut x.values, step);
        Ok(())
    }
}
