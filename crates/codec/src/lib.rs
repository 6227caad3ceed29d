//! The KV-cache formats, in scalar code that is the specification.
//!
//! Everything a key or a value row goes through between the model and the cache is defined here once:
//! the rotation ([`rotation`]), the clip ([`clip`]), the quantizer ([`affine`], [`lloyd_max`]), the bytes of a
//! page ([`page`], [`layout`], [`cache_layout`]), the names users type ([`format`](mod@format)), which positions a query reads as code
//! ([`window`]) and what attention over all of it must return ([`attention`]). Fast kernels live elsewhere and
//! are tested against this crate.
//!
//! **Invariant:** no files, no threads, no devices, no `unsafe`; every function is a pure function of its
//! arguments, and finite input never gives a NaN or a panic.

pub mod affine;
pub mod attention;
pub mod cache_layout;
pub mod clip;
mod error;
pub mod format;
pub mod gpu_tile;
pub mod hadamard;
pub mod layout;
pub mod lloyd_max;
pub mod page;
pub mod rotation;
pub mod window;

pub use cache_layout::{CacheLayout, CodedPageId, FullPageId};
pub use error::{CodecError, Result};
pub use format::{FormatTable, KvFormat, RotationKind};
pub use layout::CodeLayout;
pub use page::{PAGE_TOKENS, PageCodec, RowPageCodec, Side, SideSpec, TILE_TOKENS};
pub use rotation::{Composition, HeadRotations, Rotation, RotationSet};
pub use window::Windows;
