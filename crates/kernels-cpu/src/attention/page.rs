//! Which kernel reads the pages of a codec, and the view of a page that it gets.

use oscar_codec::page::Scheme;
use oscar_codec::{CodeLayout, PAGE_TOKENS, RowPageCodec, Side};

#[cfg(target_arch = "x86_64")]
use super::amx::Tiles;
#[cfg(target_arch = "x86_64")]
use super::amx_codes::{CodeTiles, LEAST_BLOCKS, UnpackedPage};
use super::block::{MAX_DIM, QueryForms, ROWS, RowBlock};
use super::dequantize::{CodeBuffer, SidePage, dequantize_page};
use super::dequantized;
use super::precision::AttentionPrecision;
use super::tile::Bf16Tile;
use crate::cpu::Variant;

/// How a codec's pages are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageKind {
    /// Raw codes against fixed-point queries and weights.
    Codes { key_bits: u32, value_bits: u32 },
    /// BF16 rows as dot-product operands. Sides of any other form are dequantized to such rows once
    /// for all queries of the work item.
    Bf16 { dequantized: bool },
    /// BF16 rows that are keys and values in one: keys in place, values turned into their order once
    /// for all queries of the work item.
    Latent,
    /// Rows dequantized to f32: the scalar variant, and pages that are f32 themselves.
    Dequantized,
    /// Pages of zero-width heads: never read.
    Absent,
}

/// A kernel's view of one page.
pub(super) struct PageView<'a> {
    /// Codes or rows of each side, and their parameters, inside the page.
    pub keys: &'a [u8],
    pub values: &'a [u8],
    pub key_params: &'a [u8],
    pub value_params: &'a [u8],
    /// From this page to the one read next, in bytes; for fetching ahead only.
    pub ahead: isize,
    /// Rows as f32, for [`PageKind::Dequantized`].
    pub dequantized: Option<&'a DequantizedPage>,
}

impl<'a> PageView<'a> {
    /// The page as it lies in memory.
    pub(super) fn in_place(codec: &RowPageCodec, page: &'a [u8], ahead: isize) -> Self {
        assert_eq!(page.len(), codec.page_bytes(), "a page of this codec");
        Self {
            keys: &page[codec.codes_range(Side::Key)],
            values: &page[codec.codes_range(Side::Value)],
            key_params: &page[codec.params_range(Side::Key)],
            value_params: &page[codec.params_range(Side::Value)],
            ahead,
            dequantized: None,
        }
    }
}

/// A page as f32 rows, token by token; both sides have room whichever is dequantized.
#[derive(Default)]
pub(super) struct DequantizedPage {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

/// One step of reading a page with a block of rows.
///
/// # Safety
/// The processor must have the instructions of the variant the stage was selected for, and tiles must
/// be configured ([`PageReader::configure_tiles`]).
pub(super) type Stage = unsafe fn(&mut RowBlock, &PageView<'_>);

/// The steps: scores of all tokens, softmax weights, weighted sum of values.
#[derive(Clone, Copy)]
pub(super) struct Stages {
    pub score: Stage,
    pub weigh: Stage,
    pub add_values: Stage,
    /// If present, it runs between `score` and `weigh` and does the part with long latency and
    /// little work. The values of the previous page are added after it, so that the two overlap.
    pub find_maxima: Option<Stage>,
}

/// How a variant reads a codec's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageReader {
    variant: Variant,
    precision: AttentionPrecision,
    pub kind: PageKind,
}

impl PageReader {
    pub(super) fn new(variant: Variant, precision: AttentionPrecision, codec: &RowPageCodec) -> Self {
        Self { variant, precision, kind: kind(variant, codec) }
    }

    /// Configures tiles for the stages of a page and all its blocks, where they use tiles.
    ///
    /// # Safety
    /// The variant must be available.
    #[cfg(target_arch = "x86_64")]
    pub(super) unsafe fn configure_tiles(self) -> Option<Tiles> {
        let uses_tiles =
            matches!((self.variant, self.kind), (Variant::Amx, PageKind::Bf16 { .. } | PageKind::Latent));
        // SAFETY: as the caller vouches.
        uses_tiles.then(|| unsafe { Tiles::configure(ROWS) })
    }

