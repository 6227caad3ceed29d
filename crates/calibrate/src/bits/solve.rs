//! The widths of least total harm at a given mean.
//!
//! Every unit has the same size, so this is a knapsack with at most four choices an item and a budget of a few
//! thousand bits: it is solved exactly, where a Lagrangian would leave the last bits to a guess.

use super::table::{HarmMap, WIDTHS, WidthTable, check_widths};
use crate::error::CalibrateError;
use oscar_codec::{MeanBits, Side};

/// What a table may differ in. The default is everything; less is what the gain is measured against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Freedom {
    /// Widths a unit may have, ascending.
    pub widths: Vec<u32>,
    /// All heads of a layer and side share a width.
    pub by_layer: bool,
    /// The side whose widths vary; the other has the mean's own, rounded. Both if absent.
    pub side: Option<Side>,
}

impl Default for Freedom {
    fn default() -> Self {
        Self { widths: WIDTHS.to_vec(), by_layer: false, side: None }
    }
}

impl Freedom {
    pub fn check(&self) -> Result<(), CalibrateError> {
        check_widths("--widths", &self.widths)
    }
}

/// The best table whose mean is at most `mean`, scale and minimum counted.
pub fn solve(
    map: &HarmMap,
    mean: MeanBits,
    head_dim: usize,
    freedom: &Freedom,
) -> Result<WidthTable, CalibrateError> {
    freedom.check()?;
    let width = mean.mean_width(head_dim);
    let sharing = if freedom.by_layer { map.kv_heads } else { 1 };
    // The units that share a width are neighbours in steps of two, for the sides alternate.
    let group_of = |unit: usize| match freedom.by_layer {
        true => unit / (2 * map.kv_heads) * 2 + unit % 2,
        false => unit,
    };
    let fixed = |unit: usize| match freedom.side {
        Some(Side::Key) => unit % 2 == 1,
        Some(Side::Value) => unit.is_multiple_of(2),
        None => false,
    };
    let mut groups = vec![[0.0; WIDTHS.len()]; map.units() / sharing];
    for (unit, harm) in map.harm.iter().enumerate() {
        groups[group_of(unit)].iter_mut().zip(harm).for_each(|(sum, h)| *sum += h);
    }
    let varying: Vec<usize> = (0..groups.len()).filter(|&group| !fixed(group)).collect();
    let harms: Vec<[f32; WIDTHS.len()]> = varying.iter().map(|&group| groups[group]).collect();
    // What the fixed side takes too much or too little changes what is left for the other.
    let fixed_width = (width.round() as u32).clamp(WIDTHS[0], WIDTHS[WIDTHS.len() - 1]);
    let fixed_bits = fixed_width as usize * (groups.len() - varying.len());
    // A hair above the mean would otherwise be lost to rounding.
    let budget = (width * groups.len() as f64 + 1e-6).floor() - fixed_bits as f64;
    let (narrowest, widest) = (freedom.widths[0], freedom.widths[freedom.widths.len() - 1]);
    let reach = |bits: u32| (bits as usize * varying.len() + fixed_bits) as f64 / groups.len() as f64;
    if !((narrowest as usize * varying.len()) as f64..=(widest as usize * varying.len()) as f64)
        .contains(&budget)
    {
        let overhead = 32.0 / head_dim as f64;
        return Err(CalibrateError::Option {
            option: "--bits",
            problem: format!(
                "{mean} bits are out of reach: heads of {head_dim} take between {:.2} and {:.2}",
                reach(narrowest) + overhead,
                reach(widest) + overhead
            ),
        });
    }
    let mut shared = vec![fixed_width; groups.len()];
    for (&group, bits) in varying.iter().zip(least_harm(&harms, &freedom.widths, budget as usize)) {
        shared[group] = bits;
    }
    let units: Vec<u32> = (0..map.units()).map(|unit| shared[group_of(unit)]).collect();
    Ok(WidthTable::from_units(map.layers, map.kv_heads, &units))
}

/// Exact minimum of the sum of harms with at most `budget` bits in all, which must suffice for the narrowest width.
fn least_harm(harm: &[[f32; WIDTHS.len()]], widths: &[u32], budget: usize) -> Vec<u32> {
    let units = harm.len();
    let narrowest = widths[0];
    // Every unit takes at least the narrowest width; `spare` bits are dealt out beyond that.
    let spare = budget - narrowest as usize * units;
    let mut best = vec![0.0f64; spare + 1];
    let mut choices = vec![0u8; units * (spare + 1)];
    for (unit, harm) in harm.iter().enumerate() {
        let before = best.clone();
        for left in 0..=spare {
            let options =
                widths.iter().map(|w| (w - narrowest) as usize).filter(|&extra| extra <= left).map(|extra| {
                    // More bits are taken only if they help: ties go to the narrower code.
                    (before[left - extra] + f64::from(harm[narrowest as usize + extra - 1]), extra)
                });
            let (least, extra) = options.fold((f64::INFINITY, 0), |a, b| if b.0 < a.0 { b } else { a });
            best[left] = least;
            choices[unit * (spare + 1) + left] = extra as u8;
        }
    }
    let mut left = spare;
    let mut chosen = vec![0; units];
    for unit in (0..units).rev() {
        let extra = usize::from(choices[unit * (spare + 1) + left]);
        chosen[unit] = narrowest + extra as u32;
        left -= extra;
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(kv_heads: usize, harm: Vec<[f32; 4]>) -> HarmMap {
        HarmMap { layers: harm.len() / 2 / kv_heads, kv_heads, harm }
    }

    #[test]
    fn bits_go_where_harm_is() {
        let fragile = [8.0, 4.0, 2.0, 1.0];
        let robust = [0.1, 0.05, 0.02, 0.01];
        let map = map(1, vec![fragile, robust, robust, fragile]);
        let all = Freedom::default();
        let table = solve(&map, "2.25".parse().unwrap(), 128, &all).unwrap();
        assert_eq!(table.units(), [3, 1, 1, 3]);
        assert_eq!(table.mean_width(), 2.0);
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
        for widths in [vec![], vec![2, 1], vec![1, 5]] {
            assert!(solve(&map, mean, 128, &Freedom { widths, ..Freedom::default() }).is_err());
        }
        let error =
            solve(&map, mean, 128, &Freedom { widths: vec![3, 4], ..Freedom::default() }).unwrap_err();
        assert!(error.to_string().contains("between 3.25 and 4.25"), "{error}");
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
            let harm: Vec<[f32; 4]> = harm.into_iter().map(|mut h| { h.sort_by(|a, b| b.total_cmp(a)); h }).collect();
            let budget = (harm.len() + extra).min(4 * harm.len());
            let widths = least_harm(&harm, &WIDTHS, budget);
            prop_assert!(widths.iter().sum::<u32>() as usize <= budget);
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
