//! The memory-read ceiling of the device, measured.

use crate::device::{Device, KernelParams, LaunchShape};
use crate::error::Result;
use crate::kernels::Kernels;
use crate::sources::BANDWIDTH;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct ReadParams {
    data: u64,
    count: u64,
    out: u64,
}

// SAFETY: the struct of `bandwidth.cu`, filled with addresses of live buffers.
unsafe impl KernelParams for ReadParams {}

/// GB/s of reading `bytes` of device memory in order, best of a few grids and repetitions. Choose far more than the
/// second-level cache.
pub fn read_ceiling(device: &Device, kernels: &Kernels, bytes: usize) -> Result<f64> {
    let function = kernels.function(&BANDWIDTH, &Vec::new(), c"read_memory", 0)?;
    let data = device.alloc(bytes, "the bandwidth measurement")?;
    device.fill(&data, 0x5a)?;
    let out = device.alloc(4, "the bandwidth measurement")?;
    let params = ReadParams { data: data.address(), count: bytes as u64 / 16, out: out.address() };
    let (start, end) = (device.event()?, device.event()?);
    let mut best = 0f64;
    for blocks in [4, 8, 16] {
        let grid = device.properties().multiprocessors as usize * blocks;
        for _ in 0..6 {
            start.record()?;
            device.launch(function, LaunchShape::new(grid, 512), &params)?;
            end.record()?;
            best = best.max(bytes as f64 / end.us_since(&start)? / 1e3);
        }
    }
    Ok(best)
}
