//! GPUs as ranks of one model, connected by NCCL, which is loaded at run time.
//!
//! NCCL's own sums depend on the number of values and on the machine, so only its all-gather is used; a
//! kernel then adds the parts in rank order, as [`Communicator`] wants.
//!
//! **Limits:** a rank that leaves a step ends its own connection. Others that already wait for it in NCCL
//! wait on, and the connection cannot be used again: all ranks must be made anew.

use crate::backend::grow;
use crate::device::{Device, LaunchShape};
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::{Layout, shared_struct};
use crate::library::{NCCL, symbol};
use crate::memory::{Buffer, DevicePtr, DeviceSlice};
use crate::sources::RANKS;
use cudarc::driver::sys::CUstream;
use oscar_backend::{Communicator, Result as BackendResult};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The name of a group of ranks. The first rank makes it and sends it to the others by any channel.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NcclId([c_char; 128]);

type Comm = *mut c_void;
const FLOAT32: c_int = 7;

/// The functions of the library that are used.
struct Functions {
    init: unsafe extern "C" fn(*mut Comm, c_int, NcclId, c_int) -> c_int,
    gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, CUstream) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    message: unsafe extern "C" fn(c_int) -> *const c_char,
    id: unsafe extern "C" fn(*mut NcclId) -> c_int,
    version: c_int,
}

impl Functions {
    fn load() -> Result<Self> {
        let path = NCCL.open()?;
        let version: unsafe extern "C" fn(*mut c_int) -> c_int = function(&path, c"ncclGetVersion")?;
        let mut number = 0;
        // SAFETY: one out-parameter.
        if unsafe { version(&mut number) } != 0 {
            let message = "it does not tell its version".into();
            return Err(CudaError::Library { call: "ncclGetVersion", message });
        }
        Ok(Self {
            init: function(&path, c"ncclCommInitRank")?,
            gather: function(&path, c"ncclAllGather")?,
            abort: function(&path, c"ncclCommAbort")?,
            destroy: function(&path, c"ncclCommDestroy")?,
            message: function(&path, c"ncclGetErrorString")?,
            id: function(&path, c"ncclGetUniqueId")?,
            version: number,
        })
    }

    fn check(&self, call: &'static str, result: c_int) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a static string for every number.
        let message = unsafe { CStr::from_ptr((self.message)(result)) }.to_string_lossy().into_owned();
        Err(CudaError::Library { call, message })
    }
}

