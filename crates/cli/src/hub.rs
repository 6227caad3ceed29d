//! Models by name: in the local Hugging Face cache, or downloaded into it.

use anyhow::{Result, bail};
use oscar_models::{LoadError, ModelName, ModelSource};

/// `HF_HUB_OFFLINE`, read as `huggingface_hub` reads it.
pub fn offline_by_environment() -> bool {
    let value = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
    matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

/// Finds a model on this machine, then on the hub if that is allowed.
///
/// # Errors
/// One line that says where it was looked for.
pub fn resolve(name: &str, may_download: bool) -> Result<ModelSource> {
    match ModelSource::resolve(name) {
        Err(LoadError::NotFound { looked, .. }) => {
            let looked = looked.0.join("; ");
            match ModelName::parse(name) {
                Some(model) if may_download => download(&model, name),
                Some(_) => bail!(
                    "{name} is not on this machine, and downloading is switched off (looked for: {looked})"
                ),
                None => bail!(
                    "{name} is not on this machine, and it is no name on the hub (looked for: {looked})"
                ),
            }
        }
        other => Ok(other?),
    }
}

#[cfg(feature = "hub")]
fn download(model: &ModelName, name: &str) -> Result<ModelSource> {
    use anyhow::Context;
    oscar_models::hub::download(model, &mut Bars::default())
        .with_context(|| format!("{name} is not on this machine and cannot be downloaded"))
}

#[cfg(not(feature = "hub"))]
fn download(_: &ModelName, name: &str) -> Result<ModelSource> {
    bail!("{name} is not on this machine, and this build does not download: it lacks the feature `hub`")
}

/// A progress bar for each file that is downloaded.
#[cfg(feature = "hub")]
#[derive(Default)]
pub struct Bars(Option<indicatif::ProgressBar>);

#[cfg(feature = "hub")]
impl oscar_models::hub::DownloadProgress for Bars {
    fn begin_file(&mut self, file: &str, bytes: u64) {
        crate::progress::note!("downloading {file} ({})", crate::progress::bytes(bytes as usize));
        self.0 = Some(crate::progress::bar("downloading", bytes));
    }
    fn advance(&mut self, bytes: u64) {
        if let Some(bar) = &self.0 {
            bar.inc(bytes);
        }
    }
    fn end_file(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}
