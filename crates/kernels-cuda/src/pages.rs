//! Page storage on the GPU.
//!
//! Each layer and KV head has one region per format. Page `id` starts at `base + id · page bytes`.
//! A region is address space for the whole budget. Memory is mapped only up to the largest id in
//! use, in steps of the device's granularity. Kernels find the regions in a table of [`HeadPages`].
//!
//! The regions of sliding layers hold the pages of their group: BF16 rows, and no codes.

use crate::attention::{AttentionMode, CacheKernels};
use crate::blocks::Pieces;
use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::kernels::Kernels;
use crate::layout::{Layout, shared_struct};
use crate::memory::{Buffer, DevicePtr, DeviceSlice, download_all, upload_all};
use crate::storage::Storage;
use cudarc::driver::sys::{self, CUresult};
use oscar_backend::{BlockId, Feature, HeadShape};
use oscar_codec::clip::order_index;
use oscar_codec::{CacheLayout, CodedPageId, FormatTable, FullPageId, RowPageCodec, Side, SlidingPageId};

/// Pages of one layer, KV head and format.
pub(crate) struct Region {
    device: Device,
    /// `None` if pages have no bytes.
    start: Option<DevicePtr<u8>>,
    reserved: usize,
    mapped: usize,
    chunks: Vec<(u64, usize, u64)>,
    page_bytes: usize,
}

shared_struct! {
    /// The pages of one layer and KV head, and their widths.
    #[derive(PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    pub(crate) struct HeadPages {
        /// Addresses of the regions, 0 for none.
        pub full: u64,
        pub coded: u64,
        pub key_bits: u32,
        pub value_bits: u32,
        /// Order-statistic index of the clip; `u32::MAX` for no clipping.
        pub key_clip: u32,
        pub value_clip: u32,
    }
}

shared_struct! {
    /// How the codes of one layer and head are rounded.
    #[derive(bytemuck::Pod, bytemuck::Zeroable)]
    pub(crate) struct HeadRounding {
        /// Address of the keys' feedback, 0 for none.
        feedback: u64,
        unbiased: u64,
    }
}

pub(crate) const LAYOUTS: &[Layout] = &[HeadPages::LAYOUT, HeadRounding::LAYOUT];

/// The rounding of all heads, on the device.
struct Roundings {
    /// `[layer][kv_head]`.
    table: Buffer,
    /// The table holds their addresses.
    _feedback: Vec<Buffer>,
}

impl Roundings {
    /// `None` if all codes are the nearest levels.
    fn upload(device: &Device, coded: &FormatTable) -> Result<Option<Self>> {
        if coded.codecs().iter().all(|codec| codec.rounding(Side::Key).is_nearest()) {
            return Ok(None);
        }
        let (mut heads, mut feedback) = (Vec::new(), Vec::new());
        for codec in coded.codecs() {
            let rounding = codec.rounding(Side::Key);
            let mut address = 0;
            if let Some(matrix) = &rounding.feedback {
                let buffer = device.upload_new(matrix.rows(), "the feedback of query-aware rounding")?;
                address = buffer.ptr::<f32>().address();
                feedback.push(buffer);
            }
            heads.push(HeadRounding { feedback: address, unbiased: u64::from(rounding.unbiased) });
        }
        Ok(Some(Self { table: device.upload_new(&heads, "the table of roundings")?, _feedback: feedback }))
    }
}

/// The pages of a model.
pub struct CudaPages {
    device: Device,
    layout: CacheLayout,
    shape: HeadShape,
    kernels: CacheKernels,
    storage: Storage,
    /// `[layer][kv_head]`; in sliding layers the pages of their group.
    full: Vec<Region>,
    /// Without memory in sliding layers.
    coded: Vec<Region>,
    heads: Vec<HeadPages>,
    /// `heads` on the device.
    table: Buffer,
    roundings: Option<Roundings>,
    /// The parts of a full, a quantized and a sliding block.
    pieces: [Pieces; 3],
    granularity: usize,
    /// Pages that hold random contents.
    randomized: (usize, usize),
}

/// A run of pages that were never written.
pub(crate) struct FreshPages {
    pub start: DevicePtr<u8>,
    pub count: usize,
    pub page_bytes: usize,
    /// Byte offset of the parameters of a coded page; `None` for full pages.
    pub parameters: Option<usize>,
}

