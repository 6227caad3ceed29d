//! Eigenvalues and eigenvectors of a statistic, and the rotation made of them.
//!
//! **Convention:** eigenvalues ascend, eigenvectors are the columns of a row-major matrix, and the
//! sign of each is such that its entry of largest magnitude (the first, if several are equal) is
//! positive. So the same statistic always gives the same rotation, although any sign would serve: a
//! rotated row and its code only change sign with it. Within a degenerate eigenspace the basis is
//! whatever the decomposition returns.

use crate::symmetric::Symmetric;
use nalgebra::{DMatrix, SymmetricEigen};
use oscar_codec::{CodecError, Composition, Rotation};

/// Steps of the QR iteration; some hundreds are usual for a head of 256.
const MOST_STEPS: usize = 100_000;

/// An eigendecomposition.
#[derive(Clone, Debug, PartialEq)]
pub struct Spectrum {
    /// Ascending. The eigenvalues of a second moment are not negative; negative ones from rounding
    /// are set to zero.
    pub values: Vec<f64>,
    /// Row-major; column `j` belongs to `values[j]`.
    pub vectors: Vec<f64>,
}

impl Spectrum {
    /// Decomposes a second moment; `None` if it is not finite or the iteration does not end.
    pub fn of(matrix: &Symmetric) -> Option<Self> {
        if !matrix.is_finite() {
            return None;
        }
        let d = matrix.dim();
        let full = DMatrix::from_row_slice(d, d, &matrix.to_full());
        let eigen = SymmetricEigen::try_new(full, f64::EPSILON, MOST_STEPS)?;
        let mut order: Vec<usize> = (0..d).collect();
        order.sort_by(|&a, &b| eigen.eigenvalues[a].total_cmp(&eigen.eigenvalues[b]));
        let mut vectors = vec![0.0; d * d];
        for (column, &source) in order.iter().enumerate() {
            let vector = eigen.eigenvectors.column(source);
            let sign = positive_peak(vector.iter().copied());
            for (row, &v) in vector.iter().enumerate() {
                vectors[row * d + column] = sign * v;
            }
        }
        let values = order.iter().map(|&i| eigen.eigenvalues[i].max(0.0)).collect();
        Some(Self { values, vectors })
    }

    pub fn dim(&self) -> usize {
        self.values.len()
    }

    pub fn rotation(&self, composition: Composition) -> Result<Rotation, CodecError> {
        Rotation::compose(composition, self.dim(), &self.vectors)
    }

    /// How many directions share the energy, `(Σλ)² / Σλ²`: 1 for a line, d for a ball.
    pub fn participation_ratio(&self) -> f64 {
        participation_ratio(&self.values)
    }
}

/// See [`Spectrum::participation_ratio`]; 0 where there is no energy.
pub fn participation_ratio(values: &[f64]) -> f64 {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(s, q), &v| (s + v, q + v * v));
    if squares > 0.0 { sum * sum / squares } else { 0.0 }
}

fn positive_peak(vector: impl Iterator<Item = f64>) -> f64 {
    let peak = vector.fold(0.0f64, |peak, v| if v.abs() > peak.abs() { v } else { peak });
    if peak < 0.0 { -1.0 } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second moment with the eigenvalues 1, 2, …, d in a Hadamard basis.
    fn known(d: usize) -> Symmetric {
        let values: Vec<f64> =
            (0..d * d).map(|i| if i % (d + 1) == 0 { (i / d + 1) as f64 } else { 0.0 }).collect();
        Symmetric::from_full(d, &values).rotated(&Rotation::hadamard(d).unwrap())
    }

    #[test]
    fn known_spectra_come_out_ascending_and_reproduce_the_matrix() {
        for d in [32, 80, 128] {
            let matrix = known(d);
            let spectrum = Spectrum::of(&matrix).unwrap();
            for (i, v) in spectrum.values.iter().enumerate() {
                assert!((v - (i + 1) as f64).abs() < 1e-4, "{d}: eigenvalue {i} is {v}");
            }
            for (i, j) in [(0, 0), (3, 17), (d - 1, 2)] {
                let again: f64 = (0..d)
                    .map(|k| spectrum.vectors[i * d + k] * spectrum.values[k] * spectrum.vectors[j * d + k])
                    .sum();
                assert!((again - matrix.get(i, j)).abs() < 1e-9);
            }
            for column in 0..d {
                let column = (0..d).map(|row| spectrum.vectors[row * d + column]);
                assert_eq!(positive_peak(column), 1.0);
            }
            for composition in Composition::all() {
                assert!(spectrum.rotation(composition).unwrap().orthogonality_error() < 1e-6);
            }
        }
    }

    #[test]
    fn the_same_matrix_gives_the_same_bits() {
        assert_eq!(Spectrum::of(&known(64)), Spectrum::of(&known(64)));
    }

    #[test]
    fn degenerate_and_broken_matrices_are_handled() {
        let zero = Spectrum::of(&Symmetric::zeros(32)).unwrap();
        assert!(zero.values.iter().all(|&v| v == 0.0));
        assert_eq!(zero.participation_ratio(), 0.0);
        assert!(zero.rotation(Composition::RHPbr).unwrap().orthogonality_error() < 1e-6);
        let mut rank_one = Symmetric::zeros(32);
        rank_one.add_full(&vec![1.0; 32 * 32]);
        let spectrum = Spectrum::of(&rank_one).unwrap();
        assert!((spectrum.participation_ratio() - 1.0).abs() < 1e-9);
        assert!(spectrum.rotation(Composition::RHPbr).unwrap().orthogonality_error() < 1e-6);
        let mut broken = Symmetric::zeros(32);
        broken.scale(f64::NAN);
        assert_eq!(Spectrum::of(&broken), None);
    }
}
