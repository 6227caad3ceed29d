//! Activations on the device.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::gemm::{ROW_GROUP, Sums};
use crate::memory::{Buffer, DevicePtr, DeviceSlice};
use half::bf16;

/// `rows × width` activations. Operations exchange the f32 form. Steps of many rows carry a BF16
/// copy for the matrix products beside it, or instead of it if nothing else reads the rows.
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
        // Block-scaled products write whole groups of four rows.
        let elements = rows.next_multiple_of(ROW_GROUP) * self.width;
        if values {
            grow(device, &mut self.values, elements * 4, "activations")?;
        }
        if rounded {
            grow(device, &mut self.rounded, elements * 2, "activations")?;
        }
        (self.rows, self.holds_values, self.holds_rounded) = (rows, values, rounded);
        Ok(())
    }

    /// The f32 rows, if they are held.
    pub(crate) fn values(&self) -> Option<DeviceSlice<'_, f32>> {
        let buffer = self.values.as_ref().filter(|_| self.holds_values)?;
        buffer.slice().part(0..self.rows * self.width).ok()
    }

    /// The BF16 rows, if they are held.
    pub(crate) fn rounded(&self) -> Option<DeviceSlice<'_, bf16>> {
        let buffer = self.rounded.as_ref().filter(|_| self.holds_rounded)?;
        buffer.slice().part(0..self.rows * self.width).ok()
    }

    /// The rows as the target of a product that writes whole groups of [`ROW_GROUP`] rows.
    pub(crate) fn padded_sums(&self) -> Result<Sums<'_>> {
        let elements = self.rows.next_multiple_of(ROW_GROUP) * self.width;
        match (&self.values, &self.rounded) {
            (_, Some(buffer)) if self.holds_rounded => Ok(Sums::Bf16(buffer.slice().part(0..elements)?)),
            (Some(buffer), _) if self.holds_values => Ok(Sums::F32(buffer.slice().part(0..elements)?)),
            _ => Err(CudaError::Shape { what: "a product", detail: "its rows have no memory".into() }),
        }
    }

    /// The f32 rows, or an error that names their use.
    pub(crate) fn held_values(&self, what: &'static str) -> Result<DeviceSlice<'_, f32>> {
        let detail = || format!("{} rows of {} are not held in f32", self.rows, self.width);
        self.values().ok_or_else(|| CudaError::Shape { what, detail: detail() })
    }

    /// Pointer to the BF16 rows, if they are held.
    pub(crate) fn rounded_ptr(&self) -> Option<DevicePtr<bf16>> {
        self.rounded().map(|rows| rows.ptr())
    }

    /// The f32 form changed, so the BF16 copy no longer holds.
    pub(super) fn drop_rounded(&mut self) {
        self.holds_rounded = false;
    }
}

/// Bytes that [`grow`] allocates for `bytes`.
pub(crate) fn grown(bytes: usize) -> usize {
    bytes.next_multiple_of((bytes / 8).next_power_of_two().max(1 << 10))
}

/// Replaces the buffer by a larger one if it is too small, and says whether it did. Sizes are
/// rounded up so that a growing batch reallocates rarely: releasing memory waits for the device.
pub(crate) fn grow<'a>(
    device: &Device,
    buffer: &'a mut Option<Buffer>,
    bytes: usize,
    what: &str,
) -> Result<(&'a Buffer, bool)> {
    // A buffer that is too small is released first: both may not fit.
    let (grown, moved) = match buffer.take().filter(|b| b.bytes() >= bytes) {
        Some(kept) => (kept, false),
        None => (device.alloc(grown(bytes), what)?, true),
    };
    Ok((buffer.insert(grown), moved))
}
