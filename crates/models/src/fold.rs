//! The value rotation of a cache, folded into the projections around attention.
//!
//! Sums run over the channels in ascending order, as [`Rotation::apply`] adds them, so a folded
//! weight does not depend on the tiles here.

use oscar_codec::Rotation;

/// Columns or rows that are folded at a time: with 128 channels of f32 they fit the L1 cache.
const TILE: usize = 64;

/// `v' = v·R` for each KV head, applied to the rows of `Wv` (or, with one input, to its bias):
/// row `j` of the head becomes `Σᵢ R[i][j] · row i`.
pub(crate) fn rotate_outputs(matrix: &mut [f32], inputs: usize, rotations: &[&Rotation]) {
    for (head, rotation) in matrix.chunks_exact_mut(rotations[0].head_dim() * inputs).zip(rotations) {
        let d = rotation.head_dim();
        let transposed: Vec<f32> = (0..d * d).map(|n| rotation.matrix()[n % d * d + n / d]).collect();
        let (mut source, mut folded) = (vec![0.0; d * TILE], vec![0.0; d * TILE]);
        for first in (0..inputs).step_by(TILE) {
            let width = TILE.min(inputs - first);
            for (row, to) in head.chunks_exact(inputs).zip(source.chunks_exact_mut(TILE)) {
                to[..width].copy_from_slice(&row[first..first + width]);
            }
            multiply(&transposed, d, &source, TILE, &mut folded);
            for (row, from) in head.chunks_exact_mut(inputs).zip(folded.chunks_exact(TILE)) {
                row[first..first + width].copy_from_slice(&from[..width]);
            }
        }
    }
}

/// Undoes the value rotation in `Wo`: the columns of each query head are multiplied by its KV
/// head's `R`. Each KV head has `group` query heads.
pub(crate) fn rotate_inputs(matrix: &mut [f32], width: usize, group: usize, rotations: &[&Rotation]) {
    let d = rotations[0].head_dim();
    let (mut source, mut folded) = (vec![0.0; d * TILE], vec![0.0; d * TILE]);
    for rows in matrix.chunks_mut(TILE * width) {
        let count = rows.len() / width;
        for head in 0..width / d {
            for (row, to) in rows.chunks_exact(width).zip(source.chunks_exact_mut(d)) {
                to.copy_from_slice(&row[head * d..][..d]);
            }
            let rotation = rotations[head / group].matrix();
            multiply(&source[..count * d], d, rotation, d, &mut folded[..count * d]);
            for (row, from) in rows.chunks_exact_mut(width).zip(folded.chunks_exact(d)) {
                row[head * d..][..d].copy_from_slice(from);
            }
        }
    }
}

/// `out[m][n] = Σₖ a[m][k] · b[k][n]`, all row-major, `inner` values of `k`, `columns` of `n`.
fn multiply(a: &[f32], inner: usize, b: &[f32], columns: usize, out: &mut [f32]) {
    const ROWS: usize = 4;
    const COLUMNS: usize = 8;
    for (a, out) in a.chunks(ROWS * inner).zip(out.chunks_mut(ROWS * columns)) {
        let rows = a.len() / inner;
        for first in (0..columns).step_by(COLUMNS) {
            let width = COLUMNS.min(columns - first);
            let mut sums = [[0f32; COLUMNS]; ROWS];
            if rows == ROWS && width == COLUMNS {
                let [a0, a1, a2, a3] = [0, 1, 2, 3].map(|r| &a[r * inner..][..inner]);
                for (k, b) in b.chunks_exact(columns).enumerate().take(inner) {
                    let b = &b[first..first + COLUMNS];
                    for (n, &b) in b.iter().enumerate() {
                        sums[0][n] += a0[k] * b;
                        sums[1][n] += a1[k] * b;
                        sums[2][n] += a2[k] * b;
                        sums[3][n] += a3[k] * b;
                    }
                }
            } else {
                for (row, sums) in a.chunks_exact(inner).zip(&mut sums) {
                    for (&a, b) in row.iter().zip(b.chunks_exact(columns)) {
                        for (sum, &b) in sums.iter_mut().zip(&b[first..first + width]) {
                            *sum += a * b;
                        }
                    }
                }
            }
            for (out, sums) in out.chunks_exact_mut(columns).zip(&sums) {
                out[first..first + width].copy_from_slice(&sums[..width]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oscar_codec::RotationSet;
    use oscar_codec::random::SplitMix64;

    /// Folding is defined by `Rotation::apply`: of every column of `Wv`, of every head's part of a row
    /// of `Wo`.
    #[test]
    fn folding_equals_rotating_row_by_row() {
        let mut random = SplitMix64::new(5);
        for (d, inputs, rows, group) in [(128, 1, 1, 1), (64, 200, 67, 2), (32, 64, 4, 3)] {
            let set = RotationSet::hadamard(1, 2, d).unwrap();
            let rotations: Vec<&Rotation> = set.heads().iter().map(|h| &h.value).collect();
            let values: Vec<f32> = (0..2 * d * inputs).map(|_| random.symmetric()).collect();
            let mut folded = values.clone();
            rotate_outputs(&mut folded, inputs, &rotations);
            for (head, rotation) in rotations.iter().enumerate() {
                for column in 0..inputs {
                    let at = |i: usize| (head * d + i) * inputs + column;
                    let x: Vec<f32> = (0..d).map(|i| values[at(i)]).collect();
                    let mut expected = vec![0.0; d];
                    rotation.apply(&x, &mut expected);
                    assert_eq!((0..d).map(|i| folded[at(i)]).collect::<Vec<_>>(), expected);
                }
            }
            let width = 2 * group * d;
            let values: Vec<f32> = (0..rows * width).map(|_| random.symmetric()).collect();
            let mut folded = values.clone();
            rotate_inputs(&mut folded, width, group, &rotations);
            for (at, (x, found)) in values.chunks_exact(d).zip(folded.chunks_exact(d)).enumerate() {
                let mut expected = vec![0.0; d];
                rotations[at % (2 * group) / group].apply(x, &mut expected);
                assert_eq!(found, expected);
            }
        }
    }
}
