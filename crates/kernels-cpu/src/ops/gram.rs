//! Gram matrices `Σ w · xᵀx` of head rows: the statistic of calibration.
//!
//! The result is cut into square tiles of [`TILE`] columns; a task owns one tile on or above the
//! diagonal and its mirror image below. Rows are taken [`BLOCK`] at a time in f32 and each block is
//! added in f64, so the rounding of a sum does not grow with the length of the text.
//!
//! Invariant: blocks begin at the first row and each tile is summed by one task in the order of the
//! rows, so the result does not depend on the number of threads.

use crate::disjoint::Disjoint;
use crate::kernels::Kernels;
use crate::pool::ThreadPool;

/// Side of a tile of the result.
const TILE: usize = 32;
/// Rows summed in f32.
const BLOCK: usize = 64;

/// `BLOCK` rows of `TILE` columns; absent rows and columns are zero.
type Strip = [f32; BLOCK * TILE];
type Sums = [f32; TILE * TILE];

/// `sums[i][j] = Σ_r left[r][i] · right[r][j]` over the first `rows` rows.
///
/// `unsafe` as in [`crate::gemm`]: the caller vouches for the variant's instructions.
pub(crate) type GramKernel = unsafe fn(left: &Strip, right: &Strip, rows: usize, sums: &mut Sums);

/// The columns of some rows whose Gram matrix is wanted.
#[derive(Clone, Copy)]
struct Columns<'a> {
    x: &'a [f32],
    stride: usize,
    first: usize,
    width: usize,
    weights: Option<&'a [f32]>,
}

impl Columns<'_> {
    /// Copies columns `column..column + TILE` of rows `row..row + rows`, as far as the width goes.
    fn pack(&self, row: usize, rows: usize, column: usize, weighted: bool, out: &mut Strip) {
        let width = TILE.min(self.width - column);
        for (r, out) in out.chunks_exact_mut(TILE).take(rows).enumerate() {
            let source = &self.x[(row + r) * self.stride + self.first + column..][..width];
            match self.weights.filter(|_| weighted) {
                None => out[..width].copy_from_slice(source),
                Some(weights) => {
                    let w = weights[row + r];
                    out.iter_mut().zip(source).for_each(|(o, &x)| *o = w * x);
                }
            }
        }
    }
}

impl Kernels {
    /// Adds `Σ_r w_r · xᵀx` to `gram` (`width × width`, symmetric), `x` being the `width` columns
    /// from `first` of row `r` of `x`, whose rows are `row_stride` apart. Without weights every row
    /// counts once.
    ///
    /// # Panics
    /// If `x` is not whole rows, the columns are not inside a row, or `weights` or `gram` have
    /// another size.
    pub fn accumulate_gram(
        &self,
        pool: &ThreadPool,
        x: &[f32],
        row_stride: usize,
        first: usize,
        width: usize,
        weights: Option<&[f32]>,
        gram: &mut [f64],
    ) {
        assert!(row_stride > 0 && x.len().is_multiple_of(row_stride), "x must be whole rows of {row_stride}");
        assert!(first + width <= row_stride, "columns {first}..{} of {row_stride}", first + width);
        assert_eq!(gram.len(), width * width, "gram must be {width} × {width}");
        let rows = x.len() / row_stride;
        assert!(weights.is_none_or(|w| w.len() == rows), "there must be one weight a row");
        let columns = Columns { x, stride: row_stride, first, width, weights };
        let strips = width.div_ceil(TILE);
        let gram = Disjoint::new(gram);
        pool.run(strips * (strips + 1) / 2, &|task| {
            let (top, left) = tile_of(task, strips);
            let (top, left) = (top * TILE, left * TILE);
            let mut sums = self.gram_tile(columns, rows, top, left);
            let (height, side) = (TILE.min(width - top), TILE.min(width - left));
            if top == left {
                mirror(&mut sums);
            }
            // Why both parts are sound: each element belongs to one tile on or above the diagonal
            // or to the image of one below it, and each tile with its image to one task, which
            // holds one part at a time.
            for i in 0..height {
                let start = (top + i) * width + left;
                // SAFETY: see above.
                let part = unsafe { gram.part(start..start + side) };
                part.iter_mut().zip(&sums[i * TILE..]).for_each(|(gram, sum)| *gram += sum);
            }
            if top != left {
                for j in 0..side {
                    let start = (left + j) * width + top;
                    // SAFETY: see above.
                    let part = unsafe { gram.part(start..start + height) };
                    part.iter_mut().zip(sums[j..].iter().step_by(TILE)).for_each(|(gram, sum)| *gram += sum);
                }
            }
        });
    }

