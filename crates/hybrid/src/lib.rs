//! A device that leaves the experts of some layers to the processor: models whose experts do not fit
//! on a GPU run beside it.
//!
//! Attention, the cache, dense layers and the experts of the first layers are the device's. In the
//! last layers with experts, the rows `x` between two layers come to the host, the processor computes
//! `x += experts(norm(x))` from its own memory, and they go back. The last layers are taken, not the
//! first, so that the device runs ahead of the host (and records graphs) until it meets them.
//!
//! **Invariant:** with the processor as the device, results are the processor's bit for bit.

mod backend;
mod extensions;
mod step;

pub use step::HybridStep;

use oscar_backend::{BackendError, HostRows, Result};
use oscar_kernels_cpu::backend::{CpuBackend, CpuExperts};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// A device, and the processor beside it.
pub struct HybridBackend<D> {
    device: D,
    host: Option<Host>,
}

/// The processor's part.
struct Host {
    cpu: CpuBackend,
    /// Layers whose experts it computes, counted from the last layer with experts; unset until it is
    /// decided.
    layers: OnceLock<usize>,
    /// Rows of the layer that it computes.
    rows: Mutex<Vec<f32>>,
}

/// Weights of a norm, on the device and on the host.
pub struct HybridVector<V> {
    device: V,
    host: Vec<f32>,
}

/// The experts of one layer.
pub enum HybridExperts<E> {
    Device(E),
    Host(Box<CpuExperts>),
}

impl<E> HybridExperts<E> {
    /// Whether the processor computes them.
    pub fn is_host(&self) -> bool {
        matches!(self, Self::Host(_))
    }
}

impl<D: HostRows> HybridBackend<D> {
    /// The device alone.
    pub fn alone(device: D) -> Self {
        Self { device, host: None }
    }

    /// The device with a processor that computes the experts of some layers.
    pub fn with_host(device: D, cpu: CpuBackend) -> Self {
        Self { device, host: Some(Host { cpu, layers: OnceLock::new(), rows: Mutex::default() }) }
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    /// The processor beside the device, if there is one.
    pub fn host(&self) -> Option<&CpuBackend> {
        self.host.as_ref().map(|host| &host.cpu)
    }

    /// Gives the processor the experts of this many layers, the last ones that have experts. Later
    /// calls change nothing.
    pub fn place(&self, layers: usize) {
        if let Some(host) = &self.host {
            let _ = host.layers.set(layers);
        }
    }

    /// Layers whose experts are on the processor; `None` while it is undecided.
    pub fn host_layers(&self) -> Option<usize> {
        self.host.as_ref().map_or(Some(0), |host| host.layers.get().copied())
    }

    /// Whether the processor computes the experts of a layer that this many layers with experts follow.
    fn takes(&self, following: usize) -> Result<Option<&Host>> {
        let Some(host) = &self.host else { return Ok(None) };
        let Some(&layers) = host.layers.get() else {
            return Err(BackendError::Unsupported {
                device: self.device.describe(),
                why: "--cpu-experts auto is not possible in this command: give a number of layers, or all"
                    .into(),
            });
        };
        Ok((following < layers).then_some(host))
    }
}

impl Host {
    fn rows(&self) -> MutexGuard<'_, Vec<f32>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
