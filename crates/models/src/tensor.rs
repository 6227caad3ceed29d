//! One weight tensor as stored in the file: dtype, shape and little-endian bytes, never copied
//! until asked.

use half::{bf16, f16};
use safetensors::Dtype;

/// The number formats weights are read in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    Bf16,
    F16,
    F32,
}

impl WeightDtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The name safetensors files use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
        }
    }

    pub(crate) fn from_safetensors(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => Some(Self::F32),
            _ => None,
        }
    }

    pub(crate) fn to_safetensors(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
            Self::F32 => Dtype::F32,
        }
    }

    /// The name `config.json` uses in `torch_dtype`.
    pub(crate) fn torch_name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
            Self::F32 => "float32",
        }
    }

    pub(crate) fn from_torch_name(name: &str) -> Option<Self> {
        match name.strip_prefix("torch.").unwrap_or(name) {
            "bfloat16" => Some(Self::Bf16),
            "float16" => Some(Self::F16),
            "float32" => Some(Self::F32),
            _ => None,
        }
    }
}

/// A borrowed tensor. Rows are contiguous, the last dimension fastest; `bytes.len()` always equals
/// the product of `shape` times the element size.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    pub dtype: WeightDtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// All elements as f32; exact for every supported dtype.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        match self.dtype {
            WeightDtype::Bf16 => self.pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            WeightDtype::F16 => self.pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            WeightDtype::F32 => self.quads().map(f32::from_le_bytes).collect(),
        }
    }

    /// All elements as bf16: a copy for BF16 files, otherwise rounded to nearest even.
    pub fn to_bf16_vec(&self) -> Vec<bf16> {
        match self.dtype {
            WeightDtype::Bf16 if cfg!(target_endian = "little") => {
                let mut values = vec![bf16::ZERO; self.len()];
                bytemuck::cast_slice_mut(&mut values).copy_from_slice(self.bytes);
                values
            }
            WeightDtype::Bf16 => self.pairs().map(bf16::from_le_bytes).collect(),
            WeightDtype::F16 => {
                self.pairs().map(|b| bf16::from_f32(f16::from_le_bytes(b).to_f32())).collect()
            }
            WeightDtype::F32 => self.quads().map(|b| bf16::from_f32(f32::from_le_bytes(b))).collect(),
        }
    }

    /// The elements in place, when the file is BF16 and happens to be aligned for it; `None` means
    /// use [`Self::to_bf16_vec`].
    pub fn as_bf16(&self) -> Option<&'a [bf16]> {
        let usable = self.dtype == WeightDtype::Bf16 && cfg!(target_endian = "little");
        usable.then(|| bytemuck::try_cast_slice(self.bytes).ok()).flatten()
    }

    /// Whether every element is finite.
    pub fn is_finite(&self) -> bool {
        // The largest exponent marks both. Whole chunks without an early exit compare many elements
        // at a time.
        let words = |exponent: u16| {
            !self.bytes.chunks(4096).any(|chunk| {
                let elements = chunk.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
                elements.fold(false, |found, bits| found | (bits & exponent == exponent))
            })
        };
        match self.dtype {
            WeightDtype::Bf16 => words(0x7f80),
            WeightDtype::F16 => words(0x7c00),
            WeightDtype::F32 => {
                let exponent = 0x7f80_0000;
                !self.bytes.chunks(4096).any(|chunk| {
                    let elements =
                        chunk.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                    elements.fold(false, |found, bits| found | (bits & exponent == exponent))
                })
            }
        }
    }

    fn pairs(&self) -> impl Iterator<Item = [u8; 2]> + 'a {
        self.bytes.chunks_exact(2).map(|b| [b[0], b[1]])
    }

    fn quads(&self) -> impl Iterator<Item = [u8; 4]> + 'a {
        self.bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_keep_the_values() {
        let values = [1.0f32, -2.5, 0.15625];
        let as_f32: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let as_f16: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        let as_bf16: Vec<u8> = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
        for (dtype, bytes) in
            [(WeightDtype::F32, &as_f32), (WeightDtype::F16, &as_f16), (WeightDtype::Bf16, &as_bf16)]
        {
            let view = TensorView { dtype, shape: &[3], bytes };
            assert_eq!(view.len(), 3);
            assert_eq!(view.to_f32_vec(), values);
            assert_eq!(view.to_bf16_vec(), values.map(bf16::from_f32));
        }
    }

    #[test]
    fn what_is_no_number_is_found_wherever_it_is() {
        for (dtype, bad) in [
            (WeightDtype::Bf16, [0x7f80u32, 0xff80, 0x7fc0]),
            (WeightDtype::F16, [0x7c00, 0xfc00, 0x7e01]),
            (WeightDtype::F32, [0x7f80_0000, 0xff80_0000, 0x7f80_0001]),
        ] {
            let count = 10_000;
            let mut bytes = vec![0x3c; count * dtype.size()];
            let shape = [count];
            assert!(TensorView { dtype, shape: &shape, bytes: &bytes }.is_finite());
            assert!(TensorView { dtype, shape: &[0], bytes: &[] }.is_finite());
            for bits in bad {
                for at in [0, 5000, count - 1] {
                    let place = at * dtype.size()..(at + 1) * dtype.size();
                    let before = bytes[place.clone()].to_vec();
                    bytes[place.clone()].copy_from_slice(&bits.to_le_bytes()[..dtype.size()]);
                    let view = TensorView { dtype, shape: &shape, bytes: &bytes };
                    assert!(!view.is_finite(), "{dtype:?} {bits:x} at {at}");
                    bytes[place].copy_from_slice(&before);
                }
            }
        }
    }

    #[test]
    fn f32_rounds_to_nearest_even_bf16() {
        // 1 + 2^-8 lies halfway between two bf16 numbers; the even one is 1.
        let bytes = (1.0f32 + 2f32.powi(-8)).to_le_bytes();
        let view = TensorView { dtype: WeightDtype::F32, shape: &[1], bytes: &bytes };
        assert_eq!(view.to_bf16_vec(), [bf16::from_f32(1.0)]);
    }

    #[test]
    fn in_place_access_needs_bf16_and_alignment() {
        let words = [0x3f80u16, 0x4000, 0x4040];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let aligned = TensorView { dtype: WeightDtype::Bf16, shape: &[2], bytes: &bytes[..4] };
        assert_eq!(aligned.as_bf16().unwrap(), [bf16::from_f32(1.0), bf16::from_f32(2.0)]);
        let shifted = TensorView { dtype: WeightDtype::Bf16, shape: &[2], bytes: &bytes[1..5] };
        assert!(shifted.as_bf16().is_none());
        let other = TensorView { dtype: WeightDtype::F16, shape: &[2], bytes: &bytes[..4] };
        assert!(other.as_bf16().is_none());
    }
}
