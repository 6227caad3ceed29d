//! Pages: 64 tokens of keys and values of one layer and KV head, in a fixed number of bytes.
//!
//! A [`PageCodec`] turns rows (already rotated) into the bytes of a page and back. [`RowPageCodec`] is the codec
//! of every format that treats a token's row on its own; its page is
//! `[key codes][value codes][key parameters][value parameters]`. Pages are written in whole 16-token tiles, so no
//! byte is ever shared between two demotions, and may be partly filled.

use crate::affine::{self, OfficialParams};
use crate::clip;
use crate::error::{CodecError, Result, check_head_dim, check_len};
use crate::layout::{CodeLayout, CodeMap};
use crate::lloyd_max;
use half::{bf16, f16};

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
    /// Affine codes with fp16 scale and minimum, chosen against the rounded pair.
    Affine,
    /// Two-bit affine codes with fp32 scale and zero, as the official kernels compute them.
    OfficialAffine,
    /// Lloyd–Max codes with fp16 deviation and mean (exact) or fp16 scale and minimum (official ratio).
    LloydMax(lloyd_max::Variant),
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

    pub fn affine(bits: u32, clip: f64) -> Self {
        Self { scheme: Scheme::Affine, bits, group: 0, clip }
    }

    pub fn is_coded(&self) -> bool {
        !matches!(self.scheme, Scheme::F32 | Scheme::Bf16)
    }

    fn check(&self, head_dim: usize) -> Result<()> {
        if !self.is_coded() {
            return Ok(());
        }
        let allowed = match self.scheme {
            Scheme::OfficialAffine | Scheme::LloydMax(lloyd_max::Variant::OfficialRatio) => self.bits == 2,
            Scheme::LloydMax(_) => (1..=4).contains(&self.bits),
            _ => matches!(self.bits, 1..=4 | 8),
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

/// Encodes and decodes pages of one layer and KV head.
pub trait PageCodec {
    fn head_dim(&self) -> usize;

    /// Bytes of a page, everything counted.
    fn page_bytes(&self) -> usize;

    /// Tokens that must be encoded together: row codecs take a tile, codecs that group along tokens their group.
    fn demotion_tokens(&self) -> usize {
        TILE_TOKENS
    }

    /// Encodes rows `first..first + n` of a page, `keys` and `values` being `n × head_dim`.
    fn encode_rows(&self, first: usize, keys: &[f32], values: &[f32], page: &mut [u8]) -> Result<()>;

    /// Decodes rows `first..first + n`.
    fn decode_rows(&self, first: usize, page: &[u8], keys: &mut [f32], values: &mut [f32]) -> Result<()>;

    /// Encodes a page or its beginning; bytes of absent tokens are zero.
    fn encode(&self, keys: &[f32], values: &[f32], page: &mut [u8]) -> Result<()> {
        page.fill(0);
        self.encode_rows(0, keys, values, page)
    }

    /// Encodes one 16-token tile without touching the others.
    fn encode_tile(&self, tile: usize, keys: &[f32], values: &[f32], page: &mut [u8]) -> Result<()> {
        let max = PAGE_TOKENS / TILE_TOKENS;
        if tile >= max {
            return Err(CodecError::Tile { tile, max });
        }
        check_len("keys of a tile", keys.len(), TILE_TOKENS * self.head_dim())?;
        self.encode_rows(tile * TILE_TOKENS, keys, values, page)
    }

    /// Stored bits an element of a full page, from the bytes it occupies.
    fn bits_per_element(&self) -> f64 {
        self.page_bytes() as f64 * 8.0 / (2 * PAGE_TOKENS * self.head_dim()) as f64
    }
}

/// One side of a row codec, with everything derived from its spec.
#[derive(Clone, Debug, PartialEq)]
struct SideCodec {
    spec: SideSpec,
    map: CodeMap,
    group: usize,
    groups: usize,
    code_bytes: usize,
    param_bytes: usize,
    /// Lloyd–Max levels by code; empty for affine schemes.
    levels: Vec<f32>,
}

/// The affine (or centroid) reading of a stored group: `x̂ = scale · level(code) + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupParams {
    pub scale: f32,
    pub offset: f32,
}

impl SideCodec {
    fn new(spec: SideSpec, side: Side, head_dim: usize, layout: CodeLayout) -> Result<Self> {
        spec.check(head_dim)?;
        let group = if spec.group == 0 { head_dim } else { spec.group };
        let groups = head_dim / group;
        let bits = if spec.is_coded() { spec.bits } else { 8 };
        let map = CodeMap::new(
            if spec.is_coded() { layout } else { unquantized_layout(layout) },
            side,
            bits,
            head_dim,
        )?;
        let (code_bytes, param_bytes) = match spec.scheme {
            Scheme::F32 => (PAGE_TOKENS * head_dim * 4, 0),
            Scheme::Bf16 => (PAGE_TOKENS * head_dim * 2, 0),
            Scheme::OfficialAffine => (PAGE_TOKENS * map.row_bytes(), PAGE_TOKENS * groups * 8),
            Scheme::Affine | Scheme::LloydMax(_) => (PAGE_TOKENS * map.row_bytes(), PAGE_TOKENS * groups * 4),
        };
        let levels = match spec.scheme {
            Scheme::LloydMax(lloyd_max::Variant::Exact) => {
                lloyd_max::levels(spec.bits).ok_or(CodecError::Bits(spec.bits))?
            }
            _ => Vec::new(),
        };
        Ok(Self { spec, map, group, groups, code_bytes, param_bytes, levels })
    }

    fn encode_row(&self, token: usize, row: &[f32], codes: &mut [u8], params: &mut [u8]) {
        match self.spec.scheme {
            Scheme::F32 => {
                for (c, v) in row.iter().enumerate() {
                    put(codes, self.map.element_index(token, c), v.to_le_bytes());
                }
                return;
            }
            Scheme::Bf16 => {
                for (c, &v) in row.iter().enumerate() {
                    put(codes, self.map.element_index(token, c), bf16::from_f32(v).to_le_bytes());
                }
                return;
            }
            _ => {}
        }
        let limit = if self.spec.scheme == Scheme::OfficialAffine {
            OfficialParams::SATURATION
        } else {
            affine::SATURATION
        };
        let mut row = row.to_vec();
        affine::sanitize(&mut row, limit);
        clip::clip(&mut row, self.spec.clip);
        let mut group_codes = vec![0u8; self.group];
        for (g, values) in row.chunks_exact(self.group).enumerate() {
            let at = |which| self.map.param_index(self.groups, token, g, which);
            let pair = |scale: f32, offset: f32| [f16::from_f32(scale), f16::from_f32(offset)];
            let fp16 = match self.spec.scheme {
                Scheme::OfficialAffine => {
                    let p = affine::encode_group_official(values, &mut group_codes);
                    put(params, at(0), p.scale.to_le_bytes());
                    put(params, at(1), p.zero.to_le_bytes());
                    None
                }
                Scheme::LloydMax(lloyd_max::Variant::Exact) => {
                    let p = lloyd_max::encode_group(values, &self.levels, &mut group_codes);
                    Some(pair(p.deviation, p.mean))
                }
                Scheme::LloydMax(lloyd_max::Variant::OfficialRatio) => {
                    let p = lloyd_max::encode_group_official_ratio(values, &mut group_codes);
                    Some(pair(p.scale, p.min))
                }
                _ => {
                    let p = affine::encode_group(values, self.spec.bits, &mut group_codes);
                    Some(pair(p.scale, p.min))
                }
            };
            if let Some([scale, offset]) = fp16 {
                put(params, at(0), scale.to_le_bytes());
                put(params, at(1), offset.to_le_bytes());
            }
            for (c, &code) in group_codes.iter().enumerate() {
                self.map.write(codes, token, g * self.group + c, code);
            }
        }
    }

    fn params(&self, params: &[u8], token: usize, group: usize) -> GroupParams {
        let at = |which| self.map.param_index(self.groups, token, group, which);
        match self.spec.scheme {
            Scheme::OfficialAffine => {
                let scale = f32::from_le_bytes(get(params, at(0)));
                GroupParams { scale, offset: -f32::from_le_bytes(get(params, at(1))) * scale }
            }
            _ => GroupParams {
                scale: f16::from_le_bytes(get(params, at(0))).to_f32(),
                offset: f16::from_le_bytes(get(params, at(1))).to_f32(),
            },
        }
    }

    fn level(&self, code: u8) -> f32 {
        self.levels.get(code as usize).copied().unwrap_or(code as f32)
    }

    fn decode_row(&self, token: usize, codes: &[u8], params: &[u8], row: &mut [f32]) {
        match self.spec.scheme {
            Scheme::F32 => {
                for (c, v) in row.iter_mut().enumerate() {
                    *v = f32::from_le_bytes(get(codes, self.map.element_index(token, c)));
                }
            }
            Scheme::Bf16 => {
                for (c, v) in row.iter_mut().enumerate() {
                    *v = bf16::from_le_bytes(get(codes, self.map.element_index(token, c))).to_f32();
                }
            }
            Scheme::OfficialAffine => {
                for (g, values) in row.chunks_exact_mut(self.group).enumerate() {
                    let at = |which| self.map.param_index(self.groups, token, g, which);
                    let p = OfficialParams {
                        scale: f32::from_le_bytes(get(params, at(0))),
                        zero: f32::from_le_bytes(get(params, at(1))),
                    };
                    for (c, v) in values.iter_mut().enumerate() {
                        *v = p.decode(self.map.read(codes, token, g * self.group + c));
                    }
                }
            }
            Scheme::Affine | Scheme::LloydMax(_) => {
                for (g, values) in row.chunks_exact_mut(self.group).enumerate() {
                    let p = self.params(params, token, g);
                    for (c, v) in values.iter_mut().enumerate() {
                        let code = self.map.read(codes, token, g * self.group + c);
                        *v = p.scale * self.level(code) + p.offset;
                    }
                }
            }
        }
    }
}

/// Unquantized rows have no official order of their own.
fn unquantized_layout(layout: CodeLayout) -> CodeLayout {
    match layout {
        CodeLayout::CpuTile | CodeLayout::GpuTile => layout,
        CodeLayout::Logical | CodeLayout::Official => CodeLayout::Logical,
    }
}

fn put<const N: usize>(bytes: &mut [u8], index: usize, value: [u8; N]) {
    bytes[index * N..][..N].copy_from_slice(&value);
}

fn get<const N: usize>(bytes: &[u8], index: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[index * N..][..N]);
    out
}

