//! Against Hugging Face transformers in float32.

use crate::support::{Setup, all_logits, greedy, log_probability};
use oscar_codec::KvFormat;
use oscar_kernels_cpu::backend::Mode;
use serde_json::Value;

const GOLDENS: &str = include_str!("../fixtures/transformers_golden.json");

struct Golden {
    name: String,
    input: Vec<u32>,
    top8: Vec<(u32, f64)>,
    mean_nll: f64,
    greedy: Vec<u32>,
}

fn parse(text: &str) -> Vec<Golden> {
    let ids =
        |v: &Value| v.as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let root: Value = serde_json::from_str(text).unwrap();
    root.as_object()
        .unwrap()
        .iter()
        .map(|(name, v)| Golden {
            name: name.clone(),
            input: ids(&v["input_ids"]),
            top8: v["last_top8"]
                .as_array()
                .unwrap()
                .iter()
                .map(|pair| (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap()))
                .collect(),
            mean_nll: v["mean_nll"].as_f64().unwrap(),
            greedy: ids(&v["greedy_ids"]),
        })
        .collect()
}

/// Loss, last-position log-probabilities and greedy tokens of each golden.
fn check(goldens: &[Golden], setup: &Setup, nll_tolerance: f64, top8_tolerance: f64) {
    let mut runner = setup.embedded();
    let vocab = runner.config().vocab_size;
    for golden in goldens {
        let logits = all_logits(&mut runner, &golden.input, 512);
        let rows: Vec<&[f32]> = logits.chunks_exact(vocab).collect();
        let losses: Vec<f64> =
            golden.input[1..].iter().zip(&rows).map(|(&next, row)| -log_probability(row, next)).collect();
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        assert!(
            (mean - golden.mean_nll).abs() < nll_tolerance,
            "{}: loss {mean}, expected {}",
            golden.name,
            golden.mean_nll
        );
        for &(token, expected) in &golden.top8 {
            let got = log_probability(rows[rows.len() - 1], token);
            assert!(
                (got - expected).abs() < top8_tolerance,
                "{}: token {token} {got}, expected {expected}",
                golden.name
            );
        }
        let out = greedy(&mut runner, &golden.input, golden.greedy.len(), &[]);
        assert_eq!(out, golden.greedy, "{}: greedy tokens", golden.name);
    }
}

#[test]
fn bf16_cache_reproduces_transformers() {
    check(&parse(GOLDENS), &Setup::default(), 0.01, 0.05);
}

#[test]
fn f32_mode_reproduces_transformers_closely() {
    let setup = Setup { format: KvFormat::F32, precision: Mode::F32, ..Setup::default() };
    check(&parse(GOLDENS), &setup, 1e-3, 1e-3);
}

/// The goldens that quote books are not part of the project: give their file by hand,
/// `OSCAR_GOLDENS=…/transformers_golden.json cargo test -p oscar-engine -- --ignored`.
#[test]
#[ignore = "needs OSCAR_GOLDENS, a file outside the project"]
fn all_goldens_from_a_file() {
    let path = std::env::var("OSCAR_GOLDENS").expect("OSCAR_GOLDENS names the golden file");
    let goldens = parse(&std::fs::read_to_string(path).unwrap());
    check(&goldens, &Setup::default(), 0.01, 0.05);
    check(&goldens, &Setup { format: KvFormat::F32, precision: Mode::F32, ..Setup::default() }, 1e-3, 1e-3);
    // Two bits: the answers of the retrieval prompts survive.
    let mut runner = Setup { format: KvFormat::OSCAR2, ..Setup::default() }.embedded();
    for golden in goldens.iter().filter(|g| g.name.starts_with("needle") || g.name.starts_with("memory")) {
        let out = greedy(&mut runner, &golden.input, golden.greedy.len(), &[]);
        assert_eq!(out, golden.greedy, "{} on a 2-bit cache", golden.name);
    }
}
