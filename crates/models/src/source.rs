//! Where a model's files come from: a folder, or bytes linked into the binary.
//!
//! A folder is given by path or found by name in the local Hugging Face cache
//! (`models--org--name/refs/<revision>` holds a commit, `snapshots/<commit>/` its files).
//!
//! Invariant: nothing outside the resolved folder is opened through a source; file names with path
//! parts are refused. Resolving never touches the network.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use crate::error::{LineList, LoadError};
use crate::mmap::{FileBytes, map_file};

/// Files linked into the binary, by name.
pub type EmbeddedFiles = &'static [(&'static str, &'static [u8])];

/// The largest file read whole; tokenizers reach some 30 MiB.
const LARGEST_SMALL_FILE: u64 = 256 << 20;

/// The place a model is loaded from.
#[derive(Debug, Clone)]
pub enum ModelSource {
    Dir(PathBuf),
    Embedded(EmbeddedFiles),
}

impl ModelSource {
    /// Finds a model by folder path or by its name in the local Hugging Face cache,
    /// `org/name[@revision]`.
    pub fn resolve(name: &str) -> Result<Self, LoadError> {
        Self::resolve_in(name, &cache_folders(|variable| std::env::var_os(variable)))
    }

    /// [`Self::resolve`] with the cache folders given.
    pub fn resolve_in(name: &str, caches: &[PathBuf]) -> Result<Self, LoadError> {
        let path = Path::new(name);
        let mut looked = vec![format!("folder {}", path.display())];
        if path.is_dir() {
            if path.join("config.json").is_file() {
                return Ok(Self::Dir(path.to_owned()));
            }
            return Err(LoadError::MissingFile {
                place: path.display().to_string(),
                file: "config.json".into(),
            });
        }
        if path.is_file() {
            return Err(LoadError::NotADirectory { path: path.to_owned() });
        }
        let Some(model) = ModelName::parse(name) else {
            let looks_like_a_path = path.is_absolute() || name.starts_with('.') || name.starts_with('~');
            return Err(match looks_like_a_path {
                true => LoadError::NotFound { name: name.to_owned(), looked: LineList(looked) },
                false => LoadError::BadName { name: name.to_owned() },
            });
        };
        for cache in caches {
            match model.find_in(cache) {
                Ok(folder) => return Ok(Self::Dir(folder)),
                Err(missing) => looked.push(missing),
            }
        }
        Err(LoadError::NotFound { name: name.to_owned(), looked: LineList(looked) })
    }

    /// Reads a small file whole; `None` when the model has no such file.
    pub fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, LoadError> {
        check_file_name(name)?;
        match self {
            Self::Embedded(files) => Ok(embedded(files, name).map(Cow::Borrowed)),
            Self::Dir(folder) => {
                let path = folder.join(name);
                match fs::metadata(&path) {
                    Ok(metadata) if metadata.is_file() => {}
                    Ok(_) => return Err(LoadError::NotAFile { path }),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(LoadError::io(path, error)),
                }
                let file = fs::File::open(&path).map_err(|error| LoadError::io(&path, error))?;
                // Bounded while reading, not by the stated length: the file may grow.
                let mut bytes = Vec::new();
                let mut bounded = file.take(LARGEST_SMALL_FILE + 1);
                bounded.read_to_end(&mut bytes).map_err(|error| LoadError::io(&path, error))?;
                if bytes.len() as u64 > LARGEST_SMALL_FILE {
                    let total = fs::metadata(&path).map_or(bytes.len() as u64, |metadata| metadata.len());
                    return Err(LoadError::FileTooLarge {
                        file: path.display().to_string(),
                        bytes: total,
                        limit: LARGEST_SMALL_FILE,
                    });
                }
                Ok(Some(Cow::Owned(bytes)))
            }
        }
    }