    /// The tile whose first row and column are `top` and `left`, summed over all rows.
    fn gram_tile(&self, columns: Columns<'_>, rows: usize, top: usize, left: usize) -> [f64; TILE * TILE] {
        let mut total = [0.0; TILE * TILE];
        let mut sums = [0.0; TILE * TILE];
        let (mut above, mut beside) = ([0.0; BLOCK * TILE], [0.0; BLOCK * TILE]);
        for row in (0..rows).step_by(BLOCK) {
            let count = BLOCK.min(rows - row);
            columns.pack(row, count, top, true, &mut above);
            columns.pack(row, count, left, false, &mut beside);
            // SAFETY: `Kernels` exist only for variants this processor can run.
            unsafe { (self.gram)(&above, &beside, count, &mut sums) };
            total.iter_mut().zip(&sums).for_each(|(total, &sum)| *total += f64::from(sum));
        }
        total
    }
}

/// Tile number `task` of those on or above the diagonal: its row and column of tiles.
fn tile_of(mut task: usize, strips: usize) -> (usize, usize) {
    let mut top = 0;
    while task >= strips - top {
        task -= strips - top;
        top += 1;
    }
    (top, top + task)
}

/// Copies the upper triangle of a tile on the diagonal to the lower one: weights are applied to one
/// side before rounding, so the two would differ in the last bit.
fn mirror(sums: &mut [f64; TILE * TILE]) {
    for i in 0..TILE {
        for j in i + 1..TILE {
            sums[j * TILE + i] = sums[i * TILE + j];
        }
    }
}

