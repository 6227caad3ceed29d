//! Rows that calibration looks at in the middle of a step.

use super::launches::GramParams;
use super::rows::grow;
use super::{CudaBackend, CudaRows, Index, State};
use crate::error::CudaError;
use oscar_backend::{Result, TappedRows};

/// Rows of a step in progress.
pub(super) struct CudaTapped<'a> {
    pub backend: &'a CudaBackend,
    pub state: &'a mut State,
    pub rows: &'a CudaRows,
}

impl TappedRows for CudaTapped<'_> {
    fn read(&mut self, out: &mut Vec<f32>) -> Result<()> {
        if self.rows.count() == 0 {
            return Ok(());
        }
        Ok(self.state.transfers.download(self.rows.held_values("rows to read")?, out)?)
    }

    fn accumulate_gram(
        &mut self,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) -> Result<()> {
        let Self { backend, state, rows: x } = self;
        let weighed = weights.is_none_or(|weights| weights.len() == x.count());
        if first + width > x.width() || gram.len() != width * width || !weighed {
            let detail = format!("columns {first}.. of {}, {width} wide", x.width());
            return Err(CudaError::Shape { what: "a Gram matrix", detail }.into());
        }
        let weights = match weights {
            Some(weights) => {
                Some(backend.send_indices(state, Index::Weights, bytemuck::cast_slice(weights))?.cast())
            }
            None => None,
        };
        let (buffer, _) = grow(&backend.device, &mut state.gram, gram.len() * 8, "a statistic")?;
        let p = GramParams {
            x: x.held_values("a Gram matrix")?.ptr(),
            weights,
            gram: buffer.ptr(),
            stride: x.width() as u32,
            first: first as u32,
            width: width as u32,
            rows: x.count() as u32,
        };
        // SAFETY: `x` has `rows` rows of `stride`, the columns lie inside them, there is a weight
        // for each row, and the buffer has room for the matrix (all checked).
        unsafe { backend.launches.gram(&backend.kernels, p) }?;
        let mut sums = vec![0f64; gram.len()];
        backend.device.download(buffer.slice().part(0..gram.len())?, &mut sums)?;
        gram.iter_mut().zip(sums).for_each(|(g, s)| *g += s);
        Ok(())
    }
}
