//! Launches recorded and handed to the GPU as one graph.
//!
//! A decode step is a few hundred small launches whose parameters hardly ever change: addresses stay, positions and page
//! ids live in device memory. While recording, [`Device::launch`](crate::Device::launch) only notes function, shape and
//! parameters; when the step's result is wanted, a graph with exactly these launches is looked up, or made, and launched
//! at once. Since the lookup compares everything, a graph can never be stale.

use crate::device::{Function, LaunchShape};
use crate::error::Result;
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ops::Range;

/// Graphs kept; the one unused for longest goes first.
const MOST_GRAPHS: usize = 64;

/// A launch that was noted.
#[derive(Clone, PartialEq)]
pub(crate) struct Launch {
    pub function: Function,
    pub shape: LaunchShape,
    /// Where its parameters lie in [`Recorded::parameters`].
    pub parameters: Range<usize>,
}

/// Launches in order, with their parameters.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct Recorded {
    pub launches: Vec<Launch>,
    /// Eight-byte words, so that every parameter struct is aligned.
    pub parameters: Vec<u64>,
}

impl Recorded {
    pub fn push(&mut self, function: Function, shape: LaunchShape, parameters: &[u8]) {
        let start = self.parameters.len();
        self.parameters.resize(start + parameters.len().div_ceil(8), 0);
        bytemuck::cast_slice_mut(&mut self.parameters[start..])[..parameters.len()]
            .copy_from_slice(parameters);
        self.launches.push(Launch { function, shape, parameters: start..self.parameters.len() });
    }

    /// Address of a launch's parameters, valid as long as `self` is not changed.
    pub fn parameters_of(&self, launch: &Launch) -> *const u64 {
        self.parameters[launch.parameters.clone()].as_ptr()
    }

    pub fn clear(&mut self) {
        self.launches.clear();
        self.parameters.clear();
    }
}

/// An instantiated graph and what it launches.
pub(crate) struct Graph {
    pub recorded: Recorded,
    pub exec: sys::CUgraphExec,
    pub last_used: u64,
}

// SAFETY: a handle of the driver, used under the recorder's lock.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: our own graph, dropped once; the driver keeps it until its launches are done.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}

/// Microseconds by kernel.
pub type Profile = BTreeMap<&'static CStr, (usize, f64)>;

/// What is being recorded, and the graphs made so far.
#[derive(Default)]
pub(crate) struct Recorder {
    pub active: bool,
    pub now: Recorded,
    graphs: Vec<Graph>,
    clock: u64,
    /// Launches are timed one by one instead of being run as graphs.
    pub profile: Option<Profile>,
}

impl Recorder {
    /// The graph of what was recorded, made by `capture` if there is none yet.
    pub fn graph(
        &mut self,
        capture: impl FnOnce(&Recorded) -> Result<sys::CUgraphExec>,
    ) -> Result<sys::CUgraphExec> {
        self.clock += 1;
        if let Some(graph) = self.graphs.iter_mut().find(|g| g.recorded == self.now) {
            graph.last_used = self.clock;
            return Ok(graph.exec);
        }
        let exec = capture(&self.now)?;
        if self.graphs.len() >= MOST_GRAPHS
            && let Some(oldest) = (0..self.graphs.len()).min_by_key(|&i| self.graphs[i].last_used)
        {
            self.graphs.swap_remove(oldest);
        }
        self.graphs.push(Graph { recorded: self.now.clone(), exec, last_used: self.clock });
        Ok(exec)
    }
}
