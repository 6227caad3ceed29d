//! What a model keeps on the device beside its matrices.

use crate::device::Device;
use crate::error::Result;
use crate::memory::Buffer;
use oscar_codec::HeadRotations;

/// Vectors (norm weights) as f32.
pub struct CudaVector {
    pub(super) values: Buffer,
    pub(super) len: usize,
}

/// Cosines and sines, `[position][head_dim / 2]`.
pub struct CudaRope {
    pub(super) cosines: Buffer,
    pub(super) sines: Buffer,
    pub(super) positions: usize,
}

/// Key rotations of a layer's heads, `[kv_head][d][d]`, and their means.
pub struct CudaRotation {
    pub(super) matrices: Buffer,
    pub(super) means: Option<Buffer>,
}

impl CudaRotation {
    pub(super) fn upload(device: &Device, heads: &[HeadRotations]) -> Result<Self> {
        let matrices: Vec<f32> = heads.iter().flat_map(|h| h.key.matrix().iter().copied()).collect();
        let means = heads.iter().any(|h| h.key_mean.is_some()).then(|| {
            let zero = vec![0.0; heads[0].key.head_dim()];
            let means: Vec<f32> =
                heads.iter().flat_map(|h| h.key_mean.as_ref().unwrap_or(&zero).iter().copied()).collect();
            device.upload_new(&means, "key means")
        });
        Ok(Self { matrices: device.upload_new(&matrices, "key rotations")?, means: means.transpose()? })
    }
}
