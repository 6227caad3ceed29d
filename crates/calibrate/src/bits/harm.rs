//! The harm of quantizing one unit alone.
//!
//! A probe is read with an exact cache up to its ending. Then the history of one unit is replaced
//! by the rows that its codes dequantize to, the ending is read, and the predictions are compared
//! with the exact ones. The effect of codes on the reading of the prompt itself is left to the
//! verification. Heads of a layer are also quantized together: if they stand in for one another,
//! the harm of both is more than the sum.

use super::judge::{Judge, Stage, set_table};
use super::layers::WidthLayers;
use super::probe::Probe;
use super::scores::{group_weights, mean_and_error};
use super::table::{HarmMap, WIDTHS, WidthTable, check_widths};
use crate::error::CalibrateError;
use oscar_backend::Calibrates;
use oscar_codec::format::default_clip;
use oscar_codec::{Rounding, Side};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Widths at which all heads of a layer and side are quantized together.
pub(super) const JOINT_WIDTHS: [u32; 2] = [1, 2];

/// Joint harm below this multiple of the sum is noise.
const LEAST_SYNERGY: f64 = 1.2;

/// Relative error of a harm that one probe measured.
const ERROR_OF_ONE: f64 = 0.5;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HarmOptions {
    /// Widths that are measured, ascending; the others follow from them by the distortion of the
    /// codes.
    pub measured: Vec<u32>,
}

impl Default for HarmOptions {
    fn default() -> Self {
        Self { measured: vec![1, 2, 4] }
    }
}

impl HarmOptions {
    pub fn check(&self) -> Result<(), CalibrateError> {
        check_widths("--harm-widths", &self.measured, WIDTHS[WIDTHS.len() - 1])
    }
}

/// What is measured on a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HarmPlan {
    pub layers: WidthLayers,
    pub kv_heads: usize,
    /// Widths of each unit.
    pub units: Vec<Vec<u32>>,
    /// Whether the heads of a layer are also quantized together.
    pub joint: bool,
}

impl HarmPlan {
    /// Every unit at these widths.
    pub fn whole(layers: WidthLayers, kv_heads: usize, widths: &[u32]) -> Self {
        let units = vec![widths.to_vec(); 2 * layers.count() * kv_heads];
        Self { layers, kv_heads, units, joint: kv_heads > 1 }
    }

    pub fn is_empty(&self) -> bool {
        self.units.iter().all(Vec::is_empty)
    }

    /// The readings that begin at the layer with this place among those that have widths.
    fn readings(&self, layer: usize) -> Vec<(Target, Vec<(u32, u32)>)> {
        let heads = self.kv_heads;
        let mut all = Vec::new();
        for unit in 2 * layer * heads..2 * (layer + 1) * heads {
            for &width in &self.units[unit] {
                let mut widths = vec![(0, 0); heads];
                *side_of(&mut widths[unit / 2 % heads], unit) = width;
                all.push((Target::Unit { unit, width }, widths));
            }
        }
        if self.joint {
            for side in 0..2 {
                for (index, &width) in JOINT_WIDTHS.iter().enumerate() {
                    let mut widths = vec![(0, 0); heads];
                    widths.iter_mut().for_each(|pair| *side_of(pair, side) = width);
                    all.push((Target::Joint { side, index }, widths));
                }
            }
        }
        all
    }

    /// Readings of the ending of a probe.
    pub fn passes(&self) -> usize {
        2 + (0..self.layers.count()).map(|layer| self.readings(layer).len()).sum::<usize>()
    }

    /// Tokens through the whole model that measuring a probe costs.
    pub(super) fn work(&self, probe: &Probe) -> usize {
        let from = |place| self.layers.work_from(place, self.readings(place).len() * probe.ending());
        probe.tokens.len() + probe.ending() + (0..self.layers.count()).map(from).sum::<usize>()
    }
}

