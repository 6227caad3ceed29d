//! The KV-cache formats, in scalar code that is the specification.
//!
//! Every transformation of a key or value row between the model and the cache is defined here once:
//! the rotation ([`rotation`]), the clip ([`clip`]), the quantizer ([`affine`], [`rounding`],
//! [`lloyd_max`], and those of other methods: [`turboquant`], [`channel_groups`], [`fp8`]), the
//! bytes of a page ([`page`], [`layout`], [`cache_layout`]), the names that users type
//! ([`format`](mod@format), [`rivals`]), the positions that a query reads quantized ([`window`]),
//! the layers that keep a window only ([`sliding`]), the rows left after eviction ([`view`]) and the
//! result of attention over all of it ([`attention`]). Fast kernels live elsewhere and are tested
//! against this crate.
//!
//! **Invariant:** no files, no threads, no devices, no `unsafe`. Every function is a pure function
//! of its arguments, and finite input never gives a NaN or a panic.

pub mod affine;
pub mod attention;
pub mod cache_layout;
mod capacity;
pub mod channel_groups;
pub mod clip;
mod error;
pub mod format;
mod format_table;
pub mod fp8;
pub mod gpu_tile;
mod group_pages;
pub mod hadamard;
pub mod layout;
pub mod lloyd_max;
pub mod page;
pub mod random;
pub mod record;
pub mod recurrent;
mod relayout;
pub mod rivals;
pub mod rotation;
pub mod rounding;
pub mod scores;
mod side;
pub mod sliding;
pub mod turboquant;
pub mod view;
pub mod window;

pub use cache_layout::{CacheLayout, CodedPageId, FullPageId};
pub use capacity::Capacity;
pub use error::{CodecError, MAX_LATENT_ROW, Result};
pub use format::{KvFormat, MeanBits, RotationKind};
pub use format_table::FormatTable;
pub use group_pages::TilePlace;
pub use layout::CodeLayout;
pub use page::{PAGE_TOKENS, RowPageCodec, Side, SideSpec, TILE_TOKENS};
pub use recurrent::StateId;
pub use rivals::Rival;
pub use rotation::{Composition, HeadRotations, Rotation, RotationSet};
pub use rounding::{Feedback, Rounding};
pub use sliding::{BlockCounts, SlidingGroup, SlidingPageId};
pub use view::Survivors;
pub use window::{Tail, Windows};
