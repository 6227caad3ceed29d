//! The formats by the names users type.

use crate::clip::{OFFICIAL_KEY_RATIO, OFFICIAL_VALUE_RATIO};
use crate::error::{CodecError, Result};
use crate::layout::CodeLayout;
use crate::lloyd_max::Variant;
use crate::page::{RowPageCodec, Scheme, Side, SideSpec};
use crate::rivals::Rival;
use crate::rotation::{Rotation, RotationSet};
use crate::turboquant::Outliers;
use crate::window::Windows;
use std::fmt;
use std::str::FromStr;

/// Which rotation a format expects its rows in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationKind {
    /// Rows as the model computes them.
    None,
    /// The calibrated rotation of the layer and head (Hadamard until a file is given).
    Calibrated,
    /// The Hadamard matrix on both sides, regardless of the model's rotations.
    Hadamard,
    /// Hadamard blocks of at most this order on queries and keys; values are not rotated.
    KeyHadamard { order: u16 },
    /// A random orthogonal matrix for keys and another for values, block-diagonal if channels are
    /// split off.
    Random { outliers: Outliers },
}

/// Seeds of the random rotations (keys, values).
///
/// DO NOT CHANGE: codes stored under one rotation mean nothing under another.
const RANDOM_ROTATION_SEEDS: [u64; 2] = [0x5455_5242_4F4B_0000, 0x5455_5242_4F56_0000];

impl RotationKind {
    /// The rotations of the kinds that need no calibration; `None` if rows are not rotated. The
    /// calibrated kind returns Hadamard, its default without a file.
    pub fn data_free(self, layers: usize, kv_heads: usize, head_dim: usize) -> Result<Option<RotationSet>> {
        let (key, value) = match self {
            Self::None => return Ok(None),
            Self::Calibrated | Self::Hadamard => {
                (Rotation::hadamard(head_dim)?, Rotation::hadamard(head_dim)?)
            }
            Self::KeyHadamard { order } => {
                (Rotation::block_hadamard(head_dim, order.into())?, Rotation::identity(head_dim)?)
            }
            Self::Random { outliers } => {
                let first = outliers.channels(head_dim);
                let blocks = [first, head_dim - first];
                let [key, value] = RANDOM_ROTATION_SEEDS;
                (Rotation::random(head_dim, &blocks, key)?, Rotation::random(head_dim, &blocks, value)?)
            }
        };
        RotationSet::uniform(layers, kv_heads, key, value).map(Some)
    }

    /// A description of the rotations, for people.
    pub fn describe(self) -> String {
        match self {
            Self::None => "none".into(),
            Self::Calibrated => "calibrated".into(),
            Self::Hadamard => "Hadamard, as published".into(),
            Self::KeyHadamard { order } => {
                format!("Hadamard blocks of at most {order} on keys, values unrotated")
            }
            Self::Random { .. } => "random orthogonal, seeded".into(),
        }
    }
}

/// A KV-cache format: the values of `--kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// `bf16`: the uncompressed cache that all formats are compared with.
    Bf16,
    /// `f32`: uncompressed 32-bit, for verification.
    F32,
    /// `oscar` or `oscar:2.00`: rotated, clipped affine codes. Their widths come from the model's
    /// table for that mean (2.25 bits if none is named), one for each layer, head and side.
    OscarMixed { mean: Option<MeanBits> },
    /// `oscar1`, `oscar2`, `oscar3`, `oscar4`: rotated, clipped affine codes of that width in every
    /// head.
    Oscar { bits: u8 },
    /// `oscar2-official`: the official recipe with fp32 scale and zero (2.5 bits an element, as
    /// shipped).
    Oscar2Official,
    /// `oscar2-lloyd`: rotated, clipped rows on exact Lloyd–Max centroids.
    Oscar2Lloyd,
    /// `oscar2-lloyd-official`: the official "ratio 1.16" variant.
    Oscar2LloydOfficial,
    /// `int1` … `int8`, optionally with `-g32`, `-g64`, `-g128`: affine codes without rotation or
    /// clipping.
    Int { bits: u8, group: u16 },
    /// Another published method.
    Rival(Rival),
}

