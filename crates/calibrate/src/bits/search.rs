//! The search for widths, from probes to verified tables.

use super::absent::{AbsentHarm, Candidates};
use super::checkpoint::{Checkpoint, Key};
use super::harm::{HarmPlan, measure};
use super::refine::{Neighbourhood, judge_tables};
use super::scores::Worse;
use super::{
    ABSENT, Freedom, HarmMap, HarmOptions, Judge, Probe, ProbeHarm, Scores, WIDTHS, WidthTable, solve,
};
use crate::{CalibrateError, CodeRounding, Metadata};
use oscar_backend::Calibrates;
use oscar_codec::MeanBits;
use std::path::Path;

/// Receives the progress of a calibration. Work is counted in tokens through the whole model, so
/// that equal steps take about equal time.
pub trait Watch {
    /// A stage of this much work begins.
    fn begin(&self, stage: &'static str, work: usize);
    fn advance(&self, work: usize);
    fn end(&self);
    fn note(&self, text: String);
}

/// Probes of each kind on which every unit is measured; more are spent on units near the price of a
/// bit alone.
const FIRST_ROUND: usize = 2;

/// Attempts to repair a table that failed its verification.
const REPAIRS: usize = 3;
/// What a group that failed counts more in the next attempt.
const BOOST: f64 = 4.0;

/// A search for the widths of least harm.
pub struct Search<'a, B: Calibrates> {
    pub judge: Judge<'a, B>,
    pub harm: HarmOptions,
    pub freedom: Freedom,
    /// Rounds in which bits are moved between units that interact.
    pub refine_rounds: usize,
    pub rounding: CodeRounding,
    /// Rounds of probes that tables are chosen on, one of each kind in a round.
    pub probes: &'a [Vec<Probe>],
    /// Other probes, which tables are verified on.
    pub fresh: &'a [Probe],
    pub watch: &'a dyn Watch,
}

/// One chosen table and what it does.
#[derive(Clone, Debug)]
pub struct Chosen {
    pub mean: MeanBits,
    pub table: WidthTable,
    /// Uniform two bits beside it, on the same probes.
    pub uniform: Scores,
    pub scores: Scores,
    /// How often the table was repaired before it passed.
    pub repairs: usize,
}

impl Chosen {
    /// Harm on fresh probes as a share of that of two bits everywhere.
    pub fn harm(&self) -> f64 {
        self.scores.relative_to(&self.uniform)
    }
}

/// A mean for which no table can be trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub mean: MeanBits,
    pub reason: String,
}

