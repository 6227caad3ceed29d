//! Threads that stay: a fork-join pool cheap enough to call several times a layer.
//!
//! One call of [`ThreadPool::run`] runs tasks `0..n`, each exactly once, on the caller and on
//! whichever workers arrive in time, and returns when all are done. Tasks are claimed one by one
//! from a counter, so uneven tasks balance themselves. A call allocates nothing.
//!
//! Invariants:
//! - A worker touches a job only while it is counted in `Shared::state`, and `run` does not return
//!   before that count is zero and the job is closed. So the job may borrow from the caller's
//!   stack.
//! - All tasks run with subnormals flushed ([`crate::float_env`]), on workers and caller alike, so
//!   that numbers do not depend on who computed them.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::float_env::{flush_subnormals, with_ftz};

/// How long an idle worker watches for the next job before it sleeps: longer than the gap between
/// two operations of a layer, shorter than anything a user would see as a busy core.
const SPIN: Duration = Duration::from_micros(40);

/// The same where a GPU computes between two jobs: longer than its part of a layer.
const LONG_SPIN: Duration = Duration::from_micros(500);

/// `state`: bits 63..32 count the jobs, bit 31 says that the current one accepts workers, the rest
/// counts the workers inside it.
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;
const NEXT_JOB: u64 = 1 << 32;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// A job as the workers see it; its true lifetime is the call of `run` that published it.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    tasks: usize,
}

struct Shared {
    state: AtomicU64,
    /// Written by the caller while no worker is inside, read by workers inside.
    job: UnsafeCell<Option<Job>>,
    next_task: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleepers: AtomicUsize,
    spin: Duration,
    sleep: Mutex<()>,
    wake: Condvar,
    shutdown: AtomicBool,
}

// SAFETY: `job` is the only field that is not Sync by itself; see its comment and the invariant
// above. The task behind its pointer is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above: nothing in it is bound to a thread.
unsafe impl Send for Shared {}

thread_local! {
    /// Whether this thread is inside a task of some pool; such a thread runs further jobs by
    /// itself.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// A fork-join pool of persistent threads. Dropping it ends them.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One job at a time: callers from several threads take turns.
    turn: Mutex<()>,
}

impl ThreadPool {
    /// A pool of `threads` threads in all (at least one), counting the caller of
    /// [`ThreadPool::run`].
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::with_spin(threads, SPIN)
    }

    /// A pool whose jobs come between the operations of a GPU.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn beside_gpu(threads: usize) -> std::io::Result<Self> {
        Self::with_spin(threads, LONG_SPIN)
    }

    fn with_spin(threads: usize, spin: Duration) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next_task: AtomicUsize::new(0),
            panic: Mutex::new(None),
            sleepers: AtomicUsize::new(0),
            spin,
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            shutdown: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new(), turn: Mutex::new(()) };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("oscar-kernel-{index}"));
            pool.workers.push(builder.spawn(move || work(&shared))?);
        }
        Ok(pool)
    }

    /// Threads that can work on a job, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)` to `task(tasks - 1)`, each once, in any order and on any thread of the pool,
    /// and returns when all have returned. Called from inside a task, it runs them one after
    /// another on the spot.
    ///
    /// # Panics
    /// With the panic of a task, if one panics; tasks not yet claimed are then skipped.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() || IN_TASK.get() {
            with_ftz(|| (0..tasks).for_each(task));
            return;
        }
        let _turn = lock(&self.turn);
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed. The pointer is dereferenced by threads inside the
        // job, and this function does not return before the job is closed and empty.
        let task: *const Task<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(task)) };
        let job = Job { task, tasks };
        // SAFETY: no worker is inside: the previous job was closed and empty before its `run`
        // returned, and `turn` keeps other callers out.
        unsafe { *shared.job.get() = Some(job) };
        shared.next_task.store(0, Ordering::Relaxed);
        let number = shared.state.load(Ordering::Relaxed) & !(OPEN | INSIDE);
        // Publishes the job and the counter; ordered before the look at `sleepers`, see
        // `wait_for_job`.
        shared.state.store(number.wrapping_add(NEXT_JOB) | OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) != 0 {
            drop(lock(&shared.sleep));
            shared.wake.notify_all();
        }

        IN_TASK.set(true);
        with_ftz(|| shared.run_tasks(job));
        IN_TASK.set(false);

        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0_u32;
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            relax(&mut spins);
        }
        let panic = lock(&shared.panic).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.sleep));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so there is nothing to report.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ThreadPool({} threads)", self.threads())
    }
}

