//! How many bytes of a query and of a weight are multiplied with codes.
//!
//! A code of one or two bits is coarse: its error in a score is `Σ q·e` with `e` spread over a step
//! `s`, about `0.29·s·|q|`. A query rounded to one byte, with a step of its largest magnitude over
//! 127, adds `0.29·(max|q|/127)·s·|c − mid|`, where `c` are the token's codes counted from their
//! middle (the rounding error of the query's sum is added back exactly, so that only deviations
//! from the middle remain). Codes deviate by 1.1 a channel, so the second error is `1.1 · crest /
//! 127` of the first, where the crest `max|q| / rms(q)` of a rotated query is about 3: 2.6 %, 31 dB
//! down, for every token and every scale. A query with a crest above [`CREST_LIMIT`] adds its low
//! bytes in a second pass of its own, so the bound holds for any query.
//!
//! The same holds for values: the weights `w = p·scale` of a page, as bytes of the page's largest
//! one, are off by at most `max w / 510`. Times deviations from the middle that is at most 6 % of
//! the values' own quantization error if one token has all the weight and 63 others sit on the
//! rounding edge, and 0.4 % if the page is flat.
//!
//! Wider codes are finer than that, so they take both bytes.

use std::sync::OnceLock;

use thiserror::Error;

/// Environment variable that overrides the choice, by name.
pub const OVERRIDE: &str = "OSCAR_ATTENTION";

/// Largest magnitude of a query, in units of its root mean square, for which one byte a channel
/// suffices.
pub(super) const CREST_LIMIT: f64 = 4.0;

/// Bytes of queries and weights against codes of one and two bits. Wider codes always take two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AttentionPrecision {
    /// One byte: half the products, with an error far below that of the codes.
    #[default]
    Int8,
    /// High and low bytes at every width: the codes are the only error that is left.
    HiLo,
}

/// Why a precision could not be chosen.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PrecisionError {
    #[error(
        "unknown attention precision '{name}' (from {OVERRIDE}?); use 'int8' (one byte a query channel for codes of \
         1 and 2 bits, the default) or 'hilo' (two bytes for all widths)"
    )]
    Unknown { name: String },
}

impl AttentionPrecision {
    pub const ALL: [Self; 2] = [Self::Int8, Self::HiLo];

    /// The precision asked for by name, or the default if none is.
    ///
    /// # Errors
    /// When there is no such name.
    pub fn select(wish: Option<&str>) -> Result<Self, PrecisionError> {
        match wish {
            None | Some("int8") => Ok(Self::Int8),
            Some("hilo") => Ok(Self::HiLo),
            Some(name) => Err(PrecisionError::Unknown { name: name.to_owned() }),
        }
    }

    /// The precision of this process: that of the environment variable `OSCAR_ATTENTION`, or the
    /// default. Read once.
    ///
    /// # Errors
    /// When the variable holds an unknown name. A program checks this at start; kernels that are
    /// reached without the check use the default.
    pub fn chosen() -> Result<Self, PrecisionError> {
        static CHOICE: OnceLock<Result<AttentionPrecision, PrecisionError>> = OnceLock::new();
        CHOICE
            .get_or_init(|| {
                let wish = std::env::var_os(OVERRIDE).map(|value| value.to_string_lossy().into_owned());
                Self::select(wish.as_deref())
            })
            .clone()
    }

    /// Whether codes of this width are multiplied with one byte.
    pub(super) fn one_byte(self, bits: u32) -> bool {
        self == Self::Int8 && bits <= 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood_and_others_refused() {
        assert_eq!(AttentionPrecision::select(None), Ok(AttentionPrecision::Int8));
        for (name, precision) in ["int8", "hilo"].into_iter().zip(AttentionPrecision::ALL) {
            assert_eq!(AttentionPrecision::select(Some(name)), Ok(precision));
        }
        for name in ["", "HILO", "int16", "hilo "] {
            let error = AttentionPrecision::select(Some(name)).unwrap_err();
            assert_eq!(error, PrecisionError::Unknown { name: name.to_owned() });
            let message = error.to_string();
            assert!(message.contains("'int8'") && message.contains("'hilo'") && message.contains(OVERRIDE));
        }
    }

    #[test]
    fn only_narrow_codes_meet_one_byte() {
        for bits in [1, 2, 3, 4, 5, 8] {
            assert_eq!(AttentionPrecision::Int8.one_byte(bits), bits <= 2);
            assert!(!AttentionPrecision::HiLo.one_byte(bits));
        }
    }
}
