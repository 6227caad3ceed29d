//! Pages: 64 tokens of keys and values of one layer and KV head, in a fixed number of bytes.
//!
//! A [`RowPageCodec`] turns rows (already rotated) into the bytes of a page and back. It is the
//! codec of every format; its page is `[key codes][value codes][key parameters][value parameters]`.
//! Most formats quantize each token's row on its own. Formats that group keys along tokens take
//! their rows group by group ([`RowPageCodec::quantize_group`]), because a group may span pages.
//! Pages are written in whole 16-token tiles, so two demotions never share a byte. A page may be
//! partly filled.

use crate::clip;
use crate::error::{CodecError, Result, check_head_dim, check_latent_row, check_len};
use crate::layout::CodeLayout;
use crate::lloyd_max;
use crate::rounding::Rounding;
pub use crate::side::GroupParams;
pub(crate) use crate::side::{Body, SideCodec};
use crate::turboquant::TurboSpec;

/// Tokens in a page.
pub const PAGE_TOKENS: usize = 64;
/// Tokens demoted at a time.
pub const TILE_TOKENS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    Key,
    Value,
}

/// How one side of a page stores a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// Unquantized 32-bit floats: for verification.
    F32,
    /// Unquantized BF16.
    Bf16,
    /// Affine codes with fp16 scale and minimum; codes are chosen with the rounded pair.
    Affine,
    /// Two-bit affine codes with fp32 scale and zero, as the official kernels compute them.
    OfficialAffine,
    /// Lloyd–Max codes with fp16 deviation and mean (exact) or fp16 scale and minimum (official
    /// ratio).
    LloydMax(lloyd_max::Variant),
    /// Affine codes with fp16 scale and an integer zero, as in QuaRot.
    RoundedZero,
    /// E4M3 floats with an fp16 scale a row.
    Fp8,
    /// Norm and Lloyd–Max codes of the direction.
    TurboQuant(TurboSpec),
    /// Two-bit codes by channel, in groups of `tokens` tokens, with some eighths of the channels
    /// promoted to four bits. For keys.
    ChannelGroups { tokens: usize, promoted_eighths: usize },
    /// Nothing: the values are the rows of the keys, as in latent attention. For values beside
    /// unquantized keys.
    Shared,
    /// Nothing: a zero-width head. Its queries read only its BF16 windows. Both sides are absent,
    /// or none.
    Absent,
}

/// Width, grouping and clipping of one side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SideSpec {
    pub scheme: Scheme,
    /// Bits a code; ignored by the unquantized schemes.
    pub bits: u32,
    /// Channels that share a scale and a minimum; 0 means the whole head.
    pub group: usize,
    /// Quantile of |x| at which a row is clipped; 0 switches clipping off.
    pub clip: f64,
}

impl SideSpec {
    pub const BF16: Self = Self { scheme: Scheme::Bf16, bits: 16, group: 0, clip: 0.0 };
    pub const F32: Self = Self { scheme: Scheme::F32, bits: 32, group: 0, clip: 0.0 };
    pub const ABSENT: Self = Self { scheme: Scheme::Absent, bits: 0, group: 0, clip: 0.0 };

    pub const SHARED: Self = Self { scheme: Scheme::Shared, bits: 0, group: 0, clip: 0.0 };

    /// Affine codes of `bits` bits; [`Scheme::Absent`] for 0.
    pub fn of_width(bits: u32, clip: f64) -> Self {
        if bits == 0 { Self::ABSENT } else { Self::affine(bits, clip) }
    }

    pub fn affine(bits: u32, clip: f64) -> Self {
        Self { scheme: Scheme::Affine, bits, group: 0, clip }
    }

    pub fn is_coded(&self) -> bool {
        !matches!(self.scheme, Scheme::F32 | Scheme::Bf16 | Scheme::Shared)
    }

    pub(crate) fn check(&self, head_dim: usize) -> Result<()> {
        if !self.is_coded() {
            return Ok(());
        }
        let allowed = match self.scheme {
            Scheme::OfficialAffine | Scheme::LloydMax(lloyd_max::Variant::OfficialRatio) => self.bits == 2,
            Scheme::LloydMax(_) | Scheme::TurboQuant(_) => (1..=4).contains(&self.bits),
            Scheme::Fp8 => self.bits == 8,
            Scheme::Absent => self.bits == 0,
            Scheme::ChannelGroups { .. } => self.bits == 2,
            _ => matches!(self.bits, 1..=5 | 8),
        };
        if !allowed {
            return Err(CodecError::Bits(self.bits));
        }
        let group = self.group;
        if !(group == 0
            || group == head_dim
            || matches!(group, 32 | 64 | 128) && head_dim.is_multiple_of(group))
        {
            return Err(CodecError::Group { group, head_dim });
        }
        clip::check_ratio(self.clip)
    }
}

