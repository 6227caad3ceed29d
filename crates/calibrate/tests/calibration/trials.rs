//! Readings of one ending over versions of its history.

use crate::support::backend;
use oscar_backend::Divergence;
use oscar_codec::{CacheLayout, CodeLayout, KvFormat, RotationKind, Windows};
use oscar_kernels_cpu::backend::{CpuBackend, Mode};
use oscar_models::{DecoderConfig, ModelSource, Transformer, Weights};
use oscar_runner::{KvMemory, Logits, Runner, Sequence, StepOutput, StepRequest, Trials};
use std::path::PathBuf;
use std::sync::Arc;

fn runner() -> Runner<CpuBackend> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/oscar-15m");
    let source = ModelSource::Dir(folder);
    let (weights, c) = (Weights::open(&source).unwrap(), DecoderConfig::load(&source).unwrap());
    let backend = Arc::new(backend(Mode::Bf16));
    let rotations = RotationKind::Hadamard.data_free(c.layers, c.kv_heads, c.head_dim).unwrap();
    let model = Transformer::build(&*backend, &c, &weights, rotations.as_ref(), 1024, |_| ()).unwrap();
    let (windows, order) = (Windows::unlimited(), CodeLayout::Logical);
    let layout =
        CacheLayout::new(KvFormat::OSCAR2, c.layers, c.kv_heads, c.head_dim, windows, order).unwrap();
    let memory = KvMemory::Bytes(Trials::<CpuBackend>::bytes(&layout, 640, 128, 4, 4));
    Runner::new(backend, model, &layout, memory, 512).unwrap()
}

#[test]
fn readings_depend_on_their_own_version_alone() {
    let mut runner = runner();
    let tokens: Vec<u32> = (0..500).map(|i| 3 + (i * i * 31 + i * 7) % 6000).collect();
    let mut sequence = Sequence::new();
    let prefix = StepRequest { sequence: &mut sequence, tokens: &tokens[..448], logits: Logits::None };
    runner.step(&mut [prefix], &mut StepOutput::default()).unwrap();
    let mut trials = Trials::new(&mut runner, sequence, &tokens[448..], 64..400, 20..52).unwrap();
    let run = |trials: &mut Trials<'_, CpuBackend>,
               first,
               count,
               version: &dyn Fn(usize, usize) -> Option<usize>| {
        let mut found = Vec::new();
        trials.run(first, count, version, &mut found).unwrap();
        assert_eq!(found.len(), 32 * count);
        found
    };
    let total = |found: &[Divergence]| found.iter().map(|d| d.kl).sum::<f64>();

    let exact = run(&mut trials, 0, 2, &|_, _| None);
    assert!(exact.iter().all(|d| d.kl == 0.0 && d.agrees), "nothing changed: {exact:?}");
    trials.set(0, 2, &[(0, 0), (0, 0)]).unwrap();
    assert!(total(&run(&mut trials, 2, 1, &|_, l| (l == 2).then_some(0))) == 0.0, "a copy is exact");

    trials.set(0, 2, &[(2, 0), (0, 0)]).unwrap();
    trials.set(1, 2, &[(1, 0), (0, 0)]).unwrap();
    let in_layer_two = |r: usize, l: usize| (l == 2).then_some(r);
    let both = run(&mut trials, 2, 2, &in_layer_two);
    assert!(
        total(&both[32..]) > total(&both[..32]) && total(&both[..32]) > 0.0,
        "one bit harms more than two"
    );
    let alone = run(&mut trials, 2, 1, &|_, l| (l == 2).then_some(1));
    assert_eq!(alone, both[32..], "a batch changes nothing");
    let from_the_start = run(&mut trials, 0, 2, &in_layer_two);
    assert_eq!(from_the_start, both, "layers before the change need not be computed");

    // A version in all layers, then changes of single layers in its company.
    for layer in 0..6 {
        trials.set(2, layer, &[(2, 2), (2, 2)]).unwrap();
    }
    let all = run(&mut trials, 0, 1, &|_, _| Some(2));
    trials.start_from(2).unwrap();
    assert_eq!(run(&mut trials, 4, 1, &|_, _| Some(2)), all, "inputs are those of the version");
    let wider = run(&mut trials, 2, 1, &|_, l| if l == 2 { None } else { Some(2) });
    assert!(total(&wider) != total(&all));
}
