//! What a device says about its attention kernels.

/// The kernels that read a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionKernels {
    pub path: AttentionPath,
    /// One line for the start banner.
    pub description: String,
}

/// How attention reads the history of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionPath {
    /// By kernels made for the format.
    Native,
    /// By a simple kernel that any shape passes through: slow, and chosen by the user.
    Simple,
    /// The format has no kernel on this device: its pages are dequantized first. The answers are the
    /// codec's, the speed is not.
    Dequantized,
}
