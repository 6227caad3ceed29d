//! Conversations under eviction: how many of their facts survive, and what that costs.
//!
//! A case is a long conversation with several questions, each asked by itself. Its history is
//! computed once for each cache format. Every policy scores that shared history before it knows a
//! question, and every budget gives a view of it; all questions are then asked of all views. Episodes
//! have several views of one budget, and each question is routed to one of them by its text. An
//! answer counts as right if every token of it, and the end of the turn, is the most likely one
//! after the right tokens before it: exactly then would greedy decoding give it.

mod asking;
mod cases;
mod picture;
mod report;

pub use cases::{Ask, ConversationCase, conversation_cases};
pub use picture::picture;
pub use report::{ConversationRow, summarize};

use crate::error::Result;
use crate::prompts::Prompts;
use asking::{Asking, Reply};
use oscar_backend::Backend;
use oscar_runner::{Runner, Sequence, StepOutput};
use oscar_views::{
    Budget, EpisodeOptions, Episodes, Evict, HeadSplit, History, InputEmbeddings, Observed, Probe, Route,
    Scores, Selection, Topics, observe, score, select,
};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

/// A policy with its division of rows among heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arm {
    /// One view, made by a scorer.
    Scorer(Evict, HeadSplit),
    /// A view for each topic.
    Episodes(HeadSplit),
}

impl Arm {
    fn name(self) -> String {
        match self {
            Self::Scorer(evict, split) => format!("{evict}-{}", split.name()),
            Self::Episodes(split) => format!("{EPISODES}-{}", split.name()),
        }
    }

    fn split(self) -> HeadSplit {
        match self {
            Self::Scorer(_, split) | Self::Episodes(split) => split,
        }
    }
}

/// The name of the policy with several views.
pub const EPISODES: &str = "episodes";

/// What a budget is a share of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    Rows,
    Bytes,
}

/// What is compared: every policy with every budget.
#[derive(Clone, Debug)]
pub struct Arms {
    pub policies: Vec<Arm>,
    /// Percent of the history.
    pub budgets: Vec<(Unit, f64)>,
    pub episodes: EpisodeOptions,
}

/// What all cases share.
pub struct Setting<'a> {
    pub arms: &'a Arms,
    pub probe: &'a Probe,
    pub prompts: &'a Prompts<'a>,
    pub stops: &'a [u32],
    pub embeddings: InputEmbeddings,
}

/// The results of one case under one policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub policy: String,
    pub percent: f64,
    pub unit: Unit,
    /// Share of the history that is kept, protected rows included: mean over the questions.
    pub rows: f64,
    /// Bytes of the pages of a question's view, or of the whole history.
    pub bytes: usize,
    /// Bytes of all views together.
    pub held: usize,
    /// Tokens computed to score the rows.
    pub probe_tokens: usize,
    pub asked: usize,
    pub right: usize,
    /// Sum over the questions of the mean divergence from the whole cache.
    pub kl: f64,
    /// Sum over the questions of the share of the needed rows that the heads keep, and how many
    /// questions need rows of the history.
    pub survival: f64,
    pub needing: usize,
    /// Questions without an answer, how many of them got no value of the conversation, and the
    /// tokens of all their answers.
    pub unanswerable: usize,
    pub abstained: usize,
    pub free_tokens: usize,
    /// Questions routed to episodes whose topic is known, and how many of them to the right one.
    pub routed: usize,
    pub routed_right: usize,
    /// Questions asked of one episode, of two together, and of the global view.
    pub routes: [usize; 3],
}

impl Outcome {
    fn new(policy: String, (unit, percent): (Unit, f64)) -> Self {
        Self {
            policy,
            percent,
            unit,
            rows: 1.0,
            bytes: 0,
            held: 0,
            probe_tokens: 0,
            asked: 0,
            right: 0,
            kl: 0.0,
            survival: 0.0,
            needing: 0,
            unanswerable: 0,
            abstained: 0,
            free_tokens: 0,
            routed: 0,
            routed_right: 0,
            routes: [0; 3],
        }
    }
}

/// The results of one case, as a journal keeps them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseOutcomes {
    pub outcomes: Vec<Outcome>,
}

/// The name of the arm without eviction.
pub const FULL: &str = "none";

/// Runs one case under every arm.
pub fn run_case<B: Backend>(
    runner: &mut Runner<B>,
    case: &ConversationCase,
    setting: &Setting<'_>,
) -> Result<Vec<Outcome>> {
    let mut base = Sequence::forkable(runner);
    let tokens = &case.history;
    let replays = |arm: &Arm| matches!(arm, Arm::Scorer(evict, _) if evict.replays());
    let observed = match setting.arms.policies.iter().any(replays) {
        true => Some(observe(runner, &mut base, tokens)?),
        false => {
            runner.prefill(&mut base, tokens, &mut StepOutput::default(), |_| {})?;
            None
        }
    };
    let asking = Asking { case, prompts: setting.prompts, stops: setting.stops };
    let full: Vec<Reply> =
        case.asks.iter().map(|ask| asking.answer(runner, &base, ask)).collect::<Result<_>>()?;
    let blocks = oscar_cache::view_end(runner.layout(), tokens.len()).saturating_sub(64) / 64;
    let bytes = blocks * runner.layout().coded_block_bytes();
    let mut whole = Outcome { bytes, held: bytes, ..Outcome::new(FULL.to_owned(), (Unit::Rows, 100.0)) };
    for (ask, reply) in case.asks.iter().zip(&full) {
        asking.judge(&mut whole, ask, reply, reply);
    }
    whole.needing = case.asks.iter().filter(|ask| !ask.needs.is_empty()).count();
    whole.survival = whole.needing as f64;
    let told = Told { base: &base, full, bytes, asking };
    let mut outcomes = vec![whole];
    let mut ranked: Vec<(Arm, Ranked)> = Vec::new();
    for &arm in &setting.arms.policies {
        let same = |known: Arm| match (known, arm) {
            (Arm::Scorer(a, _), Arm::Scorer(b, _)) => a == b,
            (Arm::Episodes(_), Arm::Episodes(_)) => true,
            _ => false,
        };
        if !ranked.iter().any(|(known, _)| same(*known)) {
            ranked.push((arm, told.rank(runner, arm, setting, observed.as_ref())?));
        }
        let Some((_, scores)) = ranked.iter().find(|(known, _)| same(*known)) else { continue };
        for &budget in &setting.arms.budgets {
            outcomes.push(told.outcome(runner, arm, budget, scores, setting)?);
        }
    }
    Ok(outcomes)
}

