//! One GPU: its context, the one stream everything runs on, memory, copies and launches.
//!
//! **Invariant:** every operation is ordered by the one stream; nothing here waits for the device except
//! [`Device::synchronize`], [`Device::download`] and the release of memory.

use crate::error::{CudaError, Result};
use crate::graph::{HostTimes, Profile, Recorded, Recorder, Turn};
pub use crate::launch::{Function, KernelParams, LaunchShape};
use crate::memory::{Buffer, Event};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What the kernels must know of a GPU.
#[derive(Clone, Debug)]
pub struct Properties {
    pub name: String,
    /// Compute capability.
    pub major: i32,
    pub minor: i32,
    pub multiprocessors: u32,
    /// Largest dynamic shared memory of a block, in bytes.
    pub shared_memory: u32,
    pub memory: usize,
    /// CUDA version of the driver, e.g. (13, 0).
    pub driver: (i32, i32),
}

/// An opened GPU. Cheap to clone; the last clone closes it.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    properties: Properties,
    ordinal: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    recorder: Mutex<Recorder>,
    /// `OSCAR_CUDA_GRAPHS=off` launches every kernel by itself.
    graphs: bool,
}

// SAFETY: contexts and streams of the driver API may be used from any thread once made current there, which every
// operation of `Device` does first.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver serializes calls on one stream.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the stream and the context are ours and nothing can use them after the last clone. Failures leave
        // nothing to clean up.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            *self.recorder.get_mut().unwrap_or_else(PoisonError::into_inner) = Recorder::default();
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.ordinal);
        }
    }
}

