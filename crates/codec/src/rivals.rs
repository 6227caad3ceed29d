//! The methods that OSCAR is compared with, each as its source describes it.
//!
//! A rival chooses everything: rotation, quantizer of each side, windows, layers left in BF16. If
//! its source publishes windows, they are its default; otherwise it gets the engine's.
//! [`Rival::describe`] states the stored bits an element (head of 128, without windows), and tests
//! check them.

use crate::error::Result;
use crate::format::RotationKind;
use crate::page::{Scheme, Side, SideSpec};
use crate::turboquant::{Outliers, TurboSpec};
use crate::window::{Tail, Windows};
use std::fmt;

/// Tokens of KIVI's residual: keys are quantized when this many have gathered, and this many values
/// stay in BF16.
pub const KIVI_RESIDUAL: usize = 128;
/// KIVI's group size if none is named.
const KIVI_GROUP: u16 = 32;
/// Tokens of a Kitty page, its sink and its window of values.
const KITTY_PAGE: usize = 128;
const KITTY_SINK: usize = 32;
/// Layers at each end that vLLM's presets leave in BF16.
const VLLM_BOUNDARY_LAYERS: usize = 2;

/// A method other than OSCAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rival {
    /// `naive2`: two-bit affine codes, nothing else; the codes of `int2`.
    Naive2,
    /// `quarot2`: Hadamard on both sides, two-bit codes with an integer zero.
    QuaRot2,
    /// `saw4`: Hadamard blocks (128, or `-h16` … `-h64`) on keys, four-bit codes on both sides.
    Saw4 { order: u16 },
    /// `kivi2`: keys by channel in groups of tokens, values by token in groups of channels. 0 means
    /// the default group.
    Kivi2 { group: u16 },
    /// `kitty`, `kitty-pro`: keys by channel, an eighth (a quarter) of the channels promoted to
    /// four bits.
    Kitty { pro: bool },
    /// `turboquant2` … `turboquant4`, `-prod` with a sketch on keys; quarters of a bit.
    TurboQuant { quarter_bits: u8, prod: bool },
    /// `turboquant-3bit_nc`, `turboquant-k3v4`: vLLM's presets.
    VllmTurboQuant { value_bits: u8 },
    /// `fp8`: E4M3 with a scale for each row.
    Fp8,
}

