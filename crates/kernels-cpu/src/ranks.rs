//! Ranks of one model as threads of this process.
//!
//! A meeting has one wait. Each rank writes its part into its own buffer, then waits until all have
//! written, then reads all parts. There are two sets of buffers, used in turn: a rank writes into a
//! set again only after the next meeting began, and by then everybody has read it.
//!
//! **Invariant:** a rank that leaves a step ([`Communicator::abandon`]) wakes all that wait; nobody
//! waits for it again before [`Communicator::restart`].

use oscar_backend::{BackendError, Communicator, Result};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

/// One rank of several threads.
pub struct ThreadRank {
    rank: usize,
    shared: Arc<Shared>,
}

struct Shared {
    meeting: Mutex<Meeting>,
    all_here: Condvar,
    /// Two sets, used in turn; in each a buffer for every rank.
    parts: [Vec<RwLock<Vec<f32>>>; 2],
}

#[derive(Default)]
struct Meeting {
    /// Meetings that all ranks have reached.
    done: usize,
    arrived: usize,
    /// The rank that left the step first, and why.
    left: Option<(usize, String)>,
}

impl ThreadRank {
    /// All ranks of one model, in order.
    pub fn all(ranks: usize) -> Vec<Self> {
        let set = || (0..ranks).map(|_| RwLock::default()).collect();
        let shared =
            Arc::new(Shared { meeting: Mutex::default(), all_here: Condvar::new(), parts: [set(), set()] });
        (0..ranks).map(|rank| Self { rank, shared: shared.clone() }).collect()
    }

    /// Shows `part` to the others and waits for theirs. Returns the set of buffers that holds them.
    fn meet(&self, part: &[f32]) -> Result<&[RwLock<Vec<f32>>]> {
        let shared = &*self.shared;
        let number = self.meeting().done;
        let set = &shared.parts[number % 2];
        {
            let mut mine = set[self.rank].write().unwrap_or_else(PoisonError::into_inner);
            mine.clear();
            mine.extend_from_slice(part);
        }
        let mut meeting = self.meeting();
        meeting.arrived += 1;
        if meeting.arrived == set.len() {
            meeting.arrived = 0;
            meeting.done += 1;
            shared.all_here.notify_all();
        }
        loop {
            if let Some((rank, why)) = &meeting.left {
                return Err(BackendError::RankLeft { rank: *rank, why: why.clone() });
            }
            if meeting.done != number {
                return Ok(set);
            }
            meeting = shared.all_here.wait(meeting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.shared.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(part: &RwLock<Vec<f32>>) -> RwLockReadGuard<'_, Vec<f32>> {
    part.read().unwrap_or_else(PoisonError::into_inner)
}

impl Communicator for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.parts[0].len()
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        for (rank, part) in self.meet(values)?.iter().enumerate() {
            let part = read(part);
            if part.len() != values.len() {
                let detail = format!("{} values of rank {rank}, {} here", part.len(), values.len());
                return Err(BackendError::Shape { what: "a sum over ranks".into(), detail });
            }
            match rank {
                0 => values.copy_from_slice(&part),
                _ => values.iter_mut().zip(part.iter()).for_each(|(sum, value)| *sum += value),
            }
        }
        Ok(())
    }

    fn all_gather(&self, part: &[f32], visit: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        for (rank, part) in self.meet(part)?.iter().enumerate() {
            visit(rank, &read(part));
        }
        Ok(())
    }

    fn abandon(&self, why: &str) {
        self.meeting().left.get_or_insert((self.rank, why.to_owned()));
        self.shared.all_here.notify_all();
    }

    fn restart(&self) {
        *self.meeting() = Meeting::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_made_in_rank_order_and_are_the_same_everywhere() {
        // In another order the small values would be lost or kept differently.
        let parts = [1e8f32, 3.0, -1e8, 3.0];
        let expected = ((parts[0] + parts[1]) + parts[2]) + parts[3];
        assert_ne!(expected, (parts[0] + parts[2]) + (parts[1] + parts[3]), "the order matters");
        let ranks = ThreadRank::all(parts.len());
        std::thread::scope(|scope| {
            for (rank, &part) in ranks.iter().zip(&parts) {
                scope.spawn(move || {
                    for round in 0..2000 {
                        let mut values = [part, round as f32];
                        rank.all_reduce(&mut values).unwrap();
                        assert_eq!(values, [expected, 4.0 * round as f32]);
                    }
                });
            }
        });
    }

    #[test]
    fn parts_of_any_length_are_gathered_in_rank_order() {
        let ranks = ThreadRank::all(3);
        std::thread::scope(|scope| {
            for rank in &ranks {
                scope.spawn(move || {
                    for round in 0..500 {
                        let mine = vec![rank.rank() as f32 + round as f32; rank.rank() + 1];
                        let mut seen = Vec::new();
                        rank.all_gather(&mine, &mut |from, part| seen.push((from, part.to_vec()))).unwrap();
                        let expected: Vec<_> = (0..3).map(|r| (r, vec![(r + round) as f32; r + 1])).collect();
                        assert_eq!(seen, expected);
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_leaves_wakes_the_others_and_a_restart_brings_it_back() {
        let ranks = ThreadRank::all(3);
        for _ in 0..200 {
            std::thread::scope(|scope| {
                let waiting: Vec<_> =
                    ranks[..2].iter().map(|rank| scope.spawn(|| rank.all_reduce(&mut [1.0]))).collect();
                ranks[2].abandon("out of memory");
                for waiting in waiting {
                    let error = waiting.join().unwrap().unwrap_err().to_string();
                    assert_eq!(error, "rank 2 of the model left the step: out of memory");
                }
            });
            assert!(ranks[2].all_reduce(&mut [1.0]).is_err(), "the step is over for everybody");
            ranks[0].restart();
            std::thread::scope(|scope| {
                for rank in &ranks {
                    scope.spawn(|| {
                        let mut values = [1.0];
                        rank.all_reduce(&mut values).unwrap();
                        assert_eq!(values, [3.0]);
                    });
                }
            });
        }
    }

    #[test]
    fn different_lengths_are_refused() {
        let ranks = ThreadRank::all(2);
        std::thread::scope(|scope| {
            let long = scope.spawn(|| ranks[0].all_reduce(&mut [1.0, 2.0]));
            assert!(ranks[1].all_reduce(&mut [1.0]).is_err());
            assert!(long.join().unwrap().is_err());
        });
    }
}
