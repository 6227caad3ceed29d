//! Names of scorers, and everything that decides which rows a view keeps.

use crate::budget::Budget;
use std::fmt;
use std::str::FromStr;

/// How rows are ranked. The definitions are in `scorers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Evict {
    /// The newest rows (StreamingLLM).
    Recent,
    /// Attention of all queries so far (H2O).
    H2o,
    /// Attention of the last queries, smoothed (SnapKV).
    SnapKv,
    /// Attention of the last query, one set of rows for all heads of a layer (TOVA).
    Tova,
    /// Keys unlike the mean key (KeyDiff).
    KeyDiff,
    /// Attention expected of future queries (Expected Attention).
    Expected,
    /// Attention while the text is repeated (KVzip).
    KvZip,
}

impl Evict {
    /// Every scorer with its name.
    pub const NAMES: [(Self, &'static str); 7] = [
        (Self::Recent, "recent"),
        (Self::H2o, "h2o"),
        (Self::SnapKv, "snapkv"),
        (Self::Tova, "tova"),
        (Self::KeyDiff, "keydiff"),
        (Self::Expected, "expected"),
        (Self::KvZip, "kvzip"),
    ];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// Whether rows are ranked by weights that queries give them.
    pub fn needs_weights(self) -> bool {
        !matches!(self, Self::Recent | Self::KeyDiff)
    }

    /// Whether scoring runs the whole history through the model again.
    pub fn replays(self) -> bool {
        matches!(self, Self::H2o | Self::Expected)
    }
}

impl fmt::Display for Evict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} '{name}': known are {known}")]
pub struct PolicyError {
    what: &'static str,
    name: String,
    known: String,
}

fn parse<T: Copy>(what: &'static str, names: &[(T, &'static str)], name: &str) -> Result<T, PolicyError> {
    let found = names.iter().find(|(_, known)| *known == name.trim().to_ascii_lowercase());
    found.map(|(value, _)| *value).ok_or_else(|| PolicyError {
        what,
        name: name.to_owned(),
        known: names.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", "),
    })
}

impl FromStr for Evict {
    type Err = PolicyError;

    fn from_str(name: &str) -> Result<Self, PolicyError> {
        parse("eviction policy", &Self::NAMES, name)
    }
}

/// How a conversation is served in less rows than it has: by one scorer, or by views of its topics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Eviction {
    Scorer(Evict),
    /// `keydiff`, from the whole history: the default of post mode.
    KeyDiffPost,
    Episodes,
}

impl Eviction {
    pub fn name(self) -> &'static str {
        match self {
            Self::Scorer(evict) => evict.name(),
            Self::KeyDiffPost => "keydiff-post",
            Self::Episodes => "episodes",
        }
    }

    /// Whether rows are chosen from the whole history, which stays in memory.
    pub fn keeps_base(self) -> bool {
        match self {
            Self::Scorer(evict) => matches!(evict, Evict::H2o | Evict::Expected | Evict::KvZip),
            Self::KeyDiffPost | Self::Episodes => true,
        }
    }

    /// Whether rows are ranked by weights that queries give them.
    pub fn needs_weights(self) -> bool {
        match self {
            Self::Scorer(evict) => evict.needs_weights(),
            Self::KeyDiffPost => false,
            Self::Episodes => true,
        }
    }

    /// A division among heads that suits it: one that compares rows of different heads, or none.
    pub fn default_split(self) -> HeadSplit {
        match self {
            Self::Scorer(Evict::Recent | Evict::Tova | Evict::KeyDiff) | Self::KeyDiffPost => {
                HeadSplit::Uniform
            }
            Self::Scorer(Evict::H2o | Evict::SnapKv | Evict::Expected) => HeadSplit::Adaptive,
            Self::Scorer(Evict::KvZip) | Self::Episodes => HeadSplit::Global,
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Eviction {
    type Err = PolicyError;

    fn from_str(name: &str) -> Result<Self, PolicyError> {
        let scorers = Evict::NAMES.iter().map(|&(evict, name)| (Self::Scorer(evict), name));
        let post = [Self::KeyDiffPost, Self::Episodes].map(|eviction| (eviction, eviction.name()));
        let all: Vec<_> = scorers.chain(post).chain([(Self::KeyDiffPost, "post")]).collect();
        parse("eviction policy", &all, name)
    }
}

/// How the rows of a layer are divided among its heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeadSplit {
    /// Every head keeps as many.
    Uniform,
    /// The best rows of the layer, whichever head they belong to; each head keeps at least a fifth
    /// of its equal share (Ada-KV).
    Adaptive,
    /// The best rows of the model.
    Global,
}

impl HeadSplit {
    pub const NAMES: [(Self, &'static str); 3] =
        [(Self::Uniform, "uniform"), (Self::Adaptive, "adaptive"), (Self::Global, "global")];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }
}

impl FromStr for HeadSplit {
    type Err = PolicyError;

    fn from_str(name: &str) -> Result<Self, PolicyError> {
        parse("division among heads", &Self::NAMES, name)
    }
}

/// Everything that decides which rows a view keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    pub evict: Evict,
    pub budget: Budget,
    pub heads: HeadSplit,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.evict, self.budget, self.heads.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood_and_others_refused() {
        for (evict, name) in Evict::NAMES {
            assert_eq!((name.parse(), evict.name()), (Ok(evict), name));
        }
        for (split, name) in HeadSplit::NAMES {
            assert_eq!((name.parse(), split.name()), (Ok(split), name));
        }
        for (name, meant) in
            [("post", "keydiff-post"), ("keydiff-post", "keydiff-post"), ("episodes", "episodes")]
        {
            let eviction: Eviction = name.parse().unwrap();
            assert!(eviction.keeps_base() && eviction.name() == meant, "{name}");
        }
        assert!(!"keydiff".parse::<Eviction>().unwrap().keeps_base());
        let error = "zip".parse::<Evict>().unwrap_err().to_string();
        assert!(error.contains("'zip'") && error.contains("kvzip") && error.contains("recent"));
        assert!("both".parse::<HeadSplit>().unwrap_err().to_string().contains("adaptive"));
    }
}
