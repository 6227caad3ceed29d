//! Normalized Walsh–Hadamard transform in natural (Sylvester) order.
//!
//! `H` is symmetric, orthogonal and its own inverse. A head size that is no power of two (80, 96)
//! gets the block-diagonal transform of its largest power-of-two divisor: 96 = 3 × 32, 80 = 5 × 16.

/// Size of the Hadamard blocks for a vector of `d`: the largest power of two that divides it.
///
/// DO NOT CHANGE: it is baked into every rotation file made for such a head size.
pub const fn block_size(d: usize) -> usize {
    if d == 0 { 0 } else { 1 << d.trailing_zeros() }
}

/// In-place fast transform, `x ← x·H`, in O(d log d).
pub fn transform(x: &mut [f32]) {
    let block = block_size(x.len());
    if block <= 1 {
        return;
    }
    let norm = (1.0 / (block as f64).sqrt()) as f32;
    for chunk in x.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block {
            for start in (0..block).step_by(2 * half) {
                for i in start..start + half {
                    let (a, b) = (chunk[i], chunk[i + half]);
                    chunk[i] = a + b;
                    chunk[i + half] = a - b;
                }
            }
            half *= 2;
        }
        for v in chunk {
            *v *= norm;
        }
    }
}

/// The same transform as a row-major `d × d` matrix in f64, entry `(i, j)` = `(−1)^{popcount(i &
/// j)} / √block` inside a block and zero outside.
pub fn matrix(d: usize) -> Vec<f64> {
    block_matrix(d, block_size(d))
}

/// The block-diagonal transform with blocks of at most `order`, a power of two.
pub fn block_matrix(d: usize, order: usize) -> Vec<f64> {
    let block = block_size(d).min(order).max(1);
    let norm = 1.0 / (block as f64).sqrt();
    let mut h = vec![0.0; d * d];
    for i in 0..d {
        let base = i / block * block;
        for j in base..base + block {
            let sign = if ((i - base) & (j - base)).count_ones().is_multiple_of(2) { norm } else { -norm };
            h[i * d + j] = sign;
        }
    }
    h
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrix_is_the_sylvester_recursion() {
        // H_2n = [[H, H], [H, -H]] / sqrt(2), from 1x1.
        let mut h = vec![1.0f64];
        let mut n = 1;
        while n < 16 {
            let mut next = vec![0.0; 4 * n * n];
            for i in 0..n {
                for j in 0..n {
                    let v = h[i * n + j] / 2f64.sqrt();
                    next[i * 2 * n + j] = v;
                    next[i * 2 * n + j + n] = v;
                    next[(i + n) * 2 * n + j] = v;
                    next[(i + n) * 2 * n + j + n] = -v;
                }
            }
            h = next;
            n *= 2;
        }
        for (a, b) in h.iter().zip(matrix(16)) {
            assert!((a - b).abs() < 1e-12);
        }
    }

    #[test]
    fn fast_transform_equals_the_matrix() {
        for d in [32, 64, 80, 96, 128, 256] {
            let x: Vec<f32> = (0..d).map(|i| ((i * 37 % d) as f32 - 3.5) / 7.0).collect();
            let h = matrix(d);
            let mut fast = x.clone();
            transform(&mut fast);
            for j in 0..d {
                let exact: f64 = (0..d).map(|i| x[i] as f64 * h[i * d + j]).sum();
                assert!(
                    (fast[j] as f64 - exact).abs() < 1e-4,
                    "d {d} column {j}: {} against {exact}",
                    fast[j]
                );
            }
        }
    }

    #[test]
    fn blocks_follow_the_largest_power_of_two_divisor() {
        assert_eq!([block_size(128), block_size(96), block_size(80), block_size(64)], [128, 32, 16, 64]);
    }
}
