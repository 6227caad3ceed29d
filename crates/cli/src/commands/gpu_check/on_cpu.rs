//! The checks themselves, checked: the scalar CPU backend passes them (a part of them, to save time).

use super::growing::Inspected;
use super::{Extent, Report, cache, decoded, model, picks, tails};
use crate::options::{Device, ModelArgs, PrecisionArg};
use anyhow::Result;
use oscar_backend::CacheHead;
use oscar_codec::{CodedPageId, KvFormat};
use oscar_kernels_cpu::backend::{CpuBackend, CpuPages, Mode};
use oscar_kernels_cpu::{Kernels, Variant};
use oscar_kernels_cuda::storage::Storage;

impl Inspected for CpuPages {
    fn storage(&self) -> Storage {
        if self.layout().coded().is_some() { Storage::Codes } else { Storage::Plain }
    }

    fn history_page(&self, head: CacheHead, id: u32) -> Result<Option<Vec<u8>>> {
        // Formats without GPU kernels have no codes on a GPU that these could be compared like.
        let compares = Storage::of(self.layout())? == Storage::Codes;
        Ok(compares.then(|| self.coded_page(head.layer, head.kv_head, CodedPageId(id)).to_vec()))
    }
}

fn cpu() -> CpuBackend {
    CpuBackend::new(Kernels::for_variant(Variant::Scalar).unwrap(), 2, Mode::F32).unwrap()
}

fn one_in(every: u64) -> Extent {
    Extent { every, small: false }
}

fn assert_passes(report: &Report, names: &[&str]) {
    for finding in &report.findings {
        assert_eq!(finding.failure, None, "{}", finding.name);
    }
    for name in names {
        assert!(report.findings.iter().any(|f| f.name == *name && f.cases > 10), "{name} was not checked");
    }
}

#[test]
fn the_cpu_passes_the_checks_of_demoted_tails() {
    let mut report = Report::default();
    tails::check(&cpu(), one_in(5), &mut report).unwrap();
    assert_passes(
        &report,
        &["demoted tail, codes", "demoted tail, attention, decode", "demoted tail, attention, prefill"],
    );
}

#[test]
fn the_cpu_passes_the_checks_of_generic_formats() {
    let mut report = Report::default();
    decoded::check(&cpu(), one_in(5), &mut report).unwrap();
    assert_passes(
        &report,
        &["generic formats run", "generic formats, attention, decode", "generic formats, attention, prefill"],
    );
}

#[test]
fn the_cpu_passes_the_checks_of_codes() {
    let mut report = Report::default();
    cache::check(&cpu(), one_in(11), &mut report).unwrap();
    assert_passes(&report, &["demoted codes", "attention, decode", "attention, prefill"]);
}

#[test]
fn the_cpu_passes_the_checks_of_picks() {
    let mut report = Report::default();
    picks::check(&cpu(), Extent::WHOLE, &mut report).unwrap();
    assert_passes(&report, &["picks, greedy", "picks, top", "picks, lists that came"]);
}

#[test]
fn the_cpu_passes_the_check_of_picked_tokens() {
    let args = ModelArgs {
        model: None,
        device: Device::Cpu,
        threads: Some(2),
        precision: PrecisionArg::Bf16,
        weights: None,
    };
    let opened = args.open().unwrap();
    let mut runner = model::runner(&opened, KvFormat::OSCAR2, None, args.backend().unwrap()).unwrap();
    let prompt: Vec<u32> = (20..420).collect();
    let mut report = Report::default();
    model::picked(&mut runner, &prompt, 12, KvFormat::OSCAR2, &mut report).unwrap();
    assert_passes(&report, &["model picked tokens, oscar2"]);
    let narrow = Some(model::NARROW);
    let mut runner = model::runner(&opened, KvFormat::OSCAR2, narrow, args.backend().unwrap()).unwrap();
    model::foreseen(&mut runner, &prompt, 4, KvFormat::OSCAR2, &mut report).unwrap();
    assert!(report.findings.iter().all(|f| f.failure.is_none() && f.cases > 0));
    assert!(report.findings.iter().any(|f| f.name == "model foreseen steps, oscar2"));
}
