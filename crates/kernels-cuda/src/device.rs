//! One GPU: its context, its one stream, memory, copies and launches.
//!
//! **Invariant:** all operations are ordered by the one stream. Only [`Device::synchronize`],
//! [`Device::download`] and the release of memory wait for the device.

use crate::error::{CudaError, Result};
use crate::graph::{HostTimes, Recorded, Recorder, Turn};
pub(crate) use crate::launch::{Function, LaunchShape};
use crate::layout::Shared;
use crate::memory::{Buffer, DeviceSlice, Event, download_all};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// Most words of a kernel's parameters.
const MOST_PARAMETER_WORDS: usize = 64;

/// The properties of a GPU that the choice of kernels depends on.
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
    /// A smaller GPU that is simulated: its bytes, and those that were free when it began.
    limit: OnceLock<(usize, usize)>,
    /// `OSCAR_CUDA_GRAPHS=off` launches every kernel by itself.
    graphs: bool,
}

// SAFETY: contexts and streams of the driver API may be used from any thread once made current
// there, which every operation of `Device` does first.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver serializes calls on one stream.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the stream and the context are ours and nothing can use them after the last
        // clone. Failures leave nothing to clean up.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            *self.recorder.get_mut().unwrap_or_else(PoisonError::into_inner) = Recorder::default();
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.ordinal);
        }
    }
}

impl Device {
    /// Opens GPU `index`. The absence of a driver or of a GPU is an ordinary error.
    pub fn open(index: usize) -> Result<Self> {
        // SAFETY: only looks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        // SAFETY: driver calls with out-parameters of the right types, in the order that the driver
        // requires.
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
            let (recorder, limit) = (Mutex::default(), OnceLock::new());
            Ok(Self(Arc::new(Inner { properties, ordinal, context, stream, recorder, limit, graphs })))
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

    /// Makes the context current in this thread. Every use of the driver does it first.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    pub(crate) fn check(&self, call: &'static str, result: CUresult) -> Result<()> {
        check(self.name(), call, result)
    }

    pub(crate) fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to record a step: the first few launches are submitted directly, the others are noted
    /// until [`Device::flush`], which everything that depends on their order calls itself. Until
    /// then copies may only write memory that no noted launch touches. `began`: when the host
    /// started to work on the step.
    pub(crate) fn record(&self, began: Instant) -> Result<()> {
        self.flush()?;
        let mut recorder = self.recorder();
        recorder.active = self.0.graphs && recorder.profile.is_none();
        recorder.begin(began);
        Ok(())
    }

    /// Restarts the count of launches that are submitted directly, so that the same launches of
    /// each step become a graph, regardless of earlier launches.
    pub(crate) fn count_launches_from_here(&self) {
        self.recorder().count_from_here();
    }

    /// Whether the next launch is submitted directly rather than noted.
    pub(crate) fn launches_at_once(&self) -> bool {
        let recorder = self.recorder();
        !recorder.active || recorder.is_at_once()
    }

