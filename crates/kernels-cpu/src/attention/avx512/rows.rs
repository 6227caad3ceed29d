//! Sides that lie row by row (records, and codes grouped along tokens) as BF16 tiles on AVX-512.
//!
//! Thirty-two codes at a time: their bytes are spread over the halves of a register and shifted
//! into place, and become BF16 by lookup or arithmetic. Sixteen rows (keys) or two (values) are
//! then turned into tile order.
//!
//! Invariant: that of [`dequantize`](super::dequantize). Sketches of residuals are summed four
//! signs at a time, so their rows may differ from the specification by the rounding of those sums.

use std::arch::x86_64::*;

use oscar_codec::channel_groups::ChannelGroups;
use oscar_codec::record::RecordCodec;
use oscar_codec::turboquant::Instance;
use oscar_codec::{PAGE_TOKENS, RowPageCodec, Side, TILE_TOKENS};

use super::dequantize::{load_floats, round_halves, store_line};
use super::sketch::SketchSums;
use crate::attention::block::{LANES, MAX_DIM};
use crate::attention::dequantize::SidePage;

/// Codes taken at a time.
const CHUNK: usize = 32;
/// Promoted channels whose high bits one lookup can place.
const MAX_PROMOTED: usize = 64;

/// Whether [`dequantize`] reads this side, which lies row by row.
pub(in crate::attention) fn reads(codec: &RowPageCodec, side: Side) -> bool {
    match codec.token_groups(side) {
        // High bits of a token must begin at a byte.
        Some(groups) => groups.promoted().is_multiple_of(4) && groups.promoted() <= MAX_PROMOTED,
        None => codec.records(side).is_some(),
    }
}

/// Dequantizes the tokens in `used` into the tile's `words`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(in crate::attention) fn dequantize(
    page: SidePage<'_>,
    used: u64,
    halves: &mut Vec<u16>,
    words: &mut [u32],
) {
    let SidePage { codec, side, .. } = page;
    let d = codec.head_dim();
    // Rows are written in whole chunks and read in whole lines: both may run over the last one.
    halves.resize(PAGE_TOKENS * d + CHUNK, 0);
    if let Some(groups) = codec.token_groups(side) {
        dequantize_groups(page, groups, used, halves);
    } else if let Some(records) = codec.records(side) {
        dequantize_records(records, &page.bytes()[codec.codes_range(side)], d, used, halves);
    }
    match side {
        Side::Key => turn_keys(halves, d, words),
        Side::Value => turn_values(halves, d, words),
    }
}

/// How the codes of a bit stream reach the halves of a register.
struct Spread {
    bytes: __m512i,
    shifts: __m512i,
}

impl Spread {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(bits: u32) -> Self {
        let (mut bytes, mut shifts) = ([0u8; 2 * CHUNK], [0u16; CHUNK]);
        for i in 0..CHUNK {
            let bit = i * bits as usize;
            bytes[2 * i] = (bit / 8) as u8;
            // A code that ends with the sixteenth byte has no use for the one after.
            bytes[2 * i + 1] = (bit / 8 + 1).min(15) as u8;
            shifts[i] = (bit % 8) as u16;
        }
        // SAFETY: 64 bytes each.
        unsafe {
            Self {
                bytes: _mm512_loadu_si512(bytes.as_ptr().cast()),
                shifts: _mm512_loadu_si512(shifts.as_ptr().cast()),
            }
        }
    }

    /// Thirty-two codes of up to four bits from byte `at` on, each in the low bits of a half;
    /// anything above them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn codes(&self, bytes: &[u8], at: usize) -> __m512i {
        let stored = match bytes[at..].first_chunk::<16>() {
            // SAFETY: sixteen bytes.
            Some(bytes) => unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) },
            None => {
                let (mut padded, rest) = ([0u8; 16], &bytes[at..]);
                padded[..rest.len()].copy_from_slice(rest);
                // SAFETY: sixteen bytes.
                unsafe { _mm_loadu_si128(padded.as_ptr().cast()) }
            }
        };
        let everywhere = _mm512_broadcast_i32x4(stored);
        _mm512_srlv_epi16(_mm512_shuffle_epi8(everywhere, self.bytes), self.shifts)
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_halves(rows: &mut [u16], at: usize, halves: __m512i) {
    let out = &mut rows[at..][..CHUNK];
    // SAFETY: 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), halves) }
}