/// Mean stored bits an element of a table of widths, with scale and minimum, in hundredths of a
/// bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MeanBits(u16);

impl MeanBits {
    /// The size of uniform two-bit codes at 128 channels: the mean of `--kv oscar`.
    pub const DEFAULT: Self = Self(225);
    /// All codes one bit wide, and all four bits wide, at 128 channels.
    pub const LEAST: Self = Self(125);
    pub const MOST: Self = Self(425);
    pub fn bits(self) -> f64 {
        f64::from(self.0) / 100.0
    }

    /// Mean width of the codes alone: scale and minimum of a row take 32 bits.
    pub fn mean_width(self, head_dim: usize) -> f64 {
        self.bits() - 32.0 / head_dim as f64
    }

    /// In hundredths of a bit, as files name it.
    pub fn hundredths(self) -> u16 {
        self.0
    }
}

impl fmt::Display for MeanBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2}", self.bits())
    }
}

impl FromStr for MeanBits {
    type Err = CodecError;

    fn from_str(s: &str) -> Result<Self> {
        let bits: f64 = s.trim().parse().map_err(|_| CodecError::MeanBits { found: s.to_owned() })?;
        let hundredths = (bits * 100.0).round();
        if !(f64::from(Self::LEAST.0)..=f64::from(Self::MOST.0)).contains(&hundredths) {
            return Err(CodecError::MeanBits { found: s.to_owned() });
        }
        Ok(Self(hundredths as u16))
    }
}

/// Clip ratio of a width: narrow codes gain from clipping the tails, wide ones lose.
pub fn default_clip(side: Side, bits: u32) -> f64 {
    match (side, bits) {
        (Side::Key, 2) => OFFICIAL_KEY_RATIO,
        (Side::Value, 2) => OFFICIAL_VALUE_RATIO,
        (Side::Key, 3) => 0.98,
        (Side::Value, 3) => 0.97,
        (Side::Key, 4) => 0.995,
        (Side::Value, 4) => 0.99,
        // One bit stores mean and deviation and needs no range; five bits and more need no clipping.
        _ => 0.0,
    }
}

impl KvFormat {
    pub const OSCAR: Self = Self::OscarMixed { mean: None };
    pub const OSCAR2: Self = Self::Oscar { bits: 2 };

