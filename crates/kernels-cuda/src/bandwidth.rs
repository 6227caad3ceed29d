//! The memory-read ceiling of the device, measured.

use crate::device::{Device, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::layout::{Layout, shared_struct};
use crate::memory::DevicePtr;
use crate::sources::BANDWIDTH;

shared_struct! {
    struct ReadParams {
        data: DevicePtr<[u32; 4]>,
        count: u64,
        out: DevicePtr<u32>,
    }
}

pub(crate) const LAYOUTS: &[Layout] = &[ReadParams::LAYOUT];

/// GB/s of reading `bytes` of device memory in order, best of a few grids and repetitions. `bytes`
/// should be far more than the L2 cache.
pub fn read_ceiling(device: &Device, kernels: &Kernels, bytes: usize) -> Result<f64> {
    let function = kernels.function(&BANDWIDTH, &Vec::new(), c"read_memory", 0)?;
    let data = device.alloc(bytes, "the bandwidth measurement")?;
    device.fill(&data, 0x5a)?;
    let out = device.alloc(4, "the bandwidth measurement")?;
    let params = ReadParams { data: data.ptr(), count: bytes as u64 / 16, out: out.ptr() };
    let (start, end) = (device.event()?, device.event()?);
    let mut best = 0f64;
    for blocks in [4, 8, 16] {
        let grid = device.properties().multiprocessors as usize * blocks;
        for _ in 0..6 {
            start.record()?;
            // SAFETY: the parameters of `bandwidth.cu`; `data` has 16 * count bytes, `out` one
            // word.
            unsafe { device.launch(function, LaunchShape::new(grid, 512), params) }?;
            end.record()?;
            best = best.max(bytes as f64 / end.us_since(&start)? / 1e3);
        }
    }
    Ok(best)
}
