//! The pages of a twin, as the codec's references read them.

use crate::twin::HeadTwin;
use anyhow::Result;
use oscar_backend::{CacheHead, SequenceRows};
use oscar_codec::attention::PagedContext;
use oscar_codec::{CacheLayout, CodeLayout, PAGE_TOKENS, RowPageCodec, SideSpec, Survivors};

/// F32 pages of a twin, those that the device's tables name and no others.
pub struct TwinPages {
    codec: RowPageCodec,
    zero_width: RowPageCodec,
    keeps_history: bool,
    /// Blocks of rows as stored, and of dequantized rows.
    full: Vec<Option<Vec<u8>>>,
    coded: Vec<Option<Vec<u8>>>,
    view: Option<Survivors>,
}

impl TwinPages {
    /// `twin` has the rows that the sequence reads: [`HeadTwin::seen`] if it has a view.
    pub fn of(twin: &HeadTwin, layout: &CacheLayout, head: CacheHead, s: &SequenceRows<'_>) -> Result<Self> {
        let d = layout.head_dim();
        let codec = RowPageCodec::new(d, SideSpec::F32, SideSpec::F32, CodeLayout::Logical)?;
        let pages = |keys: &[f32], values: &[f32]| -> Result<Vec<Vec<u8>>> {
            let page = |(keys, values): (&[f32], &[f32])| {
                let mut page = vec![0; codec.page_bytes()];
                codec.quantize_rows(0, keys, values, &mut page)?;
                Ok(page)
            };
            keys.chunks(PAGE_TOKENS * d).zip(values.chunks(PAGE_TOKENS * d)).map(page).collect()
        };
        let view = s.view.map(|view| view.survivors(head.layer * layout.kv_heads() + head.kv_head));
        let sink = layout.windows().sink();
        // The block of the device's tables, `None` for those of a view.
        let block = |b: usize| match view {
            Some(kept) if b * PAGE_TOKENS >= sink && b < sink / PAGE_TOKENS + kept.pages() => None,
            Some(kept) if b * PAGE_TOKENS >= sink => Some(b + kept.shift(sink) / PAGE_TOKENS),
            _ => Some(b),
        };
        let slides = layout.slides(head.layer);
        let has_full = |b: usize| match slides {
            true => s.sliding.get(b).copied().flatten().is_some(),
            false => block(b).and_then(|b| s.full.get(b).copied().flatten()).is_some(),
        };
        let has_codes = |b: usize| block(b).is_none_or(|b| s.coded.get(b).copied().flatten().is_some());
        let held = |pages: Vec<Vec<u8>>, has: &dyn Fn(usize) -> bool| -> Vec<Option<Vec<u8>>> {
            pages.into_iter().enumerate().map(|(b, page)| has(b).then_some(page)).collect()
        };
        let full = held(pages(&twin.keys, &twin.values)?, &has_full);
        let table = layout.coded().filter(|_| !slides);
        let coded = match table {
            Some(_) => held(pages(&twin.coded_keys, &twin.coded_values)?, &has_codes),
            None => full.clone(),
        };
        let keeps = |table: &oscar_codec::FormatTable| table.codec(head.layer, head.kv_head).keeps_history();
        Ok(Self {
            zero_width: RowPageCodec::new(d, SideSpec::ABSENT, SideSpec::ABSENT, CodeLayout::Logical)?,
            keeps_history: table.is_none_or(keeps),
            codec,
            full,
            coded,
            view,
        })
    }

    pub fn lists(&self) -> TwinLists<'_> {
        let [full, coded] =
            [&self.full, &self.coded].map(|pages| pages.iter().map(Option::as_deref).collect());
        TwinLists { pages: self, full, coded }
    }
}

/// The page tables of a twin.
pub struct TwinLists<'a> {
    pages: &'a TwinPages,
    full: Vec<Option<&'a [u8]>>,
    coded: Vec<Option<&'a [u8]>>,
}

impl TwinLists<'_> {
    pub fn context(&self) -> PagedContext<'_> {
        let TwinPages { codec, zero_width, keeps_history, view, .. } = self.pages;
        PagedContext {
            full_codec: codec,
            coded_codec: if *keeps_history { codec } else { zero_width },
            full: &self.full,
            coded: &self.coded,
            view: *view,
        }
    }
}
