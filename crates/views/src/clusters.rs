//! k-means of unit vectors by cosine, with fixed seeds.

use crate::embedding::{dot, normalize};

/// Starts of k-means; the one with the largest sum of cosines counts.
const STARTS: u64 = 10;
const SEED: u64 = 42;
/// Rounds of one start.
const ROUNDS: usize = 50;

/// Groups of vectors.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Clusters {
    /// Of length one.
    pub centroids: Vec<Vec<f64>>,
    /// The group of each vector.
    pub of: Vec<usize>,
}

impl Clusters {
    /// At most `count` groups. The same vectors give the same groups; no group is empty.
    pub fn of(vectors: &[Vec<f64>], count: usize) -> Self {
        let count = count.clamp(1, vectors.len().max(1));
        let starts =
            (0..STARTS).map(|start| Self::from(vectors, first_centroids(vectors, count, SEED + start)));
        let mut best: Option<(f64, Self)> = None;
        for clusters in starts {
            let sum = clusters.of.iter().zip(vectors).map(|(&c, v)| dot(v, &clusters.centroids[c])).sum();
            if best.as_ref().is_none_or(|(known, _)| sum > *known) {
                best = Some((sum, clusters));
            }
        }
        let (_, mut clusters) = best.unwrap_or((0.0, Self { centroids: Vec::new(), of: Vec::new() }));
        clusters.drop_empty();
        clusters
    }

    fn from(vectors: &[Vec<f64>], mut centroids: Vec<Vec<f64>>) -> Self {
        let mut of = vec![usize::MAX; vectors.len()];
        for _ in 0..ROUNDS {
            let next: Vec<usize> = vectors.iter().map(|vector| nearest(vector, &centroids)).collect();
            if next == of {
                break;
            }
            of = next;
            for (group, centroid) in centroids.iter_mut().enumerate() {
                let mut sum = vec![0.0; centroid.len()];
                let members = of.iter().zip(vectors).filter(|(g, _)| **g == group);
                members.for_each(|(_, v)| sum.iter_mut().zip(v).for_each(|(s, v)| *s += v));
                // A group without members keeps its centre.
                if dot(&sum, &sum) > 0.0 {
                    normalize(&mut sum);
                    *centroid = sum;
                }
            }
        }
        Self { centroids, of }
    }

    fn drop_empty(&mut self) {
        let used: Vec<usize> = (0..self.centroids.len()).filter(|group| self.of.contains(group)).collect();
        self.of.iter_mut().for_each(|group| *group = used.iter().position(|u| u == group).unwrap_or(0));
        self.centroids = used.iter().map(|&group| self.centroids[group].clone()).collect();
    }
}

/// The centroid with the largest cosine; ties go to the lower index.
fn nearest(vector: &[f64], centroids: &[Vec<f64>]) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (i, centroid) in centroids.iter().enumerate() {
        let cosine = dot(vector, centroid);
        if cosine > best.1 {
            best = (i, cosine);
        }
    }
    best.0
}

/// k-means++: each next centroid is a vector, drawn in proportion to its squared distance from the
/// nearest centroid so far.
fn first_centroids(vectors: &[Vec<f64>], count: usize, seed: u64) -> Vec<Vec<f64>> {
    let mut random = Random(seed);
    let mut centroids: Vec<Vec<f64>> = Vec::new();
    while centroids.len() < count && !vectors.is_empty() {
        let distances: Vec<f64> = vectors
            .iter()
            .map(|v| match centroids.is_empty() {
                true => 1.0,
                // Of unit vectors: |a − b|² = 2 − 2 a·b.
                false => (2.0 - 2.0 * dot(v, &centroids[nearest(v, &centroids)])).max(0.0),
            })
            .collect();
        let mut place = random.next() * distances.iter().sum::<f64>();
        let drawn = distances.iter().position(|distance| {
            place -= distance;
            place < 0.0
        });
        centroids.push(vectors[drawn.unwrap_or(vectors.len() - 1)].clone());
    }
    centroids
}

/// SplitMix64, as numbers in [0, 1).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(mut vector: Vec<f64>) -> Vec<f64> {
        normalize(&mut vector);
        vector
    }

    #[test]
    fn groups_are_found_again_and_none_is_empty() {
        let around = |axis: usize, i: usize| {
            let mut v = vec![0.0; 5];
            (v[axis], v[(axis + i) % 5]) = (1.0, v[(axis + i) % 5] + 0.2);
            unit(v)
        };
        let vectors: Vec<Vec<f64>> = (0..24).map(|i| around(i % 3, i / 3 % 4)).collect();
        let clusters = Clusters::of(&vectors, 3);
        assert_eq!(clusters, Clusters::of(&vectors, 3));
        assert_eq!(clusters.centroids.len(), 3);
        for i in 0..24 {
            assert_eq!(clusters.of[i], clusters.of[i % 3], "vector {i}");
        }
        assert!(clusters.centroids.iter().all(|c| (dot(c, c) - 1.0).abs() < 1e-12));
        // Fewer different vectors than groups.
        let same = Clusters::of(&vec![unit(vec![1.0, 1.0]); 6], 4);
        assert_eq!((same.centroids.len(), same.of), (1, vec![0; 6]));
        assert_eq!(Clusters::of(&vectors[..2], 4).centroids.len(), 2);
        assert!(Clusters::of(&[], 4).centroids.is_empty());
    }
}
