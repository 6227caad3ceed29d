//! A whole model, from tokens to a file that serves it.

use crate::support::backend;
use oscar_calibrate::{
    CalibrateError, Calibration, CalibrationOptions, ClipPolicy, Granularity, Progress, RotationFile, Stage,
    Statistic, calibrate, write_report,
};
use oscar_codec::{CacheLayout, CodeLayout, Composition, KvFormat, RotationSet, Windows};
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::{DecoderConfig, ModelSource, Transformer, Weights};
use oscar_runner::{KvMemory, Runner, Sequence, StepOutput};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

struct Model {
    backend: Arc<CpuBackend>,
    config: DecoderConfig,
    weights: Weights,
    fingerprint: String,
}

impl Model {
    fn load() -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m");
        let source = ModelSource::Dir(folder);
        let weights = Weights::open(&source).unwrap();
        Self {
            backend: Arc::new(backend(Mode::Bf16)),
            config: DecoderConfig::load(&source).unwrap(),
            fingerprint: weights.fingerprint(),
            weights,
        }
    }

    fn transformer(&self, rotations: Option<&RotationSet>) -> Transformer<CpuBackend> {
        Transformer::build(&*self.backend, &self.config, &self.weights, rotations, 2048, |_| ()).unwrap()
    }

    fn calibrate(
        &self,
        sequences: &[Vec<u32>],
        options: &CalibrationOptions,
    ) -> Result<Calibration, CalibrateError> {
        let transformer = self.transformer(None);
        let never = AtomicBool::new(false);
        calibrate(&self.backend, &transformer, &self.fingerprint, sequences, options, &mut |_| (), &never)
    }

    /// Logits at the last position of a text, with an unquantized cache.
    fn logits(&self, transformer: &Transformer<CpuBackend>, tokens: &[u32]) -> Vec<f32> {
        let c = &self.config;
        let (windows, order) = (Windows::unlimited(), CodeLayout::CpuTile);
        let layout =
            CacheLayout::new(KvFormat::F32, c.layers, c.kv_heads, c.head_dim, windows, order).unwrap();
        let room = KvMemory::Sequences { count: 1, tokens: tokens.len() };
        let mut runner =
            Runner::new(self.backend.clone(), transformer.clone(), &layout, room, tokens.len()).unwrap();
        let mut output = StepOutput::default();
        runner.prefill(&mut Sequence::new(), tokens, &mut output, |_| ()).unwrap();
        output.logits
    }
}

/// Tokens with the uneven frequencies of a text.
fn tokens(count: usize, seed: u64) -> Vec<u32> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    (0..count).map(|_| (3.0 + 6000.0 * next().powi(4)) as u32).collect()
}

fn short() -> CalibrationOptions {
    CalibrationOptions { tokens: 1200, sequence_len: 400, sample_rows: 64, threads: 2, ..Default::default() }
}

/// Largest difference relative to the largest value.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let largest = a.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

#[test]
fn a_calibration_runs_and_its_file_serves_the_model() {
    let model = Model::load();
    let sequences = [tokens(1000, 1), tokens(700, 2)];
    let mut seen: Vec<Progress> = Vec::new();
    let transformer = model.transformer(None);
    let never = AtomicBool::new(false);
    let options = CalibrationOptions { clip: ClipPolicy::Fit, ..short() };
    let calibration = calibrate(
        &model.backend,
        &transformer,
        &model.fingerprint,
        &sequences,
        &options,
        &mut |p| seen.push(p),
        &never,
    )
    .unwrap();

    let metadata = &calibration.file.metadata;
    assert_eq!((metadata.tokens, metadata.sequences, metadata.sequence_len), (1200, 4, 400));
    assert_eq!(seen.first().map(|p| (p.stage, p.total)), Some((Stage::Running { pass: 1, passes: 1 }, 1200)));
    assert_eq!(seen.last().map(|p| (p.stage, p.done, p.total)), Some((Stage::Solving, 6, 6)));

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rotations.safetensors");
    calibration.file.save(&path).unwrap();
    let file = RotationFile::load(&path).unwrap();
    assert_eq!(file, calibration.file);
    file.check_model(&model.fingerprint, &model.config).unwrap();
    assert!(file.check_model(&"0".repeat(64), &model.config).is_err());
    let [html, json] = write_report(folder.path(), &calibration.report).unwrap();
    assert!(html.exists() && json.exists());

    // Two bits cost logits less after the calibrated rotation than after a Hadamard one.
    let snr = calibration.report.mean_snr(|h| h.quality.logits);
    println!("logits {snr:?}, values {:?}", calibration.report.mean_snr(|h| h.quality.values));
    assert!(snr.calibrated > snr.hadamard + 1.0 && snr.hadamard > 0.0, "{snr:?}");

    // With nothing quantized, a rotated model says the same.
    let text = tokens(300, 5);
    let rotated = model.transformer(Some(&file.rotations));
    let (plain, rotated) = (model.logits(&transformer, &text), model.logits(&rotated, &text));
    let error = apart(&plain, &rotated);
    assert!(error < 0.05, "rotations change the model by {error}");
}