    /// Submits the noted launches and ends the recording.
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
        let result = recorder.graph(|recorded| self.capture(recorded)).and_then(|exec| {
            // SAFETY: an instantiated graph of this context and our own stream.
            self.check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(exec, self.0.stream) })
        });
        recorder.handed_over();
        recorder.now.clear();
        result
    }

    /// The host's time for recorded steps since the last call.
    pub fn take_host_times(&self) -> HostTimes {
        std::mem::take(&mut self.recorder().times)
    }

    fn capture(&self, recorded: &Recorded) -> Result<sys::CUgraphExec> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: our own stream. It is not capturing: the recorder's lock is held.
        self.check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.0.stream, mode) })?;
        let launched = recorded
            .launches
            .iter()
            // SAFETY: the promise of the caller of `launch`, which noted it.
            .try_for_each(|l| unsafe { self.launch_now(l.function, l.shape, recorded.parameters_of(l)) });
        let (mut graph, mut exec) = (null_mut(), null_mut());
        // SAFETY: ends the capture even if a launch failed; out-parameters of the right types.
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

    /// Free and total bytes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (free, total) = self.physical_memory()?;
        Ok(match self.0.limit.get() {
            Some(&(limit, at_first)) => {
                let used = at_first.saturating_sub(free);
                (free.min(limit.saturating_sub(used)), total.min(limit))
            }
            None => (free, total),
        })
    }

    fn physical_memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: two out-parameters.
        self.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Behaves as a GPU with this much memory from now on. A second limit is ignored.
    pub fn limit_memory(&self, bytes: usize) -> Result<()> {
        let (free, _) = self.physical_memory()?;
        let _ = self.0.limit.set((bytes, free));
        Ok(())
    }

    /// Refuses an allocation that a simulated smaller GPU has no room for.
    pub(crate) fn admit(&self, bytes: usize, what: &str) -> Result<()> {
        match self.0.limit.get().is_some() && bytes > self.memory()?.0 {
            true => Err(self.out_of_memory(what, bytes)),
            false => Ok(()),
        }
    }

    pub(crate) fn out_of_memory(&self, what: &str, bytes: usize) -> CudaError {
        let (free, total) = self.memory().unwrap_or((0, 0));
        CudaError::OutOfMemory { device: self.name().into(), what: what.into(), bytes, free, total }
    }

    /// Waits until the stream has run everything enqueued.
    pub fn synchronize(&self) -> Result<()> {
        self.flush()?;
        self.enter()?;
        // SAFETY: our own stream.
        self.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0.stream) })
    }

    /// Device memory with undefined contents.
    pub fn alloc(&self, bytes: usize, what: &str) -> Result<Buffer> {
        Buffer::new(self, bytes, what)
    }

    /// Copies host values into device memory of the same length. Returns when the host memory may
    /// change, and waits for no launches. For loading, not for steps.
    pub fn upload<T: bytemuck::NoUninit>(&self, values: &[T], to: DeviceSlice<'_, T>) -> Result<()> {
        if to.len() != values.len() {
            let detail = format!("{} values into {}", values.len(), to.len());
            return Err(CudaError::Shape { what: "an upload", detail });
        }
        self.flush()?;
        self.enter()?;
        let (to, from, bytes) = (to.ptr().address(), values.as_ptr().cast(), size_of_val(values));
        // SAFETY: both ranges are allocated and equally long. The driver copies or stages pageable
        // memory before the call returns.
        self.check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, self.0.stream) })
    }

    /// A new buffer with these values.
    pub fn upload_new<T: bytemuck::Pod>(&self, values: &[T], what: &str) -> Result<Buffer> {
        let buffer = self.alloc(size_of_val(values), what)?;
        self.upload(values, buffer.slice().part(0..values.len())?)?;
        Ok(buffer)
    }

    /// Waits for the stream and copies device memory into a host slice of the same length.
    pub fn download<T: bytemuck::Pod>(&self, from: DeviceSlice<'_, T>, out: &mut [T]) -> Result<()> {
        download_all(self, &mut [(from.cast(), bytemuck::cast_slice_mut(out))])
    }

    /// Fills device memory with a byte.
    pub fn fill(&self, buffer: &Buffer, byte: u8) -> Result<()> {
        self.flush()?;
        self.enter()?;
        // SAFETY: the whole of a live buffer.
        self.check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(buffer.ptr::<u8>().address(), byte, buffer.bytes(), self.0.stream)
        })
    }

    /// Enqueues a kernel, or notes it while a step is being recorded.
    ///
    /// # Safety
    /// `P` must be the parameter struct of the kernel. With these parameters and this grid the
    /// kernel must read and write only device memory that lives until this call returns (see
    /// [`crate::memory`]: freeing memory waits for the stream), and pinned host memory that lives
    /// until the stream has run the kernel. An overlapping launch must be of a kernel that calls
    /// `wait_for_previous_kernel` before it touches anything that an earlier kernel writes.
    pub(crate) unsafe fn launch<P: Shared>(
        &self,
        function: Function,
        shape: LaunchShape,
        params: P,
    ) -> Result<()> {
        const { assert!(size_of::<P>() <= 8 * MOST_PARAMETER_WORDS && align_of::<P>() <= 8) };
        let mut words = [0u64; MOST_PARAMETER_WORDS];
        let bytes = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..size_of::<P>()];
        params.write(bytes);
        let mut recorder = self.recorder();
        let turn = if recorder.active { recorder.next() } else { Turn::Now };
        match turn {
            Turn::Now => {
                self.enter()?;
                let launched = self.timed(&mut recorder, function.name, || {
                    // SAFETY: the caller's promise.
                    unsafe { self.launch_now(function, shape, words.as_ptr()) }
                });
                if recorder.active {
                    recorder.handed_over();
                }
                launched
            }
            Turn::Later | Turn::LastOfPart => {
                recorder.now.push(function, shape, bytes);
                if matches!(turn, Turn::LastOfPart) { self.hand_over(&mut recorder) } else { Ok(()) }
            }
        }
    }

    /// # Safety
    /// `params` must point to the kernel's parameter struct; then as for [`Device::launch`].
    unsafe fn launch_now(&self, function: Function, shape: LaunchShape, params: *const u64) -> Result<()> {
        let mut pointers: [*mut c_void; 1] = [params.cast_mut().cast()];
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
        // SAFETY: the caller's promise; the driver copies the parameters before the call returns.
        self.check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&config, function.handle, pointers.as_mut_ptr(), null_mut())
        })
    }

    /// Lets a kernel use up to `bytes` of dynamic shared memory.
    pub(crate) fn allow_shared(&self, function: Function, bytes: usize) -> Result<()> {
        self.enter()?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a live function handle.
        self.check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(function.handle, attribute, bytes as i32)
        })
    }

    /// A point in the stream, for timing.
    pub fn event(&self) -> Result<Event> {
        self.event_with(0)
    }

    /// A point in the stream without timing. A thread that waits for it sleeps.
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
                let absent = matches!(error, CudaError::NoDriver | CudaError::NoDevice);
                assert_eq!(error.to_string().contains("--device cpu"), absent, "{error}");
            }
        }
        assert!(Device::open(10_000).is_err());
    }
}
