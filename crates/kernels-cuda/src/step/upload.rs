//! Sends a step's tables: only the words that changed since the last step.

use super::plan::Words;
use crate::device::Device;
use crate::error::Result;
use crate::memory::{Buffer, DevicePtr};
use crate::transfers::Transfers;
use std::ops::Range;

/// The tables on the device.
#[derive(Default)]
pub struct TableUpload {
    buffer: Option<Buffer>,
    /// The words that the buffer holds once the stream has run the copies enqueued so far.
    sent: Vec<u32>,
}

impl TableUpload {
    /// Enqueues the copies that make the device's tables equal to `words`; returns where they
    /// begin.
    pub fn send(
        &mut self,
        device: &Device,
        transfers: &mut Transfers,
        words: &Words,
    ) -> Result<DevicePtr<u32>> {
        let bytes = 4 * words.words.len();
        let buffer = match self.buffer.take().filter(|b| b.bytes() >= bytes) {
            Some(buffer) => buffer,
            None => {
                self.sent.clear();
                device.alloc(bytes.next_power_of_two().max(1 << 16), "page tables")?
            }
        };
        let buffer = self.buffer.insert(buffer);
        // After a failure nothing is known about the device's copy.
        let mut sent = std::mem::take(&mut self.sent);
        // Page ids are most of the words and hardly change.
        for part in [0..words.full, words.full..words.demoted, words.demoted..words.words.len()] {
            if let Some(changed) = changed(&sent, &words.words, part) {
                let to = buffer.slice().part(changed.clone())?;
                transfers.enqueue(&words.words[changed], to)?;
            }
        }
        sent.clone_from(&words.words);
        self.sent = sent;
        Ok(buffer.ptr())
    }
}

/// The smallest range of `part` that holds all differences.
fn changed(old: &[u32], new: &[u32], part: Range<usize>) -> Option<Range<usize>> {
    // Equal words are skipped many at a time.
    const STRIDE: usize = 256;
    let stride = |start: usize| start..(start + STRIDE).min(part.end);
    let changes = |start: &usize| old.get(stride(*start)) != Some(&new[stride(*start)]);
    let differs = |at: &usize| old.get(*at) != Some(&new[*at]);
    let mut starts = part.clone().step_by(STRIDE);
    let first = starts.clone().find(changes)?;
    let last = starts.rfind(changes)?;
    let (first, last) = (stride(first).find(differs)?, stride(last).rfind(differs)?);
    Some(first..last + 1)
}

#[cfg(test)]
mod tests {
    use super::changed;

    #[test]
    fn what_changed_is_sent() {
        let old = [1, 2, 3, 4, 5];
        assert_eq!(changed(&old, &[1, 2, 3, 4, 5], 0..5), None);
        assert_eq!(changed(&old, &[1, 0, 3, 0, 5], 0..5), Some(1..4));
        assert_eq!(changed(&old, &[1, 0, 3, 0, 5], 2..5), Some(3..4));
        assert_eq!(changed(&old, &[1, 2], 0..2), None, "whatever lies behind them");
        assert_eq!(changed(&old, &[1, 0, 3, 4, 5, 6, 7], 1..7), Some(1..7));
        assert_eq!(changed(&old, &[1, 0, 3, 4, 5, 6, 7], 2..7), Some(5..7));
        assert_eq!(changed(&old, &[], 0..0), None);
        // Over many strides, from any start.
        let old: Vec<u32> = (0..3000).collect();
        for part in [0..3000, 7..2999, 256..512, 2900..3000] {
            for (a, b) in [(300, 300), (256, 511), (7, 2998), (2999, 2999), (0, 1), (2899, 2950)] {
                let mut new = old.clone();
                (new[a], new[b]) = (u32::MAX, u32::MAX);
                let inside: Vec<usize> = [a, b].into_iter().filter(|at| part.contains(at)).collect();
                let expected = inside.first().map(|&first| first..inside[inside.len() - 1] + 1);
                assert_eq!(changed(&old, &new, part.clone()), expected, "{part:?} {a} {b}");
            }
        }
    }
}
