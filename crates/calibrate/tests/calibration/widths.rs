//! Tables of widths for whole models: whatever the mean, what is stored passed its verification,
//! and what is refused says why.

use crate::support::backend;
use oscar_calibrate::bits::{Freedom, Watch, solve};
use oscar_calibrate::{
    CalibratedModel, CalibrationOptions, ModelOptions, ProbeKind, RotationFile, Subject, WidthOptions,
    calibrate_model,
};
use oscar_codec::MeanBits;
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, Weights};
use oscar_text::ModelText;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

pub struct Model {
    pub backend: Arc<CpuBackend>,
    pub config: DecoderConfig,
    pub weights: Weights,
    text: ModelText,
}

fn embedded() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m")
}

impl Model {
    /// A model with the tokenizer of the embedded one.
    pub fn load(folder: &Path) -> Self {
        let source = ModelSource::Dir(folder.to_owned());
        let read = |name: &str| std::fs::read(embedded().join(name)).unwrap();
        let config = read("tokenizer_config.json");
        Self {
            backend: Arc::new(backend(Mode::Bf16)),
            config: DecoderConfig::load(&source).unwrap(),
            weights: Weights::open(&source).unwrap(),
            text: ModelText::from_files(&read("tokenizer.json"), Some(&config), None).unwrap(),
        }
    }

    pub fn calibrate(
        &self,
        start: Option<RotationFile>,
        widths: WidthOptions,
    ) -> (CalibratedModel, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        let subject = Subject {
            backend: &self.backend,
            config: &self.config,
            weights: &self.weights,
            text: &self.text,
            name: "test",
        };
        let rotations = CalibrationOptions { tokens: 1200, sequence_len: 400, ..Default::default() };
        let options = ModelOptions { rotations, widths: Some(widths), ..Default::default() };
        let (notes, never) = (Notes::default(), AtomicBool::new(false));
        let state = folder.path().join("harm.jsonl");
        let result = calibrate_model(&subject, start, &options, &state, &notes, &never).unwrap();
        (result, notes.0.into_inner().unwrap())
    }
}

#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Watch for Notes {
    fn begin(&self, _: &'static str, _: usize) {}
    fn advance(&self, _: usize) {}
    fn end(&self) {}
    fn note(&self, text: String) {
        self.0.lock().unwrap().push(text);
    }
}

pub fn means(names: &[&str]) -> Vec<MeanBits> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

/// As little as shows a broken table: a copied passage, and the two tasks that only verify.
pub fn short(means: Vec<MeanBits>) -> WidthOptions {
    WidthOptions {
        probe_tokens: 1024,
        probes: 1,
        kinds: vec!["copy".parse::<ProbeKind>().unwrap()],
        measured: vec![2],
        refine_rounds: 0,
        ..WidthOptions::of_means(means)
    }
}

/// Each mean has a table that passed and fits, or a reason.
pub fn check(result: &CalibratedModel, asked: &[MeanBits], head_dim: usize) {
    for mean in asked {
        let table = result.chosen.iter().find(|c| c.mean == *mean);
        let refused = result.refused.iter().find(|r| r.mean == *mean);
        match (table, refused) {
            (Some(chosen), None) => {
                assert!(chosen.table.mean_bits(head_dim) <= mean.bits() + 1e-6, "{mean}: {:?}", chosen.table);
                assert_eq!(chosen.scores.broken(), [], "{mean}");
                assert_eq!(result.file.bits.table(*mean), Some(&chosen.table), "{mean} is stored");
            }
            (None, Some(refused)) => {
                assert!(refused.reason.contains("KL"), "{mean}: {}", refused.reason);
                assert_eq!(result.file.bits.table(*mean), None, "{mean} must not be stored");
            }
            other => panic!("{mean}: {other:?}"),
        }
    }
}

