//! The widths of least total harm at a given mean.
//!
//! Every unit has the same size, so this is a knapsack with at most four choices an item and a budget of a few
//! thousand bits: it is solved exactly, where a Lagrangian would leave the last bits to a guess.

use super::table::{HarmMap, WIDTHS, WidthTable};
use crate::error::CalibrateError;
use oscar_codec::MeanBits;

const NARROWEST: usize = WIDTHS[0] as usize;
const WIDEST: usize = WIDTHS[WIDTHS.len() - 1] as usize;

/// The best table whose mean is at most `mean`, scale and minimum counted.
pub fn solve(map: &HarmMap, mean: MeanBits, head_dim: usize) -> Result<WidthTable, CalibrateError> {
    let budget = budget(map.units(), mean, head_dim)?;
    let units = least_harm(&map.harm, budget);
    Ok(WidthTable::from_units(map.layers, map.kv_heads, &units))
}

/// The same with all heads of a layer and side sharing a width: simpler, and what the gain of heads is measured
/// against.
pub fn solve_by_layer(map: &HarmMap, mean: MeanBits, head_dim: usize) -> Result<WidthTable, CalibrateError> {
    let budget = budget(map.units(), mean, head_dim)?;
    let mut grouped = vec![[0.0; WIDTHS.len()]; 2 * map.layers];
    for (unit, harm) in map.harm.iter().enumerate() {
        let group = &mut grouped[unit / (2 * map.kv_heads) * 2 + unit % 2];
        group.iter_mut().zip(harm).for_each(|(sum, h)| *sum += h);
    }
    let shared = least_harm(&grouped, budget / map.kv_heads);
    let units: Vec<u32> =
        (0..map.units()).map(|unit| shared[unit / (2 * map.kv_heads) * 2 + unit % 2]).collect();
    Ok(WidthTable::from_units(map.layers, map.kv_heads, &units))
}

/// Bits to deal out over all units.
fn budget(units: usize, mean: MeanBits, head_dim: usize) -> Result<usize, CalibrateError> {
    let width = mean.mean_width(head_dim);
    // A hair above the mean would otherwise be lost to rounding.
    let budget = (width * units as f64 + 1e-6).floor();
    if !((NARROWEST * units) as f64..=(WIDEST * units) as f64).contains(&budget) {
        let overhead = 32.0 / head_dim as f64;
        return Err(CalibrateError::Option {
            option: "--bits",
            problem: format!(
                "{mean} bits are out of reach: heads of {head_dim} take between {:.2} and {:.2}",
                NARROWEST as f64 + overhead,
                WIDEST as f64 + overhead
            ),
        });
    }
    Ok(budget as usize)
}

/// Exact minimum of the sum of harms with at most `budget` bits in all.
fn least_harm(harm: &[[f32; WIDTHS.len()]], budget: usize) -> Vec<u32> {
    let units = harm.len();
    // Every unit takes at least the narrowest width; `spare` bits are dealt out beyond that.
    let spare = budget - NARROWEST * units;
    let mut best = vec![0.0f64; spare + 1];
    let mut choices = vec![0u8; units * (spare + 1)];
    for (unit, harm) in harm.iter().enumerate() {
        let before = best.clone();
        for left in 0..=spare {
            let options = (0..WIDTHS.len().min(left + 1)).map(|extra| {
                // More bits are taken only if they help: ties go to the narrower code.
                (before[left - extra] + f64::from(harm[extra]), extra)
            });
            let (least, extra) = options.fold((f64::INFINITY, 0), |a, b| if b.0 < a.0 { b } else { a });
            best[left] = least;
            choices[unit * (spare + 1) + left] = extra as u8;
        }
    }
    let mut left = spare;
    let mut widths = vec![0; units];
    for unit in (0..units).rev() {
        let extra = usize::from(choices[unit * (spare + 1) + left]);
        widths[unit] = (NARROWEST + extra) as u32;
        left -= extra;
    }
    widths
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
        let table = solve(&map, "2.25".parse().unwrap(), 128).unwrap();
        assert_eq!(table.units(), [3, 1, 1, 3]);
        assert_eq!(table.mean_width(), 2.0);
        let table = solve(&map, "3.25".parse().unwrap(), 128).unwrap();
        assert_eq!(table.units(), [4, 2, 2, 4]);
    }

    #[test]
    fn heads_of_a_layer_may_share() {
        let map = map(2, vec![[8.0, 4.0, 2.0, 1.0], [0.1; 4], [0.1; 4], [0.1; 4]]);
        assert_eq!(solve_by_layer(&map, "2.25".parse().unwrap(), 128).unwrap().units(), [3, 1, 3, 1]);
        assert_eq!(solve(&map, "2.25".parse().unwrap(), 128).unwrap().units(), [4, 1, 1, 1]);
    }

    #[test]
    fn impossible_means_say_what_is_possible() {
        let map = map(1, vec![[1.0; 4]; 2]);
        let error = solve(&map, "1.30".parse().unwrap(), 64).unwrap_err().to_string();
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
            let widths = least_harm(&harm, budget);
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
