//! Page storage of the CPU backend.
//!
//! Each layer and KV head has a region of its own per format, and page `i` of it lies at `i ·
//! page_bytes`: the pages of a sequence that grew alone are one sequential stream for the memory
//! system. The byte budget bounds the page ids that the cache's bookkeeping hands out; regions are
//! sized for it but touched only as pages are used. Sliding layers have one region for each head,
//! with the pages of their group.

use super::region::Region;
use oscar_backend::{BackendError, BlockId, HeadShape, Result};
use oscar_codec::{CacheLayout, CodedPageId, FormatTable, FullPageId, RowPageCodec, SlidingPageId};
use std::slice;

/// Pages of one layer, head and format.
pub struct HeadPages {
    region: Region,
    page_bytes: usize,
}

impl HeadPages {
    pub fn page(&self, index: u32) -> &[u8] {
        &self.region.bytes()[index as usize * self.page_bytes..][..self.page_bytes]
    }

    pub fn page_mut(&mut self, index: u32) -> &mut [u8] {
        &mut self.region.bytes_mut()[index as usize * self.page_bytes..][..self.page_bytes]
    }

    fn reserve(what: &str, pages: usize, page_bytes: usize) -> Result<Self> {
        let bytes = pages.saturating_mul(page_bytes);
        let region = Region::reserve(bytes).map_err(|error| BackendError::OutOfMemory {
            device: "cpu".into(),
            what: format!("{what} ({error})"),
            bytes,
        })?;
        Ok(Self { region, page_bytes })
    }

    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// All pages.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.region.bytes_mut()
    }

    /// One page to read and another, which must not be the same, to write.
    pub fn pair(&mut self, from: u32, to: u32) -> (&[u8], &mut [u8]) {
        assert_ne!(from, to, "two pages");
        let size = self.page_bytes;
        let (from, to) = (from as usize * size, to as usize * size);
        let bytes = self.region.bytes_mut();
        if from < to {
            let (low, high) = bytes.split_at_mut(to);
            (&low[from..from + size], &mut high[..size])
        } else {
            let (low, high) = bytes.split_at_mut(from);
            (&high[..size], &mut low[to..to + size])
        }
    }
}

/// The pages of a model.
pub struct CpuPages {
    layout: CacheLayout,
    heads: HeadShape,
    /// Full-precision pages, `[layer][kv_head]`; in sliding layers those of their group.
    full: Vec<HeadPages>,
    /// Quantized pages; none in sliding layers.
    coded: Vec<HeadPages>,
    /// The states of sequences, if the model has some.
    states: HeadPages,
}

impl CpuPages {
    pub fn reserve(layout: &CacheLayout, heads: &HeadShape, budget: usize) -> Result<Self> {
        if (layout.kv_heads(), layout.head_dim()) != (heads.kv_heads, heads.head_dim) {
            let detail = format!("{heads:?} over {} KV heads of {}", layout.kv_heads(), layout.head_dim());
            return Err(super::shape_error("a cache", detail));
        }
        let table = |table: &FormatTable, pages: usize, sliding: usize| -> Result<Vec<HeadPages>> {
            let heads = (0..table.layers()).flat_map(|l| (0..table.kv_heads()).map(move |h| (l, h)));
            heads
                .map(|(l, h)| {
                    let pages = if layout.slides(l) { sliding } else { pages };
                    let what = format!("the KV pages of layer {l}, head {h}");
                    HeadPages::reserve(&what, pages, table.codec(l, h).page_bytes())
                })
                .collect()
        };
        // Pages of views follow those of quantized blocks.
        let views = layout.view_page_ids(budget).end as usize;
        let coded = layout.coded().map(|coded| table(coded, views, 0)).transpose()?.unwrap_or_default();
        let pages = |block_bytes: usize| budget / block_bytes.max(1) + 1;
        let (full, sliding) = (pages(layout.full_block_bytes()), pages(layout.sliding_block_bytes()));
        let full = table(layout.full(), full, sliding)?;
        let states = budget.checked_div(layout.state_bytes()).map_or(0, |states| states + 1);
        let states = HeadPages::reserve("the states of sequences", states, layout.state_bytes())?;
        Ok(Self { layout: layout.clone(), heads: *heads, full, coded, states })
    }

    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    pub fn heads(&self) -> &HeadShape {
        &self.heads
    }

