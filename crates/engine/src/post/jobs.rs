//! Work for conversations between their turns: replaying turns on the base, probing it, gathering
//! views.
//!
//! **Invariant:** [`Job::advance`] computes at most the given number of tokens, reads or compares a
//! bounded number of keys, or copies the rows of one view. Work that grows with the history and needs no device
//! (clustering, sorting scores) runs on a thread of its own. A job can give its pages back at any time
//! and goes on later.

use super::{PostCap, PostSetting, Turn, ViewSets, view_key};
use crate::request::EngineStats;
use crate::serving::Activity;
use crate::store::PageTiers;
use oscar_backend::Backend;
use oscar_cache::{CacheSalt, PrefixKey, RadixCache};
use oscar_codec::{CacheLayout, PAGE_TOKENS};
use oscar_runner::{Logits, Runner, Sequence, StepError, StepOutput, StepRequest};
use oscar_views::{Eviction, History, Probing, Ranking, Route, Scores, Topics, ViewSet};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

/// Jobs that wait at most; the oldest are given up. A conversation without views reads its base.
const MOST_JOBS: usize = 64;
/// Times that a job gives way to requests before it is given up.
const MOST_RETREATS: usize = 8;

/// What a job works with.
pub(crate) struct Bench<'a, B: Backend> {
    pub runner: &'a mut Runner<B>,
    pub cache: &'a mut RadixCache,
    pub tiers: Option<&'a mut PageTiers>,
    pub sets: &'a mut ViewSets,
    pub setting: &'a PostSetting,
    pub counters: &'a mut EngineStats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Worked,
    /// A thread has not answered yet.
    Waits,
    Ended,
}

enum Stage {
    /// Compute the finished turn on the base.
    Replay,
    /// Find out whether the base has a new point.
    Begin,
    Cluster(Receiver<Topics>),
    Probe(Box<Probing>),
    Rank(Ranking),
    Select(Receiver<ViewSet>),
    /// Copy the rows of these views.
    Gather(Arc<ViewSet>, VecDeque<Route>),
}

/// See the [module](self).
pub(crate) struct Job {
    salt: Option<CacheSalt>,
    cap: PostCap,
    turn: Turn,
    /// The conversation with its last answer.
    tokens: Vec<u32>,
    base: Option<Sequence>,
    /// The point that gets views, and the name of the base up to there.
    point: Option<(usize, CacheSalt)>,
    topics: Option<Topics>,
    stage: Stage,
    waits: bool,
    retreats: usize,
}

impl Job {
    pub fn new(salt: Option<CacheSalt>, cap: PostCap, turn: Turn, tokens: Vec<u32>, replays: bool) -> Self {
        let stage = if replays { Stage::Replay } else { Stage::Begin };
        let (base, point, topics) = (None, None, None);
        Self { salt, cap, turn, tokens, base, point, topics, stage, waits: false, retreats: 0 }
    }

    /// Whether nothing of it is done that another job would have to do again.
    fn is_fresh(&self) -> bool {
        self.base.is_none() && matches!(self.stage, Stage::Replay | Stage::Begin)
    }

    /// Gives all pages back. Returns whether there were any.
    fn release(&mut self) -> bool {
        if let Stage::Probe(probing) = &mut self.stage {
            probing.release();
        }
        self.base.take().is_some()
    }

    /// Brings the base to `len` tokens, at most `most` of them now. Returns whether it is there.
    fn reach<B: Backend>(
        &mut self,
        bench: &mut Bench<'_, B>,
        len: usize,
        most: usize,
    ) -> Result<bool, StepError> {
        let Bench { runner, cache, counters, .. } = bench;
        let base = self.base.get_or_insert_with(|| {
            let prefix = cache.find_exact(PrefixKey::new(self.salt, &self.tokens[..len]));
            Sequence::resume(runner.layout(), prefix)
        });
        let (from, until) = (base.len(), len.min(base.len() + most.max(1)));
        if from < until {
            let tokens = &self.tokens[from..until];
            let request = StepRequest { sequence: base, tokens, logits: Logits::None };
            runner.step(&mut [request], &mut StepOutput::default())?;
            runner.wait()?;
            counters.replayed_tokens += tokens.len() as u64;
            base.publish(cache, PrefixKey::new(self.salt, &self.tokens));
        }
        Ok(until == len)
    }

