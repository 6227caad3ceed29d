//! How the ranks of one model meet in the middle of a step.

use crate::{BackendError, Result};

/// The place of a device among the ranks that share a model, and its connection to the others.
///
/// Ranks run the same step at the same time, each over its own heads, its own columns of the
/// feed-forward parts and its own pages. They meet in the calls below, which all ranks make in the
/// same order.
///
/// **Invariant:** sums are made in rank order, so every rank gets the same bits, whatever the batch
/// and however fast the ranks are.
pub trait Communicator: Send + Sync {
    /// The rank of this device, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn ranks(&self) -> usize;
    /// Replaces `values` by their sum over all ranks: `((rank 0 + rank 1) + rank 2) + …`.
    ///
    /// # Errors
    /// If a rank has left the step, or has another number of values.
    fn all_reduce(&self, values: &mut [f32]) -> Result<()>;
    /// Gives `part` to all ranks, then shows the parts of all ranks to `visit`, in rank order.
    ///
    /// # Errors
    /// If a rank has left the step.
    fn all_gather(&self, part: &[f32], visit: &mut dyn FnMut(usize, &[f32])) -> Result<()>;
    /// Says that this rank cannot finish the step. The others get an error instead of waiting for
    /// it, until [`Communicator::restart`].
    fn abandon(&self, why: &str);
    /// Makes the ranks ready for the next step. No rank may be inside of one.
    fn restart(&self);
}

/// The answer of a device that does not run as one of several ranks.
pub(crate) fn no_ranks<T>() -> Result<T> {
    Err(BackendError::Unsupported {
        device: "this device".into(),
        why: "tensor parallelism works on the CPU only so far: leave --tensor-parallel out, or use --device cpu"
            .into(),
    })
}