/// The specification.
pub(crate) fn scalar(left: &Strip, right: &Strip, rows: usize, sums: &mut Sums) {
    sums.fill(0.0);
    for (left, right) in left.chunks_exact(TILE).zip(right.chunks_exact(TILE)).take(rows) {
        for (sums, &x) in sums.chunks_exact_mut(TILE).zip(left) {
            sums.iter_mut().zip(right).for_each(|(sum, &y)| *sum += x * y);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{avx2, avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, Strip, Sums, TILE};

    /// 4 × 16 sums in eight registers: as many as the latency of a fused multiply-add calls for.
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn avx2(left: &Strip, right: &Strip, rows: usize, sums: &mut Sums) {
        const ROWS: usize = 4;
        const LANES: usize = 8;
        assert!(rows <= BLOCK);
        for top in (0..TILE).step_by(ROWS) {
            for side in (0..TILE).step_by(2 * LANES) {
                let mut acc = [[_mm256_setzero_ps(); 2]; ROWS];
                // SAFETY: rows < BLOCK, top + ROWS <= TILE and side + 2·LANES <= TILE keep every
                // access inside.
                unsafe {
                    for r in 0..rows {
                        let right = right.as_ptr().add(r * TILE + side);
                        let y = [_mm256_loadu_ps(right), _mm256_loadu_ps(right.add(LANES))];
                        for i in 0..ROWS {
                            let x = _mm256_set1_ps(*left.as_ptr().add(r * TILE + top + i));
                            acc[i][0] = _mm256_fmadd_ps(x, y[0], acc[i][0]);
                            acc[i][1] = _mm256_fmadd_ps(x, y[1], acc[i][1]);
                        }
                    }
                    for i in 0..ROWS {
                        let out = sums.as_mut_ptr().add((top + i) * TILE + side);
                        _mm256_storeu_ps(out, acc[i][0]);
                        _mm256_storeu_ps(out.add(LANES), acc[i][1]);
                    }
                }
            }
        }
    }

    /// 8 × 32 sums in sixteen registers.
    #[target_feature(enable = "avx512f")]
    pub(crate) fn avx512(left: &Strip, right: &Strip, rows: usize, sums: &mut Sums) {
        const ROWS: usize = 8;
        const LANES: usize = 16;
        assert!(rows <= BLOCK);
        for top in (0..TILE).step_by(ROWS) {
            let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
            // SAFETY: rows <= BLOCK, top + ROWS <= TILE and 2·LANES = TILE keep every access
            // inside.
            unsafe {
                for r in 0..rows {
                    let right = right.as_ptr().add(r * TILE);
                    let y = [_mm512_loadu_ps(right), _mm512_loadu_ps(right.add(LANES))];
                    for i in 0..ROWS {
                        let x = _mm512_set1_ps(*left.as_ptr().add(r * TILE + top + i));
                        acc[i][0] = _mm512_fmadd_ps(x, y[0], acc[i][0]);
                        acc[i][1] = _mm512_fmadd_ps(x, y[1], acc[i][1]);
                    }
                }
                for i in 0..ROWS {
                    let out = sums.as_mut_ptr().add((top + i) * TILE);
                    _mm512_storeu_ps(out, acc[i][0]);
                    _mm512_storeu_ps(out.add(LANES), acc[i][1]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Variant;
    use crate::kernels::testing::kernels_or_note;

    fn values(seed: u32, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// Runs a variant with one and three threads, which must agree to the last bit, and compares
    /// with f64.
    fn check(variant: Variant) {
        let Some(kernels) = kernels_or_note(variant) else { return };
        let pools = [1, 3].map(|threads| ThreadPool::new(threads).unwrap());
        for (rows, stride, first, width) in
            [(1, 32, 0, 32), (63, 200, 72, 80), (64, 64, 0, 64), (150, 300, 44, 128), (0, 32, 0, 32)]
        {
            let (x, weights) = (values(1, rows * stride), values(2, rows));
            for weights in [None, Some(weights.as_slice())] {
                let mut truth = vec![0.5; width * width];
                for r in 0..rows {
                    let row = &x[r * stride + first..][..width];
                    let w = weights.map_or(1.0, |w| f64::from(w[r]));
                    for i in 0..width {
                        for j in 0..width {
                            truth[i * width + j] += w * f64::from(row[i]) * f64::from(row[j]);
                        }
                    }
                }
                let results = pools.each_ref().map(|pool| {
                    let mut gram = vec![0.5; width * width];
                    kernels.accumulate_gram(pool, &x, stride, first, width, weights, &mut gram);
                    gram
                });
                assert_eq!(results[0], results[1], "{variant}: threads show");
                for i in 0..width {
                    for j in 0..width {
                        let (found, truth) = (results[0][i * width + j], truth[i * width + j]);
                        let rounding = 2e-7 * (8 + rows) as f64;
                        assert!((found - truth).abs() < rounding, "{variant} [{i}][{j}]: {found} {truth}");
                        assert_eq!(found, results[0][j * width + i], "{variant}: symmetric");
                    }
                }
            }
        }
    }

    #[test]
    fn scalar_matches_f64() {
        check(Variant::Scalar);
    }

    #[test]
    fn avx2_matches_scalar() {
        check(Variant::Avx2);
    }

    #[test]
    fn avx512_matches_scalar() {
        check(Variant::Avx512);
    }

    #[test]
    fn amx_matches_scalar() {
        check(Variant::Amx);
    }

    #[test]
    fn every_tile_has_one_task() {
        for strips in 1..9 {
            let tiles: Vec<_> = (0..strips * (strips + 1) / 2).map(|task| tile_of(task, strips)).collect();
            let expected: Vec<_> = (0..strips).flat_map(|i| (i..strips).map(move |j| (i, j))).collect();
            assert_eq!(tiles, expected);
        }
    }

    #[test]
    #[should_panic(expected = "columns 20..52 of 40")]
    fn columns_beyond_the_row_are_refused() {
        let kernels = Kernels::for_variant(Variant::Scalar).unwrap();
        let pool = ThreadPool::new(1).unwrap();
        kernels.accumulate_gram(&pool, &[0.0; 40], 40, 20, 32, None, &mut [0.0; 1024]);
    }
}
