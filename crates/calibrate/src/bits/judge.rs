//! How far a coded cache moves the model's predictions.

use super::probe::Probe;
use super::table::WidthTable;
use crate::error::CalibrateError;
use oscar_backend::{Backend, argmax};
use oscar_codec::{
    CacheLayout, CodeLayout, FormatTable, KvFormat, Rounding, RowPageCodec, SideSpec, Windows,
};
use oscar_models::Transformer;
use oscar_runner::{KvMemory, Logits, Runner, Sequence, StepOutput, StepRequest};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most likely tokens of the exact prediction that are compared one by one; the others count as
/// one. It bounds memory for large vocabularies, and the divergence of the coarser distributions is
/// at most that of the whole.
const KEPT_TOKENS: usize = 1024;

/// The exact cache's prediction at one position.
#[derive(Clone, Debug)]
pub(super) struct Prediction {
    /// Tokens in order of their number, with log-probabilities.
    tokens: Vec<(u32, f32)>,
    /// Probability of all others.
    rest: f64,
}

impl Prediction {
    pub(super) fn of(logits: &[f32]) -> Self {
        let normalizer = log_sum_exp(logits);
        let mut tokens: Vec<(u32, f32)> = logits
            .iter()
            .enumerate()
            .map(|(token, &l)| (token as u32, (f64::from(l) - normalizer) as f32))
            .collect();
        let mut rest = 0.0;
        if tokens.len() > KEPT_TOKENS {
            tokens.select_nth_unstable_by(KEPT_TOKENS, |a, b| b.1.total_cmp(&a.1));
            rest = tokens[KEPT_TOKENS..].iter().map(|&(_, l)| f64::from(l).exp()).sum();
            tokens.truncate(KEPT_TOKENS);
            tokens.sort_unstable_by_key(|&(token, _)| token);
        }
        Self { tokens, rest }
    }

    /// KL divergence from this prediction to another model's, in nats.
    pub(super) fn divergence(&self, logits: &[f32]) -> f64 {
        let normalizer = log_sum_exp(logits);
        let (mut sum, mut kept) = (0.0, 0.0);
        for &(token, exact) in &self.tokens {
            let other = f64::from(logits[token as usize]) - normalizer;
            sum += f64::from(exact).exp() * (f64::from(exact) - other);
            kept += other.exp();
        }
        if self.rest > 0.0 {
            sum += self.rest * (self.rest / (1.0 - kept).max(1e-12)).ln();
        }
        sum.max(0.0)
    }

    pub(super) fn top(&self) -> u32 {
        self.tokens.iter().fold((0, f32::NEG_INFINITY), |best, &t| if t.1 > best.1 { t } else { best }).0
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    f64::from(max) + sum.ln()
}

/// Sums over positions, by group of probes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores(BTreeMap<String, GroupScore>);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct GroupScore {
    divergence: f64,
    agree: usize,
    positions: usize,
}

impl Scores {
    pub(super) fn add(&mut self, group: &str, exact: &Prediction, logits: &[f32]) {
        let score = self.0.entry(group.to_owned()).or_default();
        score.divergence += exact.divergence(logits);
        score.agree += usize::from(exact.top() == argmax(logits));
        score.positions += 1;
    }

    pub(super) fn merge(&mut self, other: Self) {
        for (name, score) in other.0 {
            let own = self.0.entry(name).or_default();
            own.divergence += score.divergence;
            own.agree += score.agree;
            own.positions += score.positions;
        }
    }

    /// Divergence summed over all positions.
    pub(super) fn total(&self) -> f64 {
        self.0.values().map(|s| s.divergence).sum()
    }

    /// Group, mean divergence and share of equal first choices.
    pub fn groups(&self) -> impl Iterator<Item = (&str, f64, f64)> {
        self.0.iter().map(|(name, s)| {
            let n = s.positions.max(1) as f64;
            (name.as_str(), s.divergence / n, s.agree as f64 / n)
        })
    }

    /// The divergences of all groups in one figure, relative to a yardstick's: one is as harmful as
    /// the yardstick.
    pub fn relative_to(&self, yardstick: &Self) -> f64 {
        let weights = group_weights(yardstick.groups().map(|(_, divergence, _)| divergence));
        self.groups().zip(weights).map(|((_, divergence, _), weight)| divergence * weight).sum()
    }
}

/// Share of the largest group's yardstick below which no group's is taken for its own.
const LEAST_YARDSTICK: f64 = 0.1;

