//! What a device can refuse.

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("not enough memory on {device}: {bytes} bytes for {what}")]
    OutOfMemory { device: String, what: String, bytes: usize },
    #[error("{device} cannot do this: {why}")]
    Unsupported { device: String, why: String },
    /// The device, its driver or one of its libraries failed. Its contents are lost.
    #[error("{device} failed: {why}")]
    Device { device: String, why: String },
    /// This rank is well, but another rank of the model has left the step.
    #[error("rank {rank} of the model left the step: {why}")]
    RankLeft { rank: usize, why: String },
    #[error("{what} has a wrong shape: {detail}")]
    Shape { what: String, detail: String },
}

impl BackendError {
    pub(crate) fn copies_no_blocks(device: String) -> Self {
        Self::Unsupported { device, why: "its pages cannot be copied to or from a page store".into() }
    }
}

pub type Result<T> = std::result::Result<T, BackendError>;