impl Device {
    /// Opens GPU `index`. The absence of a driver or of a GPU is an ordinary answer.
    pub fn open(index: usize) -> Result<Self> {
        // SAFETY: only looks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // SAFETY: plain driver calls with out-parameters of the right types, in the order the driver asks for.
        unsafe {
            match sys::cuInit(0) {
                CUresult::CUDA_SUCCESS => {}
                CUresult::CUDA_ERROR_NO_DEVICE => return Err(CudaError::NoDevice),
                other => check("the GPU", "cuInit", other)?,
            }
            let mut version = 0;
            check("the GPU", "cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
            let driver = (version / 1000, version % 1000 / 10);
            if driver.0 < 12 {
                return Err(CudaError::OldDriver { major: driver.0, minor: driver.1 });
            }
            let mut count = 0;
            check("the GPU", "cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
            if count == 0 {
                return Err(CudaError::NoDevice);
            }
            if index >= count as usize {
                return Err(CudaError::NoSuchDevice { index, count: count as usize });
            }
            let mut ordinal = 0;
            check("the GPU", "cuDeviceGet", sys::cuDeviceGet(&mut ordinal, index as i32))?;
            let properties = properties(ordinal, driver)?;
            if properties.major < 8 {
                let Properties { name, major, minor, .. } = properties;
                return Err(CudaError::OldDevice { name, major, minor });
            }
            let mut context = null_mut();
            let device = &properties.name;
            check(device, "cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, ordinal))?;
            check(device, "cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            let mut stream = null_mut();
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            check(device, "cuStreamCreate", sys::cuStreamCreate(&mut stream, flags))?;
            // Graphs keep the overlap of launches from CUDA 12.3 on.
            let graphs = driver >= (12, 3) && graphs_wanted()?;
            let recorder = Mutex::default();
            Ok(Self(Arc::new(Inner { properties, ordinal, context, stream, recorder, graphs })))
        }
    }

    pub fn properties(&self) -> &Properties {
        &self.0.properties
    }

    pub fn name(&self) -> &str {
        &self.0.properties.name
    }

    pub(crate) fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.0.stream
    }

    /// Makes the context current in this thread; every driver call of ours goes through it.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    pub(crate) fn check(&self, call: &'static str, result: CUresult) -> Result<()> {
        check(self.name(), call, result)
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes launches (but for the first few) instead of making them until [`Device::flush`], which anything that depends on
    /// their order calls itself. Between the two, only memory that no noted launch touches may be written by copies. `began`: when the
    /// host began with what is recorded.
    pub(crate) fn record(&self, began: Instant) -> Result<()> {
        self.flush()?;
        let mut recorder = self.recorder();
        recorder.active = self.0.graphs || recorder.profile.is_some();
        recorder.begin(began);
        Ok(())
    }

    /// What makes up a step begins here: as many of its launches are made at once whatever was launched before them.
    pub(crate) fn count_launches_from_here(&self) {
        self.recorder().count_from_here();
    }

    /// Would a launch be made now rather than noted?
    pub(crate) fn launches_at_once(&self) -> bool {
        let recorder = self.recorder();
        !recorder.active || recorder.is_at_once()
    }

    /// Hands what was recorded to the GPU and ends the recording.
    pub(crate) fn flush(&self) -> Result<()> {
        let mut recorder = self.recorder();
        recorder.active = false;
        let result = self.hand_over(&mut recorder);
        recorder.end();
        result
    }

    fn hand_over(&self, recorder: &mut Recorder) -> Result<()> {
        if recorder.now.launches.is_empty() {
            return Ok(());
        }
        self.enter()?;
        let result = match recorder.profile {
            Some(_) => self.run_profiled(recorder),
            None => recorder.graph(|recorded| self.capture(recorded)).and_then(|exec| {
                // SAFETY: an instantiated graph of this context and our own stream.
                self.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(exec, self.0.stream) })
            }),
        };
        recorder.handed_over();
        recorder.now.clear();
        result
    }

    /// What recorded steps have cost the host since this was last asked.
    pub fn take_host_times(&self) -> HostTimes {
        std::mem::take(&mut self.recorder().times)
    }

    fn capture(&self, recorded: &Recorded) -> Result<sys::CUgraphExec> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: our own stream, which is not capturing: recordings are captured one at a time under the lock.
        self.check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.0.stream, mode) })?;
        let launched = recorded
            .launches
            .iter()
            .try_for_each(|l| self.launch_now(l.function, l.shape, recorded.parameters_of(l).cast()));
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: ends the capture begun above, whatever came of the launches; out-parameters of the right types.
        unsafe {
            let ended = self.check("cuStreamEndCapture", sys::cuStreamEndCapture(self.0.stream, &mut graph));
            let made = launched.and(ended).and_then(|()| {
                self.check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0))
            });
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
            made?;
        }
        Ok(exec)
    }

    /// Times every launch that is recorded, instead of making graphs of them.
    pub fn set_profiling(&self, on: bool) -> Result<Option<Profile>> {
        self.flush()?;
        let mut recorder = self.recorder();
        Ok(std::mem::replace(&mut recorder.profile, on.then(Profile::default)))
    }

    fn run_profiled(&self, recorder: &mut Recorder) -> Result<()> {
        let Recorder { now, profile, .. } = recorder;
        let marks = (0..=now.launches.len()).map(|_| self.event()).collect::<Result<Vec<_>>>()?;
        marks[0].record_now()?;
        for (launch, mark) in now.launches.iter().zip(&marks[1..]) {
            self.launch_now(launch.function, launch.shape, now.parameters_of(launch).cast())?;
            mark.record_now()?;
        }
        for (launch, pair) in now.launches.iter().zip(marks.windows(2)) {
            let us = pair[1].us_since(&pair[0])?;
            if let Some(profile) = profile.as_mut() {
                let entry = profile.entry(launch.function.name).or_default();
                *entry = (entry.0 + 1, entry.1 + us);
            }
        }
        Ok(())
    }

    /// Free and total bytes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two out-parameters.
        self.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    pub(crate) fn out_of_memory(&self, what: &str, bytes: usize) -> CudaError {
        let (free, total) = self.memory().unwrap_or((0, 0));
        CudaError::OutOfMemory { device: self.name().into(), what: what.into(), bytes, free, total }
    }

    /// Waits until everything enqueued is done.
    pub fn synchronize(&self) -> Result<()> {
        self.flush()?;
        self.enter()?;
        // SAFETY: our own stream.
        self.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0.stream) })
    }

    /// Device memory with undefined contents.
    pub fn alloc(&self, bytes: usize, what: &str) -> Result<Buffer> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: one out-parameter; a zero size is made one byte, which the driver accepts.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(self.out_of_memory(what, bytes)),
            other => self.check("cuMemAlloc", other)?,
        }
        Ok(Buffer { device: self.clone(), address, bytes })
    }

    /// Copies host bytes into device memory and returns when they have been read. For loading, not for steps.
    pub fn upload(&self, bytes: &[u8], to: &Buffer, offset: usize) -> Result<()> {
        check_range("an upload", to, offset, bytes.len())?;
        self.flush()?;
        self.enter()?;
        let (to, from) = (to.address + offset as u64, bytes.as_ptr().cast::<c_void>());
        // SAFETY: the range was checked; pageable memory is copied before the call returns or staged by the driver.
        self.check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from, bytes.len(), self.0.stream)
        })
    }

    pub fn upload_new<T: bytemuck::NoUninit>(&self, values: &[T], what: &str) -> Result<Buffer> {
        let bytes = bytemuck::cast_slice(values);
        let buffer = self.alloc(bytes.len(), what)?;
        self.upload(bytes, &buffer, 0)?;
        Ok(buffer)
    }

    /// Waits for the stream and copies device memory to the host.
    pub fn download<T: bytemuck::Pod>(&self, from: &Buffer, offset: usize, out: &mut [T]) -> Result<()> {
        let bytes = bytemuck::cast_slice_mut::<T, u8>(out);
        check_range("a download", from, offset, bytes.len())?;
        self.download_raw(from.address + offset as u64, bytes)
    }

    /// [`Device::download`] from any address.
    pub(crate) fn download_raw(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        self.flush()?;
        self.enter()?;
        // SAFETY: callers pass an address with that many bytes behind it; we wait before the host slice is used.
        self.check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                bytes.as_mut_ptr().cast::<c_void>(),
                address,
                bytes.len(),
                self.0.stream,
            )
        })?;
        self.synchronize()
    }

    /// Fills device memory with a byte.
    pub fn fill(&self, buffer: &Buffer, byte: u8) -> Result<()> {
        self.flush()?;
        self.enter()?;
        // SAFETY: the whole of a live buffer.
        self.check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(buffer.address, byte, buffer.bytes, self.0.stream)
        })
    }

    /// Enqueues a kernel, or notes it while recording.
    pub fn launch<P: KernelParams>(&self, function: Function, shape: LaunchShape, params: &P) -> Result<()> {
        let mut recorder = self.recorder();
        let turn = if recorder.active { recorder.next() } else { Turn::Now };
        match turn {
            Turn::Now => {
                self.enter()?;
                let launched = self.launch_now(function, shape, std::ptr::from_ref(params).cast());
                if recorder.active {
                    recorder.handed_over();
                }
                launched
            }
            Turn::Later | Turn::LastOfPart => {
                recorder.now.push(function, shape, bytemuck::bytes_of(params));
                if matches!(turn, Turn::LastOfPart) { self.hand_over(&mut recorder) } else { Ok(()) }
            }
        }
    }

    /// `params` points to the kernel's parameter struct.
    fn launch_now(&self, function: Function, shape: LaunchShape, params: *const c_void) -> Result<()> {
        let mut pointers = [params.cast_mut()];
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        // Programmatic serialization exists from compute capability 9.0 on.
        let overlap = shape.overlap && self.properties().major >= 9;
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid.0,
            gridDimY: shape.grid.1,
            gridDimZ: shape.grid.2,
            blockDimX: shape.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared,
            hStream: self.0.stream,
            attrs: &mut attribute,
            numAttrs: overlap as u32,
        };
        // SAFETY: `KernelParams` promises the parameter's layout and the addresses in it; the driver copies the
        // parameters before the call returns.
        self.check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&config, function.handle, pointers.as_mut_ptr(), null_mut())
        })
    }

    /// Lets a kernel use up to `bytes` of dynamic shared memory.
    pub fn allow_shared(&self, function: Function, bytes: usize) -> Result<()> {
        self.enter()?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a live function handle.
        self.check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(function.handle, attribute, bytes as i32)
        })
    }

    /// Blocks of `block` threads and `shared` bytes that one multiprocessor holds at a time.
    pub fn occupancy(&self, function: Function, block: u32, shared: usize) -> Result<u32> {
        self.enter()?;
        let mut blocks = 0;
        // SAFETY: a live function handle and an out-parameter.
        self.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                function.handle,
                block as i32,
                shared,
            )
        })?;
        Ok(blocks as u32)
    }

    /// A point in the stream, for timing.
    pub fn event(&self) -> Result<Event> {
        self.event_with(0)
    }

    /// A point in the stream, for knowing what is done: who waits for it sleeps.
    pub fn sleeping_event(&self) -> Result<Event> {
        use sys::CUevent_flags_enum as Flag;
        self.event_with(Flag::CU_EVENT_BLOCKING_SYNC as u32 | Flag::CU_EVENT_DISABLE_TIMING as u32)
    }

    fn event_with(&self, flags: u32) -> Result<Event> {
        self.enter()?;
        let mut event = null_mut();
        // SAFETY: one out-parameter.
        self.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Event { device: self.clone(), event })
    }
}

