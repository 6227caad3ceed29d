//! Launches recorded and handed to the GPU as one graph.
//!
//! A decode step is a few hundred small launches whose parameters hardly ever change: addresses stay, positions and page
//! ids live in device memory. While recording, [`Device::launch`](crate::Device::launch) only notes function, shape and
//! parameters; when the step's result is wanted, a graph with exactly these launches is looked up, or made, and launched
//! at once. Since the lookup compares everything, a graph can never be stale. The first few launches are made at once and
//! some more go as a graph of their own, so that the GPU has work while the host notes the rest.

use crate::device::{Function, LaunchShape};
use crate::error::Result;
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Graphs kept; the one unused for longest goes first.
const MOST_GRAPHS: usize = 64;

/// Launches of a step that are made at once: about a layer, which lasts longer than noting a few others takes.
const AT_ONCE: usize = 8;

/// Launches of a step's first graph: some layers, so that they last longer than noting the others takes.
const FIRST_PART: usize = 24;

/// What is done with a launch.
pub(crate) enum Turn {
    /// Made at once.
    Now,
    /// Noted.
    Later,
    /// Noted, and then all that were noted are handed over.
    LastOfPart,
}

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

/// What recorded steps have cost the host.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostTimes {
    pub steps: usize,
    /// For the tables, while the GPU has the step's first launches: until it has more.
    pub tables: Duration,
    /// From then on until it had the last ones.
    pub launches: Duration,
    /// Graphs that had to be made.
    pub captures: usize,
}

/// What is being recorded, and the graphs made so far.
#[derive(Default)]
pub(crate) struct Recorder {
    pub active: bool,
    pub now: Recorded,
    /// Launches of the step so far.
    launches: usize,
    /// When the host began with the step, until the GPU had what is recorded.
    began: Option<Instant>,
    /// Until when it was given work.
    started: Option<Instant>,
    pub times: HostTimes,
    graphs: Vec<Graph>,
    clock: u64,
    /// Launches are timed one by one instead of being run as graphs.
    pub profile: Option<Profile>,
}

impl Recorder {
    pub fn begin(&mut self, began: Instant) {
        self.launches = 0;
        self.began = self.active.then_some(began);
    }

    pub fn end(&mut self) {
        (self.began, self.started) = (None, None);
    }

    /// Forgets launches that were all made at once.
    pub fn count_from_here(&mut self) {
        if self.now.launches.is_empty() {
            self.launches = 0;
        }
    }

    /// Will the next launch be made at once?
    pub fn is_at_once(&self) -> bool {
        self.launches < AT_ONCE && self.profile.is_none()
    }

    /// What becomes of the launch at hand. One by one they are timed, and all are noted.
    pub fn next(&mut self) -> Turn {
        let at_once = self.is_at_once();
        self.launches += 1;
        match &self.profile {
            None if at_once => Turn::Now,
            None if self.launches == AT_ONCE + FIRST_PART => Turn::LastOfPart,
            _ => Turn::Later,
        }
    }

    /// Counts the time of a hand-over that has just been made.
    pub fn handed_over(&mut self) {
        let now = Instant::now();
        if let Some(began) = self.began.take() {
            self.times.tables += now - began;
            self.times.steps += 1;
            self.started = Some(now);
        } else if let Some(started) = self.started {
            self.times.launches += now - started;
            self.started = Some(now);
        }
    }

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
        self.times.captures += 1;
        if self.graphs.len() >= MOST_GRAPHS
            && let Some(oldest) = (0..self.graphs.len()).min_by_key(|&i| self.graphs[i].last_used)
        {
            self.graphs.swap_remove(oldest);
        }
        self.graphs.push(Graph { recorded: self.now.clone(), exec, last_used: self.clock });
        Ok(exec)
    }
}
