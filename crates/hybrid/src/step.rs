//! One step: the device's, except for the experts of some layers.

use crate::backend::no_processor;
use crate::{Host, HybridBackend, HybridExperts, HybridVector};
use oscar_backend::{
    Backend, Candidate, DeltaLayer, DeltaStep, HostRows, LatentHeads, LayerHeads, Pick, Product, Result,
    Step, Tap,
};

/// A step in progress.
pub struct HybridStep<'s, D: Backend + 's> {
    pub(crate) host: Option<&'s Host>,
    pub(crate) device: D::Step<'s>,
}

/// A norm with its epsilon, as the device takes it.
fn norm<V>(norm: Option<(&HybridVector<V>, f32)>) -> Option<(&V, f32)> {
    norm.map(|(norm, eps)| (&norm.device, eps))
}

impl<D: HostRows> DeltaStep<HybridBackend<D>> for HybridStep<'_, D> {
    fn mix_delta(
        &mut self,
        layer: DeltaLayer<'_, HybridBackend<D>>,
        projected: &D::Rows,
        out: &mut D::Rows,
    ) -> Result<()> {
        let DeltaLayer { layer, shape, conv, decay, time_bias, norm: (norm, eps) } = layer;
        let [conv, decay, time_bias, norm] = [conv, decay, time_bias, norm].map(|v| &v.device);
        let layer = DeltaLayer { layer, shape, conv, decay, time_bias, norm: (norm, eps) };
        self.device.mix_delta(layer, projected, out)
    }

    fn gate_heads(&mut self, unrotate: &[&D::Matrix], gates: &D::Rows, attended: &mut D::Rows) -> Result<()> {
        self.device.gate_heads(unrotate, gates, attended)
    }
}

impl<D: HostRows> Step<HybridBackend<D>> for HybridStep<'_, D> {
    fn embed(&mut self, table: &D::Matrix, tokens: &[u32], scale: f32, out: &mut D::Rows) -> Result<()> {
        self.device.embed(table, tokens, scale, out)
    }

    fn select(&mut self, x: &D::Rows, rows: &[usize], out: &mut D::Rows) -> Result<()> {
        self.device.select(x, rows, out)
    }

    fn product(
        &mut self,
        product: Product<'_, HybridBackend<D>>,
        x: &D::Rows,
        out: &mut D::Rows,
    ) -> Result<()> {
        let Product { weight, norm: before, output, result_norm } = product;
        let product = Product { weight, norm: norm(before), output, result_norm: norm(result_norm) };
        self.device.product(product, x, out)
    }

    fn experts(
        &mut self,
        experts: &HybridExperts<D::Experts>,
        (norm, eps): (&HybridVector<D::Vector>, f32),
        x: &mut D::Rows,
    ) -> Result<()> {
        let experts = match experts {
            HybridExperts::Device(experts) => return self.device.experts(experts, (&norm.device, eps), x),
            HybridExperts::Host(experts) => experts,
        };
        let Some(host) = self.host else { return Err(no_processor()) };
        let mut rows = host.rows();
        rows.clear();
        D::read_rows(&mut self.device, x, &mut rows)?;
        host.cpu.add_experts(experts, (&norm.host, eps), &mut rows)?;
        D::write_rows(&mut self.device, &rows, x)
    }

    fn attend(
        &mut self,
        heads: LayerHeads<'_, HybridBackend<D>>,
        qkv: &mut D::Rows,
        out: &mut D::Rows,
        tap: Option<&mut dyn Tap>,
    ) -> Result<()> {
        let LayerHeads { layer, qk_norm, rope, rotation, window, sinks } = heads;
        let qk_norm = qk_norm.map(|(q, k)| (&q.device, &k.device));
        let sinks = sinks.map(|sinks| &sinks.device);
        let heads = LayerHeads { layer, qk_norm, rope, rotation, window, sinks };
        self.device.attend(heads, qkv, out, tap)
    }

    fn attend_latent(
        &mut self,
        heads: LatentHeads<'_, HybridBackend<D>>,
        queries: &D::Rows,
        latent: &D::Rows,
        out: &mut D::Rows,
    ) -> Result<()> {
        let LatentHeads { layer, shape, norm: (norm, eps), rope, key_up, value_up } = heads;
        let heads = LatentHeads { layer, shape, norm: (&norm.device, eps), rope, key_up, value_up };
        self.device.attend_latent(heads, queries, latent, out)
    }

    fn all_reduce(&mut self, x: &mut D::Rows) -> Result<()> {
        self.device.all_reduce(x)
    }

    fn all_gather(&mut self, part: &D::Rows, whole: &mut D::Rows) -> Result<()> {
        self.device.all_gather(part, whole)
    }

    fn read(&mut self, x: &D::Rows, rows: &[usize], out: &mut Vec<f32>) -> Result<()> {
        self.device.read(x, rows, out)
    }

    fn pick(
        &mut self,
        logits: &D::Rows,
        rows: &[(usize, Pick)],
        out: &mut Vec<Vec<Candidate>>,
    ) -> Result<()> {
        self.device.pick(logits, rows, out)
    }

    fn finish(self) -> Result<()> {
        self.device.finish()
    }
}