    pub fn full_codec(&self, layer: usize, head: usize) -> &RowPageCodec {
        self.layout.full().codec(layer, head)
    }

    /// The codec of quantized pages; in caches without any, the full one, which is then never used
    /// for a page.
    pub fn coded_codec(&self, layer: usize, head: usize) -> &RowPageCodec {
        self.layout.coded().unwrap_or(self.layout.full()).codec(layer, head)
    }

    pub fn full_page(&self, layer: usize, head: usize, id: FullPageId) -> &[u8] {
        self.full[layer * self.layout.kv_heads() + head].page(id.0)
    }

    pub fn sliding_page(&self, layer: usize, head: usize, id: SlidingPageId) -> &[u8] {
        self.full[layer * self.layout.kv_heads() + head].page(id.0)
    }

    pub fn coded_page(&self, layer: usize, head: usize, id: CodedPageId) -> &[u8] {
        self.coded[layer * self.layout.kv_heads() + head].page(id.0)
    }

    /// Appends the bytes of a block, layer by layer and head by head.
    pub fn read_block(&self, block: BlockId, out: &mut Vec<u8>) {
        let (heads, id) = match block {
            BlockId::Full(FullPageId(id)) | BlockId::Sliding(SlidingPageId(id)) => (&self.full[..], id),
            BlockId::Coded(id) => (&self.coded[..], id.0),
            BlockId::State(id) => (slice::from_ref(&self.states), id.0),
        };
        for (index, pages) in heads.iter().enumerate() {
            if has_page(&self.layout, block, index) {
                out.extend_from_slice(pages.page(id));
            }
        }
    }

    /// Replaces the bytes of a block by those of [`Self::read_block`].
    ///
    /// # Errors
    /// If their number is wrong; then nothing is written.
    pub fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<()> {
        let expected = block.bytes(&self.layout);
        if bytes.len() != expected {
            return Err(super::shape_error("a block", format!("{} bytes, not {expected}", bytes.len())));
        }
        let (heads, id) = match block {
            BlockId::Full(FullPageId(id)) | BlockId::Sliding(SlidingPageId(id)) => (&mut self.full[..], id),
            BlockId::Coded(id) => (&mut self.coded[..], id.0),
            BlockId::State(id) => (slice::from_mut(&mut self.states), id.0),
        };
        let mut rest = bytes;
        let heads = heads.iter_mut().enumerate();
        for (_, pages) in heads.filter(|(index, _)| has_page(&self.layout, block, *index)) {
            let (page, others) = rest.split_at(pages.page_bytes);
            pages.page_mut(id).copy_from_slice(page);
            rest = others;
        }
        Ok(())
    }

    /// The states of sequences, one after the other.
    pub fn states_mut(&mut self) -> &mut HeadPages {
        &mut self.states
    }

    /// A page of a view, or of a quantized block, by the number of its layer and head.
    pub fn view_page(&self, index: usize, id: u32) -> &[u8] {
        self.coded[index].page(id)
    }

    /// The quantized pages of all layers and heads.
    pub fn coded_heads_mut(&mut self) -> &mut [HeadPages] {
        &mut self.coded
    }

    /// The heads of one layer: layout, full pages, quantized pages.
    pub fn layer_mut(&mut self, layer: usize) -> (&CacheLayout, &mut [HeadPages], &mut [HeadPages]) {
        let heads = self.layout.kv_heads();
        let range = layer * heads..(layer + 1) * heads;
        let coded = if self.coded.is_empty() { &mut [][..] } else { &mut self.coded[range.clone()] };
        (&self.layout, &mut self.full[range], coded)
    }
}

/// Whether a block has a page of this layer and head, counted together.
fn has_page(layout: &CacheLayout, block: BlockId, index: usize) -> bool {
    match block {
        // A state has all layers in one piece.
        BlockId::State(_) => true,
        BlockId::Full(_) | BlockId::Coded(_) | BlockId::Sliding(_) => {
            layout.slides(index / layout.kv_heads()) == matches!(block, BlockId::Sliding(_))
        }
    }
}
