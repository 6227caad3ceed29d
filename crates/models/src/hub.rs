//! Downloading a model from the Hugging Face hub into the local cache (feature `hub`).
//!
//! Invariant: all files come from one commit, and the cache's reference to that commit is written only after the
//! last file has arrived, so an interrupted download is never mistaken for a model.

use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use crate::error::LoadError;
use crate::hub_files::{Selection, select, shards};
use crate::source::{ModelName, ModelSource, cache_folders};
use crate::weights::INDEX_FILE;

/// Told how a download proceeds; the command line draws its bar from this.
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

/// Resolves a model locally, or downloads it when only the hub has it.
pub fn resolve_or_download(
    name: &str,
    progress: &mut dyn DownloadProgress,
) -> Result<ModelSource, LoadError> {
    match (ModelSource::resolve(name), ModelName::parse(name)) {
        (Err(LoadError::NotFound { .. }), Some(model)) => download(&model, progress),
        (resolved, _) => resolved,
    }
}

/// Downloads what serving needs: configuration, tokenizer, chat template and safetensors.
///
/// `HF_ENDPOINT` and `HF_TOKEN` are honoured, and the token file `hf auth login` leaves beside the cache.
pub fn download(model: &ModelName, progress: &mut dyn DownloadProgress) -> Result<ModelSource, LoadError> {
    let cache = cache_folders(|variable| std::env::var_os(variable))
        .into_iter()
        .next()
        .map_or_else(Cache::from_env, Cache::new);
    let mut builder = ApiBuilder::from_cache(cache.clone()).with_progress(false).with_retries(3);
    if let Ok(endpoint) = std::env::var("HF_ENDPOINT") {
        builder = builder.with_endpoint(endpoint);
    }
    if let Ok(token) = std::env::var("HF_TOKEN") {
        builder = builder.with_token(Some(token));
    }
    let repository = &model.repository;
    let api = builder.build().map_err(|error| failed(repository, error))?;

    let named = Repo::with_revision(repository.clone(), RepoType::Model, model.revision.clone());
    let info = api.repo(named.clone()).info().map_err(|error| failed(repository, error))?;
    let listing: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
    let Selection { files, sharded } = select(repository, &listing)?;

    let pinned = Repo::with_revision(repository.clone(), RepoType::Model, info.sha.clone());
    let mut fetcher = Fetcher { remote: api.repo(pinned.clone()), local: cache.repo(pinned), progress };
    for file in &files {
        fetcher.fetch(file)?;
    }
    let snapshot = fetcher.snapshot_folder()?;
    if sharded {
        let index = ModelSource::Dir(snapshot.clone()).read_required(INDEX_FILE)?;
        for shard in shards(repository, &index, &listing)? {
            fetcher.fetch(&shard)?;
        }
    }
    cache.repo(named).create_ref(&info.sha).map_err(|error| LoadError::io(cache.path(), error))?;
    Ok(ModelSource::Dir(snapshot))
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
        let progress = ForwardedProgress(&mut *self.progress);
        self.remote.download_with_progress(file, progress).map_err(|error| failed(file, error))?;
        Ok(())
    }

    fn snapshot_folder(&self) -> Result<std::path::PathBuf, LoadError> {
        self.local.get("config.json").and_then(|path| path.parent().map(ToOwned::to_owned)).ok_or_else(|| {
            LoadError::MissingFile { place: "the download".into(), file: "config.json".into() }
        })
    }
}

/// Our progress trait under the name `hf-hub` calls.
struct ForwardedProgress<'a>(&'a mut dyn DownloadProgress);

impl Progress for ForwardedProgress<'_> {
    fn init(&mut self, size: usize, filename: &str) {
        self.0.begin_file(filename, size as u64);
    }

    fn update(&mut self, size: usize) {
        self.0.advance(size as u64);
    }

    fn finish(&mut self) {
        self.0.end_file();
    }
}

fn failed(what: &str, error: ApiError) -> LoadError {
    LoadError::Download { what: what.to_owned(), problem: Box::new(error) }
}
