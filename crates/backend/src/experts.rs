//! A mixture of experts: the rule of the router and the weights on their way to a device.
//!
//! A layer adds to each row `x` the sum of its chosen experts,
//! `x += Σ wₑ · downₑ(gate(gateₑ n, upₑ n))` with `n = norm(x)` and biases where the matrices have
//! them, and then its shared expert with weight 1, or `σ(gate · n)` where it has a gate. Experts
//! are added in ascending id, so that the result of a row does not depend on the other rows.
//! [`route`] is the specification of the choice.

use crate::{BackendError, Gate, Result, WeightFormat};

/// How the logits of a router become the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterRule {
    /// Experts of a row.
    pub chosen: usize,
    pub scores: RouterScores,
    /// Divides the weights by their sum.
    pub normalize: bool,
    /// Factor of the weights after that.
    pub factor: f32,
    /// Experts are chosen from some groups only; from all if absent.
    pub groups: Option<ExpertGroups>,
}

/// The experts of a layer as groups of neighbours, all of one size. A group is as strong as the sum of
/// its two largest scores, corrections included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    pub count: usize,
    /// The strongest groups, from which experts are chosen.
    pub kept: usize,
}

/// The scores that a router computes from its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// Softmax over all experts.
    Softmax,
    /// A sigmoid for each expert.
    Sigmoid,
}

/// The sizes and the router of one layer's experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsShape<'a> {
    /// Layers with experts that follow this one.
    pub following: usize,
    pub experts: usize,
    pub hidden: usize,
    /// Width of an expert: outputs of its gate.
    pub width: usize,
    /// Width of the shared expert; 0 if there is none.
    pub shared_width: usize,
    pub format: ExpertFormat,
    pub rule: RouterRule,
    pub gate: Gate,
    /// Weights of the router, `[experts][hidden]`.
    pub router: &'a [f32],
    /// Added to the scores for the choice, but not to the weights.
    pub correction: Option<&'a [f32]>,
    /// Added to the logits of the router.
    pub router_bias: Option<&'a [f32]>,
    /// Weights of the gate on the shared expert, as many as a row has elements.
    pub shared_gate: Option<&'a [f32]>,
}

/// How all experts of a layer are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertFormat {
    Bf16,
    /// FP8 with a scale for each block of 128 × 128.
    Fp8Blocks,
    /// FP8 with a scale for each output.
    Fp8Channels,
    /// MXFP4.
    Mxfp4,
}

impl ExpertFormat {
    /// The format of other matrices that stores weights in the same way, if there is one.
    pub fn weights(self) -> Option<WeightFormat> {
        match self {
            Self::Bf16 => Some(WeightFormat::Bf16),
            Self::Fp8Blocks | Self::Fp8Channels => Some(WeightFormat::Fp8),
            Self::Mxfp4 => None,
        }
    }
}

/// An expert of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertId {
    Routed(usize),
    Shared,
}

impl RouterRule {
    /// Experts of a layer of `experts` that can be chosen together; 0 if the groups do not divide them.
    pub fn candidates(&self, experts: usize) -> usize {
        match self.groups {
            None => experts,
            Some(ExpertGroups { count, kept }) if count > 0 && experts.is_multiple_of(count) => {
                experts / count * kept.min(count)
            }
            Some(_) => 0,
        }
    }
}

