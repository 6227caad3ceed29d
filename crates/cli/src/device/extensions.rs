//! What calibration and benchmarks ask of the chosen device.

use super::{AnyBackend, AnyStep, On, Rows};
use oscar_backend::{
    Benchmarks, Calibrates, Divergence, ExpertId, ExpertsShape, Result as BackendResult, StepTimes,
    WeightFormat,
};
use oscar_codec::FullPageId;
use std::ops::Range;

impl Calibrates for AnyBackend {
    fn recode(
        &self,
        layer: usize,
        positions: Range<usize>,
        from: &[Option<FullPageId>],
        to: &[Option<FullPageId>],
        widths: &[(u32, u32)],
        pool: &mut Self::Pool,
    ) -> BackendResult<()> {
        on_device!(Self, self, recode(layer, positions, from, to, widths, &mut pool))
    }

    fn divergences(
        &self,
        step: &mut AnyStep<'_>,
        exact: &Rows,
        other: &Rows,
        out: &mut Vec<Divergence>,
    ) -> BackendResult<()> {
        match (self, step) {
            (Self::Cpu(cpu), AnyStep::Cpu(step)) => cpu.divergences(step, exact.cpu(), other.cpu(), out),
            (Self::Cuda(cuda), AnyStep::Cuda(step)) => {
                cuda.divergences(step, exact.cuda(), other.cuda(), out)
            }
            _ => unreachable!("a step runs on the device that made it"),
        }
    }
}

impl Benchmarks for AnyBackend {
    fn random_matrix(
        &self,
        format: WeightFormat,
        outputs: usize,
        inputs: usize,
        seed: u64,
    ) -> BackendResult<Self::Matrix> {
        made_on!(self, random_matrix(format, outputs, inputs, seed))
    }

    fn random_experts(
        &self,
        shape: &ExpertsShape<'_>,
        ids: &[ExpertId],
        seed: u64,
    ) -> BackendResult<Self::Experts> {
        made_on!(self, random_experts(shape, ids, seed))
    }

    fn randomize(&self, pool: &mut Self::Pool, full: usize, coded: usize) -> BackendResult<bool> {
        on_device!(Self, self, randomize(&mut pool, full, coded))
    }

    fn time_steps(&self, on: bool) -> BackendResult<Option<StepTimes>> {
        match self {
            Self::Cpu(cpu) => cpu.time_steps(on),
            Self::Cuda(cuda) => cuda.time_steps(on),
        }
    }
}