    /// Does the next piece of work.
    ///
    /// # Errors
    /// If a step fails. After [`StepError::OutOfPages`] it may be called again.
    pub fn advance<B: Backend>(
        &mut self,
        bench: &mut Bench<'_, B>,
        most: usize,
    ) -> Result<Progress, StepError> {
        self.waits = false;
        if matches!(self.stage, Stage::Replay) {
            let whole = self.tokens.len() / PAGE_TOKENS * PAGE_TOKENS;
            if self.reach(bench, whole, most)? {
                // The pages of the turn itself lie behind a view, and a store keeps none of those.
                if let Some(tiers) = &mut bench.tiers {
                    let key = PrefixKey::new(self.salt, &self.tokens[..whole]);
                    tiers.offer(bench.runner, bench.cache, key, 0, true);
                }
                self.base = None;
                self.stage = Stage::Begin;
            }
            return Ok(Progress::Worked);
        }
        if self.point.is_none() {
            self.point = self.cap.points(self.salt, &self.turn, &self.tokens).first().copied();
        }
        let Some((point, key)) = self.point else { return Ok(Progress::Ended) };
        let needs_base = !matches!(self.stage, Stage::Cluster(_) | Stage::Select(_));
        if matches!(self.stage, Stage::Begin) && bench.sets.contains(key) {
            return Ok(Progress::Ended);
        }
        if needs_base && self.base.as_ref().is_none_or(|base| base.len() < point) {
            self.reach(bench, point, most)?;
            return Ok(Progress::Worked);
        }
        let progress = self.derive(bench, (point, key), most)?;
        self.waits = progress == Progress::Waits;
        Ok(progress)
    }

    /// The stages that make views of a base which has reached its point.
    fn derive<B: Backend>(
        &mut self,
        bench: &mut Bench<'_, B>,
        (point, key): (usize, CacheSalt),
        most: usize,
    ) -> Result<Progress, StepError> {
        let Bench { runner, cache, sets, setting, counters, .. } = bench;
        let ended = StepError::Eviction("a thread that groups or sorts rows has ended");
        let none = Sequence::default();
        let history = |base| History { sequence: base, tokens: &self.tokens, len: point, observed: None };
        let base = self.base.as_ref().unwrap_or(&none);
        self.stage = match &mut self.stage {
            Stage::Replay => return Ok(Progress::Worked),
            Stage::Begin if self.cap.eviction == Eviction::Episodes => {
                let clip = |range: &std::ops::Range<usize>| range.start..range.end.min(point);
                let utterances: Vec<_> =
                    self.turn.utterances.iter().map(clip).filter(|r| !r.is_empty()).collect();
                let (tokens, embeddings) = (self.tokens[..point].to_vec(), setting.embeddings.clone());
                let options = self.cap.episodes;
                Stage::Cluster(on_thread(move || Topics::new(&tokens, &utterances, &embeddings, options)))
            }
            Stage::Begin if self.cap.eviction == Eviction::KeyDiffPost => {
                Stage::Rank(Ranking::new(runner, &history(base)))
            }
            Stage::Begin => {
                Stage::Probe(Box::new(Probing::repeating(runner, &history(base), &setting.probe)?))
            }
            Stage::Cluster(answer) => match answer.try_recv() {
                Ok(topics) => {
                    self.topics = Some(topics);
                    return self.recite(bench, point).map(|()| Progress::Worked);
                }
                Err(TryRecvError::Empty) => return Ok(Progress::Waits),
                Err(TryRecvError::Disconnected) => return Err(ended),
            },
            Stage::Probe(probing) => {
                let fed = probing.advance(runner, &history(base), most)?;
                counters.probe_tokens += fed as u64;
                if !probing.is_done() {
                    return Ok(Progress::Worked);
                }
                let Stage::Probe(probing) = std::mem::replace(&mut self.stage, Stage::Begin) else {
                    return Err(ended);
                };
                self.choose(runner.layout().clone(), point, move || probing.scores())
            }
            Stage::Rank(ranking) => {
                if !ranking.advance(runner, &history(base))? {
                    return Ok(Progress::Worked);
                }
                let Stage::Rank(ranking) = std::mem::replace(&mut self.stage, Stage::Begin) else {
                    return Err(ended);
                };
                self.choose(runner.layout().clone(), point, move || vec![ranking.scores()])
            }
            Stage::Select(answer) => match answer.try_recv() {
                Ok(set) => {
                    let set = Arc::new(set);
                    sets.insert(key, set.clone());
                    let routes = set.routes().collect();
                    Stage::Gather(set, routes)
                }
                Err(TryRecvError::Empty) => return Ok(Progress::Waits),
                Err(TryRecvError::Disconnected) => return Err(ended),
            },
            Stage::Gather(set, routes) => {
                let Some(&route) = routes.front() else { return Ok(Progress::Ended) };
                if cache.stored_view(view_key(key, route)).is_none() {
                    let view = runner.gather(base, point, set.selection(route).kept)?;
                    cache.store_view(view_key(key, route), view);
                    counters.views += 1;
                }
                routes.pop_front();
                return Ok(Progress::Worked);
            }
        };
        Ok(Progress::Worked)
    }

