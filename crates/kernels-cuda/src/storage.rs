//! The form of a cache's history on the GPU: codes that kernels read, or, for formats without
//! kernels, rows that the CPU has quantized and dequantized.
//!
//! **Invariant:** a format is always read by its own rule. Without kernels its answers are still
//! the codec's; its memory and speed are not, and everything that describes the cache says so.

use crate::error::{CudaError, Result};
use oscar_codec::page::Scheme;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, RowPageCodec, Side, SideSpec};

/// How pages of history are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Every token stays in BF16; there is no history.
    Bf16,
    /// Affine codes of 1 to 4 bits, made and read by kernels; zero-width heads have none.
    Codes,
    /// Every other format: BF16 rows in the layout of full pages, quantized and dequantized on the
    /// CPU.
    Dequantized,
}

impl Storage {
    /// The storage of a cache, or why it is refused.
    pub fn of(layout: &CacheLayout) -> Result<Self> {
        let refuse = |why: String| {
            Err(CudaError::Unsupported(format!("KV format {}: {why}; use --device cpu", layout.format())))
        };
        if !crate::sources::HEAD_DIMS.contains(&layout.head_dim()) {
            return refuse(format!(
                "the GPU kernels know heads of 64, 128 and 256 channels, not {}",
                layout.head_dim()
            ));
        }
        for codec in layout.full().codecs() {
            if !both(|side| codec.spec(side).scheme == Scheme::Bf16) {
                return refuse("the GPU keeps full tokens in BF16".into());
            }
        }
        if let Some(bits) = too_wide(layout) {
            return refuse(format!(
                "its table has codes of {bits} bits, and the GPU kernels read 1 to 4; choose its widths with \
                 `oscar calibrate --widths 0,1,2,3,4`"
            ));
        }
        Ok(Self::kind(layout))
    }

    /// [`Storage::of`] for a cache that is not refused.
    fn kind(layout: &CacheLayout) -> Self {
        let Some(table) = layout.coded() else { return Self::Bf16 };
        let read_by_kernels = |codec: &RowPageCodec| {
            !codec.keeps_history() || both(|side| is_plain_affine(codec.spec(side), codec.head_dim()))
        };
        match layout.windows().sides_agree() && table.codecs().iter().all(read_by_kernels) {
            true => Self::Codes,
            false => Self::Dequantized,
        }
    }

    /// The cache in the GPU's byte order, with the sizes of its blocks on the GPU.
    pub fn held(layout: &CacheLayout) -> CacheLayout {
        // A head size without such an order is refused, by name, when pages are reserved.
        let layout = layout.with_order(CodeLayout::GpuTile).unwrap_or_else(|_| layout.clone());
        match Self::kind(&layout) {
            Self::Dequantized => {
                let bytes = layout.full_block_bytes();
                layout.with_held_block_bytes(bytes)
            }
            Self::Bf16 => layout,
            Self::Codes => layout.with_views_in_blocks(),
        }
    }

    /// Refuses pages whose byte order is not the kernels'.
    pub fn check_order(self, layout: &CacheLayout) -> Result<()> {
        // Codes that stay on the CPU may have any order.
        let coded = layout.coded().filter(|_| self == Self::Codes);
        let wrong = layout
            .full()
            .codecs()
            .iter()
            .chain(coded.into_iter().flat_map(|table| table.codecs()))
            .find(|codec| codec.layout() != CodeLayout::GpuTile);
        match wrong {
            Some(codec) => Err(CudaError::Unsupported(format!(
                "KV format {}: its pages are in {} order, the GPU reads its own",
                layout.format(),
                codec.layout().name()
            ))),
            None => Ok(()),
        }
    }
}

/// A width of a width table that no kernel reads. Codes of such a table are not worth keeping as
/// BF16 rows: they are there to save memory.
fn too_wide(layout: &CacheLayout) -> Option<u32> {
    let table = layout.coded().filter(|_| matches!(layout.format(), KvFormat::OscarMixed { .. }))?;
    let sides = table.codecs().iter().flat_map(|codec| [codec.spec(Side::Key), codec.spec(Side::Value)]);
    sides.map(|spec| spec.bits).find(|bits| *bits > 4)
}

