//! What calibration and benchmarks ask of the device.

use crate::{HybridBackend, HybridExperts, HybridStep};
use oscar_backend::{
    Benchmarks, Calibrates, Divergence, ExpertId, ExpertsShape, HostRows, Result, StepTimes, WeightFormat,
};
use oscar_codec::FullPageId;
use std::ops::Range;

impl<D: HostRows + Calibrates> Calibrates for HybridBackend<D> {
    fn recode(
        &self,
        layer: usize,
        positions: Range<usize>,
        from: &[Option<FullPageId>],
        to: &[Option<FullPageId>],
        widths: &[(u32, u32)],
        pool: &mut D::Pool,
    ) -> Result<()> {
        self.device.recode(layer, positions, from, to, widths, pool)
    }

    fn divergences(
        &self,
        step: &mut HybridStep<'_, D>,
        exact: &D::Rows,
        other: &D::Rows,
        out: &mut Vec<Divergence>,
    ) -> Result<()> {
        self.device.divergences(&mut step.device, exact, other, out)
    }
}

impl<D: HostRows + Benchmarks> Benchmarks for HybridBackend<D> {
    fn random_matrix(
        &self,
        format: WeightFormat,
        outputs: usize,
        inputs: usize,
        seed: u64,
    ) -> Result<D::Matrix> {
        self.device.random_matrix(format, outputs, inputs, seed)
    }

    fn random_experts(&self, shape: &ExpertsShape<'_>, ids: &[ExpertId], seed: u64) -> Result<Self::Experts> {
        Ok(match self.takes(shape.following)? {
            Some(host) => HybridExperts::Host(Box::new(host.cpu.random_experts(shape, ids, seed)?)),
            None => HybridExperts::Device(self.device.random_experts(shape, ids, seed)?),
        })
    }

    fn randomize(&self, pool: &mut D::Pool, full: usize, coded: usize) -> Result<bool> {
        self.device.randomize(pool, full, coded)
    }

    fn time_steps(&self, on: bool) -> Result<Option<StepTimes>> {
        self.device.time_steps(on)
    }
}
