//! The engine's one thread: reads commands, runs steps, publishes statistics, then delivers the
//! events.
//!
//! **Invariant:** events are delivered after the statistics are up to date, so a client that has
//! seen `Done` sees its pages accounted for.

use crate::engine::{EngineOptions, EngineState};
use crate::live::{Submission, deliver};
use crate::request::{Event, RequestError, RequestId};
use crate::serving::{Activity, Serving, panic_message};
use oscar_backend::Backend;
use oscar_runner::Runner;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Duration;

/// How long the thread waits for commands before it looks for answers of the page store, when it has
/// nothing else to do.
const STORE_POLL: Duration = Duration::from_micros(200);

pub enum Command {
    Submit(Box<Submission>),
    Cancel(RequestId),
    Flush(Sender<usize>),
    Stop,
}

pub struct Worker<B: Backend> {
    serving: Serving<B>,
    state: Arc<EngineState>,
    inbox: Receiver<Command>,
}

impl<B: Backend> Worker<B> {
    pub fn new(
        runner: Runner<B>,
        options: &EngineOptions,
        state: Arc<EngineState>,
        inbox: Receiver<Command>,
    ) -> Self {
        Self { serving: Serving::new(runner, options), state, inbox }
    }

    /// Serves until it is told to stop. Requests that still wait then are told why.
    pub fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let failure = match ended {
            Ok(()) => self.serving.device_failure().map(str::to_owned),
            Err(panic) => Some(panic_message(&*panic)),
        };
        let error = match failure {
            None => RequestError::ShuttingDown,
            Some(reason) => {
                tracing::error!(reason, "the engine has stopped");
                self.state.fail(reason.clone());
                RequestError::Engine(reason)
            }
        };
        self.state.close();
        self.serving.fail_all(&error);
        while let Ok(command) = self.inbox.try_recv() {
            if let Command::Submit(submission) = command {
                deliver(&*submission.sink, Event::Failed(error.clone()));
            }
        }
        self.publish(true);
        self.serving.finish_store();
        self.publish(true);
    }

    /// Returns when the engine is told to stop, or when the device has failed.
    fn serve(&mut self) {
        self.publish(true);
        let state = self.state.clone();
        while self.serving.device_failure().is_none() {
            let command = match self.serving.activity() {
                Activity::Idle => self.inbox.recv().map_err(|_| TryRecvError::Disconnected),
                Activity::Waiting => self.inbox.recv_timeout(STORE_POLL).map_err(|error| match error {
                    RecvTimeoutError::Timeout => TryRecvError::Empty,
                    RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                }),
                Activity::Busy => self.inbox.try_recv(),
            };
            match command {
                Ok(Command::Submit(submission)) => self.serving.take(*submission),
                Ok(Command::Cancel(id)) => self.serving.cancel(id),
                Ok(Command::Flush(reply)) => {
                    let freed = self.serving.flush();
                    self.publish(true);
                    // Nobody may be waiting for the answer any more.
                    let _ = reply.send(freed);
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => state.heartbeat().during(|| self.serving.step()),
            }
            self.publish(self.serving.activity() == Activity::Idle);
        }
    }

    fn publish(&mut self, exact: bool) {
        *self.state.stats() = self.serving.statistics(exact);
        self.serving.deliver();
    }
}