/// What a divergence of each group counts, so that the yardstick's add up to one. Divergences are
/// measured in the group's own under the yardstick, so that kinds of probes count alike whatever
/// their scale, but in no less than a share of the largest: a group that the yardstick hardly moves
/// is one on which codes do no harm that anyone would see, and divided by so little, its noise
/// would weigh as much as the others' harm.
pub(super) fn group_weights(yardsticks: impl Iterator<Item = f64>) -> Vec<f64> {
    let own: Vec<f64> = yardsticks.collect();
    let least = LEAST_YARDSTICK * own.iter().copied().fold(0.0, f64::max);
    // Where nothing moves at all, any unit will do.
    let units: Vec<f64> = own.iter().map(|divergence| divergence.max(least).max(1e-12)).collect();
    let total: f64 = own.iter().zip(&units).map(|(divergence, unit)| divergence / unit).sum();
    units.into_iter().map(|unit| 1.0 / (unit * total.max(1e-12))).collect()
}

/// A model that answers probes with whatever cache it is given. It must have been built with the
/// rotations of the cache that is judged.
pub struct Judge<'a, B: Backend> {
    pub backend: &'a Arc<B>,
    pub transformer: &'a Transformer<B>,
    pub windows: Windows,
    /// Of each layer and KV head.
    pub roundings: &'a [Rounding],
    /// Tokens run at once.
    pub chunk: usize,
    pub cancelled: &'a AtomicBool,
}

impl<B: Backend> Judge<'_, B> {
    pub(super) fn layout(&self, table: Option<&WidthTable>) -> Result<CacheLayout, CalibrateError> {
        let c = self.transformer.config();
        let new = |format, windows| {
            CacheLayout::new(format, c.layers, c.kv_heads, c.head_dim, windows, CodeLayout::Logical)
        };
        Ok(match table {
            None => new(KvFormat::Bf16, Windows::unlimited())?,
            Some(table) => new(KvFormat::OSCAR, self.windows)?.with_coded_table(
                table.formats(c.head_dim, CodeLayout::Logical)?.with_roundings(self.roundings.to_vec())?,
            ),
        })
    }

    /// The exact cache, but for one head (by its number) that keeps no history.
    fn layout_without(&self, head: usize) -> Result<CacheLayout, CalibrateError> {
        let c = self.transformer.config();
        let exact = KvFormat::Bf16.codec(c.head_dim, CodeLayout::Logical)?;
        let mut codecs = vec![exact; c.layers * c.kv_heads];
        codecs[head] =
            RowPageCodec::new(c.head_dim, SideSpec::ABSENT, SideSpec::ABSENT, CodeLayout::Logical)?;
        let layout = CacheLayout::new(
            KvFormat::OSCAR,
            c.layers,
            c.kv_heads,
            c.head_dim,
            self.windows,
            CodeLayout::Logical,
        )?;
        Ok(layout.with_coded_table(FormatTable::new(c.layers, c.kv_heads, codecs)?))
    }

    /// Divergences, summed over a probe's positions, when one of `heads` after the other keeps no
    /// history.
    pub(super) fn without_history(
        &self,
        probe: &Probe,
        heads: &[usize],
        mut progress: impl FnMut(),
    ) -> Result<Vec<f64>, CalibrateError> {
        let reference = self.reference(probe)?;
        progress();
        let mut all = Vec::with_capacity(heads.len());
        for &head in heads {
            all.push(self.score(&self.layout_without(head)?, probe, &reference)?.total());
            progress();
        }
        Ok(all)
    }

    /// What a cache does to a probe when every token passes through it.
    fn score(
        &self,
        layout: &CacheLayout,
        probe: &Probe,
        reference: &[Prediction],
    ) -> Result<Scores, CalibrateError> {
        let mut scores = Scores::default();
        let mut cache = self.cache(layout, probe.tokens.len())?;
        let mut exact = reference.iter();
        self.run(&mut cache, &probe.tokens, &probe.scored, |_, logits| {
            if let Some(exact) = exact.next() {
                scores.add(&probe.group, exact, logits);
            }
        })?;
        Ok(scores)
    }

    pub(super) fn check_cancelled(&self) -> Result<(), CalibrateError> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(CalibrateError::Cancelled),
            false => Ok(()),
        }
    }

    /// Runs `tokens` behind what `cache` holds; `wanted` are positions whose logits are handed to
    /// `seen`.
    pub(super) fn run(
        &self,
        cache: &mut Cache<B>,
        tokens: &[u32],
        wanted: &Range<usize>,
        mut seen: impl FnMut(usize, &[f32]),
    ) -> Result<(), CalibrateError> {
        let vocabulary = self.transformer.config().vocab_size;
        let mut output = StepOutput::default();
        let Cache { runner, sequence } = cache;
        for tokens in tokens.chunks(self.chunk.max(1)) {
            self.check_cancelled()?;
            let first = sequence.len();
            let scored = wanted.start.clamp(first, first + tokens.len())
                ..wanted.end.clamp(first, first + tokens.len());
            let logits = Logits::Of(scored.start - first..scored.end - first);
            runner.step(&mut [StepRequest { sequence, tokens, logits }], &mut output)?;
            for (position, logits) in scored.zip(output.logits.chunks_exact(vocabulary)) {
                seen(position, logits);
            }
        }
        Ok(())
    }

    pub(super) fn cache(&self, layout: &CacheLayout, tokens: usize) -> Result<Cache<B>, CalibrateError> {
        let (room, model) = (KvMemory::Sequences { count: 1, tokens }, self.transformer.clone());
        let runner = Runner::new(self.backend.clone(), model, layout, room, self.chunk)?;
        Ok(Cache { runner, sequence: Sequence::new() })
    }

    /// The exact cache's predictions at the scored positions of a probe.
    pub(super) fn reference(&self, probe: &Probe) -> Result<Vec<Prediction>, CalibrateError> {
        let mut cache = self.cache(&self.layout(None)?, probe.tokens.len())?;
        let mut predictions = Vec::with_capacity(probe.scored.len());
        self.run(&mut cache, &probe.tokens, &probe.scored, |_, logits| {
            predictions.push(Prediction::of(logits))
        })?;
        Ok(predictions)
    }

    /// What tables of widths do to the predictions when every token passes through the coded cache,
    /// as in serving. The exact predictions are made once for all tables. `progress` hears of each
    /// run of a probe.
    pub fn verify(
        &self,
        probes: &[Probe],
        tables: &[WidthTable],
        mut progress: impl FnMut(),
    ) -> Result<Vec<Scores>, CalibrateError> {
        let layouts = tables.iter().map(|t| self.layout(Some(t))).collect::<Result<Vec<_>, _>>()?;
        let mut all = vec![Scores::default(); tables.len()];
        for probe in probes {
            let reference = self.reference(probe)?;
            progress();
            for (layout, scores) in layouts.iter().zip(&mut all) {
                scores.merge(self.score(layout, probe, &reference)?);
                progress();
            }
        }
        Ok(all)
    }
}

