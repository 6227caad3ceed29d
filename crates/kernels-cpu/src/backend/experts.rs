//! Mixtures of experts of the backend: the router, and how activations go into the products.

use super::{CpuBackend, Mode, shape_error};
use crate::experts::{Activations, Expert, ExpertScratch, ExpertStep, ExpertTable, Slots};
use crate::gemm::{CodedMatrix, ExpertMatrix, MxMatrix};
use crate::{Epilogue, GemmScratch, PackedMatrix, Precision, Weights};
use oscar_backend::{ExpertId, ExpertsShape, Gate, HeldExperts, HostMatrix, HostValues, Result, RouterRule};
use std::sync::PoisonError;

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
    /// The shared expert, if any, comes last. `None` until it is loaded, and if another rank has it.
    experts: Vec<Option<Expert>>,
    routed: usize,
    held: HeldExperts,
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
    /// Width of the rows.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// The index and the width of an expert.
    fn place(&self, id: ExpertId) -> Result<(usize, usize)> {
        match id {
            ExpertId::Routed(index) if index < self.routed => Ok((index, self.width)),
            ExpertId::Shared if self.shared_width > 0 => Ok((self.routed, self.shared_width)),
            _ => Err(shape_error("an expert", format!("{id:?} of {}", self.routed))),
        }
    }

    /// Stores an expert, whose matrices have the shapes of this layer.
    pub(super) fn put(
        &mut self,
        id: ExpertId,
        [gate, up, down]: [ExpertMatrix; 3],
        biases: [Option<Vec<f32>>; 3],
    ) -> Result<()> {
        let (index, _) = self.place(id)?;
        self.experts[index] = Some(Expert { gate, up, down, biases });
        Ok(())
    }

    /// Bytes of one routed expert, and of the router and the shared expert.
    pub(super) fn bytes(&self) -> (usize, usize) {
        let bytes = |id: usize| self.experts.get(id).and_then(Option::as_ref).map_or(0, Expert::bytes);
        (bytes(self.held.routed.start), self.router.bytes() + bytes(self.routed))
    }
}

/// `σ(gate · x)` for each row.
fn shared_weights(rows: &[f32], gate: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(gate).map(|(x, g)| x * g).sum::<f32>();
    rows.chunks_exact(gate.len()).map(|row| 1.0 / (1.0 + (-dot(row)).exp())).collect()
}

/// The experts of a layer that this rank holds, all loaded, from the first.
struct Loaded<'a> {
    experts: Vec<&'a Expert>,
    first: usize,
    routed: usize,
}

impl ExpertTable for Loaded<'_> {
    fn expert(&self, id: usize) -> &Expert {
        // The shared one lies behind the held ones.
        self.experts[if id == self.routed { self.experts.len() - 1 } else { id - self.first }]
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
            held: HeldExperts::of(self.communicator.as_deref(), shape.experts),
        })
    }

    pub(super) fn put_expert(
        &self,
        experts: &mut CpuExperts,
        id: ExpertId,
        parts: [HostMatrix<'_>; 3],
    ) -> Result<()> {
        let (_, width) = experts.place(id)?;
        let wanted = [[width, experts.hidden], [width, experts.hidden], [experts.hidden, width]];
        let shapes = parts.each_ref().map(|part| [part.outputs, part.inputs]);
        let biased = |part: &HostMatrix<'_>| part.bias.is_none_or(|bias| bias.len() == part.outputs);
        if shapes != wanted || !parts.iter().all(biased) {
            return Err(shape_error("an expert", format!("{shapes:?} or its biases for {wanted:?}")));
        }
        let biases = parts.each_ref().map(|part| part.bias.map(<[f32]>::to_vec));
        let [gate, up, down] = parts.map(|part| self.expert_matrix(part));
        experts.put(id, [gate?, up?, down?], biases)
    }

    pub(super) fn expert_matrix(&self, matrix: HostMatrix<'_>) -> Result<ExpertMatrix> {
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

    /// [`Step::experts`](oscar_backend::Step::experts) outside of a step: `x` are rows on the host.
    pub fn add_experts(&self, experts: &CpuExperts, norm: (&[f32], f32), x: &mut [f32]) -> Result<()> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        self.run_experts(&mut scratch.experts, experts, norm, x)
    }

    pub(super) fn run_experts(
        &self,
        scratch: &mut ExpertsScratch,
        experts: &CpuExperts,
        (norm, eps): (&[f32], f32),
        x: &mut [f32],
    ) -> Result<()> {
        let hidden = experts.hidden;
        if !x.len().is_multiple_of(hidden) || norm.len() != hidden {
            let detail = format!("{} values and a norm of {} for rows of {hidden}", x.len(), norm.len());
            return Err(shape_error("a mixture of experts", detail));
        }
        let HeldExperts { routed: held, shared } = &experts.held;
        let shared = *shared && experts.shared_width > 0;
        let own = experts.experts[held.clone()]
            .iter()
            .chain(&experts.experts[experts.routed..][..usize::from(shared)]);
        let Some(loaded) = own.map(Option::as_ref).collect::<Option<Vec<_>>>() else {
            return Err(shape_error("a mixture of experts", "an expert was never loaded"));
        };
        let ExpertsScratch { normed, logits, gemm, step } = scratch;
        let rows = x.len() / hidden;
        normed.resize(x.len(), 0.0);
        self.kernels.rms_norm(&self.pool, x, norm, eps, normed);
        logits.resize(rows * experts.routed, 0.0);
        let epilogue = Epilogue { bias: experts.router_bias.as_deref(), accumulate: false };
        experts.router.linear(self.kernels, &self.pool, normed, rows, logits, epilogue, gemm);
        let shared = shared.then(|| match &experts.shared_gate {
            None => vec![1.0; rows],
            Some(gate) => shared_weights(normed, gate),
        });
        let slots = Slots::route(
            &self.pool,
            &experts.rule,
            logits,
            experts.routed,
            experts.correction.as_deref(),
            held.clone(),
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
            experts: &Loaded { experts: loaded, first: held.start, routed: experts.routed },
            slots: &slots,
        };
        if self.communicator.as_ref().is_some_and(|c| c.rank() > 0) {
            // The first rank has the residual.
            x.fill(0.0);
        }
        run.run(hidden, normed, x, step);
        Ok(())
    }
}
