//! Tables of widths and of harms, as rotation files keep them.

use crate::error::CalibrateError;
use crate::options::CodeRounding;
use crate::rotation_file::{RotationFileError, check_values};
use oscar_codec::{CacheLayout, CodecError, FormatTable, MeanBits};

/// The widths that harms are stored for. Every device reads them.
pub const WIDTHS: [u32; 4] = [1, 2, 3, 4];

/// The widest code of a unit, for tables that ask for it: only the CPU reads it.
pub const WIDEST: u32 = 5;

/// Squared error of codes of the widest width, as a share of that of the widest in [`WIDTHS`]: 31
/// steps instead of 15. Harm is quadratic in the error.
const WIDEST_SHARE: f64 = (15.0 / 31.0) * (15.0 / 31.0);

/// Refuses a list that is not made of some of the widths up to `widest`, ascending, each once.
pub(super) fn check_widths(option: &'static str, widths: &[u32], widest: u32) -> Result<(), CalibrateError> {
    let known = widths.iter().all(|w| (1..=widest).contains(w)) && widths.is_sorted_by(|a, b| a < b);
    match known && !widths.is_empty() {
        true => Ok(()),
        false => {
            let problem = format!("{widths:?}: some of 1 to {widest}, each once and ascending");
            Err(CalibrateError::option(option, problem))
        }
    }
}

/// The width of both units of a head that keeps no history.
pub const ABSENT: u32 = 0;

/// Width of each unit: `[layer][kv_head]` pairs of key and value bits, both [`ABSENT`] or neither.
/// Layers are those that have widths ([`WidthLayers`](super::WidthLayers)), counted from zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WidthTable {
    pub layers: usize,
    pub kv_heads: usize,
    pub widths: Vec<(u32, u32)>,
}

impl WidthTable {
    pub fn uniform(layers: usize, kv_heads: usize, bits: u32) -> Self {
        Self { layers, kv_heads, widths: vec![(bits, bits); layers * kv_heads] }
    }

    /// Any table of that mean: for counting bytes, which do not depend on where the bits are.
    pub fn of_mean(layers: usize, kv_heads: usize, head_dim: usize, mean: MeanBits) -> Self {
        let units = 2 * layers * kv_heads;
        let bits = (mean.mean_width(head_dim).clamp(1.0, 4.0) * units as f64 + 1e-6) as usize;
        let widths: Vec<u32> = (0..units).map(|unit| ((bits + unit) / units) as u32).collect();
        Self::from_units(layers, kv_heads, &widths)
    }

    /// From one width for each unit, key before value.
    pub fn from_units(layers: usize, kv_heads: usize, units: &[u32]) -> Self {
        Self { layers, kv_heads, widths: units.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect() }
    }

    /// One width for each unit, key before value.
    pub fn units(&self) -> Vec<u32> {
        self.widths.iter().flat_map(|&(key, value)| [key, value]).collect()
    }

    /// Stored bits an element, scale and minimum counted.
    pub fn mean_bits(&self, head_dim: usize) -> f64 {
        let stored = |bits: u32| if bits == ABSENT { 0.0 } else { f64::from(bits) + 32.0 / head_dim as f64 };
        self.units().into_iter().map(stored).sum::<f64>() / (2 * self.widths.len()).max(1) as f64
    }

    /// The widths of a layer, by head.
    pub fn of_layer(&self, layer: usize) -> &[(u32, u32)] {
        &self.widths[layer * self.kv_heads..][..self.kv_heads]
    }

    /// The codecs of this table in a cache. The layers of the table are those of the cache that do
    /// not slide. Sliding layers get codecs of zero width, which are never read.
    ///
    /// # Errors
    /// If the numbers of these layers differ.
    pub fn formats(&self, cache: &CacheLayout) -> Result<FormatTable, CodecError> {
        let layers = cache.layers();
        let expected = (0..layers).filter(|&layer| !cache.slides(layer)).count();
        if self.layers != expected {
            let what = "table of widths (layers)";
            return Err(CodecError::Length { what, got: self.layers, expected });
        }
        let none = vec![(ABSENT, ABSENT); self.kv_heads];
        let mut own = self.widths.chunks_exact(self.kv_heads);
        let widths = (0..layers).flat_map(|layer| match cache.slides(layer) {
            true => &none,
            false => own.next().unwrap_or_default(),
        });
        let (widths, order) = (widths.copied().collect::<Vec<_>>(), cache.full().codec(0, 0).layout());
        FormatTable::from_widths(layers, self.kv_heads, cache.head_dim(), &widths, order)
    }

    /// One line a layer: `L4 K42 V32`, a digit for each head; 0 where a head keeps no history.
    /// `layers` are the numbers that the table's layers have in the model.
    pub fn describe(&self, layers: &[usize]) -> String {
        let digits = |layer: usize, side: fn(&(u32, u32)) -> u32| -> String {
            self.of_layer(layer).iter().map(|pair| side(pair).to_string()).collect()
        };
        layers
            .iter()
            .enumerate()
            .map(|(i, layer)| format!("L{layer} K{} V{}", digits(i, |p| p.0), digits(i, |p| p.1)))
            .collect::<Vec<_>>()
            .join(" · ")
    }
}

