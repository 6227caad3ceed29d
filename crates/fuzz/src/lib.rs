//! Fuzzing on stable Rust: seeded mutations of a small corpus, run as ordinary tests.
//!
//! A target is a function that takes bytes and must neither panic nor hang. `cargo test -p oscar-fuzz` gives each a
//! bounded number of mutations; `OSCAR_FUZZ_SECONDS=600` gives each ten minutes, with a seed of its own. An input that
//! fails is written to a file, which belongs into the corpus once the fault is fixed.

use oscar_codec::random::SplitMix64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A single run may take this long on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Largest input that mutations grow.
const LARGEST: usize = 1 << 20;

/// Numbers and tokens at which parsers have their edges.
const EDGES: [&str; 24] = [
    "0",
    "-1",
    "1",
    "255",
    "65536",
    "2147483648",
    "4294967295",
    "9223372036854775807",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-0.0",
    "0.1",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "\\u0000",
    "\\ud800",
    "\u{fffd}",
    "𐍈",
    "%",
    "{{",
];

/// Runs `target` on every input of the corpus and on mutations of them.
///
/// # Panics
/// If the target panics or takes too long; the message names the file with the input.
pub fn fuzz(name: &str, corpus: &[Vec<u8>], runs: usize, target: impl Fn(&[u8])) {
    assert!(!corpus.is_empty(), "{name} has no corpus");
    let seconds = std::env::var("OSCAR_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    let limit = seconds.map(Duration::from_secs);
    let seed = std::env::var("OSCAR_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let mut random = SplitMix64::new(
        name.bytes().fold(seed, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte))),
    );
    for input in corpus {
        run(name, input, &target);
    }
    let begun = Instant::now();
    let mut done = 0;
    while limit.map_or(done < runs, |limit| begun.elapsed() < limit) {
        let input = mutated(corpus, &mut random);
        run(name, &input, &target);
        done += 1;
    }
    println!(
        "{name}: {} inputs and {done} mutations in {:.1} s",
        corpus.len(),
        begun.elapsed().as_secs_f64()
    );
}

fn run(name: &str, input: &[u8], target: &impl Fn(&[u8])) {
    let begun = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| target(input)));
    let problem = match outcome {
        Err(_) => "panicked",
        Ok(()) if begun.elapsed() > PATIENCE => "took too long",
        Ok(()) => return,
    };
    let sum = input
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let path: PathBuf = std::env::temp_dir().join(format!("oscar-fuzz-{name}-{sum:016x}"));
    let saved = std::fs::write(&path, input).map(|()| path.display().to_string());
    panic!(
        "{name} {problem}: {}",
        saved.unwrap_or_else(|error| format!("the input could not be saved: {error}"))
    );
}

/// One input of the corpus with one to eight changes.
fn mutated(corpus: &[Vec<u8>], random: &mut SplitMix64) -> Vec<u8> {
    let mut bytes = corpus[random.below(corpus.len())].clone();
    for _ in 0..=random.below(8) {
        change(&mut bytes, corpus, random);
    }
    bytes.truncate(LARGEST.max(corpus.iter().map(Vec::len).max().unwrap_or(0)));
    bytes
}

fn change(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut SplitMix64) {
    let len = bytes.len();
    let at = if len == 0 { 0 } else { near_start(len, random) };
    let some = |random: &mut SplitMix64, most: usize| 1 + random.below(most);
    match random.below(10) {
        _ if len == 0 => bytes.push(random.below(256) as u8),
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.below(256) as u8,
        2 => {
            let end = (at + some(random, 16)).min(len);
            drop(bytes.drain(at..end));
        }
        3 => {
            let edge = EDGES[random.below(EDGES.len())];
            drop(bytes.splice(at..at, edge.bytes()));
        }
        4 => replace_number(bytes, at, random),
        5 => {
            let end = (at + some(random, 64)).min(len);
            let piece = bytes[at..end].to_vec();
            let copies = some(random, 50);
            drop(bytes.splice(at..at, piece.repeat(copies)));
        }
        6 => bytes.truncate(at),
        7 => {
            let other = &corpus[random.below(corpus.len())];
            let from = random.below(other.len().max(1)).min(other.len());
            let end = (from + some(random, 200)).min(other.len());
            drop(bytes.splice(at..at, other[from..end].iter().copied()));
        }
        8 => {
            let other = at.wrapping_add(random.below(len)) % len;
            bytes.swap(at, other);
        }
        _ => {
            // A binary number, where headers keep lengths and offsets.
            let value = [0u64, 1, u64::MAX, 1 << 31, 1 << 40, len as u64][random.below(6)];
            for (place, byte) in bytes[at..].iter_mut().zip(value.to_le_bytes()) {
                *place = byte;
            }
        }
    }
}

/// Half of the changes go into the first kilobyte: that is where headers are.
fn near_start(len: usize, random: &mut SplitMix64) -> usize {
    let range = if random.below(2) == 0 { len.min(1024) } else { len };
    random.below(range)
}

/// Replaces the number at or after `at` by one of the edges.
fn replace_number(bytes: &mut Vec<u8>, at: usize, random: &mut SplitMix64) {
    let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|offset| at + offset) else {
        return;
    };
    let end =
        bytes[start..].iter().position(|byte| !byte.is_ascii_digit()).map_or(bytes.len(), |n| start + n);
    let edge = EDGES[random.below(EDGES.len())];
    drop(bytes.splice(start..end, edge.bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_found_and_its_input_kept() {
        let corpus = [b"{\"size\": 12, \"name\": \"abc\"}".to_vec()];
        let faulty = |bytes: &[u8]| assert!(!bytes.windows(5).any(|part| part == b"1e999"), "on purpose");
        let found = catch_unwind(|| fuzz("self-test", &corpus, 100_000, faulty)).unwrap_err();
        let message = found.downcast_ref::<String>().unwrap();
        let path = message.strip_prefix("self-test panicked: ").unwrap();
        assert!(std::fs::read(path).unwrap().windows(5).any(|part| part == b"1e999"));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn the_same_seed_gives_the_same_inputs() {
        let corpus = [b"first input 1".to_vec(), b"second [2]".to_vec()];
        let draw = || {
            let mut random = SplitMix64::new(7);
            (0..100).map(|_| mutated(&corpus, &mut random)).collect::<Vec<_>>()
        };
        assert_eq!(draw(), draw());
    }
}
