//! One step of the decoder: from tokens to logits, or to the most likely tokens.

use super::{FeedForward, Mixer, Transformer, Workspace};
use oscar_backend::{Backend, BackendError, Candidate, LayerHeads, Output, Pick, Product, Step, Tap};

/// The rows of one step, in the order of its sequences.
pub struct StepInput<'a> {
    pub tokens: &'a [u32],
    /// Rows whose logits are wanted, ascending.
    pub logits: &'a [usize],
    /// Rows that need only their most likely tokens, by index in `logits`, ascending.
    pub picks: &'a [(usize, Pick<'a>)],
    /// Rows whose hidden state is wanted, ascending.
    pub hidden: &'a [usize],
}

/// The results of a step.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Logits of the wanted rows without a pick, one vocabulary after the other.
    pub logits: Vec<f32>,
    /// One list for each pick.
    pub picked: Vec<Vec<Candidate>>,
    /// Hidden states after the final norm, one row after the other.
    pub hidden: Vec<f32>,
}

impl<B: Backend> Transformer<B> {
    /// Runs the whole model in `step`. Of several ranks, only the first reads logits.
    pub fn forward(
        &self,
        step: &mut B::Step<'_>,
        input: &StepInput<'_>,
        w: &mut Workspace<B>,
        out: &mut StepOutput,
        tap: Option<&mut dyn Tap>,
    ) -> Result<(), BackendError> {
        out.logits.clear();
        out.picked.clear();
        out.hidden.clear();
        self.layers(step, input.tokens, w, tap)?;
        if !input.hidden.is_empty() {
            step.read(&w.hidden, input.hidden, &mut out.hidden)?;
            self.normalize(&mut out.hidden);
        }
        if input.logits.is_empty() {
            return Ok(());
        }
        self.head(step, input.logits, input.tokens.len(), w)?;
        if self.body.shard.rank() > 0 {
            return Ok(());
        }
        if !input.picks.is_empty() {
            step.pick(&w.logits, input.picks, &mut out.picked)?;
        }
        let is_picked = |row: &usize| input.picks.binary_search_by_key(row, |&(index, _)| index).is_ok();
        let whole: Vec<usize> = (0..input.logits.len()).filter(|row| !is_picked(row)).collect();
        match whole.is_empty() {
            true => Ok(()),
            false => step.read(&w.logits, &whole, &mut out.logits),
        }
    }

    /// The final norm of rows on the host.
    fn normalize(&self, rows: &mut [f32]) {
        let (weights, eps) = (&self.body.final_norm_values, self.body.config.rms_norm_eps);
        for row in rows.chunks_exact_mut(weights.len()) {
            let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
            let scale = (mean + eps).sqrt().recip();
            row.iter_mut().zip(weights).for_each(|(x, weight)| *x *= scale * weight);
        }
    }

    /// Everything up to the last layer's output, which is left in `w.hidden`.
    fn layers(
        &self,
        step: &mut B::Step<'_>,
        tokens: &[u32],
        w: &mut Workspace<B>,
        mut tap: Option<&mut dyn Tap>,
    ) -> Result<(), BackendError> {
        self.embed(step, tokens, w)?;
        for index in 0..self.body.layers.len() {
            // The cast shortens the lifetime of the trait object to this iteration.
            let tap = tap.as_mut().map(|tap| &mut **tap as &mut dyn Tap);
            self.layer(step, index, w, tap)?;
        }
        Ok(())
    }

    /// Puts the embeddings of `tokens` into `w.hidden`.
    pub fn embed(
        &self,
        step: &mut B::Step<'_>,
        tokens: &[u32],
        w: &mut Workspace<B>,
    ) -> Result<(), BackendError> {
        step.embed(&self.body.embedding, tokens, self.body.config.embedding_scale, &mut w.hidden)
    }

