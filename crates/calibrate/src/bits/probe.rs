//! The harm of coding one unit alone.
//!
//! A probe is read with an exact cache up to shortly before the positions that are scored. Then the
//! history of one unit is replaced by what its code would give back, the rest of the probe is read,
//! and the predictions are compared with the exact ones. So a unit costs the end of each probe
//! instead of the whole: some hundred tokens. What coding does to the reading of the prompt itself
//! is left to the joint verification.

use super::judge::{Cache, Judge, Prediction, Scores, group_weights};
use super::table::{HarmMap, WIDTHS, check_widths};
use crate::error::CalibrateError;
use half::bf16;
use oscar_backend::{Backend, CacheHead, Calibrates};
use oscar_codec::format::default_clip;
use oscar_codec::{Rounding, Side, affine};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Something the model should predict as well as with an exact cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Probes of a group are one figure: `text`, `copy`, …
    pub group: String,
    pub tokens: Vec<u32>,
    /// Positions whose predictions count; position `p` predicts token `p + 1`.
    pub scored: Range<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HarmOptions {
    /// Tokens before the first scored one that already read the coded unit: a question is answered
    /// while it is read.
    pub lead: usize,
    /// Widths that are measured, ascending; the others follow from them by the distortion of the
    /// codes.
    pub measured: Vec<u32>,
}

impl Default for HarmOptions {
    fn default() -> Self {
        Self { lead: 64, measured: WIDTHS.to_vec() }
    }
}

impl HarmOptions {
    pub fn check(&self) -> Result<(), CalibrateError> {
        check_widths("--harm-widths", &self.measured)
    }

    /// Passes over the end of a probe that measuring it takes: every unit and width, the exact
    /// cache, and all units at two bits.
    pub fn passes(&self, layers: usize, kv_heads: usize) -> usize {
        2 * layers * kv_heads * self.measured.len() + 2
    }
}

/// Divergence of a probe, summed over positions, with each of these heads (by number) without
/// history, all else exact. History is left out while the prompt is read too: nothing cheaper would
/// show what the head passes on.
pub fn absent_harm<B: Backend>(
    judge: &Judge<'_, B>,
    probe: &Probe,
    heads: &[usize],
    progress: impl FnMut(),
) -> Result<Vec<f64>, CalibrateError> {
    judge.without_history(probe, heads, progress)
}

/// What one probe says about every unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeHarm {
    pub group: String,
    pub positions: usize,
    /// Divergence, summed over positions, with all units at two bits.
    pub yardstick: f64,
    /// The same with one unit coded: `[unit][measured width]`.
    pub units: Vec<Vec<f64>>,
    /// The same with one head without history: `(head, divergence)` of those that were tried.
    #[serde(default)]
    pub absent: Vec<(usize, f64)>,
}

/// Codes every unit alone at every measured width. `progress` hears of each pass over the end of
/// the probe.
pub fn probe_harm<B: Calibrates>(
    judge: &Judge<'_, B>,
    probe: &Probe,
    options: &HarmOptions,
    mut progress: impl FnMut(),
) -> Result<ProbeHarm, CalibrateError> {
    options.check()?;
    let config = judge.transformer.config();
    let units = 2 * config.layers * config.kv_heads;
    let mut stage = CodedStage::open(judge, probe, options.lead)?;
    progress();
    let mut harm = vec![Vec::with_capacity(options.measured.len()); units];
    for (unit, harm) in harm.iter_mut().enumerate() {
        for &width in &options.measured {
            stage.set(unit, width)?;
            harm.push(stage.score()?.total());
            progress();
        }
        stage.set(unit, EXACT)?;
        stage.forget(unit);
    }
    for unit in 0..units {
        stage.set(unit, 2)?;
    }
    let yardstick = stage.score()?.total();
    progress();
    let (group, positions) = (probe.group.clone(), probe.scored.len());
    Ok(ProbeHarm { group, positions, yardstick, units: harm, absent: Vec::new() })
}