impl CudaPages {
    pub(crate) fn reserve(
        device: &Device,
        kernels: &Kernels,
        mode: AttentionMode,
        layout: &CacheLayout,
        shape: &HeadShape,
        budget: usize,
    ) -> Result<Self> {
        let groups =
            shape.kv_heads > 0 && shape.query_heads > 0 && shape.query_heads.is_multiple_of(shape.kv_heads);
        if !groups || (layout.kv_heads(), layout.head_dim()) != (shape.kv_heads, shape.head_dim) {
            let detail = format!("{shape:?} over {} KV heads of {}", layout.kv_heads(), layout.head_dim());
            return Err(CudaError::Shape { what: "a cache", detail });
        }
        let storage = Storage::of(layout)?;
        storage.check_order(layout)?;
        let layout = &Storage::held(layout);
        let (free, _) = device.memory()?;
        if budget > free {
            return Err(device.out_of_memory("the KV pages (--kv-memory)", budget));
        }
        let granularity = granularity(device)?;
        // `sliding`: bytes of a block of the sliding group, if the table's pages may be of it.
        let regions =
            |table: &FormatTable, block_bytes: usize, sliding: Option<usize>| -> Result<Vec<Region>> {
                let region = |(i, codec): (usize, &RowPageCodec)| {
                    let of = match (layout.slides(i / layout.kv_heads()), sliding) {
                        (false, _) => block_bytes,
                        (true, Some(bytes)) => bytes,
                        (true, None) => return Region::reserve(device, 0, 0, granularity),
                    };
                    Region::reserve(device, budget / of.max(1) + 1, codec.page_bytes(), granularity)
                };
                table.codecs().iter().enumerate().map(region).collect()
            };
        let full = regions(layout.full(), layout.full_block_bytes(), Some(layout.sliding_block_bytes()))?;
        let coded = match (storage, layout.coded()) {
            (Storage::Codes, Some(table)) => regions(table, layout.coded_block_bytes(), None)?,
            (Storage::Dequantized, _) => regions(layout.full(), layout.coded_block_bytes(), None)?,
            (Storage::Bf16, _) | (_, None) => Vec::new(),
        };
        let clip = |codec: &RowPageCodec, side| {
            order_index(codec.spec(side).clip, codec.head_dim()).map_or(u32::MAX, |index| index as u32)
        };
        let read_as_code = layout.coded().filter(|_| storage == Storage::Codes);
        // Dequantized history has the widths of full pages; zero-width heads and sliding layers have none.
        let absent = |i: usize| {
            let slides = layout.slides(i / layout.kv_heads());
            slides
                || layout
                    .coded()
                    .is_some_and(|t| !t.codec(i / t.kv_heads(), i % t.kv_heads()).keeps_history())
        };
        let heads: Vec<HeadPages> = read_as_code
            .unwrap_or(layout.full())
            .codecs()
            .iter()
            .enumerate()
            .map(|(i, codec)| HeadPages {
                full: full[i].address(),
                coded: coded.get(i).map_or(0, Region::address),
                key_bits: if absent(i) { 0 } else { codec.spec(Side::Key).bits },
                value_bits: if absent(i) { 0 } else { codec.spec(Side::Value).bits },
                key_clip: clip(codec, Side::Key),
                value_clip: clip(codec, Side::Value),
            })
            .collect();
        let table = device.upload_new(&heads, "the table of KV pages")?;
        let group = |regions: &[Region], slides: bool| {
            let regions = regions.iter().enumerate();
            let of_group = regions.filter(|(i, _)| layout.slides(i / layout.kv_heads()) == slides);
            Pieces::upload(device, of_group.map(|(_, region)| region))
        };
        let pieces = [group(&full, false)?, group(&coded, false)?, group(&full, true)?];
        Ok(Self {
            device: device.clone(),
            layout: layout.clone(),
            shape: *shape,
            kernels: CacheKernels::new(device, kernels, mode, shape, (layout, storage), &heads)?,
            storage,
            pieces,
            full,
            coded,
            heads,
            table,
            roundings: read_as_code.map(|coded| Roundings::upload(device, coded)).transpose()?.flatten(),
            granularity,
            randomized: (0, 0),
        })
    }

    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// The heads of the model whose pages these are.
    pub fn shape(&self) -> &HeadShape {
        &self.shape
    }

    pub(crate) fn kernels(&self) -> &CacheKernels {
        &self.kernels
    }