/// Scores of a history.
enum Ranked {
    One(Scores),
    Episodes(Episodes),
}

impl Ranked {
    /// The view for a question, or the only one.
    fn route(&self, ask: &Ask, embeddings: &InputEmbeddings) -> Route {
        match self {
            Self::One(_) => Route::Global,
            Self::Episodes(episodes) => episodes.topics.route(&ask.question, embeddings).0,
        }
    }

    fn probe_tokens(&self) -> usize {
        match self {
            Self::One(scores) => scores.probe_tokens,
            Self::Episodes(episodes) => episodes.probe_tokens(),
        }
    }

    /// Counts where a question went.
    fn note(&self, outcome: &mut Outcome, ask: &Ask, route: Route) {
        let Self::Episodes(episodes) = self else { return };
        let kind = match route {
            Route::Episode(_) => 0,
            Route::Union(..) => 1,
            Route::Global => 2,
        };
        outcome.routes[kind] += 1;
        // The last turn that a question needs tells its answer.
        let topic = ask.needs.last().and_then(|needs| episodes.topics.episode_at(needs.start));
        if let (Some(topic), true) = (topic, route != Route::Global) {
            outcome.routed += 1;
            outcome.routed_right += usize::from(route.covers(topic));
        }
    }
}

/// A history with the answers that its whole cache gives.
struct Told<'a> {
    base: &'a Sequence,
    full: Vec<Reply>,
    bytes: usize,
    asking: Asking<'a>,
}

impl Told<'_> {
    fn rank<B: Backend>(
        &self,
        runner: &mut Runner<B>,
        arm: Arm,
        setting: &Setting<'_>,
        observed: Option<&Observed>,
    ) -> Result<Ranked> {
        let case = self.asking.case;
        let history =
            History { sequence: self.base, tokens: &case.history, len: case.history.len(), observed };
        Ok(match arm {
            Arm::Scorer(evict, _) => Ranked::One(score(runner, &history, evict, setting.probe)?),
            Arm::Episodes(_) => {
                let options = setting.arms.episodes;
                let topics = Topics::new(&case.history, &case.utterances, &setting.embeddings, options);
                Ranked::Episodes(Episodes::score(runner, &history, topics, setting.probe)?)
            }
        })
    }

    fn outcome<B: Backend>(
        &self,
        runner: &mut Runner<B>,
        arm: Arm,
        (unit, percent): (Unit, f64),
        ranked: &Ranked,
        setting: &Setting<'_>,
    ) -> Result<Outcome> {
        let case = self.asking.case;
        let budget = match unit {
            Unit::Rows => Budget::Percent(percent),
            Unit::Bytes => Budget::Bytes((self.bytes as f64 * percent / 100.0) as usize),
        };
        let layout = runner.layout().clone();
        let chosen = |route: Route| {
            let scores = match ranked {
                Ranked::One(scores) => scores,
                Ranked::Episodes(episodes) => &episodes.scores(route),
            };
            select(&layout, scores, budget, arm.split(), &case.protected)
        };
        let mut outcome = Outcome {
            rows: 0.0,
            probe_tokens: ranked.probe_tokens(),
            ..Outcome::new(arm.name(), (unit, percent))
        };
        let mut views: HashMap<Route, (Selection, Sequence)> = HashMap::new();
        let count = case.asks.len().max(1);
        let mut bytes = 0;
        for (ask, full) in case.asks.iter().zip(&self.full) {
            let route = ranked.route(ask, &setting.embeddings);
            ranked.note(&mut outcome, ask, route);
            let (selection, view) = match views.entry(route) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => {
                    let selection = chosen(route);
                    let view = runner.derive(self.base, case.history.len(), selection.kept.clone())?;
                    place.insert((selection, view))
                }
            };
            outcome.rows += selection.share() / count as f64;
            bytes += selection.bytes(&layout);
            if !ask.needs.is_empty() {
                outcome.survival += survival(selection, &ask.needs);
                outcome.needing += 1;
            }
            let reply = self.asking.answer(runner, view, ask)?;
            self.asking.judge(&mut outcome, ask, full, &reply);
        }
        outcome.bytes = bytes / count;
        outcome.held = match ranked {
            Ranked::One(_) => outcome.bytes,
            Ranked::Episodes(episodes) => episodes.routes().map(|route| chosen(route).bytes(&layout)).sum(),
        };
        Ok(outcome)
    }
}

/// Mean share of some turns' rows that the heads keep.
fn survival(selection: &Selection, needs: &[Range<usize>]) -> f64 {
    let share = |turn: &Range<usize>| {
        let held = |kept: &Vec<u32>| kept.iter().filter(|&&p| turn.contains(&(p as usize))).count();
        let kept: usize = selection.kept.iter().map(held).sum();
        kept as f64 / (selection.kept.len() * turn.len()).max(1) as f64
    };
    needs.iter().map(share).sum::<f64>() / needs.len().max(1) as f64
}
