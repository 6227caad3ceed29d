//! Every variant against the scalar specification of the codec crate, and the promise that a row's
//! bits depend on the row alone.

mod against_codec;
mod demotion;
mod dequantization;
mod latent;
mod one_byte;
mod row_alone;
mod sliding;
mod views;

use oscar_codec::attention::{PagedContext, attend_context};
use oscar_codec::{CodeLayout, KvFormat, PAGE_TOKENS, RowPageCodec, Side, TILE_TOKENS, Windows};

use super::{AttendTask, AttentionPrecision, DemotionCodecs, Scratch, attend, demote_side};
use crate::cpu::Variant;
use crate::pool::ThreadPool;

/// A small generator: tests need the same numbers everywhere, not good ones.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in −1..1.
    pub(super) fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Roughly normal, deviation 1.
    pub(super) fn normal(&mut self) -> f32 {
        (0..4).map(|_| self.uniform()).sum::<f32>() * 0.866
    }
}

/// A context whose pages are built as the cache builds them: BF16 rows, and codes of the BF16 rows.
/// Everything a query may not read is filled with bytes that dequantize to NaN, so that reading it
/// shows.
pub(super) struct Context {
    pub full_codec: RowPageCodec,
    pub coded_codec: RowPageCodec,
    full: Vec<Vec<u8>>,
    coded: Vec<Vec<u8>>,
}

impl Context {
    pub(super) fn new(full: RowPageCodec, coded: RowPageCodec, keys: &[f32], values: &[f32]) -> Self {
        let d = full.head_dim();
        let tokens = keys.len() / d;
        let pages = tokens.div_ceil(PAGE_TOKENS);
        let mut context = Self {
            full: vec![vec![0xff; full.page_bytes()]; pages],
            coded: vec![vec![0xff; coded.page_bytes()]; pages],
            full_codec: full,
            coded_codec: coded,
        };
        for page in 0..pages {
            let first = page * PAGE_TOKENS;
            let rows = first * d..tokens.min(first + PAGE_TOKENS) * d;
            let (keys, values) = (&keys[rows.clone()], &values[rows]);
            context.full_codec.quantize_rows(0, keys, values, &mut context.full[page]).unwrap();
            // Whole tiles are demoted, from what BF16 kept of the rows.
            let whole = keys.len() / (TILE_TOKENS * d) * TILE_TOKENS * d;
            let (mut kept_keys, mut kept_values) = (vec![0.0; whole], vec![0.0; whole]);
            context
                .full_codec
                .dequantize_rows(0, &context.full[page], &mut kept_keys, &mut kept_values)
                .unwrap();
            context.coded_codec.quantize_rows(0, &kept_keys, &kept_values, &mut context.coded[page]).unwrap();
        }
        context
    }

    /// Pages as demotion leaves them by windows that may differ by side.
    pub(super) fn demoted(format: KvFormat, d: usize, windows: &Windows, tokens: usize) -> Self {
        let mut random = Random::new(tokens as u64);
        let mut rows = || (0..tokens * d).map(|_| random.normal()).collect::<Vec<f32>>();
        let (keys, values) = (rows(), rows());
        let full_codec = KvFormat::Bf16.codec(d, CodeLayout::CpuTile).unwrap();
        let coded_codec = format.codec(d, CodeLayout::CpuTile).unwrap();
        let pages = tokens.div_ceil(PAGE_TOKENS);
        let mut full = vec![vec![0xff; full_codec.page_bytes()]; pages];
        for (page, (keys, values)) in
            full.iter_mut().zip(keys.chunks(PAGE_TOKENS * d).zip(values.chunks(PAGE_TOKENS * d)))
        {
            full_codec.quantize_rows(0, keys, values, page).unwrap();
        }
        let mut coded = vec![vec![0xff; coded_codec.page_bytes()]; pages];
        let codecs = DemotionCodecs { full: &full_codec, coded: &coded_codec };
        for side in [Side::Key, Side::Value] {
            let positions = windows.sink()..windows.side_boundary(side, tokens - 1);
            demote_side(codecs, side, positions, |b| &full[b][..], |b, write| write(&mut coded[b])).unwrap();
        }
        Self { full_codec, coded_codec, full, coded }
    }