impl HarmMap {
    /// Sums up what probes said: the groups' divergences relative to those of uniform two bits.
    pub fn of(layers: usize, kv_heads: usize, probes: &[ProbeHarm], options: &HarmOptions) -> Self {
        let mut groups: BTreeMap<&str, Vec<&ProbeHarm>> = BTreeMap::new();
        for probe in probes {
            groups.entry(&probe.group).or_default().push(probe);
        }
        let a_position = |group: &[&ProbeHarm], of: &dyn Fn(&ProbeHarm) -> f64| -> f64 {
            let positions: usize = group.iter().map(|p| p.positions).sum();
            group.iter().map(|p| of(p)).sum::<f64>() / positions.max(1) as f64
        };
        let weights = group_weights(groups.values().map(|group| a_position(group, &|p| p.yardstick)));
        let relative = |of: &dyn Fn(&ProbeHarm) -> f64| -> f64 {
            groups.values().zip(&weights).map(|(group, weight)| a_position(group, of) * weight).sum()
        };
        let measured = |unit: usize, width: usize| relative(&|p| p.units[unit][width]);
        let distortion = code_distortions();
        let harm = (0..2 * layers * kv_heads)
            .map(|unit| {
                let mut harm = [0.0; WIDTHS.len()];
                for (index, &width) in WIDTHS.iter().enumerate() {
                    // Divergence is quadratic in the error, so unmeasured widths scale with its
                    // power.
                    let nearest = (0..options.measured.len())
                        .min_by_key(|&m| options.measured[m].abs_diff(width))
                        .unwrap_or_default();
                    let scale = distortion[index] / distortion[options.measured[nearest] as usize - 1];
                    harm[index] = (measured(unit, nearest) * scale) as f32;
                }
                // A wider code is never worse; where noise says so, the narrower one's figure is
                // the better guess.
                for width in 1..harm.len() {
                    harm[width] = harm[width].min(harm[width - 1]);
                }
                harm
            })
            .collect();
        // A head counts as measured where every probe tried it.
        let find = |p: &ProbeHarm, head| p.absent.iter().find(|(h, _)| *h == head).map(|(_, d)| *d);
        let absent = (0..layers * kv_heads)
            .map(|head| {
                let tried = !probes.is_empty() && probes.iter().all(|p| find(p, head).is_some());
                tried.then(|| relative(&|p| find(p, head).unwrap_or_default()) as f32)
            })
            .collect();
        Self { layers, kv_heads, harm, absent }
    }

    /// The heads that are worth trying without history: the half that bears one bit on both sides
    /// best.
    pub fn expendable(&self) -> Vec<usize> {
        let one_bit = |head: &usize| self.harm[2 * head][0] + self.harm[2 * head + 1][0];
        let mut heads: Vec<usize> = (0..self.layers * self.kv_heads).collect();
        heads.sort_by(|a, b| one_bit(a).total_cmp(&one_bit(b)));
        heads.truncate(heads.len() / 2);
        heads.sort_unstable();
        heads
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
        let mut coded = rows.clone();
        recode(&mut coded, CHANNELS, width, default_clip(Side::Key, width), &Rounding::default());
        coded.iter().zip(&rows).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / rows.len() as f64
    })
}

/// A unit that is not coded.
pub(super) const EXACT: u32 = 0;

/// The rows of one head as the exact cache holds them.
struct HeadRows {
    keys: Vec<bf16>,
    values: Vec<bf16>,
}

/// A probe read up to its end, whose history can be coded unit by unit.
pub(super) struct CodedStage<'a, 'j, B: Backend> {
    judge: &'a Judge<'j, B>,
    probe: &'a Probe,
    cache: Cache<B>,
    /// Positions that the end of the probe would read as codes.
    history: Range<usize>,
    /// First position of the end.
    end: usize,
    reference: Vec<Prediction>,
    /// Width of each unit now.
    widths: Vec<u32>,
    exact: Vec<Option<HeadRows>>,
    head_dim: usize,
}

