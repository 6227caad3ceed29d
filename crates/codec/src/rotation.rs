//! Rotations: how an eigenbasis, the Hadamard transform and the bit-reversal permutation become one
//! matrix.
//!
//! Rows are row vectors: `x' = x · R`. A rotation belongs to one layer and one KV head; a file with
//! one rotation for each layer is the broadcast case. A calibrated mean may be subtracted from keys
//! before the rotation, which softmax ignores.

use crate::error::{CodecError, Result, check_head_dim, check_len};
use crate::hadamard;
use crate::random::orthogonal_matrix;
use std::fmt;
use std::str::FromStr;

/// A square matrix applied to row vectors, `x' = x · R`, stored row-major in f32 as rotation files
/// do.
#[derive(Clone, PartialEq)]
pub struct Rotation {
    head_dim: usize,
    matrix: Vec<f32>,
}

impl fmt::Debug for Rotation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rotation({0}×{0})", self.head_dim)
    }
}

impl Rotation {
    /// Takes a row-major `d × d` matrix and refuses one that is not finite. Orthogonality is
    /// measured separately ([`Rotation::orthogonality_error`]), because format 3 of the RotationZoo
    /// allows oblique pairs.
    pub fn from_matrix(head_dim: usize, matrix: Vec<f32>) -> Result<Self> {
        check_head_dim(head_dim)?;
        check_len("rotation matrix", matrix.len(), head_dim * head_dim)?;
        if matrix.iter().any(|v| !v.is_finite()) {
            return Err(CodecError::NotFinite(head_dim));
        }
        Ok(Self { head_dim, matrix })
    }

    fn from_f64(head_dim: usize, matrix: &[f64]) -> Result<Self> {
        Self::from_matrix(head_dim, matrix.iter().map(|&v| v as f32).collect())
    }

    pub fn identity(head_dim: usize) -> Result<Self> {
        Self::from_f64(head_dim, &identity_matrix(head_dim))
    }

    /// The data-free rotation: the normalized (block) Hadamard matrix.
    pub fn hadamard(head_dim: usize) -> Result<Self> {
        check_head_dim(head_dim)?;
        Self::from_f64(head_dim, &hadamard::matrix(head_dim))
    }

    /// Hadamard blocks of at most `order` along the diagonal.
    pub fn block_hadamard(head_dim: usize, order: usize) -> Result<Self> {
        check_head_dim(head_dim)?;
        Self::from_f64(head_dim, &hadamard::block_matrix(head_dim, order))
    }

    /// Random orthogonal blocks of the given sizes along the diagonal. Equal seeds give equal
    /// matrices.
    pub fn random(head_dim: usize, blocks: &[usize], seed: u64) -> Result<Self> {
        check_head_dim(head_dim)?;
        check_len("random rotation", blocks.iter().sum(), head_dim)?;
        let (mut matrix, mut first) = (vec![0.0; head_dim * head_dim], 0);
        for (i, &size) in blocks.iter().enumerate() {
            let block = orthogonal_matrix(size, seed + i as u64);
            for (row, values) in block.chunks_exact(size.max(1)).enumerate() {
                matrix[(first + row) * head_dim + first..][..size].copy_from_slice(values);
            }
            first += size;
        }
        Self::from_f64(head_dim, &matrix)
    }