    /// How tiles read the codes of a head for this many blocks of rows, where they are faster than
    /// [`Self::stages`].
    #[cfg(target_arch = "x86_64")]
    pub(super) fn code_tiles(self, blocks: usize, head_dim: usize) -> Option<CodeTiles> {
        match (self.variant, self.kind) {
            (Variant::Amx, PageKind::Codes { key_bits, value_bits }) if blocks >= LEAST_BLOCKS => {
                CodeTiles::new(self.precision, key_bits, value_bits, head_dim)
            }
            _ => None,
        }
    }

    /// How the same variant reads keys of one codec beside values of another.
    pub(super) fn across(full: Self, coded: Self) -> Self {
        let bf16 = |kind| matches!(kind, PageKind::Bf16 { .. } | PageKind::Codes { .. });
        let both = bf16(full.kind) && bf16(coded.kind);
        let kind = if both { PageKind::Bf16 { dequantized: true } } else { PageKind::Dequantized };
        Self { kind, ..full }
    }

    /// Whether a page costs much before the first row reads it.
    pub(super) fn dequantizes(self) -> bool {
        matches!(self.kind, PageKind::Dequantized | PageKind::Latent | PageKind::Bf16 { dequantized: true })
    }

    pub(super) fn forms(self) -> QueryForms {
        match (self.kind, self.variant) {
            (PageKind::Codes { .. }, _) => QueryForms { fixed_point: true, bf16: false },
            (PageKind::Bf16 { .. } | PageKind::Latent, Variant::Avx512 | Variant::Amx) => {
                QueryForms { fixed_point: false, bf16: true }
            }
            _ => QueryForms::default(),
        }
    }

    /// The functions for a block of `rows` rows.
    pub(super) fn stages(self, rows: usize) -> Stages {
        match (self.variant, self.kind) {
            #[cfg(target_arch = "x86_64")]
            (Variant::Avx2, PageKind::Codes { key_bits, value_bits }) => {
                super::avx2::codes::code_stages(self.precision, key_bits, value_bits)
            }
            #[cfg(target_arch = "x86_64")]
            (Variant::Avx512 | Variant::Amx, PageKind::Codes { key_bits, value_bits }) => {
                super::avx512::codes::code_stages(self.precision, key_bits, value_bits, rows)
            }
            #[cfg(target_arch = "x86_64")]
            (Variant::Avx2, PageKind::Bf16 { .. } | PageKind::Latent) => super::avx2::codes::bf16_stages(),
            #[cfg(target_arch = "x86_64")]
            (Variant::Avx512, PageKind::Bf16 { .. } | PageKind::Latent) => super::avx512::bf16::stages(rows),
            #[cfg(target_arch = "x86_64")]
            (Variant::Amx, PageKind::Bf16 { .. } | PageKind::Latent) => super::amx::stages(rows),
            (variant, _) => {
                let _ = rows;
                dequantized::stages(variant)
            }
        }
    }