/// Harm of each unit at each width: `[unit][width − 1]`, units as in [`WidthTable::units`]. One is
/// what uniform two bits do to all groups of probes together.
#[derive(Clone, Debug, PartialEq)]
pub struct HarmMap {
    pub layers: usize,
    pub kv_heads: usize,
    pub harm: Vec<[f32; WIDTHS.len()]>,
    /// Standard error of each harm, over probes; empty if it is not known.
    pub error: Vec<[f32; WIDTHS.len()]>,
    /// Harm of each head without history, `[layer][kv_head]`; `None` where it was not measured.
    pub absent: Vec<Option<f32>>,
}

impl HarmMap {
    pub fn units(&self) -> usize {
        self.harm.len()
    }

    /// Harm of a unit that keeps its history, at any width up to [`WIDEST`].
    pub fn at(&self, unit: usize, bits: u32) -> f64 {
        let harm = &self.harm[unit];
        match harm.get(bits as usize - 1) {
            Some(harm) => f64::from(*harm),
            None => WIDEST_SHARE * f64::from(harm[WIDTHS.len() - 1]),
        }
    }

    /// Sum over units of what a table does, were units independent.
    pub fn total(&self, table: &WidthTable) -> f64 {
        let unit = |(unit, bits): (usize, u32)| match bits {
            ABSENT => 0.0,
            _ => self.at(unit, bits),
        };
        let without = table.widths.iter().zip(&self.absent).filter(|((key, _), _)| *key == ABSENT);
        table.units().into_iter().enumerate().map(unit).sum::<f64>()
            + without.map(|(_, harm)| harm.map_or(f64::INFINITY, f64::from)).sum::<f64>()
    }
}

/// What a rotation file knows about widths.
#[derive(Clone, Debug, PartialEq)]
pub struct BitPlan {
    /// The layers that have widths, by their number in the model: all but the sliding ones. Tables
    /// and harms count these layers only. Empty if there are neither.
    pub layers: Vec<usize>,
    /// Tables that were verified in the whole model, by their mean.
    pub tables: Vec<(MeanBits, WidthTable)>,
    pub harm: Option<HarmMap>,
    /// How the codes were rounded when harms were measured, and are to be.
    pub rounding: CodeRounding,
}

impl Default for BitPlan {
    fn default() -> Self {
        Self { layers: Vec::new(), tables: Vec::new(), harm: None, rounding: CodeRounding::Nearest }
    }
}

