//! Chunks, batches, threads and budgets do not change an answer.

use crate::support::{Setup, all_logits, greedy};
use oscar_backend::argmax;
use oscar_codec::{KvFormat, Windows};
use oscar_kernels_cpu::backend::CpuBackend;
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{Family, ModelSource};
use oscar_runner::{Logits, Runner, Sequence, StepError, StepOutput, StepRequest};

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) % 6000 + 3).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn any_chunk_and_any_thread_count_give_the_same_logits_to_the_bit() {
    let prompt = tokens(700, 1);
    for format in [KvFormat::Bf16, KvFormat::OSCAR2, KvFormat::Oscar { bits: 3 }, KvFormat::Oscar2Lloyd] {
        let reference =
            all_logits(&mut Setup { format, threads: 1, ..Setup::default() }.embedded(), &prompt, 64);
        let mut runner = Setup { format, threads: 3, ..Setup::default() }.embedded();
        for chunk in [16, 257, 700] {
            let logits = all_logits(&mut runner, &prompt, chunk);
            assert!(bits(&logits) == bits(&reference), "{format}, chunks of {chunk}");
        }
    }
}

/// Methods that code keys by groups of tokens, flush them while values slide, or leave layers in BF16.
#[test]
fn rivals_with_windows_of_their_own_do_not_see_chunks_or_threads() {
    let prompt = tokens(420, 5);
    for name in ["kivi2", "kivi2-g128", "kitty", "turboquant-3bit_nc", "turboquant2-prod", "quarot2"] {
        let format: KvFormat = name.parse().unwrap();
        let windows = match name {
            // Small windows, so that most of the short prompt is read as code.
            "turboquant-3bit_nc" | "turboquant2-prod" | "quarot2" => format.windows(Some(16), Some(48)),
            _ => format.windows(None, None),
        }
        .unwrap();
        let setup = Setup { format, windows, threads: 1, ..Setup::default() };
        let reference = all_logits(&mut setup.embedded(), &prompt, 420);
        let mut runner = Setup { threads: 3, ..setup }.embedded();
        for chunk in [33, 200] {
            let logits = all_logits(&mut runner, &prompt, chunk);
            assert!(bits(&logits) == bits(&reference), "{name}, chunks of {chunk}");
        }
        // One token at a time: what decoding does.
        let logits = all_logits(&mut runner, &prompt[..300], 1);
        assert!(bits(&logits) == bits(&reference[..logits.len()]), "{name}, one token at a time");
    }
}

#[test]
fn prefill_equals_feeding_one_token_at_a_time() {
    let prompt = tokens(400, 2);
    let windows = Windows::new(16, 64).unwrap();
    for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
        let mut runner = Setup { format, windows, ..Setup::default() }.embedded();
        let whole = all_logits(&mut runner, &prompt, 400);
        let single = all_logits(&mut runner, &prompt, 1);
        assert!(bits(&whole) == bits(&single), "{format}");
    }
}

#[test]
fn batched_decode_of_different_lengths_equals_one_by_one() {
    for format in [KvFormat::Bf16, KvFormat::OSCAR2] {
        let mut runner = Setup { format, ..Setup::default() }.embedded();
        let prompts: Vec<Vec<u32>> =
            [37, 340, 401, 64].iter().enumerate().map(|(i, &n)| tokens(n, i as u32)).collect();
        let alone: Vec<Vec<u32>> = prompts.iter().map(|p| greedy(&mut runner, p, 12, &[])).collect();

        let mut sequences: Vec<Sequence> = Vec::new();
        let mut next = Vec::new();
        let mut output = StepOutput::default();
        for prompt in &prompts {
            let mut sequence = Sequence::new();
            runner.prefill(&mut sequence, prompt, &mut output, |_| {}).unwrap();
            next.push(argmax(&output.logits));
            sequences.push(sequence);
        }
        let vocab = runner.config().vocab_size;
        let mut together: Vec<Vec<u32>> = next.iter().map(|&t| vec![t]).collect();
        for _ in 1..12 {
            let last: Vec<[u32; 1]> = together.iter().map(|t| [t[t.len() - 1]]).collect();
            let mut requests: Vec<StepRequest<'_>> = sequences
                .iter_mut()
                .zip(&last)
                .map(|(sequence, tokens)| StepRequest { sequence, tokens, logits: Logits::Last })
                .collect();
            runner.step(&mut requests, &mut output).unwrap();
            for (out, row) in together.iter_mut().zip(output.logits.chunks_exact(vocab)) {
                out.push(argmax(row));
            }
        }
        assert_eq!(together, alone, "{format}");
        drop(sequences);
        assert_eq!(runner.usage().bytes, 0, "finished sequences give their pages back");
    }
}

#[test]
fn refusals_name_the_value_and_leave_the_sequence_usable() {
    let mut runner = Setup { context: 128, ..Setup::default() }.embedded();
    let mut sequence = Sequence::new();
    let mut output = StepOutput::default();
    let mut step = |runner: &mut Runner<CpuBackend>, tokens: &[u32]| {
        let request = StepRequest { sequence: &mut sequence, tokens, logits: Logits::Last };
        runner.step(&mut [request], &mut output)
    };
    step(&mut runner, &tokens(100, 1)).unwrap();
    let error = step(&mut runner, &tokens(29, 1)).unwrap_err();
    assert!(matches!(error, StepError::Context { position: 128, context: 128 }), "{error}");
    let error = step(&mut runner, &[6144]).unwrap_err().to_string();
    assert!(error.contains("6144"), "{error}");
    step(&mut runner, &tokens(28, 1)).unwrap();
}

/// Every family's forward pass, on a tiny random model, agrees with itself across formats and modes.
#[test]
fn all_families_run() {
    for family in Family::ALL {
        let dir = tempfile::tempdir().unwrap();
        let config = tiny_config(family);
        write_random_model(dir.path(), &config, WriteOptions::default(), 7).unwrap();
        let source = ModelSource::Dir(dir.path().to_owned());
        let prompt: Vec<u32> = tokens(90, 3).iter().map(|t| t % config.vocab_size as u32).collect();
        let setup = Setup { windows: Windows::new(16, 32).unwrap(), context: 90, ..Setup::default() };
        let exact = all_logits(&mut Setup { format: KvFormat::F32, ..setup }.runner(&source), &prompt, 90);
        assert!(exact.iter().all(|l| l.is_finite()), "{family:?}");
        let formats = [(KvFormat::Bf16, 0.05), (KvFormat::Oscar { bits: 4 }, 0.5)];
        // Latent rows are never quantized.
        let offered = |format: KvFormat| config.latent.is_none() || !format.is_coded();
        for (format, tolerance) in formats.into_iter().filter(|(format, _)| offered(*format)) {
            let setup =
                Setup { format, windows: Windows::new(16, 32).unwrap(), context: 90, ..Setup::default() };
            let logits = all_logits(&mut setup.runner(&source), &prompt, 33);
            let scale = exact.iter().map(|l| l.abs()).fold(0.0, f32::max);
            let differences: Vec<f32> = exact.iter().zip(&logits).map(|(a, b)| (a - b).abs()).collect();
            // Rounding may choose another expert for some rows, so only the mean counts there.
            let found = match config.moe.is_some() {
                true => differences.iter().sum::<f32>() / differences.len() as f32,
                false => differences.iter().copied().fold(0.0, f32::max),
            };
            assert!(found <= tolerance * scale, "{family:?} {format}: {found} of {scale}");
        }
    }
}