/// Codec of the pages of one layer and KV head.
#[derive(Clone, Debug, PartialEq)]
pub struct RowPageCodec {
    head_dim: usize,
    layout: CodeLayout,
    key: SideCodec,
    value: SideCodec,
}

impl RowPageCodec {
    pub fn new(head_dim: usize, key: SideSpec, value: SideSpec, layout: CodeLayout) -> Result<Self> {
        match value.scheme {
            Scheme::Shared => check_latent_row(head_dim)?,
            _ => check_head_dim(head_dim)?,
        }
        if key.scheme == Scheme::Shared || value.scheme == Scheme::Shared && key.is_coded() {
            return Err(CodecError::SharedRows);
        }
        if (key.scheme == Scheme::Absent) != (value.scheme == Scheme::Absent) {
            return Err(CodecError::HalfAbsent);
        }
        Ok(Self {
            head_dim,
            layout,
            key: SideCodec::new(key, Side::Key, head_dim, layout)?,
            value: SideCodec::new(value, Side::Value, head_dim, layout)?,
        })
    }

    /// The same pages with another rounding: `unbiased` applies to both sides, feedback to keys.
    pub fn with_rounding(mut self, rounding: Rounding) -> Result<Self> {
        for side in [&self.key, &self.value] {
            if !matches!(side.spec.scheme, Scheme::Affine | Scheme::Absent) || side.groups != 1 {
                return Err(CodecError::Rounding);
            }
        }
        if let Some(feedback) = &rounding.feedback {
            check_len("feedback", feedback.dim(), self.head_dim)?;
        }
        self.value.rounding = rounding.of_values();
        self.key.rounding = rounding;
        Ok(self)
    }

    pub fn rounding(&self, side: Side) -> &Rounding {
        &self.side(side).rounding
    }

    pub(crate) fn side(&self, side: Side) -> &SideCodec {
        match side {
            Side::Key => &self.key,
            Side::Value => &self.value,
        }
    }

    /// Whether the head stores history. `false` for a zero-width head.
    pub fn keeps_history(&self) -> bool {
        self.key.spec.scheme != Scheme::Absent
    }

    /// Whether the values are the rows of the keys, which are stored once.
    pub fn shares_rows(&self) -> bool {
        self.value.spec.scheme == Scheme::Shared
    }

    /// Elements that a page stores.
    pub fn page_elements(&self) -> usize {
        let sides = if self.shares_rows() { 1 } else { 2 };
        sides * PAGE_TOKENS * self.head_dim
    }

    pub fn spec(&self, side: Side) -> SideSpec {
        self.side(side).spec
    }

    pub fn layout(&self) -> CodeLayout {
        self.layout
    }

    /// Groups a row of this side is split into.
    pub fn groups(&self, side: Side) -> usize {
        self.side(side).groups
    }

    /// Stored bits an element of one side.
    pub fn side_bits(&self, side: Side) -> f64 {
        let side = self.side(side);
        ((side.code_bytes + side.param_bytes) * 8) as f64 / (PAGE_TOKENS * self.head_dim) as f64
    }

    /// Byte range of a side's codes in a page.
    pub fn codes_range(&self, side: Side) -> std::ops::Range<usize> {
        match side {
            Side::Key => 0..self.key.code_bytes,
            Side::Value => self.key.code_bytes..self.key.code_bytes + self.value.code_bytes,
        }
    }

    /// Byte range of a side's parameters in a page.
    pub fn params_range(&self, side: Side) -> std::ops::Range<usize> {
        let start = self.key.code_bytes + self.value.code_bytes;
        match side {
            Side::Key => start..start + self.key.param_bytes,
            Side::Value => start + self.key.param_bytes..self.page_bytes(),
        }
    }

    /// The code of one channel; meaningless for unquantized sides.
    pub fn code(&self, side: Side, page: &[u8], token: usize, channel: usize) -> u8 {
        self.side(side).map.read(&page[self.codes_range(side)], token, channel)
    }

    /// Scale and offset of one group of a quantized side.
    pub fn group_params(&self, side: Side, page: &[u8], token: usize, group: usize) -> GroupParams {
        self.side(side).params(&page[self.params_range(side)], token, group)
    }

