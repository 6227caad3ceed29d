//! The query rows that read a page together, and their state from page to page.
//!
//! Invariant: the state of a row is computed from that row alone, so its numbers do not depend on
//! the other rows of the block. Rows beyond `rows` are padding: zero queries with empty masks.

use oscar_codec::affine::halve;
use oscar_codec::{MAX_LATENT_ROW, PAGE_TOKENS};

use super::precision::CREST_LIMIT;
use crate::ops::convert::f32_to_bf16;

/// Rows of a block: eight rows as high and low bytes are the sixteen rows of a tile register.
pub(super) const ROWS: usize = 8;
/// Largest head of the formats with codes.
pub(super) const MAX_DIM: usize = 256;
/// Longest row of all: that of latent attention, which is never quantized.
pub(super) const MAX_ROW: usize = MAX_LATENT_ROW;
/// 32-bit lanes of the widest vector.
pub(super) const LANES: usize = 16;

/// Largest quantized magnitude of a query or a weight: 127 · 256 + 127, so that both bytes fit.
pub(super) const FIXED_MAX: f32 = 32639.0;
/// Largest weight as a single byte.
pub(super) const BYTE_MAX: f32 = 255.0;
/// Below this a largest magnitude counts as zero: its step would leave the normal numbers.
pub(super) const TINY: f32 = 1e-30;
/// A page whose largest weight is below 2^-40 of the running one is left out for that row: a
/// million such tokens weigh less than 1e-6.
pub(super) const NEGLIGIBLE: f32 = -40.0;

/// One block of rows: queries in the forms the kernels read, scratch for a page, and the running
/// softmax state.
///
/// Scores are in units of log2, relative to nothing; `max` is the largest so far. The sum of
/// weights and the part of the output that is the same for all channels (`Σ p·min`) are kept as
/// sixteen partial sums.
#[repr(C, align(64))]
pub(super) struct RowBlock {
    /// Queries as fixed point, `q ≈ q_step · (256·hi + lo)`: row `2r` holds `hi`, row `2r + 1`
    /// holds `lo`.
    pub q_codes: [[i8; MAX_DIM]; 2 * ROWS],
    /// Queries rounded to BF16.
    pub q_bf16: [[u16; MAX_ROW]; ROWS],
    /// Queries times `scale · log2 e`.
    pub q: [[f32; MAX_ROW]; ROWS],
    pub scores: [[f32; PAGE_TOKENS]; ROWS],
    /// Weights of a page as fixed point, rows as in `q_codes`.
    pub w_codes: [[i8; PAGE_TOKENS]; 2 * ROWS],
    /// Weights of a page rounded to BF16.
    pub w_bf16: [[u16; PAGE_TOKENS]; ROWS],
    /// Results of tile registers on their way through memory.
    pub tile_c: [[[f32; LANES]; ROWS]; 4],
    pub out: [[f32; MAX_ROW]; ROWS],
    pub sum: [[f32; LANES]; ROWS],
    pub shared: [[f32; LANES]; ROWS],
    pub q_step: [f32; LANES],
    pub q_sum: [f32; LANES],
    /// Rounding error of the sum of a query.
    pub q_rest: [f32; LANES],
    /// The same where only the high bytes are read, and the low ones of `low_rows`.
    pub q_rest_one_byte: [f32; LANES],
    /// Rows, as bits, whose queries need their low bytes even against narrow codes.
    pub low_rows: u8,
    /// Factor from a page's integers (or its BF16 sums) to `out`.
    pub w_step: [f32; LANES],
    pub max: [f32; LANES],
    /// State of the current page after its scores are known: see `softmax_int8`.
    pub entry: PageEntry,
    /// Tokens of the current page each row reads.
    pub masks: [u64; ROWS],
    /// Whether any row gives the current page weight.
    pub any_weight: bool,
    /// Whether the values of the page before are still to be added.
    pub values_due: bool,
    pub rows: usize,
    pub head_dim: usize,
}

/// How a page enters the state of each row, a lane a row.
#[repr(C, align(64))]
#[derive(Default)]
pub(super) struct PageEntry {
    pub page_max: [f32; LANES],
    /// Factor of the page's weights; zero leaves the page out.
    pub factor: [f32; LANES],
    /// Factor of what was accumulated before, for rows in `moved`.
    pub fading: [f32; LANES],
    /// From weights to bytes and back.
    pub to_bytes: [f32; LANES],
    pub from_bytes: [f32; LANES],
    /// Rows whose largest score is in this page.
    pub moved: u16,
}