/// The codes of halves as 32-bit numbers: the first sixteen, then the others.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widened(codes: __m512i) -> [__m512i; 2] {
    [
        _mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes)),
        _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(codes)),
    ]
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn half_at(bytes: &[u8]) -> f32 {
    let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn dequantize_records(records: &RecordCodec, bytes: &[u8], d: usize, used: u64, rows: &mut [u16]) {
    let row_bytes = records.row_bytes();
    let mut turbo: Vec<TurboInstance<'_>> = match records {
        RecordCodec::TurboQuant(codec) => {
            codec.instances().iter().map(|instance| TurboInstance::new(instance)).collect()
        }
        RecordCodec::Fp8 { .. } => Vec::new(),
    };
    for TurboInstance { instance, sketch, sums, .. } in &mut turbo {
        if let Some(sketch) = sketch {
            sketch.of_page(|token| instance.stored_parts(&bytes[token * row_bytes..])[1], sums);
        }
    }
    for token in 0..PAGE_TOKENS {
        let row = &mut rows[token * d..][..d + CHUNK];
        if used >> token & 1 == 0 {
            row[..d].fill(0);
        } else if let RecordCodec::Fp8 { .. } = records {
            dequantize_fp8(bytes, token * row_bytes, d, row);
        } else {
            turbo.iter().for_each(|instance| instance.dequantize(bytes, token, row_bytes, row));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn dequantize_fp8(bytes: &[u8], at: usize, d: usize, row: &mut [u16]) {
    let scale = _mm512_set1_ps(half_at(&bytes[at + d..]));
    for channel in (0..d).step_by(CHUNK) {
        let codes = &bytes[at + channel..];
        // The last sixteen channels of an odd head stand beside what comes after, which is not read
        // back.
        let low = codes.first_chunk().map_or(_mm512_setzero_ps(), |codes| fp8_values(codes, scale));
        let high = codes.get(LANES..).and_then(|codes| codes.first_chunk());
        let high = high.map_or(_mm512_setzero_ps(), |codes| fp8_values(codes, scale));
        store_halves(row, channel, round_halves(low, high));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn fp8_values(codes: &[u8; LANES], scale: __m512) -> __m512 {
    // SAFETY: sixteen bytes.
    let codes = _mm256_cvtepu8_epi16(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) });
    // Sign, exponent and mantissa where an fp16 has them: the value of such a half is 2⁻⁸ of the
    // code's.
    let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)));
    let rest = _mm256_slli_epi16::<7>(_mm256_and_si256(codes, _mm256_set1_epi16(0x7f)));
    let value = _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
    let value = _mm512_mul_ps(value, _mm512_set1_ps(256.0));
    // The patterns of NaN, never written, count as the largest.
    let largest = oscar_codec::fp8::MAX;
    let value = _mm512_max_ps(_mm512_min_ps(value, _mm512_set1_ps(largest)), _mm512_set1_ps(-largest));
    _mm512_mul_ps(scale, value)
}

/// One instance of TurboQuant with what its rows share.
struct TurboInstance<'a> {
    instance: &'a Instance,
    spread: Spread,
    /// Centroids by code, repeated: a lookup need not mask the bits above a code.
    levels: __m512,
    sketch: Option<&'static SketchSums>,
    /// What the sketches of the page sum to.
    sums: Vec<f32>,
}

impl<'a> TurboInstance<'a> {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(instance: &'a Instance) -> Self {
        let levels = std::array::from_fn(|code| instance.levels[code % instance.levels.len()]);
        Self {
            instance,
            spread: Spread::new(instance.bits),
            levels: load_floats(&levels),
            sketch: SketchSums::of(instance),
            sums: Vec::new(),
        }
    }