impl BitPlan {
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty() && self.harm.is_none()
    }

    pub fn table(&self, mean: MeanBits) -> Option<&WidthTable> {
        self.tables.iter().find(|(m, _)| *m == mean).map(|(_, table)| table)
    }

    /// The verified table of a mean, or of the next smaller one.
    pub fn verified(&self, mean: MeanBits) -> Option<(MeanBits, &WidthTable)> {
        let fits = self.tables.iter().filter(|(m, _)| *m <= mean);
        fits.max_by_key(|(m, _)| *m).map(|(m, table)| (*m, table))
    }

    pub fn means(&self) -> String {
        let mut means: Vec<MeanBits> = self.tables.iter().map(|(mean, _)| *mean).collect();
        means.sort_unstable();
        means.iter().map(MeanBits::to_string).collect::<Vec<_>>().join(", ")
    }

    /// Sizes and values that a file for a model of `layers` layers may hold.
    pub(crate) fn check(&self, layers: usize, kv_heads: usize) -> Result<(), RotationFileError> {
        let of_model = self.layers.is_sorted_by(|a, b| a < b) && self.layers.iter().all(|&l| l < layers);
        if !of_model || self.layers.is_empty() != self.is_empty() {
            return Err(RotationFileError::Metadata {
                field: "width_layers",
                found: format!("{:?} of {layers} layers", self.layers),
                expected: "the layers that have widths, each once and ascending",
            });
        }
        let layers = self.layers.len();
        let shape = |tensor: &str, found: usize, expected: usize| match found == expected {
            true => Ok(()),
            false => Err(RotationFileError::Shape {
                tensor: tensor.into(),
                found: format!("{found} values"),
                expected: expected.to_string(),
            }),
        };
        for (index, (mean, table)) in self.tables.iter().enumerate() {
            shape("widths", table.widths.len(), layers * kv_heads)?;
            let coded = |bits: u32| (1..=WIDEST).contains(&bits);
            let known =
                |&(key, value): &(u32, u32)| coded(key) && coded(value) || (key, value) == (ABSENT, ABSENT);
            if let Some(head) = table.widths.iter().position(|pair| !known(pair)) {
                let at = 2 * head + usize::from(coded(table.widths[head].0));
                return Err(RotationFileError::Value {
                    tensor: "widths",
                    index: at,
                    value: table.units()[at] as f32,
                });
            }
            if self.tables[..index].iter().any(|(other, _)| other == mean) {
                return Err(RotationFileError::Metadata {
                    field: "width_means",
                    found: format!("{mean} twice"),
                    expected: "each mean once",
                });
            }
        }
        if let Some(map) = &self.harm {
            shape("harm", map.harm.len(), 2 * layers * kv_heads)?;
            shape("harm_absent", map.absent.len(), layers * kv_heads)?;
            if !map.error.is_empty() {
                shape("harm_error", map.error.len(), 2 * layers * kv_heads)?;
            }
            let is_harm = |value: f32| value.is_finite() && value >= 0.0;
            check_values("harm_error", map.error.iter().flatten(), is_harm)?;
            check_values("harm_absent", map.absent.iter().flatten(), is_harm)?;
            check_values("harm", map.harm.iter().flatten(), is_harm)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{CodeLayout, KvFormat, Side, Windows};

    #[test]
    fn a_mean_without_a_table_gets_the_next_smaller_verified_one() {
        let mean = |bits: &str| bits.parse::<MeanBits>().unwrap();
        let table = |bits| WidthTable::uniform(1, 1, bits);
        let tables = vec![(mean("2.25"), table(2)), (mean("1.75"), table(1))];
        let plan = BitPlan { tables, ..BitPlan::default() };
        assert_eq!(plan.verified(mean("2.25")), Some((mean("2.25"), &table(2))));
        assert_eq!(plan.verified(mean("4.00")), Some((mean("2.25"), &table(2))));
        assert_eq!(plan.verified(mean("2.00")), Some((mean("1.75"), &table(1))));
        assert_eq!(plan.verified(mean("1.50")), None);
    }

    #[test]
    fn a_table_is_told_by_layer() {
        let table = WidthTable::from_units(2, 2, &[2, 1, 3, 4, 1, 1, 2, 2]);
        assert_eq!(table.widths, [(2, 1), (3, 4), (1, 1), (2, 2)]);
        assert_eq!(table.describe(&[0, 1]), "L0 K23 V14 · L1 K12 V12");
        assert_eq!(table.describe(&[5, 11]), "L5 K23 V14 · L11 K12 V12", "numbers of the model");
        assert_eq!((table.mean_bits(128), applied(&table, &[]).page_bits()), (2.25, 2.25));
        let table = WidthTable::from_units(1, 2, &[4, 4, 0, 0]);
        assert_eq!((table.mean_bits(128), table.describe(&[0])), (2.125, "L0 K40 V40".to_owned()));
        assert_eq!(applied(&table, &[]).page_bits(), table.mean_bits(128));
        assert_eq!(WidthTable::uniform(2, 2, 3).mean_bits(64), 3.5);
        for mean in ["2.25", "1.25", "4.25", "2.75", "2.00"] {
            let table = WidthTable::of_mean(2, 2, 128, mean.parse().unwrap());
            assert_eq!(format!("{:.2}", table.mean_bits(128)), mean);
            assert!(table.units().iter().all(|w| WIDTHS.contains(w)));
        }
    }

    /// A cache of as many layers as the table has, and of sliding ones.
    fn applied(table: &WidthTable, sliding: &[usize]) -> CacheLayout {
        let (layers, order) = (table.layers + sliding.len(), CodeLayout::CpuTile);
        let cache = CacheLayout::new(KvFormat::OSCAR, layers, 2, 128, Windows::default(), order).unwrap();
        let cache = cache.with_sliding_layers(512, sliding).unwrap();
        let formats = table.formats(&cache).unwrap();
        cache.with_coded_table(formats)
    }

    #[test]
    fn widths_go_to_the_layers_that_do_not_slide() {
        let table = WidthTable::from_units(2, 2, &[2, 1, 3, 4, 4, 4, 2, 2]);
        let cache = applied(&table, &[0, 1, 3]);
        let coded = cache.coded().unwrap();
        let bits = |layer, head| {
            let codec = coded.codec(layer, head);
            (codec.spec(Side::Key).bits, codec.spec(Side::Value).bits)
        };
        assert_eq!([bits(2, 0), bits(2, 1), bits(4, 0), bits(4, 1)], [(2, 1), (3, 4), (4, 4), (2, 2)]);
        for layer in [0, 1, 3] {
            assert!((0..2).all(|head| coded.codec(layer, head).page_bytes() == 0), "layer {layer}");
        }
        // 22 bits in 8 units, and a quarter of a bit for each row's scale and minimum.
        assert_eq!((cache.page_bits(), table.mean_bits(128)), (3.0, 3.0));
        assert!(cache.keeps_all_history(), "sliding layers are no heads without history");
        let without = WidthTable::from_units(2, 2, &[4, 4, 0, 0, 4, 4, 2, 2]);
        assert!(!applied(&without, &[0, 1, 3]).keeps_all_history());
        let error = WidthTable::uniform(5, 2, 2).formats(&cache).unwrap_err().to_string();
        assert!(error.contains("5 elements, expected 2"), "{error}");
    }
}