    /// Reads a small file that the model requires.
    pub fn read_required(&self, name: &str) -> Result<Cow<'static, [u8]>, LoadError> {
        self.read(name)?
            .ok_or_else(|| LoadError::MissingFile { place: self.to_string(), file: name.to_owned() })
    }

    /// Whether the model has a file of this name.
    pub fn contains(&self, name: &str) -> bool {
        check_file_name(name).is_ok()
            && match self {
                Self::Embedded(files) => embedded(files, name).is_some(),
                Self::Dir(folder) => folder.join(name).is_file(),
            }
    }

    /// The bytes of a large file, mapped rather than read.
    pub(crate) fn map(&self, name: &str) -> Result<FileBytes, LoadError> {
        check_file_name(name)?;
        match self {
            Self::Embedded(files) => embedded(files, name)
                .map(FileBytes::Static)
                .ok_or_else(|| LoadError::MissingFile { place: self.to_string(), file: name.to_owned() }),
            Self::Dir(folder) => {
                let path = folder.join(name);
                map_file(&path).map_err(|error| LoadError::io(path, error))
            }
        }
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(folder) => write!(f, "{}", folder.display()),
            Self::Embedded(_) => write!(f, "the built-in model"),
        }
    }
}

fn embedded(files: EmbeddedFiles, name: &str) -> Option<&'static [u8]> {
    files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| *bytes)
}

/// Only a bare name may be joined to the model's folder.
pub(crate) fn check_file_name(name: &str) -> Result<(), LoadError> {
    let mut parts = Path::new(name).components();
    let bare = matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
    if bare && !name.contains(['/', '\\', '\0']) {
        return Ok(());
    }
    Err(LoadError::UnsafeFileName { name: name.to_owned() })
}

/// A repository on the Hugging Face hub and one of its revisions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    /// `org/name`, or a bare `name` for the oldest repositories.
    pub repository: String,
    /// Branch, tag or commit; `main` when not given.
    pub revision: String,
}

impl ModelName {
    /// Parses `org/name[@revision]`; `None` if the text cannot be such a name.
    pub fn parse(text: &str) -> Option<Self> {
        let (repository, revision) = text.split_once('@').unwrap_or((text, "main"));
        let sound = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && !part.contains("..")
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        let parts: Vec<&str> = repository.split('/').collect();
        // A revision may be a path of its own, such as refs/pr/3.
        let named =
            parts.len() <= 2 && parts.iter().all(|part| sound(part)) && revision.split('/').all(sound);
        named.then(|| Self { repository: repository.to_owned(), revision: revision.to_owned() })
    }

    /// The folder the cache keeps this repository in.
    fn folder_name(&self) -> String {
        format!("models--{}", self.repository.replace('/', "--"))
    }

    /// The snapshot in this cache, or a description of what was missing.
    fn find_in(&self, cache: &Path) -> Result<PathBuf, String> {
        let folder = cache.join(self.folder_name());
        let reference = folder.join("refs").join(&self.revision);
        let commit = match fs::read_to_string(&reference) {
            Ok(commit) => commit.trim().to_owned(),
            // Not a branch or tag, so perhaps the commit itself.
            Err(_) => self.revision.clone(),
        };
        if check_file_name(&commit).is_err() {
            return Err(format!("{} does not hold a commit", reference.display()));
        }
        let snapshot = folder.join("snapshots").join(&commit);
        if snapshot.join("config.json").is_file() {
            return Ok(snapshot);
        }
        Err(if snapshot.is_dir() {
            format!("{} has no config.json: an unfinished download", snapshot.display())
        } else {
            format!("cache entry {} at revision {}", folder.display(), self.revision)
        })
    }
}

/// The Hugging Face cache folders of this user, whether or not they exist.
pub fn hub_cache_folders() -> Vec<PathBuf> {
    cache_folders(|variable| std::env::var_os(variable))
}