    /// Thirty-two codes of the record at byte `at` of the side.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn codes(&self, bytes: &[u8], at: usize, chunk: usize) -> __m512i {
        let Instance { bits, start, .. } = *self.instance;
        self.spread.codes(bytes, at + start + chunk * CHUNK * bits as usize / 8)
    }

    /// Dequantizes the instance's channels of one of the side's records.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    fn dequantize(&self, bytes: &[u8], token: usize, row_bytes: usize, row: &mut [u16]) {
        let Instance { first, channels, .. } = *self.instance;
        let at = token * row_bytes;
        let [_, _, norms] = self.instance.stored_parts(&bytes[at..]);
        let squares = if self.instance.normalized { self.sum_of_squares(bytes, at) } else { 0.0 };
        let scale = _mm512_set1_ps(self.instance.scale(half_at(norms), squares));
        let scaled = _mm512_mul_ps(self.levels, scale);
        let chunks = channels.div_ceil(CHUNK);
        let Some(sketch) = self.sketch else {
            let table = round_halves(scaled, scaled);
            for chunk in 0..chunks {
                let codes = self.codes(bytes, at, chunk);
                store_halves(row, first + chunk * CHUNK, _mm512_permutexvar_epi16(codes, table));
            }
            return;
        };
        let factor = _mm512_set1_ps(self.instance.sketch_factor(half_at(&norms[2..])));
        let sums = &self.sums[token * sketch.stride()..][..sketch.stride()];
        for (chunk, sums) in sums.as_chunks::<LANES>().0.as_chunks::<2>().0.iter().enumerate() {
            let [low, high] = widened(self.codes(bytes, at, chunk));
            let value =
                |codes, sum| _mm512_add_ps(_mm512_permutexvar_ps(codes, scaled), _mm512_mul_ps(factor, sum));
            let (low, high) = (value(low, load_floats(&sums[0])), value(high, load_floats(&sums[1])));
            store_halves(row, first + chunk * CHUNK, round_halves(low, high));
        }
    }

    /// Σ level², in the order of `affine::lane_sum`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn sum_of_squares(&self, bytes: &[u8], at: usize) -> f32 {
        let squares = _mm512_mul_ps(self.levels, self.levels);
        let mut sum = _mm512_setzero_ps();
        let channels = self.instance.channels;
        for chunk in 0..channels.div_ceil(CHUNK) {
            for (half, codes) in widened(self.codes(bytes, at, chunk)).into_iter().enumerate() {
                let left = channels.saturating_sub(chunk * CHUNK + half * LANES);
                let present = ((1u32 << left.min(LANES)) - 1) as u16;
                sum = _mm512_add_ps(sum, _mm512_maskz_permutexvar_ps(present, codes, squares));
            }
        }
        let eight = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps::<1>(sum));
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// A group's parameters, a list each, with room for a whole last chunk.
struct Header {
    scales: [f32; MAX_DIM],
    minima: [f32; MAX_DIM],
    /// Row of the second plane; which channels have one, chunk by chunk.
    slots: [u16; MAX_DIM],
    promoted: [u32; MAX_DIM / CHUNK],
}

