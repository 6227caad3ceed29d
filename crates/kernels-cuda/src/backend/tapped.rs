//! Rows that calibration looks at in the middle of a step.

use super::launches::Gram;
use super::rows::grow;
use super::{CudaBackend, CudaRows, Index, State};
use crate::error::{CudaError, Result};
use oscar_backend::{Result as BackendResult, TappedRows};

/// Rows of a step in progress.
pub(super) struct CudaTapped<'a> {
    pub backend: &'a CudaBackend,
    pub state: &'a mut State,
    pub rows: &'a CudaRows,
}

impl TappedRows for CudaTapped<'_> {
    fn read(&mut self, out: &mut Vec<f32>) -> BackendResult<()> {
        let rows = self.rows;
        if rows.values() == 0 && rows.count() > 0 {
            let detail = "they are held in BF16 alone".into();
            return Err(CudaError::Shape { what: "rows to read", detail }.into());
        }
        Ok(self.state.transfers.download(rows.values(), rows.count() * rows.width(), out)?)
    }

    fn accumulate_gram(
        &mut self,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> BackendResult<()> {
        Ok(self.add_gram(first, width, weights, gram)?)
    }
}

impl CudaTapped<'_> {
    fn add_gram(
        &mut self,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> Result<()> {
        let Self { backend, state, rows: x } = self;
        let weighed = weights.is_none_or(|weights| weights.len() == x.count());
        if first + width > x.width() || gram.len() != width * width || x.values() == 0 || !weighed {
            let detail = format!("columns {first}.. of {}, {width} wide", x.width());
            return Err(CudaError::Shape { what: "a Gram matrix", detail });
        }
        let weights = match weights {
            Some(weights) => backend.send_indices(state, Index::Weights, bytemuck::cast_slice(weights))?,
            None => 0,
        };
        grow(&backend.device, &mut state.gram, gram.len() * 8, "a statistic")?;
        let Some(buffer) = &state.gram else { return Ok(()) };
        let p = Gram {
            x: x.values(),
            weights,
            gram: buffer.address(),
            stride: x.width() as u32,
            first: first as u32,
            width: width as u32,
            rows: x.count() as u32,
        };
        backend.launches.gram(&backend.kernels, &p)?;
        let mut sums = vec![0f64; gram.len()];
        backend.device.download(buffer, 0, &mut sums)?;
        gram.iter_mut().zip(sums).for_each(|(g, s)| *g += s);
        Ok(())
    }
}
