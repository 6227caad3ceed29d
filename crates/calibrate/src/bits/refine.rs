//! Exchanging bits between units that interact.
//!
//! Harms are measured one unit at a time, but a model meets them together: two heads may stand in
//! for one another, or one may spoil what another reads. So the solved table is coded as a whole,
//! single bits are moved from one unit to another in the order the harms suggest, and moves that
//! help are kept.

use super::judge::{Judge, Scores};
use super::probe::{CodedStage, HarmOptions, Probe};
use super::table::{ABSENT, HarmMap, WIDTHS, WidthTable};
use crate::error::CalibrateError;
use oscar_backend::Calibrates;
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefineOptions {
    /// Passes over the probes, at most.
    pub rounds: usize,
    /// Moves tried in a pass.
    pub moves: usize,
    /// As in the options of the harm.
    pub lead: usize,
}

impl Default for RefineOptions {
    fn default() -> Self {
        Self { rounds: 4, moves: 24, lead: HarmOptions::default().lead }
    }
}

/// The outcome of [`refine`].
#[derive(Clone, Debug, PartialEq)]
pub struct Refined {
    pub table: WidthTable,
    /// Harm of the whole table relative to uniform two bits, before and after.
    pub before: f64,
    pub after: f64,
    /// Tables that were tried.
    pub tried: usize,
}

/// Searches around `start`, at the same number of bits. `progress` hears of each pass over the end
/// of a probe.
pub fn refine<B: Calibrates>(
    judge: &Judge<'_, B>,
    probes: &[Probe],
    map: &HarmMap,
    start: &WidthTable,
    options: &RefineOptions,
    mut progress: impl FnMut(),
) -> Result<Refined, CalibrateError> {
    let uniform = vec![2; map.units()];
    let mut known = BTreeSet::new();
    let mut best = (start.units(), f64::INFINITY);
    let mut before = f64::INFINITY;
    let mut centre = start.units();
    for round in 0..options.rounds.max(1) {
        let mut tables = vec![uniform.clone()];
        if known.insert(centre.clone()) {
            tables.push(centre.clone());
        }
        let moves = exchanges(map, &centre);
        tables.extend(moves.into_iter().filter(|t| known.insert(t.clone())).take(options.moves));
        let scores = judge_tables(judge, probes, &tables, options.lead, &mut progress)?;
        let harms: Vec<f64> = scores[1..].iter().map(|s| s.relative_to(&scores[0])).collect();
        if round == 0 {
            before = harms[0];
        }
        let previous = best.1;
        for (table, &harm) in tables[1..].iter().zip(&harms) {
            if harm < best.1 {
                best = (table.clone(), harm);
            }
        }
        // Less than this is noise, and the next pass would cost as much as this one.
        if best.1 > previous * 0.998 {
            break;
        }
        let combined = combine(&centre, &tables[1..], &harms);
        centre = if known.contains(&combined) { best.0.clone() } else { combined };
    }
    Ok(Refined {
        table: WidthTable::from_units(start.layers, start.kv_heads, &best.0),
        before,
        after: best.1,
        tried: known.len(),
    })
}

/// All tables that differ from `widths` by one bit moved from one unit to another, the most
/// promising first.
fn exchanges(map: &HarmMap, widths: &[u32]) -> Vec<Vec<u32>> {
    let at = |unit: usize, width: u32| f64::from(map.harm[unit][width as usize - 1]);
    let widest = WIDTHS[WIDTHS.len() - 1];
    let mut all = Vec::new();
    for from in (0..widths.len()).filter(|&u| widths[u] > WIDTHS[0]) {
        for to in (0..widths.len()).filter(|&u| u != from && widths[u] != ABSENT && widths[u] < widest) {
            let lost = at(from, widths[from] - 1) - at(from, widths[from]);
            let won = at(to, widths[to]) - at(to, widths[to] + 1);
            let mut table = widths.to_vec();
            table[from] -= 1;
            table[to] += 1;
            all.push((lost - won, table));
        }
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.into_iter().map(|(_, table)| table).collect()
}

/// The centre with all moves that helped and do not touch the same unit, the best first.
fn combine(centre: &[u32], tables: &[Vec<u32>], harms: &[f64]) -> Vec<u32> {
    let own = tables.iter().zip(harms).find(|(table, _)| *table == centre).map(|(_, &harm)| harm);
    let mut order: Vec<usize> = (0..tables.len()).collect();
    order.sort_by(|&a, &b| harms[a].total_cmp(&harms[b]));
    let limit = own.unwrap_or(f64::INFINITY);
    let mut combined = centre.to_vec();
    for index in order.into_iter().filter(|&i| harms[i] < limit) {
        let changed: Vec<usize> = (0..centre.len()).filter(|&u| tables[index][u] != centre[u]).collect();
        if changed.iter().all(|&u| combined[u] == centre[u]) {
            changed.iter().for_each(|&u| combined[u] = tables[index][u]);
        }
    }
    combined
}

/// Scores tables with the history of every unit coded, at the ends of the probes. Heads without
/// history are left exact: bits are not moved to or from them, so what they do is the same for all
/// tables.
fn judge_tables<B: Calibrates>(
    judge: &Judge<'_, B>,
    probes: &[Probe],
    tables: &[Vec<u32>],
    lead: usize,
    progress: &mut impl FnMut(),
) -> Result<Vec<Scores>, CalibrateError> {
    let mut all = vec![Scores::default(); tables.len()];
    for probe in probes {
        let mut stage = CodedStage::open(judge, probe, lead)?;
        progress();
        for (table, scores) in tables.iter().zip(&mut all) {
            for (unit, &width) in table.iter().enumerate() {
                stage.set(unit, width)?;
            }
            scores.merge(stage.score()?);
            progress();
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> HarmMap {
        let harm =
            vec![[4.0, 3.0, 1.0, 0.5], [1.0, 0.5, 0.2, 0.1], [8.0, 2.0, 1.0, 0.9], [0.1, 0.1, 0.1, 0.1]];
        HarmMap { layers: 2, kv_heads: 1, harm, absent: vec![None; 2] }
    }

    #[test]
    fn exchanges_keep_the_size_and_begin_with_the_best() {
        let widths = [2, 2, 2, 2];
        let all = exchanges(&map(), &widths);
        assert_eq!(all.len(), 12);
        assert!(all.iter().all(|t| t.iter().sum::<u32>() == 8));
        // The last unit does not need its second bit, the first gains most.
        assert_eq!(all[0], [3, 2, 2, 1]);
        assert!(exchanges(&map(), &[2, 2, 0, 0]).iter().all(|t| t[2..] == [0, 0]), "no history stays none");
        assert!(exchanges(&map(), &[1, 1, 1, 1]).is_empty());
        assert!(exchanges(&map(), &[4, 4, 4, 4]).is_empty());
    }

    #[test]
    fn helpful_moves_of_different_units_are_combined() {
        let centre = vec![2, 2, 2, 2];
        let tables =
            vec![centre.clone(), vec![3, 2, 2, 1], vec![3, 1, 2, 2], vec![2, 1, 3, 2], vec![1, 2, 2, 3]];
        let combined = combine(&centre, &tables, &[1.0, 0.5, 0.6, 0.7, 1.5]);
        assert_eq!(combined, [3, 1, 3, 1]);
    }
}
