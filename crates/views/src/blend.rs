//! Two rankings of the same rows as one.
//!
//! The rows that a probe finds are needed by its text, and keys unlike the others (`keydiff`) mark
//! rows that every question needs. A row has a place in both rankings: among all rows of the model by
//! the probe, and among the rows of its head by the keys. Places are shares, 1 for the best row, and
//! the score is their sum: rows that both rankings like are kept first.

/// The score of each row by layer and head. Both rankings have the same rows.
pub(crate) fn blend(probed: &[Vec<f64>], keys: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mut sums = vec![0.0; probed.iter().map(Vec::len).sum()];
    add_places(probed, &mut sums);
    let mut rest = &mut sums[..];
    for head in keys {
        let (rows, others) = rest.split_at_mut(head.len());
        add_places(std::slice::from_ref(head), rows);
        rest = others;
    }
    let mut sums = sums.into_iter();
    probed.iter().map(|head| sums.by_ref().take(head.len()).collect()).collect()
}

/// Adds to each row the share of all these rows that are not before it. Ties go to the lower position,
/// then to the lower head.
fn add_places(heads: &[Vec<f64>], sums: &mut [f64]) {
    let mut rows: Vec<(f64, u32, u32)> = Vec::with_capacity(sums.len());
    for head in heads {
        let first = rows.len() as u32;
        rows.extend((0..).zip(head).map(|(i, &score)| (score, i, first + i)));
    }
    rows.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let count = rows.len();
    for (before, (_, _, row)) in rows.into_iter().enumerate() {
        sums[row as usize] += (count - before) as f64 / count as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_the_sum_of_two_places() {
        // The probe likes the first head, the keys the last rows of both.
        let probed = [vec![0.9, 0.8, 0.7, 0.6], vec![0.1, 0.0, 0.0, 0.5]];
        let keys = [vec![-0.9, -0.8, -0.7, -0.6], vec![-0.9, -0.8, -0.7, -0.6]];
        assert_eq!(blend(&probed, &keys), [vec![1.25, 1.375, 1.5, 1.625], vec![0.625, 0.75, 0.875, 1.5]]);
    }

    #[test]
    fn equal_rows_go_to_the_lower_position() {
        let equal = [vec![0.0; 2], vec![0.0; 2]];
        assert_eq!(blend(&equal, &equal), [vec![2.0, 1.0], vec![1.75, 0.75]]);
        assert_eq!(blend(&[vec![], vec![0.5]], &[vec![], vec![-0.5]]), [vec![], vec![2.0]]);
    }
}