    /// The value of a code before scale and offset: the code itself, or its Lloyd–Max level.
    pub fn level(&self, side: Side, code: u8) -> f32 {
        self.side(side).level(code)
    }

    /// Dequantizes one row of one side. Sides that group along tokens cannot be read row by row and
    /// give zeros; [`RowPageCodec::dequantize_token`] reads them.
    pub fn dequantize_row(&self, side: Side, page: &[u8], token: usize, row: &mut [f32]) {
        let side = if self.shares_rows() { Side::Key } else { side };
        self.side(side).dequantize_row(
            token,
            &page[self.codes_range(side)],
            &page[self.params_range(side)],
            row,
        );
    }

    /// Quantizes rows `first..` of one side and leaves the other alone.
    pub fn quantize_side_rows(&self, side: Side, first: usize, rows: &[f32], page: &mut [u8]) -> Result<()> {
        self.check_rows(first, rows.len(), rows.len(), page.len())?;
        self.check_row_by_row(side)?;
        // Codes of both sides precede all parameters, so one split separates them.
        let base = self.params_range(Side::Key).start;
        let params_range = self.params_range(side);
        let (codes, params) = page.split_at_mut(base);
        let codes = &mut codes[self.codes_range(side)];
        let params = &mut params[params_range.start - base..params_range.end - base];
        for (i, row) in rows.chunks_exact(self.head_dim).enumerate() {
            self.side(side).quantize_row(first + i, row, codes, params);
        }
        Ok(())
    }

    fn check_row_by_row(&self, side: Side) -> Result<()> {
        match self.token_groups(side) {
            Some(groups) => Err(CodecError::GroupSpansPages(groups.tokens())),
            None => Ok(()),
        }
    }

    fn check_rows(&self, first: usize, keys: usize, values: usize, page: usize) -> Result<usize> {
        check_len("page", page, self.page_bytes())?;
        check_len("values", values, keys)?;
        let tokens = keys / self.head_dim;
        check_len("keys", keys, tokens * self.head_dim)?;
        if first + tokens > PAGE_TOKENS {
            return Err(CodecError::Tokens { tokens: first + tokens, max: PAGE_TOKENS });
        }
        Ok(tokens)
    }
}

/// Whole pages.
impl RowPageCodec {
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Bytes of a page, codes and parameters.
    pub fn page_bytes(&self) -> usize {
        self.key.code_bytes + self.value.code_bytes + self.key.param_bytes + self.value.param_bytes
    }

    /// Stored bits an element of a full page, from the bytes it occupies.
    pub fn bits_per_element(&self) -> f64 {
        self.page_bytes() as f64 * 8.0 / self.page_elements() as f64
    }

    /// Quantizes rows `first..first + n` of a page; `keys` and `values` are `n × head_dim`.
    pub fn quantize_rows(&self, first: usize, keys: &[f32], values: &[f32], page: &mut [u8]) -> Result<()> {
        self.check_rows(first, keys.len(), values.len(), page.len())?;
        self.quantize_side_rows(Side::Key, first, keys, page)?;
        self.quantize_side_rows(Side::Value, first, values, page)
    }

    /// Quantizes a page or its beginning; bytes of absent tokens are zero.
    pub fn quantize(&self, keys: &[f32], values: &[f32], page: &mut [u8]) -> Result<()> {
        page.fill(0);
        self.quantize_rows(0, keys, values, page)
    }

    /// Quantizes one 16-token tile without touching the others.
    pub fn quantize_tile(&self, tile: usize, keys: &[f32], values: &[f32], page: &mut [u8]) -> Result<()> {
        let max = PAGE_TOKENS / TILE_TOKENS;
        if tile >= max {
            return Err(CodecError::Tile { tile, max });
        }
        check_len("keys of a tile", keys.len(), TILE_TOKENS * self.head_dim())?;
        self.quantize_rows(tile * TILE_TOKENS, keys, values, page)
    }

    /// Dequantizes rows `first..first + n`.
    pub fn dequantize_rows(
        &self,
        first: usize,
        page: &[u8],
        keys: &mut [f32],
        values: &mut [f32],
    ) -> Result<()> {
        self.check_rows(first, keys.len(), values.len(), page.len())?;
        for (side, rows) in [(Side::Key, keys), (Side::Value, values)] {
            self.check_row_by_row(side)?;
            for (i, row) in rows.chunks_exact_mut(self.head_dim).enumerate() {
                self.dequantize_row(side, page, first + i, row);
            }
        }
        Ok(())
    }
}
