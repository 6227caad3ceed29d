//! Mixtures of experts: not on the GPU yet. Loading such a model is refused by name.

use crate::backend::CudaBackend;
use crate::device::Device;
use crate::error::{CudaError, Result};
use oscar_backend::{ExpertId, ExpertsShape, HostMatrix};

/// No such object can be made yet.
pub enum CudaExperts {}

impl CudaExperts {
    pub(crate) fn new(_backend: &CudaBackend, shape: &ExpertsShape<'_>) -> Result<Self> {
        let why = format!("layers of {} experts are not computed there; use --device cpu", shape.experts);
        Err(CudaError::Unsupported(why))
    }

    pub(crate) fn load(&mut self, _: &Device, _: ExpertId, _: &[HostMatrix<'_>; 3]) -> Result<()> {
        match *self {}
    }

    pub(crate) fn bytes(&self) -> (usize, usize) {
        match *self {}
    }
}
