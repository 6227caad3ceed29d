//! What a request may ask of the rows of its conversation, and the cap that it gets.

use crate::post::{PostCap, Turn};
use crate::request::RequestError;
use crate::row_cap::{DEFAULT_EVICT, EVICT_BLOCK, Evictable, RowCap, default_split};
use oscar_codec::CacheLayout;
use oscar_views::{Budget, EpisodeOptions, Eviction, HeadSplit, Policy, Route};
use std::fmt;
use std::ops::Range;

/// What a request asks of the rows of its conversation. Nothing by default: the server's cap, or none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvRequest {
    pub budget: Option<Budget>,
    pub evict: Option<Eviction>,
    /// Read the whole history.
    pub whole: bool,
    /// Positions of the prompt that are never evicted, ascending.
    pub protected: Vec<Range<usize>>,
    /// The messages of the prompt. Without them a conversation has no views of its whole history.
    pub turn: Option<Turn>,
}

/// What the rows of a request's conversation came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvUsage {
    pub policy: Eviction,
    /// Rows of each layer and head that its budget allows, on average.
    pub budget: usize,
    /// Tokens of the conversation.
    pub logical: usize,
    /// Rows of history that a whole cache would hold quantized.
    pub history: usize,
    /// Those of them that a layer and head reads, on average.
    pub kept: usize,
    /// Positions of the prompt that are never evicted.
    pub protected: usize,
    /// Compactions that this request waited for.
    pub compactions: usize,
    /// End of the view that it read last, if rows were left out.
    pub view: Option<usize>,
    /// The view that was chosen for the turn, where there was a choice.
    pub route: Option<KvRoute>,
}

/// How a turn was routed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvRoute {
    /// No views were ready: the whole history.
    Full,
    View {
        route: Route,
        /// Cosine between the question and the closest episode.
        similarity: Option<f64>,
    },
}

/// How the rows of a conversation are capped.
#[derive(Clone, Debug, PartialEq)]
pub enum Cap {
    /// At fixed positions the history is compacted: rows are gone for good.
    Block(RowCap),
    /// Turns read views of a history that stays whole.
    Post(PostCap),
}

impl Cap {
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Block(cap) => cap.rows,
            Self::Post(cap) => cap.rows,
        }
    }

    fn eviction(&self) -> Eviction {
        match self {
            Self::Block(cap) => Eviction::Scorer(cap.policy.evict),
            Self::Post(cap) => cap.eviction,
        }
    }

    fn budget(&self) -> Budget {
        match self {
            Self::Block(cap) => cap.policy.budget,
            Self::Post(cap) => cap.keep.budget,
        }
    }

    fn heads(&self) -> HeadSplit {
        match self {
            Self::Block(cap) => cap.policy.heads,
            Self::Post(cap) => cap.keep.heads,
        }
    }

    fn protecting(self, protected: &[Range<usize>]) -> Self {
        match self {
            Self::Block(cap) => Self::Block(cap.protecting(protected)),
            Self::Post(cap) => Self::Post(cap.protecting(protected)),
        }
    }

    /// Rows between two compactions, or between two points that get views.
    pub fn block(&self) -> usize {
        match self {
            Self::Block(cap) => cap.block,
            Self::Post(cap) => cap.block,
        }
    }
}

impl fmt::Display for Cap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(cap) => cap.policy.fmt(f),
            Self::Post(cap) => cap.fmt(f),
        }
    }
}

/// Which caps requests may have.
#[derive(Clone, Debug)]
pub(crate) struct CapRules {
    pub layout: CacheLayout,
    /// The same cache, or why no rows of it are evicted here.
    pub evictable: Result<Evictable, String>,
    /// How conversations are divided into episodes; or why no turn reads views of a whole history.
    pub post: Result<EpisodeOptions, String>,
    /// The cap of every conversation; requests may only ask for less.
    pub server: Option<Cap>,
}

impl CapRules {
    /// The cap of a request.
    ///
    /// # Errors
    /// Names the field that cannot be met, and says why.
    pub fn cap(&self, kv: &KvRequest) -> Result<Option<Cap>, RequestError> {
        let refuse = |parameter, problem: String| Err(RequestError::Invalid { parameter, problem });
        let server = self.server.as_ref();
        if kv.whole {
            return match server {
                _ if kv.budget.is_some() || kv.evict.is_some() => {
                    refuse("kv.view", "none cannot be combined with a budget or a policy".into())
                }
                Some(Cap::Block(cap)) => {
                    let budget = cap.policy.budget;
                    refuse(
                        "kv.view",
                        format!("none is not possible: this server runs with --kv-budget {budget}"),
                    )
                }
                // The whole history is in memory anyway.
                Some(Cap::Post(_)) | None => Ok(None),
            };
        }
        let cap = match (kv.budget.or(server.map(Cap::budget)), server) {
            (None, _) if kv.evict.is_some() => {
                return refuse("kv.budget", "is missing: a policy needs the rows that it may keep".into());
            }
            (None, _) => return Ok(None),
            (Some(_), Some(cap)) if kv.budget.is_none() && kv.evict.is_none() => cap.clone(),
            (Some(budget), _) => self.own(budget, kv.evict)?,
        };
        let protected: usize = kv.protected.iter().map(Range::len).sum();
        match server {
            Some(Cap::Block(_)) if matches!(cap, Cap::Post(_)) => refuse(
                "kv.evict",
                format!(
                    "{} keeps the whole history beside its views, which this server's --kv-budget does not: use \
                     keydiff, snapkv, tova or recent",
                    cap.eviction()
                ),
            ),
            Some(most) if cap.rows() > most.rows() => refuse(
                "kv.budget",
                format!("{} rows are more than the {} of this server's --kv-budget", cap.rows(), most.rows()),
            ),
            Some(most) if protected > most.rows() => refuse(
                "kv.protect",
                format!(
                    "{protected} tokens of system messages, tools and other protected messages are more than the {} \
                     rows of this server's --kv-budget: protect less (\"kv\": {{\"protect\": []}}) or shorten them",
                    most.rows()
                ),
            ),
            _ => Ok(Some(cap.protecting(&kv.protected))),
        }
    }

    /// A cap of the request's own.
    fn own(&self, budget: Budget, evict: Option<Eviction>) -> Result<Cap, RequestError> {
        let server = self.server.as_ref();
        let eviction = evict.or(server.map(Cap::eviction)).unwrap_or(Eviction::Scorer(DEFAULT_EVICT));
        let heads = match server {
            Some(cap) if cap.eviction() == eviction => cap.heads(),
            _ => default_split(&self.layout, eviction),
        };
        let refused = |problem| RequestError::Invalid { parameter: "kv", problem };
        let cache = self.evictable.as_ref().map_err(|why| refused(why.clone()))?;
        let block = server.map_or(EVICT_BLOCK, Cap::block);
        let cap = match eviction {
            Eviction::Scorer(evict) if !eviction.keeps_base() => {
                RowCap::of(cache, Policy { evict, budget, heads }, block).map(Cap::Block)
            }
            _ => match &self.post {
                Ok(episodes) => {
                    PostCap::of(cache, eviction, (budget, heads), block, *episodes).map(Cap::Post)
                }
                Err(why) => Err(format!("{eviction} is not possible: {why}")),
            },
        };
        cap.map_err(refused)
    }
}
