//! Where rotation files lie: `<root>/<Model>/seq<T>_prompt<N>_group<G>[_v2]/{k,v}_rotation_*.pt`.
//!
//! Invariant: this module only lists folders; it opens no rotation file and reaches no network.
//! A K file counts only together with the V file of the same folder and kind.

use std::cmp::Ordering;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::ZooError;

/// The folder names the Hugging Face client gives the zoo, as a model and as a dataset.
const CACHE_FOLDERS: [&str; 2] =
    ["models--Zhongzhu--OSCAR-RotationZoo", "datasets--Zhongzhu--OSCAR-RotationZoo"];

/// The zoo's name on the Hugging Face hub.
pub const REPOSITORY: &str = "Zhongzhu/OSCAR-RotationZoo";

/// The rotation files of `model` in the zoo's listing.
pub fn files_of(listing: &[String], model: &str) -> Vec<String> {
    let short = model.rsplit('/').next().unwrap_or(model);
    let known =
        |name: &str| Grouping::ALL.iter().any(|g| g.file_names().0 == name || g.file_names().1 == name);
    let belongs = |file: &&String| {
        let mut parts = file.split('/');
        parts.next().is_some_and(|folder| folder.eq_ignore_ascii_case(short))
            && parts.next_back().is_some_and(known)
    };
    listing.iter().filter(belongs).cloned().collect()
}

/// One rotation a layer, or one a KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Grouping {
    PerLayer,
    PerHead,
}

impl Grouping {
    const ALL: [Self; 2] = [Self::PerLayer, Self::PerHead];

    fn file_names(self) -> (&'static str, &'static str) {
        match self {
            Self::PerLayer => ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"),
            Self::PerHead => ("k_rotation_perhead.pt", "v_rotation_perhead.pt"),
        }
    }
}

/// What `seq<T>_prompt<N>_group<G>[_v<R>]` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sampling {
    /// Tokens calibrated on, all prompts together.
    pub tokens: u64,
    pub prompts: u64,
    /// 1 without a suffix, 2 for `_v2`.
    pub revision: u64,
    pub group: u64,
}

impl Sampling {
    /// Reads a folder name; `None` when it follows another scheme.
    pub fn parse(name: &str) -> Option<Self> {
        let number = |part: Option<&str>, tag: &str| -> Option<u64> {
            let digits = part?.strip_prefix(tag)?;
            digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
        };
        let mut parts = name.split('_');
        let tokens = number(parts.next(), "seq")?;
        let prompts = number(parts.next(), "prompt")?;
        let group = number(parts.next(), "group")?;
        let revision = match parts.next() {
            None => 1,
            suffix => number(suffix, "v")?,
        };
        parts.next().is_none().then_some(Self { tokens, prompts, revision, group })
    }
}

/// A complete pair of rotation files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Folder name under the model; empty when the files lie in the model's own folder.
    pub name: String,
    /// `None` when the folder name says nothing about it.
    pub sampling: Option<Sampling>,
    pub grouping: Grouping,
    pub keys: PathBuf,
    pub values: PathBuf,
}

impl Candidate {
    /// More tokens first; at the same folder per-head rotations beat per-layer ones.
    fn rank(&self, other: &Self) -> Ordering {
        self.sampling
            .cmp(&other.sampling)
            .then(self.grouping.cmp(&other.grouping))
            .then_with(|| self.name.cmp(&other.name))
    }

    fn describe(&self) -> String {
        let name = if self.name.is_empty() { "." } else { &self.name };
        match self.grouping {
            Grouping::PerLayer => name.to_owned(),
            Grouping::PerHead => format!("{name} (per head)"),
        }
    }
}

/// Which of several rotation sets to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice<'a> {
    /// The one calibrated on most tokens.
    MostTokens,
    /// The folder of this name (`.` is the model's own folder).
    Named(&'a str),
}

/// Finds the K and V files for `model` (`Qwen3-8B` or `Qwen/Qwen3-8B`) in a local copy of the zoo.
pub fn find_pair(root: &Path, model: &str, choice: Choice<'_>) -> Result<Candidate, ZooError> {
    let candidates = list_candidates(root, model)?;
    let available = || candidates.iter().map(Candidate::describe).collect::<Vec<_>>().join(", ");
    let wanted = candidates.iter().filter(|candidate| match choice {
        Choice::MostTokens => true,
        Choice::Named(".") => candidate.name.is_empty(),
        Choice::Named(name) => candidate.name == name,
    });
    match (wanted.max_by(|a, b| a.rank(b)), choice) {
        (Some(best), _) => Ok(best.clone()),
        (None, Choice::Named(name)) => Err(ZooError::SetNotFound {
            name: name.to_owned(),
            model: model.to_owned(),
            available: available(),
        }),
        (None, Choice::MostTokens) => {
            Err(not_found(root, model, "the model's folder holds no K and V pair".into()))
        }
    }
}

