//! Choosing a token from logits.
//!
//! Order of operations: repetition penalty, frequency and presence penalty, bias, banned tokens;
//! then temperature, top-k, top-p, min-p, then one uniform draw. The draw of the `n`-th token of a
//! sequence is a function of the seed and `n` alone (a counter-based generator), so it does not
//! depend on who else is being served.

use oscar_backend::{Candidate, MOST_CANDIDATES, Pick, allows, argmax};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// How to choose.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 picks the most likely token.
    pub temperature: f32,
    /// Keep the `k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens whose probability reaches this.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one.
    pub min_p: f32,
    pub seed: u64,
    /// Divides positive logits of tokens that the prompt or the answer already has, multiplies
    /// negative ones; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Taken off the logit of every token the answer already has.
    pub presence_penalty: f32,
    /// Taken off the logit of a token once for each time the answer has it.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; a later entry of the same token adds to an earlier one.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
        }
    }
}

/// The values that a setting may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allowed {
    pub min: f32,
    pub max: f32,
    /// `min` itself is not allowed.
    pub above: bool,
}

impl Allowed {
    const fn from(min: f32, max: f32) -> Self {
        Self { min, max, above: false }
    }

    const fn above(min: f32, max: f32) -> Self {
        Self { min, max, above: true }
    }

    /// NaN is never allowed.
    pub fn contains(&self, value: f32) -> bool {
        value <= self.max && if self.above { value > self.min } else { value >= self.min }
    }
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.above {
            true => write!(f, "above {} and at most {}", self.min, self.max),
            false => write!(f, "from {} to {}", self.min, self.max),
        }
    }
}

/// A setting out of range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{parameter} is {value}: it must be {allowed}")]
pub struct SamplingError {
    pub parameter: &'static str,
    pub value: f32,
    pub allowed: Allowed,
}

/// The ranges of the settings. Front ends name them in their own messages and documents.
impl SamplingParams {
    pub const TEMPERATURE: Allowed = Allowed::from(0.0, 100.0);
    pub const TOP_P: Allowed = Allowed::above(0.0, 1.0);
    pub const MIN_P: Allowed = Allowed::from(0.0, 1.0);
    pub const REPETITION_PENALTY: Allowed = Allowed::above(0.0, 100.0);
    /// Of the presence and the frequency penalty.
    pub const PENALTY: Allowed = Allowed::from(-2.0, 2.0);
    pub const LOGIT_BIAS: Allowed = Allowed::from(-100.0, 100.0);

    fn validate(&self) -> Result<(), SamplingError> {
        let settings = [
            ("temperature", self.temperature, Self::TEMPERATURE),
            ("top_p", self.top_p, Self::TOP_P),
            ("min_p", self.min_p, Self::MIN_P),
            ("repetition_penalty", self.repetition_penalty, Self::REPETITION_PENALTY),
            ("presence_penalty", self.presence_penalty, Self::PENALTY),
            ("frequency_penalty", self.frequency_penalty, Self::PENALTY),
        ];
        let biases = self.logit_bias.iter().map(|&(_, bias)| ("logit_bias", bias, Self::LOGIT_BIAS));
        match settings.into_iter().chain(biases).find(|(_, value, allowed)| !allowed.contains(*value)) {
            Some((parameter, value, allowed)) => Err(SamplingError { parameter, value, allowed }),
            None => Ok(()),
        }
    }

    /// No setting changes the logits before temperature and filters.
    fn leaves_logits_alone(&self) -> bool {
        self.repetition_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.logit_bias.is_empty()
    }
}

/// Chooses the tokens of one sequence. Its settings are valid: [`Sampler::new`] is the one place
/// that checks them.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    drawn: u64,
    candidates: Vec<Candidate>,
    /// Distinct tokens of the prompt, kept only when a penalty asks for them.
    prompt: BTreeSet<u32>,
    /// How often the answer has each token so far.
    counts: BTreeMap<u32, u32>,
    adjusted: Vec<f32>,
}

impl Sampler {
    /// A sampler without a prompt: its repetition penalty knows only the tokens it has sampled
    /// itself.
    ///
    /// # Errors
    /// If a setting is out of its range.
    pub fn new(params: SamplingParams) -> Result<Self, SamplingError> {
        params.validate()?;
        Ok(Self {
            params,
            drawn: 0,
            candidates: Vec::new(),
            prompt: BTreeSet::new(),
            counts: BTreeMap::new(),
            adjusted: Vec::new(),
        })
    }

    /// A fresh sampler with the same settings for the continuation of `prompt`.
    pub fn for_prompt(&self, prompt: &[u32]) -> Self {
        let prompt = match self.params.repetition_penalty == 1.0 {
            true => BTreeSet::new(),
            false => prompt.iter().copied().collect(),
        };
        Self { drawn: 0, counts: BTreeMap::new(), prompt, ..self.clone() }
    }

    /// A copy for the `index`-th choice of a request, which draws with a seed of its own.
    pub(crate) fn for_choice(&self, index: usize) -> Self {
        let mut sampler = self.clone();
        sampler.params.seed = sampler.params.seed.wrapping_add(index as u64);
        sampler
    }

