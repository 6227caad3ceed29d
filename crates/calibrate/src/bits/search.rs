//! The search for widths, from probes to verified tables.

use super::absent::{AbsentHarm, Candidates};
use super::checkpoint::{Checkpoint, Key};
use super::harm::{HarmPlan, measure};
use super::refine::{Neighbourhood, judge_tables};
use super::scores::{Broken, Worse};
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
    /// Probes that heads are tried on without history: one of each kind and distance.
    pub distances: &'a [Probe],
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
        let (layers, kv_heads) = (self.judge.layers(), c.kv_heads);
        let whole = HarmPlan::whole(layers.clone(), kv_heads, &self.harm.measured);
        self.watch.note(self.work(&whole, means.len()));
        let (first, later) = self.probes.split_at(FIRST_ROUND.min(self.probes.len()));
        let first: Vec<Probe> = first.concat();
        let count: usize = self.probes.iter().map(Vec::len).sum();
        let mut stage = self.judge.stage(&self.probes.concat())?;
        self.watch.note(format!(
            "measuring {} units (keys or values of a head) at {} widths: {} probes, each read {} times, {} times in a \
             batch; then at most {} more probes for units whose width is uncertain",
            whole.units.len(),
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
            Ok::<_, CalibrateError>(HarmMap::of(layers.count(), kv_heads, harms))
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
            let plan = HarmPlan { layers: layers.clone(), kv_heads, units, joint: false };
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

    /// What all stages cost, at most.
    fn work(&self, whole: &HarmPlan, means: usize) -> String {
        let tokens = |probes: &[Probe]| probes.iter().map(|p| p.tokens.len()).sum::<usize>();
        let harm = |probes: &[Vec<Probe>]| probes.iter().flatten().map(|p| whole.work(p)).sum::<usize>();
        let (first, later) = self.probes.split_at(FIRST_ROUND.min(self.probes.len()));
        let (layers, kv_heads) = (whole.layers.count(), whole.kv_heads);
        // Each candidate, each layer's candidates together, and three tables beside them.
        let tries = (layers * kv_heads).div_ceil(3) * 3 / 2 + 3;
        let absent = if self.freedom.allows_absent() { tries * tokens(self.distances) } else { 0 };
        let (refining, uniform) = (self.refining_probes(), WidthTable::uniform(layers, kv_heads, 2));
        let round = self.moving_work(&uniform, &refining) + 2 * tokens(&refining);
        let moving = self.refine_rounds * means * round;
        // Two tables of each mean, uniform ones, and the exact cache.
        let verifying = (2 * means + 3) * tokens(self.fresh);
        let thousands = |tokens: usize| tokens.div_ceil(1000);
        format!(
            "work: at most {} thousand tokens through the model (harms {}, uncertain units {}, zero-width heads {}, \
             moving bits {}, verification {}), and more if a table needs repairs",
            thousands(harm(self.probes) + absent + moving + verifying),
            thousands(harm(first)),
            thousands(harm(later)),
            thousands(absent),
            thousands(moving),
            thousands(verifying),
        )
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
        let probes = self.distances;
        let passes = tables.len() + 1;
        self.watch.note(format!(
            "{} heads without history: {} passes over whole probes",
            candidates.len(),
            probes.len() * passes
        ));
        let what = format!("{tables:?}");
        self.watch.begin("leaving out history", probes.iter().map(|p| passes * p.tokens.len()).sum());
        let mut found: Vec<AbsentHarm> = Vec::new();
        for probe in probes {
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
    /// stored: a table that breaks a kind of probe, or is worse there than its safer neighbour, is
    /// repaired, or its mean is refused.
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
                "{mean} bits: harm {before:.3} times that of two bits everywhere, {after:.3} times after moving bits"
            ));
            best = better;
        }
        Ok(best)
    }

    /// What measuring the neighbourhood of a table costs.
    fn moving_work(&self, table: &WidthTable, probes: &[Probe]) -> usize {
        Neighbourhood::work(table, self.freedom.widest(), &self.judge.layers(), probes)
    }

    fn neighbourhood(&self, table: &WidthTable) -> Result<Neighbourhood, CalibrateError> {
        let probes = self.refining_probes();
        let mut stage = self.judge.stage(&probes)?;
        let widest = self.freedom.widest();
        self.watch.begin("moving bits", self.moving_work(table, &probes));
        let advance = &mut |work| self.watch.advance(work);
        let near = Neighbourhood::measure(&self.judge, &mut stage, &probes, table, widest, advance)?;
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
        let table = near.step(mean, head_dim, &self.freedom, harm)?;
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
        let mut problems = Problems::of(&scores, &neighbour.1);
        for repairs in 0..=REPAIRS {
            if problems.is_empty() {
                return Ok(Ok((table, scores, repairs)));
            }
            if repairs == REPAIRS {
                break;
            }
            self.watch.note(format!("{mean} bits: {}: repairing", problems.describe(neighbour)));
            for group in problems.groups() {
                match blamed.iter_mut().find(|(blamed, _)| blamed == group) {
                    Some((_, weight)) => *weight *= BOOST,
                    None => blamed.push((group.to_owned(), BOOST)),
                }
            }
            // Heads without history are the first suspects: single bits do not bring them back.
            let next = match table.widths.iter().any(|pair| pair.0 == ABSENT) {
                true => solve(map, mean, head_dim, &self.freedom.with_history())?,
                false if self.freedom.moves_freely() => {
                    self.moved(&self.neighbourhood(&table)?, mean, &blamed)?.0
                }
                false => break,
            };
            if next == table {
                break;
            }
            let found = self.verified(std::slice::from_ref(&next))?.remove(0);
            problems = Problems::of(&found, &neighbour.1);
            (table, scores) = (next, found);
        }
        let fits = neighbour.0.mean_bits(head_dim) <= mean.bits() + 1e-6;
        if fits && self.freedom.moves_freely() && neighbour.1.broken().is_empty() {
            let why = problems.describe(neighbour);
            self.watch.note(format!("{mean} bits: {why}: equal widths are used instead"));
            return Ok(Ok((neighbour.0.clone(), neighbour.1.clone(), REPAIRS)));
        }
        Ok(Err(problems.describe(neighbour)))
    }
}