/// Of a pair of key and value widths, the side of a unit.
pub(super) fn side_of(pair: &mut (u32, u32), unit: usize) -> &mut u32 {
    if unit.is_multiple_of(2) { &mut pair.0 } else { &mut pair.1 }
}

#[derive(Clone, Copy)]
enum Target {
    Unit { unit: usize, width: u32 },
    Joint { side: usize, index: usize },
}

/// What one probe says: mean divergences over its scored positions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeHarm {
    pub group: String,
    /// All units at two bits.
    pub yardstick: f64,
    /// One unit: `[unit][width − 1]`, where it was measured.
    pub units: Vec<[Option<f64>; WIDTHS.len()]>,
    /// All heads of a layer: `[layer][side][width]`.
    pub joint: Vec<[[Option<f64>; JOINT_WIDTHS.len()]; 2]>,
}

/// Measures a probe. `progress` receives the work that was done, in tokens.
pub(super) fn measure<B: Calibrates>(
    judge: &Judge<'_, B>,
    stage: &mut Stage<B>,
    probe: &Probe,
    plan: &HarmPlan,
    progress: &mut dyn FnMut(usize),
) -> Result<ProbeHarm, CalibrateError> {
    let (batch, layers) = (stage.readings, &plan.layers);
    let mut trials = judge.trials(stage, probe)?;
    progress(probe.tokens.len());
    let positions = probe.scored.len().max(1);
    let mut harm = ProbeHarm {
        group: probe.group.clone(),
        yardstick: 0.0,
        units: vec![[None; WIDTHS.len()]; plan.units.len()],
        joint: vec![Default::default(); layers.count()],
    };
    let mut found = Vec::new();
    for (place, &layer) in layers.list().iter().enumerate() {
        for readings in plan.readings(place).chunks(batch) {
            judge.check_cancelled()?;
            for (version, (_, widths)) in readings.iter().enumerate() {
                trials.set(version, layer, widths)?;
            }
            found.clear();
            trials.run(layer, readings.len(), |r, l| (l == layer).then_some(r), &mut found)?;
            for ((target, _), found) in readings.iter().zip(found.chunks_exact(positions)) {
                let mean = found.iter().map(|d| d.kl).sum::<f64>() / positions as f64;
                match *target {
                    Target::Unit { unit, width } => harm.units[unit][width as usize - 1] = Some(mean),
                    Target::Joint { side, index } => harm.joint[place][side][index] = Some(mean),
                }
            }
            progress(layers.work_from(place, readings.len() * probe.ending()));
        }
    }
    set_table(&mut trials, 0, &WidthTable::uniform(layers.count(), plan.kv_heads, 2), layers)?;
    found.clear();
    trials.run(0, 1, |_, _| Some(0), &mut found)?;
    harm.yardstick = found.iter().map(|d| d.kl).sum::<f64>() / positions as f64;
    progress(probe.ending());
    Ok(harm)
}

/// Results of probes by group, with the weight of each group.
struct Groups<'a> {
    groups: Vec<(f64, f64, Vec<&'a ProbeHarm>)>,
}

impl<'a> Groups<'a> {
    fn of(probes: &'a [ProbeHarm]) -> Self {
        let mut groups: BTreeMap<&str, Vec<&ProbeHarm>> = BTreeMap::new();
        for probe in probes {
            groups.entry(&probe.group).or_default().push(probe);
        }
        let yardstick =
            |group: &[&ProbeHarm]| mean_and_error(&group.iter().map(|p| p.yardstick).collect::<Vec<_>>()).0;
        let weights = group_weights(groups.iter().map(|(name, group)| (*name, yardstick(group))));
        let groups = groups.into_values().zip(weights);
        Self { groups: groups.map(|(group, weight)| (weight, yardstick(&group), group)).collect() }
    }

