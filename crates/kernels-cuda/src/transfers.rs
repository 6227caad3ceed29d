//! Small copies between host and device through page-locked memory: tables and numbers to the device
//! without waiting, results and chosen tokens back.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::memory::{Event, PinnedBuffer};
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

    /// Enqueues a copy of `bytes` to the device address `to`, which must have room for them.
    pub fn enqueue(&mut self, bytes: &[u8], to: u64) -> Result<()> {
        let mut to = to;
        for part in bytes.chunks(self.ring.bytes()) {
            if self.next + part.len() > self.ring.bytes() {
                // The ring is full: its oldest bytes may still be on their way.
                self.device.synchronize()?;
                self.next = 0;
            }
            self.ring.slice_mut()[self.next..self.next + part.len()].copy_from_slice(part);
            self.ring.enqueue_copy(self.next, part.len(), to)?;
            self.next = (self.next + part.len()).next_multiple_of(16);
            to += part.len() as u64;
        }
        Ok(())
    }

    /// Waits for the stream and appends `count` f32 at the device address `from` to `out`.
    pub fn download(&mut self, from: u64, count: usize, out: &mut Vec<f32>) -> Result<()> {
        const MOST: usize = 64 << 20;
        for first in (0..count).step_by(MOST / 4) {
            let bytes = (count - first).min(MOST / 4) * 4;
            if self.landing.as_ref().is_none_or(|b| b.bytes() < bytes) {
                self.landing = None;
                self.landing = Some(PinnedBuffer::new(&self.device, bytes.next_power_of_two())?);
            }
            let Some(landing) = &mut self.landing else { continue };
            let part = &mut landing.slice_mut()[..bytes];
            self.device.download_raw(from + 4 * first as u64, part)?;
            out.extend_from_slice(bytemuck::cast_slice(part));
        }
        if count == 0 {
            self.device.synchronize()?;
        }
        Ok(())
    }

    /// Clears room for an answer of `words` words and returns its device address. Kernels must write
    /// each word once, and never [`UNANSWERED`].
    pub fn expect_answer(&mut self, words: usize) -> Result<u64> {
        if std::mem::replace(&mut self.unread, true) {
            // An earlier request failed before its answer was read.
            self.device.synchronize()?;
        }
        if self.answer.bytes() < 8 * words {
            self.answer = PinnedBuffer::new(&self.device, (8 * words).next_power_of_two())?;
        }
        bytemuck::cast_slice_mut(&mut self.answer.slice_mut()[..8 * words]).fill(UNANSWERED);
        Ok(self.answer.address())
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