    /// Chooses the rows of the views on a thread of its own.
    fn choose(
        &mut self,
        layout: CacheLayout,
        point: usize,
        scores: impl FnOnce() -> Vec<Scores> + Send + 'static,
    ) -> Stage {
        let (topics, keep) = (self.topics.take(), self.cap.kept_until(point));
        Stage::Select(on_thread(move || ViewSet::new(layout, scores(), topics, keep)))
    }

    /// Begins the probes of the episodes. Their text may need the base, whose pages may be gone by now:
    /// only its length counts here.
    fn recite<B: Backend>(&mut self, bench: &mut Bench<'_, B>, point: usize) -> Result<(), StepError> {
        let none = Sequence::default();
        let base = self.base.as_ref().unwrap_or(&none);
        let history = History { sequence: base, tokens: &self.tokens, len: point, observed: None };
        let Some(topics) = &self.topics else { return Ok(()) };
        let probing = Probing::reciting(bench.runner, &history, topics, &bench.setting.probe)?;
        self.stage = Stage::Probe(Box::new(probing));
        Ok(())
    }
}

/// Computes something elsewhere; the answer comes through the channel.
fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, receiver) = channel();
    // Without a thread the sender is dropped, and the receiver says so.
    let _ = std::thread::Builder::new().name("views".into()).spawn(move || sender.send(work()));
    receiver
}

/// Jobs in the order in which they came. Only the first one holds pages.
#[derive(Default)]
pub(crate) struct Jobs(VecDeque<Job>);

impl Jobs {
    /// Queues a job. It replaces those for shorter parts of the same conversation that have not begun.
    pub fn push(&mut self, job: Job) {
        self.0.retain(|old| !(old.is_fresh() && old.salt == job.salt && job.tokens.starts_with(&old.tokens)));
        self.0.push_back(job);
        if self.0.len() > MOST_JOBS {
            self.0.pop_front();
        }
    }

    pub fn take(&mut self) -> Option<Job> {
        self.0.pop_front()
    }

    /// The job goes on with the next step.
    pub fn resume(&mut self, job: Job) {
        self.0.push_front(job);
    }

    /// There was no room for the job: it gives its pages back and waits behind the others. `false` if
    /// it was given up.
    pub fn retreat(&mut self, mut job: Job) -> bool {
        job.release();
        job.retreats += 1;
        let stays = job.retreats <= MOST_RETREATS;
        if stays {
            self.0.push_back(job);
        }
        stays
    }

    /// Gives the pages of one job to requests that need them. Returns whether there were any.
    pub fn give_way(&mut self) -> bool {
        self.0.iter_mut().any(Job::release)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn activity(&self) -> Activity {
        match self.0.front() {
            None => Activity::Idle,
            // For a thread that groups or sorts rows.
            Some(job) if job.waits => Activity::Waiting,
            Some(_) => Activity::Busy,
        }
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}