/// Codec of the formats that treat each token's row on its own.
#[derive(Clone, Debug, PartialEq)]
pub struct RowPageCodec {
    head_dim: usize,
    layout: CodeLayout,
    key: SideCodec,
    value: SideCodec,
}

impl RowPageCodec {
    pub fn new(head_dim: usize, key: SideSpec, value: SideSpec, layout: CodeLayout) -> Result<Self> {
        check_head_dim(head_dim)?;
        Ok(Self {
            head_dim,
            layout,
            key: SideCodec::new(key, Side::Key, head_dim, layout)?,
            value: SideCodec::new(value, Side::Value, head_dim, layout)?,
        })
    }

    fn side(&self, side: Side) -> &SideCodec {
        match side {
            Side::Key => &self.key,
            Side::Value => &self.value,
        }
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

    /// Scale and offset of one group of a coded side.
    pub fn group_params(&self, side: Side, page: &[u8], token: usize, group: usize) -> GroupParams {
        self.side(side).params(&page[self.params_range(side)], token, group)
    }

    /// What a code stands for before scale and offset: itself, or its Lloyd–Max level.
    pub fn level(&self, side: Side, code: u8) -> f32 {
        self.side(side).level(code)
    }

    /// Decodes one row of one side.
    pub fn decode_row(&self, side: Side, page: &[u8], token: usize, row: &mut [f32]) {
        self.side(side).decode_row(token, &page[self.codes_range(side)], &page[self.params_range(side)], row);
    }

    /// Rewrites a page in another layout, code by code and parameter by parameter, losing nothing.
    pub fn relayout(&self, page: &[u8], layout: CodeLayout) -> Result<(Self, Vec<u8>)> {
        check_len("page", page.len(), self.page_bytes())?;
        let other = Self::new(self.head_dim, self.key.spec, self.value.spec, layout)?;
        let mut out = vec![0u8; other.page_bytes()];
        for side in [Side::Key, Side::Value] {
            let (from, to) = (self.side(side), other.side(side));
            let (codes, params) = (self.codes_range(side), self.params_range(side));
            let element = match from.spec.scheme {
                Scheme::F32 => 4,
                Scheme::Bf16 => 2,
                _ => 0,
            };
            for token in 0..PAGE_TOKENS {
                for channel in 0..self.head_dim {
                    if element == 0 {
                        let code = from.map.read(&page[codes.clone()], token, channel);
                        to.map.write(&mut out[codes.clone()], token, channel, code);
                    } else {
                        let (a, b) =
                            (from.map.element_index(token, channel), to.map.element_index(token, channel));
                        let source = codes.start + a * element..codes.start + (a + 1) * element;
                        out[codes.start + b * element..][..element].copy_from_slice(&page[source]);
                    }
                }
                let unit = if from.spec.scheme == Scheme::OfficialAffine { 4 } else { 2 };
                for group in 0..if element == 0 { from.groups } else { 0 } {
                    for which in 0..2 {
                        let a = params.start + from.map.param_index(from.groups, token, group, which) * unit;
                        let b = params.start + to.map.param_index(to.groups, token, group, which) * unit;
                        out[b..b + unit].copy_from_slice(&page[a..a + unit]);
                    }
                }
            }
        }
        Ok((other, out))
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

impl PageCodec for RowPageCodec {
    fn head_dim(&self) -> usize {
        self.head_dim
    }

    fn page_bytes(&self) -> usize {
        self.key.code_bytes + self.value.code_bytes + self.key.param_bytes + self.value.param_bytes
    }

    fn encode_rows(&self, first: usize, keys: &[f32], values: &[f32], page: &mut [u8]) -> Result<()> {
        self.check_rows(first, keys.len(), values.len(), page.len())?;
        for (side, rows) in [(Side::Key, keys), (Side::Value, values)] {
            let params_range = self.params_range(side);
            // Codes of both sides precede all parameters, so one split separates them.
            let (codes, params) = page.split_at_mut(self.params_range(Side::Key).start);
            let base = self.params_range(Side::Key).start;
            let codes = &mut codes[self.codes_range(side)];
            let params = &mut params[params_range.start - base..params_range.end - base];
            for (i, row) in rows.chunks_exact(self.head_dim).enumerate() {
                self.side(side).encode_row(first + i, row, codes, params);
            }
        }
        Ok(())
    }

    fn decode_rows(&self, first: usize, page: &[u8], keys: &mut [f32], values: &mut [f32]) -> Result<()> {
        self.check_rows(first, keys.len(), values.len(), page.len())?;
        for (side, rows) in [(Side::Key, keys), (Side::Value, values)] {
            for (i, row) in rows.chunks_exact_mut(self.head_dim).enumerate() {
                self.decode_row(side, page, first + i, row);
            }
        }
        Ok(())
    }
}