    pub fn storage(&self) -> Storage {
        self.storage
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The entries of a layer's heads in the table of pages.
    pub(crate) fn layer(&self, layer: usize) -> DevicePtr<HeadPages> {
        self.table.ptr().add(layer * self.layout.kv_heads())
    }

    /// The entries of a layer's heads in the table of roundings; `None` if all codes are the
    /// nearest.
    pub(crate) fn layer_roundings(&self, layer: usize) -> Option<DevicePtr<HeadRounding>> {
        self.roundings.as_ref().map(|r| r.table.ptr().add(layer * self.layout.kv_heads()))
    }

    /// Maps memory for the first page ids of each kind.
    pub(crate) fn ensure(&mut self, full: usize, coded: usize, sliding: usize) -> Result<()> {
        let kv_heads = self.layout.kv_heads();
        for (i, region) in self.full.iter_mut().enumerate() {
            let pages = if self.layout.slides(i / kv_heads) { sliding } else { full };
            region.grow(pages, self.granularity)?;
        }
        for region in &mut self.coded {
            region.grow(coded, self.granularity)?;
        }
        Ok(())
    }

    /// Maps memory for this many page ids and lists those that no earlier call has listed. Sliding layers
    /// have none of them.
    pub(crate) fn fresh(&mut self, full: usize, coded: usize) -> Result<Vec<FreshPages>> {
        self.ensure(full, coded, 0)?;
        let mut all = Vec::new();
        let before = self.randomized;
        self.randomized = (before.0.max(full), before.1.max(coded));
        let run = |region: &Region, from: usize, to: usize, parameters| {
            let start = region.start?.add(from * region.page_bytes);
            let count = to.saturating_sub(from);
            (count > 0).then_some(FreshPages { start, count, page_bytes: region.page_bytes, parameters })
        };
        let kv_heads = self.layout.kv_heads();
        let grows = |(i, _): &(usize, &Region)| !self.layout.slides(i / kv_heads);
        let full_regions = self.full.iter().enumerate().filter(grows);
        all.extend(full_regions.filter_map(|(_, r)| run(r, before.0, full, None)));
        for (r, h) in self.coded.iter().zip(&self.heads) {
            let codes = 8 * self.layout.head_dim() * (h.key_bits + h.value_bits) as usize;
            let parameters = (self.storage == Storage::Codes).then_some(codes);
            all.extend(run(r, before.1, coded, parameters));
        }
        Ok(all)
    }

    /// The parts of a block, if its page has memory.
    pub(crate) fn pieces(&self, block: BlockId) -> Result<(&Pieces, u32)> {
        let (pieces, regions, id, slides) = match block {
            BlockId::Full(FullPageId(id)) => (&self.pieces[0], &self.full, id, false),
            BlockId::Coded(CodedPageId(id)) => (&self.pieces[1], &self.coded, id, false),
            BlockId::Sliding(SlidingPageId(id)) => (&self.pieces[2], &self.full, id, true),
            BlockId::State(_) => return Err(CudaError::lacks(Feature::DeltaNet)),
        };
        let kv_heads = self.layout.kv_heads();
        let of_group = |(i, _): &(usize, &Region)| self.layout.slides(i / kv_heads) == slides;
        let mut of_block = regions.iter().enumerate().filter(of_group);
        match of_block.all(|(_, region)| (id as usize + 1) * region.page_bytes <= region.mapped) {
            true => Ok((pieces, id)),
            false => Err(no_memory(format!("{block:?}"))),
        }
    }

    /// Maps memory for these blocks.
    pub(crate) fn ensure_blocks(&mut self, blocks: impl Iterator<Item = BlockId>) -> Result<()> {
        let (mut full, mut coded, mut sliding) = (0, 0, 0);
        for block in blocks {
            match block {
                BlockId::Full(id) => full = full.max(id.0 as usize + 1),
                BlockId::Coded(id) => coded = coded.max(id.0 as usize + 1),
                BlockId::Sliding(id) => sliding = sliding.max(id.0 as usize + 1),
                BlockId::State(_) => return Err(CudaError::lacks(Feature::DeltaNet)),
            }
        }
        self.ensure(full, coded, sliding)
    }

    /// Copies a page to the host (for checks). In sliding layers the full page is that of their group.
    pub fn read_page(&self, layer: usize, head: usize, id: u32, coded: bool) -> Result<Vec<u8>> {
        let at = self.page_at(layer, head, id, coded)?;
        let mut page = vec![0; at.map_or(0, |at| at.len())];
        if let Some(at) = at {
            download_all(&self.device, &mut [(at, &mut page)])?;
        }
        Ok(page)
    }

    /// Copies a page to the device (for checks).
    pub fn write_page(&mut self, layer: usize, head: usize, id: u32, coded: bool, page: &[u8]) -> Result<()> {
        match self.page_at(layer, head, id, coded)? {
            Some(at) => upload_all(&self.device, &[(at, page)]),
            None => Ok(()),
        }
    }

    /// A page that has memory; `None` if pages of this head have no bytes.
    pub(crate) fn page_at(
        &self,
        layer: usize,
        head: usize,
        id: u32,
        coded: bool,
    ) -> Result<Option<DeviceSlice<'_, u8>>> {
        let regions = if coded { &self.coded } else { &self.full };
        let index = layer * self.layout.kv_heads() + head;
        let region = regions.get(index).filter(|_| head < self.layout.kv_heads());
        let page = region.and_then(|region| {
            let at = id as usize * region.page_bytes;
            (at + region.page_bytes <= region.mapped).then(|| {
                // SAFETY: mapped memory of the region, which lives as long as `self`; a region is
                // unmapped when the stream is done.
                region.start.map(|start| unsafe { DeviceSlice::new(start.add(at), region.page_bytes) })
            })
        });
        page.ok_or_else(|| no_memory(format!("page {id} of layer {layer}, head {head}")))
    }
}