impl Header {
    /// From the stored parameters of `d` channels, see `ChannelGroups::header_slice`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    fn new(stored: &[u8], d: usize, promoted: usize) -> Self {
        let mut header =
            Self { scales: [0.0; MAX_DIM], minima: [0.0; MAX_DIM], slots: [0; MAX_DIM], promoted: [0; 8] };
        for channel in (0..d).step_by(LANES) {
            let pairs = &stored[4 * channel..][..4 * LANES];
            // SAFETY: sixteen pairs of halves, and room for sixteen floats each.
            unsafe {
                let pairs = _mm512_loadu_si512(pairs.as_ptr().cast());
                let scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
                let min = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs)));
                _mm512_storeu_ps(header.scales[channel..][..LANES].as_mut_ptr(), scale);
                _mm512_storeu_ps(header.minima[channel..][..LANES].as_mut_ptr(), min);
            }
        }
        if promoted > 0 {
            for (channel, &slot) in stored[4 * d..][..d].iter().enumerate() {
                header.slots[channel] = u16::from(slot);
                header.promoted[channel / CHUNK] |=
                    u32::from(usize::from(slot) < promoted) << (channel % CHUNK);
            }
        }
        header
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn dequantize_groups(page: SidePage<'_>, groups: &ChannelGroups, used: u64, rows: &mut [u16]) {
    let SidePage { codec, side, pages, block, origin } = page;
    let (d, bytes, spread) = (codec.head_dim(), page.bytes(), Spread::new(2));
    let mut current: Option<(usize, Header)> = None;
    let mut stored = Vec::new();
    for tile in 0..PAGE_TOKENS / TILE_TOKENS {
        let used = used >> (tile * TILE_TOKENS) & 0xffff;
        let position = block * PAGE_TOKENS + tile * TILE_TOKENS;
        let rows = &mut rows[tile * TILE_TOKENS * d..][..TILE_TOKENS * d + CHUNK];
        if used == 0 {
            rows[..TILE_TOKENS * d].fill(0);
            continue;
        }
        if !current.as_ref().is_some_and(|(first, _)| (*first..first + groups.tokens()).contains(&position)) {
            let Some((first, tiles)) = codec.tiles_of_group(side, pages, origin, position) else {
                panic!("token {position} is before the first group");
            };
            stored.clear();
            for tile in tiles {
                let tile = tile.unwrap_or_else(|| panic!("a page of the group at {position} is absent"));
                stored.extend_from_slice(groups.header_slice(tile));
            }
            current = Some((first, Header::new(&stored, d, groups.promoted())));
        }
        let Some((_, header)) = &current else { continue };
        let tile = &bytes[codec.tile_range(side, groups, tile)];
        for token in 0..TILE_TOKENS {
            let row = &mut rows[token * d..][..d + CHUNK];
            if used >> token & 1 == 0 {
                row[..d].fill(0);
            } else {
                dequantize_grouped_row(groups, header, &spread, tile, token, row);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn dequantize_grouped_row(
    groups: &ChannelGroups,
    header: &Header,
    spread: &Spread,
    tile: &[u8],
    token: usize,
    row: &mut [u16],
) {
    let (d, promoted) = (row.len() - CHUNK, groups.promoted());
    let mut high = [_mm512_setzero_si512(); 2];
    if promoted > 0 {
        let (plane, at) = (groups.plane(tile), token * promoted / 4);
        high[0] = spread.codes(plane, at);
        if promoted > CHUNK {
            high[1] = spread.codes(plane, at + CHUNK / 4);
        }
    }
    let three = _mm512_set1_epi16(3);
    for chunk in 0..d.div_ceil(CHUNK) {
        let mut codes = _mm512_and_si512(spread.codes(tile, token * d / 4 + chunk * CHUNK / 4), three);
        if promoted > 0 {
            let slots = &header.slots[chunk * CHUNK..][..CHUNK];
            // SAFETY: 64 bytes.
            let slots = unsafe { _mm512_loadu_si512(slots.as_ptr().cast()) };
            let high = _mm512_and_si512(_mm512_permutex2var_epi16(high[0], slots, high[1]), three);
            let shifted = _mm512_maskz_slli_epi16::<2>(header.promoted[chunk], high);
            codes = _mm512_or_si512(codes, shifted);
        }
        let [low, upper] = widened(codes);
        let value = |codes, first: usize| {
            let (scales, minima) = (&header.scales[first..][..LANES], &header.minima[first..][..LANES]);
            // SAFETY: sixteen floats each.
            let (scale, min) =
                unsafe { (_mm512_loadu_ps(scales.as_ptr()), _mm512_loadu_ps(minima.as_ptr())) };
            _mm512_add_ps(_mm512_mul_ps(scale, _mm512_cvtepi32_ps(codes)), min)
        };
        let first = chunk * CHUNK;
        store_halves(row, first, round_halves(value(low, first), value(upper, first + LANES)));
    }
}

/// Sixteen words of halves from half `at` on.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_halves(rows: &[u16], at: usize) -> __m512i {
    let halves = &rows[at..][..CHUNK];
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(halves.as_ptr().cast()) }
}

/// Rows to `[tile][channel pair][16 tokens][2]`: blocks of sixteen rows by sixteen pairs,
/// transposed in registers.
#[target_feature(enable = "avx512f,avx512bw")]
fn turn_keys(rows: &[u16], d: usize, words: &mut [u32]) {
    for (tile, words) in words.chunks_exact_mut(TILE_TOKENS / 2 * d).enumerate() {
        for (block, words) in words.chunks_mut(LANES * LANES).enumerate() {
            let mut lines: [__m512i; LANES] = std::array::from_fn(|token| {
                load_halves(rows, (tile * TILE_TOKENS + token) * d + block * CHUNK)
            });
            transpose(&mut lines);
            for (out, line) in words.as_chunks_mut::<LANES>().0.iter_mut().zip(lines) {
                store_line(out, line);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(lines: &mut [__m512i; LANES]) {
    let old = *lines;
    for i in 0..8 {
        lines[2 * i] = _mm512_unpacklo_epi32(old[2 * i], old[2 * i + 1]);
        lines[2 * i + 1] = _mm512_unpackhi_epi32(old[2 * i], old[2 * i + 1]);
    }
    let old = *lines;
    for i in 0..4 {
        for j in 0..2 {
            lines[4 * i + 2 * j] = _mm512_unpacklo_epi64(old[4 * i + j], old[4 * i + j + 2]);
            lines[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(old[4 * i + j], old[4 * i + j + 2]);
        }
    }
    // Now lane group `g` of line `4i + j` holds column `4g + j` of rows `4i..4i + 4`.
    let old = *lines;
    for j in 0..4 {
        let low = _mm512_shuffle_i32x4::<0x88>(old[j], old[4 + j]);
        let high = _mm512_shuffle_i32x4::<0x88>(old[8 + j], old[12 + j]);
        let low_odd = _mm512_shuffle_i32x4::<0xdd>(old[j], old[4 + j]);
        let high_odd = _mm512_shuffle_i32x4::<0xdd>(old[8 + j], old[12 + j]);
        lines[j] = _mm512_shuffle_i32x4::<0x88>(low, high);
        lines[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low, high);
        lines[4 + j] = _mm512_shuffle_i32x4::<0x88>(low_odd, high_odd);
        lines[12 + j] = _mm512_shuffle_i32x4::<0xdd>(low_odd, high_odd);
    }
}

/// Rows to `[token pair][channel][2]`.
#[target_feature(enable = "avx512f,avx512bw")]
fn turn_values(rows: &[u16], d: usize, words: &mut [u32]) {
    // Half `i` of a row at an even place, that of the next row, counted from 32, at the odd one.
    let turn: [u16; CHUNK] = std::array::from_fn(|i| (i / 2 + CHUNK * (i % 2)) as u16);
    // SAFETY: 64 bytes.
    let turn = unsafe { _mm512_loadu_si512(turn.as_ptr().cast()) };
    let turn_upper = _mm512_add_epi16(turn, _mm512_set1_epi16(LANES as i16));
    for (pair, words) in words.chunks_exact_mut(d).enumerate() {
        for (chunk, words) in words.chunks_mut(CHUNK).enumerate() {
            let [even, odd] = [0, 1].map(|i| load_halves(rows, (2 * pair + i) * d + chunk * CHUNK));
            for (out, turn) in words.as_chunks_mut::<LANES>().0.iter_mut().zip([turn, turn_upper]) {
                store_line(out, _mm512_permutex2var_epi16(even, turn, odd));
            }
        }
    }
}
