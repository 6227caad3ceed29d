//! Activations on the device.

use crate::device::Device;
use crate::error::Result;
use crate::memory::Buffer;

/// `rows × width` activations. Operations exchange the f32 form. Steps of many rows carry a BF16 copy
/// for the matrix products beside it, or instead of it if nothing else reads the rows.
#[derive(Default)]
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
        Self { width, ..Self::default() }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn count(&self) -> usize {
        self.rows
    }

    /// Scratch rows take any width.
    pub(super) fn set_width(&mut self, width: usize) -> &mut Self {
        self.width = width;
        self
    }

    /// Makes room for `rows` rows in the forms named; the old contents are lost.
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

    /// Address of the f32 rows; 0 if there are none.
    pub(crate) fn values(&self) -> u64 {
        self.values.as_ref().filter(|_| self.holds_values).map_or(0, Buffer::address)
    }

    /// Address of the BF16 rows; 0 if there are none.
    pub(crate) fn rounded(&self) -> u64 {
        self.rounded.as_ref().filter(|_| self.holds_rounded).map_or(0, Buffer::address)
    }

    /// The f32 form changed, so the BF16 copy no longer holds.
    pub(super) fn drop_rounded(&mut self) {
        self.holds_rounded = false;
    }
}

/// Replaces the buffer by a larger one if it is too small, and says whether it did. Sizes are rounded
/// up so that a growing batch reallocates rarely: releasing memory waits for the device.
pub(crate) fn grow(device: &Device, buffer: &mut Option<Buffer>, bytes: usize, what: &str) -> Result<bool> {
    if buffer.as_ref().is_some_and(|b| b.bytes() >= bytes) {
        return Ok(false);
    }
    *buffer = None;
    let step = (bytes / 8).next_power_of_two().max(1 << 10);
    *buffer = Some(device.alloc(bytes.next_multiple_of(step), what)?);
    Ok(true)
}