impl<B: Calibrates> Search<'_, B> {
    /// Measures the harm of units. Finished probes are stored in a checkpoint.
    pub fn measure_harms(
        &self,
        metadata: &Metadata,
        checkpoint: &Path,
        means: &[MeanBits],
    ) -> Result<HarmMap, CalibrateError> {
        let c = self.judge.transformer.config();
        let (layers, kv_heads) = (c.layers, c.kv_heads);
        let whole = HarmPlan::whole(layers, kv_heads, &self.harm.measured);
        let (first, later) = self.probes.split_at(FIRST_ROUND.min(self.probes.len()));
        let first: Vec<Probe> = first.concat();
        let count: usize = self.probes.iter().map(Vec::len).sum();
        let mut stage = self.judge.stage(&self.probes.concat())?;
        self.watch.note(format!(
            "harm of {} units at {} widths: {} probes of {} readings each ({} at once), then at most {} probes for units \
             whose width is uncertain",
            2 * layers * kv_heads,
            self.harm.measured.len(),
            first.len(),
            whole.passes(),
            stage.readings,
            count - first.len(),
        ));
        let mut stored = Checkpoint::open(checkpoint)?;
        if stored.len() > 0 {
            self.watch.note(format!("{}: {} stored results are used", checkpoint.display(), stored.len()));
        }
        let key = Key { options: &self.harm, rounding: self.rounding, metadata };
        let mut round = |label, probes: &[Probe], plan: &HarmPlan, harms: &mut Vec<ProbeHarm>| {
            self.watch.begin(label, probes.iter().map(|p| plan.work(p)).sum());
            for probe in probes {
                let (mut done, work) = (0, plan.work(probe));
                harms.push(stored.get_or(key.of(probe, &format!("{plan:?}")), || {
                    measure(&self.judge, &mut stage, probe, plan, &mut |more| {
                        done += more;
                        self.watch.advance(more);
                    })
                })?);
                // A stored result took no work.
                self.watch.advance(work.saturating_sub(done));
            }
            self.watch.end();
            Ok::<_, CalibrateError>(HarmMap::of(layers, kv_heads, harms))
        };
        let mut harms = Vec::new();
        let mut map = round("measuring harm", &first, &whole, &mut harms)?;
        for probes in later {
            let mut units = vec![Vec::new(); map.units()];
            for &mean in means {
                let table = solve(&map, mean, c.head_dim, &self.freedom)?;
                for (wanted, more) in units.iter_mut().zip(map.uncertain(&table, &WIDTHS)) {
                    wanted.extend(more);
                    wanted.sort_unstable();
                    wanted.dedup();
                }
            }
            let plan = HarmPlan { layers, kv_heads, units, joint: false };
            if plan.is_empty() {
                break;
            }
            map = round("measuring uncertain units", probes, &plan, &mut harms)?;
        }
        if self.freedom.allows_absent() {
            self.measure_absent(&mut map, key, &mut stored)?;
        }
        Ok(map)
    }

    /// Tries heads without history.
    fn measure_absent(
        &self,
        map: &mut HarmMap,
        key: Key<'_>,
        stored: &mut Checkpoint,
    ) -> Result<(), CalibrateError> {
        let candidates = Candidates::of(map);
        if candidates.len() == 0 {
            return Ok(());
        }
        let tables = candidates.tables(map.layers, map.kv_heads);
        let probes = Candidates::probes(&self.probes.concat());
        let passes = tables.len() + 1;
        self.watch.note(format!(
            "{} heads without history: {} passes over whole probes",
            candidates.len(),
            probes.len() * passes
        ));
        let what: String = tables.iter().map(WidthTable::describe).collect();
        self.watch.begin("leaving out history", probes.iter().map(|p| passes * p.tokens.len()).sum());
        let mut found: Vec<AbsentHarm> = Vec::new();
        for probe in &probes {
            let mut done = 0;
            let tokens = probe.tokens.len();
            found.push(stored.get_or(key.of(probe, &what), || {
                Candidates::measure(&self.judge, probe, &tables, || {
                    done += tokens;
                    self.watch.advance(tokens);
                })
            })?);
            self.watch.advance((passes * tokens).saturating_sub(done));
        }
        self.watch.end();
        candidates.enter(&found, map);
        Ok(())
    }

    /// Finds a table for each mean. Verification on probes that chose nothing decides what is
    /// stored: a table that is worse than its safer neighbour on any kind of probe is repaired, or
    /// its mean is refused.
    pub fn choose(
        &self,
        map: &HarmMap,
        means: &[MeanBits],
    ) -> Result<(Vec<Chosen>, Vec<Refused>), CalibrateError> {
        let c = self.judge.transformer.config();
        // Bits that were moved on few probes may suit these probes only: both tables are verified.
        let mut tables: Vec<[WidthTable; 2]> = Vec::new();
        for &mean in means {
            let start = solve(map, mean, c.head_dim, &self.freedom)?;
            let refined = self.refined(start.clone(), mean)?;
            tables.push([start, refined]);
        }
        // Everything through the quantized cache, as in serving.
        let uniform = |bits| WidthTable::uniform(map.layers, map.kv_heads, bits);
        let mut widths: Vec<u32> = means.iter().map(|&mean| neighbour(mean, c.head_dim)).chain([2]).collect();
        widths.sort_unstable();
        widths.dedup();
        let neighbours: Vec<WidthTable> = widths.iter().map(|&bits| uniform(bits)).collect();
        let mut all = neighbours.clone();
        for table in tables.iter().flatten() {
            if !all.contains(table) {
                all.push(table.clone());
            }
        }
        let scores = self.verified(&all)?;
        let scored = |table: &WidthTable| {
            let at = all.iter().position(|t| t == table).unwrap_or_default();
            (table.clone(), scores[at].clone())
        };
        let two = scored(&uniform(2)).1;
        let harm = |table: &(WidthTable, Scores)| table.1.relative_to(&two);
        let (mut chosen, mut refused) = (Vec::new(), Vec::new());
        for (&mean, [start, refined]) in means.iter().zip(&tables) {
            let (start, refined) = (scored(start), scored(refined));
            let table = if harm(&refined) < harm(&start) { refined } else { start };
            let neighbour = scored(&uniform(neighbour(mean, c.head_dim)));
            match self.repaired(map, mean, table, &neighbour)? {
                Ok((table, scores, repairs)) => {
                    chosen.push(Chosen { mean, table, uniform: two.clone(), scores, repairs });
                }
                Err(reason) => refused.push(Refused { mean, reason }),
            }
        }
        Ok((chosen, refused))
    }

    /// The probes that bits are moved on.
    fn refining_probes(&self) -> Vec<Probe> {
        self.probes[..FIRST_ROUND.min(self.probes.len())].concat()
    }

    /// Moves bits while the joint harm falls.
    fn refined(&self, start: WidthTable, mean: MeanBits) -> Result<WidthTable, CalibrateError> {
        let mut best = start;
        for _ in 0..self.refine_rounds {
            let near = self.neighbourhood(&best)?;
            let (better, before, after) = self.moved(&near, mean, &[])?;
            if better == best || after >= before {
                break;
            }
            self.watch.note(format!(
                "{mean} bits: {before:.3} of the harm of two bits everywhere, {after:.3} after bits were moved"
            ));
            best = better;
        }
        Ok(best)
    }

    fn neighbourhood(&self, table: &WidthTable) -> Result<Neighbourhood, CalibrateError> {
        let probes = self.refining_probes();
        let mut stage = self.judge.stage(&probes)?;
        self.watch.begin("moving bits", Neighbourhood::work(table, &probes));
        let advance = &mut |work| self.watch.advance(work);
        let near = Neighbourhood::measure(&self.judge, &mut stage, &probes, table, advance)?;
        self.watch.end();
        Ok(near)
    }

    /// The table after bits were moved, with the joint harm before and after. Each of `blamed`
    /// counts more.
    fn moved(
        &self,
        near: &Neighbourhood,
        mean: MeanBits,
        blamed: &[(String, f64)],
    ) -> Result<(WidthTable, f64, f64), CalibrateError> {
        let probes = self.refining_probes();
        let mut stage = self.judge.stage(&probes)?;
        let head_dim = self.judge.transformer.config().head_dim;
        let work = |tables: usize| probes.iter().map(|p| p.tokens.len() + tables * p.ending()).sum();
        let mut joint = |tables: &[WidthTable]| {
            self.watch.begin("comparing tables", work(tables.len()));
            let advance = &mut |work| self.watch.advance(work);
            let scores = judge_tables(&self.judge, &mut stage, &probes, tables, advance)?;
            self.watch.end();
            Ok::<_, CalibrateError>(scores)
        };
        let harm = |scores: &Scores| scores.weighed(&near.yardstick, blamed);
        let table = near.step(mean, head_dim, harm)?;
        if table == near.table {
            return Ok((table, harm(&near.scores), harm(&near.scores)));
        }
        let after = joint(std::slice::from_ref(&table))?.remove(0);
        Ok((table, harm(&near.scores), harm(&after)))
    }

    /// Scores of tables on the fresh probes.
    fn verified(&self, tables: &[WidthTable]) -> Result<Vec<Scores>, CalibrateError> {
        let tokens: usize = self.fresh.iter().map(|p| p.tokens.len()).sum();
        self.watch.begin("verifying", tokens * (tables.len() + 1));
        let each = tokens / self.fresh.len().max(1);
        let scores = self.judge.verify(self.fresh, tables, || self.watch.advance(each))?;
        self.watch.end();
        Ok(scores)
    }

    /// A table that passed its verification, after repairs if need be, or the reason why there is
    /// none.
    fn repaired(
        &self,
        map: &HarmMap,
        mean: MeanBits,
        table: (WidthTable, Scores),
        neighbour: &(WidthTable, Scores),
    ) -> Result<Result<(WidthTable, Scores, usize), String>, CalibrateError> {
        let head_dim = self.judge.transformer.config().head_dim;
        let (mut table, mut scores) = table;
        let mut blamed: Vec<(String, f64)> = Vec::new();
        let mut worse = scores.worse_than(&neighbour.1);
        for repairs in 0..=REPAIRS {
            if worse.is_empty() {
                return Ok(Ok((table, scores, repairs)));
            }
            if repairs == REPAIRS {
                break;
            }
            self.watch.note(format!("{mean} bits: {}: repairing", describe(&worse, neighbour)));
            for w in &worse {
                match blamed.iter_mut().find(|(group, _)| *group == w.group) {
                    Some((_, weight)) => *weight *= BOOST,
                    None => blamed.push((w.group.clone(), BOOST)),
                }
            }
            // Heads without history are the first suspects: single bits do not bring them back.
            let next = match table.widths.iter().any(|pair| pair.0 == ABSENT) {
                true => {
                    let freedom = Freedom { widths: WIDTHS.to_vec(), ..self.freedom.clone() };
                    solve(map, mean, head_dim, &freedom)?
                }
                false if self.freedom == Freedom::default() => {
                    self.moved(&self.neighbourhood(&table)?, mean, &blamed)?.0
                }
                false => break,
            };
            if next == table {
                break;
            }
            let found = self.verified(std::slice::from_ref(&next))?.remove(0);
            let now = found.worse_than(&neighbour.1);
            (table, scores, worse) = (next, found, now);
        }
        if neighbour.0.mean_bits(head_dim) <= mean.bits() + 1e-6 && self.freedom == Freedom::default() {
            self.watch
                .note(format!("{mean} bits: {}: equal widths are used instead", describe(&worse, neighbour)));
            return Ok(Ok((neighbour.0.clone(), neighbour.1.clone(), REPAIRS)));
        }
        Ok(Err(describe(&worse, neighbour)))
    }
}