impl Shared {
    /// Claims and runs tasks until none is left. Keeps the first panic for the caller.
    fn run_tasks(&self, job: Job) {
        // SAFETY: the calling thread is inside the job (or is its owner), so the borrow behind the
        // pointer is alive until it leaves.
        let task = unsafe { &*job.task };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let index = self.next_task.fetch_add(1, Ordering::Relaxed);
                if index >= job.tasks {
                    break;
                }
                task(index);
            }
        }));
        if let Err(payload) = outcome {
            self.next_task.store(job.tasks, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }

    /// Waits for a job after number `last` and returns its state word; `None` at shutdown.
    fn wait_for_job(&self, last: u64) -> Option<u64> {
        let fresh = |state: u64| state & OPEN != 0 && state & !(OPEN | INSIDE) != last;
        let started = Instant::now();
        while started.elapsed() < self.spin {
            for _ in 0..64 {
                let state = self.state.load(Ordering::Acquire);
                if fresh(state) {
                    return Some(state);
                }
                std::hint::spin_loop();
            }
            if self.shutdown.load(Ordering::Relaxed) {
                return None;
            }
        }
        // Either the caller sees this sleeper after publishing, and wakes it, or the sleeper sees
        // the job.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = lock(&self.sleep);
        let found = loop {
            let state = self.state.load(Ordering::SeqCst);
            if fresh(state) {
                break Some(state);
            }
            if self.shutdown.load(Ordering::SeqCst) {
                break None;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        found
    }

    /// Enters the open job, unless it closes first. The count is the permit to touch it.
    fn enter(&self, mut state: u64) -> Option<(Job, u64)> {
        while state & OPEN != 0 {
            match self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    // SAFETY: this thread is counted inside an open job, so the caller has
                    // published it and does not write the cell until the count is zero again.
                    let job = unsafe { *self.job.get() };
                    return job.map(|job| (job, state & !(OPEN | INSIDE)));
                }
                Err(now) => state = now,
            }
        }
        None
    }
}

fn work(shared: &Shared) {
    flush_subnormals();
    IN_TASK.set(true);
    let mut last = 0;
    while let Some(state) = shared.wait_for_job(last) {
        if let Some((job, number)) = shared.enter(state) {
            last = number;
            shared.run_tasks(job);
            shared.state.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Waits a little; gives the core away when the wait is long, as it is when cores are shared.
fn relax(spins: &mut u32) {
    *spins += 1;
    if spins.is_multiple_of(1024) { std::thread::yield_now() } else { std::hint::spin_loop() }
}

/// Ignores poisoning: the guarded data is valid at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::float_env::flushes_subnormals;

    fn pool(threads: usize) -> ThreadPool {
        ThreadPool::new(threads).unwrap()
    }

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in [0, 1, 2, 3, 8] {
            let pool = pool(threads);
            assert_eq!(pool.threads(), threads.max(1));
            for tasks in [0, 1, 2, 7, 1000] {
                let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|index| {
                    runs[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn many_tiny_runs_lose_nothing() {
        let pool = pool(4);
        let total = AtomicUsize::new(0);
        for round in 0..20_000 {
            pool.run(3, &|index| {
                total.fetch_add(index + 1, Ordering::Relaxed);
            });
            if round % 4000 == 0 {
                // Long enough for the workers to fall asleep.
                std::thread::sleep(SPIN * 10);
            }
        }
        assert_eq!(total.into_inner(), 20_000 * 6);
    }

    #[test]
    fn tasks_may_borrow_and_fill_disjoint_parts() {
        let pool = pool(3);
        let cells: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        let offset = 5;
        pool.run(cells.len(), &|index| cells[index].store(index + offset, Ordering::Relaxed));
        assert!(cells.iter().enumerate().all(|(i, cell)| cell.load(Ordering::Relaxed) == i + offset));
    }

    #[test]
    fn panic_of_a_task_reaches_the_caller_and_the_pool_survives() {
        for threads in [1, 4] {
            let pool = pool(threads);
            for round in 0..50 {
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(64, &|index| assert!(index != 40, "task 40 of round {round}"));
                }));
                let message = *caught.unwrap_err().downcast::<String>().unwrap();
                assert!(message.contains(&format!("task 40 of round {round}")), "{message}");
            }
            let count = AtomicUsize::new(0);
            pool.run(10, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 10);
        }
    }

    #[test]
    fn nested_runs_execute_in_place() {
        let pool = pool(4);
        let total = AtomicUsize::new(0);
        pool.run(8, &|_| {
            let here = std::thread::current().id();
            pool.run(8, &|_| {
                assert_eq!(std::thread::current().id(), here);
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 64);
    }

    #[test]
    fn workers_take_part() {
        let pool = pool(3);
        for _ in 0..20 {
            let started = AtomicUsize::new(0);
            pool.run(3, &|_| {
                // Each task holds its thread until all three run at once.
                started.fetch_add(1, Ordering::SeqCst);
                let since = Instant::now();
                while started.load(Ordering::SeqCst) < 3 {
                    assert!(since.elapsed() < Duration::from_secs(20), "a worker did not come");
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn several_callers_take_turns() {
        let pool = pool(3);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(5, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 500 * 5);
    }

    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn all_tasks_flush_subnormals_and_the_caller_gets_its_mode_back() {
        for threads in [1, 3] {
            pool(threads).run(200, &|_| assert!(flushes_subnormals()));
            assert!(!flushes_subnormals());
        }
    }
}
