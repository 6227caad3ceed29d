//! Whole blocks between their pages and the host.
//!
//! A block has a page in the region of every layer and head. A kernel gathers these parts into one run of
//! bytes, or scatters it, so that blocks travel in large copies through page-locked buffers. Several
//! threads copy between these buffers and the host's memory.

use crate::device::{Device, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::{Layout, shared_struct};
use crate::memory::{Buffer, DevicePtr, DeviceSlice};
use crate::pages::{CudaPages, Region};
use crate::sources::COPY_BLOCKS;
use crate::staging::{BUFFER_BYTES, MOST_BUFFERS, Staging};
use oscar_backend::BlockId;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Most blocks of a launch: their ids are parameters.
const MOST_IDS: usize = 96;
/// Bytes that a thread copies at a time, if a block has no more: all threads take part in a copy of some
/// buffers.
const TURN_BYTES: usize = BUFFER_BYTES / MOST_BUFFERS;

shared_struct! {
    /// The part of a block that belongs to one layer and head.
    #[derive(bytemuck::Pod, bytemuck::Zeroable)]
    pub(crate) struct BlockPiece {
        start: u64,
        offset: u64,
        bytes: u64,
    }
}

shared_struct! {
    struct CopyBlocksParams {
        pieces: DevicePtr<BlockPiece>,
        packed: DevicePtr<u8>,
        stride: u64,
        first: u64,
        scatter: u32,
        ids: [u32; MOST_IDS],
    }
}

pub(crate) const LAYOUTS: &[Layout] = &[BlockPiece::LAYOUT, CopyBlocksParams::LAYOUT];

/// The parts of every block of a kind, in the order of their bytes.
pub(crate) struct Pieces {
    table: Buffer,
    /// Runs of parts that fit into a buffer, with their place in the block.
    slices: Vec<Slice>,
    block_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Slice {
    pieces: Range<usize>,
    bytes: Range<usize>,
}

impl Pieces {
    pub fn upload<'a>(device: &Device, regions: impl Iterator<Item = &'a Region>) -> Result<Self> {
        let (mut pieces, mut sizes, mut offset) = (Vec::new(), Vec::new(), 0);
        for (start, bytes) in regions.map(Region::place) {
            if bytes % 16 != 0 {
                let detail = format!("{bytes} bytes, not a multiple of 16");
                return Err(CudaError::Shape { what: "a page", detail });
            }
            pieces.push(BlockPiece { start, offset: offset as u64, bytes: bytes as u64 });
            sizes.push(bytes);
            offset += bytes;
        }
        let table = device.upload_new(&pieces, "the table of the parts of blocks")?;
        Ok(Self { table, slices: slices(&sizes, BUFFER_BYTES), block_bytes: offset })
    }
}

/// Divides parts of these sizes into runs of at most `most` bytes; a part is never divided.
fn slices(sizes: &[usize], most: usize) -> Vec<Slice> {
    let mut all: Vec<Slice> = Vec::new();
    let mut end = 0;
    for (piece, bytes) in sizes.iter().enumerate() {
        match all.last_mut().filter(|last| last.bytes.len() + bytes <= most) {
            Some(last) => (last.pieces.end, last.bytes.end) = (piece + 1, end + bytes),
            None => all.push(Slice { pieces: piece..piece + 1, bytes: end..end + bytes }),
        }
        end += bytes;
    }
    all
}

/// Copies blocks.
#[derive(Default)]
pub(crate) struct BlockCopies {
    /// Blocks in one run of bytes. Whoever holds the lock enqueues the copy and the kernel that use it;
    /// those of the next one come behind them in the stream.
    packed: Mutex<Option<Buffer>>,
}

/// What the turns of one call share.
struct Call<'a> {
    copies: &'a BlockCopies,
    kernels: &'a Kernels,
    staging: &'a Staging,
    pool: &'a CudaPages,
}

