//! One step of the decoder: from tokens to logits, or to the most likely tokens where no more is wanted.

use super::{Transformer, Workspace};
use oscar_backend::{Backend, BackendError, Candidate, HeadPreparation, Pick, SequenceRows, Write};

/// The rows of one step.
pub struct StepInput<'a> {
    pub tokens: &'a [u32],
    pub sequences: &'a [SequenceRows<'a>],
    /// Rows whose logits are wanted, ascending.
    pub logits: &'a [usize],
}

/// Sees what calibration needs of each layer.
pub trait Observer<B: Backend> {
    /// Rows of `[queries | keys | values]` after QK-norm and RoPE and before any rotation.
    fn heads(&mut self, backend: &B, layer: usize, qkv: &B::Rows) -> Result<(), BackendError>;
    /// Attention outputs of all query heads, in the values' basis.
    fn attended(&mut self, backend: &B, layer: usize, attended: &B::Rows) -> Result<(), BackendError>;
}

impl<B: Backend> Transformer<B> {
    /// Runs one step and reads the wanted rows' logits (`logits.len() × vocab`) into `logits`.
    pub fn forward(
        &self,
        backend: &B,
        input: &StepInput<'_>,
        pool: &mut B::Pool,
        w: &mut Workspace<B>,
        logits: &mut Vec<f32>,
        observer: Option<&mut dyn Observer<B>>,
    ) -> Result<(), BackendError> {
        self.layers(backend, input, pool, w, observer)?;
        logits.clear();
        if !input.logits.is_empty() {
            self.head(backend, input, w);
            backend.read(&w.logits, logits)?;
        }
        backend.end_step()
    }

    /// [`Transformer::forward`], but of the wanted rows named in `picks` (by their index in `input.logits`, ascending)
    /// only the most likely tokens leave the device: they go to `picked`, in that order, the logits of the other wanted
    /// rows to `logits`. For backends that [pick](Backend::picks).
    pub fn forward_picking(
        &self,
        backend: &B,
        input: &StepInput<'_>,
        picks: &[(usize, Pick)],
        pool: &mut B::Pool,
        w: &mut Workspace<B>,
        logits: &mut Vec<f32>,
        picked: &mut Vec<Vec<Candidate>>,
    ) -> Result<(), BackendError> {
        picked.clear();
        if picks.is_empty() {
            return self.forward(backend, input, pool, w, logits, None);
        }
        self.layers(backend, input, pool, w, None)?;
        logits.clear();
        self.head(backend, input, w);
        backend.pick(&w.logits, picks, picked)?;
        if picked.len() != picks.len() {
            let detail = format!("{} lists for {} rows", picked.len(), picks.len());
            return Err(BackendError::Shape { what: "picked tokens".into(), detail });
        }
        let whole: Vec<usize> = (0..input.logits.len())
            .filter(|&i| picks.binary_search_by_key(&i, |&(index, _)| index).is_err())
            .collect();
        if !whole.is_empty() {
            backend.select(&w.logits, &whole, &mut w.whole_logits);
            backend.read(&w.whole_logits, logits)?;
        }
        backend.end_step()
    }

    /// Logits of the wanted rows, on the device.
    fn head(&self, backend: &B, input: &StepInput<'_>, w: &mut Workspace<B>) {
        let body = &*self.body;
        let every_row = input.logits.iter().copied().eq(0..input.tokens.len());
        if !every_row {
            backend.select(&w.hidden, input.logits, &mut w.selected);
        }
        let wanted = if every_row { &w.hidden } else { &w.selected };
        backend.rms_norm(wanted, &body.final_norm, body.config.rms_norm_eps, &mut w.normed);
        backend.logits(body.head.as_ref().unwrap_or(&body.embedding), &w.normed, &mut w.logits);
    }

    /// Everything up to the last layer's output, which is left in `w.hidden`.
    fn layers(
        &self,
        backend: &B,
        input: &StepInput<'_>,
        pool: &mut B::Pool,
        w: &mut Workspace<B>,
        mut observer: Option<&mut dyn Observer<B>>,
    ) -> Result<(), BackendError> {
        let body = &*self.body;
        let eps = body.config.rms_norm_eps;
        backend.embed(&body.embedding, input.tokens, &mut w.hidden);
        for (index, (layer, projections)) in body.layers.iter().zip(&*self.projections).enumerate() {
            let norm = &layer.input_norm;
            backend.norm_linear(norm, eps, &projections.qkv, &w.hidden, &mut w.normed, &mut w.qkv);
            if index == 0 {
                // Behind the first operations: a device is at them while its tables are made.
                backend.begin_step(input.sequences, pool)?;
            }
            let heads = HeadPreparation {
                qk_norm: layer.qk_norm.as_ref().map(|(q, k)| (q, k)),
                rotation: projections.rotation.as_ref(),
            };
            backend.append(
                index,
                &body.shape,
                heads,
                &body.rope,
                input.sequences,
                &mut w.qkv,
                &mut w.queries,
                pool,
            )?;
            if let Some(observer) = observer.as_deref_mut() {
                observer.heads(backend, index, &w.qkv)?;
            }
            backend.demote(index, input.sequences, pool)?;
            backend.attention(index, &body.shape, input.sequences, &w.queries, pool, &mut w.attended)?;
            if let Some(observer) = observer.as_deref_mut() {
                observer.attended(backend, index, &w.attended)?;
            }
            backend.linear(&projections.output, &w.attended, &mut w.hidden, Write::Add);

            backend.norm_gated_linear(
                &layer.post_norm,
                eps,
                &layer.gate_up,
                &w.hidden,
                &mut w.normed,
                &mut w.gate_up,
                &mut w.gated,
            );
            backend.linear(&layer.down, &w.gated, &mut w.hidden, Write::Add);
        }
        Ok(())
    }
}
