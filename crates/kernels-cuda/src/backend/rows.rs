//! Activations on the device.

use crate::device::Device;
use crate::error::Result;
use crate::memory::Buffer;

/// `rows × width` activations. The f32 form is what operations exchange; steps of many rows carry a BF16 copy beside it
/// (or, where nothing else reads it, instead of it) for the matrix products.
pub struct CudaRows {
    width: usize,
    rows: usize,
    values: Option<Buffer>,
    rounded: Option<Buffer>,
    holds_values: bool,
    holds_rounded: bool,
}

impl CudaRows {
    pub(super) fn new(width: usize) -> Self {
        Self { width, rows: 0, values: None, rounded: None, holds_values: false, holds_rounded: false }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn count(&self) -> usize {
        self.rows
    }

    /// Makes room for `rows` rows in the forms named; what it held is not kept.
    pub(super) fn resize(&mut self, device: &Device, rows: usize, values: bool, rounded: bool) -> Result<()> {
        let elements = rows * self.width;
        if values {
            grow(device, &mut self.values, elements * 4, "activations")?;
        }
        if rounded {
            grow(device, &mut self.rounded, elements * 2, "activations")?;
        }
        (self.rows, self.holds_values, self.holds_rounded) = (rows, values, rounded);
        Ok(())
    }

    /// Address of the f32 rows; 0 if they are not there.
    pub(crate) fn values(&self) -> u64 {
        self.values.as_ref().filter(|_| self.holds_values).map_or(0, Buffer::address)
    }

    /// Address of the BF16 rows; 0 if they are not there.
    pub(crate) fn rounded(&self) -> u64 {
        self.rounded.as_ref().filter(|_| self.holds_rounded).map_or(0, Buffer::address)
    }

    /// The f32 form was written anew: the BF16 copy is of the past.
    pub(super) fn written(&mut self) {
        self.holds_rounded = false;
    }
}

/// Replaces the buffer by a larger one if it is too small. Sizes are rounded up so that a growing batch reallocates
/// rarely: the release of memory waits for the device.
pub(super) fn grow(device: &Device, buffer: &mut Option<Buffer>, bytes: usize, what: &str) -> Result<()> {
    if buffer.as_ref().is_none_or(|b| b.bytes() < bytes) {
        *buffer = None;
        let step = (bytes / 8).next_power_of_two().max(1 << 10);
        *buffer = Some(device.alloc(bytes.next_multiple_of(step), what)?);
    }
    Ok(())
}