    /// One entry of each family, for lists and help texts.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Bf16, Self::F32, Self::OSCAR];
        all.extend([1, 2, 3, 4].map(|bits| Self::Oscar { bits }));
        all.extend([Self::Oscar2Official, Self::Oscar2Lloyd, Self::Oscar2LloydOfficial]);
        all.extend([1, 2, 3, 4, 8].map(|bits| Self::Int { bits, group: 0 }));
        all.extend(Rival::all().into_iter().map(Self::Rival));
        all
    }

    pub fn describe(self) -> String {
        match self {
            Self::Bf16 => "uncompressed BF16".into(),
            Self::F32 => "uncompressed F32, for verification".into(),
            Self::OscarMixed { mean } => format!(
                "rotated, clipped rows, 0 to 5 bits for each head by measured harm, {} on average",
                mean.unwrap_or(MeanBits::DEFAULT)
            ),
            Self::Oscar { bits: 1 } => "rotated rows, 1-bit mean ± mean absolute deviation".into(),
            Self::Oscar { bits } => {
                format!("rotated, clipped rows, {bits}-bit affine codes, fp16 scale and minimum")
            }
            Self::Oscar2Official => {
                "official recipe: 2-bit codes, fp32 scale and zero, official byte order".into()
            }
            Self::Oscar2Lloyd => "rotated, clipped rows on exact Lloyd–Max centroids".into(),
            Self::Oscar2LloydOfficial => "official Lloyd–Max mode: uniform grid of ratio 1.16".into(),
            Self::Int { bits, group: 0 } => {
                format!("{bits}-bit affine codes without rotation, one group for each head")
            }
            Self::Int { bits, group } => {
                format!("{bits}-bit affine codes without rotation, groups of {group}")
            }
            Self::Rival(rival) => rival.describe(),
        }
    }

    pub fn rotation(self) -> RotationKind {
        match self {
            Self::Bf16 | Self::F32 | Self::Int { .. } => RotationKind::None,
            Self::Rival(rival) => rival.rotation(),
            _ => RotationKind::Calibrated,
        }
    }

    pub fn is_coded(self) -> bool {
        !matches!(self, Self::Bf16 | Self::F32)
    }

    pub fn side_spec(self, side: Side) -> SideSpec {
        let spec = |scheme, bits: u8| SideSpec {
            scheme,
            bits: bits as u32,
            group: 0,
            clip: default_clip(side, bits as u32),
        };
        match self {
            Self::Bf16 => SideSpec::BF16,
            Self::F32 => SideSpec::F32,
            // The width for a model without a table; `FormatTable::from_widths` replaces it.
            Self::OscarMixed { .. } => spec(Scheme::Affine, 2),
            Self::Oscar { bits } => spec(Scheme::Affine, bits),
            Self::Oscar2Official => spec(Scheme::OfficialAffine, 2),
            Self::Oscar2Lloyd => spec(Scheme::LloydMax(Variant::Exact), 2),
            Self::Oscar2LloydOfficial => spec(Scheme::LloydMax(Variant::OfficialRatio), 2),
            Self::Int { bits, group } => {
                SideSpec { scheme: Scheme::Affine, bits: bits as u32, group: group as usize, clip: 0.0 }
            }
            Self::Rival(rival) => rival.side_spec(side),
        }
    }

    /// The byte order of this format if no kernel asks for another.
    pub fn native_layout(self) -> CodeLayout {
        if self == Self::Oscar2Official { CodeLayout::Official } else { CodeLayout::Logical }
    }

    /// The windows to use: the user's choice, else the format's own, else the engine's.
    pub fn windows(self, sink: Option<usize>, recent: Option<usize>) -> Result<Windows> {
        match self {
            Self::Rival(rival) => rival.windows(sink, recent),
            _ => {
                let default = Windows::default();
                Windows::new(sink.unwrap_or(default.sink()), recent.unwrap_or(default.recent()))
            }
        }
    }

    /// Layers at each end of a model that the format leaves in BF16.
    pub fn boundary_layers(self) -> usize {
        if let Self::Rival(rival) = self { rival.boundary_layers() } else { 0 }
    }

    pub fn codec(self, head_dim: usize, layout: CodeLayout) -> Result<RowPageCodec> {
        RowPageCodec::new(head_dim, self.side_spec(Side::Key), self.side_spec(Side::Value), layout)
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => f.write_str("bf16"),
            Self::F32 => f.write_str("f32"),
            Self::OscarMixed { mean: None } => f.write_str("oscar"),
            Self::OscarMixed { mean: Some(mean) } => write!(f, "oscar:{mean}"),
            Self::Oscar { bits } => write!(f, "oscar{bits}"),
            Self::Oscar2Official => f.write_str("oscar2-official"),
            Self::Oscar2Lloyd => f.write_str("oscar2-lloyd"),
            Self::Oscar2LloydOfficial => f.write_str("oscar2-lloyd-official"),
            Self::Int { bits, group: 0 } => write!(f, "int{bits}"),
            Self::Int { bits, group } => write!(f, "int{bits}-g{group}"),
            Self::Rival(rival) => rival.fmt(f),
        }
    }
}

impl FromStr for KvFormat {
    type Err = CodecError;

