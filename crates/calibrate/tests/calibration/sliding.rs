//! Widths for models with sliding layers: those of the other layers, and nothing else.

use crate::support::backend;
use crate::widths::{Model, check, means, short};
use oscar_backend::{Divergence, argmax};
use oscar_calibrate::bits::{Freedom, WidthTable};
use oscar_calibrate::{CodeRounding, RotationFile, WidthOptions};
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, RotationSet, Windows};
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::tiny::{WriteOptions, tiny_config, write_random_model};
use oscar_models::{DecoderConfig, Family, ModelSource, SlidingLayers, Transformer, Weights};
use oscar_runner::{KvMemory, Logits, Runner, Sequence, StepOutput, StepRequest, Trials};
use safetensors::SafeTensors;
use std::path::Path;
use std::sync::Arc;

const FAMILIES: [Family; 2] = [Family::Gemma3, Family::GptOss];

/// Layers 0 and 2 of four slide. Their window is longer than the recent one: it reaches into history.
fn config(family: Family) -> DecoderConfig {
    let tiny = tiny_config(family);
    let sliding = tiny.sliding.clone();
    DecoderConfig {
        vocab_size: 6144,
        head_dim: 128,
        layers: 4,
        sliding: sliding.map(|sliding| SlidingLayers { window: 400, layers: vec![0, 2], ..sliding }),
        ..tiny
    }
}

fn folder(family: Family) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_random_model(folder.path(), &config(family), WriteOptions::default(), 3).unwrap();
    folder
}

/// The cache of a model with a table of widths, or with a format of its own.
fn layout(config: &DecoderConfig, format: KvFormat, table: Option<&WidthTable>) -> CacheLayout {
    let layout = config.cache_layout(format, Windows::default(), CodeLayout::CpuTile).unwrap();
    match table.map(|table| table.formats(&layout).unwrap()) {
        Some(formats) => layout.with_coded_table(formats),
        None => layout,
    }
}

fn runner(model: &Model, rotations: &RotationSet, layout: &CacheLayout) -> Runner<CpuBackend> {
    let Model { backend, config, weights, .. } = model;
    let transformer = Transformer::build(&**backend, config, weights, Some(rotations), 1024, |_| ()).unwrap();
    let memory = KvMemory::Sequences { count: 3, tokens: 1024 };
    Runner::new(backend.clone(), transformer, layout, memory, 256).unwrap()
}

fn prompt() -> Vec<u32> {
    (0..700).map(|i| 3 + (i * i * 31 + i * 7) % 6000).collect()
}

/// The logits after the prompt and after each of the greedy tokens that follow it, and these tokens.
fn greedy(runner: &mut Runner<CpuBackend>) -> (Vec<u32>, Vec<u32>) {
    let (mut sequence, mut output) = (Sequence::new(), StepOutput::default());
    let (mut tokens, mut next, mut bits) = (Vec::new(), prompt(), Vec::new());
    for _ in 0..8 {
        for part in next.chunks(256) {
            let request = StepRequest { sequence: &mut sequence, tokens: part, logits: Logits::Last };
            runner.step(&mut [request], &mut output).unwrap();
        }
        bits.extend(output.logits.iter().map(|logit| logit.to_bits()));
        next = vec![argmax(&output.logits)];
        tokens.extend(&next);
    }
    (tokens, bits)
}