    /// Weighted sum over groups of a divergence, and its standard error; `None` if no probe has it.
    /// Within a group the estimate is the ratio to the yardstick of the same probes, because probes
    /// differ in how much they are moved by anything.
    fn relative(&self, of: impl Fn(&ProbeHarm) -> Option<f64>) -> Option<(f64, f64)> {
        let (mut sum, mut variance, mut any) = (0.0, 0.0, false);
        for (weight, yardstick, group) in &self.groups {
            let pairs: Vec<(f64, f64)> = group.iter().filter_map(|p| Some((of(p)?, p.yardstick))).collect();
            if pairs.is_empty() {
                continue;
            }
            any = true;
            let n = pairs.len() as f64;
            let (own, beside) =
                (pairs.iter().map(|p| p.0).sum::<f64>(), pairs.iter().map(|p| p.1).sum::<f64>());
            let ratio = own / beside.max(1e-12);
            let scale = weight * yardstick.max(1e-12);
            sum += scale * ratio;
            let error = match pairs.len() {
                1 => ERROR_OF_ONE * ratio,
                _ => {
                    let squares: f64 = pairs.iter().map(|(d, y)| (d - ratio * y).powi(2)).sum();
                    (squares / (n * (n - 1.0))).sqrt() / (beside / n).max(1e-12)
                }
            };
            variance += (scale * error).powi(2);
        }
        any.then_some((sum, variance.sqrt()))
    }
}

impl HarmMap {
    /// Sums up what probes said: the groups' divergences relative to those of uniform two bits.
    pub fn of(layers: usize, kv_heads: usize, probes: &[ProbeHarm]) -> Self {
        let groups = Groups::of(probes);
        let distortion = code_distortions();
        let mut error = Vec::with_capacity(2 * layers * kv_heads);
        let mut harm: Vec<[f32; WIDTHS.len()]> = (0..2 * layers * kv_heads)
            .map(|unit| {
                let measured: Vec<_> =
                    (0..WIDTHS.len()).map(|w| groups.relative(|p| p.units[unit][w])).collect();
                let (mut harm, mut errors) = ([0.0; WIDTHS.len()], [0.0; WIDTHS.len()]);
                for w in 0..WIDTHS.len() {
                    if let Some((value, spread)) = between(&measured, &distortion, w) {
                        (harm[w], errors[w]) = (value as f32, spread as f32);
                    }
                }
                // A wider code is never worse; where noise says so, the narrower one's figure is
                // the better guess.
                for w in 1..harm.len() {
                    harm[w] = harm[w].min(harm[w - 1]);
                }
                error.push(errors);
                harm
            })
            .collect();
        // Heads of a layer that stand in for one another: each is as harmful as its share of both.
        for layer in 0..layers {
            for side in 0..2 {
                let units = || (0..kv_heads).map(|head| 2 * (layer * kv_heads + head) + side);
                let mut factors = [1.0f64; JOINT_WIDTHS.len()];
                for (index, &width) in JOINT_WIDTHS.iter().enumerate() {
                    let alone: f64 = units().map(|u| f64::from(harm[u][width as usize - 1])).sum();
                    let together = groups.relative(|p| p.joint[layer][side][index]).map(|(harm, _)| harm);
                    if let Some(together) = together.filter(|&t| t > LEAST_SYNERGY * alone && alone > 0.0) {
                        factors[index] = together / alone;
                    }
                }
                for unit in units() {
                    for (w, harm) in harm[unit].iter_mut().enumerate() {
                        *harm *= factors[w.min(JOINT_WIDTHS.len() - 1)] as f32;
                    }
                }
            }
        }
        Self { layers, kv_heads, harm, error, absent: vec![None; layers * kv_heads] }
    }

