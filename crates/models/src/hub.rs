//! Downloading a model from the Hugging Face hub into the local cache (feature `hub`).
//!
//! Invariant: all files come from one commit, and the cache's reference to that commit is written
//! only after the last file has arrived, so an interrupted download is never mistaken for a model.

use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use std::path::{Component, Path, PathBuf};

use crate::error::LoadError;
use crate::hub_files::{Selection, select, shards};
use crate::source::{ModelName, ModelSource, cache_folders};
use crate::weights::INDEX_FILE;

/// Receives the progress of a download; the command line draws its bar from this.
pub trait DownloadProgress {
    /// A file of this many bytes begins. Files already in the cache are not announced.
    fn begin_file(&mut self, file: &str, bytes: u64);
    /// This many more bytes have arrived.
    fn advance(&mut self, bytes: u64);
    /// The current file is complete.
    fn end_file(&mut self);
}

/// For callers that want no report.
impl DownloadProgress for () {
    fn begin_file(&mut self, _file: &str, _bytes: u64) {}
    fn advance(&mut self, _bytes: u64) {}
    fn end_file(&mut self) {}
}

/// Downloads the files that serving needs: configuration, tokenizer, chat template and safetensors.
pub fn download(model: &ModelName, progress: &mut dyn DownloadProgress) -> Result<ModelSource, LoadError> {
    Hub::from_environment(&model.repository)?.download(model, progress)
}

/// Downloads the files of a repository that `wanted` picks from its listing; returns the folder
/// that holds them.
pub fn download_files(
    repository: &str,
    wanted: impl FnOnce(&[String]) -> Vec<String>,
    progress: &mut dyn DownloadProgress,
) -> Result<PathBuf, LoadError> {
    Hub::from_environment(repository)?.download_files(repository, wanted, progress)
}

/// A hub and the cache that its files go to.
struct Hub {
    cache: Cache,
    api: Api,
}

impl Hub {
    /// Uses `HF_ENDPOINT`, `HF_TOKEN`, and the token file that `hf auth login` leaves beside the
    /// cache.
    fn from_environment(what: &str) -> Result<Self, LoadError> {
        let cache = cache_folders(|variable| std::env::var_os(variable)).into_iter().next();
        Self::new(what, cache, std::env::var("HF_ENDPOINT").ok(), std::env::var("HF_TOKEN").ok())
    }

    fn new(
        what: &str,
        cache: Option<PathBuf>,
        endpoint: Option<String>,
        token: Option<String>,
    ) -> Result<Self, LoadError> {
        let cache = cache.map_or_else(Cache::from_env, Cache::new);
        let mut builder = ApiBuilder::from_cache(cache.clone()).with_progress(false).with_retries(3);
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if token.is_some() {
            builder = builder.with_token(token);
        }
        let api = builder.build().map_err(|error| failed(what, error))?;
        Ok(Self { cache, api })
    }

    fn download(
        &self,
        model: &ModelName,
        progress: &mut dyn DownloadProgress,
    ) -> Result<ModelSource, LoadError> {
        let repository = &model.repository;
        let Listing { named, commit, files: listing } = self.list(repository, &model.revision)?;
        let Selection { files, sharded } = select(repository, &listing)?;
        let mut fetcher = self.fetcher(repository, &commit, progress);
        for file in &files {
            fetcher.fetch(file)?;
        }
        let snapshot = fetcher.snapshot_folder("config.json")?;
        if sharded {
            let index = ModelSource::Dir(snapshot.clone()).read_required(INDEX_FILE)?;
            for shard in shards(repository, &index, &listing)? {
                fetcher.fetch(&shard)?;
            }
        }
        self.finish(named, &commit)?;
        Ok(ModelSource::Dir(snapshot))
    }