/// Every complete pair of `model`, best first; never empty.
pub fn list_candidates(root: &Path, model: &str) -> Result<Vec<Candidate>, ZooError> {
    let short = model.rsplit('/').next().unwrap_or(model);
    let models = subfolders(root)?;
    let Some(folder) = models
        .iter()
        .find(|name| *name == short)
        .or_else(|| models.iter().find(|name| name.eq_ignore_ascii_case(short)))
    else {
        let available = match models.is_empty() {
            true => "the folder is empty".to_owned(),
            false => format!("there are: {}", models.join(", ")),
        };
        return Err(not_found(root, model, available));
    };
    let folder = root.join(folder);
    let sets = subfolders(&folder)?;
    let mut candidates = Vec::new();
    for name in std::iter::once("").chain(sets.iter().map(String::as_str)) {
        let place = if name.is_empty() { folder.clone() } else { folder.join(name) };
        for grouping in Grouping::ALL {
            let (keys, values) = grouping.file_names();
            let (keys, values) = (place.join(keys), place.join(values));
            if keys.is_file() && values.is_file() {
                let sampling = Sampling::parse(name);
                candidates.push(Candidate { name: name.to_owned(), sampling, grouping, keys, values });
            }
        }
    }
    if candidates.is_empty() {
        let available = match sets.is_empty() {
            true => "the model's folder holds no rotation files".to_owned(),
            false => format!("no complete K and V pair in: {}", sets.join(", ")),
        };
        return Err(not_found(root, model, available));
    }
    candidates.sort_by(|a, b| b.rank(a));
    Ok(candidates)
}

/// The zoo's root inside a Hugging Face cache folder (usually `~/.cache/huggingface/hub`): the
/// revision `main` points to, or the only one there is.
pub fn cached_root(hub: &Path) -> Result<PathBuf, ZooError> {
    let missing = |hint: String| ZooError::NotCached { hub: hub.to_owned(), hint };
    for name in CACHE_FOLDERS {
        let repo = hub.join(name);
        let snapshots = repo.join("snapshots");
        if !snapshots.is_dir() {
            continue;
        }
        let revisions = subfolders(&snapshots)?;
        let main = fs::read_to_string(repo.join("refs/main")).unwrap_or_default();
        // Compared with real folder names, so the text of the ref can never lead elsewhere.
        return match (revisions.iter().find(|r| *r == main.trim()), revisions.as_slice()) {
            (Some(revision), _) => Ok(snapshots.join(revision)),
            (None, [only]) => Ok(snapshots.join(only)),
            (None, []) => Err(missing(format!("{name} holds no snapshot; download it again"))),
            (None, many) => Err(missing(format!(
                "refs/main of {name} names none of its snapshots ({}); give one as the root",
                many.join(", ")
            ))),
        };
    }
    Err(missing("download Zhongzhu/OSCAR-RotationZoo or give its folder".into()))
}

