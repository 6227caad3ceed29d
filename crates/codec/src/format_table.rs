//! The table that gives each layer, head and side of a model its own width.

use crate::error::{Result, check_len};
use crate::format::{KvFormat, default_clip};
use crate::layout::CodeLayout;
use crate::page::{RowPageCodec, Side, SideSpec};
use crate::rounding::Rounding;

/// The codecs of a whole model: each layer and KV head has its own, so widths may differ by layer,
/// head and side.
#[derive(Clone, Debug, PartialEq)]
pub struct FormatTable {
    layers: usize,
    kv_heads: usize,
    codecs: Vec<RowPageCodec>,
}

impl FormatTable {
    pub fn new(layers: usize, kv_heads: usize, codecs: Vec<RowPageCodec>) -> Result<Self> {
        check_len("codec table", codecs.len(), layers * kv_heads)?;
        if let Some(first) = codecs.first() {
            for codec in &codecs {
                check_len("head size of a codec", codec.head_dim(), first.head_dim())?;
            }
        }
        Ok(Self { layers, kv_heads, codecs })
    }

    pub fn uniform(
        format: KvFormat,
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        layout: CodeLayout,
    ) -> Result<Self> {
        let codec = format.codec(head_dim, layout)?;
        let mut codecs = vec![codec; layers * kv_heads];
        let (edge, all) = (format.boundary_layers().min(layers) * kv_heads, codecs.len());
        if edge > 0 {
            let full = KvFormat::Bf16.codec(head_dim, layout)?;
            codecs[..edge].fill(full.clone());
            codecs[all - edge..].fill(full);
        }
        Self::new(layers, kv_heads, codecs)
    }

    /// `oscar` codes with widths given as `[layer][kv_head]` pairs of (key bits, value bits). A
    /// head with zero bits stores no history.
    pub fn from_widths(
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        widths: &[(u32, u32)],
        layout: CodeLayout,
    ) -> Result<Self> {
        let codecs = widths
            .iter()
            .map(|&(key, value)| {
                let spec = |side, bits| SideSpec::of_width(bits, default_clip(side, bits));
                RowPageCodec::new(head_dim, spec(Side::Key, key), spec(Side::Value, value), layout)
            })
            .collect::<Result<_>>()?;
        Self::new(layers, kv_heads, codecs)
    }

    /// The same pages with codes rounded by each head's `Rounding`, `[layer][kv_head]`.
    pub fn with_roundings(mut self, roundings: Vec<Rounding>) -> Result<Self> {
        check_len("roundings", roundings.len(), self.codecs.len())?;
        let codecs = self.codecs.into_iter().zip(roundings);
        self.codecs = codecs.map(|(codec, rounding)| codec.with_rounding(rounding)).collect::<Result<_>>()?;
        Ok(self)
    }

    /// The same codecs with their bytes in another order.
    pub fn with_order(&self, order: CodeLayout) -> Result<Self> {
        let reordered = |codec: &RowPageCodec| {
            let new =
                RowPageCodec::new(codec.head_dim(), codec.spec(Side::Key), codec.spec(Side::Value), order)?;
            match codec.rounding(Side::Key) {
                rounding if rounding.is_nearest() => Ok(new),
                rounding => new.with_rounding(rounding.clone()),
            }
        };
        Self::new(self.layers, self.kv_heads, self.codecs.iter().map(reordered).collect::<Result<_>>()?)
    }

    pub fn layers(&self) -> usize {
        self.layers
    }

    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    pub fn head_dim(&self) -> usize {
        self.codecs.first().map_or(0, RowPageCodec::head_dim)
    }

    pub fn codec(&self, layer: usize, kv_head: usize) -> &RowPageCodec {
        &self.codecs[layer * self.kv_heads + kv_head]
    }

    /// All codecs, `[layer][kv_head]`.
    pub fn codecs(&self) -> &[RowPageCodec] {
        &self.codecs
    }

    /// Bytes of one 64-token block over all layers and heads.
    pub fn block_bytes(&self) -> usize {
        self.codecs.iter().map(RowPageCodec::page_bytes).sum()
    }

    /// Stored bits an element over the whole table.
    pub fn bits_per_element(&self) -> f64 {
        let elements: usize = self.codecs.iter().map(RowPageCodec::page_elements).sum();
        self.block_bytes() as f64 * 8.0 / elements as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::CodecError;

    #[test]
    fn widths_may_differ_by_layer_head_and_side() {
        let widths = [(2, 2), (2, 2), (1, 1), (1, 1), (4, 3), (3, 2)];
        let table = FormatTable::from_widths(3, 2, 128, &widths, CodeLayout::CpuTile).unwrap();
        for (i, &(k, v)) in widths.iter().enumerate() {
            assert_eq!(table.codec(i / 2, i % 2).page_bytes(), 1024 * (k + v) as usize + 512);
        }
        assert_eq!(table.bits_per_element(), 2.0 + 0.25);
        let table = FormatTable::from_widths(1, 2, 128, &[(0, 0), (4, 4)], CodeLayout::CpuTile).unwrap();
        assert_eq!((table.codec(0, 0).page_bytes(), table.codec(0, 0).keeps_history()), (0, false));
        assert_eq!(table.bits_per_element(), 4.25 / 2.0, "a head without history takes no bytes at all");
        for half in [(0, 2), (2, 0)] {
            let error = FormatTable::from_widths(1, 1, 128, &[half], CodeLayout::CpuTile).unwrap_err();
            assert_eq!(error, CodecError::HalfAbsent);
        }
        let table = FormatTable::from_widths(1, 1, 128, &[(5, 2)], CodeLayout::CpuTile).unwrap();
        assert_eq!(table.bits_per_element(), 3.5 + 0.25);
        assert!(FormatTable::from_widths(3, 2, 128, &widths[..5], CodeLayout::CpuTile).is_err());
        assert!(
            FormatTable::from_widths(1, 1, 128, &[(6, 2)], CodeLayout::CpuTile)
                .unwrap_err()
                .to_string()
                .contains('6')
        );
    }
}