#[test]
fn the_search_gives_widths_to_the_layers_that_do_not_slide() {
    // Random weights break easily, but not with four bits in all units.
    let asked = means(&["3.25", "4.25"]);
    let options = WidthOptions { refine_rounds: 1, ..short(asked.clone()) };
    let mut made: Vec<(tempfile::TempDir, Model, RotationFile)> = Vec::new();
    for family in FAMILIES {
        let folder = folder(family);
        let model = Model::load(folder.path());
        let (result, notes) = model.calibrate(None, options.clone());
        check(&result, &asked, 128);
        assert!(result.chosen.iter().any(|c| c.mean == asked[1]), "{family:?}: {:?}", result.refused);
        // Two layers of two heads with two sides.
        assert!(notes[1].starts_with("measuring 8 units"), "{notes:?}");
        let plan = &result.file.bits;
        assert_eq!(plan.layers, [1, 3]);
        let harm = plan.harm.as_ref().unwrap();
        assert_eq!((harm.units(), harm.absent.len()), (8, 4));
        assert!(harm.harm.iter().all(|unit| unit[0] > 0.0), "every unit was measured: {harm:?}");
        // One is what two bits in all units do together. It is far more if the windows are touched.
        let sum: f32 = harm.harm.iter().map(|unit| unit[1]).sum();
        assert!((0.3..3.0).contains(&sum), "{sum}: {harm:?}");
        for chosen in &result.chosen {
            let units = chosen.table.units();
            assert_eq!(units.len(), 8);
            let described = chosen.table.describe(&plan.layers);
            assert!(described.starts_with("L1 K") && described.contains(" · L3 K"), "{described}");
            // A row of 128 codes of b bits and 32 bits of scale and minimum, over 128 elements.
            let stored: f64 = units.iter().map(|&b| if b == 0 { 0.0 } else { f64::from(b) + 0.25 }).sum();
            let applied = layout(&model.config, KvFormat::OSCAR, Some(&chosen.table));
            assert_eq!(applied.page_bits(), stored / 8.0, "{described}");
            // 64 tokens of two layers with two heads: no byte for the sliding layers.
            assert_eq!(applied.coded_block_bytes() as f64, stored * 64.0 * 128.0 / 8.0, "{described}");
        }
        let path = folder.path().join("rotations.safetensors");
        result.file.save(&path).unwrap();
        assert_eq!(RotationFile::load(&path).unwrap().bits, result.file.bits);
        made.push((folder, model, result.file));
    }
    // The two models have the same sizes: the weights tell whose file it is.
    let [(_, gemma, of_gemma), (_, oss, of_oss)] = &made[..] else { panic!("two models") };
    for (model, file) in [(gemma, of_oss), (oss, of_gemma)] {
        let error = file.check_model(&model.weights.fingerprint(), &model.config).unwrap_err().to_string();
        assert!(error.contains("the model's are"), "{error}");
    }
    // The same weights with other sliding layers.
    let mut other = gemma.config.clone();
    other.sliding.as_mut().unwrap().layers = vec![0, 1];
    let error = of_gemma.check_model(&gemma.weights.fingerprint(), &other).unwrap_err().to_string();
    assert!(
        error.contains("widths for layers [1, 3]") && error.contains("quantizes layers [2, 3]"),
        "{error}"
    );
}

/// Four bits in all units are the format `oscar4`, to the bit; other widths are not.
#[test]
fn a_table_of_four_bits_answers_as_oscar4() {
    let four = Freedom { widths: vec![4], ..Freedom::default() };
    let options =
        WidthOptions { freedom: four, rounding: Some(CodeRounding::Nearest), ..short(means(&["4.25"])) };
    for family in FAMILIES {
        let folder = folder(family);
        let model = Model::load(folder.path());
        let (result, _) = model.calibrate(None, options.clone());
        let table = &result.chosen.first().expect("four bits break nothing").table;
        assert_eq!(table, &WidthTable::uniform(2, 2, 4));
        let answer = |format, table: Option<&WidthTable>| {
            let layout = layout(&model.config, format, table);
            (layout.page_bits(), greedy(&mut runner(&model, &result.file.rotations, &layout)))
        };
        let oscar4 = answer(KvFormat::Oscar { bits: 4 }, None);
        assert_eq!(oscar4.0, 4.25);
        assert!(answer(KvFormat::OSCAR, Some(table)) == oscar4, "{family:?}");
        let mut narrow = table.clone();
        narrow.widths[3].1 = 1;
        let narrow = answer(KvFormat::OSCAR, Some(&narrow));
        assert_eq!(narrow.0, 4.25 - 3.0 / 8.0);
        assert!(narrow.1.1 != oscar4.1.1, "{family:?}: values of layer 3, head 1 are read");
        assert!(answer(KvFormat::Bf16, None).1.1 != oscar4.1.1, "{family:?}: codes are read");
    }
}