    /// Composes a rotation from `eigenvectors`: row-major, column `j` the eigenvector of the `j`-th
    /// smallest eigenvalue, as `eigh` returns them. Computed in f64, kept in f32.
    pub fn compose(composition: Composition, head_dim: usize, eigenvectors: &[f64]) -> Result<Self> {
        check_head_dim(head_dim)?;
        check_len("eigenvector matrix", eigenvectors.len(), head_dim * head_dim)?;
        let product =
            composition.factors().iter().fold(identity_matrix(head_dim), |product, factor| match factor {
                Factor::Eigenbasis => multiply(head_dim, &product, eigenvectors),
                Factor::Hadamard => multiply(head_dim, &product, &hadamard::matrix(head_dim)),
                Factor::BitReversal => permute_columns(head_dim, &product),
            });
        Self::from_f64(head_dim, &product)
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Row-major coefficients.
    pub fn matrix(&self) -> &[f32] {
        &self.matrix
    }

    /// `out = x · R`.
    pub fn apply(&self, x: &[f32], out: &mut [f32]) {
        let d = self.head_dim;
        assert!(
            x.len() == d && out.len() == d,
            "rotation of head size {d} applied to rows of {} and {}",
            x.len(),
            out.len()
        );
        out.fill(0.0);
        for (&v, row) in x.iter().zip(self.matrix.chunks_exact(d)) {
            for (o, &r) in out.iter_mut().zip(row) {
                *o += v * r;
            }
        }
    }

    /// Largest entry of |R·Rᵀ − I|: [`orthogonality_error`] of the matrix.
    pub fn orthogonality_error(&self) -> f64 {
        orthogonality_error(self.head_dim, &self.matrix)
    }
}

/// Largest entry of |R·Rᵀ − I| of a row-major `d × d` matrix; infinite if any is NaN. Rows are
/// contiguous, which makes this several times faster than columns, and a square matrix with
/// orthonormal rows has orthonormal columns.
pub fn orthogonality_error(d: usize, matrix: &[f32]) -> f64 {
    let mut worst = 0.0f64;
    for i in 0..d {
        let row = &matrix[i * d..][..d];
        for j in 0..=i {
            let mut lanes = [0.0f64; 8];
            let other = &matrix[j * d..][..d];
            for (a, b) in row.chunks(8).zip(other.chunks(8)) {
                for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
                    *lane += f64::from(*a) * f64::from(*b);
                }
            }
            let error = (lanes.iter().sum::<f64>() - f64::from(u8::from(i == j))).abs();
            worst = worst.max(if error.is_nan() { f64::INFINITY } else { error });
        }
    }
    worst
}

fn identity_matrix(d: usize) -> Vec<f64> {
    let mut m = vec![0.0; d * d];
    for i in 0..d {
        m[i * d + i] = 1.0;
    }
    m
}

fn multiply(d: usize, a: &[f64], b: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; d * d];
    for i in 0..d {
        for k in 0..d {
            let v = a[i * d + k];
            if v != 0.0 {
                for j in 0..d {
                    out[i * d + j] += v * b[k * d + j];
                }
            }
        }
    }
    out
}

/// Column order of `P`: column `j` of `M·P` is column `order[j]` of `M`.
///
/// The `i`-th largest eigenvalue (column `d − 1 − i` in ascending order) goes to the `i`-th slot of
/// the bit-reversed sequence; for a power of two that is `order[j] = d − 1 − br(j)`. For other head
/// sizes the sequence is that of the next power of two without the slots beyond `d`.
///
/// DO NOT CHANGE: published rotation files depend on it.
pub fn bit_reversal_order(d: usize) -> Vec<usize> {
    let bits = d.next_power_of_two().trailing_zeros();
    let reverse = |i: usize| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
    let mut order = vec![0; d];
    for (rank, slot) in (0..d.next_power_of_two()).map(reverse).filter(|&slot| slot < d).enumerate() {
        order[slot] = d - 1 - rank;
    }
    order
}

fn permute_columns(d: usize, m: &[f64]) -> Vec<f64> {
    let order = bit_reversal_order(d);
    let mut out = vec![0.0; d * d];
    for (row_out, row) in out.chunks_exact_mut(d).zip(m.chunks_exact(d)) {
        for (o, &from) in row_out.iter_mut().zip(&order) {
            *o = row[from];
        }
    }
    out
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Factor {
    Eigenbasis,
    Hadamard,
    BitReversal,
}

/// How the eigenbasis U, the Hadamard matrix H and the permutation P multiply, by the official
/// tool's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Composition {
    /// `plain`: U
    Plain,
    /// `pbr`: P
    Pbr,
    /// `br`: U·P
    Br,
    /// `br_h`: U·P·H (the official name carries the size: `br_h128`)
    BrH,
    /// `r_h`: U·H
    RH,
    /// `h`: H alone, the data-free rotation
    H,
    /// `h_pbr`: H·P
    HPbr,
    /// `h_r_pbr`: H·U·P
    HRPbr,
    /// `h_pbr_r`: H·P·U
    HPbrR,
    /// `r_h_pbr`: U·H·P, the published recipe
    #[default]
    RHPbr,
}