impl Rival {
    /// Every rival by its name, the grouped ones at each published size.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Naive2, Self::QuaRot2, Self::Saw4 { order: 0 }];
        all.extend([0, 32, 64, 128].map(|group| Self::Kivi2 { group }));
        all.extend([false, true].map(|pro| Self::Kitty { pro }));
        for prod in [false, true] {
            all.extend(
                [8, 9, 10, 12, 13, 14, 16].map(|quarter_bits| Self::TurboQuant { quarter_bits, prod }),
            );
        }
        all.extend([3, 4].map(|value_bits| Self::VllmTurboQuant { value_bits }));
        all.push(Self::Fp8);
        all
    }

    /// The rival of a lower-case name.
    pub fn parse(name: &str) -> Option<Self> {
        let orders = [16, 32, 64, 128].map(|order| Self::Saw4 { order });
        // TurboQuant without `-prod` is its `mse` form; vLLM writes its presets with an underscore
        // and `_nc`.
        let plain = name.strip_suffix("-mse").unwrap_or(name).replace("turboquant_", "turboquant-");
        let plain = plain.strip_suffix("k3v4_nc").map_or(plain.clone(), |head| format!("{head}k3v4"));
        Self::all().into_iter().chain(orders).find(|rival| rival.to_string() == plain)
    }

    pub fn describe(self) -> String {
        match self {
            Self::Naive2 => "2-bit affine codes without rotation, the same as int2".into(),
            Self::QuaRot2 => "QuaRot: Hadamard on both sides, 2-bit codes with an integer zero".into(),
            Self::Saw4 { order: 0 } => "Saw-INT4: Hadamard on keys only, 4-bit codes".into(),
            Self::Saw4 { order } => format!("Saw-INT4: Hadamard blocks of {order} on keys only, 4-bit codes"),
            Self::Kivi2 { .. } => {
                let group = self.kivi_group();
                format!("KIVI-2: keys by channel over {group} tokens, values by token over {group} channels")
            }
            Self::Kitty { pro } => format!(
                "Kitty: KIVI's keys with {} of the channels promoted to 4 bits",
                if pro { "a quarter" } else { "an eighth" }
            ),
            Self::TurboQuant { prod, .. } => format!(
                "TurboQuant {}: random rotation, norm and Lloyd–Max codes{}{}",
                if prod { "prod" } else { "mse" },
                if self.outliers() == Outliers::None { "" } else { ", one bit more for the first channels" },
                if prod { ", 1-bit QJL sketch of the keys' residual" } else { "" },
            ),
            Self::VllmTurboQuant { value_bits } => format!(
                "vLLM's TurboQuant preset: Hadamard and 3-bit Lloyd–Max keys, affine {value_bits}-bit values, first and \
                 last {VLLM_BOUNDARY_LAYERS} layers in BF16"
            ),
            Self::Fp8 => "E4M3 floats, an fp16 scale a row".into(),
        }
    }

    pub fn rotation(self) -> RotationKind {
        match self {
            Self::Naive2 | Self::Kivi2 { .. } | Self::Kitty { .. } | Self::Fp8 => RotationKind::None,
            Self::QuaRot2 => RotationKind::Hadamard,
            Self::Saw4 { order } => RotationKind::KeyHadamard { order: if order == 0 { 128 } else { order } },
            Self::VllmTurboQuant { .. } => RotationKind::KeyHadamard { order: 256 },
            Self::TurboQuant { .. } => RotationKind::Random { outliers: self.outliers() },
        }
    }

    fn kivi_group(self) -> u16 {
        match self {
            Self::Kivi2 { group } if group > 0 => group,
            _ => KIVI_GROUP,
        }
    }

    fn outliers(self) -> Outliers {
        match self {
            Self::TurboQuant { quarter_bits, .. } if quarter_bits % 4 == 1 => Outliers::Quarter,
            Self::TurboQuant { quarter_bits, .. } if quarter_bits % 4 == 2 => Outliers::Half,
            _ => Outliers::None,
        }
    }

    pub fn side_spec(self, side: Side) -> SideSpec {
        let plain = |scheme, bits, group| SideSpec { scheme, bits, group, clip: 0.0 };
        let turbo =
            |prod, normalized| Scheme::TurboQuant(TurboSpec { outliers: self.outliers(), prod, normalized });
        match (self, side) {
            (Self::Naive2, _) => plain(Scheme::Affine, 2, 0),
            (Self::QuaRot2, _) => plain(Scheme::RoundedZero, 2, 0),
            (Self::Saw4 { .. }, _) => plain(Scheme::Affine, 4, 0),
            (Self::Kivi2 { .. }, Side::Key) => {
                let tokens = usize::from(self.kivi_group());
                plain(Scheme::ChannelGroups { tokens, promoted_eighths: 0 }, 2, 0)
            }
            (Self::Kivi2 { .. }, Side::Value) => plain(Scheme::Affine, 2, usize::from(self.kivi_group())),
            (Self::Kitty { pro }, Side::Key) => {
                let promoted_eighths = if pro { 2 } else { 1 };
                plain(Scheme::ChannelGroups { tokens: KITTY_PAGE, promoted_eighths }, 2, 0)
            }
            (Self::Kitty { .. }, Side::Value) => plain(Scheme::Affine, 2, 0),
            (Self::TurboQuant { quarter_bits, prod }, side) => {
                plain(turbo(prod && side == Side::Key, false), u32::from(quarter_bits / 4), 0)
            }
            (Self::VllmTurboQuant { .. }, Side::Key) => plain(turbo(false, true), 3, 0),
            (Self::VllmTurboQuant { value_bits }, Side::Value) => {
                plain(Scheme::Affine, u32::from(value_bits), 0)
            }
            (Self::Fp8, _) => plain(Scheme::Fp8, 8, 0),
        }
    }

    /// Layers at each end that stay in BF16.
    pub fn boundary_layers(self) -> usize {
        if matches!(self, Self::VllmTurboQuant { .. }) { VLLM_BOUNDARY_LAYERS } else { 0 }
    }

    /// Tokens quantized at a time on a side if the user chooses the windows.
    fn unit(self, side: Side) -> usize {
        match self.side_spec(side).scheme {
            Scheme::ChannelGroups { tokens, .. } => tokens,
            _ => crate::page::TILE_TOKENS,
        }
    }

    /// The windows that a source publishes. A query reads the keys and values of its own step in
    /// full precision, before they are quantized, so a flush at 128 tokens takes effect for the
    /// next query.
    fn published_tails(self) -> Option<(usize, Tail, Tail)> {
        let flush = |unit| Tail { recent: 1, unit };
        match self {
            Self::Kivi2 { .. } => {
                Some((0, flush(KIVI_RESIDUAL), Tail { recent: KIVI_RESIDUAL + 1, unit: 1 }))
            }
            // Values stay in a window of 128 and then wait until a page of 128 is full.
            Self::Kitty { .. } => {
                Some((KITTY_SINK, flush(KITTY_PAGE), Tail { recent: KITTY_PAGE + 1, unit: KITTY_PAGE }))
            }
            _ => None,
        }
    }

    /// The windows to use: the user's choice, else those that the source publishes, else the
    /// engine's. A sink alone does not change the method's own tails.
    pub fn windows(self, sink: Option<usize>, recent: Option<usize>) -> Result<Windows> {
        let default = Windows::default();
        let published = self.published_tails();
        let sink = sink.unwrap_or(published.map_or(default.sink(), |(sink, ..)| sink));
        match (recent, published) {
            (None, Some((_, key, value))) => Windows::by_side(sink, key, value),
            (recent, _) => {
                let tail = |side| Tail { recent: recent.unwrap_or(default.recent()), unit: self.unit(side) };
                Windows::by_side(sink, tail(Side::Key), tail(Side::Value))
            }
        }
    }
}

impl fmt::Display for Rival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Naive2 => f.write_str("naive2"),
            Self::QuaRot2 => f.write_str("quarot2"),
            Self::Saw4 { order: 0 } => f.write_str("saw4"),
            Self::Saw4 { order } => write!(f, "saw4-h{order}"),
            Self::Kivi2 { group: 0 } => f.write_str("kivi2"),
            Self::Kivi2 { group } => write!(f, "kivi2-g{group}"),
            Self::Kitty { pro: false } => f.write_str("kitty"),
            Self::Kitty { pro: true } => f.write_str("kitty-pro"),
            Self::TurboQuant { quarter_bits, prod } => {
                write!(f, "turboquant{}{}", f64::from(quarter_bits) / 4.0, if prod { "-prod" } else { "" })
            }
            Self::VllmTurboQuant { value_bits: 3 } => f.write_str("turboquant-3bit_nc"),
            Self::VllmTurboQuant { value_bits } => write!(f, "turboquant-k3v{value_bits}"),
            Self::Fp8 => f.write_str("fp8"),
        }
    }
}
