//! One side of a page: how rows of keys or of values become bytes, and back.

use crate::affine::{self, OfficialParams};
use crate::channel_groups::ChannelGroups;
use crate::clip;
use crate::error::{CodecError, Result};
use crate::layout::{CodeLayout, CodeMap};
use crate::lloyd_max;
use crate::page::{PAGE_TOKENS, Scheme, Side, SideSpec, TILE_TOKENS};
use crate::record::RecordCodec;
use crate::rounding::Rounding;
use crate::turboquant::TurboQuant;
use half::{bf16, f16};

/// The form of a side's bytes, beyond elements and codes placed by a [`CodeLayout`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Body {
    /// Elements or codes in the order of the layout, parameters separate.
    Mapped,
    Records(RecordCodec),
    TokenGroups(ChannelGroups),
    Nothing,
}

/// One side of a row codec, with everything derived from its spec.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SideCodec {
    pub(crate) spec: SideSpec,
    pub(crate) body: Body,
    pub(crate) map: CodeMap,
    group: usize,
    pub(crate) groups: usize,
    pub(crate) code_bytes: usize,
    pub(crate) param_bytes: usize,
    /// Lloyd–Max levels by code; empty for affine schemes.
    levels: Vec<f32>,
    /// How codes are chosen. The meaning of the bytes does not depend on it.
    pub(crate) rounding: Rounding,
}

/// The affine (or centroid) reading of a stored group: `x̂ = scale · level(code) + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupParams {
    pub scale: f32,
    pub offset: f32,
}

impl SideCodec {
    pub(crate) fn new(spec: SideSpec, side: Side, head_dim: usize, layout: CodeLayout) -> Result<Self> {
        spec.check(head_dim)?;
        let group = if spec.group == 0 { head_dim } else { spec.group };
        let groups = head_dim / group;
        let body = match spec.scheme {
            Scheme::Fp8 => Body::Records(RecordCodec::Fp8 { head_dim }),
            Scheme::TurboQuant(turbo) => {
                Body::Records(RecordCodec::TurboQuant(TurboQuant::new(head_dim, spec.bits, turbo)?))
            }
            Scheme::ChannelGroups { tokens, promoted_eighths } => {
                Body::TokenGroups(ChannelGroups::new(head_dim, tokens, head_dim * promoted_eighths / 8)?)
            }
            Scheme::Absent | Scheme::Shared => Body::Nothing,
            _ => Body::Mapped,
        };
        let is_mapped_code = spec.is_coded() && body == Body::Mapped;
        let bits = if is_mapped_code { spec.bits } else { 8 };
        let map = CodeMap::new(
            if is_mapped_code { layout } else { unquantized_layout(layout) },
            side,
            bits,
            head_dim,
        )?;
        let (code_bytes, param_bytes) = match &body {
            Body::Records(records) => (PAGE_TOKENS * records.row_bytes(), 0),
            Body::TokenGroups(groups) => (PAGE_TOKENS / TILE_TOKENS * groups.tile_bytes(), 0),
            Body::Nothing => (0, 0),
            Body::Mapped => match spec.scheme {
                Scheme::F32 => (PAGE_TOKENS * head_dim * 4, 0),
                Scheme::Bf16 => (PAGE_TOKENS * head_dim * 2, 0),
                Scheme::OfficialAffine => (PAGE_TOKENS * map.row_bytes(), PAGE_TOKENS * groups * 8),
                _ => (PAGE_TOKENS * map.row_bytes(), PAGE_TOKENS * groups * 4),
            },
        };
        let levels = match spec.scheme {
            Scheme::LloydMax(lloyd_max::Variant::Exact) => {
                lloyd_max::levels(spec.bits).ok_or(CodecError::Bits(spec.bits))?
            }
            _ => Vec::new(),
        };
        Ok(Self {
            spec,
            body,
            map,
            group,
            groups,
            code_bytes,
            param_bytes,
            levels,
            rounding: Rounding::default(),
        })
    }