/// Which forms of the queries the kernels of a call read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueryForms {
    pub fixed_point: bool,
    pub bf16: bool,
}

impl RowBlock {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self {
            q_codes: [[0; MAX_DIM]; 2 * ROWS],
            q_bf16: [[0; MAX_ROW]; ROWS],
            q: [[0.0; MAX_ROW]; ROWS],
            scores: [[0.0; PAGE_TOKENS]; ROWS],
            w_codes: [[0; PAGE_TOKENS]; 2 * ROWS],
            w_bf16: [[0; PAGE_TOKENS]; ROWS],
            tile_c: [[[0.0; LANES]; ROWS]; 4],
            out: [[0.0; MAX_ROW]; ROWS],
            sum: [[0.0; LANES]; ROWS],
            shared: [[0.0; LANES]; ROWS],
            q_step: [0.0; LANES],
            q_sum: [0.0; LANES],
            q_rest: [0.0; LANES],
            q_rest_one_byte: [0.0; LANES],
            low_rows: 0,
            w_step: [0.0; LANES],
            max: [f32::NEG_INFINITY; LANES],
            entry: PageEntry::default(),
            masks: [0; ROWS],
            any_weight: false,
            values_due: false,
            rows: 0,
            head_dim: 0,
        })
    }

    /// Takes up to [`ROWS`] queries and prepares the forms asked for.
    pub(super) fn load(&mut self, queries: &[f32], head_dim: usize, scale: f32, forms: QueryForms) {
        self.rows = queries.len() / head_dim;
        self.head_dim = head_dim;
        let longest = if forms.fixed_point { MAX_DIM } else { MAX_ROW };
        assert!(self.rows <= ROWS && (1..=longest).contains(&head_dim));
        self.low_rows = 0;
        let unit = scale * std::f32::consts::LOG2_E;
        for (row, query) in queries.chunks_exact(head_dim).enumerate() {
            for (scaled, q) in self.q[row].iter_mut().zip(query) {
                *scaled = q * unit;
            }
            let scaled = &self.q[row][..head_dim];
            if forms.fixed_point {
                let Extent { sum, squares, largest } = Extent::of(scaled);
                let (step, inverse) = fixed_point_step(largest, FIXED_MAX);
                let (hi, lo) = self.q_codes.split_at_mut(2 * row + 1);
                let kept = split_fixed_point(scaled, inverse, &mut hi[2 * row], &mut lo[0]);
                self.q_step[row] = step;
                self.q_sum[row] = sum as f32;
                let rest = |kept: i32| (sum - f64::from(step) * f64::from(kept)) as f32;
                self.q_rest[row] = rest(kept.both);
                let spiky =
                    f64::from(largest).powi(2) * head_dim as f64 > CREST_LIMIT * CREST_LIMIT * squares;
                self.low_rows |= u8::from(spiky) << row;
                self.q_rest_one_byte[row] = rest(if spiky { kept.both } else { kept.high });
            }
            if forms.bf16 {
                for (half, q) in self.q_bf16[row].iter_mut().zip(scaled) {
                    *half = f32_to_bf16(*q);
                }
            }
        }
        // Padding rows must be finite; what they hold is never read back.
        for row in self.rows..ROWS {
            self.q[row][..head_dim].fill(0.0);
            self.q_bf16[row][..head_dim].fill(0);
            self.q_codes[2 * row].fill(0);
            self.q_codes[2 * row + 1].fill(0);
            (self.q_step[row], self.q_sum[row]) = (0.0, 0.0);
            (self.q_rest[row], self.q_rest_one_byte[row]) = (0.0, 0.0);
            self.masks[row] = 0;
        }
        // A last tile of channels that the head does not fill multiplies zeros.
        let padded = head_dim.next_multiple_of(64);
        for row in 0..ROWS {
            self.q_bf16[row][head_dim..padded.min(MAX_ROW)].fill(0);
            if forms.fixed_point {
                self.q_codes[2 * row][head_dim..padded.min(MAX_DIM)].fill(0);
                self.q_codes[2 * row + 1][head_dim..padded.min(MAX_DIM)].fill(0);
            }
        }
    }

    /// Forgets what was read.
    pub(super) fn reset(&mut self) {
        self.values_due = false;
        self.max = [f32::NEG_INFINITY; LANES];
        self.sum = [[0.0; LANES]; ROWS];
        self.shared = [[0.0; LANES]; ROWS];
        for out in &mut self.out {
            out[..self.head_dim].fill(0.0);
        }
    }

    /// Writes a row's state: largest score, sum of weights, weighted sum of values.
    pub(super) fn state(&self, row: usize, state: &mut [f32]) {
        let shared = halve(self.shared[row]);
        state[0] = self.max[row];
        state[1] = halve(self.sum[row]);
        for (to, from) in state[2..].iter_mut().zip(&self.out[row]) {
            *to = from + shared;
        }
    }
}

