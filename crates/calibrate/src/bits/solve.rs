//! The widths of least total harm at a given mean.
//!
//! A knapsack: each head takes a pair of widths, or keeps no history and takes nothing. A few
//! thousand steps of budget make it cheap to solve exactly, where a Lagrangian would leave the last
//! bits to a guess.

use super::table::{ABSENT, HarmMap, WIDEST, WIDTHS, WidthTable, check_widths};
use crate::error::CalibrateError;
use oscar_codec::{MeanBits, Side};

/// Bits of a row's scale and minimum.
const PARAMETER_BITS: usize = 32;

/// What a table may differ in. The default is everything; less is what the gain is measured
/// against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Freedom {
    /// Widths a unit may have, ascending; 0 lets a head keep no history. [`WIDEST`] is not among
    /// the default ones: a GPU does not read it.
    pub widths: Vec<u32>,
    /// All heads of a layer and side share a width.
    pub by_layer: bool,
    /// The side whose widths vary; the other has the mean's own, rounded. Both if absent.
    pub side: Option<Side>,
}

impl Default for Freedom {
    fn default() -> Self {
        Self { widths: std::iter::once(ABSENT).chain(WIDTHS).collect(), by_layer: false, side: None }
    }
}

impl Freedom {
    pub fn check(&self) -> Result<(), CalibrateError> {
        check_widths("--widths", self.coded(), WIDEST)
    }

    /// Refuses means that no table of a model of this shape reaches.
    pub fn check_means(
        &self,
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        means: &[MeanBits],
    ) -> Result<(), CalibrateError> {
        self.check()?;
        let heads = layers * kv_heads;
        let harmless = HarmMap {
            layers,
            kv_heads,
            harm: vec![Default::default(); 2 * heads],
            error: Vec::new(),
            absent: vec![None; heads],
        };
        means.iter().try_for_each(|&mean| solve(&harmless, mean, head_dim, self).map(drop))
    }

    /// Whether heads may go without history: not where one side is bound to a width.
    pub fn allows_absent(&self) -> bool {
        self.widths.first() == Some(&ABSENT) && self.side.is_none()
    }

    /// Whether bits may move between any two units, one at a time.
    pub fn moves_freely(&self) -> bool {
        let steps = self.coded().iter().copied().eq(1..=self.widest());
        steps && self.widest() >= WIDTHS[WIDTHS.len() - 1] && !self.by_layer && self.side.is_none()
    }

    /// The widest code.
    pub fn widest(&self) -> u32 {
        self.widths.last().copied().unwrap_or(ABSENT)
    }

    /// The same, but every head keeps its history.
    pub fn with_history(&self) -> Self {
        Self { widths: self.coded().to_vec(), ..self.clone() }
    }

    /// The widths of those that have one.
    fn coded(&self) -> &[u32] {
        self.widths.strip_prefix(&[ABSENT]).unwrap_or(&self.widths)
    }
}

/// One way to keep a head, or the heads of a layer: what it costs and does.
#[derive(Clone, Copy, Debug)]
struct Choice {
    widths: (u32, u32),
    cost: usize,
    harm: f64,
}

/// The best table whose mean is at most `mean`, scale and minimum counted.
pub fn solve(
    map: &HarmMap,
    mean: MeanBits,
    head_dim: usize,
    freedom: &Freedom,
) -> Result<WidthTable, CalibrateError> {
    solve_by(map, &|unit, bits| map.at(unit, bits), mean, head_dim, freedom)
}

/// [`solve`] with other harms than the map's; the map gives the shape and the heads that may go
/// without history.
pub(super) fn solve_by(
    map: &HarmMap,
    at: &dyn Fn(usize, u32) -> f64,
    mean: MeanBits,
    head_dim: usize,
    freedom: &Freedom,
) -> Result<WidthTable, CalibrateError> {
    freedom.check()?;
    let sharing = if freedom.by_layer { map.kv_heads } else { 1 };
    let heads = map.layers * map.kv_heads;
    let fixed_width = (mean.mean_width(head_dim).round() as u32).clamp(WIDTHS[0], WIDTHS[WIDTHS.len() - 1]);
    let coded = freedom.coded();
    let side_widths = |side| match freedom.side {
        Some(varying) if varying != side => std::slice::from_ref(&fixed_width),
        _ => coded,
    };
    let (key_widths, value_widths) = (side_widths(Side::Key), side_widths(Side::Value));
    // Costs of a row are multiples of this many bits.
    let step = divisor(head_dim, PARAMETER_BITS);
    let row = |bits: u32| (bits as usize * head_dim + PARAMETER_BITS) / step;
    let groups: Vec<Vec<Choice>> = (0..heads / sharing)
        .map(|group| {
            let members = group * sharing..(group + 1) * sharing;
            let sum = |of: &dyn Fn(usize) -> f64| members.clone().map(of).sum::<f64>();
            let mut choices = Vec::new();
            let absent = members.clone().all(|head| map.absent[head].is_some());
            if absent && freedom.allows_absent() {
                let harm = sum(&|head| map.absent[head].map_or(f64::INFINITY, f64::from));
                choices.push(Choice { widths: (ABSENT, ABSENT), cost: 0, harm });
            }
            for &key in key_widths {
                for &value in value_widths {
                    let harm = sum(&|head| at(2 * head, key) + at(2 * head + 1, value));
                    choices.push(Choice {
                        widths: (key, value),
                        cost: sharing * (row(key) + row(value)),
                        harm,
                    });
                }
            }
            choices
        })
        .collect();
    // A hair above the mean would otherwise be lost to rounding.
    let budget = (mean.bits() * (2 * heads * head_dim) as f64 / step as f64 + 1e-6).floor() as usize;
    // The reach of coded heads: a mean that only heads without history could keep is none of these
    // codes'.
    let reach = |pick: fn(&[u32]) -> u32| heads * (row(pick(key_widths)) + row(pick(value_widths)));
    let (least, most) = (reach(|w| w[0]), reach(|w| w[w.len() - 1]));
    if !(least..=most).contains(&budget) {
        let bits = |cost: usize| (cost * step) as f64 / (2 * heads * head_dim) as f64;
        let (least, most) = (bits(least), bits(most));
        let problem = format!(
            "{mean} bits are out of reach: heads of {head_dim} take between {least:.2} and {most:.2}"
        );
        return Err(CalibrateError::option("--bits", problem));
    }
    let shared = least_harm(&groups, budget);
    let widths = (0..heads).map(|head| shared[head / sharing]).collect();
    Ok(WidthTable { layers: map.layers, kv_heads: map.kv_heads, widths })
}

