//! The time of every launch of a step, for benchmarks.

use crate::device::Device;
use crate::error::Result;
use crate::graph::Recorder;
use crate::memory::Event;
use oscar_backend::StepTimes;
use std::collections::BTreeMap;
use std::ffi::CStr;

/// The name under which products of cuBLASLt are counted.
pub(crate) const CUBLASLT: &CStr = c"cublasLt";

/// Launches with the points of the stream before and after them.
pub(crate) type TimedLaunches = Vec<(&'static CStr, Event, Event)>;

/// The launches of some steps, timed one by one: nothing overlaps as it does in a real step.
#[derive(Debug, Default)]
pub struct Profile {
    /// Launches and microseconds by kernel.
    pub kernels: BTreeMap<&'static CStr, (usize, f64)>,
    /// Microseconds between launches, in which the GPU waited for the host.
    pub idle: f64,
}

impl Profile {
    fn of(launches: &TimedLaunches) -> Result<Self> {
        let mut profile = Self::default();
        let (Some((_, first, _)), Some((_, _, last))) = (launches.first(), launches.last()) else {
            return Ok(profile);
        };
        profile.idle = last.us_since(first)?;
        for (name, start, end) in launches {
            let us = end.us_since(start)?;
            let (count, sum) = profile.kernels.entry(name).or_default();
            (*count, *sum, profile.idle) = (*count + 1, *sum + us, profile.idle - us);
        }
        Ok(profile)
    }

    /// The same by parts of a step, in seconds.
    pub fn parts(&self) -> StepTimes {
        let mut times = StepTimes { rest: self.idle * 1e-6, ..StepTimes::default() };
        for (name, (_, us)) in &self.kernels {
            let name = name.to_bytes();
            let part = match name {
                b"append" | b"append_rows" | b"demote" => &mut times.coding,
                b"dequantize_pages" | b"decode_plan" | b"decode_attention" => &mut times.attention,
                b"expand_fp8" | b"quantize_rows" | b"plain_codes" => &mut times.products,
                _ if name == CUBLASLT.to_bytes()
                    || name.starts_with(b"skinny")
                    || name.starts_with(b"experts") =>
                {
                    &mut times.products
                }
                _ if name.starts_with(b"attention") => &mut times.attention,
                _ => &mut times.rest,
            };
            *part += us * 1e-6;
        }
        times
    }
}

impl Device {
    /// Times every launch from now on, or stops. Returns the profile that was being taken.
    pub fn set_profiling(&self, on: bool) -> Result<Option<Profile>> {
        self.synchronize()?;
        let taken = std::mem::replace(&mut self.recorder().profile, on.then(Vec::new));
        taken.map(|launches| Profile::of(&launches)).transpose()
    }

    /// Runs `enqueue`, with a point of the stream before and after it if a profile is being taken.
    pub(crate) fn timed(
        &self,
        recorder: &mut Recorder,
        name: &'static CStr,
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(launches) = &mut recorder.profile else { return enqueue() };
        let (start, end) = (self.event()?, self.event()?);
        start.record_now()?;
        enqueue()?;
        end.record_now()?;
        launches.push((name, start, end));
        Ok(())
    }
}
