//! Heads without history.
//!
//! A zero-width head reads only its sink and recent tokens, also while the prompt is read, and what
//! it misses accumulates over positions. So whole probes pass through a cache in which the head has
//! no history and all others have four bits. All candidates of a layer are also tried together,
//! because one head may do the work of another.

use super::judge::Judge;
use super::probe::Probe;
use super::scores::{Scores, group_weights};
use super::table::{ABSENT, HarmMap, WidthTable};
use crate::error::CalibrateError;
use oscar_backend::Calibrates;
use std::collections::{BTreeMap, BTreeSet};

/// Most harm of a head on any group of probes, as a share of that of two bits everywhere.
const MOST_SHARE: f64 = 0.5;

/// Mean divergence of a probe under each table of [`Candidates::tables`].
pub(super) type AbsentHarm = (String, Vec<f64>);

/// The heads that may lose their history.
pub(super) struct Candidates {
    heads: Vec<usize>,
    /// Candidates of one layer, where there are several.
    together: Vec<Vec<usize>>,
}

impl Candidates {
    pub fn of(map: &HarmMap) -> Self {
        let heads = map.expendable();
        let layers: BTreeSet<usize> = heads.iter().map(|head| head / map.kv_heads).collect();
        let of_layer =
            |layer: usize| heads.iter().copied().filter(|head| head / map.kv_heads == layer).collect();
        let together =
            layers.into_iter().map(of_layer).filter(|heads: &Vec<usize>| heads.len() > 1).collect();
        Self { heads, together }
    }

    pub fn len(&self) -> usize {
        self.heads.len()
    }

    /// Two bits everywhere, four bits everywhere, and four bits but for some heads.
    pub fn tables(&self, layers: usize, kv_heads: usize) -> Vec<WidthTable> {
        let uniform = |bits| WidthTable::uniform(layers, kv_heads, bits);
        let without = |heads: &[usize]| {
            let mut table = uniform(4);
            heads.iter().for_each(|&head| table.widths[head] = (ABSENT, ABSENT));
            table
        };
        let alone = self.heads.iter().map(|&head| without(&[head]));
        let together = self.together.iter().map(|heads| without(heads));
        [uniform(2), uniform(4)].into_iter().chain(alone).chain(together).collect()
    }

    /// The divergences of one probe.
    pub fn measure<B: Calibrates>(
        judge: &Judge<'_, B>,
        probe: &Probe,
        tables: &[WidthTable],
        progress: impl FnMut(),
    ) -> Result<AbsentHarm, CalibrateError> {
        let scores = judge.verify(std::slice::from_ref(probe), tables, progress)?;
        let mean = |scores: &Scores| scores.groups().map(|g| g.divergence).sum();
        Ok((probe.group.clone(), scores.iter().map(mean).collect()))
    }

    /// Puts the harm of heads without history into the map. A head that harms any group of probes
    /// much is no candidate; heads that stand in for one another keep all but the least harmful.
    pub fn enter(&self, found: &[AbsentHarm], map: &mut HarmMap) {
        let mut groups: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (group, harm) in found {
            groups.insert(group, harm.clone());
        }
        let yardsticks: Vec<(&str, f64)> = groups.iter().map(|(name, harm)| (*name, harm[0])).collect();
        let weights = group_weights(yardsticks.iter().copied());
        let least = yardsticks.iter().map(|(_, y)| 0.1 * y).fold(0.0, f64::max);
        // Weighted harm of a table, and whether every group bears it.
        let judge = |table: usize| {
            let (mut sum, mut bearable) = (0.0, true);
            for (harm, weight) in groups.values().zip(&weights) {
                let own = (harm[table] - harm[1]).max(0.0);
                sum += own * weight;
                bearable &= own <= MOST_SHARE * harm[0] + least;
            }
            (sum, bearable)
        };
        for (index, &head) in self.heads.iter().enumerate() {
            let (harm, bearable) = judge(2 + index);
            map.absent[head] = bearable.then_some(harm as f32);
        }
        for (index, heads) in self.together.iter().enumerate() {
            let (harm, bearable) = judge(2 + self.heads.len() + index);
            let alone: f64 = heads.iter().filter_map(|&head| map.absent[head]).map(f64::from).sum();
            if !bearable {
                let by_harm = |head: &&usize| map.absent[**head].map_or(f32::INFINITY, |harm| harm);
                let kept = heads.iter().min_by(|a, b| by_harm(a).total_cmp(&by_harm(b))).copied();
                for &head in heads.iter().filter(|&&head| Some(head) != kept) {
                    map.absent[head] = None;
                }
            } else if alone > 0.0 && harm > alone {
                for &head in heads {
                    map.absent[head] = map.absent[head].map(|own| own * (harm / alone) as f32);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> HarmMap {
        let quiet = [0.01, 0.0, 0.0, 0.0];
        let harm = vec![quiet, quiet, quiet, quiet, [1.0; 4], [1.0; 4], [1.0; 4], [1.0; 4]];
        HarmMap { layers: 2, kv_heads: 2, harm, error: Vec::new(), absent: vec![None; 4] }
    }

    #[test]
    fn heads_of_a_layer_are_tried_together() {
        let candidates = Candidates::of(&map());
        assert_eq!((candidates.heads.clone(), candidates.together.clone()), (vec![0, 1], vec![vec![0, 1]]));
        let tables = candidates.tables(2, 2);
        assert_eq!(tables.len(), 5);
        assert_eq!(tables[4].widths, [(0, 0), (0, 0), (4, 4), (4, 4)]);
    }

    #[test]
    fn evidence_is_needed_on_every_group_and_for_both_heads() {
        let candidates = Candidates::of(&map());
        let entered = |near: [f64; 5], far: [f64; 5]| {
            let mut map = map();
            candidates
                .enter(&[("echo_near".into(), near.to_vec()), ("echo_far".into(), far.to_vec())], &mut map);
            map.absent
        };
        // Two bits, four bits, head 0, head 1, both.
        let mild = [0.1, 0.01, 0.012, 0.013, 0.015];
        let absent = entered(mild, mild);
        assert!(absent[0].is_some() && absent[1].is_some() && absent[2].is_none(), "{absent:?}");
        let far = entered(mild, [0.1, 0.01, 0.2, 0.013, 0.2]);
        assert!(far[0].is_none() && far[1].is_some(), "far away it is needed: {far:?}");
        let backup = entered(mild, [0.1, 0.01, 0.012, 0.013, 0.9]);
        assert_eq!(backup.iter().flatten().count(), 1, "one of them has to stay: {backup:?}");
        let more = entered([0.1, 0.01, 0.012, 0.013, 0.03], mild);
        assert!(more[0] > absent[0], "harm of both counts: {more:?} {absent:?}");
    }
}