/// The uniform width that a table of this mean must not be worse than: that of the same size or the
/// next larger one, at least two bits.
fn neighbour(mean: MeanBits, head_dim: usize) -> u32 {
    (mean.mean_width(head_dim) - 1e-6).ceil().clamp(2.0, f64::from(WIDTHS[WIDTHS.len() - 1])) as u32
}

/// Why a table fails its verification.
struct Problems {
    worse: Vec<Worse>,
    broken: Vec<Broken>,
}

impl Problems {
    fn of(scores: &Scores, safer: &Scores) -> Self {
        Self { worse: scores.worse_than(safer), broken: scores.broken() }
    }

    fn is_empty(&self) -> bool {
        self.worse.is_empty() && self.broken.is_empty()
    }

    /// The kinds of probes that it fails on, each once.
    fn groups(&self) -> impl Iterator<Item = &str> {
        self.worse.iter().map(|w| w.group.as_str()).chain(self.as_bad().map(|b| b.group.as_str()))
    }

    /// The kinds that break although it is no worse on them than its neighbour.
    fn as_bad(&self) -> impl Iterator<Item = &Broken> {
        self.broken.iter().filter(|b| !self.worse.iter().any(|w| w.group == b.group))
    }

    fn describe(&self, neighbour: &(WidthTable, Scores)) -> String {
        let bits = neighbour.0.widths.first().map_or(0, |pair| pair.0);
        let figures =
            |kl: f64, changed: f64| format!("KL {kl:.4}, {:.1} % of tokens changed", 100.0 * changed);
        let mut parts: Vec<String> = Vec::new();
        for w in &self.worse {
            let (own, other) = (figures(w.divergence, w.changed), figures(w.safer, w.safer_changed));
            parts.push(format!("worse than {bits} bits everywhere on {} ({own} against {other})", w.group));
        }
        for b in self.as_bad() {
            parts.push(format!("breaks {} ({})", b.group, figures(b.divergence, b.changed)));
        }
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_backend::Divergence;

    #[test]
    fn the_safer_neighbour_is_uniform_and_no_smaller() {
        let of = |mean: &str| neighbour(mean.parse().unwrap(), 128);
        assert_eq!(
            ["1.50", "2.00", "2.25", "2.26", "2.75", "3.25", "4.00", "4.25"].map(of),
            [2, 2, 2, 3, 3, 3, 4, 4]
        );
        assert_eq!(neighbour("2.50".parse().unwrap(), 64), 2);
    }

    #[test]
    fn a_failed_table_names_every_kind_once() {
        let scores = |groups: &[(&str, f64)]| {
            let mut scores = Scores::default();
            for &(group, kl) in groups {
                scores.add(group, &[Divergence { kl, agrees: true }]);
            }
            scores
        };
        let safer = scores(&[("copy", 0.03), ("niah_uuid", 0.004), ("text", 0.01)]);
        let table = scores(&[("copy", 0.03), ("niah_uuid", 0.03), ("text", 0.01)]);
        let problems = Problems::of(&table, &safer);
        assert_eq!(problems.groups().collect::<Vec<_>>(), ["niah_uuid", "copy"]);
        let why = problems.describe(&(WidthTable::uniform(1, 1, 2), safer.clone()));
        assert!(why.contains("worse than 2 bits everywhere on niah_uuid (KL 0.0300"), "{why}");
        assert!(why.contains("breaks copy (KL 0.0300"), "as bad as its neighbour is not good enough: {why}");
        assert!(
            Problems::of(&scores(&[("copy", 0.001), ("niah_uuid", 0.0), ("text", 0.01)]), &safer).is_empty()
        );
    }
}