impl BlockCopies {
    /// Appends the bytes of blocks to their `Vec`s.
    pub fn read(
        &self,
        kernels: &Kernels,
        staging: &Staging,
        pool: &CudaPages,
        blocks: &mut [(BlockId, &mut Vec<u8>)],
    ) -> Result<()> {
        pool.device().flush()?;
        let call = Call { copies: self, kernels, staging, pool };
        let mut turns: Vec<Turn<'_, &mut Vec<u8>>> = Vec::new();
        for (block, out) in blocks {
            add_turn(pool, &mut turns, *block, &mut **out)?;
        }
        in_parallel(turns, |turn| call.read(turn))
    }

    /// Replaces the bytes of blocks. The device has them when this returns.
    pub fn write(
        &self,
        kernels: &Kernels,
        staging: &Staging,
        pool: &mut CudaPages,
        blocks: &[(BlockId, &[u8])],
    ) -> Result<()> {
        for (block, bytes) in blocks {
            let expected = block.bytes(pool.layout());
            if bytes.len() != expected {
                let detail = format!("{} bytes, not {expected}", bytes.len());
                return Err(CudaError::Shape { what: "a block", detail });
            }
        }
        pool.ensure_blocks(blocks.iter().map(|(block, _)| *block))?;
        pool.device().flush()?;
        let call = Call { copies: self, kernels, staging, pool };
        let mut turns: Vec<Turn<'_, &[u8]>> = Vec::new();
        for (block, bytes) in blocks {
            add_turn(pool, &mut turns, *block, *bytes)?;
        }
        let written = in_parallel(turns, |turn| call.write(&turn));
        // Kernels of a step may begin before their predecessors end and read old pages at once.
        written.and(pool.device().synchronize())
    }
}

/// Blocks that one thread copies, with their host memory.
struct Turn<'a, T> {
    pieces: &'a Pieces,
    blocks: Vec<(u32, T)>,
}

fn add_turn<'a, T>(
    pool: &'a CudaPages,
    turns: &mut Vec<Turn<'a, T>>,
    block: BlockId,
    memory: T,
) -> Result<()> {
    let (pieces, id) = pool.pieces(block)?;
    let expected = block.bytes(pool.layout());
    if pieces.block_bytes != expected {
        let detail = format!("its parts have {} bytes, not {expected}", pieces.block_bytes);
        return Err(CudaError::Shape { what: "a block", detail });
    }
    let most = (TURN_BYTES / pieces.block_bytes.max(1)).clamp(1, MOST_IDS);
    let fits = |turn: &&mut Turn<'a, T>| std::ptr::eq(turn.pieces, pieces) && turn.blocks.len() < most;
    match turns.last_mut().filter(fits) {
        Some(turn) => turn.blocks.push((id, memory)),
        None => turns.push(Turn { pieces, blocks: vec![(id, memory)] }),
    }
    Ok(())
}