fn graphs_wanted() -> Result<bool> {
    match std::env::var("OSCAR_CUDA_GRAPHS").as_deref() {
        Ok("off") => Ok(false),
        Ok("" | "on") | Err(_) => Ok(true),
        Ok(other) => Err(CudaError::Unsupported(format!("OSCAR_CUDA_GRAPHS={other}: it may be on or off"))),
    }
}

fn check_range(what: &'static str, buffer: &Buffer, offset: usize, bytes: usize) -> Result<()> {
    if offset.checked_add(bytes).is_none_or(|end| end > buffer.bytes) {
        let detail = format!("{bytes} bytes at {offset} of {}", buffer.bytes);
        return Err(CudaError::Shape { what, detail });
    }
    Ok(())
}

fn check(device: &str, call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |get: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut pointer = std::ptr::null();
        // SAFETY: the driver fills the pointer with a static string or leaves it null.
        unsafe {
            let _ = get(result, &mut pointer);
            if pointer.is_null() {
                format!("{result:?}")
            } else {
                CStr::from_ptr(pointer).to_string_lossy().into_owned()
            }
        }
    };
    Err(CudaError::Driver {
        device: device.into(),
        call,
        name: text(sys::cuGetErrorName),
        message: text(sys::cuGetErrorString),
    })
}

/// # Safety
/// The driver must be initialized and `ordinal` one of its devices.
unsafe fn properties(ordinal: sys::CUdevice, driver: (i32, i32)) -> Result<Properties> {
    use sys::CUdevice_attribute_enum as A;
    let mut name = [0; 128];
    // SAFETY: a buffer and its length; the driver terminates the name.
    let name = unsafe {
        check("the GPU", "cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 127, ordinal))?;
        CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
    };
    let attribute = |which| -> Result<i32> {
        let mut value = 0;
        // SAFETY: one out-parameter.
        check(&name, "cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, which, ordinal)
        })?;
        Ok(value)
    };
    let mut memory = 0;
    // SAFETY: one out-parameter.
    check(&name, "cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut memory, ordinal) })?;
    Ok(Properties {
        major: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        shared_memory: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        memory,
        driver,
        name,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_gets_an_answer_and_no_panic() {
        match Device::open(0) {
            Ok(device) => assert!(device.properties().multiprocessors > 0),
            Err(error) => {
                assert!(error.to_string().contains("--device cpu") || !error.to_string().is_empty())
            }
        }
        assert!(Device::open(10_000).is_err());
    }
}
