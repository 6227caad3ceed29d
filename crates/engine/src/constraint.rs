//! Restrictions on the tokens of an answer.
//!
//! The engine knows neither grammars nor text: a front end hands it a [`Constraint`], and each
//! choice walks through a state of its own. The tokens that are allowed next are found while the
//! device computes the step, because they depend only on tokens that are already chosen. The device
//! chooses among them ([`TokenMask`]) where it can choose at all.

use oscar_backend::TokenMask;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::scope;

/// States prepared by one thread before another one is started.
const STATES_PER_THREAD: usize = 8;

/// Most threads that prepare states during a step.
const MAX_THREADS: usize = 4;

/// A form that answers must have.
pub trait Constraint: Send + Sync {
    /// The field of the request that asked for the form; errors name it.
    fn parameter(&self) -> &str;

    /// The state of a new answer.
    fn start(&self) -> Box<dyn ConstraintState>;
}

/// How far one answer has come.
pub trait ConstraintState: Send {
    /// The tokens that may come next: bit `i % 32` of word `i / 32` is set for token `i`. A
    /// complete answer allows its end tokens.
    ///
    /// # Errors
    /// If the constraint cannot be followed any further.
    fn allowed(&mut self) -> Result<Vec<u32>, String>;

    /// Takes the next token.
    ///
    /// # Errors
    /// If the token is not allowed.
    fn accept(&mut self, token: u32) -> Result<(), String>;
}

/// A constraint as a request carries it. Two are equal if they are the same object.
#[derive(Clone)]
pub struct SharedConstraint(pub Arc<dyn Constraint>);

impl PartialEq for SharedConstraint {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for SharedConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedConstraint")
    }
}

/// The constraint of one choice, with the tokens it allows next.
pub struct Guide {
    state: Box<dyn ConstraintState>,
    /// For the next token: set by [`Guide::prepare`].
    mask: Arc<TokenMask>,
    prepared: Option<Result<(), String>>,
}

impl Guide {
    pub fn new(constraint: &SharedConstraint) -> Self {
        Self { state: constraint.0.start(), mask: Arc::default(), prepared: None }
    }

    /// The mask of the next token, which a thread of [`prepare_during`] sets.
    pub fn mask(&self) -> Arc<TokenMask> {
        self.mask.clone()
    }

    /// Finds the tokens allowed next, unless they are known. Always sets the mask: a device may wait
    /// for it.
    fn prepare(&mut self) {
        if self.prepared.is_none() {
            let found = catch_unwind(AssertUnwindSafe(|| self.state.allowed()));
            let found = found.unwrap_or_else(|_| Err("the constraint's parser panicked".to_owned()));
            let (words, outcome) =
                found.map_or_else(|error| (Vec::new(), Err(error)), |words| (words, Ok(())));
            self.mask.set(words);
            self.prepared = Some(outcome);
        }
    }

    /// The tokens allowed next.
    pub fn allowed(&mut self) -> Result<&[u32], String> {
        self.prepare();
        match &self.prepared {
            Some(Ok(())) => Ok(self.mask.words()),
            Some(Err(error)) => Err(error.clone()),
            None => Err("the constraint was not prepared".to_owned()),
        }
    }

    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        (self.mask, self.prepared) = (Arc::default(), None);
        catch_unwind(AssertUnwindSafe(|| self.state.accept(token)))
            .unwrap_or_else(|_| Err("the constraint's parser panicked".to_owned()))
    }
}

/// Runs `step` on this thread while others prepare the guides.
pub fn prepare_during<R>(guides: &mut [&mut Guide], step: impl FnOnce() -> R) -> R {
    if guides.is_empty() {
        return step();
    }
    let threads = guides.len().div_ceil(STATES_PER_THREAD).min(MAX_THREADS);
    let share = guides.len().div_ceil(threads);
    scope(|scope| {
        for part in guides.chunks_mut(share) {
            scope.spawn(|| part.iter_mut().for_each(|guide| guide.prepare()));
        }
        step()
    })
}