impl Call<'_> {
    fn read(&self, mut turn: Turn<'_, &mut Vec<u8>>) -> Result<()> {
        for slice in &turn.pieces.slices {
            let (ids, stride) = (ids(&turn), slice.bytes.len());
            self.staging.with_slot(|slot| {
                self.with_packed(stride * turn.blocks.len(), |packed| {
                    self.launch(&turn.pieces.table, slice, packed, turn.blocks.len(), ids, false)?;
                    slot.receive(packed)
                })?;
                let bytes = slot.received(stride * turn.blocks.len())?;
                for ((_, out), part) in turn.blocks.iter_mut().zip(bytes.chunks_exact(stride.max(1))) {
                    out.extend_from_slice(part);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn write(&self, turn: &Turn<'_, &[u8]>) -> Result<()> {
        for slice in &turn.pieces.slices {
            let (ids, stride) = (ids(turn), slice.bytes.len());
            self.staging.with_slot(|slot| {
                slot.fill(stride * turn.blocks.len(), |place| {
                    for ((_, bytes), place) in turn.blocks.iter().zip(place.chunks_exact_mut(stride.max(1))) {
                        place.copy_from_slice(&bytes[slice.bytes.clone()]);
                    }
                })?;
                self.with_packed(stride * turn.blocks.len(), |packed| {
                    slot.send(packed)?;
                    self.launch(&turn.pieces.table, slice, packed, turn.blocks.len(), ids, true)
                })
            })?;
        }
        Ok(())
    }

    fn with_packed(&self, bytes: usize, work: impl FnOnce(DeviceSlice<'_, u8>) -> Result<()>) -> Result<()> {
        let mut packed = self.copies.packed.lock().unwrap_or_else(PoisonError::into_inner);
        if packed.is_none() {
            *packed =
                Some(self.pool.device().alloc(BUFFER_BYTES, "blocks on their way to or from the host")?);
        }
        packed.as_ref().map_or(Ok(()), |buffer| work(buffer.slice().part(0..bytes)?))
    }

    fn launch(
        &self,
        table: &Buffer,
        slice: &Slice,
        packed: DeviceSlice<'_, u8>,
        blocks: usize,
        ids: [u32; MOST_IDS],
        scatter: bool,
    ) -> Result<()> {
        if packed.is_empty() {
            return Ok(());
        }
        let function = self.kernels.function(&COPY_BLOCKS, &Vec::new(), c"copy_blocks", 0)?;
        let p = CopyBlocksParams {
            pieces: table.ptr::<BlockPiece>().add(slice.pieces.start),
            packed: packed.ptr(),
            stride: slice.bytes.len() as u64,
            first: slice.bytes.start as u64,
            scatter: u32::from(scatter),
            ids,
        };
        let shape = LaunchShape::grid2(slice.pieces.len(), blocks, 128);
        // SAFETY: the pages have memory (`CudaPages::pieces`), and `packed` has room for the slice of each
        // of the blocks.
        unsafe { self.pool.device().launch(function, shape, p) }
    }
}

fn ids<T>(turn: &Turn<'_, T>) -> [u32; MOST_IDS] {
    let mut ids = [0; MOST_IDS];
    ids.iter_mut().zip(&turn.blocks).for_each(|(to, (id, _))| *to = *id);
    ids
}

/// Runs all turns, on several threads if there are several.
fn in_parallel<T: Send>(turns: Vec<T>, run: impl Fn(T) -> Result<()> + Sync) -> Result<()> {
    let most = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_BUFFERS);
    let threads = turns.len().min(most);
    let turns = Mutex::new(turns.into_iter());
    let next = || turns.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || std::iter::from_fn(next).try_for_each(&run);
    if threads < 2 {
        return work();
    }
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        // A panic continues in this thread. Every worker has ended when the scope does.
        let join = |worker: std::thread::ScopedJoinHandle<'_, Result<()>>| {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().map(join).fold(Ok(()), Result::and)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_all_parts_and_divide_none() {
        assert_eq!(slices(&[], 10), []);
        let slice = |pieces, bytes| Slice { pieces, bytes };
        assert_eq!(slices(&[4, 0, 6], 10), [slice(0..3, 0..10)]);
        assert_eq!(
            slices(&[4, 6, 1, 9, 3], 10),
            [slice(0..2, 0..10), slice(2..4, 10..20), slice(4..5, 20..23)]
        );
    }

    #[test]
    fn every_turn_runs_once_and_an_error_is_told() {
        let done = Mutex::new(vec![0; 100]);
        in_parallel((0..100).collect(), |turn: usize| {
            done.lock().unwrap()[turn] += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(*done.lock().unwrap(), [1; 100]);
        let fails = |turn: i32| match turn {
            3 => Err(CudaError::NoDriver),
            _ => Ok(()),
        };
        assert!(matches!(in_parallel(vec![1, 2, 3, 4, 5], fails), Err(CudaError::NoDriver)));
    }
}
