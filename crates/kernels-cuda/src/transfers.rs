//! Small copies between host and device through page-locked memory: tables and numbers to the
//! device without waiting, results and chosen tokens back.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::memory::{DevicePtr, DeviceSlice, Event, PinnedBuffer};
use std::time::{Duration, Instant};

/// An answer word that no kernel has written yet.
pub const UNANSWERED: u64 = u64::MAX;

/// The page-locked buffers of a device.
pub struct Transfers {
    device: Device,
    /// Copies to the device start here. The ring is reused once the stream has passed them.
    ring: PinnedBuffer,
    next: usize,
    /// Copies from the device end here.
    landing: Option<PinnedBuffer>,
    /// Kernels write answers here; the host reads them without a copy.
    answer: PinnedBuffer,
    answered: Event,
    /// Whether kernels may still write an answer that nobody has read.
    unread: bool,
}

impl Transfers {
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            ring: PinnedBuffer::new(device, 16 << 20)?,
            next: 0,
            landing: None,
            answer: PinnedBuffer::new(device, 4096)?,
            answered: device.sleeping_event()?,
            unread: false,
        })
    }

    /// Enqueues a copy of `values` to the start of `to`.
    pub fn enqueue<T: bytemuck::NoUninit>(&mut self, values: &[T], to: DeviceSlice<'_, T>) -> Result<()> {
        let (bytes, to) = (bytemuck::cast_slice::<T, u8>(values), to.cast::<u8>());
        let mut sent = 0;
        for part in bytes.chunks(self.ring.bytes()) {
            let to = to.part(sent..sent + part.len())?;
            if self.next + part.len() > self.ring.bytes() {
                // The ring is full: its oldest bytes may still be on their way.
                self.device.synchronize()?;
                self.next = 0;
            }
            self.ring.slice_mut()[self.next..self.next + part.len()].copy_from_slice(part);
            // SAFETY: these bytes are written again only after the `synchronize` above.
            unsafe { self.ring.enqueue_copy(self.next, to) }?;
            self.next = (self.next + part.len()).next_multiple_of(16);
            sent += part.len();
        }
        Ok(())
    }

    /// Waits for the stream and appends the values of `from` to `out`.
    pub fn download<T: bytemuck::Pod>(&mut self, from: DeviceSlice<'_, T>, out: &mut Vec<T>) -> Result<()> {
        self.read(from, |part| out.extend_from_slice(part))
    }

    /// Waits for the stream and hands the values of `from` to `take`, in one or several parts.
    pub fn read<T: bytemuck::Pod>(
        &mut self,
        from: DeviceSlice<'_, T>,
        mut take: impl FnMut(&[T]),
    ) -> Result<()> {
        let most = (64 << 20) / size_of::<T>();
        for first in (0..from.len()).step_by(most) {
            let from = from.part(first..from.len().min(first + most))?;
            let bytes = size_of::<T>() * from.len();
            if self.landing.as_ref().is_none_or(|b| b.bytes() < bytes) {
                self.landing = None;
                self.landing = Some(PinnedBuffer::new(&self.device, bytes.next_power_of_two())?);
            }
            let Some(landing) = &mut self.landing else { continue };
            let part: &mut [T] = bytemuck::cast_slice_mut(&mut landing.slice_mut()[..bytes]);
            self.device.download(from, part)?;
            take(part);
        }
        if from.is_empty() {
            self.device.synchronize()?;
        }
        Ok(())
    }

    /// Clears room for an answer of `words` words. Kernels must write each word once, and never
    /// [`UNANSWERED`].
    pub fn expect_answer(&mut self, words: usize) -> Result<DevicePtr<u64>> {
        if std::mem::replace(&mut self.unread, true) {
            // An earlier request failed before its answer was read.
            self.device.synchronize()?;
        }
        if self.answer.bytes() < 8 * words {
            self.answer = PinnedBuffer::new(&self.device, (8 * words).next_power_of_two())?;
        }
        bytemuck::cast_slice_mut(&mut self.answer.slice_mut()[..8 * words]).fill(UNANSWERED);
        let empty =
            || CudaError::Shape { what: "a pick", detail: "there is no memory for its answer".into() };
        self.answer.ptr().ok_or_else(empty)
    }

    /// Marks the point in the stream behind the kernels that write the answer.
    pub fn answer_is_launched(&mut self) -> Result<()> {
        self.answered.record()
    }

    /// Waits for the answer, but not for launches behind it. The host polls the words: they arrive
    /// before the driver reports the event. Every 1024 looks it also asks the driver, in case the
    /// kernels failed. After 50 ms it sleeps in the driver, so that profilers and sanitizers, which
    /// slow kernels down, get the processor.
    pub fn read_answer(&mut self, words: &mut [u64]) -> Result<()> {
        const LOOKS: usize = 1024;
        const LONG: Duration = Duration::from_millis(50);
        let (mut left, began) = (0, Instant::now());
        loop {
            if left == 0 && began.elapsed() > LONG {
                self.answered.wait()?;
            }
            let passed = left == 0 && self.answered.has_passed()?;
            let missing = |(at, word): (usize, &mut u64)| {
                *word = self.answer.word(at);
                *word == UNANSWERED
            };
            if !words.iter_mut().enumerate().any(missing) {
                self.unread = false;
                return Ok(());
            }
            if passed {
                let detail = "the kernels are done and have not answered".into();
                return Err(CudaError::Shape { what: "a pick", detail });
            }
            left = if left == 0 { LOOKS } else { left - 1 };
            std::hint::spin_loop();
        }
    }
}