#[test]
fn no_mean_of_the_embedded_model_breaks_silently() {
    let model = Model::load(&embedded());
    let shipped = || RotationFile::load(&embedded().join("rotations.safetensors")).unwrap();
    let asked = means(&["1.75", "2.25", "3.25"]);
    let (result, notes) =
        model.calibrate(Some(shipped()), WidthOptions { reuse_harms: true, ..short(asked.clone()) });
    check(&result, &asked, model.config.head_dim);
    let found: Vec<MeanBits> = result.chosen.iter().map(|c| c.mean).collect();
    assert_eq!(found, asked, "this model has a table for each: {:?} {notes:?}", result.refused);

    // One bit for every head: there is nothing to repair it with.
    let one = WidthOptions {
        freedom: Freedom { widths: vec![1], ..Freedom::default() },
        reuse_harms: true,
        ..short(means(&["1.25"]))
    };
    let (result, _) = model.calibrate(Some(shipped()), one);
    check(&result, &means(&["1.25"]), model.config.head_dim);
    let reason = &result.refused.first().expect("one bit everywhere is refused").reason;
    assert!(reason.contains("copy"), "{reason}");
}

/// Harms that call the keys of two heads harmless: one copies, one retrieves. The solver gives them
/// one bit, and only the verification can see what that does.
#[test]
fn a_table_of_doctored_harms_is_repaired_or_refused() {
    let model = Model::load(&embedded());
    let mut doctored = RotationFile::load(&embedded().join("rotations.safetensors")).unwrap();
    let (copies, retrieves) = (2 * 2 * 2, 2 * 4 * 2);
    let harm = doctored.bits.harm.as_mut().unwrap();
    [copies, retrieves].into_iter().for_each(|unit| harm.harm[unit] = [0.0; 4]);
    let asked = means(&["2.25"]);
    let blind = solve(harm, asked[0], model.config.head_dim, &Freedom::default()).unwrap();
    assert_eq!([copies, retrieves].map(|unit| blind.units()[unit]), [1, 1], "{blind:?}");
    let options = WidthOptions { reuse_harms: true, ..short(asked.clone()) };
    let (result, notes) = model.calibrate(Some(doctored), options);
    check(&result, &asked, model.config.head_dim);
    assert!(result.chosen.iter().all(|c| c.table != blind && c.repairs > 0), "{:?}", result.chosen);
    assert!(notes.iter().any(|note| note.contains("copy") && note.ends_with("repairing")), "{notes:?}");
}

/// Biases and no QK-norm; random weights show the mechanics, not the quality.
#[test]
fn a_qwen2_model_goes_the_whole_way() {
    let folder = tempfile::tempdir().unwrap();
    let config = DecoderConfig { vocab_size: 6144, head_dim: 128, ..tiny_config(Family::Qwen2) };
    assert!(config.qkv_bias);
    write_random_model(folder.path(), &config, WriteOptions::default(), 7).unwrap();
    let model = Model::load(folder.path());
    let asked = means(&["1.75", "2.25"]);
    let kinds = ["echo", "copy"].map(|kind| kind.parse::<ProbeKind>().unwrap()).to_vec();
    let options = WidthOptions { kinds, refine_rounds: 1, ..short(asked.clone()) };
    let (result, notes) = model.calibrate(None, options.clone());
    check(&result, &asked, config.head_dim);
    assert!(notes[0].starts_with("work: at most ") && notes[0].contains("thousand tokens"), "{notes:?}");
    assert!(notes[1].starts_with("measuring 8 units"), "{notes:?}");
    // Every distance is verified, however few probes there are.
    for chosen in &result.chosen {
        let groups: Vec<&str> = chosen.scores.groups().map(|g| g.name).collect();
        for wanted in ["copy", "echo_far", "echo_middle", "echo_near", "memory", "niah_multiquery"] {
            assert!(groups.contains(&wanted), "{wanted}: {groups:?}");
        }
    }
    // Wider codes are for those who ask.
    assert!(result.chosen.iter().all(|c| c.table.units().iter().all(|w| *w <= 4)));
    let freedom = Freedom { widths: vec![0, 1, 2, 3, 4, 5], ..Freedom::default() };
    let wide = means(&["4.25"]);
    let (result, _) = model.calibrate(
        Some(result.file),
        WidthOptions { means: wide.clone(), freedom, reuse_harms: true, ..options },
    );
    check(&result, &wide, config.head_dim);
    assert!(result.chosen.iter().any(|c| c.table.units().contains(&5)), "{:?}", result.chosen);
}