fn divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { divisor(b, a % b) }
}

/// Exact minimum of the sum of harms with at most `budget` in all, which must suffice for the
/// cheapest choices.
fn least_harm(groups: &[Vec<Choice>], budget: usize) -> Vec<(u32, u32)> {
    let mut best = vec![0.0f64; budget + 1];
    let mut chosen = vec![0u8; groups.len() * (budget + 1)];
    for (group, choices) in groups.iter().enumerate() {
        let before = best.clone();
        for left in 0..=budget {
            let affordable = choices.iter().enumerate().filter(|(_, c)| c.cost <= left);
            // More is spent only if it helps: ties go to the earlier choice, which is the narrower.
            let (least, index) = affordable
                .map(|(index, c)| (before[left - c.cost] + c.harm, index))
                .fold((f64::INFINITY, 0), |a, b| if b.0 < a.0 { b } else { a });
            best[left] = least;
            chosen[group * (budget + 1) + left] = index as u8;
        }
    }
    let mut left = budget;
    let mut widths = vec![(0, 0); groups.len()];
    for (group, choices) in groups.iter().enumerate().rev() {
        let choice = choices[usize::from(chosen[group * (budget + 1) + left])];
        widths[group] = choice.widths;
        left -= choice.cost;
    }
    widths
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(kv_heads: usize, harm: Vec<[f32; 4]>) -> HarmMap {
        let heads = harm.len() / 2;
        HarmMap { layers: heads / kv_heads, kv_heads, harm, error: Vec::new(), absent: vec![None; heads] }
    }

    #[test]
    fn bits_go_where_harm_is() {
        let fragile = [8.0, 4.0, 2.0, 1.0];
        let robust = [0.1, 0.05, 0.02, 0.01];
        let map = map(1, vec![fragile, robust, robust, fragile]);
        let all = Freedom::default();
        let table = solve(&map, "2.25".parse().unwrap(), 128, &all).unwrap();
        assert_eq!(table.units(), [3, 1, 1, 3]);
        assert_eq!(table.mean_bits(128), 2.25);
        let table = solve(&map, "3.25".parse().unwrap(), 128, &all).unwrap();
        assert_eq!(table.units(), [4, 2, 2, 4]);
    }

    #[test]
    fn heads_of_a_layer_may_share() {
        let map = map(2, vec![[8.0, 4.0, 2.0, 1.0], [0.1; 4], [0.1; 4], [0.1; 4]]);
        let by_layer = Freedom { by_layer: true, ..Freedom::default() };
        let mean = "2.25".parse().unwrap();
        assert_eq!(solve(&map, mean, 128, &by_layer).unwrap().units(), [3, 1, 3, 1]);
        assert_eq!(solve(&map, mean, 128, &Freedom::default()).unwrap().units(), [4, 1, 1, 1]);
    }

    #[test]
    fn a_side_may_stay_uniform_and_widths_may_be_few() {
        let fragile = [8.0, 4.0, 2.0, 1.0];
        let robust = [0.1, 0.05, 0.02, 0.01];
        let map = map(1, vec![fragile, robust, robust, fragile]);
        let mean = "2.25".parse().unwrap();
        let solved = |freedom: Freedom| solve(&map, mean, 128, &freedom).unwrap().units();
        assert_eq!(solved(Freedom { side: Some(Side::Key), ..Freedom::default() }), [3, 2, 1, 2]);
        assert_eq!(solved(Freedom { side: Some(Side::Value), ..Freedom::default() }), [2, 1, 2, 3]);
        assert_eq!(solved(Freedom { widths: vec![1, 4], ..Freedom::default() }), [4, 1, 1, 1]);
        for widths in [vec![], vec![2, 1], vec![1, 6]] {
            assert!(solve(&map, mean, 128, &Freedom { widths, ..Freedom::default() }).is_err());
        }
        let error =
            solve(&map, mean, 128, &Freedom { widths: vec![3, 4], ..Freedom::default() }).unwrap_err();
        assert!(error.to_string().contains("between 3.25 and 4.25"), "{error}");
    }

    #[test]
    fn what_a_head_without_history_frees_goes_to_others() {
        let fragile = [8.0, 4.0, 2.0, 1.0];
        let mut map = map(1, vec![fragile, fragile, [0.2; 4], [0.2; 4]]);
        map.absent = vec![Some(50.0), Some(0.5)];
        let mean = "2.25".parse().unwrap();
        // Its two bits and two pairs of parameters: 4.5 of 9 bits in all.
        let table = solve(&map, mean, 128, &Freedom::default()).unwrap();
        assert_eq!(table.widths, [(4, 4), (0, 0)]);
        assert!(table.mean_bits(128) <= 2.25);
        let coded = Freedom { widths: WIDTHS.to_vec(), ..Freedom::default() };
        assert_eq!(solve(&map, mean, 128, &coded).unwrap().widths, [(3, 3), (1, 1)]);
        let keys = Freedom { side: Some(Side::Key), ..Freedom::default() };
        assert!(solve(&map, mean, 128, &keys).unwrap().widths.iter().all(|pair| pair.1 == 2));
        // Not measured, not chosen; nor where it does more harm than one bit saves.
        map.absent[1] = None;
        assert_eq!(solve(&map, mean, 128, &Freedom::default()).unwrap().widths, [(3, 3), (1, 1)]);
        map.absent[1] = Some(9.0);
        assert_eq!(solve(&map, mean, 128, &Freedom::default()).unwrap().widths, [(3, 3), (1, 1)]);
        let by_layer = Freedom { by_layer: true, ..Freedom::default() };
        map.absent = vec![Some(0.0); 2];
        (map.layers, map.kv_heads) = (1, 2);
        assert_eq!(solve(&map, mean, 128, &by_layer).unwrap().widths, [(0, 0); 2]);
    }

    #[test]
    fn five_bits_are_for_those_who_ask() {
        let map = map(1, vec![[90.0, 40.0, 20.0, 10.0], [0.1; 4], [0.1; 4], [0.1; 4]]);
        let mean = "2.25".parse().unwrap();
        assert_eq!(solve(&map, mean, 128, &Freedom::default()).unwrap().units()[0], 4);
        let wide = Freedom { widths: vec![1, 2, 3, 4, 5], ..Freedom::default() };
        let table = solve(&map, mean, 128, &wide).unwrap();
        assert_eq!((table.units(), table.mean_bits(128)), (vec![5, 1, 1, 1], 2.25));
        assert!(map.total(&table) < 0.3 * map.total(&solve(&map, mean, 128, &Freedom::default()).unwrap()));
        assert!(wide.moves_freely() && Freedom::default().moves_freely());
        for bound in [vec![1, 4], vec![0, 1, 2, 3], vec![1, 2, 3, 5]] {
            assert!(!Freedom { widths: bound, ..Freedom::default() }.moves_freely());
        }
    }

    #[test]
    fn impossible_means_say_what_is_possible() {
        let map = map(1, vec![[1.0; 4]; 2]);
        let error = solve(&map, "1.30".parse().unwrap(), 64, &Freedom::default()).unwrap_err().to_string();
        assert!(error.contains("between 1.50 and 4.50"), "{error}");
    }

    proptest! {
        /// No exchange of one bit between two units improves an optimum, and the budget holds.
        #[test]
        fn the_optimum_withstands_exchanges(
            harm in prop::collection::vec(prop::array::uniform4(0.0f32..10.0), 2..12),
            extra in 0usize..30,
        ) {
            let mut harm: Vec<[f32; 4]> = harm.into_iter().map(|mut h| { h.sort_by(|a, b| b.total_cmp(a)); h }).collect();
            harm.truncate(harm.len() / 2 * 2);
            let budget = (harm.len() + extra).min(4 * harm.len());
            let map = map(1, harm.clone());
            let mean = budget as f64 / harm.len() as f64 + 0.25;
            let table = solve(&map, format!("{mean:.2}").parse().unwrap(), 128, &Freedom::default()).unwrap();
            let widths = table.units();
            // A mean has two decimals.
            prop_assert!(widths.iter().sum::<u32>() as usize <= budget + 1);
            let at = |unit: usize, width: u32| harm[unit][width as usize - 1];
            for from in 0..harm.len() {
                for to in 0..harm.len() {
                    if from != to && widths[from] > 1 && widths[to] < 4 {
                        let lost = at(from, widths[from] - 1) - at(from, widths[from]);
                        let won = at(to, widths[to]) - at(to, widths[to] + 1);
                        prop_assert!(won <= lost + 1e-4);
                    }
                }
            }
        }
    }
}
