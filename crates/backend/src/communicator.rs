//! How the ranks of one model meet in the middle of a step.

use crate::{BackendError, ExpertId, Result};
use std::ops::Range;

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

/// The experts of a layer that one rank holds: a run of neighbours, whole, and on the last rank the
/// shared one. So the sum over ranks, made in rank order, adds experts in ascending id and the shared one
/// last, as one rank does, and no weight is cut. The first rank adds its experts to the rows, the others
/// replace the rows by the sum of theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldExperts {
    pub routed: Range<usize>,
    pub shared: bool,
}

impl HeldExperts {
    /// Those of a device with this communicator, out of `experts`.
    pub fn of(communicator: Option<&dyn Communicator>, experts: usize) -> Self {
        let (rank, ranks) = communicator.map_or((0, 1), |c| (c.rank(), c.ranks()));
        let routed = experts * rank / ranks..experts * (rank + 1) / ranks;
        Self { routed, shared: rank + 1 == ranks }
    }

    pub fn has(&self, id: ExpertId) -> bool {
        match id {
            ExpertId::Routed(id) => self.routed.contains(&id),
            ExpertId::Shared => self.shared,
        }
    }
}

/// The answer of a device that does not run as one of several ranks.
pub(crate) fn no_ranks<T>() -> Result<T> {
    Err(BackendError::Unsupported {
        device: "this device".into(),
        why: "tensor parallelism works on the CPU only so far: leave --tensor-parallel out, or use --device cpu"
            .into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place(usize, usize);

    impl Communicator for Place {
        fn rank(&self) -> usize {
            self.0
        }

        fn ranks(&self) -> usize {
            self.1
        }

        fn all_reduce(&self, _: &mut [f32]) -> Result<()> {
            no_ranks()
        }

        fn all_gather(&self, _: &[f32], _: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
            no_ranks()
        }

        fn abandon(&self, _: &str) {}

        fn restart(&self) {}
    }

    #[test]
    fn every_expert_lies_on_one_rank_in_ascending_order() {
        for ranks in [1, 2, 3, 4] {
            let held: Vec<HeldExperts> =
                (0..ranks).map(|rank| HeldExperts::of(Some(&Place(rank, ranks)), 10)).collect();
            let all: Vec<usize> = held.iter().flat_map(|held| held.routed.clone()).collect();
            assert_eq!(all, (0..10).collect::<Vec<_>>());
            let shared = held.iter().position(|held| held.has(ExpertId::Shared));
            assert_eq!(shared, Some(ranks - 1), "the shared expert is added last");
            assert_eq!(held.iter().filter(|held| held.has(ExpertId::Shared)).count(), 1);
            assert!(held[0].has(ExpertId::Routed(0)) && !held[0].has(ExpertId::Routed(10)));
        }
        assert_eq!(HeldExperts::of(None, 4), HeldExperts { routed: 0..4, shared: true });
    }
}