/// One sequence in a cache of its own.
pub(super) struct Cache<B: Backend> {
    pub runner: Runner<B>,
    pub sequence: Sequence,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_known_distributions() {
        let exact = Prediction::of(&[0.0, 0.0, -60.0]);
        assert!(exact.divergence(&[0.0, 0.0, -60.0]).abs() < 1e-9);
        let expected = -0.5 * (0.8f64.ln() + 0.2f64.ln()) - std::f64::consts::LN_2;
        assert!((exact.divergence(&[0.8f32.ln(), 0.2f32.ln(), -60.0]) - expected).abs() < 1e-6);
        assert_eq!(exact.top(), 0);
    }

    #[test]
    fn a_yardstick_that_hardly_moves_does_not_make_noise_into_harm() {
        let yardsticks = [0.008, 0.004, 2e-5, 0.0];
        let weights = group_weights(yardsticks.into_iter());
        let total: f64 = yardsticks.iter().zip(&weights).map(|(y, w)| y * w).sum();
        assert!((total - 1.0).abs() < 1e-9, "the yardstick is one: {total}");
        assert!((weights[1] / weights[0] - 2.0).abs() < 1e-9, "kinds that move count alike");
        // Both are measured in a tenth of the largest.
        assert!((weights[2] / weights[0] - 10.0).abs() < 1e-9 && weights[3] == weights[2], "{weights:?}");
        assert!(group_weights([0.0, 0.0].into_iter()).iter().all(|w| w.is_finite()));
    }

    #[test]
    fn large_vocabularies_lose_little() {
        let logits = |shift: f32| -> Vec<f32> {
            (0..5000).map(|i| ((i * 7919 % 5003) as f32 / 500.0) + shift * ((i % 13) as f32)).collect()
        };
        let (a, b) = (logits(0.0), logits(0.01));
        let kept = Prediction::of(&a);
        assert_eq!(kept.tokens.len(), KEPT_TOKENS);
        let whole: f64 = a
            .iter()
            .zip(&b)
            .map(|(&x, &y)| {
                let (p, q) = (f64::from(x) - log_sum_exp(&a), f64::from(y) - log_sum_exp(&b));
                p.exp() * (p - q)
            })
            .sum();
        let coarse = kept.divergence(&b);
        assert!(coarse <= whole && coarse > 0.8 * whole, "{coarse} of {whole}");
    }
}
