//! Launches that go to the GPU as one graph.
//!
//! A decode step is a few hundred small launches whose parameters hardly ever change: addresses
//! stay the same, positions and page ids live in device memory. While the recorder is active,
//! `Device::launch` only notes function, shape and parameters. When the
//! step's result is needed, the recorder looks up a graph with exactly these launches, or makes it,
//! and launches it. The lookup compares everything, so a graph can never be stale.
//!
//! A step has three parts. The first launches run at once, the next ones are a graph of their own,
//! and the rest is a second graph. So the GPU has work while the host notes the rest.

use crate::device::{Function, LaunchShape};
use crate::error::Result;
use crate::profile::TimedLaunches;
use cudarc::driver::sys;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Graphs that are kept; the least recently used one is dropped.
const MOST_GRAPHS: usize = 64;

/// Launches of a step that run at once: about a layer. The GPU takes longer for them than the host
/// for noting the first graph.
const AT_ONCE: usize = 8;

/// Launches of a step's first graph: some layers. The GPU takes longer for them than the host for
/// noting the rest.
const FIRST_PART: usize = 24;

/// What happens to a launch.
pub(crate) enum Turn {
    /// It runs at once.
    Now,
    /// It is noted.
    Later,
    /// It is noted, and then all noted launches are handed over.
    LastOfPart,
}

/// A noted launch.
#[derive(Clone, PartialEq)]
pub(crate) struct Launch {
    pub function: Function,
    pub shape: LaunchShape,
    /// The place of its parameters in [`Recorded::parameters`].
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

    /// Address of a launch's parameters, valid until `self` changes.
    pub fn parameters_of(&self, launch: &Launch) -> *const u64 {
        self.parameters[launch.parameters.clone()].as_ptr()
    }

    pub fn clear(&mut self) {
        self.launches.clear();
        self.parameters.clear();
    }
}

/// An instantiated graph and its launches.
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

/// Host time of recorded steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostTimes {
    pub steps: usize,
    /// From the beginning of the step's tables to the first launch that follows them. The GPU runs
    /// the embedding and the first product meanwhile.
    pub tables: Duration,
    /// From then on to the last hand-over.
    pub launches: Duration,
    /// Graphs that were made.
    pub captures: usize,
}

/// The launches noted so far, and the graphs made so far.
#[derive(Default)]
pub(crate) struct Recorder {
    pub active: bool,
    pub now: Recorded,
    /// Launches of the step so far.
    launches: usize,
    /// When the host began with the step's tables, until the first launch behind them.
    began: Option<Instant>,
    /// Time of the last hand-over.
    handed: Option<Instant>,
    pub times: HostTimes,
    graphs: Vec<Graph>,
    clock: u64,
    /// Launches are timed one by one instead of running as graphs.
    pub profile: Option<TimedLaunches>,
}

impl Recorder {
    pub fn begin(&mut self, began: Instant) {
        self.launches = 0;
        self.began = self.active.then_some(began);
    }

    pub fn end(&mut self) {
        (self.began, self.handed) = (None, None);
    }

    /// Counts the step's launches from here, unless some are noted already.
    pub fn count_from_here(&mut self) {
        if self.now.launches.is_empty() {
            self.launches = 0;
        }
    }

    /// Whether the next launch runs at once.
    pub fn is_at_once(&self) -> bool {
        self.launches < AT_ONCE
    }

    /// What happens to the next launch.
    pub fn next(&mut self) -> Turn {
        let at_once = self.is_at_once();
        self.launches += 1;
        match self.launches {
            _ if at_once => Turn::Now,
            launches if launches == AT_ONCE + FIRST_PART => Turn::LastOfPart,
            _ => Turn::Later,
        }
    }

    /// Adds up the time of a hand-over that was just made.
    pub fn handed_over(&mut self) {
        let now = Instant::now();
        if let Some(began) = self.began.take() {
            self.times.tables += now - began;
            self.times.steps += 1;
            self.handed = Some(now);
        } else if let Some(last) = self.handed {
            self.times.launches += now - last;
            self.handed = Some(now);
        }
    }

    /// The graph of the noted launches, made by `capture` if there is none yet.
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
