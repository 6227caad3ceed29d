//! Memory that the device can reach, typed pointers into it, and points in the stream.
//!
//! A [`DevicePtr`] is only an address: making one, or moving it, is safe; a launch that uses it is
//! `unsafe`. A [`DeviceSlice`] borrows the memory behind it and knows its length, so copies between
//! slices are safe.
//!
//! **Invariant:** memory is freed only when the stream has run everything that was enqueued before.
//! So it is enough that a buffer lives until the call that enqueues its use has returned.

use crate::device::Device;
use crate::error::{CudaError, Result};
use cudarc::driver::sys::{self, CUresult};
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::ops::Range;
use std::ptr::null_mut;

/// The address of a `T` in memory that the device can reach. `Option<DevicePtr<T>>` has a null.
#[repr(transparent)]
pub struct DevicePtr<T>(NonZeroU64, PhantomData<fn() -> T>);

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtr<T> {}

impl<T> fmt::Debug for DevicePtr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl<T> DevicePtr<T> {
    /// `None` for address 0.
    pub(crate) fn new(address: u64) -> Option<Self> {
        NonZeroU64::new(address).map(|address| Self(address, PhantomData))
    }

    pub(crate) fn address(self) -> u64 {
        self.0.get()
    }

    /// The pointer `count` elements further.
    pub(crate) fn add(self, count: usize) -> Self {
        Self(self.0.saturating_add((count * size_of::<T>()) as u64), PhantomData)
    }

    pub(crate) fn cast<U>(self) -> DevicePtr<U> {
        DevicePtr(self.0, PhantomData)
    }
}

/// `len` elements in device memory, borrowed.
pub struct DeviceSlice<'a, T> {
    start: DevicePtr<T>,
    len: usize,
    memory: PhantomData<&'a Buffer>,
}

impl<T> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<'_, T> {}

impl<'a, T> DeviceSlice<'a, T> {
    /// # Safety
    /// `len` elements at `start` must be device memory that lives for `'a` and that is freed as the
    /// invariant of this module says.
    pub(crate) unsafe fn new(start: DevicePtr<T>, len: usize) -> Self {
        Self { start, len, memory: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn ptr(&self) -> DevicePtr<T> {
        self.start
    }

    /// A part of the slice.
    pub fn part(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.len {
            let detail = format!("{range:?} of {} elements", self.len);
            return Err(CudaError::Shape { what: "a slice of device memory", detail });
        }
        Ok(Self { start: self.start.add(range.start), len: range.len(), memory: PhantomData })
    }

    /// The same memory as elements of another type; a rest that is no whole element is left out.
    pub(crate) fn cast<U>(&self) -> DeviceSlice<'a, U> {
        let len = self.len * size_of::<T>() / size_of::<U>();
        DeviceSlice { start: self.start.cast(), len, memory: PhantomData }
    }
}

/// Device memory. Freed when dropped, after the stream has run everything enqueued so far.
pub struct Buffer {
    device: Device,
    start: DevicePtr<u8>,
    bytes: usize,
}

impl Buffer {
    /// Memory with undefined contents; at least one byte.
    pub(crate) fn new(device: &Device, bytes: usize, what: &str) -> Result<Self> {
        device.admit(bytes, what)?;
        device.enter()?;
        let mut address = 0;
        // SAFETY: one out-parameter; the driver refuses a size of zero, so it is made one byte.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(device.out_of_memory(what, bytes)),
            other => device.check("cuMemAlloc", other)?,
        }
        let start = DevicePtr::new(address).ok_or_else(|| device.out_of_memory(what, bytes))?;
        Ok(Self { device: device.clone(), start, bytes })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The whole buffer as elements of a type.
    pub fn slice<T: bytemuck::AnyBitPattern>(&self) -> DeviceSlice<'_, T> {
        let len = self.bytes / size_of::<T>();
        // SAFETY: our own allocation, borrowed; allocations of the driver are aligned to 256 bytes.
        unsafe { DeviceSlice::new(self.start.cast(), len) }
    }

