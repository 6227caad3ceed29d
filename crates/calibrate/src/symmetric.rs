//! Symmetric matrices in double precision, stored as their upper triangle.
//!
//! Statistics of a whole model are thousands of these; half the entries is half the memory.

use oscar_codec::Rotation;

/// A symmetric `d × d` matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Symmetric {
    dim: usize,
    /// Row by row, each from the diagonal on.
    upper: Vec<f64>,
}

impl Symmetric {
    pub fn zeros(dim: usize) -> Self {
        Self { dim, upper: vec![0.0; dim * (dim + 1) / 2] }
    }

    /// Takes the upper triangle of a row-major matrix.
    ///
    /// # Panics
    /// If `full` is not `dim × dim`.
    pub fn from_full(dim: usize, full: &[f64]) -> Self {
        let mut matrix = Self::zeros(dim);
        matrix.add_full(full);
        matrix
    }

    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Bytes of one matrix of this size.
    pub fn bytes(dim: usize) -> usize {
        dim * (dim + 1) / 2 * size_of::<f64>()
    }

    /// Row `i` from the diagonal on.
    fn row(&self, i: usize) -> &[f64] {
        let start = i * self.dim - i * i.saturating_sub(1) / 2;
        &self.upper[start..start + self.dim - i]
    }

    pub fn get(&self, i: usize, j: usize) -> f64 {
        let (i, j) = (i.min(j), i.max(j));
        self.row(i)[j - i]
    }

    /// Adds the upper triangle of a row-major matrix.
    ///
    /// # Panics
    /// If `full` is not `dim × dim`.
    pub fn add_full(&mut self, full: &[f64]) {
        assert_eq!(full.len(), self.dim * self.dim, "a matrix of {0} × {0}", self.dim);
        let mut upper = self.upper.iter_mut();
        for (i, row) in full.chunks_exact(self.dim).enumerate() {
            upper.by_ref().zip(&row[i..]).for_each(|(sum, &v)| *sum += v);
        }
    }

    /// `self += factor · other`.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn add_scaled(&mut self, other: &Self, factor: f64) {
        assert_eq!(self.dim, other.dim, "sums of matrices of one size");
        self.upper.iter_mut().zip(&other.upper).for_each(|(sum, &v)| *sum += factor * v);
    }

    pub fn scale(&mut self, factor: f64) {
        self.upper.iter_mut().for_each(|v| *v *= factor);
    }

    /// Row-major, both triangles.
    pub fn to_full(&self) -> Vec<f64> {
        let d = self.dim;
        let mut full = vec![0.0; d * d];
        for i in 0..d {
            for (j, &v) in self.row(i).iter().enumerate() {
                full[i * d + i + j] = v;
                full[(i + j) * d + i] = v;
            }
        }
        full
    }

    pub fn trace(&self) -> f64 {
        (0..self.dim).map(|i| self.row(i)[0]).sum()
    }

    pub fn is_finite(&self) -> bool {
        self.upper.iter().all(|v| v.is_finite())
    }

    /// `x · C · xᵀ`.
    ///
    /// # Panics
    /// If `x` has another size.
    pub fn quadratic(&self, x: &[f32]) -> f64 {
        assert_eq!(x.len(), self.dim, "a row of {}", self.dim);
        let mut widened = [0.0f64; 256];
        assert!(self.dim <= widened.len(), "head sizes end at {}", widened.len());
        widened.iter_mut().zip(x).for_each(|(w, &v)| *w = f64::from(v));
        let x = &widened[..self.dim];
        let mut sum = 0.0;
        for i in 0..self.dim {
            let row = self.row(i);
            // Twice what lies beyond the diagonal, once the diagonal.
            sum += x[i] * (2.0 * dot(row, &x[i..]) - row[0] * x[i]);
        }
        sum
    }

    /// `RᵀCR`: the same quadratic form for rows multiplied by `R`, when `R` is orthogonal.
    ///
    /// # Panics
    /// If the sizes differ.
    pub fn rotated(&self, rotation: &Rotation) -> Self {
        let d = self.dim;
        assert_eq!(rotation.head_dim(), d, "a rotation of {d}");
        let (full, r) = (self.to_full(), rotation.matrix());
        // C·R, then Rᵀ·(C·R), both by adding multiples of rows.
        let mut product = vec![0.0; d * d];
        for (row, out) in full.chunks_exact(d).zip(product.chunks_exact_mut(d)) {
            for (&c, r) in row.iter().zip(r.chunks_exact(d)) {
                out.iter_mut().zip(r).for_each(|(o, &r)| *o += c * f64::from(r));
            }
        }
        let mut result = vec![0.0; d * d];
        for (r, row) in r.chunks_exact(d).zip(product.chunks_exact(d)) {
            for (&r, out) in r.iter().zip(result.chunks_exact_mut(d)) {
                out.iter_mut().zip(row).for_each(|(o, &v)| *o += f64::from(r) * v);
            }
        }
        Self::from_full(d, &result)
    }
}

/// Eight sums side by side, which compilers turn into vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    let (a_chunks, a_rest) = a.as_chunks::<8>();
    let (b_chunks, b_rest) = b.as_chunks::<8>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..8 {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(d: usize) -> Vec<f64> {
        (0..d * d).map(|i| ((i / d + 1) * (i % d + 1) % 7) as f64 - 2.5).collect()
    }

    #[test]
    fn entries_survive_the_packing() {
        let full = matrix(33);
        let packed = Symmetric::from_full(33, &full);
        assert_eq!(packed.to_full(), full);
        assert_eq!((packed.get(4, 30), packed.get(30, 4)), (full[4 * 33 + 30], full[4 * 33 + 30]));
        assert_eq!(packed.trace(), (0..33).map(|i| full[i * 34]).sum::<f64>());
    }

    #[test]
    fn quadratic_form_and_its_rotation_agree() {
        let d = 32;
        let c = Symmetric::from_full(d, &matrix(d));
        let rotation = Rotation::hadamard(d).unwrap();
        let x: Vec<f32> = (0..d).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut naive = 0.0;
        for i in 0..d {
            for j in 0..d {
                naive += f64::from(x[i]) * c.get(i, j) * f64::from(x[j]);
            }
        }
        assert!((c.quadratic(&x) - naive).abs() < 1e-10);
        let mut rotated = vec![0.0; d];
        rotation.apply(&x, &mut rotated);
        assert!((c.rotated(&rotation).quadratic(&rotated) - naive).abs() < 1e-4);
    }
}