/// The uniform width that a table of this mean must not be worse than: that of the same size or the
/// next larger one, at least two bits.
fn neighbour(mean: MeanBits, head_dim: usize) -> u32 {
    (mean.mean_width(head_dim) - 1e-6).ceil().clamp(2.0, f64::from(WIDTHS[WIDTHS.len() - 1])) as u32
}

/// Where a table is worse than its safer neighbour.
fn describe(worse: &[Worse], neighbour: &(WidthTable, Scores)) -> String {
    let bits = neighbour.0.widths.first().map_or(0, |pair| pair.0);
    let groups: Vec<String> = worse
        .iter()
        .map(|w| {
            format!(
                "{} (KL {:.4} against {:.4}, {:.1} % of tokens changed against {:.1} %)",
                w.group,
                w.divergence,
                w.safer,
                100.0 * w.changed,
                100.0 * w.safer_changed
            )
        })
        .collect();
    format!("worse than {bits} bits everywhere on {}", groups.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_safer_neighbour_is_uniform_and_no_smaller() {
        let of = |mean: &str| neighbour(mean.parse().unwrap(), 128);
        assert_eq!(
            ["1.50", "2.00", "2.25", "2.26", "2.75", "3.25", "4.00", "4.25"].map(of),
            [2, 2, 2, 3, 3, 3, 4, 4]
        );
        assert_eq!(neighbour("2.50".parse().unwrap(), 64), 2);
    }
}