fn no_memory(page: String) -> CudaError {
    CudaError::Shape { what: "a page", detail: format!("{page} has no memory yet") }
}

fn allocation(device: &Device) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(device: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal() }
}

fn granularity(device: &Device) -> Result<usize> {
    device.enter()?;
    let mut bytes = 0;
    let flag = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: a complete description and an out-parameter.
    device.check("cuMemGetAllocationGranularity", unsafe {
        sys::cuMemGetAllocationGranularity(&mut bytes, &allocation(device), flag)
    })?;
    Ok(bytes.max(1))
}

impl Region {
    fn reserve(device: &Device, pages: usize, page_bytes: usize, granularity: usize) -> Result<Self> {
        device.enter()?;
        let reserved = pages.saturating_mul(page_bytes).div_ceil(granularity) * granularity;
        let region = |start| Self {
            device: device.clone(),
            start,
            reserved,
            mapped: 0,
            chunks: Vec::new(),
            page_bytes,
        };
        if reserved == 0 {
            return Ok(region(None));
        }
        let mut address = 0;
        // SAFETY: one out-parameter; only address space is taken.
        match unsafe { sys::cuMemAddressReserve(&mut address, reserved, 0, 0, 0) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                return Err(device.out_of_memory("the address space of KV pages", reserved));
            }
            other => device.check("cuMemAddressReserve", other)?,
        }
        Ok(region(DevicePtr::new(address)))
    }

    /// Address of the first page, and the bytes of each.
    pub(crate) fn place(&self) -> (u64, usize) {
        (self.address(), self.page_bytes)
    }

    fn address(&self) -> u64 {
        self.start.map_or(0, DevicePtr::address)
    }

    /// Maps memory for the first `pages`. Grows by an eighth at least, so that a growing cache maps
    /// rarely.
    fn grow(&mut self, pages: usize, granularity: usize) -> Result<()> {
        let bytes = pages * self.page_bytes;
        if bytes <= self.mapped {
            return Ok(());
        }
        if bytes > self.reserved {
            let detail = format!("{bytes} bytes of pages in a region of {}", self.reserved);
            return Err(CudaError::Shape { what: "the page table", detail });
        }
        let device = self.device.clone();
        let wanted = bytes.max(self.mapped + self.mapped / 8).div_ceil(granularity) * granularity;
        let size = wanted.min(self.reserved) - self.mapped;
        device.admit(size, "KV pages")?;
        device.enter()?;
        let at = self.address() + self.mapped as u64;
        let mut handle = 0;
        let access = sys::CUmemAccessDesc {
            location: location(&device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: sizes are multiples of the granularity; the range lies in our reservation, behind
        // the mapped part; the handle is released when the region is dropped.
        unsafe {
            match sys::cuMemCreate(&mut handle, size, &allocation(&device), 0) {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(device.out_of_memory("KV pages", size)),
                other => device.check("cuMemCreate", other)?,
            }
            if let Err(error) = device.check("cuMemMap", sys::cuMemMap(at, size, 0, handle, 0)) {
                let _ = sys::cuMemRelease(handle);
                return Err(error);
            }
            self.chunks.push((at, size, handle));
            device.check("cuMemSetAccess", sys::cuMemSetAccess(at, size, &access, 1))?;
        }
        self.mapped += size;
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let _ = self.device.synchronize();
        for &(at, size, handle) in &self.chunks {
            // SAFETY: mapped by `grow` and unmapped once, after the stream is done.
            unsafe {
                let _ = sys::cuMemUnmap(at, size);
                let _ = sys::cuMemRelease(handle);
            }
        }
        if self.reserved == 0 {
            return;
        }
        // SAFETY: our own reservation, nothing is mapped in it any more.
        let _ = unsafe { sys::cuMemAddressFree(self.address(), self.reserved) };
    }
}