impl Composition {
    /// Every composition by its name, in the order of declaration.
    #[rustfmt::skip]
    const NAMES: [(Self, &'static str); 10] = [
        (Self::Plain, "plain"), (Self::Pbr, "pbr"), (Self::Br, "br"), (Self::BrH, "br_h"),
        (Self::RH, "r_h"), (Self::H, "h"), (Self::HPbr, "h_pbr"), (Self::HRPbr, "h_r_pbr"),
        (Self::HPbrR, "h_pbr_r"), (Self::RHPbr, "r_h_pbr"),
    ];

    pub fn all() -> [Self; 10] {
        Self::NAMES.map(|(composition, _)| composition)
    }

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// Whether the product is `U·X`, with `X` the same for every head.
    pub fn begins_with_eigenbasis(self) -> bool {
        matches!(self.factors().first(), Some(Factor::Eigenbasis))
    }

    fn factors(self) -> &'static [Factor] {
        use Factor::{BitReversal as P, Eigenbasis as U, Hadamard as H};
        match self {
            Self::Plain => &[U],
            Self::Pbr => &[P],
            Self::Br => &[U, P],
            Self::BrH => &[U, P, H],
            Self::RH => &[U, H],
            Self::H => &[H],
            Self::HPbr => &[H, P],
            Self::HRPbr => &[H, U, P],
            Self::HPbrR => &[H, P, U],
            Self::RHPbr => &[U, H, P],
        }
    }
}

impl fmt::Display for Composition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Composition {
    type Err = CodecError;

    fn from_str(s: &str) -> Result<Self> {
        let name =
            if s.starts_with("br_h") && s[4..].chars().all(|c| c.is_ascii_digit()) { "br_h" } else { s };
        let found = Self::NAMES.into_iter().find(|(_, known)| *known == name);
        found.map(|(composition, _)| composition).ok_or_else(|| CodecError::UnknownComposition {
            name: s.to_owned(),
            known: Self::NAMES.map(|(_, name)| name).join(", "),
        })
    }
}

/// The rotations of one KV head of one layer.
#[derive(Clone, PartialEq, Debug)]
pub struct HeadRotations {
    pub key: Rotation,
    pub value: Rotation,
    /// Subtracted from keys before the rotation. It shifts all scores of a query equally, so
    /// attention does not change as long as it is subtracted from *every* key of the head.
    pub key_mean: Option<Vec<f32>>,
}

/// The rotations of a whole model, `[layer][kv_head]`.
#[derive(Clone, PartialEq, Debug)]
pub struct RotationSet {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    heads: Vec<HeadRotations>,
}

impl RotationSet {
    /// `heads[layer * kv_heads + head]`.
    pub fn per_head(
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        heads: Vec<HeadRotations>,
    ) -> Result<Self> {
        check_head_dim(head_dim)?;
        check_len("per-head rotation list", heads.len(), layers * kv_heads)?;
        for head in &heads {
            check_len("key rotation", head.key.head_dim(), head_dim)?;
            check_len("value rotation", head.value.head_dim(), head_dim)?;
            if let Some(mean) = &head.key_mean {
                check_len("key mean", mean.len(), head_dim)?;
                if mean.iter().any(|v| !v.is_finite()) {
                    return Err(CodecError::NotFinite(head_dim));
                }
            }
        }
        Ok(Self { layers, kv_heads, head_dim, heads })
    }

    /// One rotation for each layer, broadcast over its KV heads, as in official per-layer files.
    pub fn per_layer(kv_heads: usize, head_dim: usize, layers: Vec<HeadRotations>) -> Result<Self> {
        let count = layers.len();
        let heads = layers.into_iter().flat_map(|l| std::iter::repeat_n(l, kv_heads)).collect();
        Self::per_head(count, kv_heads, head_dim, heads)
    }

    /// The same data-free rotation everywhere.
    pub fn uniform(layers: usize, kv_heads: usize, key: Rotation, value: Rotation) -> Result<Self> {
        let head_dim = key.head_dim();
        let head = HeadRotations { key, value, key_mean: None };
        Self::per_layer(kv_heads, head_dim, vec![head; layers])
    }

    pub fn hadamard(layers: usize, kv_heads: usize, head_dim: usize) -> Result<Self> {
        Self::uniform(layers, kv_heads, Rotation::hadamard(head_dim)?, Rotation::hadamard(head_dim)?)
    }

