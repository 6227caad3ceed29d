//! What lives on a device beside code: its memory, page-locked host memory, and points in its stream.

use crate::device::Device;
use crate::error::Result;
use cudarc::driver::sys::{self, CUresult};
use std::ptr::null_mut;

/// Device memory; freed when dropped (which waits for the device).
pub struct Buffer {
    pub(crate) device: Device,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Buffer {
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.device.flush();
        // SAFETY: our own allocation, dropped once; the driver waits for kernels that use it.
        let _ = self.device.enter().map(|()| unsafe { sys::cuMemFree_v2(self.address) });
    }
}

/// Page-locked host memory, which the device reads and writes without the driver's help.
pub(crate) struct PinnedBuffer {
    device: Device,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Self> {
        device.enter()?;
        let mut pointer = null_mut();
        // SAFETY: one out-parameter.
        match unsafe { sys::cuMemAllocHost_v2(&mut pointer, bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                return Err(device.out_of_memory("page-locked host memory", bytes));
            }
            other => device.check("cuMemAllocHost", other)?,
        }
        Ok(Self { device: device.clone(), pointer: pointer.cast(), bytes })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where kernels find it: host and device have one address space.
    pub(crate) fn address(&self) -> u64 {
        self.pointer as u64
    }

    /// A word that a kernel may be writing.
    pub(crate) fn word(&self, at: usize) -> u64 {
        assert!(8 * at + 8 <= self.bytes, "a word lies inside its buffer");
        // SAFETY: inside of our own allocation, which is aligned; volatile because the device writes it, words at once.
        unsafe { self.pointer.cast::<u64>().add(at).read_volatile() }
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocation has that many bytes and this is its only owner.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// Enqueues a copy of a part of this memory; it must not be written again before the copy is done.
    pub(crate) fn enqueue_copy(&self, at: usize, bytes: usize, to: u64) -> Result<()> {
        assert!(at + bytes <= self.bytes, "a copy lies inside its buffer");
        self.device.enter()?;
        // SAFETY: the source range was checked, callers give a destination of that size.
        self.device.check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, self.pointer.add(at).cast(), bytes, self.device.stream())
        })
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: our own allocation, and the stream that may read it is done.
        let _ = self.device.enter().map(|()| unsafe { sys::cuMemFreeHost(self.pointer.cast()) });
    }
}

/// Copies device memory, by address, into these slices; waits once for all.
pub(crate) fn download_all(device: &Device, copies: &mut [(u64, &mut [u8])]) -> Result<()> {
    device.flush()?;
    device.enter()?;
    for (from, to) in copies.iter_mut() {
        // SAFETY: callers pass an address with that many bytes behind it; we wait before any slice is used.
        let copied =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), *from, to.len(), device.stream()) };
        if let Err(error) = device.check("cuMemcpyDtoHAsync", copied) {
            // Copies that were begun must not outlive the slices.
            let _ = device.synchronize();
            return Err(error);
        }
    }
    device.synchronize()
}

/// Copies these slices to device memory, by address; waits once for all.
pub(crate) fn upload_all(device: &Device, copies: &[(u64, &[u8])]) -> Result<()> {
    device.flush()?;
    device.enter()?;
    for (to, from) in copies {
        // SAFETY: callers pass an address with that many bytes behind it; the slices live until we have waited.
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(*to, from.as_ptr().cast(), from.len(), device.stream()) };
        if let Err(error) = device.check("cuMemcpyHtoDAsync", copied) {
            let _ = device.synchronize();
            return Err(error);
        }
    }
    device.synchronize()
}

/// A point in the stream.
pub struct Event {
    pub(crate) device: Device,
    pub(crate) event: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    pub fn record(&self) -> Result<()> {
        self.device.flush()?;
        self.device.enter()?;
        self.record_now()
    }

    /// [`Event::record`] without regard to what is being recorded.
    pub(crate) fn record_now(&self) -> Result<()> {
        // SAFETY: our own event and stream.
        self.device.check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, self.device.stream()) })
    }

    /// Has the stream passed this point? What failed before it is reported.
    pub fn has_passed(&self) -> Result<bool> {
        self.device.enter()?;
        // SAFETY: our own event.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => self.device.check("cuEventQuery", other).map(|()| true),
        }
    }

    /// Waits until the stream has passed this point. What failed before it is reported.
    pub fn wait(&self) -> Result<()> {
        self.device.enter()?;
        // SAFETY: our own event.
        self.device.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })
    }

    /// Microseconds from `earlier` to this point, both passed.
    pub fn us_since(&self, earlier: &Event) -> Result<f64> {
        self.wait()?;
        let mut milliseconds = 0f32;
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
        // SAFETY: two recorded events of one device. The function is looked up here because cudarc for CUDA 13 only
        // knows its successor, which older drivers lack; the signature is that of both.
        let result = unsafe {
            match sys::culib().get::<Elapsed>(b"cuEventElapsedTime") {
                Ok(elapsed) => elapsed(&mut milliseconds, earlier.event, self.event),
                Err(_) => CUresult::CUDA_ERROR_NOT_SUPPORTED,
            }
        };
        self.device.check("cuEventElapsedTime", result)?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: our own event, dropped once.
        let _ = self.device.enter().map(|()| unsafe { sys::cuEventDestroy_v2(self.event) });
    }
}
