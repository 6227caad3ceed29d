//! Rows stored as records: a fixed number of bytes for each token, codes and parameters together,
//! in one order everywhere.

use crate::fp8;
use crate::turboquant::TurboQuant;
use half::f16;

/// How a side that stores records quantizes a row.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordCodec {
    /// `[one byte for each channel][fp16 scale]`.
    Fp8 { head_dim: usize },
    /// `[instance by instance]`, see [`turboquant`](crate::turboquant).
    TurboQuant(TurboQuant),
}

impl RecordCodec {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        match self {
            Self::Fp8 { head_dim } => head_dim + 2,
            Self::TurboQuant(codec) => codec.row_bytes(),
        }
    }

    pub fn quantize_row(&self, row: &[f32], record: &mut [u8]) {
        match self {
            Self::Fp8 { head_dim } => {
                let (codes, scale) = record.split_at_mut(*head_dim);
                scale.copy_from_slice(&f16::from_f32(fp8::quantize_row(row, codes)).to_le_bytes());
            }
            Self::TurboQuant(codec) => codec.quantize_row(row, record),
        }
    }

    pub fn dequantize_row(&self, record: &[u8], row: &mut [f32]) {
        match self {
            Self::Fp8 { head_dim } => {
                let scale = f16::from_le_bytes([record[*head_dim], record[head_dim + 1]]).to_f32();
                row.iter_mut().zip(record).for_each(|(v, &code)| *v = scale * fp8::dequantize(code));
            }
            Self::TurboQuant(codec) => codec.dequantize_row(record, row),
        }
    }
}