/// A function of the library. `F` must be its type.
fn function<F: Copy>(path: &Path, name: &'static CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let address = symbol(path, name)?;
    // SAFETY: NCCL's C interface is stable: these functions have had these types since NCCL 2.4.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

shared_struct! {
    struct SumRanksParams {
        /// Values of rank 0, then those of rank 1 and so on.
        parts: DevicePtr<f32>,
        out: DevicePtr<f32>,
        count: u64,
        ranks: u32,
    }
}

shared_struct! {
    struct CopyColumnsParams {
        from: DevicePtr<f32>,
        to: DevicePtr<f32>,
        from_stride: u32,
        to_stride: u32,
        width: u32,
    }
}

pub(crate) const LAYOUTS: &[Layout] = &[SumRanksParams::LAYOUT, CopyColumnsParams::LAYOUT];

/// One GPU among the ranks that share a model.
pub struct NcclRank {
    device: Device,
    kernels: Kernels,
    functions: Functions,
    rank: usize,
    ranks: usize,
    state: Mutex<State>,
}

struct State {
    /// `None` once a rank has left a step.
    comm: Option<Comm>,
    parts: Option<Buffer>,
    own: Option<Buffer>,
}

// SAFETY: a communicator may be used from any thread by one at a time; the lock sees to that.
unsafe impl Send for State {}

impl NcclId {
    /// A new group.
    pub fn new() -> Result<Self> {
        let functions = Functions::load()?;
        let mut id = Self([0; 128]);
        // SAFETY: one out-parameter of NCCL's size.
        functions.check("ncclGetUniqueId", unsafe { (functions.id)(&mut id) })?;
        Ok(id)
    }
}

impl NcclRank {
    /// Joins a group. Returns when all its ranks have called this.
    pub fn join(device: &Device, id: NcclId, rank: usize, ranks: usize) -> Result<Self> {
        if rank >= ranks {
            let detail = format!("rank {rank} of {ranks}");
            return Err(CudaError::Shape { what: "a group of ranks", detail });
        }
        let functions = Functions::load()?;
        device.enter()?;
        let mut comm = null_mut();
        // SAFETY: an out-parameter; the context of the device is current.
        let joined = unsafe { (functions.init)(&mut comm, ranks as c_int, id, rank as c_int) };
        functions.check("ncclCommInitRank", joined)?;
        let state = Mutex::new(State { comm: Some(comm), parts: None, own: None });
        Ok(Self { device: device.clone(), kernels: Kernels::new(device)?, functions, rank, ranks, state })
    }

    /// The version of the library, e.g. 22803 for 2.28.3.
    pub fn version(&self) -> i32 {
        self.functions.version
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues the exchange of `own`: `parts` gets the values of all ranks, in rank order.
    fn gather(
        &self,
        comm: Option<Comm>,
        own: DeviceSlice<'_, f32>,
        parts: DeviceSlice<'_, f32>,
    ) -> Result<()> {
        let Some(comm) = comm else {
            return Err(CudaError::Unsupported(
                "a rank has left an earlier step: start the ranks again".into(),
            ));
        };
        assert_eq!(parts.len(), self.ranks * own.len(), "room for the values of all ranks");
        self.device.flush()?;
        self.device.enter()?;
        let (from, to) = (own.ptr().address() as *const c_void, parts.ptr().address() as *mut c_void);
        // SAFETY: both ranges are allocated and as long as NCCL expects; the stream is the device's, and
        // memory is freed only when it is done.
        let done =
            unsafe { (self.functions.gather)(from, to, own.len(), FLOAT32, comm, self.device.stream()) };
        self.functions.check("ncclAllGather", done)
    }

    /// Enqueues `values ← Σ values` over all ranks, in rank order.
    pub fn sum(&self, values: DeviceSlice<'_, f32>) -> Result<()> {
        let State { comm, parts, .. } = &mut *self.state();
        let bytes = 4 * self.ranks * values.len();
        let (parts, _) = grow(&self.device, parts, bytes, "the values of all ranks")?;
        let parts = parts.slice().part(0..self.ranks * values.len())?;
        self.gather(*comm, values, parts)?;
        sum_ranks(&self.device, &self.kernels, parts, values)
    }

    /// Enqueues `whole ← [part of rank 0 | part of rank 1 | …]` for this many rows. Parts are as even as
    /// they get.
    pub fn join_rows(
        &self,
        rows: usize,
        part: DeviceSlice<'_, f32>,
        whole: DeviceSlice<'_, f32>,
    ) -> Result<()> {
        let width = whole.len() / rows.max(1);
        let begin = |rank: usize| width * rank / self.ranks;
        let own_width = begin(self.rank + 1) - begin(self.rank);
        if rows == 0 || whole.len() != rows * width || part.len() != rows * own_width {
            let detail = format!("{rows} rows, {} values of {} to join", part.len(), whole.len());
            return Err(CudaError::Shape { what: "rows of ranks", detail });
        }
        let longest = width.div_ceil(self.ranks);
        let State { comm, parts, own } = &mut *self.state();
        let (own, _) = grow(&self.device, own, 4 * rows * longest, "the values of this rank")?;
        let own = own.slice().part(0..rows * longest)?;
        let all = self.ranks * rows * longest;
        let (parts, _) = grow(&self.device, parts, 4 * all, "the values of all ranks")?;
        let parts: DeviceSlice<'_, f32> = parts.slice().part(0..all)?;
        self.copy_columns(rows, own_width, (part, own_width), (own, longest))?;
        self.gather(*comm, own, parts)?;
        for rank in 0..self.ranks {
            let from = parts.part(rank * rows * longest..(rank + 1) * rows * longest)?;
            let to = whole.part(begin(rank)..whole.len())?;
            self.copy_columns(rows, begin(rank + 1) - begin(rank), (from, longest), (to, width))?;
        }
        Ok(())
    }

    /// Enqueues copies of the first columns of rows that lie a stride apart.
    fn copy_columns(
        &self,
        rows: usize,
        width: usize,
        (from, from_stride): (DeviceSlice<'_, f32>, usize),
        (to, to_stride): (DeviceSlice<'_, f32>, usize),
    ) -> Result<()> {
        let last = |stride: usize| (rows - 1) * stride + width;
        if width == 0 {
            return Ok(());
        }
        if last(from_stride) > from.len() || last(to_stride) > to.len() {
            let detail = format!("{width} columns of {rows} rows from {} to {}", from.len(), to.len());
            return Err(CudaError::Shape { what: "a copy of columns", detail });
        }
        let p = CopyColumnsParams {
            from: from.ptr(),
            to: to.ptr(),
            from_stride: from_stride as u32,
            to_stride: to_stride as u32,
            width: width as u32,
        };
        let function = self.kernels.function(&RANKS, &Vec::new(), c"copy_columns", 0)?;
        let shape = LaunchShape::grid2(width.div_ceil(256), rows, 256);
        // SAFETY: both slices have all the columns (above).
        unsafe { self.device.launch(function, shape, p) }
    }

    /// The values of all ranks, each as many as `own`, in rank order.
    fn exchange(&self, values: &[f32]) -> Result<Vec<f32>> {
        let State { comm, parts, own } = &mut *self.state();
        let count = values.len();
        let (own, _) = grow(&self.device, own, 4 * count, "the values of this rank")?;
        let own = own.slice().part(0..count)?;
        let (parts, _) = grow(&self.device, parts, 4 * self.ranks * count, "the values of all ranks")?;
        let parts = parts.slice().part(0..self.ranks * count)?;
        self.device.upload(values, own)?;
        self.gather(*comm, own, parts)?;
        let mut all = vec![0.0; parts.len()];
        self.device.download(parts, &mut all)?;
        Ok(all)
    }
}

impl Drop for NcclRank {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        if let Some(comm) = self.state().comm.take() {
            // SAFETY: our own communicator, ended once; the stream that used it is done.
            let _ = self.device.enter().map(|()| unsafe { (self.functions.destroy)(comm) });
        }
    }
}

/// Enqueues the sum of the parts of ranks, each as long as `out`: `((part 0 + part 1) + part 2) + …`.
pub fn sum_ranks(
    device: &Device,
    kernels: &Kernels,
    parts: DeviceSlice<'_, f32>,
    out: DeviceSlice<'_, f32>,
) -> Result<()> {
    let (count, ranks) = (out.len(), parts.len() / out.len().max(1));
    if count == 0 || ranks * count != parts.len() {
        let detail = format!("{} values of ranks for sums of {count}", parts.len());
        return Err(CudaError::Shape { what: "a sum over ranks", detail });
    }
    let p = SumRanksParams { parts: parts.ptr(), out: out.ptr(), count: count as u64, ranks: ranks as u32 };
    let function = kernels.function(&RANKS, &Vec::new(), c"sum_ranks", 0)?;
    let shape = LaunchShape::new(count.div_ceil(256).min(1 << 16), 256);
    // SAFETY: the slices have as many values as the parameters say.
    unsafe { device.launch(function, shape, p) }
}

impl Communicator for NcclRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_reduce(&self, values: &mut [f32]) -> BackendResult<()> {
        let parts = self.exchange(values)?;
        let (first, others) = parts.split_at(values.len());
        values.copy_from_slice(first);
        for part in others.chunks_exact(values.len().max(1)) {
            values.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
        }
        Ok(())
    }

    fn all_gather(&self, part: &[f32], visit: &mut dyn FnMut(usize, &[f32])) -> BackendResult<()> {
        // NCCL wants parts of one length. A length as two halves is exact in f32.
        let halves = [(part.len() >> 16) as f32, (part.len() & 0xffff) as f32];
        let lengths: Vec<usize> = self
            .exchange(&halves)?
            .chunks_exact(2)
            .map(|halves| ((halves[0] as usize) << 16) + halves[1] as usize)
            .collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut padded = part.to_vec();
        padded.resize(longest, 0.0);
        let all = if longest == 0 { Vec::new() } else { self.exchange(&padded)? };
        for (rank, length) in lengths.into_iter().enumerate() {
            visit(rank, &all[rank * longest..][..length]);
        }
        Ok(())
    }

    fn abandon(&self, why: &str) {
        if let Some(comm) = self.state().comm.take() {
            eprintln!("note: this rank leaves its group: {why}");
            // SAFETY: our own communicator, which nobody uses afterwards.
            let _ = self.device.enter().map(|()| unsafe { (self.functions.abort)(comm) });
        }
    }

    fn restart(&self) {}
}
