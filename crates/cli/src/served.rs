//! The KV format of a model that answers: the one that was asked for, or a safe one.

use crate::rotations::{Calibration, Found};
use oscar_codec::{CacheLayout, KvFormat, MeanBits, PAGE_TOKENS};

/// The format, and what the user should know about it.
#[derive(Debug)]
pub struct Served {
    pub format: KvFormat,
    pub calibration: Calibration,
    pub note: Option<String>,
    /// What the operator can do about it.
    pub advice: Option<&'static str>,
}

impl Served {
    /// The format that was asked for. Otherwise one whose widths were measured and verified on this
    /// model: the default mean, or the verified table next to it. Without any, four bits for every
    /// head: two bits everywhere fail long copying and arithmetic. `latent` attention has BF16 alone.
    pub fn choose(asked: Option<KvFormat>, found: Option<&Found>, latent: bool) -> Self {
        let calibration = Calibration::of(found);
        if let Some(format) = asked {
            return Self { format, calibration, note: None, advice: None };
        }
        if latent {
            let note = Some(LATENT.to_owned());
            return Self { format: KvFormat::Bf16, calibration, note, advice: None };
        }
        if let Some(bits) = found.map(|found| &found.file.bits).filter(|bits| !bits.tables.is_empty()) {
            let narrowest = bits.tables.iter().map(|(mean, _)| *mean).min();
            let mean = if bits.verified(MeanBits::DEFAULT).is_some() { None } else { narrowest };
            return Self { format: KvFormat::OscarMixed { mean }, calibration, note: None, advice: None };
        }
        let format = KvFormat::Oscar { bits: 4 };
        let note = format!(
            "{}, so the cache is {format}, 4 bits for every head, instead of 2.25",
            lacking(calibration)
        );
        let advice = "`--calibrate widths` (serve) or `oscar calibrate --bits 2.25` measures widths; \
                      --kv chooses a format";
        Self { format, calibration, note: Some(note), advice: Some(advice) }
    }

    /// Adds a warning if this is the cache of a format that was asked for, and narrow without
    /// measured widths.
    pub fn warn(&mut self, layout: &CacheLayout) {
        let has_widths =
            matches!(self.format, KvFormat::OscarMixed { .. }) && self.calibration == Calibration::Widths;
        if self.note.is_some() || has_widths || history_bits(layout).is_none_or(|bits| bits >= 4.0) {
            return;
        }
        let reason = match (self.format, self.calibration) {
            (KvFormat::OscarMixed { .. }, calibration) => lacking(calibration),
            _ => "it has fewer than 4 bits in every head",
        };
        self.note = Some(format!(
            "warning: --kv {} is used as asked, but {reason}: answers that copy or add up over a long \
             context may be wrong",
            self.format
        ));
    }
}

/// What to say before `oscar` is measured on a model without measured widths: it then has two bits
/// everywhere, which [`Served::choose`] never takes by itself.
pub fn unmeasured_widths(format: KvFormat, found: Option<&Found>) -> Option<String> {
    let calibration = Calibration::of(found);
    (format == KvFormat::OscarMixed { mean: None } && calibration != Calibration::Widths).then(|| {
        format!(
            "warning: {}, so {format} is measured with 2 bits for every head; `oscar serve` would take oscar4. \
             `oscar calibrate --bits 2.25` measures widths",
            lacking(calibration)
        )
    })
}

const LATENT: &str = "the model has latent attention (MLA): its cache is bf16, one row a token and layer; quantized \
                      formats are not offered for it";

fn lacking(calibration: Calibration) -> &'static str {
    match calibration {
        Calibration::None => "this model is not calibrated",
        Calibration::Rotations | Calibration::Widths => "this model has no verified table of widths",
    }
}

/// Stored bits an element of the quantized history.
fn history_bits(layout: &CacheLayout) -> Option<f64> {
    layout.coded()?;
    let layers = (0..layout.layers()).filter(|&layer| !layout.slides(layer)).count();
    let elements = 2 * PAGE_TOKENS * layers * layout.kv_heads() * layout.head_dim();
    Some(8.0 * layout.coded_block_bytes() as f64 / elements as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodeLayout, Windows};

    fn asked(name: &str) -> Served {
        let format: KvFormat = name.parse().unwrap();
        let mut served = Served::choose(Some(format), None, false);
        let layout = CacheLayout::new(format, 2, 2, 128, Windows::default(), CodeLayout::Logical).unwrap();
        served.warn(&layout);
        served
    }

    #[test]
    fn two_bits_are_used_only_if_calibrated_or_asked_for() {
        let default = Served::choose(None, None, false);
        assert_eq!((default.format.to_string().as_str(), default.calibration), ("oscar4", Calibration::None));
        assert!(default.note.unwrap().contains("not calibrated"));
        for risky in ["oscar", "oscar2", "oscar3", "oscar1", "int1", "naive2", "kivi2-g128"] {
            let served = asked(risky);
            assert_eq!(served.format.to_string(), risky);
            assert!(served.note.unwrap().starts_with("warning"), "{risky}");
        }
        for safe in ["oscar4", "bf16", "int4", "int8", "fp8", "saw4"] {
            assert_eq!(asked(safe).note, None, "{safe}");
        }
        let warning = |name: &str| unmeasured_widths(name.parse().unwrap(), None);
        assert!(warning("oscar").unwrap().contains("not calibrated"));
        assert_eq!((warning("oscar2"), warning("oscar4"), warning("bf16")), (None, None, None));
        let latent = Served::choose(None, None, true);
        assert_eq!((latent.format, latent.note.as_deref()), (KvFormat::Bf16, Some(LATENT)));
    }
}