/// Floats of a row's state: largest score, sum, output.
pub(super) fn state_len(head_dim: usize) -> usize {
    head_dim + 2
}

/// Adds the state of the next span to `state`, in that order.
pub(super) fn merge_state(state: &mut [f32], next: &[f32]) {
    if next[0] == f32::NEG_INFINITY {
        return;
    }
    if state[0] == f32::NEG_INFINITY {
        state.copy_from_slice(next);
        return;
    }
    let max = state[0].max(next[0]);
    let (ours, theirs) = ((state[0] - max).exp2(), (next[0] - max).exp2());
    state[0] = max;
    for (to, from) in state[1..].iter_mut().zip(&next[1..]) {
        *to = *to * ours + from * theirs;
    }
}

/// Adds an attention sink, a score that has no value.
pub(super) fn add_sink(state: &mut [f32], score: f32) {
    let score = score * std::f32::consts::LOG2_E;
    let max = state[0].max(score);
    // A state of nothing is all zeros, with −∞ as its largest score.
    let ours = if state[0] == f32::NEG_INFINITY { 0.0 } else { (state[0] - max).exp2() };
    state[0] = max;
    state[1..].iter_mut().for_each(|value| *value *= ours);
    state[1] += (score - max).exp2();
}

/// The output of a state; zeros when nothing was read.
pub(super) fn finish_state(state: &[f32], out: &mut [f32]) {
    let norm = if state[1] > 0.0 { 1.0 / state[1] } else { 0.0 };
    for (to, from) in out.iter_mut().zip(&state[2..]) {
        // Adding zero makes −0 into +0: whether a masked token was multiplied by 0 or left out must
        // not show.
        *to = from * norm + 0.0;
    }
}

/// The middle of a width's codes. Where a rounded sum is corrected, codes are counted from the
/// middle: the rounding error of a query (or a weight) is then multiplied by deviations from the
/// middle instead of by codes.
pub(super) const fn middle_code(bits: u32) -> f32 {
    ((1 << bits) - 1) as f32 / 2.0
}

/// Step of integers up to `fixed_max` for values up to `largest`, and its inverse.
pub(super) fn fixed_point_step(largest: f32, fixed_max: f32) -> (f32, f32) {
    if largest < TINY { (0.0, 0.0) } else { (largest / fixed_max, fixed_max / largest) }
}

/// What fixed point needs to know of a query.
struct Extent {
    sum: f64,
    squares: f64,
    largest: f32,
}

impl Extent {
    /// In independent chains: this runs for every span.
    fn of(values: &[f32]) -> Self {
        let (mut sums, mut squares, mut largest) = ([0.0_f64; LANES], [0.0_f64; LANES], [0.0_f32; LANES]);
        for lanes in values.chunks_exact(LANES) {
            for i in 0..LANES {
                sums[i] += f64::from(lanes[i]);
                squares[i] += f64::from(lanes[i]) * f64::from(lanes[i]);
                largest[i] = if lanes[i].abs() > largest[i] { lanes[i].abs() } else { largest[i] };
            }
        }
        Self {
            sum: sums.iter().sum(),
            squares: squares.iter().sum(),
            largest: largest.iter().fold(0.0, |m, v| v.max(m)),
        }
    }
}

/// Sums of the integers a query became.
struct Kept {
    /// `Σ 256·hi + lo`.
    both: i32,
    /// `Σ 256·hi`.
    high: i32,
}

