//! The scalar CPU backend passes the checks (some of their cases, to save time).

use crate::growing::{Checks, Compared, Inspected};
use crate::{
    Extent, Report, approximate, attention, calibration, dequantized, experts, families, hybrid, model,
    pages, picks, rows, scores, sliding, views,
};
use anyhow::Result;
use oscar_backend::CacheHead;
use oscar_codec::{CodedPageId, FullPageId, KvFormat};
use oscar_kernels_cpu::backend::{CpuBackend, CpuPages, Mode};
use oscar_kernels_cpu::{Kernels, Variant};
use oscar_kernels_cuda::Storage;

impl Inspected for CpuPages {
    fn storage(&self) -> Storage {
        if self.layout().coded().is_some() { Storage::Codes } else { Storage::Bf16 }
    }

    fn history_page(&self, head: CacheHead, id: u32) -> Result<Option<Vec<u8>>> {
        // Only formats with GPU kernels have codes on a GPU.
        let compares = Storage::of(self.layout())? == Storage::Codes;
        Ok(compares.then(|| self.coded_page(head.layer, head.kv_head, CodedPageId(id)).to_vec()))
    }

    fn full_page(&self, head: CacheHead, id: FullPageId) -> Result<Vec<u8>> {
        Ok(CpuPages::full_page(self, head.layer, head.kv_head, id).to_vec())
    }