impl ExpertsShape<'_> {
    /// Refuses shapes that no device can compute.
    pub fn check(&self) -> Result<()> {
        let Self { experts, hidden, width, rule, .. } = *self;
        let sized = experts > 0 && hidden > 0 && width > 0;
        let router = experts.checked_mul(hidden) == Some(self.router.len());
        let gated = self.shared_gate.is_none_or(|gate| gate.len() == hidden && self.shared_width > 0);
        let corrected = [self.correction, self.router_bias].iter().flatten().all(|c| c.len() == experts);
        if sized && router && gated && corrected && (1..=rule.candidates(experts)).contains(&rule.chosen) {
            return Ok(());
        }
        Err(BackendError::Shape {
            what: "a mixture of experts".into(),
            detail: format!(
                "{} of {experts} experts of {width} (groups: {:?}) for rows of {hidden}, {} router weights, \
                 {:?} corrections",
                rule.chosen,
                rule.groups,
                self.router.len(),
                self.correction.map(<[f32]>::len)
            ),
        })
    }

    /// Width of an expert.
    pub fn width_of(&self, id: ExpertId) -> usize {
        match id {
            ExpertId::Routed(_) => self.width,
            ExpertId::Shared => self.shared_width,
        }
    }

    /// Refuses an expert that this layer does not have.
    pub fn check_id(&self, id: ExpertId) -> Result<()> {
        match id {
            ExpertId::Routed(index) if index < self.experts => Ok(()),
            ExpertId::Shared if self.shared_width > 0 => Ok(()),
            _ => Err(BackendError::Shape {
                what: "an expert".into(),
                detail: format!("{id:?} of {} and a shared width of {}", self.experts, self.shared_width),
            }),
        }
    }
}

/// The experts of one row in ascending id, with their weights. NaN is never chosen while another
/// expert is left; of equal scores the lower id is chosen.
///
/// `out` is cleared first.
pub fn route(rule: &RouterRule, logits: &[f32], correction: Option<&[f32]>, out: &mut Vec<(u32, f32)>) {
    let scores: Vec<f32> = match rule.scores {
        RouterScores::Sigmoid => logits.iter().map(|&l| 1.0 / (1.0 + (-l).exp())).collect(),
        RouterScores::Softmax => {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<f32> = logits.iter().map(|&l| (l - largest).exp()).collect();
            let sum: f32 = powers.iter().sum();
            powers.into_iter().map(|p| p / sum).collect()
        }
    };
    let keys: Vec<f32> = match correction {
        Some(correction) => scores.iter().zip(correction).map(|(s, c)| s + c).collect(),
        None => scores.clone(),
    };
    let mut left = vec![true; scores.len()];
    if let Some(groups) = rule.groups {
        leave_out_weak_groups(groups, &keys, &mut left);
    }
    out.clear();
    for _ in 0..rule.chosen.min(scores.len()) {
        if let Some(best) = largest(&keys, &left) {
            left[best] = false;
            out.push((best as u32, scores[best]));
        }
    }
    out.sort_unstable_by_key(|&(expert, _)| expert);
    // Keeps a row whose sigmoids all vanish finite.
    let sum: f32 = out.iter().map(|(_, weight)| weight).sum::<f32>().max(f32::MIN_POSITIVE);
    let factor = if rule.normalize { rule.factor / sum } else { rule.factor };
    out.iter_mut().for_each(|(_, weight)| *weight *= factor);
}

/// The largest key that is left, the lower index of equals; NaN only if there is no other.
fn largest(keys: &[f32], left: &[bool]) -> Option<usize> {
    let above = |e: usize, best: usize| keys[e] > keys[best] || keys[best].is_nan() && !keys[e].is_nan();
    (0..keys.len()).filter(|&e| left[e]).reduce(|best, e| if above(e, best) { e } else { best })
}

