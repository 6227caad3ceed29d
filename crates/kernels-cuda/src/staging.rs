//! Large copies to the device through page-locked buffers: several threads fill them while the copy
//! engine empties others.

use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::memory::{DeviceSlice, Event, PinnedBuffer};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of a buffer: long enough for the full rate of a copy.
const BUFFER_BYTES: usize = 16 << 20;
/// Most buffers; each belongs to one thread at a time.
const MOST_BUFFERS: usize = 8;

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

struct Slot {
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
            let mut slot = self.take()?;
            let sent = slot.send(to.part(range.clone())?, |place| fill(range, place));
            self.give_back(slot);
            sent?;
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer that nobody uses; waits for one if all are taken.
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

    fn send<T: bytemuck::Pod>(&mut self, to: DeviceSlice<'_, T>, fill: impl FnOnce(&mut [T])) -> Result<()> {
        self.copied.wait()?;
        let to_bytes = to.cast::<u8>();
        fill(bytemuck::cast_slice_mut(&mut self.buffer.slice_mut()[..to_bytes.len()]));
        // SAFETY: the bytes are written again only after the event behind this copy was waited for.
        unsafe { self.buffer.enqueue_copy(0, to_bytes) }?;
        self.copied.record_now()
    }
}