    /// The start of the buffer.
    pub(crate) fn ptr<T>(&self) -> DevicePtr<T> {
        self.start.cast()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        // SAFETY: our own allocation, dropped once, and the stream that may use it is done.
        let _ = self.device.enter().map(|()| unsafe { sys::cuMemFree_v2(self.start.address()) });
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

    /// The address that kernels use: host and device have one address space. `None` if it is empty.
    pub(crate) fn ptr<T>(&self) -> Option<DevicePtr<T>> {
        DevicePtr::new(self.pointer as u64)
    }

    /// A word that a kernel may be writing.
    pub(crate) fn word(&self, at: usize) -> u64 {
        assert!(8 * at + 8 <= self.bytes, "a word lies inside its buffer");
        // SAFETY: inside of our own allocation, which is aligned. Volatile, because the device
        // writes it; it writes words whole.
        unsafe { self.pointer.cast::<u64>().add(at).read_volatile() }
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocation has that many bytes and this is its only owner.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// Enqueues a copy of this memory from byte `at` on, as long as `to`.
    ///
    /// # Safety
    /// The bytes must not be written before the stream has run the copy.
    pub(crate) unsafe fn enqueue_copy(&self, at: usize, to: DeviceSlice<'_, u8>) -> Result<()> {
        assert!(at + to.len() <= self.bytes, "a copy lies inside its buffer");
        self.device.enter()?;
        // SAFETY: both ranges are allocated and equally long.
        self.device.check("cuMemcpyHtoDAsync", unsafe {
            let from = self.pointer.add(at).cast();
            sys::cuMemcpyHtoDAsync_v2(to.ptr().address(), from, to.len(), self.device.stream())
        })
    }

    /// Enqueues a copy of `from` to the start of this memory.
    ///
    /// # Safety
    /// The bytes must not be used before the stream has run the copy.
    pub(crate) unsafe fn enqueue_fetch(&mut self, from: DeviceSlice<'_, u8>) -> Result<()> {
        assert!(from.len() <= self.bytes, "a copy lies inside its buffer");
        self.device.enter()?;
        // SAFETY: both ranges are allocated and equally long.
        self.device.check("cuMemcpyDtoHAsync", unsafe {
            let (from, bytes) = (from.ptr().address(), from.len());
            sys::cuMemcpyDtoHAsync_v2(self.pointer.cast(), from, bytes, self.device.stream())
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

fn check_lengths(device: usize, host: usize) -> Result<()> {
    match device == host {
        true => Ok(()),
        false => {
            let detail = format!("{device} bytes on the device, {host} on the host");
            Err(CudaError::Shape { what: "a copy", detail })
        }
    }
}

/// Copies device memory into host slices of the same lengths; waits once for all.
pub(crate) fn download_all(device: &Device, copies: &mut [(DeviceSlice<'_, u8>, &mut [u8])]) -> Result<()> {
    copies.iter().try_for_each(|(from, to)| check_lengths(from.len(), to.len()))?;
    device.flush()?;
    device.enter()?;
    for (from, to) in copies.iter_mut().filter(|(from, _)| !from.is_empty()) {
        // SAFETY: both ranges are allocated and equally long; we wait before any slice is used.
        let copied = unsafe {
            let (to, bytes) = (to.as_mut_ptr().cast(), to.len());
            sys::cuMemcpyDtoHAsync_v2(to, from.ptr().address(), bytes, device.stream())
        };
        if let Err(error) = device.check("cuMemcpyDtoHAsync", copied) {
            // Copies that were started must not outlive the slices.
            let _ = device.synchronize();
            return Err(error);
        }
    }
    device.synchronize()
}

/// Copies host slices to device memory of the same lengths; waits once for all.
pub(crate) fn upload_all(device: &Device, copies: &[(DeviceSlice<'_, u8>, &[u8])]) -> Result<()> {
    copies.iter().try_for_each(|(to, from)| check_lengths(to.len(), from.len()))?;
    device.flush()?;
    device.enter()?;
    for (to, from) in copies.iter().filter(|(to, _)| !to.is_empty()) {
        // SAFETY: both ranges are allocated and equally long; the slices live until we have waited.
        let copied = unsafe {
            let (to, from, bytes) = (to.ptr().address(), from.as_ptr().cast(), from.len());
            sys::cuMemcpyHtoDAsync_v2(to, from, bytes, device.stream())
        };
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
    /// Puts the point behind everything enqueued so far.
    pub fn record(&self) -> Result<()> {
        self.device.flush()?;
        self.device.enter()?;
        self.record_now()
    }

    /// Puts the point behind everything handed to the driver; noted launches come after it.
    pub(crate) fn record_now(&self) -> Result<()> {
        // SAFETY: our own event and stream.
        self.device.check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, self.device.stream()) })
    }

    /// Whether the stream has passed this point. Earlier failures of the stream are reported.
    pub fn has_passed(&self) -> Result<bool> {
        self.device.enter()?;
        // SAFETY: our own event.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => self.device.check("cuEventQuery", other).map(|()| true),
        }
    }

    /// Waits until the stream has passed this point. Earlier failures of the stream are reported.
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
        // SAFETY: two recorded events of one device. The function is looked up here because cudarc
        // for CUDA 13 only knows its successor, which older drivers lack; both have this signature.
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
