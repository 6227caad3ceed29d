//! Construction and facts: the device's, except for experts.

use crate::{HybridBackend, HybridExperts, HybridStep, HybridVector};
use oscar_backend::{
    AttentionKernels, Backend, BackendError, BlockId, Communicator, ExpertId, ExpertsShape, Feature,
    HeadHistory, HeadShape, HistoryRows, HostMatrix, HostRows, PrefillWave, Result, RowEviction,
    SequenceRows, StepMemory, StepSize, View,
};
use oscar_codec::{CacheLayout, HeadRotations};

impl<D: HostRows> Backend for HybridBackend<D> {
    type Rows = D::Rows;
    type Matrix = D::Matrix;
    type Vector = HybridVector<D::Vector>;
    type Rope = D::Rope;
    type LayerRotation = D::LayerRotation;
    type Experts = HybridExperts<D::Experts>;
    type Pool = D::Pool;
    type Step<'s>
        = HybridStep<'s, D>
    where
        D: 's;

    fn describe(&self) -> String {
        let device = self.device.describe();
        let Some(host) = &self.host else { return device };
        let layers = match host.layers.get() {
            None => "some layers".to_owned(),
            Some(0) => return device,
            Some(&usize::MAX) => "all layers".to_owned(),
            Some(1) => "the last layer that has some".to_owned(),
            Some(layers) => format!("the last {layers} layers that have some"),
        };
        format!("{device}; experts of {layers} on the CPU ({})", host.cpu.describe())
    }

    fn attention(&self, layout: &CacheLayout) -> AttentionKernels {
        self.device.attention(layout)
    }

    fn held_layout(&self, layout: &CacheLayout) -> CacheLayout {
        self.device.held_layout(layout)
    }

    fn reads_codes_in_window(&self, layout: &CacheLayout) -> bool {
        self.device.reads_codes_in_window(layout)
    }

    fn multiplies_fp8(&self) -> bool {
        self.device.multiplies_fp8()
    }

    fn computes(&self, feature: Feature) -> bool {
        // Parts of a layer's experts alone.
        let of_experts = matches!(feature, Feature::ExpertBiases | Feature::ExpertGroups);
        self.device.computes(feature) || of_experts && self.host_layers() == Some(usize::MAX)
    }

    fn prefill_chunk(&self, heads: &HeadShape) -> usize {
        self.device.prefill_chunk(heads)
    }

    fn prefill_wave(&self, heads: &HeadShape) -> PrefillWave {
        self.device.prefill_wave(heads)
    }

    fn step_memory(&self, size: &StepSize) -> StepMemory {
        self.device.step_memory(size)
    }

    fn free_memory(&self) -> Result<Option<usize>> {
        self.device.free_memory()
    }

    fn communicator(&self) -> Option<&dyn Communicator> {
        self.device.communicator()
    }

    fn matrix(&self, weights: HostMatrix<'_>) -> Result<D::Matrix> {
        self.device.matrix(weights)
    }

    fn matrix_bytes(&self, matrix: &D::Matrix) -> usize {
        self.device.matrix_bytes(matrix)
    }

    fn vector(&self, values: &[f32]) -> Result<Self::Vector> {
        let host = if self.host.is_some() { values.to_vec() } else { Vec::new() };
        Ok(HybridVector { device: self.device.vector(values)?, host })
    }

    fn rope(&self, cos: &[f32], sin: &[f32], rotary_dim: usize) -> Result<D::Rope> {
        self.device.rope(cos, sin, rotary_dim)
    }

    fn experts(&self, shape: &ExpertsShape<'_>) -> Result<Self::Experts> {
        Ok(match self.takes(shape.following)? {
            Some(host) => HybridExperts::Host(Box::new(host.cpu.experts(shape)?)),
            None => HybridExperts::Device(self.device.experts(shape)?),
        })
    }

    fn load_expert(
        &self,
        experts: &mut Self::Experts,
        id: ExpertId,
        parts: [HostMatrix<'_>; 3],
    ) -> Result<()> {
        match (experts, &self.host) {
            (HybridExperts::Device(experts), _) => self.device.load_expert(experts, id, parts),
            (HybridExperts::Host(experts), Some(host)) => host.cpu.load_expert(experts, id, parts),
            (HybridExperts::Host(_), None) => Err(no_processor()),
        }
    }

    fn expert_bytes(&self, experts: &Self::Experts) -> (usize, usize) {
        match (experts, &self.host) {
            (HybridExperts::Device(experts), _) => self.device.expert_bytes(experts),
            (HybridExperts::Host(experts), Some(host)) => host.cpu.expert_bytes(experts),
            (HybridExperts::Host(_), None) => (0, 0),
        }
    }

    fn layer_rotation(&self, heads: &[HeadRotations]) -> Result<D::LayerRotation> {
        self.device.layer_rotation(heads)
    }

    fn rows(&self, width: usize) -> D::Rows {
        self.device.rows(width)
    }

    fn pool(&self, layout: &CacheLayout, heads: &HeadShape, budget: usize) -> Result<D::Pool> {
        self.device.pool(layout, heads, budget)
    }

    fn step<'s>(
        &'s self,
        sequences: &'s [SequenceRows<'s>],
        pool: &'s mut D::Pool,
    ) -> Result<HybridStep<'s, D>> {
        Ok(HybridStep { host: self.host.as_ref(), device: self.device.step(sequences, pool)? })
    }

    fn wait(&self) -> Result<()> {
        self.device.wait()
    }

    fn copies_blocks(&self) -> bool {
        self.device.copies_blocks()
    }

    fn read_blocks(&self, pool: &D::Pool, blocks: &mut [(BlockId, &mut Vec<u8>)]) -> Result<()> {
        self.device.read_blocks(pool, blocks)
    }

    fn write_blocks(&self, pool: &mut D::Pool, blocks: &[(BlockId, &[u8])]) -> Result<()> {
        self.device.write_blocks(pool, blocks)
    }

    fn evicts_rows(&self, layout: &CacheLayout) -> RowEviction {
        self.device.evicts_rows(layout)
    }

    fn gather(&self, from: &SequenceRows<'_>, view: &View, pool: &mut D::Pool) -> Result<()> {
        self.device.gather(from, view, pool)
    }

    fn history(&self, from: &SequenceRows<'_>, rows: HeadHistory, pool: &D::Pool) -> Result<HistoryRows> {
        self.device.history(from, rows, pool)
    }
}

/// The answer for experts on the host that were made by a backend with a processor.
pub(crate) fn no_processor() -> BackendError {
    BackendError::Shape {
        what: "a mixture of experts".into(),
        detail: "it is on the host, and this device has no processor beside it".into(),
    }
}