/// The cache folders in the order `huggingface_hub` prefers them.
pub(crate) fn cache_folders(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let candidates = [
        set("HF_HUB_CACHE"),
        set("HF_HOME").map(|home| home.join("hub")),
        set("HOME").or_else(|| set("USERPROFILE")).map(|home| home.join(".cache/huggingface/hub")),
    ];
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in candidates.into_iter().flatten() {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: EmbeddedFiles = &[("config.json", b"{}")];

    /// A cache holding org/tiny with commit `abc123`, reached as main and as refs/pr/1.
    fn cache() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("models--org--tiny");
        fs::create_dir_all(folder.join("refs/refs/pr")).unwrap();
        fs::create_dir_all(folder.join("snapshots/abc123")).unwrap();
        fs::write(folder.join("refs/main"), "abc123\n").unwrap();
        fs::write(folder.join("refs/refs/pr/1"), "abc123").unwrap();
        fs::write(folder.join("snapshots/abc123/config.json"), "{}").unwrap();
        root
    }

    #[test]
    fn a_name_is_found_in_the_cache_by_branch_and_commit() {
        let root = cache();
        let caches = [root.path().join("absent"), root.path().to_owned()];
        for name in ["org/tiny", "org/tiny@main", "org/tiny@abc123", "org/tiny@refs/pr/1"] {
            let ModelSource::Dir(folder) = ModelSource::resolve_in(name, &caches).unwrap() else {
                panic!("not a folder");
            };
            assert!(folder.ends_with("models--org--tiny/snapshots/abc123"), "{name}");
        }
    }

    #[test]
    fn what_is_missing_is_listed() {
        let root = cache();
        let caches = [root.path().to_owned()];
        let message = ModelSource::resolve_in("org/tiny@v9", &caches).unwrap_err().to_string();
        for part in ["folder org/tiny@v9", "models--org--tiny", "revision v9", "Hugging Face hub"] {
            assert!(message.contains(part), "{message}");
        }
        fs::remove_file(root.path().join("models--org--tiny/snapshots/abc123/config.json")).unwrap();
        let message = ModelSource::resolve_in("org/tiny", &caches).unwrap_err().to_string();
        assert!(message.contains("unfinished download"), "{message}");
    }

    #[test]
    fn a_reference_cannot_lead_out_of_the_cache() {
        let root = cache();
        fs::write(root.path().join("models--org--tiny/refs/main"), "../../../elsewhere").unwrap();
        let message = ModelSource::resolve_in("org/tiny", &[root.path().to_owned()]).unwrap_err().to_string();
        assert!(message.contains("does not hold a commit"), "{message}");
    }

    #[test]
    fn paths_are_told_from_names() {
        let root = cache();
        let path = |tail: &str| root.path().join(tail).display().to_string();
        let model = path("models--org--tiny/snapshots/abc123");
        assert!(matches!(ModelSource::resolve_in(&model, &[]), Ok(ModelSource::Dir(_))));
        let file = path("models--org--tiny/refs/main");
        assert!(matches!(ModelSource::resolve_in(&file, &[]), Err(LoadError::NotADirectory { .. })));
        let bare = path("models--org--tiny");
        assert!(matches!(ModelSource::resolve_in(&bare, &[]), Err(LoadError::MissingFile { .. })));
        assert!(matches!(ModelSource::resolve_in(&path("none"), &[]), Err(LoadError::NotFound { .. })));
        for bad in ["", "a/b/c", "org/na me", "org/..", "org/x@../y"] {
            assert!(matches!(ModelSource::resolve_in(bad, &[]), Err(LoadError::BadName { .. })), "{bad}");
        }
    }

    #[test]
    fn cache_folders_follow_the_environment() {
        let folders = cache_folders(|name| match name {
            "HF_HUB_CACHE" => Some("/a".into()),
            "HF_HOME" => Some("/b".into()),
            "HOME" => Some("/home/u".into()),
            _ => None,
        });
        assert_eq!(folders, ["/a", "/b/hub", "/home/u/.cache/huggingface/hub"].map(PathBuf::from));
        assert_eq!(cache_folders(|_| Some(OsString::new())), Vec::<PathBuf>::new());
    }

    #[test]
    fn reading_tells_absent_from_unsafe() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("config.json"), "{}").unwrap();
        for source in [ModelSource::Dir(root.path().to_owned()), ModelSource::Embedded(FILES)] {
            assert_eq!(source.read("config.json").unwrap().unwrap().as_ref(), b"{}");
            assert!(source.contains("config.json") && !source.contains("../config.json"));
            assert!(source.read("absent.json").unwrap().is_none());
            assert!(matches!(source.read_required("absent.json"), Err(LoadError::MissingFile { .. })));
            for name in ["../config.json", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "config.json/"] {
                assert!(matches!(source.read(name), Err(LoadError::UnsafeFileName { .. })), "{name}");
            }
        }
    }
}