/// Takes the experts of all but the strongest groups from `left`.
fn leave_out_weak_groups(groups: ExpertGroups, keys: &[f32], left: &mut [bool]) {
    let size = keys.len() / groups.count.max(1);
    let strengths: Vec<f32> = keys
        .chunks(size.max(1))
        .map(|group| {
            let mut free = vec![true; group.len()];
            let mut take = || {
                largest(group, &free).map_or(0.0, |e| {
                    free[e] = false;
                    group[e]
                })
            };
            take() + take()
        })
        .collect();
    let mut weak = vec![true; strengths.len()];
    for _ in 0..groups.kept {
        if let Some(strongest) = largest(&strengths, &weak) {
            weak[strongest] = false;
        }
    }
    for (group, _) in weak.iter().enumerate().filter(|(_, weak)| **weak) {
        left[group * size..(group + 1) * size].fill(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(rule: RouterRule, logits: &[f32], correction: Option<&[f32]>) -> Vec<(u32, f32)> {
        let mut out = vec![(9, 9.0)];
        route(&rule, logits, correction, &mut out);
        out
    }

    const SOFTMAX: RouterRule =
        RouterRule { chosen: 2, scores: RouterScores::Softmax, normalize: true, factor: 1.0, groups: None };

    #[test]
    fn softmax_is_normalized_over_the_chosen_if_asked() {
        let logits = [0.0, 2f32.ln(), 0.0, 4f32.ln()];
        let close = |found: Vec<(u32, f32)>, wanted: [(u32, f32); 2]| {
            let weights = found.iter().zip(&wanted).all(|(f, w)| f.0 == w.0 && (f.1 - w.1).abs() < 1e-6);
            assert!(found.len() == 2 && weights, "{found:?}");
        };
        close(chosen(SOFTMAX, &logits, None), [(1, 1.0 / 3.0), (3, 2.0 / 3.0)]);
        close(chosen(RouterRule { normalize: false, ..SOFTMAX }, &logits, None), [(1, 0.25), (3, 0.5)]);
    }

    #[test]
    fn the_correction_chooses_but_does_not_weigh() {
        let rule =
            RouterRule { chosen: 1, scores: RouterScores::Sigmoid, normalize: false, factor: 2.5, ..SOFTMAX };
        let found = chosen(rule, &[3.0, 0.0, -1.0], Some(&[-1.0, 0.0, 0.0]));
        assert_eq!(found, [(1, 1.25)]);
    }

    #[test]
    fn experts_come_from_the_strongest_groups_only() {
        let scores = RouterScores::Sigmoid;
        let groups = Some(ExpertGroups { count: 3, kept: 1 });
        let rule = RouterRule { scores, groups, ..SOFTMAX };
        let ids = |rule: RouterRule, logits: &[f32], correction: &[f32]| {
            chosen(rule, logits, Some(correction)).iter().map(|c| c.0).collect::<Vec<_>>()
        };
        // The largest score is alone in its group: the sum of two decides, not the maximum.
        let logits = [9.0, -9.0, -9.0, 1.0, 1.0, -9.0, 0.9, -9.0, -9.0];
        assert_eq!(ids(rule, &logits, &[0.0; 9]), [3, 4]);
        let two = RouterRule { groups: Some(ExpertGroups { count: 3, kept: 2 }), ..rule };
        assert_eq!(ids(two, &logits, &[0.0; 9]), [0, 3]);
        // Corrected scores may be negative, so experts of weak groups are left out, not set to 0.
        assert_eq!(ids(rule, &logits, &[-5.0, -5.0, -5.0, -3.0, -3.0, -3.0, -5.0, -5.0, -5.0]), [3, 4]);
        assert_eq!(ids(rule, &[f32::NAN; 9], &[0.0; 9]).len(), 2);
        assert_eq!(
            (rule.candidates(9), two.candidates(9), rule.candidates(8), SOFTMAX.candidates(8)),
            (3, 6, 0, 8)
        );
    }

    #[test]
    fn equal_scores_choose_the_lower_id_and_nan_comes_last() {
        assert_eq!(chosen(SOFTMAX, &[1.0; 5], None).iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1]);
        let rule = RouterRule { scores: RouterScores::Sigmoid, ..SOFTMAX };
        let ids = |logits: &[f32]| chosen(rule, logits, None).iter().map(|c| c.0).collect::<Vec<_>>();
        assert_eq!(ids(&[f32::NAN, -9.0, f32::NAN, -8.0]), [1, 3]);
        assert_eq!(ids(&[f32::NAN; 3]).len(), 2);
    }

    #[test]
    fn fewer_experts_than_are_chosen_is_refused_with_the_numbers() {
        let shape = ExpertsShape {
            following: 0,
            experts: 1,
            hidden: 2,
            width: 4,
            shared_width: 0,
            format: ExpertFormat::Bf16,
            rule: SOFTMAX,
            gate: Gate::Silu,
            router: &[0.0; 2],
            correction: None,
            router_bias: None,
            shared_gate: None,
        };
        assert!(shape.check().unwrap_err().to_string().contains("2 of 1 experts"));
        assert!(shape.check_id(ExpertId::Routed(1)).is_err() && shape.check_id(ExpertId::Shared).is_err());
    }
}