    fn from_str(s: &str) -> Result<Self> {
        let name = s.trim().to_ascii_lowercase();
        if let Some(mean) = name.strip_prefix("oscar:") {
            return Ok(Self::OscarMixed { mean: Some(mean.parse()?) });
        }
        let grouped = || {
            let (head, group) = name.rsplit_once("-g")?;
            let group = group.parse::<u16>().ok().filter(|g| matches!(g, 32 | 64 | 128))?;
            match Self::all().into_iter().find(|f| f.to_string() == head)? {
                Self::Int { bits, .. } => Some(Self::Int { bits, group }),
                _ => None,
            }
        };
        let rival = || Rival::parse(&name).map(Self::Rival);
        Self::all().into_iter().find(|f| f.to_string() == name).or_else(grouped).or_else(rival).ok_or_else(
            || CodecError::UnknownFormat {
                name: s.to_owned(),
                known: format!(
                    "{}; oscar:MEAN for another mean than 2.25 bits; int formats also take -g32, -g64 or -g128",
                    Self::all().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
                ),
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for format in KvFormat::all() {
            assert_eq!(format.to_string().parse::<KvFormat>().unwrap(), format);
        }
        assert_eq!("int4-g32".parse::<KvFormat>().unwrap(), KvFormat::Int { bits: 4, group: 32 });
        let mixed: KvFormat = "oscar:1.75".parse().unwrap();
        assert_eq!(mixed.to_string(), "oscar:1.75");
        assert_eq!(mixed, KvFormat::OscarMixed { mean: Some("1.750".parse().unwrap()) });
        assert_eq!(" OSCAR2 ".parse::<KvFormat>().unwrap(), KvFormat::OSCAR2);
    }

    #[test]
    fn impossible_means_are_refused() {
        for bad in ["oscar:1.2", "oscar:4.26", "oscar:-2", "oscar:nan", "oscar:", "oscar:two"] {
            let error = bad.parse::<KvFormat>().unwrap_err().to_string();
            assert!(error.contains("between 1.25 and 4.25"), "{error}");
        }
    }

    #[test]
    fn unknown_names_list_the_known_ones() {
        for bad in ["oscar5", "int4-g48", "oscar2-g32", "", "q4_0"] {
            let error = bad.parse::<KvFormat>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{bad}'")) && error.contains("oscar2-official"), "{error}");
        }
    }

    #[test]
    fn bits_are_counted_from_stored_bytes() {
        for (name, bits) in [
            ("bf16", 16.0),
            ("f32", 32.0),
            ("oscar1", 1.25),
            ("oscar2", 2.25),
            ("oscar3", 3.25),
            ("oscar4", 4.25),
            ("oscar2-official", 2.5),
            ("oscar2-lloyd", 2.25),
            ("int4-g32", 5.0),
            ("int8", 8.25),
        ] {
            let format: KvFormat = name.parse().unwrap();
            let codec = format.codec(128, format.native_layout()).unwrap();
            let (keys, values) = (vec![0.5; 64 * 128], vec![-0.5; 64 * 128]);
            let mut page = vec![0; codec.page_bytes()];
            codec.quantize(&keys, &values, &mut page).unwrap();
            assert_eq!(page.len() as f64 * 8.0 / (2.0 * 64.0 * 128.0), bits, "{name}");
            assert_eq!(codec.bits_per_element(), bits);
        }
        assert_eq!(KvFormat::OSCAR2.codec(128, CodeLayout::CpuTile).unwrap().page_bytes(), 4608);
    }

    #[test]
    fn groups_must_divide_the_head() {
        let error = KvFormat::Int { bits: 4, group: 64 }.codec(96, CodeLayout::Logical).unwrap_err();
        assert_eq!(error, CodecError::Group { group: 64, head_dim: 96 });
        assert!(KvFormat::OSCAR2.codec(100, CodeLayout::Logical).unwrap_err().to_string().contains("100"));
    }
}