    pub(super) fn name(self) -> String {
        let set = match self.variant {
            Variant::Avx512 if matches!(self.kind, PageKind::Codes { .. }) => "avx512-vnni",
            Variant::Amx if matches!(self.kind, PageKind::Codes { .. }) => "amx + avx512-vnni",
            variant => variant.name(),
        };
        match self.kind {
            PageKind::Absent => "no codes (zero-width heads)".into(),
            _ if self.variant == Variant::Scalar => set.into(),
            PageKind::Dequantized | PageKind::Bf16 { dequantized: true } => "dequantized first".into(),
            PageKind::Bf16 { .. } => format!("{set} bf16"),
            PageKind::Latent => format!("{set} bf16 latent"),
            PageKind::Codes { key_bits, value_bits } => {
                let one_byte = self.precision.one_byte(key_bits.min(value_bits));
                match (key_bits == value_bits, one_byte) {
                    (true, false) => format!("{set} int{key_bits}"),
                    (true, true) => format!("{set} int{key_bits} (int8 query)"),
                    (false, false) => format!("{set} mixed widths"),
                    (false, true) => format!("{set} mixed widths (int8 up to 2 bits)"),
                }
            }
        }
    }
}

fn kind(variant: Variant, codec: &RowPageCodec) -> PageKind {
    let (key, value) = (codec.spec(Side::Key), codec.spec(Side::Value));
    if !codec.keeps_history() {
        return PageKind::Absent;
    }
    if variant == Variant::Scalar || [key.scheme, value.scheme].contains(&Scheme::F32) {
        return PageKind::Dequantized;
    }
    if codec.layout() != CodeLayout::CpuTile {
        return PageKind::Bf16 { dequantized: true };
    }
    let one_group = |side| codec.groups(side) == 1;
    // Two 8-bit codes times a 7-bit weight do not fit the 16-bit sums of AVX2.
    let narrow = |bits| bits <= 5 || variant != Variant::Avx2;
    match (key.scheme, value.scheme) {
        (Scheme::Bf16, Scheme::Bf16) => PageKind::Bf16 { dequantized: false },
        (Scheme::Bf16, Scheme::Shared) => PageKind::Latent,
        (Scheme::Affine, Scheme::Affine)
            if one_group(Side::Key) && one_group(Side::Value) && narrow(key.bits) && narrow(value.bits) =>
        {
            PageKind::Codes { key_bits: key.bits, value_bits: value.bits }
        }
        _ => PageKind::Bf16 { dequantized: true },
    }
}

/// The kernel that reads this codec's pages in this variant, for the start banner: nothing falls
/// back silently.
pub fn kernel_name(variant: Variant, codec: &RowPageCodec) -> String {
    kernel_name_with(variant, AttentionPrecision::chosen().unwrap_or_default(), codec)
}

/// Whether this variant has a kernel that reads this codec's pages as they are.
pub fn has_kernel(variant: Variant, codec: &RowPageCodec) -> bool {
    let reader = PageReader::new(variant, AttentionPrecision::chosen().unwrap_or_default(), codec);
    let own = matches!(reader.kind, PageKind::Absent | PageKind::Latent);
    own || variant != Variant::Scalar && !reader.dequantizes()
}

/// [`kernel_name`] for a precision that need not be the process's.
pub fn kernel_name_with(variant: Variant, precision: AttentionPrecision, codec: &RowPageCodec) -> String {
    let reader = PageReader::new(variant, precision, codec);
    // Heads that do not divide into tiles are read by AVX-512 whatever the number of rows.
    let tiles = !matches!(reader.kind, PageKind::Codes { .. }) || codec.head_dim().is_multiple_of(64);
    let variant = if variant == Variant::Amx && !tiles { Variant::Avx512 } else { variant };
    PageReader { variant, ..reader }.name()
}

/// Buffers for dequantized pages, shared by the blocks of a work item.
#[derive(Default)]
pub(super) struct PageScratch {
    dequantized: DequantizedPage,
    keys: Bf16Tile,
    values: Bf16Tile,
    halves: Vec<u16>,
    silenced: Vec<u8>,
    codes: Option<Box<CodeBuffer>>,
    #[cfg(target_arch = "x86_64")]
    pub unpacked: UnpackedPage,
}

impl PageScratch {
    /// The view of a page's keys and values, which may come from different pages, for rows that
    /// read the tokens in
    /// `used`; the others may hold anything.
    pub(super) fn view<'a>(
        &'a mut self,
        reader: PageReader,
        keys: SidePage<'a>,
        values: SidePage<'a>,
        used: u64,
        ahead: isize,
    ) -> PageView<'a> {
        let variant = reader.variant;
        let d = keys.codec.head_dim();
        let nothing = &[][..];
        let mut view = PageView {
            keys: nothing,
            values: nothing,
            key_params: nothing,
            value_params: nothing,
            ahead,
            dequantized: None,
        };
        let codes = self.codes.get_or_insert_with(|| Box::new([0; MAX_DIM]));
        let room = |rows: &mut Vec<f32>| rows.resize(PAGE_TOKENS * d, 0.0);
        match reader.kind {
            PageKind::Codes { .. } => PageView::in_place(keys.codec, keys.bytes(), ahead),
            PageKind::Bf16 { .. } => {
                if is_bf16_tile(keys) {
                    view.keys = &keys.bytes()[keys.codec.codes_range(Side::Key)];
                } else {
                    if !dequantize_to_tile(variant, keys, used, &mut self.halves, &mut self.keys) {
                        room(&mut self.dequantized.keys);
                        dequantize_page(variant, keys, used, &mut self.dequantized.keys, codes);
                        self.keys.store_keys(variant, &self.dequantized.keys, d);
                    }
                    view.keys = self.keys.bytes();
                }
                if !is_bf16_tile(values) {
                    if !dequantize_to_tile(variant, values, used, &mut self.halves, &mut self.values) {
                        room(&mut self.dequantized.values);
                        dequantize_page(variant, values, used, &mut self.dequantized.values, codes);
                        self.values.store_values(variant, &self.dequantized.values, d);
                    }
                    view.values = self.values.bytes();
                } else if used == u64::MAX {
                    view.values = &values.bytes()[values.codec.codes_range(Side::Value)];
                } else {
                    // A weight of zero does not silence a NaN in a row that was never written.
                    self.silenced.clear();
                    self.silenced.extend_from_slice(&values.bytes()[values.codec.codes_range(Side::Value)]);
                    zero_unused_tokens(&mut self.silenced, used);
                    view.values = &self.silenced;
                }
                view
            }
            PageKind::Latent => {
                view.keys = &keys.bytes()[keys.codec.codes_range(Side::Key)];
                self.values.store_values_of_keys(variant, view.keys, d);
                if used != u64::MAX {
                    zero_unused_tokens(self.values.bytes_mut(), used);
                }
                view.values = self.values.bytes();
                view
            }
            PageKind::Absent => unreachable!("the walk over a span leaves these pages out"),
            PageKind::Dequantized => {
                room(&mut self.dequantized.keys);
                room(&mut self.dequantized.values);
                dequantize_page(variant, keys, used, &mut self.dequantized.keys, codes);
                dequantize_page(variant, values, used, &mut self.dequantized.values, codes);
                view.dequantized = Some(&self.dequantized);
                view
            }
        }
    }
}