    fn download_files(
        &self,
        repository: &str,
        wanted: impl FnOnce(&[String]) -> Vec<String>,
        progress: &mut dyn DownloadProgress,
    ) -> Result<PathBuf, LoadError> {
        let Listing { named, commit, files: listing } = self.list(repository, "main")?;
        let files = wanted(&listing);
        let Some(first) = files.first() else {
            return Err(LoadError::MissingFile {
                place: repository.to_owned(),
                file: "any file of that name".into(),
            });
        };
        let mut fetcher = self.fetcher(repository, &commit, progress);
        for file in &files {
            // The listing comes from a server: nothing in it may lead out of the cache.
            if Path::new(file).components().any(|part| !matches!(part, Component::Normal(_))) {
                return Err(LoadError::UnsafeFileName { name: file.clone() });
            }
            fetcher.fetch(file)?;
        }
        let snapshot = fetcher.snapshot_folder(first)?;
        self.finish(named, &commit)?;
        Ok(snapshot)
    }

    fn list(&self, repository: &str, revision: &str) -> Result<Listing, LoadError> {
        let named = Repo::with_revision(repository.to_owned(), RepoType::Model, revision.to_owned());
        let info = self.api.repo(named.clone()).info().map_err(|error| failed(repository, error))?;
        let files = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Ok(Listing { named, commit: info.sha, files })
    }

    fn fetcher<'a>(
        &self,
        repository: &str,
        commit: &str,
        progress: &'a mut dyn DownloadProgress,
    ) -> Fetcher<'a> {
        let pinned = Repo::with_revision(repository.to_owned(), RepoType::Model, commit.to_owned());
        Fetcher { remote: self.api.repo(pinned.clone()), local: self.cache.repo(pinned), progress }
    }

    /// Publishes the revision in the cache, now that its files are complete.
    fn finish(&self, named: Repo, commit: &str) -> Result<(), LoadError> {
        self.cache.repo(named).create_ref(commit).map_err(|error| LoadError::io(self.cache.path(), error))
    }
}

/// The files of one revision of a repository.
struct Listing {
    named: Repo,
    commit: String,
    files: Vec<String>,
}

struct Fetcher<'a> {
    remote: ApiRepo,
    local: CacheRepo,
    progress: &'a mut dyn DownloadProgress,
}

impl Fetcher<'_> {
    fn fetch(&mut self, file: &str) -> Result<(), LoadError> {
        if self.local.get(file).is_some() {
            return Ok(());
        }
        let progress = ForwardedProgress { told: &mut *self.progress, begun: false };
        self.remote.download_with_progress(file, progress).map_err(|error| failed(file, error))?;
        Ok(())
    }

    /// The folder of the commit, found by a file that was fetched.
    fn snapshot_folder(&self, file: &str) -> Result<PathBuf, LoadError> {
        let depth = Path::new(file).components().count();
        let folder = self.local.get(file).and_then(|path| path.ancestors().nth(depth).map(ToOwned::to_owned));
        folder.ok_or_else(|| LoadError::MissingFile { place: "the download".into(), file: file.to_owned() })
    }
}

/// Our progress trait under the name that `hf-hub` calls. It begins a file twice; we report it
/// once.
struct ForwardedProgress<'a> {
    told: &'a mut dyn DownloadProgress,
    begun: bool,
}

impl Progress for ForwardedProgress<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        if !std::mem::replace(&mut self.begun, true) {
            self.told.begin_file(filename, size as u64);
        }
    }

    fn update(&mut self, size: usize) {
        self.told.advance(size as u64);
    }

    fn finish(&mut self) {
        self.told.end_file();
    }
}