    pub fn identity(layers: usize, kv_heads: usize, head_dim: usize) -> Result<Self> {
        Self::uniform(layers, kv_heads, Rotation::identity(head_dim)?, Rotation::identity(head_dim)?)
    }

    pub fn layers(&self) -> usize {
        self.layers
    }

    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    pub fn get(&self, layer: usize, kv_head: usize) -> Result<&HeadRotations> {
        if layer >= self.layers {
            return Err(CodecError::Index { what: "layer", index: layer, count: self.layers });
        }
        if kv_head >= self.kv_heads {
            return Err(CodecError::Index { what: "KV head", index: kv_head, count: self.kv_heads });
        }
        Ok(&self.heads[layer * self.kv_heads + kv_head])
    }

    /// All heads in `[layer][kv_head]` order.
    pub fn heads(&self) -> &[HeadRotations] {
        &self.heads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bit_reversal_matches_the_published_order() {
        assert_eq!(bit_reversal_order(8), [7, 3, 5, 1, 6, 2, 4, 0]);
        assert_eq!(bit_reversal_order(128)[..8], [127, 63, 95, 31, 111, 47, 79, 15]);
        for d in [80, 96, 128] {
            let mut sorted = bit_reversal_order(d);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..d).collect::<Vec<_>>(), "a permutation of {d}");
        }
    }

    #[test]
    fn names_round_trip_and_unknown_ones_are_listed() {
        for c in Composition::all() {
            assert_eq!(c.name().parse::<Composition>().unwrap(), c);
        }
        assert_eq!("br_h128".parse::<Composition>().unwrap(), Composition::BrH);
        let error = "r_p".parse::<Composition>().unwrap_err().to_string();
        assert!(error.contains("'r_p'") && error.contains("r_h_pbr"), "{error}");
    }

    #[test]
    fn wrong_sizes_are_named() {
        assert!(Rotation::hadamard(100).unwrap_err().to_string().contains("100"));
        assert!(Rotation::from_matrix(64, vec![0.0; 10]).unwrap_err().to_string().contains("4096"));
        assert!(Rotation::from_matrix(32, vec![f32::NAN; 1024]).is_err());
        let set = RotationSet::hadamard(2, 3, 64).unwrap();
        assert!(set.get(2, 0).unwrap_err().to_string().contains("layer 2"));
        assert!(set.get(1, 3).unwrap_err().to_string().contains("KV head 3"));
    }

    #[test]
    fn a_layer_file_is_the_broadcast_case() {
        let head = |scale| HeadRotations {
            key: Rotation::hadamard(64).unwrap(),
            value: Rotation::identity(64).unwrap(),
            key_mean: Some(vec![scale; 64]),
        };
        let set = RotationSet::per_layer(4, 64, vec![head(1.0), head(2.0)]).unwrap();
        assert_eq!((set.layers(), set.kv_heads()), (2, 4));
        for h in 0..4 {
            assert_eq!(set.get(1, h).unwrap(), &head(2.0));
        }
    }

    #[test]
    fn oblique_matrices_are_measured() {
        let mut m = Rotation::identity(32).unwrap().matrix().to_vec();
        m[1] = 0.25;
        assert!((Rotation::from_matrix(32, m).unwrap().orthogonality_error() - 0.25).abs() < 1e-6);
        assert_eq!(orthogonality_error(3, &[f32::NAN; 9]), f64::INFINITY);
        assert_eq!(orthogonality_error(2, &[0.0, 1.0, -1.0, 0.0]), 0.0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn every_composition_is_orthogonal_and_undone_by_its_transpose(
            seed in 0u64..1000, d in prop::sample::select(vec![32usize, 64, 80, 96, 128]), which in 0usize..10,
        ) {
            let r = Rotation::compose(Composition::all()[which], d, &crate::random::orthogonal_matrix(d, seed)).unwrap();
            prop_assert!(r.orthogonality_error() < 1e-6, "{}", r.orthogonality_error());
            let x: Vec<f32> = (0..d).map(|i| ((i as u64 * 31 + seed) % 17) as f32 - 8.0).collect();
            let mut y = vec![0.0; d];
            r.apply(&x, &mut y);
            for (a, row) in x.iter().zip(r.matrix().chunks_exact(d)) {
                let back: f32 = row.iter().zip(&y).map(|(r, v)| r * v).sum();
                prop_assert!((a - back).abs() < 1e-4);
            }
        }
    }
}