    fn set_full_page(&mut self, head: CacheHead, id: FullPageId, page: &[u8]) -> Result<()> {
        self.layer_mut(head.layer).1[head.kv_head].page_mut(id.0).copy_from_slice(page);
        Ok(())
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

/// BF16 weights and activations against f32: rounding alone stays within what the check of families
/// allows.
#[test]
fn the_cpu_passes_the_check_of_families() {
    let mut report = Report::default();
    let rounded = || Ok(CpuBackend::new(Kernels::chosen()?, 2, Mode::Fast)?);
    families::check_on(|| Ok(cpu()), rounded, Extent::WHOLE, &mut report).unwrap();
    assert_near(&report, 32);
}

/// The same for families with sliding windows.
#[test]
fn the_cpu_passes_the_check_of_families_with_sliding_windows() {
    let mut report = Report::default();
    let rounded = || Ok(CpuBackend::new(Kernels::chosen()?, 2, Mode::Fast)?);
    families::check_sliding_on(|| Ok(cpu()), rounded, Extent::WHOLE, &mut report).unwrap();
    assert_near(&report, 12);
}

fn assert_near(report: &Report, findings: usize) {
    for f in &report.findings {
        println!("{}: {} cases, {:.0} % of allowed", f.name, f.cases, 100.0 * f.worst);
        assert_eq!(f.failure, None, "{}", f.name);
    }
    assert_eq!(report.findings.len(), findings);
}

/// The same for the models that are checked with experts on the CPU.
#[test]
fn the_cpu_passes_the_check_of_models_with_experts() {
    let mut report = Report::default();
    let rounded = || Ok(CpuBackend::new(Kernels::chosen()?, 2, Mode::Fast)?);
    hybrid::models_on(|| Ok(cpu()), rounded, Extent::WHOLE, &mut report).unwrap();
    assert_near(&report, 10);
}

#[test]
fn the_cpu_passes_the_checks_of_views() {
    let mut report = Report::default();
    let checks = views::checks("views, decode attention", "views, prefill attention", 0);
    views::check(&cpu(), checks, one_in(3), &mut report).unwrap();
    let exact = ["views, gathered codes", "views, rows read back", "views, everything kept is the base"];
    assert_passes(&report, &exact[..2]);
    assert_passes(&report, &["views, decode attention", "views, prefill attention"]);
    assert!(report.findings.iter().any(|f| f.name == exact[2]));
}

#[test]
fn the_cpu_passes_the_checks_of_sliding_windows_and_sinks() {
    let mut report = Report::default();
    sliding::check(&cpu(), sliding::AUTO, 0, one_in(7), &mut report).unwrap();
    for f in &report.findings {
        println!("{}: {} cases, {:.0} % of allowed", f.name, f.cases, 100.0 * f.worst);
    }
    assert_passes(
        &report,
        &[
            "sliding windows, decode",
            "sliding windows, prefill",
            "sinks, decode",
            "sinks, prefill",
            "sinks and sliding windows, decode",
            "sinks and sliding windows, prefill",
            "sinks under centred keys",
        ],
    );
}

#[test]
fn the_cpu_passes_the_checks_of_what_some_families_need() {
    let mut report = Report::default();
    rows::embeddings(&cpu(), &mut report).unwrap();
    rows::other_outputs(&cpu(), &mut report).unwrap();
    experts::check_general(&cpu(), Extent::SMALL, &mut report).unwrap();
    assert_passes(&report, &["product with a norm of its result", "product with a gate, Clamped"]);
    assert!(report.findings.iter().any(|f| f.name == "experts, Mxfp4, Clamped with biases"));
}

#[test]
fn the_cpu_passes_the_checks_of_scores() {
    let mut report = Report::default();
    scores::check(&cpu(), one_in(11), &mut report).unwrap();
    let names = ["sums", "maxima", "some positions", "pieces", "views", "codes in the window"];
    assert_passes(&report, &names.map(|name| format!("scores, {name}")).each_ref().map(String::as_str));
    assert!(report.findings.iter().any(|f| f.name == "scores, pieces are the whole"));
}

#[test]
fn the_cpu_passes_the_checks_of_codes_in_the_window() {
    let mut report = Report::default();
    approximate::check(&cpu(), 0, one_in(5), &mut report).unwrap();
    assert_passes(
        &report,
        &[
            "approximate hit, codes",
            "approximate hit, decode attention",
            "approximate hit, prefill attention",
        ],
    );
}

#[test]
fn the_cpu_passes_the_checks_of_dequantized_formats() {
    let mut report = Report::default();
    dequantized::check(&cpu(), one_in(5), &mut report).unwrap();
    assert_passes(
        &report,
        &[
            "dequantized formats run",
            "dequantized formats, decode attention",
            "dequantized formats, prefill attention",
        ],
    );
}

#[test]
fn the_cpu_passes_the_checks_of_demotion_and_attention() {
    let mut report = Report::default();
    attention::check(&cpu(), attention::FAST, one_in(11), &mut report).unwrap();
    assert_passes(&report, &["demote, codes", "decode attention", "prefill attention"]);
}

#[test]
fn only_the_wanted_part_is_compared() {
    let compared = Compared { decode: true, ..Compared::NOTHING };
    let wanted = Checks { compared, ..attention::FAST };
    let mut report = Report::default();
    attention::check(&cpu(), wanted, Extent::SMALL, &mut report).unwrap();
    assert_eq!(report.findings.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(), ["decode attention"]);
}

#[test]
fn the_cpu_passes_the_checks_of_copied_blocks() {
    let mut report = Report::default();
    pages::check(&cpu(), one_in(2), &mut report).unwrap();
    assert_passes(&report, &["copied blocks", "attention over copied blocks"]);
}

#[test]
fn the_cpu_passes_the_checks_of_picks() {
    let mut report = Report::default();
    picks::check(&cpu(), Extent::WHOLE, &mut report).unwrap();
    assert_passes(&report, &["picks, greedy", "picks, top", "picks, lists that came"]);
}

#[test]
fn the_cpu_passes_the_checks_of_a_model() {
    let model = model::EmbeddedModel::open(None).unwrap();
    let cpu = || CpuBackend::new(Kernels::chosen().unwrap(), 2, Mode::Bf16).unwrap();
    let prompt: Vec<u32> = (20..420).collect();
    let mut report = Report::default();
    let mut runner = model.runner(cpu(), KvFormat::OSCAR2, None).unwrap();
    model::picked(&mut runner, &prompt, 12, KvFormat::OSCAR2, &mut report).unwrap();
    assert_passes(&report, &["model picked tokens, oscar2"]);
    let mut runner = model.runner(cpu(), KvFormat::OSCAR2, Some(model::NARROW)).unwrap();
    model::interleaved(&mut runner, &prompt, 4, KvFormat::OSCAR2, &mut report).unwrap();
    assert!(report.findings.iter().all(|f| f.failure.is_none() && f.cases > 0));
    assert!(report.findings.iter().any(|f| f.name == "model interleaved steps, oscar2"));
}

#[test]
fn the_cpu_passes_the_checks_of_calibration() {
    let mut report = Report::default();
    calibration::check_recode(&cpu(), one_in(3), &mut report).unwrap();
    calibration::check_divergence(&cpu(), Extent::SMALL, &mut report).unwrap();
    assert_passes(&report, &["recoded rows", "divergence of rows"]);
}