    /// Runs one layer on `w.hidden`.
    pub fn layer(
        &self,
        step: &mut B::Step<'_>,
        index: usize,
        w: &mut Workspace<B>,
        tap: Option<&mut dyn Tap>,
    ) -> Result<(), BackendError> {
        let body = &*self.body;
        let (layer, projections) = (&body.layers[index], &self.projections[index]);
        let eps = body.config.rms_norm_eps;
        match &projections.mixer {
            Mixer::Heads { qkv, rotation, gate } => {
                self.attend_heads(step, index, (qkv, rotation.as_ref()), w, tap)?;
                gate.as_ref().map_or(Ok(()), |gate| self.gate_heads(step, index, gate, w))?;
            }
            Mixer::Delta(delta) => self.mix_delta(step, index, delta, w)?,
            Mixer::Latent(latent) => self.attend_latent(step, index, latent, w, tap)?,
        }
        let [attention_norm, feed_forward_norm] = match &layer.result_norms {
            Some([attention, feed_forward]) => [Some(attention), Some(feed_forward)],
            None => [None, None],
        };
        let output = Product::of(&projections.output, self.residual()).then_norm(attention_norm, eps);
        let attended = match &projections.mixer {
            Mixer::Delta(_) => w.delta.mixed(),
            Mixer::Heads { .. } | Mixer::Latent(_) => &w.attended,
        };
        step.product(output, attended, &mut w.hidden)?;
        self.sum_over_ranks(step, w)?;

        match &layer.feed_forward {
            FeedForward::Dense { gate_up, down } => {
                let gate_up =
                    Product::of_normed(&layer.post_norm, eps, gate_up, Output::Gated(body.config.gate));
                step.product(gate_up, &w.hidden, &mut w.gated)?;
                let down = Product::of(down, self.residual()).then_norm(feed_forward_norm, eps);
                step.product(down, &w.gated, &mut w.hidden)?;
                self.sum_over_ranks(step, w)
            }
            FeedForward::Experts(experts) => {
                step.experts(experts, (&layer.post_norm, eps), &mut w.hidden)?;
                self.sum_over_ranks(step, w)
            }
        }
    }

    /// Attention of query, key and value heads: from `w.hidden` to `w.attended`.
    fn attend_heads(
        &self,
        step: &mut B::Step<'_>,
        index: usize,
        (qkv, rotation): (&B::Matrix, Option<&B::LayerRotation>),
        w: &mut Workspace<B>,
        tap: Option<&mut dyn Tap>,
    ) -> Result<(), BackendError> {
        let body = &*self.body;
        let (layer, window) = (&body.layers[index], body.config.window_of(index));
        let qkv = Product::of_normed(&layer.input_norm, body.config.rms_norm_eps, qkv, Output::Replace);
        step.product(qkv, &w.hidden, &mut w.qkv)?;
        let heads = LayerHeads {
            layer: body.config.cache_layer(index),
            qk_norm: layer.qk_norm.as_ref().map(|(q, k)| (q, k)),
            rope: body.sliding_rope.as_ref().filter(|_| window.is_some()).unwrap_or(&body.rope),
            rotation,
            window,
            sinks: layer.sinks.as_ref(),
        };
        step.attend(heads, &mut w.qkv, &mut w.attended, tap)
    }

    /// What becomes of a product that is summed over ranks: the first rank adds the residual.
    fn residual(&self) -> Output {
        if self.body.shard.rank() == 0 { Output::Add } else { Output::Replace }
    }

    /// Makes `w.hidden` the sum of all ranks' rows.
    fn sum_over_ranks(&self, step: &mut B::Step<'_>, w: &mut Workspace<B>) -> Result<(), BackendError> {
        if self.body.shard.is_split() { step.all_reduce(&mut w.hidden) } else { Ok(()) }
    }

    /// Logits of these rows of `w.hidden`, which has `count`; they stay on the device, in
    /// `w.logits`.
    pub fn head(
        &self,
        step: &mut B::Step<'_>,
        rows: &[usize],
        count: usize,
        w: &mut Workspace<B>,
    ) -> Result<(), BackendError> {
        let body = &*self.body;
        let every_row = rows.iter().copied().eq(0..count);
        if !every_row {
            step.select(&w.hidden, rows, &mut w.selected)?;
        }
        let wanted = if every_row { &w.hidden } else { &w.selected };
        let matrix = body.head.as_ref().unwrap_or(&body.embedding);
        let eps = body.config.rms_norm_eps;
        let logits = Product::of_normed(&body.final_norm, eps, matrix, Output::Logits);
        if !body.shard.is_split() {
            return step.product(logits, wanted, &mut w.logits);
        }
        step.product(logits, wanted, &mut w.logits_part)?;
        step.all_gather(&w.logits_part, &mut w.logits)
    }
}
