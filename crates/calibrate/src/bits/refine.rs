//! Moving bits between units that interact.
//!
//! Harms are measured one unit at a time, but a model meets them together: two heads may stand in
//! for one another, or one may spoil what another reads. So the whole table is put into the history
//! and each unit gets one bit more and one less. These differences, measured in company, say which
//! bits to move; the new table is kept if it is better as a whole.

use super::harm::side_of;
use super::judge::{Judge, Stage, set_table};
use super::layers::WidthLayers;
use super::probe::Probe;
use super::scores::Scores;
use super::solve::{Freedom, solve_by};
use super::table::{ABSENT, HarmMap, WIDEST, WidthTable};
use crate::error::CalibrateError;
use oscar_backend::{Calibrates, Divergence};
use oscar_codec::MeanBits;

/// Harm that no table is worth.
const FORBIDDEN: f64 = 1e6;

/// A table, and the same with one unit a bit wider or narrower, on some probes.
pub(super) struct Neighbourhood {
    pub table: WidthTable,
    pub scores: Scores,
    /// Two bits everywhere.
    pub yardstick: Scores,
    /// Unit, its other width, and the scores.
    pub changes: Vec<(usize, u32, Scores)>,
}

impl Neighbourhood {
    /// Changes that are measured: all units that keep history, by one bit, up to the widest code.
    pub fn changes(table: &WidthTable, widest: u32) -> Vec<(usize, u32)> {
        let units = table.units().into_iter().enumerate().filter(|(_, width)| *width != ABSENT);
        units
            .flat_map(|(unit, width)| [(unit, width - 1), (unit, width + 1)])
            .filter(|(_, width)| (1..=widest).contains(width))
            .collect()
    }

    /// Tokens through the whole model that measuring costs.
    pub fn work(table: &WidthTable, widest: u32, layers: &WidthLayers, probes: &[Probe]) -> usize {
        let places: Vec<usize> =
            Self::changes(table, widest).iter().map(|(unit, _)| unit / 2 / table.kv_heads).collect();
        let of = |probe: &Probe| {
            let changed: usize = places.iter().map(|&place| layers.work_from(place, probe.ending())).sum();
            probe.tokens.len() + 3 * probe.ending() + changed
        };
        probes.iter().map(of).sum()
    }

