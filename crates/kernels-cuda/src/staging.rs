//! Large copies through page-locked buffers: several threads fill or empty them while the copy engine
//! works on others.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::memory::{DeviceSlice, Event, PinnedBuffer};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of a buffer: long enough for the full rate of a copy.
pub(crate) const BUFFER_BYTES: usize = 16 << 20;
/// Most buffers; each belongs to one thread at a time.
pub(crate) const MOST_BUFFERS: usize = 8;

/// The page-locked buffers of a device. They are made when they are first needed.
pub(crate) struct Staging {
    device: Device,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    idle: Vec<Slot>,
    made: usize,
}

/// A buffer and its last copy.
pub(crate) struct Slot {
    buffer: PinnedBuffer,
    /// The stream has passed it when the buffer's last copy is done.
    copied: Event,
}

impl Staging {
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), state: Mutex::default(), returned: Condvar::new() }
    }

    /// Copies values that `fill` writes: it gets a range of elements of `to` and their place. The copies
    /// are enqueued when this returns.
    pub fn send<T: bytemuck::Pod>(
        &self,
        to: DeviceSlice<'_, T>,
        fill: impl Fn(Range<usize>, &mut [T]),
    ) -> Result<()> {
        let most = BUFFER_BYTES / size_of::<T>();
        for first in (0..to.len()).step_by(most.max(1)) {
            let range = first..to.len().min(first + most);
            let to = to.part(range.clone())?;
            self.with_slot(|slot| {
                slot.fill(size_of::<T>() * to.len(), |place| fill(range, bytemuck::cast_slice_mut(place)))?;
                slot.send(to.cast())
            })?;
        }
        Ok(())
    }

    /// Copies values as they are.
    pub fn send_plain<T: bytemuck::Pod>(&self, values: &[T], to: DeviceSlice<'_, T>) -> Result<()> {
        if values.len() != to.len() {
            let detail = format!("{} values into {}", values.len(), to.len());
            return Err(CudaError::Shape { what: "an upload", detail });
        }
        self.send(to, |range, place| place.copy_from_slice(&values[range]))
    }

    /// Lends a buffer that nobody uses; waits for one if all are taken.
    pub fn with_slot<T>(&self, work: impl FnOnce(&mut Slot) -> Result<T>) -> Result<T> {
        let mut slot = self.take()?;
        let done = work(&mut slot);
        self.give_back(slot);
        done
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Result<Slot> {
        let mut state = self.state();
        loop {
            if let Some(slot) = state.idle.pop() {
                return Ok(slot);
            }
            if state.made < MOST_BUFFERS {
                state.made += 1;
                drop(state);
                return Slot::new(&self.device).inspect_err(|_| self.state().made -= 1);
            }
            state = self.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give_back(&self, slot: Slot) {
        // The one used last comes last: its copy has the most time to end.
        self.state().idle.insert(0, slot);
        self.returned.notify_one();
    }
}

impl Slot {
    fn new(device: &Device) -> Result<Self> {
        Ok(Self { buffer: PinnedBuffer::new(device, BUFFER_BYTES)?, copied: device.sleeping_event()? })
    }

    /// Lets `fill` write the first `bytes` of the buffer, once its last copy is done.
    pub fn fill(&mut self, bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.copied.wait()?;
        fill(&mut self.buffer.slice_mut()[..bytes]);
        Ok(())
    }

    /// Enqueues a copy of the first bytes, as many as `to` has.
    pub fn send(&mut self, to: DeviceSlice<'_, u8>) -> Result<()> {
        // SAFETY: the bytes are written again only after the event behind this copy was waited for.
        unsafe { self.buffer.enqueue_copy(0, to) }?;
        self.copied.record_now()
    }

    /// Enqueues a copy of `from` to the first bytes, once the buffer's last copy is done.
    pub fn receive(&mut self, from: DeviceSlice<'_, u8>) -> Result<()> {
        self.copied.wait()?;
        // SAFETY: the bytes are used again only after the event behind this copy was waited for.
        unsafe { self.buffer.enqueue_fetch(from) }?;
        self.copied.record_now()
    }

    /// The first `bytes` of the buffer, once its last copy is done.
    pub fn received(&mut self, bytes: usize) -> Result<&[u8]> {
        self.copied.wait()?;
        Ok(&self.buffer.slice_mut()[..bytes])
    }
}