/// Names of the folders in `path`, sorted; names that are not text are passed over.
fn subfolders(path: &Path) -> Result<Vec<String>, ZooError> {
    let io = |source| ZooError::Io { path: path.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(io)? {
        let entry = entry.map_err(io)?;
        // Through symlinks: the Hugging Face cache is made of them.
        let is_dir = match fs::metadata(entry.path()) {
            Ok(metadata) => metadata.is_dir(),
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(io(error)),
        };
        if let (true, Ok(name)) = (is_dir, entry.file_name().into_string())
            && !name.starts_with('.')
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn not_found(root: &Path, model: &str, available: String) -> ZooError {
    ZooError::ModelNotFound { model: model.to_owned(), root: root.to_owned(), available }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zoo(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary folder");
        for file in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(path, b"").expect("an empty file");
        }
        root
    }

    fn pair(folder: &str) -> [String; 2] {
        [format!("{folder}/k_rotation_qqt_r_h_pbr.pt"), format!("{folder}/v_rotation_sst_r_h_pbr.pt")]
    }

    fn zoo_of(folders: &[&str], more: &[&str]) -> tempfile::TempDir {
        let files: Vec<String> = folders.iter().flat_map(|folder| pair(folder)).collect();
        let files: Vec<&str> = files.iter().map(String::as_str).chain(more.iter().copied()).collect();
        zoo(&files)
    }

    #[test]
    fn a_listing_is_narrowed_to_the_model() {
        let listing: Vec<String> = [
            "README.md",
            "Qwen3-8B/seq1_prompt1_group128/k_rotation_qqt_r_h_pbr.pt",
            "Qwen3-8B/seq1_prompt1_group128/v_rotation_sst_r_h_pbr.pt",
            "Qwen3-8B/seq1_prompt1_group128/notes.txt",
            "Qwen3-8B-Base/seq1_prompt1_group128/k_rotation_qqt_r_h_pbr.pt",
            "Qwen3-8B/k_rotation_perhead.pt",
        ]
        .map(str::to_owned)
        .to_vec();
        let files = files_of(&listing, "Qwen/qwen3-8b");
        assert_eq!(files, [&*listing[1], &*listing[2], &*listing[5]]);
        assert!(files_of(&listing, "other").is_empty());
    }

    #[test]
    fn folder_names_are_parsed_whole() {
        let parsed = Sampling::parse("seq20000_prompt83_group128").expect("a set name");
        assert_eq!(parsed, Sampling { tokens: 20000, prompts: 83, revision: 1, group: 128 });
        assert_eq!(Sampling::parse("seq20000_prompt83_group128_v2").map(|s| s.revision), Some(2));
        for name in [
            "",
            "seq_prompt_group",
            "seq1_prompt2",
            "seq1_prompt2_group3_v2_x",
            "seq-1_prompt2_group3",
            "seq+1_prompt2_group3",
            "seq99999999999999999999_prompt1_group1",
            "c_kv_rcov_phblock_g128",
        ] {
            assert_eq!(Sampling::parse(name), None, "{name}");
        }
    }

    #[test]
    fn most_tokens_wins_by_number_not_by_spelling() {
        let root = zoo_of(
            &[
                "Qwen3-8B/seq9000_prompt99_group128",
                "Qwen3-8B/seq20000_prompt83_group128",
                "Qwen3-8B/seq20000_prompt83_group128_v2",
                "Qwen3-8B/other",
            ],
            &[],
        );
        let best = find_pair(root.path(), "Qwen/Qwen3-8B", Choice::MostTokens).expect("a pair");
        assert_eq!(best.name, "seq20000_prompt83_group128_v2");
        assert!(best.keys.is_file() && best.values.is_file());
        let named = Choice::Named("seq9000_prompt99_group128");
        assert_eq!(
            find_pair(root.path(), "qwen3-8b", named).expect("a pair").sampling.map(|s| s.tokens),
            Some(9000)
        );
        let names: Vec<_> = list_candidates(root.path(), "Qwen3-8B")
            .expect("candidates")
            .into_iter()
            .map(|c| c.name)
            .collect();
        assert_eq!(names.len(), 4);
        assert_eq!(names.last().map(String::as_str), Some("other"));
    }

    #[test]
    fn per_head_files_are_found_and_preferred() {
        let root = zoo_of(
            &["M/seq1_prompt1_group1"],
            &[
                "M/seq1_prompt1_group1/k_rotation_perhead.pt",
                "M/seq1_prompt1_group1/v_rotation_perhead.pt",
                "N/k_rotation_perhead.pt",
                "N/v_rotation_perhead.pt",
            ],
        );
        let best = find_pair(root.path(), "M", Choice::MostTokens).expect("a pair");
        assert_eq!(best.grouping, Grouping::PerHead);
        let own = find_pair(root.path(), "N", Choice::Named(".")).expect("files in the model's own folder");
        assert_eq!((own.name.as_str(), own.sampling), ("", None));
    }

    #[test]
    fn errors_list_what_exists() {
        let root =
            zoo_of(&["Qwen3-8B/seq1_prompt1_group1"], &["Half/seq1_prompt1_group1/k_rotation_perhead.pt"]);
        let text = |result: Result<Candidate, ZooError>| result.expect_err("an error").to_string();
        let unknown = text(find_pair(root.path(), "Llama-3", Choice::MostTokens));
        assert!(unknown.contains("Llama-3") && unknown.contains("Half, Qwen3-8B"), "{unknown}");
        let unnamed = text(find_pair(root.path(), "Qwen3-8B", Choice::Named("seq2")));
        assert!(unnamed.contains("seq1_prompt1_group1"), "{unnamed}");
        let half = text(find_pair(root.path(), "Half", Choice::MostTokens));
        assert!(half.contains("no complete K and V pair"), "{half}");
        assert!(matches!(list_candidates(&root.path().join("none"), "x"), Err(ZooError::Io { .. })));
        for sly in ["..", ".", "", "/"] {
            assert!(
                matches!(list_candidates(root.path(), sly), Err(ZooError::ModelNotFound { .. })),
                "{sly:?}"
            );
        }
    }

    #[test]
    fn the_hugging_face_cache_is_resolved() {
        let repo = "models--Zhongzhu--OSCAR-RotationZoo";
        let set = |revision: &str| format!("{repo}/snapshots/{revision}/Qwen3-8B/seq1_prompt1_group1");
        let root = zoo_of(&[&set("aaa"), &set("bbb")], &[&format!("{repo}/refs/main")]);
        assert!(
            matches!(cached_root(root.path()), Err(ZooError::NotCached { .. })),
            "empty ref, two snapshots"
        );
        fs::write(root.path().join(repo).join("refs/main"), "bbb\n").expect("the ref");
        let found = cached_root(root.path()).expect("the snapshot");
        assert!(found.ends_with("snapshots/bbb"));
        find_pair(&found, "Qwen3-8B", Choice::MostTokens).expect("a pair");
        fs::write(root.path().join(repo).join("refs/main"), "../../..").expect("the ref");
        assert!(matches!(cached_root(root.path()), Err(ZooError::NotCached { .. })));
        assert!(matches!(cached_root(&root.path().join("elsewhere")), Err(ZooError::NotCached { .. })));
    }
}