fn both(holds: impl Fn(Side) -> bool) -> bool {
    holds(Side::Key) && holds(Side::Value)
}

/// Whether the kernels read this side: affine codes with one scale and minimum per row.
fn is_plain_affine(spec: SideSpec, head_dim: usize) -> bool {
    spec.scheme == Scheme::Affine
        && (1..=4).contains(&spec.bits)
        && (spec.group == 0 || spec.group == head_dim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{FormatTable, Windows};

    fn layout(name: &str, head_dim: usize) -> CacheLayout {
        let format: KvFormat = name.parse().unwrap();
        let windows = format.windows(None, None).unwrap();
        CacheLayout::new(format, 6, 2, head_dim, windows, CodeLayout::CpuTile).unwrap()
    }

    #[test]
    fn every_format_is_kept_by_its_own_rule_or_refused_by_name() {
        for format in KvFormat::all() {
            let layout = layout(&format.to_string(), 128);
            let name = format.to_string();
            let wanted = match name.as_str() {
                "f32" => {
                    let error = Storage::of(&layout).unwrap_err().to_string();
                    assert!(error.contains("f32") && error.contains("--device cpu"), "{error}");
                    continue;
                }
                "bf16" => Storage::Bf16,
                "oscar" | "oscar1" | "oscar2" | "oscar3" | "oscar4" => Storage::Codes,
                // Affine codes with any rotation.
                "int1" | "int2" | "int3" | "int4" | "naive2" => Storage::Codes,
                name if name.starts_with("saw4") => Storage::Codes,
                _ => Storage::Dequantized,
            };
            assert_eq!(Storage::of(&layout).unwrap(), wanted, "{name}");
        }
        assert!(Storage::of(&layout("oscar2", 96)).unwrap_err().to_string().contains("96"));
    }

    #[test]
    fn a_table_with_wider_codes_is_refused_with_advice() {
        let table = FormatTable::from_widths(6, 2, 128, &[(5, 4); 12], CodeLayout::CpuTile).unwrap();
        let error = Storage::of(&layout("oscar", 128).with_coded_table(table)).unwrap_err().to_string();
        assert!(error.contains("5 bits") && error.contains("--widths 0,1,2,3,4"), "{error}");
        assert!(error.contains("--device cpu"), "{error}");
    }

    #[test]
    fn the_held_layout_counts_the_bytes_on_the_gpu() {
        for (name, dequantized) in [("oscar2", false), ("bf16", false), ("kivi2", true), ("int8", true)] {
            let own = layout(name, 128);
            let held = Storage::held(&own);
            Storage::of(&held).unwrap().check_order(&held).unwrap();
            assert_eq!(Storage::of(&held).unwrap(), Storage::of(&own).unwrap(), "{name}");
            let coded = if dequantized { own.full_block_bytes() } else { own.coded_block_bytes() };
            assert_eq!(held.coded_block_bytes(), coded, "{name}");
            assert_eq!(held.page_bits(), own.page_bits(), "{name}");
        }
        let own = layout("oscar2", 128);
        let error = Storage::of(&own).unwrap().check_order(&own).unwrap_err().to_string();
        assert!(error.contains("cpu-tile"), "{error}");
    }

    #[test]
    fn windows_by_side_are_beyond_the_code_kernels() {
        let windows = *layout("kivi2", 64).windows();
        assert!(!windows.sides_agree());
        let by_side = CacheLayout::new(KvFormat::OSCAR2, 1, 1, 64, windows, CodeLayout::GpuTile).unwrap();
        assert_eq!(Storage::of(&by_side).unwrap(), Storage::Dequantized);
        let agreeing = CacheLayout::new(KvFormat::OSCAR2, 1, 1, 64, Windows::default(), CodeLayout::GpuTile);
        assert_eq!(Storage::of(&agreeing.unwrap()).unwrap(), Storage::Codes);
    }
}
