//! How a prompt is divided into steps.

/// Tokens of the next step of a prompt that has `left` tokens to be read, where nothing else runs.
///
/// The first step takes what is no whole chunk: late in a prompt the rows of a GPU's chunk read about the
/// same number of tokens and fill whole waves of its thread blocks; early ones fill waves anyway. It
/// takes up to a third more than a chunk: a step of few rows wastes the device.
pub fn next_chunk(left: usize, chunk: usize) -> usize {
    let chunk = chunk.max(1);
    match left % chunk {
        _ if left <= longest_step(chunk) => left,
        rest if rest <= chunk / 3 => chunk + rest,
        rest => rest,
    }
}

/// Most prompt tokens of a sequence in one step, for this size of a chunk.
pub fn longest_step(chunk: usize) -> usize {
    chunk.max(1).saturating_add(chunk / 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(mut left: usize, chunk: usize) -> Vec<usize> {
        let mut steps = Vec::new();
        while left > 0 {
            steps.push(next_chunk(left, chunk));
            left -= steps[steps.len() - 1];
        }
        steps
    }

    #[test]
    fn a_small_rest_is_read_with_the_chunk_before_it() {
        assert_eq!(steps(4096, 3936), [4096]);
        assert_eq!(steps(5248, 3936), [5248]);
        assert_eq!(steps(5249, 3936), [1313, 3936]);
        assert_eq!(steps(700, 512), [188, 512]);
        assert_eq!(steps(1200, 512), [176, 512, 512]);
        assert_eq!(steps(1190, 512), [678, 512]);
        assert_eq!(steps(1536, 512), [512; 3]);
        assert_eq!(steps(5, 1), [1; 5]);
        assert_eq!(steps(5, 0), [1; 5], "a chunk of nothing still goes on");
        assert_eq!(steps(9, usize::MAX), [9]);
    }

    #[test]
    fn every_token_is_read_once_and_no_step_is_too_long() {
        for chunk in 1..40 {
            for left in 0..200 {
                let steps = steps(left, chunk);
                assert_eq!(steps.iter().sum::<usize>(), left);
                assert!(steps.iter().all(|&n| n > 0 && n <= longest_step(chunk)), "{left} by {chunk}");
            }
        }
    }
}
