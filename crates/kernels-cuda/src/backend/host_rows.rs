//! Rows that come from the host in the middle of a step.

use super::{CudaBackend, CudaRows, CudaStep};
use crate::error::{CudaError, Result};
use oscar_backend::{HostRows, Result as BackendResult};

impl HostRows for CudaBackend {
    fn read_rows(step: &mut CudaStep<'_>, x: &CudaRows, out: &mut Vec<f32>) -> BackendResult<()> {
        let values = x.held_values("rows to read")?;
        Ok(step.state().transfers.download(values, out)?)
    }

    /// Ends the recording of the step: the launches that follow are submitted directly.
    fn write_rows(step: &mut CudaStep<'_>, values: &[f32], x: &mut CudaRows) -> BackendResult<()> {
        Ok(step.write(values, x)?)
    }
}

impl CudaStep<'_> {
    fn write(&mut self, values: &[f32], x: &mut CudaRows) -> Result<()> {
        let (width, device) = (x.width(), &self.backend.device);
        if width == 0 || !values.len().is_multiple_of(width) {
            let detail = format!("{} values of rows of {width}", values.len());
            return Err(CudaError::Shape { what: "rows from the host", detail });
        }
        // Launches that are noted may read the old rows.
        device.flush()?;
        x.resize(device, values.len() / width, true, false)?;
        self.state().transfers.enqueue(values, x.held_values("rows from the host")?)
    }
}
