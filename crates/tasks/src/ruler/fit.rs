//! The largest haystack that fits a token budget.
//!
//! Tokens grow almost in proportion to the size, so the search extrapolates and interpolates before
//! it bisects: counting a long prompt is the expensive step. The result always fits, since it was
//! counted.

use std::ops::RangeInclusive;

/// Composes at sizes within `sizes` and returns the largest found that costs at most `budget`,
/// stopping early within a five-hundredth of it. `Err` is the cost of the smallest size, when even
/// that is too big.
pub(super) fn largest_fitting<T>(
    sizes: RangeInclusive<usize>,
    budget: usize,
    compose: impl Fn(usize) -> T,
    cost: impl Fn(&T) -> usize,
) -> Result<T, usize> {
    let (least, most) = sizes.into_inner();
    let slack = budget / 512;
    let mut best = compose(least);
    let least_cost = cost(&best);
    if least_cost > budget {
        return Err(least_cost);
    }
    let (mut low, mut low_cost) = (least, least_cost);

    // Grow until something does not fit.
    let (mut high, mut high_cost) = loop {
        if low >= most || budget - low_cost <= slack {
            return Ok(best);
        }
        let doubled = low.saturating_mul(2).max(low.saturating_add(8));
        let next = if low >= least.saturating_mul(8) && low_cost > least_cost {
            // Far enough from the start for a reliable slope; aim just beyond the budget.
            let per_token = (low - least) as f64 / (low_cost - least_cost) as f64;
            let aim = (budget - low_cost) as f64 * per_token * 1.02;
            low.saturating_add(aim as usize + 1).min(low.saturating_mul(16))
        } else {
            doubled
        }
        .min(most);
        let draft = compose(next);
        let spent = cost(&draft);
        if spent > budget {
            break (next, spent);
        }
        (best, low, low_cost) = (draft, next, spent);
    };

    // Close in from both sides: aim at the crossing, then a little beyond it on the other side.
    let mut fitted = false;
    for probe in 0.. {
        if high - low <= 1 || budget - low_cost <= slack {
            break;
        }
        let width = high - low;
        let middle = if probe < 12 {
            let share = (budget - low_cost) as f64 / (high_cost - low_cost) as f64;
            let aim = low + (width as f64 * share) as usize;
            match (probe % 2 == 1, fitted) {
                (false, _) => aim,
                (true, true) => aim + width / 32 + 1,
                (true, false) => aim.saturating_sub(width / 32 + 1),
            }
        } else {
            low + width / 2
        };
        let middle = middle.clamp(low + 1, high - 1);
        let draft = compose(middle);
        let spent = cost(&draft);
        fitted = spent <= budget;
        if fitted {
            (best, low, low_cost) = (draft, middle, spent);
        } else {
            (high, high_cost) = (middle, spent);
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    #[test]
    fn too_small_a_budget_reports_what_is_needed() {
        assert_eq!(largest_fitting(3..=100, 10, |n| n, |n| n * 5), Err(15));
    }

    #[test]
    fn a_short_supply_is_used_up() {
        assert_eq!(largest_fitting(1..=7, 1000, |n| n, |n| n * 3), Ok(7));
    }

    #[test]
    fn few_full_probes_are_needed() {
        let spent = Cell::new(0usize);
        let cost = |n: &usize| {
            let tokens = 60 + n + n / 3;
            spent.set(spent.get() + tokens);
            tokens
        };
        let found = largest_fitting(1..=usize::MAX, 131_072, |n| n, cost).unwrap();
        assert!(60 + found + found / 3 > 130_800);
        assert!(spent.get() < 6 * 131_072, "counted {} tokens", spent.get());
    }

    proptest! {
        #[test]
        fn fits_and_is_nearly_full(base in 0usize..500, per in 1usize..40, bump in 0usize..30, budget in 1usize..60_000) {
            // A slope that wobbles, as real tokenizers do.
            let cost = move |n: &usize| base + n * per + (n % 7) * bump / 7;
            match largest_fitting(2..=usize::MAX, budget, |n| n, cost) {
                Ok(n) => {
                    prop_assert!(cost(&n) <= budget);
                    prop_assert!(budget - cost(&n) <= budget / 512 + per + 2 * bump);
                }
                Err(needed) => prop_assert!(needed > budget && needed == cost(&2)),
            }
        }
    }
}
