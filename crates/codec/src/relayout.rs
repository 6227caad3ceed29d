//! Converting a page from one byte order to another.

use crate::error::{Result, check_len};
use crate::layout::CodeLayout;
use crate::page::{Body, PAGE_TOKENS, RowPageCodec, Scheme, Side};

impl RowPageCodec {
    /// Rewrites a page in another layout, code by code and parameter by parameter, losing nothing.
    pub fn relayout(&self, page: &[u8], layout: CodeLayout) -> Result<(Self, Vec<u8>)> {
        check_len("page", page.len(), self.page_bytes())?;
        let other = Self::new(self.head_dim(), self.spec(Side::Key), self.spec(Side::Value), layout)?;
        let mut out = vec![0u8; other.page_bytes()];
        for side in [Side::Key, Side::Value] {
            let (from, to) = (self.side(side), other.side(side));
            let (codes, params) = (self.codes_range(side), self.params_range(side));
            if from.body != Body::Mapped {
                // Records and token groups have one order in every layout.
                let (source, target) = (codes, other.codes_range(side));
                out[target].copy_from_slice(&page[source]);
                continue;
            }
            let element = match from.spec.scheme {
                Scheme::F32 => 4,
                Scheme::Bf16 => 2,
                _ => 0,
            };
            for token in 0..PAGE_TOKENS {
                for channel in 0..self.head_dim() {
                    if element == 0 {
                        let code = from.map.read(&page[codes.clone()], token, channel);
                        to.map.write(&mut out[codes.clone()], token, channel, code);
                    } else {
                        let (a, b) =
                            (from.map.element_index(token, channel), to.map.element_index(token, channel));
                        let source = codes.start + a * element..codes.start + (a + 1) * element;
                        out[codes.start + b * element..][..element].copy_from_slice(&page[source]);
                    }
                }
                let unit = if from.spec.scheme == Scheme::OfficialAffine { 4 } else { 2 };
                for group in 0..if element == 0 { from.groups } else { 0 } {
                    for which in 0..2 {
                        let a = params.start + from.map.param_index(from.groups, token, group, which) * unit;
                        let b = params.start + to.map.param_index(to.groups, token, group, which) * unit;
                        out[b..b + unit].copy_from_slice(&page[a..a + unit]);
                    }
                }
            }
        }
        Ok((other, out))
    }
}
