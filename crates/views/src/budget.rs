//! How much of a history is kept: in rows, as a share, or in bytes.

use oscar_codec::{CacheLayout, PAGE_TOKENS};
use std::fmt;
use std::str::FromStr;

/// Rows that a view keeps, beside the sink, the recent window and protected positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Rows of each layer and head, on average.
    Rows(usize),
    /// Percent of the history.
    Percent(f64),
    /// Bytes of the view's pages.
    Bytes(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a budget: give rows (4096), a share (25%) or bytes (64M)")]
pub struct BudgetError(String);

impl FromStr for Budget {
    type Err = BudgetError;

    fn from_str(text: &str) -> Result<Self, BudgetError> {
        let refused = || BudgetError(text.to_owned());
        let trimmed = text.trim();
        if let Some(number) = trimmed.strip_suffix('%') {
            let percent: f64 = number.trim().parse().map_err(|_| refused())?;
            return match percent > 0.0 && percent <= 100.0 {
                true => Ok(Self::Percent(percent)),
                false => Err(refused()),
            };
        }
        let unit = |letter: char| match letter.to_ascii_uppercase() {
            'K' => Some(1usize << 10),
            'M' => Some(1 << 20),
            'G' => Some(1 << 30),
            _ => None,
        };
        let bytes = trimmed.trim_end_matches(['b', 'B', 'i']);
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| refused());
        let budget = match bytes.chars().last().and_then(unit) {
            Some(unit) => {
                Self::Bytes(number(&bytes[..bytes.len() - 1])?.checked_mul(unit).ok_or_else(refused)?)
            }
            None => Self::Rows(number(trimmed)?),
        };
        match budget {
            Self::Rows(0) | Self::Bytes(0) => Err(refused()),
            budget => Ok(budget),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows(rows) => write!(f, "{rows}"),
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(bytes) => write!(f, "{}K", bytes.div_ceil(1024)),
        }
    }
}

impl Budget {
    /// Rows of all heads that store history together, if each has `rows` to choose from.
    pub fn total(&self, layout: &CacheLayout, rows: usize) -> usize {
        let Some(table) = layout.coded() else { return 0 };
        let heads: Vec<usize> = table
            .codecs()
            .iter()
            .filter(|codec| codec.keeps_history())
            .map(|codec| codec.page_bytes())
            .collect();
        let most = rows * heads.len();
        let wanted = match *self {
            Self::Rows(each) => each.saturating_mul(heads.len()),
            Self::Percent(percent) => (most as f64 * percent / 100.0).round() as usize,
            // A page of every head at a time; the last page of a head may be partly filled.
            Self::Bytes(bytes) => bytes / heads.iter().sum::<usize>().max(1) * PAGE_TOKENS * heads.len(),
        };
        wanted.min(most)
    }
}

/// Divides `total` in proportion to `weights`, none above its `cap`: exactly, by largest remainders.
/// Ties go to the lower index.
pub fn apportion(total: usize, weights: &[f64], caps: &[usize]) -> Vec<usize> {
    let mut shares = vec![0; weights.len()];
    let mut left = total.min(caps.iter().sum());
    // Heads at their cap leave the division; the others share what is left.
    while left > 0 {
        let open: Vec<usize> = (0..weights.len()).filter(|&i| shares[i] < caps[i]).collect();
        let sum: f64 = open.iter().map(|&i| weights[i]).sum();
        let exact = |i: usize| match sum > 0.0 {
            true => left as f64 * weights[i] / sum,
            false => left as f64 / open.len() as f64,
        };
        let mut parts: Vec<(usize, usize, f64)> =
            open.iter().map(|&i| (i, exact(i).floor() as usize, exact(i).fract())).collect();
        let mut rest = left.saturating_sub(parts.iter().map(|part| part.1).sum());
        parts.sort_by(|a, b| b.2.total_cmp(&a.2).then(a.0.cmp(&b.0)));
        for (i, part, _) in parts {
            let one = usize::from(rest > 0);
            rest -= one;
            let given = (part + one).min(caps[i] - shares[i]).min(left);
            shares[i] += given;
            left -= given;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn budgets_are_understood_and_others_refused() {
        assert_eq!("4096".parse(), Ok(Budget::Rows(4096)));
        assert_eq!(" 12.5% ".parse(), Ok(Budget::Percent(12.5)));
        assert_eq!("64M".parse(), Ok(Budget::Bytes(64 << 20)));
        assert_eq!("2GiB".parse(), Ok(Budget::Bytes(2 << 30)));
        for text in ["4096", "12.5%", "65536K"] {
            assert_eq!(text.parse::<Budget>().unwrap().to_string(), text);
        }
        for text in ["", "0", "0%", "101%", "-3", "x", "1.5", "0K", "99999999999999999999G"] {
            assert!(text.parse::<Budget>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn shares_are_exact_and_within_their_caps(
            parts in prop::collection::vec((0.0f64..3.0, 0usize..400), 1..20), total in 0usize..5000,
        ) {
            let (weights, caps): (Vec<f64>, Vec<usize>) = parts.into_iter().unzip();
            let shares = apportion(total, &weights, &caps);
            prop_assert_eq!(shares.iter().sum::<usize>(), total.min(caps.iter().sum()));
            prop_assert!(shares.iter().zip(&caps).all(|(share, cap)| share <= cap));
        }
    }

    #[test]
    fn remainders_go_to_the_lower_index() {
        assert_eq!(apportion(7, &[1.0; 4], &[9; 4]), [2, 2, 2, 1]);
        assert_eq!(apportion(10, &[3.0, 1.0], &[4, 100]), [4, 6]);
        assert_eq!(apportion(5, &[0.0, 0.0], &[9, 9]), [3, 2]);
    }
}