    pub fn measure<B: Calibrates>(
        judge: &Judge<'_, B>,
        stage: &mut Stage<B>,
        probes: &[Probe],
        table: &WidthTable,
        widest: u32,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, CalibrateError> {
        let (layers, heads) = (judge.layers(), table.kv_heads);
        let two_bits = WidthTable::uniform(table.layers, heads, 2);
        let changes = Self::changes(table, widest);
        let (mut scores, mut yardstick) = (Scores::default(), Scores::default());
        let mut changed: Vec<(usize, u32, Scores)> =
            changes.iter().map(|&(unit, width)| (unit, width, Scores::default())).collect();
        let batch = stage.readings;
        for probe in probes {
            let mut trials = judge.trials(stage, probe)?;
            set_table(&mut trials, 0, table, &layers)?;
            set_table(&mut trials, 1, &two_bits, &layers)?;
            let mut found: Vec<Divergence> = Vec::new();
            trials.run(0, 2, |r, _| Some(r), &mut found)?;
            let (own, two) = found.split_at(probe.scored.len());
            scores.add(&probe.group, own);
            yardstick.add(&probe.group, two);
            trials.start_from(0)?;
            progress(probe.tokens.len() + 3 * probe.ending());
            for (place, &layer) in layers.list().iter().enumerate() {
                let here = |unit: usize| unit / 2 / heads == place;
                let mine: Vec<usize> = (0..changes.len()).filter(|&c| here(changes[c].0)).collect();
                for batch in mine.chunks(batch) {
                    judge.check_cancelled()?;
                    for (reading, &change) in batch.iter().enumerate() {
                        let (unit, width) = changes[change];
                        let mut widths = table.of_layer(place).to_vec();
                        *side_of(&mut widths[unit / 2 % heads], unit) = width;
                        trials.set(1 + reading, layer, &widths)?;
                    }
                    found.clear();
                    let version = |r: usize, l: usize| Some(if l == layer { 1 + r } else { 0 });
                    trials.run(layer, batch.len(), version, &mut found)?;
                    for (&change, found) in batch.iter().zip(found.chunks_exact(probe.scored.len())) {
                        changed[change].2.add(&probe.group, found);
                    }
                    progress(layers.work_from(place, batch.len() * probe.ending()));
                }
            }
        }
        Ok(Self { table: table.clone(), scores, yardstick, changes: changed })
    }

    /// The best table of a mean that differs by at most one bit in each unit. `harm` weighs the
    /// groups of probes.
    pub fn step(
        &self,
        mean: MeanBits,
        head_dim: usize,
        freedom: &Freedom,
        harm: impl Fn(&Scores) -> f64,
    ) -> Result<WidthTable, CalibrateError> {
        let WidthTable { layers, kv_heads, .. } = self.table;
        let units = self.table.units();
        let own = harm(&self.scores);
        // Gains are negative; all are raised by the same amount for each unit.
        let mut map = vec![[FORBIDDEN; WIDEST as usize]; units.len()];
        for (unit, &width) in units.iter().enumerate().filter(|(_, width)| **width != ABSENT) {
            map[unit][width as usize - 1..].fill(own);
        }
        for (unit, width, scores) in &self.changes {
            let difference = harm(scores) - own;
            let index = *width as usize - 1;
            match *width > units[*unit] {
                // A wider code is never worse, and widths beyond are a trifle better: bits that
                // are free may go there.
                true => {
                    for (more, harm) in map[*unit][index..].iter_mut().enumerate() {
                        *harm = (own + difference.min(0.0)) * (1.0 - 1e-5 * more as f64);
                    }
                }
                false => map[*unit][index] = own + difference.max(0.0),
            }
        }
        let absent = self.table.widths.iter().map(|pair| (pair.0 == ABSENT).then_some(0.0)).collect();
        let shape = HarmMap { layers, kv_heads, error: Vec::new(), harm: Vec::new(), absent };
        // Heads without history stay so, whatever new ones are allowed.
        let widths = std::iter::once(ABSENT).chain(1..=freedom.widest()).collect();
        let at = |unit: usize, bits: u32| map[unit][bits as usize - 1];
        solve_by(&shape, &at, mean, head_dim, &Freedom { widths, ..freedom.clone() })
    }
}

/// Scores whole tables at the endings of probes. Heads without history stay exact.
pub(super) fn judge_tables<B: Calibrates>(
    judge: &Judge<'_, B>,
    stage: &mut Stage<B>,
    probes: &[Probe],
    tables: &[WidthTable],
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<Scores>, CalibrateError> {
    let mut all = vec![Scores::default(); tables.len()];
    let batch = stage.readings;
    for probe in probes {
        let mut trials = judge.trials(stage, probe)?;
        progress(probe.tokens.len());
        for (tables, scores) in tables.chunks(batch).zip(all.chunks_mut(batch)) {
            judge.check_cancelled()?;
            for (version, table) in tables.iter().enumerate() {
                set_table(&mut trials, version, table, &judge.layers())?;
            }
            let mut found = Vec::new();
            trials.run(0, tables.len(), |r, _| Some(r), &mut found)?;
            for (scores, found) in scores.iter_mut().zip(found.chunks_exact(probe.scored.len())) {
                scores.add(&probe.group, found);
            }
            progress(tables.len() * probe.ending());
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(kl: f64) -> Scores {
        let mut scores = Scores::default();
        scores.add("copy", &[Divergence { kl, agrees: true }]);
        scores
    }

    fn total(scores: &Scores) -> f64 {
        scores.groups().map(|g| g.divergence).sum()
    }

    #[test]
    fn bits_move_to_the_units_that_need_them_in_company() {
        let table = WidthTable::from_units(2, 1, &[2, 2, 2, 2]);
        // One bit less costs unit 3 nothing, one more helps unit 0.
        let harm = [(1, 0.9, 1.5), (1, 0.99, 1.2), (1, 0.95, 1.3), (1, 1.0, 1.0)];
        let changes = harm
            .iter()
            .enumerate()
            .flat_map(|(unit, &(_, more, less))| [(unit, 1, scores(less)), (unit, 3, scores(more))])
            .collect();
        let near = Neighbourhood { table, scores: scores(1.0), yardstick: scores(1.0), changes };
        let moved = near.step("2.25".parse().unwrap(), 128, &Freedom::default(), total).unwrap();
        assert_eq!(moved.units(), [3, 2, 2, 1]);
    }

    #[test]
    fn heads_without_history_stay_so_and_widths_have_limits() {
        let table = WidthTable::from_units(2, 1, &[4, 1, 0, 0]);
        assert_eq!(Neighbourhood::changes(&table, 4), [(0, 3), (1, 2)]);
        assert_eq!(Neighbourhood::changes(&table, 5), [(0, 3), (0, 5), (1, 2)]);
        let changes = vec![(0, 3, scores(2.0)), (1, 2, scores(0.5))];
        let near = Neighbourhood { table, scores: scores(1.0), yardstick: scores(1.0), changes };
        let moved = near.step("2.25".parse().unwrap(), 128, &Freedom::default(), total).unwrap();
        assert_eq!(moved.units()[2..], [0, 0]);
        assert_eq!(moved.units()[..2], [4, 4], "what is free goes to the others");
    }
}