    /// The next token. NaN logits are never chosen; if nothing else is left, token 0 is.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        self.sample_except(logits, &[])
    }

    /// All that the next choice needs of the logits, where that is less than the whole row.
    pub fn pick(&self) -> Option<Pick<'static>> {
        let p = &self.params;
        if !p.leaves_logits_alone() {
            return None;
        }
        match p.temperature == 0.0 {
            true => Some(Pick::Greedy),
            false => (1..=MOST_CANDIDATES).contains(&p.top_k).then_some(Pick::Top(p.top_k)),
        }
    }

    /// The next token from the list that [`Sampler::pick`] asked for: the one that
    /// [`Sampler::sample`] would choose from the whole row.
    pub fn sample_among(&mut self, candidates: &[Candidate]) -> u32 {
        let index = self.drawn;
        self.drawn += 1;
        if self.params.temperature == 0.0 {
            return candidates.first().map_or(0, |&(_, token)| token);
        }
        self.candidates.clear();
        self.candidates.extend_from_slice(candidates);
        self.draw(index)
    }

    /// [`Sampler::sample`] among all tokens but `banned`.
    pub fn sample_except(&mut self, logits: &[f32], banned: &[u32]) -> u32 {
        if banned.is_empty() && self.params.leaves_logits_alone() {
            return self.choose(logits);
        }
        self.sample_adjusted(logits, |adjusted| exclude(adjusted, banned))
    }

    /// [`Sampler::sample`] among the tokens whose bits are set in `allowed`, without `banned`
    /// unless nothing else is left.
    pub fn sample_within(&mut self, logits: &[f32], allowed: &[u32], banned: &[u32]) -> u32 {
        let is_open = |token: usize| allows(allowed, token) && !banned.contains(&(token as u32));
        let banned = match banned.is_empty() || (0..logits.len()).any(is_open) {
            true => banned,
            false => &[],
        };
        self.sample_adjusted(logits, |adjusted| {
            // Most words allow all of their tokens or none.
            for (word, chunk) in adjusted.chunks_mut(32).enumerate() {
                match allowed.get(word).copied().unwrap_or(0) {
                    u32::MAX => {}
                    0 => chunk.fill(f32::NAN),
                    bits => {
                        let banned = |(bit, logit)| (bits >> bit & 1 == 0).then_some(logit);
                        chunk.iter_mut().enumerate().filter_map(banned).for_each(|logit| *logit = f32::NAN);
                    }
                }
            }
            exclude(adjusted, banned);
        })
    }

    /// Chooses from a copy of the logits after penalties, bias and `restrict`, which makes tokens
    /// NaN.
    fn sample_adjusted(&mut self, logits: &[f32], restrict: impl FnOnce(&mut [f32])) -> u32 {
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        self.adjust(&mut adjusted);
        restrict(&mut adjusted);
        let token = self.choose(&adjusted);
        self.adjusted = adjusted;
        if !self.params.leaves_logits_alone() {
            *self.counts.entry(token).or_default() += 1;
        }
        token
    }

    /// Penalties and bias. Tokens beyond the vocabulary are passed over.
    fn adjust(&self, logits: &mut [f32]) {
        let p = &self.params;
        if p.repetition_penalty != 1.0 {
            let fresh = self.counts.keys().filter(|token| !self.prompt.contains(token));
            for &token in self.prompt.iter().chain(fresh) {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = match *logit > 0.0 {
                        true => *logit / p.repetition_penalty,
                        false => *logit * p.repetition_penalty,
                    };
                }
            }
        }
        for (&token, &count) in &self.counts {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= p.presence_penalty + p.frequency_penalty * count as f32;
            }
        }
        for &(token, bias) in &p.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        let index = self.drawn;
        self.drawn += 1;
        if self.params.temperature == 0.0 {
            return argmax(logits);
        }
        let candidates = &mut self.candidates;
        candidates.clear();
        candidates
            .extend(logits.iter().enumerate().filter(|(_, l)| !l.is_nan()).map(|(i, &l)| (l, i as u32)));
        // Ties are broken by token id, so that equal logits give equal answers everywhere.
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let k = self.params.top_k;
        if k > 0 && k < candidates.len() {
            candidates.select_nth_unstable_by(k - 1, order);
            candidates.truncate(k);
        }
        candidates.sort_unstable_by(order);
        self.draw(index)
    }

    /// The `index`-th draw among the candidates, which are sorted and cut to `top_k`.
    fn draw(&mut self, index: u64) -> u32 {
        let candidates = &mut self.candidates;
        let Some(&(max, _)) = candidates.first() else { return 0 };
        let mut total = 0.0;
        for (value, _) in candidates.iter_mut() {
            *value = if max.is_finite() { ((*value - max) / self.params.temperature).exp() } else { 1.0 };
            total += *value;
        }
        let mut kept = candidates.len();
        if self.params.top_p < 1.0 {
            let mut reached = 0.0;
            for (i, (p, _)) in candidates.iter().enumerate() {
                reached += p;
                if reached >= self.params.top_p * total {
                    kept = i + 1;
                    break;
                }
            }
        }
        let floor = self.params.min_p * candidates[0].0;
        kept = candidates[..kept].iter().position(|(p, _)| *p < floor).unwrap_or(kept).max(1);
        let total: f32 = candidates[..kept].iter().map(|(p, _)| p).sum();
        let mut target = uniform(self.params.seed, index) * total;
        for (p, token) in &candidates[..kept] {
            target -= p;
            if target < 0.0 {
                return *token;
            }
        }
        candidates[kept - 1].1
    }
}

fn exclude(logits: &mut [f32], tokens: &[u32]) {
    for &token in tokens {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = f32::NAN;
        }
    }
}

/// Uniform in [0, 1) from (seed, index) alone.
fn uniform(seed: u64, index: u64) -> f32 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_word_pos(u128::from(index) * 16);
    (rng.next_u32() >> 8) as f32 / (1 << 24) as f32
}

#[cfg(test)]
mod tests;
