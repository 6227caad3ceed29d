//! Pages of a device that checks look into.

use anyhow::Result;
use oscar_backend::CacheHead;
use oscar_codec::FullPageId;
use oscar_kernels_cuda::{CudaPages, Storage};

/// Pages of a device that a check can read.
pub trait Inspected {
    fn storage(&self) -> Storage;
    /// A page of history; `None` where the device's pages cannot be compared with a GPU's.
    fn history_page(&self, head: CacheHead, id: u32) -> Result<Option<Vec<u8>>>;
    fn full_page(&self, head: CacheHead, id: FullPageId) -> Result<Vec<u8>>;
    /// Replaces a full page, which must have memory.
    fn set_full_page(&mut self, head: CacheHead, id: FullPageId, page: &[u8]) -> Result<()>;
}

impl Inspected for CudaPages {
    fn storage(&self) -> Storage {
        CudaPages::storage(self)
    }

    fn history_page(&self, head: CacheHead, id: u32) -> Result<Option<Vec<u8>>> {
        Ok(Some(self.read_page(head.layer, head.kv_head, id, true)?))
    }

    fn full_page(&self, head: CacheHead, id: FullPageId) -> Result<Vec<u8>> {
        Ok(self.read_page(head.layer, head.kv_head, id.0, false)?)
    }

    fn set_full_page(&mut self, head: CacheHead, id: FullPageId, page: &[u8]) -> Result<()> {
        Ok(self.write_page(head.layer, head.kv_head, id.0, false, page)?)
    }
}