#[test]
fn chunks_do_not_change_the_statistics() {
    let model = Model::load();
    let sequences = [tokens(500, 3), tokens(350, 4)];
    for statistic in [Statistic::Paper, Statistic::Coded] {
        let run = |chunk| {
            let options = CalibrationOptions { statistic, chunk: Some(chunk), ..short() };
            model.calibrate(&sequences, &options).unwrap().file
        };
        let (whole, parts) = (run(500), run(96));
        assert_eq!(whole.metadata, parts.metadata);
        for (a, b) in [
            (&whole.key_eigenvalues, &parts.key_eigenvalues),
            (&whole.value_eigenvalues, &parts.value_eigenvalues),
        ] {
            let error = apart(a.as_ref().unwrap(), b.as_ref().unwrap());
            assert!(error < 1e-5, "{statistic}: eigenvalues differ by {error}");
        }
        for (a, b) in whole.rotations.heads().iter().zip(parts.rotations.heads()) {
            let (a, b) = (a.key_mean.as_ref().unwrap(), b.key_mean.as_ref().unwrap());
            assert!(apart(a, b) < 1e-5);
        }
        assert_eq!(run(96), parts, "the same run gives the same file");
    }
}

#[test]
fn the_official_recipe_gives_an_official_file() {
    let model = Model::load();
    let options = CalibrationOptions { tokens: 600, sequence_len: 300, ..CalibrationOptions::official() };
    let file = model.calibrate(&[tokens(600, 6)], &options).unwrap().file;
    assert_eq!(file.metadata.granularity, Granularity::Layer);
    assert_eq!(file.metadata.composition, Composition::RHPbr.name());
    let (key, value) = file.to_zoo(false).unwrap();
    assert_eq!((key.format_version, key.objective.as_str()), (1, "qqt_r_h_pbr"));
    assert_eq!((value.format_version, value.objective.as_str()), (1, "sst_r_h_pbr"));
    assert!(key.orthogonality_error().unwrap().1 < 1e-6);
    let again = RotationFile::from_zoo(&key, &value, model.config.kv_heads).unwrap();
    assert_eq!(again.rotations, file.rotations);
    again.check_model(&model.fingerprint, &model.config).unwrap();
}

#[test]
fn wrong_input_is_refused_and_cancelling_works() {
    let model = Model::load();
    let error = model.calibrate(&[tokens(500, 1), vec![6144]], &short()).unwrap_err();
    assert!(matches!(error, CalibrateError::Token { sequence: 1, token: 6144, vocabulary: 6144 }), "{error}");
    let error = model.calibrate(&[tokens(20, 1)], &short()).unwrap_err();
    assert!(matches!(error, CalibrateError::TooFewTokens { found: 20, .. }), "{error}");
    assert!(model.calibrate(&[], &short()).is_err());

    let transformer = model.transformer(None);
    let cancelled = AtomicBool::new(false);
    let mut steps = 0;
    let result = calibrate(
        &model.backend,
        &transformer,
        &model.fingerprint,
        &[tokens(1000, 1)],
        &CalibrationOptions { chunk: Some(100), ..short() },
        &mut |_| {
            steps += 1;
            cancelled.store(steps == 3, Ordering::Relaxed);
        },
        &cancelled,
    );
    assert!(matches!(result, Err(CalibrateError::Cancelled)));
    assert_eq!(steps, 3, "it ended at the next chunk");
}