/// A head without history beside sliding layers: a stored prefix continues as a cold run does.
#[test]
fn zero_width_heads_and_windows_resume_to_the_bit() {
    for family in FAMILIES {
        let folder = folder(family);
        let model = Model::load(folder.path());
        let table = WidthTable::from_units(2, 2, &[4, 4, 0, 0, 2, 2, 2, 2]);
        let layout = layout(&model.config, KvFormat::OSCAR, Some(&table));
        assert!(!layout.keeps_all_history());
        let c = &model.config;
        let hadamard = RotationSet::hadamard(c.layers, c.kv_heads, c.head_dim).unwrap();
        let mut runner = runner(&model, &hadamard, &layout);
        let (prompt, mut output) = (prompt(), StepOutput::default());
        let mut cold = Sequence::forkable(&runner);
        runner.prefill(&mut cold, &prompt, &mut output, |_| {}).unwrap();
        let mut warm = runner.fork(&cold, 576).unwrap();
        let mut after = |sequence: &mut Sequence, tokens: &[u32]| {
            let request = StepRequest { sequence, tokens, logits: Logits::Last };
            runner.step(&mut [request], &mut output).unwrap();
            output.logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>()
        };
        let next = [&prompt[576..], &[17]].concat();
        assert!(after(&mut warm, &next) == after(&mut cold, &[17]), "{family:?}");
    }
}

/// Gives the sinks of a layer another value.
fn set_sinks(folder: &Path, layer: usize, value: f32) {
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let name = format!("model.layers.{layer}.self_attn.sinks");
    let place = {
        let data = SafeTensors::deserialize(&bytes).unwrap().tensor(&name).unwrap().data().as_ptr_range();
        let start = bytes.as_ptr();
        data.start as usize - start as usize..data.end as usize - start as usize
    };
    for pair in bytes[place].chunks_exact_mut(2) {
        pair.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
    }
    std::fs::write(path, bytes).unwrap();
}

/// A sink that takes all weight leaves none for the history: then its codes do no harm. Without the
/// sink they do.
#[test]
fn harm_counts_the_attention_sinks() {
    let harm = |sinks: f32| {
        let folder = folder(Family::GptOss);
        set_sinks(folder.path(), 1, sinks);
        let source = ModelSource::Dir(folder.path().to_owned());
        let (weights, c) = (Weights::open(&source).unwrap(), DecoderConfig::load(&source).unwrap());
        let backend = Arc::new(backend(Mode::Bf16));
        let hadamard = RotationSet::hadamard(c.layers, c.kv_heads, c.head_dim).unwrap();
        let model = Transformer::build(&*backend, &c, &weights, Some(&hadamard), 1024, |_| ()).unwrap();
        let (windows, order) = (Windows::unlimited(), CodeLayout::Logical);
        let layout =
            CacheLayout::new(KvFormat::OSCAR2, c.layers, c.kv_heads, c.head_dim, windows, order).unwrap();
        let memory = KvMemory::Bytes(Trials::<CpuBackend>::bytes(&layout, 704, 256, 2, 2));
        let mut runner = Runner::new(backend, model, &layout, memory, 512).unwrap();
        let (prompt, mut sequence) = (prompt(), Sequence::new());
        let prefix = StepRequest { sequence: &mut sequence, tokens: &prompt[..512], logits: Logits::None };
        runner.step(&mut [prefix], &mut StepOutput::default()).unwrap();
        let mut trials = Trials::new(&mut runner, sequence, &prompt[512..], 64..448, 20..80).unwrap();
        trials.set(0, 1, &[(1, 1), (1, 1)]).unwrap();
        let mut found: Vec<Divergence> = Vec::new();
        trials.run(1, 1, |_, layer| (layer == 1).then_some(0), &mut found).unwrap();
        found.iter().map(|d| d.kl).sum::<f64>() / found.len() as f64
    };
    let (without, with) = (harm(-60.0), harm(60.0));
    assert!(without > 1e-6 && with < 1e-3 * without, "{without:e} without sinks, {with:e} behind them");
}