    pub(crate) fn quantize_row(&self, token: usize, row: &[f32], codes: &mut [u8], params: &mut [u8]) {
        if let Body::Records(records) = &self.body {
            return records
                .quantize_row(row, &mut codes[token * records.row_bytes()..][..records.row_bytes()]);
        }
        match self.spec.scheme {
            Scheme::Absent | Scheme::Shared => return,
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
        if !self.rounding.is_nearest() {
            return self.quantize_rounded(token, &row, codes, params);
        }
        clip::clip(&mut row, self.spec.clip);
        let mut group_codes = vec![0u8; self.group];
        for (g, values) in row.chunks_exact(self.group).enumerate() {
            let at = |which| self.map.param_index(self.groups, token, g, which);
            let pair = |scale: f32, offset: f32| [f16::from_f32(scale), f16::from_f32(offset)];
            let fp16 = match self.spec.scheme {
                Scheme::OfficialAffine => {
                    let p = affine::quantize_group_official(values, &mut group_codes);
                    put(params, at(0), p.scale.to_le_bytes());
                    put(params, at(1), p.zero.to_le_bytes());
                    None
                }
                Scheme::LloydMax(lloyd_max::Variant::Exact) => {
                    let p = lloyd_max::quantize_group(values, &self.levels, &mut group_codes);
                    Some(pair(p.deviation, p.mean))
                }
                Scheme::LloydMax(lloyd_max::Variant::OfficialRatio) => {
                    let p = lloyd_max::quantize_group_official_ratio(values, &mut group_codes);
                    Some(pair(p.scale, p.min))
                }
                Scheme::RoundedZero => {
                    let p = affine::quantize_group_rounded_zero(values, self.spec.bits, &mut group_codes);
                    Some(pair(p.scale, p.zero))
                }
                _ => {
                    let p = affine::quantize_group(values, self.spec.bits, &mut group_codes);
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

    fn quantize_rounded(&self, token: usize, row: &[f32], codes: &mut [u8], params: &mut [u8]) {
        let mut row_codes = vec![0u8; row.len()];
        let pair = self.rounding.quantize(row, self.spec.clip, self.spec.bits, &mut row_codes);
        for (which, value) in [pair.scale, pair.min].into_iter().enumerate() {
            let at = self.map.param_index(self.groups, token, 0, which);
            put(params, at, f16::from_f32(value).to_le_bytes());
        }
        for (channel, &code) in row_codes.iter().enumerate() {
            self.map.write(codes, token, channel, code);
        }
    }

    pub(crate) fn params(&self, params: &[u8], token: usize, group: usize) -> GroupParams {
        let at = |which| self.map.param_index(self.groups, token, group, which);
        match self.spec.scheme {
            Scheme::OfficialAffine => {
                let scale = f32::from_le_bytes(get(params, at(0)));
                GroupParams { scale, offset: -f32::from_le_bytes(get(params, at(1))) * scale }
            }
            scheme => {
                let half = |which| f16::from_le_bytes(get(params, at(which))).to_f32();
                let (scale, second) = (half(0), half(1));
                let offset = if scheme == Scheme::RoundedZero { -second * scale } else { second };
                GroupParams { scale, offset }
            }
        }
    }

    pub(crate) fn level(&self, code: u8) -> f32 {
        self.levels.get(code as usize).copied().unwrap_or(code as f32)
    }

    pub(crate) fn dequantize_row(&self, token: usize, codes: &[u8], params: &[u8], row: &mut [f32]) {
        match &self.body {
            Body::Mapped => {}
            Body::Records(records) => {
                return records
                    .dequantize_row(&codes[token * records.row_bytes()..][..records.row_bytes()], row);
            }
            // Only `dequantize_token` knows where groups begin and has the pages that they may
            // span.
            Body::TokenGroups(_) | Body::Nothing => return row.fill(0.0),
        }
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
                        *v = p.dequantize(self.map.read(codes, token, g * self.group + c));
                    }
                }
            }
            _ => {
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