/// `value ≈ step · (256·hi + lo)` with `hi` in ±127 and `lo` in −128..128: `hi` alone is the value
/// rounded to a byte.
fn split_fixed_point(values: &[f32], inverse: f32, hi: &mut [i8], lo: &mut [i8]) -> Kept {
    // Adding 1.5 · 2^23 rounds to an integer in the low bits of the float.
    const MAGIC: f32 = 12_582_912.0;
    let mut kept = Kept { both: 0, high: 0 };
    for ((value, hi), lo) in values.iter().zip(hi).zip(lo) {
        let fixed = (value * inverse + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
        let high = (fixed + 128) >> 8;
        *hi = high as i8;
        *lo = (fixed - 256 * high) as i8;
        kept.both += fixed;
        kept.high += 256 * high;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_point_is_within_half_a_step_and_bytes_fit() {
        let values: Vec<f32> = (0..256).map(|i| ((i * 37 % 256) as f32 - 127.5) / 9.0).collect();
        let Extent { sum: exact, squares, largest } = Extent::of(&values);
        assert_eq!(exact, values.iter().map(|&v| f64::from(v)).sum::<f64>());
        let expected = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
        assert!((squares - expected).abs() < 1e-9 * expected);
        assert_eq!(largest, 127.5 / 9.0);
        let (step, inverse) = fixed_point_step(largest, FIXED_MAX);
        let (mut hi, mut lo) = ([0; 256], [0; 256]);
        let kept = split_fixed_point(&values, inverse, &mut hi, &mut lo);
        assert_eq!(kept.both, (0..256).map(|i| 256 * i32::from(hi[i]) + i32::from(lo[i])).sum::<i32>());
        assert_eq!(kept.high, (0..256).map(|i| 256 * i32::from(hi[i])).sum::<i32>());
        for ((value, hi), lo) in values.iter().zip(hi).zip(lo) {
            let back = step * (256 * i32::from(hi) + i32::from(lo)) as f32;
            assert!((back - value).abs() <= step * 0.504, "{value} came back as {back}");
            assert!(hi >= -127);
            let coarse = step * (256 * i32::from(hi)) as f32;
            assert!((coarse - value).abs() <= 128.6 * step, "{value} came back as {coarse} from a byte");
        }
        assert_eq!(fixed_point_step(0.0, FIXED_MAX), (0.0, 0.0));
        let (step, inverse) = fixed_point_step(TINY, FIXED_MAX);
        assert!(step.is_normal() && inverse.is_finite());
    }

    #[test]
    fn only_spiky_queries_need_low_bytes() {
        let mut queries: Vec<f32> = (0..5 * 64).map(|i| ((i * 37 % 64) as f32 - 31.5) / 9.0).collect();
        queries[64] = 40.0;
        queries[2 * 64..3 * 64].fill(0.0);
        queries[3 * 64..4 * 64].iter_mut().for_each(|q| *q *= 1e20);
        queries[4 * 64..].iter_mut().for_each(|q| *q *= 1e-30);
        let mut block = RowBlock::new();
        block.load(&queries, 64, 1.0, QueryForms { fixed_point: true, bf16: false });
        assert_eq!(block.low_rows, 0b10);
        assert_eq!(block.q_rest[1], block.q_rest_one_byte[1]);
        assert_eq!((block.q_rest[2], block.q_rest_one_byte[2]), (0.0, 0.0));
    }

    #[test]
    fn merging_is_by_weight_and_empty_states_change_nothing() {
        let empty = [f32::NEG_INFINITY, 0.0, 0.0];
        let mut state = empty;
        merge_state(&mut state, &empty);
        assert_eq!(state, empty);
        merge_state(&mut state, &[3.0, 2.0, 10.0]);
        merge_state(&mut state, &empty);
        assert_eq!(state, [3.0, 2.0, 10.0]);
        merge_state(&mut state, &[4.0, 1.0, 1.0]);
        assert_eq!(state, [4.0, 2.0, 6.0]);
        let mut out = [7.0];
        finish_state(&state, &mut out);
        assert_eq!(out, [3.0]);
        finish_state(&empty, &mut out);
        assert_eq!(out, [0.0]);
        add_sink(&mut state, 3.0 / std::f32::consts::LOG2_E);
        assert_eq!(state, [4.0, 2.5, 6.0]);
        let mut nothing = empty;
        add_sink(&mut nothing, 0.0);
        assert_eq!(nothing, [0.0, 1.0, 0.0]);
    }
}