impl<'a, 'j, B: Calibrates> CodedStage<'a, 'j, B> {
    pub(super) fn open(
        judge: &'a Judge<'j, B>,
        probe: &'a Probe,
        lead: usize,
    ) -> Result<Self, CalibrateError> {
        let config = judge.transformer.config();
        let end = probe.scored.start.saturating_sub(lead);
        // The boundary moves while the end is read; the one of its middle stands for all.
        let middle = end + (probe.tokens.len() - end) / 2;
        let history = judge.windows.sink()..judge.windows.boundary(middle).min(end);
        if history.is_empty() {
            return Err(CalibrateError::Option {
                option: "--bits",
                problem: format!(
                    "a '{}' probe of {} tokens leaves nothing to code outside the BF16 windows",
                    probe.group,
                    probe.tokens.len()
                ),
            });
        }
        let mut cache = judge.cache(&judge.layout(None)?, probe.tokens.len())?;
        judge.run(&mut cache, &probe.tokens[..end], &(0..0), |_, _| {})?;
        let heads = config.layers * config.kv_heads;
        let mut stage = Self {
            judge,
            probe,
            cache,
            history,
            end,
            reference: Vec::new(),
            widths: vec![EXACT; 2 * heads],
            exact: (0..heads).map(|_| None).collect(),
            head_dim: config.head_dim,
        };
        let mut reference = Vec::with_capacity(probe.scored.len());
        stage.read_end(|logits| reference.push(Prediction::of(logits)))?;
        stage.reference = reference;
        Ok(stage)
    }

    /// Codes a unit's history at a width, or restores it.
    pub(super) fn set(&mut self, unit: usize, width: u32) -> Result<(), CalibrateError> {
        if self.widths[unit] == width {
            return Ok(());
        }
        self.widths[unit] = width;
        let index = unit / 2;
        let kv_heads = self.judge.transformer.config().kv_heads;
        let head = CacheHead { layer: index / kv_heads, kv_head: index % kv_heads };
        if self.exact[index].is_none() {
            let Cache { runner, sequence } = &self.cache;
            let (keys, values) = runner.read_rows(sequence, head, self.history.clone())?;
            // The cache holds BF16, so nothing is lost.
            let narrow = |rows: Vec<f32>| rows.into_iter().map(bf16::from_f32).collect();
            self.exact[index] = Some(HeadRows { keys: narrow(keys), values: narrow(values) });
        }
        let Some(rows) = &self.exact[index] else { return Ok(()) };
        let rounding = &self.judge.roundings[index];
        let of_values = rounding.of_values();
        let side = |rows: &[bf16], side: Side, width: u32| {
            let mut rows: Vec<f32> = rows.iter().map(|v| v.to_f32()).collect();
            if width != EXACT {
                let rounding = if side == Side::Key { rounding } else { &of_values };
                recode(&mut rows, self.head_dim, width, default_clip(side, width), rounding);
            }
            rows
        };
        let keys = side(&rows.keys, Side::Key, self.widths[2 * index]);
        let values = side(&rows.values, Side::Value, self.widths[2 * index + 1]);
        let Cache { runner, sequence } = &mut self.cache;
        Ok(runner.write_rows(sequence, head, self.history.start, &keys, &values)?)
    }

    /// Lets go of the exact rows of a unit's head, which must be exact in the cache.
    fn forget(&mut self, unit: usize) {
        let index = unit / 2;
        if self.widths[2 * index] == EXACT && self.widths[2 * index + 1] == EXACT {
            self.exact[index] = None;
        }
    }

    /// Reads the end of the probe and compares its predictions.
    pub(super) fn score(&mut self) -> Result<Scores, CalibrateError> {
        let mut scores = Scores::default();
        let reference = std::mem::take(&mut self.reference);
        let mut exact = reference.iter();
        let group = &self.probe.group;
        let result = self.read_end(|logits| {
            if let Some(exact) = exact.next() {
                scores.add(group, exact, logits);
            }
        });
        self.reference = reference;
        result.map(|()| scores)
    }