    /// The heads that are worth trying without history: the third that tolerates one bit on both
    /// sides best.
    pub fn expendable(&self) -> Vec<usize> {
        let one_bit = |head: &usize| self.harm[2 * head][0] + self.harm[2 * head + 1][0];
        let mut heads: Vec<usize> = (0..self.layers * self.kv_heads).collect();
        heads.sort_by(|a, b| one_bit(a).total_cmp(&one_bit(b)));
        heads.truncate(heads.len().div_ceil(3));
        heads.sort_unstable();
        heads
    }

    /// The units whose width in this table may change with better measurements, with the widths
    /// that decide it.
    pub(super) fn uncertain(&self, table: &WidthTable, measured: &[u32]) -> Vec<Vec<u32>> {
        let units = table.units();
        let at = |unit: usize, width: u32| {
            let index = (width as usize).checked_sub(1)?;
            let harm = f64::from(*self.harm[unit].get(index)?);
            Some((harm, self.error.get(unit).map_or(0.0, |e| f64::from(e[index]))))
        };
        // What one bit more or less does, and its standard error.
        let step = |unit: usize, from: u32, to: u32| {
            let ((a, ea), (b, eb)) = (at(unit, from)?, at(unit, to)?);
            Some(((a - b).abs(), ea.hypot(eb)))
        };
        let coded: Vec<usize> = (0..units.len()).filter(|&u| units[u] > 0).collect();
        let losses = coded.iter().filter_map(|&u| step(u, units[u], units[u] - 1));
        let gains = coded.iter().filter_map(|&u| step(u, units[u], units[u] + 1));
        let cheapest = losses.map(|s| s.0).fold(f64::INFINITY, f64::min);
        let dearest = gains.map(|s| s.0).fold(0.0, f64::max);
        let price = if cheapest.is_finite() { 0.5 * (cheapest + dearest) } else { dearest };
        let mut wanted = vec![Vec::new(); units.len()];
        for unit in coded {
            let width = units[unit];
            let down = step(unit, width, width - 1).is_some_and(|(loss, e)| loss - 2.0 * e < price);
            let up = step(unit, width, width + 1).is_some_and(|(gain, e)| gain + 2.0 * e > price);
            if down || up {
                let near = [width - u32::from(down), width, width + u32::from(up)];
                wanted[unit] = measured.iter().copied().filter(|w| near.contains(w)).collect();
            }
        }
        wanted
    }
}

/// The harm of a width and its standard error, from those that were measured. Divergence is
/// quadratic in the error of the codes: between two measured widths it falls by equal factors, and
/// beyond them it scales with the power of the error.
fn between(
    measured: &[Option<(f64, f64)>],
    distortion: &[f64; WIDTHS.len()],
    width: usize,
) -> Option<(f64, f64)> {
    let found = |w: usize| measured[w].map(|(harm, error)| (w, harm, error));
    let below = (0..=width).rev().find_map(found);
    let above = (width..measured.len()).find_map(found);
    let scaled = |(w, harm, error): (usize, f64, f64)| {
        let scale = distortion[width] / distortion[w];
        (harm * scale, error * scale)
    };
    match (below, above) {
        (Some((a, ..)), Some(_)) if a == width => measured[width],
        (Some((a, low, e)), Some((b, high, f))) => {
            let share = (width - a) as f64 / (b - a) as f64;
            let mixed = |x: f64, y: f64| x.max(1e-12).powf(1.0 - share) * y.max(1e-12).powf(share);
            Some((mixed(low, high), mixed(e, f)))
        }
        (Some(one), None) | (None, Some(one)) => Some(scaled(one)),
        (None, None) => None,
    }
}