    pub(super) fn random(format: KvFormat, d: usize, tokens: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut rows = || (0..tokens * d).map(|_| random.normal()).collect::<Vec<f32>>();
        let (keys, values) = (rows(), rows());
        Self::of(format, d, &keys, &values)
    }

    pub(super) fn of(format: KvFormat, d: usize, keys: &[f32], values: &[f32]) -> Self {
        let codec = |format: KvFormat| format.codec(d, CodeLayout::CpuTile).unwrap();
        Self::new(codec(KvFormat::Bf16), codec(format), keys, values)
    }

    pub(super) fn with_pages<R>(&self, work: impl FnOnce(&PagedContext<'_>) -> R) -> R {
        let full: Vec<Option<&[u8]>> = self.full.iter().map(|page| Some(&page[..])).collect();
        let coded: Vec<Option<&[u8]>> = self.coded.iter().map(|page| Some(&page[..])).collect();
        work(&PagedContext {
            full_codec: &self.full_codec,
            coded_codec: &self.coded_codec,
            full: &full,
            coded: &coded,
            view: None,
        })
    }

    /// Outputs of the kernels.
    pub(super) fn attend(
        &self,
        (variant, precision): (Variant, AttentionPrecision),
        pool: &ThreadPool,
        windows: &Windows,
        queries: &[f32],
        positions: &[u32],
    ) -> Vec<f32> {
        self.attend_with_sinks((variant, precision), pool, windows, queries, positions, None)
    }

    pub(super) fn attend_with_sinks(
        &self,
        (variant, precision): (Variant, AttentionPrecision),
        pool: &ThreadPool,
        windows: &Windows,
        queries: &[f32],
        positions: &[u32],
        sinks: Option<&[f32]>,
    ) -> Vec<f32> {
        let d = self.full_codec.head_dim();
        let mut out = vec![f32::NAN; queries.len()];
        self.with_pages(|context| {
            let scale = 1.0 / (d as f32).sqrt();
            let task = AttendTask { queries, positions, scale, windows, context, sinks, out: &mut out };
            attend(variant, pool, &mut [task], &mut Scratch::new(precision));
        });
        out
    }

    /// Outputs of the specification.
    pub(super) fn expected(&self, windows: &Windows, queries: &[f32], positions: &[u32]) -> Vec<f32> {
        let d = self.full_codec.head_dim();
        let mut out = vec![0.0; queries.len()];
        self.with_pages(|context| {
            for ((query, &position), out) in
                queries.chunks_exact(d).zip(positions).zip(out.chunks_exact_mut(d))
            {
                let scale = 1.0 / (d as f32).sqrt();
                attend_context(query, scale, position as usize, windows, context).finish(out);
            }
        });
        out
    }
}

pub(super) fn queries(rows: usize, d: usize, size: f32, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed ^ 0x51ab);
    (0..rows * d).map(|_| size * random.normal()).collect()
}

/// The variants beyond scalar that this machine has; says which it has not.
pub(super) fn fast_variants() -> Vec<Variant> {
    for variant in Variant::ALL.into_iter().filter(|variant| !variant.is_available()) {
        eprintln!("skipped: {variant} is not available on this machine");
    }
    Variant::available().filter(|&variant| variant != Variant::Scalar).collect()
}

/// Variants with every precision they have.
pub(super) fn kernels(variants: impl IntoIterator<Item = Variant>) -> Vec<(Variant, AttentionPrecision)> {
    let one_byte = |variant| variant != Variant::Scalar;
    let precisions = |variant| {
        AttentionPrecision::ALL
            .into_iter()
            .filter(move |&p| p == AttentionPrecision::HiLo || one_byte(variant))
    };
    variants
        .into_iter()
        .flat_map(|variant| precisions(variant).map(move |precision| (variant, precision)))
        .collect()
}

/// Size of the difference relative to the size of what is expected, both as root mean squares.
pub(super) fn relative_error(got: &[f32], expected: &[f32]) -> f32 {
    assert!(got.iter().all(|v| v.is_finite()), "an output is not finite");
    let size =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let difference = size(&mut got.iter().zip(expected).map(|(g, e)| g - e));
    (difference / size(&mut expected.iter().copied()).max(1e-20)) as f32
}