    fn read_end(&mut self, mut seen: impl FnMut(&[f32])) -> Result<(), CalibrateError> {
        self.cache.sequence.rewind(self.end);
        let tokens = &self.probe.tokens[self.end..];
        self.judge.run(&mut self.cache, tokens, &self.probe.scored, |_, logits| seen(logits))
    }
}

/// What rows become when they are coded and read back.
fn recode(rows: &mut [f32], head_dim: usize, bits: u32, ratio: f64, rounding: &Rounding) {
    let mut codes = vec![0; head_dim];
    for row in rows.chunks_exact_mut(head_dim) {
        affine::sanitize(row, affine::SATURATION);
        let params = rounding.quantize(row, ratio, bits, &mut codes);
        for (value, &code) in row.iter_mut().zip(&codes) {
            *value = params.dequantize(code);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodeLayout, Composition, Feedback, KvFormat};

    #[test]
    fn groups_count_alike_and_unmeasured_widths_follow_the_error() {
        let probe = |group: &str, yardstick: f64, harm: [f64; 2]| ProbeHarm {
            group: group.into(),
            positions: 1,
            yardstick,
            units: harm.map(|h| vec![h]).to_vec(),
            absent: vec![(0, 2.0 * yardstick)],
        };
        let options = HarmOptions { measured: vec![2], ..HarmOptions::default() };
        let probes =
            [probe("text", 1.0, [0.2, 0.0]), probe("text", 3.0, [0.2, 0.4]), probe("copy", 0.5, [0.0, 0.5])];
        let map = HarmMap::of(1, 1, &probes, &options);
        assert_eq!(map.absent, [Some(2.0)]);
        assert_eq!(HarmMap { absent: Vec::new(), ..map.clone() }.expendable(), Vec::<usize>::new());
        assert!((map.harm[0][1] - 0.05).abs() < 1e-6 && (map.harm[1][1] - 0.55).abs() < 1e-6, "{map:?}");
        for unit in &map.harm {
            let ratio = unit[0] / unit[1];
            assert!((2.0..4.0).contains(&ratio), "one bit has about three times the error of two: {ratio}");
            assert!(unit[2] < unit[1] / 3.0 && unit[3] < unit[2] / 3.0);
        }
        // Copying that two bits leave alone: its noise counts by a tenth of what text is measured
        // in.
        let quiet = [probes[0].clone(), probes[1].clone(), probe("copy", 1e-6, [0.0, 1e-6])];
        assert!((HarmMap::of(1, 1, &quiet, &options).harm[1][1] - 0.1).abs() < 1e-4);
        for bad in [vec![], vec![0], vec![2, 1], vec![5]] {
            assert!(HarmOptions { measured: bad, ..HarmOptions::default() }.check().is_err());
        }
    }

    #[test]
    fn recoded_rows_are_what_the_cache_would_read() {
        let d = 128;
        let rows: Vec<f32> = (0..16 * d).map(|i| ((i * 7919 % 1013) as f32 - 500.0) / 90.0).collect();
        let falling: Vec<f32> = (0..d).map(|i| 0.9f32.powi(i as i32)).collect();
        let feedback = Feedback::of_spectrum(&falling, Composition::RHPbr).unwrap().unwrap();
        for bits in 1..=4u8 {
            let rounding = Rounding { unbiased: true, feedback: (bits > 2).then(|| feedback.clone()) };
            let codec = KvFormat::Oscar { bits }.codec(d, CodeLayout::Logical).unwrap();
            let codec = codec.with_rounding(rounding.clone()).unwrap();
            let mut page = vec![0; codec.page_bytes()];
            codec.quantize(&rows, &rows, &mut page).unwrap();
            let (mut keys, mut values) = (vec![0.0; 16 * d], vec![0.0; 16 * d]);
            codec.dequantize_rows(0, &page, &mut keys, &mut values).unwrap();
            for (side, expected) in [(Side::Key, keys), (Side::Value, values)] {
                let mut ours = rows.clone();
                recode(&mut ours, d, bits.into(), default_clip(side, bits.into()), codec.rounding(side));
                assert_eq!(ours, expected, "{bits} bits, {side:?}");
            }
        }
    }
}