/// Mean squared error of each width on rows like those a rotation makes: sums of many channels,
/// nearly normal.
fn code_distortions() -> [f64; WIDTHS.len()] {
    const CHANNELS: usize = 128;
    let mut state = 0x9E37_79B9u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    let rows: Vec<f32> = (0..64 * CHANNELS).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect();
    WIDTHS.map(|width| {
        let (mut coded, mut codes) = (rows.clone(), vec![0; CHANNELS]);
        for row in coded.chunks_exact_mut(CHANNELS) {
            Rounding::default().recode(row, default_clip(Side::Key, width), width, &mut codes);
        }
        coded.iter().zip(&rows).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / rows.len() as f64
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(group: &str, yardstick: f64, harm: [f64; 2]) -> ProbeHarm {
        let at_two = |h| [None, Some(h), None, None];
        let joint = vec![[[None; 2]; 2]; 1];
        ProbeHarm { group: group.into(), yardstick, units: harm.map(at_two).to_vec(), joint }
    }

    #[test]
    fn groups_count_alike_and_unmeasured_widths_follow_the_error() {
        let probes =
            [probe("sort", 1.0, [0.2, 0.0]), probe("sort", 3.0, [0.2, 0.4]), probe("copy", 0.5, [0.0, 0.5])];
        let map = HarmMap::of(1, 1, &probes);
        assert!((map.harm[0][1] - 0.05).abs() < 1e-6 && (map.harm[1][1] - 0.55).abs() < 1e-6, "{map:?}");
        assert!(map.error[0][1] > 0.0 && map.error[1][1] > 0.2, "one probe of `copy` is uncertain");
        for unit in &map.harm {
            let ratio = unit[0] / unit[1];
            assert!((2.0..4.0).contains(&ratio), "one bit has about three times the error of two: {ratio}");
            assert!(unit[2] < unit[1] / 3.0 && unit[3] < unit[2] / 3.0);
        }
        // Copying that two bits leave alone: its noise counts by a tenth of what the others are
        // measured in.
        let quiet = [probes[0].clone(), probes[1].clone(), probe("copy", 1e-6, [0.0, 1e-6])];
        assert!((HarmMap::of(1, 1, &quiet).harm[1][1] - 0.1).abs() < 1e-4);
        for bad in [vec![], vec![0], vec![2, 1], vec![5]] {
            assert!(HarmOptions { measured: bad }.check().is_err());
        }
    }

    #[test]
    fn heads_that_stand_in_for_one_another_are_each_as_harmful_as_both() {
        let mut both = probe("copy", 1.0, [0.1, 0.0]);
        both.units = vec![[None, Some(0.1), None, None], [None; 4], [None, Some(0.1), None, None], [None; 4]];
        let alone = HarmMap::of(1, 2, std::slice::from_ref(&both));
        both.joint[0][0][1] = Some(0.8);
        let together = HarmMap::of(1, 2, &[both.clone()]);
        assert!((together.harm[0][1] / alone.harm[0][1] - 4.0).abs() < 1e-3, "{together:?}");
        both.joint[0][0][1] = Some(0.21);
        assert_eq!(HarmMap::of(1, 2, &[both]).harm, alone.harm, "the sum, but for noise");
    }

    #[test]
    fn probes_are_spent_on_units_near_the_price_of_a_bit() {
        let harm =
            vec![[9.0, 3.0, 1.0, 0.5], [0.9, 0.3, 0.1, 0.0], [1.1, 0.4, 0.1, 0.0], [9e-3, 1e-3, 0.0, 0.0]];
        let map = HarmMap { layers: 2, kv_heads: 1, harm, error: vec![[0.08; 4]; 4], absent: vec![None; 2] };
        let table = WidthTable::from_units(2, 1, &[4, 2, 2, 1]);
        let wanted = map.uncertain(&table, &WIDTHS);
        assert!(!wanted[1].is_empty() && !wanted[2].is_empty(), "{wanted:?}");
        assert!(wanted[3].is_empty(), "a unit that needs nothing is left alone: {wanted:?}");
        let plan = HarmPlan { layers: WidthLayers::all(2), kv_heads: 1, units: wanted, joint: false };
        let whole = HarmPlan::whole(WidthLayers::all(2), 1, &WIDTHS);
        assert!(!plan.is_empty() && plan.passes() < whole.passes());
    }
}