fn failed(what: &str, error: ApiError) -> LoadError {
    LoadError::Download { what: what.to_owned(), problem: Box::new(error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// A hub on this machine: one repository, its files by name.
    fn hub(files: &'static [(&'static str, &'static str)]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || answer(stream, files));
            }
        });
        address
    }

    fn answer(stream: TcpStream, files: &[(&str, &str)]) {
        let mut out = stream.try_clone().unwrap();
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        while let Some(request) = lines.next() {
            let range = lines.by_ref().take_while(|l| !l.is_empty()).find_map(|l| {
                let value = l.to_ascii_lowercase().strip_prefix("range: bytes=")?.to_owned();
                let (start, end) = value.split_once('-')?;
                Some((start.parse::<usize>().ok()?, end.parse::<usize>().ok()))
            });
            // `find_map` may stop before the headers end.
            if range.is_some() {
                lines.by_ref().take_while(|l| !l.is_empty()).for_each(drop);
            }
            let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
            let (status, headers, body) = if path == "/api/models/org/m/revision/main" {
                let listed: Vec<String> =
                    files.iter().map(|(name, _)| format!(r#"{{"rfilename":"{name}"}}"#)).collect();
                let body = format!(r#"{{"sha":"{COMMIT}","siblings":[{}]}}"#, listed.join(","));
                ("200 OK", String::new(), body)
            } else {
                let name = path.strip_prefix(&format!("/org/m/resolve/{COMMIT}/")).unwrap_or_default();
                match files.iter().find(|(n, _)| *n == name) {
                    None => ("404 Not Found", String::new(), String::new()),
                    Some((_, text)) => {
                        let (start, end) = range.unwrap_or((0, None));
                        let end = end.unwrap_or(text.len() - 1).min(text.len() - 1);
                        let headers = format!(
                            "etag: \"{:x}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-range: bytes {start}-{end}/{}\r\n",
                            name.len() * 7919 + text.len(),
                            text.len()
                        );
                        ("206 Partial Content", headers, text[start..=end].to_owned())
                    }
                }
            };
            let reply = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
            if out.write_all(reply.as_bytes()).is_err() {
                return;
            }
        }
    }

    #[derive(Default)]
    struct Heard(Vec<String>, u64);
    impl DownloadProgress for Heard {
        fn begin_file(&mut self, file: &str, _bytes: u64) {
            self.0.push(file.to_owned());
        }
        fn advance(&mut self, bytes: u64) {
            self.1 += bytes;
        }
        fn end_file(&mut self) {}
    }

    fn open(cache: &Path, endpoint: String) -> Hub {
        Hub::new("org/m", Some(cache.to_owned()), Some(endpoint), None).unwrap()
    }

    #[test]
    fn a_model_arrives_whole_and_is_found_without_the_network_afterwards() {
        let endpoint = hub(&[
            ("config.json", "{\"a\":1}"),
            ("tokenizer.json", "{}"),
            ("README.md", "not wanted"),
            ("model.safetensors", "weights weights weights"),
        ]);
        let cache = tempfile::tempdir().unwrap();
        let model = ModelName::parse("org/m").unwrap();
        let mut heard = Heard::default();
        let source = open(cache.path(), endpoint).download(&model, &mut heard).unwrap();
        assert_eq!(source.read("model.safetensors").unwrap().unwrap().as_ref(), b"weights weights weights");
        assert_eq!(heard.0, ["config.json", "tokenizer.json", "model.safetensors"]);
        assert_eq!(heard.1, 32);
        let found = ModelSource::resolve_in("org/m", &[cache.path().to_owned()]).unwrap();
        assert_eq!(found.read("config.json").unwrap().unwrap().as_ref(), b"{\"a\":1}");
    }

    #[test]
    fn chosen_files_keep_their_folders() {
        let endpoint = hub(&[("A/x/k.pt", "keys"), ("A/x/v.pt", "values"), ("B/k.pt", "other")]);
        let cache = tempfile::tempdir().unwrap();
        let hub = open(cache.path(), endpoint);
        let of_a = |all: &[String]| all.iter().filter(|f| f.starts_with("A/")).cloned().collect();
        let folder = hub.download_files("org/m", of_a, &mut ()).unwrap();
        assert_eq!(std::fs::read(folder.join("A/x/v.pt")).unwrap(), b"values");
        assert!(!folder.join("B").exists());
        let none = hub.download_files("org/m", |_| Vec::new(), &mut ()).unwrap_err();
        assert!(none.to_string().contains("org/m"), "{none}");
        let outside = hub.download_files("org/m", |_| vec!["../../x".into()], &mut ()).unwrap_err();
        assert!(matches!(outside, LoadError::UnsafeFileName { .. }), "{outside}");
    }

    #[test]
    fn an_unreachable_hub_or_repository_is_an_error_that_names_it() {
        let cache = tempfile::tempdir().unwrap();
        let endpoint = hub(&[("config.json", "{}")]);
        let absent = ModelName::parse("org/absent").unwrap();
        let error = open(cache.path(), endpoint).download(&absent, &mut ()).unwrap_err();
        assert!(error.to_string().contains("org/absent"), "{error}");
        let closed = open(cache.path(), "http://127.0.0.1:9".into());
        assert!(closed.download(&absent, &mut ()).is_err());
    }
}
