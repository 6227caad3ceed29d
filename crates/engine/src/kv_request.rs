//! What a request may ask of the rows of its conversation, and the cap that it gets.

use crate::request::RequestError;
use crate::row_cap::{DEFAULT_EVICT, EVICT_BLOCK, RowCap, default_split};
use oscar_codec::CacheLayout;
use oscar_views::{Budget, Evict, Policy};
use std::ops::Range;

/// What a request asks of the rows of its conversation. Nothing by default: the server's cap, or none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvRequest {
    pub budget: Option<Budget>,
    pub evict: Option<Evict>,
    /// Read the whole history.
    pub whole: bool,
    /// Positions of the prompt that are never evicted, ascending.
    pub protected: Vec<Range<usize>>,
}

/// What the rows of a request's conversation came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvUsage {
    pub evict: Evict,
    /// Rows of each layer and head that its budget allows, on average.
    pub budget: usize,
    /// Tokens of the conversation.
    pub logical: usize,
    /// Rows of history that a whole cache would hold quantized.
    pub history: usize,
    /// Those of them that a layer and head holds, on average.
    pub kept: usize,
    /// Positions of the prompt that are never evicted.
    pub protected: usize,
    /// Compactions that this request waited for.
    pub compactions: usize,
    /// End of the view that it read last, if its history was compacted.
    pub view: Option<usize>,
}

/// Which caps requests may have.
#[derive(Clone, Debug)]
pub(crate) struct CapRules {
    pub layout: CacheLayout,
    /// Why no rows are evicted here, if none are.
    pub refusal: Option<String>,
    /// The cap of every conversation; requests may only ask for less.
    pub server: Option<RowCap>,
}

impl CapRules {
    /// The cap of a request.
    ///
    /// # Errors
    /// Names the field that cannot be met, and says why.
    pub fn cap(&self, kv: &KvRequest) -> Result<Option<RowCap>, RequestError> {
        let refuse = |parameter, problem: String| Err(RequestError::Invalid { parameter, problem });
        if kv.whole {
            return match &self.server {
                _ if kv.budget.is_some() || kv.evict.is_some() => {
                    refuse("kv.view", "none cannot be combined with a budget or a policy".into())
                }
                Some(cap) => {
                    let budget = cap.policy.budget;
                    refuse(
                        "kv.view",
                        format!("none is not possible: this server runs with --kv-budget {budget}"),
                    )
                }
                None => Ok(None),
            };
        }
        let server = self.server.as_ref();
        let cap = match (kv.budget.or(server.map(|cap| cap.policy.budget)), server) {
            (None, _) if kv.evict.is_some() => {
                return refuse("kv.budget", "is missing: a policy needs the rows that it may keep".into());
            }
            (None, _) => return Ok(None),
            (Some(_), Some(cap)) if kv.budget.is_none() && kv.evict.is_none() => cap.clone(),
            (Some(budget), _) => self.own(budget, kv.evict)?,
        };
        let protected: usize = kv.protected.iter().map(Range::len).sum();
        match server {
            Some(most) if cap.rows > most.rows => refuse(
                "kv.budget",
                format!("{} rows are more than the {} of this server's --kv-budget", cap.rows, most.rows),
            ),
            Some(most) if protected > most.rows => refuse(
                "kv.protect",
                format!(
                    "{protected} tokens of system messages, tools and other protected messages are more than the {} \
                     rows of this server's --kv-budget: protect less (\"kv\": {{\"protect\": []}}) or shorten them",
                    most.rows
                ),
            ),
            _ => Ok(Some(cap.protecting(&kv.protected))),
        }
    }

    /// A cap of the request's own.
    fn own(&self, budget: Budget, evict: Option<Evict>) -> Result<RowCap, RequestError> {
        let server = self.server.as_ref();
        let evict = evict.or(server.map(|cap| cap.policy.evict)).unwrap_or(DEFAULT_EVICT);
        let heads = match server {
            Some(cap) if cap.policy.evict == evict => cap.policy.heads,
            _ => default_split(evict),
        };
        let block = server.map_or(EVICT_BLOCK, |cap| cap.block);
        let refused = |problem| RequestError::Invalid { parameter: "kv", problem };
        if let Some(why) = &self.refusal {
            return Err(refused(why.clone()));
        }
        RowCap::of_layout(&self.layout, Policy { evict, budget, heads }, block).map_err(refused)
    }
}