/// Dequantizes a side straight to a BF16 tile, where the variant has a kernel for it.
fn dequantize_to_tile(
    variant: Variant,
    page: SidePage<'_>,
    used: u64,
    halves: &mut Vec<u16>,
    tile: &mut Bf16Tile,
) -> bool {
    match variant {
        #[cfg(target_arch = "x86_64")]
        Variant::Avx512 | Variant::Amx if super::avx512::dequantize::reads(page.codec, page.side) => {
            // SAFETY: a variant is only passed on by `attend`, which found it available.
            unsafe { super::avx512::dequantize::dequantize(page, used, halves, tile) };
            true
        }
        _ => {
            let _ = (page, used, halves, tile);
            false
        }
    }
}

/// Whether the BF16 kernels can read this side in place.
fn is_bf16_tile(page: SidePage<'_>) -> bool {
    page.codec.spec(page.side).scheme == Scheme::Bf16 && page.codec.layout() == CodeLayout::CpuTile
}

/// `values` lie `[token pair][channel][2]`.
fn zero_unused_tokens(values: &mut [u8], used: u64) {
    let pair_bytes = values.len() / (PAGE_TOKENS / 2);
    for (pair, bytes) in values.chunks_exact_mut(pair_bytes).enumerate() {
        match used >> (2 * pair) & 3 {
            3 => {}
            0 => bytes.fill(0),
            one => {
                let unused = if one == 1 { 2 } else { 0 };
                bytes.chunks_exact_mut(4).for_each(|lane| lane[unused..unused + 2].fill(0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::{KvFormat, SideSpec};

    #[test]
    fn names_tell_what_runs() {
        let name = |variant, format: KvFormat| {
            let codec = format.codec(128, CodeLayout::CpuTile).unwrap();
            AttentionPrecision::ALL.map(|precision| kernel_name_with(variant, precision, &codec))
        };
        assert_eq!(
            name(Variant::Avx512, KvFormat::OSCAR2),
            ["avx512-vnni int2 (int8 query)", "avx512-vnni int2"]
        );
        assert_eq!(name(Variant::Avx2, KvFormat::Oscar { bits: 1 }), ["avx2 int1 (int8 query)", "avx2 int1"]);
        assert_eq!(name(Variant::Avx512, KvFormat::Bf16), ["avx512 bf16"; 2]);
        assert_eq!(name(Variant::Avx2, KvFormat::Int { bits: 8, group: 0 }), ["dequantized first"; 2]);
        assert_eq!(
            name(Variant::Amx, KvFormat::OSCAR2),
            ["amx + avx512-vnni int2 (int8 query)", "amx + avx512-vnni int2"]
        );
        assert_eq!(name(Variant::Amx, KvFormat::Oscar { bits: 3 }), ["amx + avx512-vnni int3"; 2]);
        assert_eq!(name(Variant::Amx, KvFormat::Bf16), ["amx bf16"; 2]);
        let narrow = KvFormat::OSCAR2.codec(32, CodeLayout::CpuTile).unwrap();
        assert_eq!(
            kernel_name_with(Variant::Amx, AttentionPrecision::HiLo, &narrow),
            "avx512-vnni int2",
            "heads of 32 do not divide into tiles"
        );
        assert_eq!(name(Variant::Avx512, KvFormat::Oscar { bits: 4 }), ["avx512-vnni int4"; 2]);
        assert_eq!(name(Variant::Avx512, KvFormat::Int { bits: 8, group: 0 }), ["avx512-vnni int8"; 2]);
        for format in ["oscar2-lloyd", "f32", "int4-g32", "quarot2", "kivi2", "turboquant3", "fp8"]
            .map(|f| f.parse().unwrap())
        {
            assert_eq!(name(Variant::Avx512, format), ["dequantized first"; 2]);
        }
        for format in ["naive2", "saw4"].map(|f| f.parse().unwrap()) {
            assert_ne!(name(Variant::Avx512, format), ["dequantized first"; 2]);
        }
        assert_eq!(name(Variant::Scalar, KvFormat::OSCAR2), ["scalar"; 2]);
        let mixed = |key, value| {
            let spec = |bits| SideSpec::affine(bits, 0.0);
            let codec = RowPageCodec::new(128, spec(key), spec(value), CodeLayout::CpuTile).unwrap();
            kernel_name_with(Variant::Avx512, AttentionPrecision::Int8, &codec)
        };
        assert_eq!(mixed(4, 2), "avx512-vnni mixed widths (int8 up to 2 bits)");
        assert_eq!(mixed(4, 3), "avx512-vnni mixed widths");
        let logical = KvFormat::OSCAR2.codec(128, CodeLayout::Logical).unwrap();
        assert_eq!(kernel_name(Variant::Avx512, &logical), "dequantized first");
    }

    #[test]
    fn unused_tokens_are_silenced() {
        let mut values = vec![0xff_u8; 64 * 32 * 2];
        zero_unused_tokens(&mut values, 0b0110_0011);
        for (i, half) in values.chunks_exact(2).enumerate() {
            let (pair, within) = (i / 64, i % 2);
            let used = matches!(2 * pair + within, 0 | 1 | 5 | 6);
            assert_eq!(half[0] != 0, used, "token {}", 2 * pair + within);
        }
    }
}
