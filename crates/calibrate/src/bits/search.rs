//! The search for widths, from probes to verified tables.

use super::checkpoint::{Checkpoint, Key};
use super::{
    Freedom, HarmMap, HarmOptions, Judge, Probe, RefineOptions, Refined, Scores, WidthTable, absent_harm,
    probe_harm, refine, solve,
};
use crate::{CalibrateError, CodeRounding, Metadata};
use oscar_backend::Calibrates;
use oscar_codec::MeanBits;
use std::path::Path;

/// Receives the progress of a search, which may take hours.
pub trait Watch {
    /// A stage of `passes` passes begins.
    fn begin(&self, stage: &'static str, passes: usize);
    fn advance(&self, passes: usize);
    fn end(&self);
    fn note(&self, text: String);
}

/// A search for the widths of least harm.
pub struct Search<'a, B: Calibrates> {
    pub judge: Judge<'a, B>,
    pub harm: HarmOptions,
    pub freedom: Freedom,
    /// Passes in which bits are moved between units that interact.
    pub refine_rounds: usize,
    pub rounding: CodeRounding,
    /// Probes that tables are chosen on.
    pub probes: &'a [Probe],
    /// Other probes, which tables are verified on.
    pub fresh: &'a [Probe],
    pub watch: &'a dyn Watch,
}

/// One chosen table and what it does.
pub struct Chosen {
    pub mean: MeanBits,
    pub table: WidthTable,
    /// Uniform two bits beside it, on the same probes.
    pub uniform: Scores,
    pub scores: Scores,
    pub tried: usize,
}

impl Chosen {
    /// Harm on fresh probes as a share of that of two bits everywhere.
    pub fn harm(&self) -> f64 {
        self.scores.relative_to(&self.uniform)
    }
}

/// A mean for which no table can be trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub mean: MeanBits,
    pub reason: String,
}

/// A candidate table of one mean.
struct Candidate {
    mean: MeanBits,
    start: WidthTable,
    refined: Option<Refined>,
}

impl<B: Calibrates> Search<'_, B> {
    /// Measures the harm of every unit on every probe. Finished probes are stored in a checkpoint.
    pub fn measure_harms(&self, metadata: &Metadata, checkpoint: &Path) -> Result<HarmMap, CalibrateError> {
        let config = self.judge.transformer.config();
        let passes = self.harm.passes(config.layers, config.kv_heads);
        let tokens: usize = self.probes.iter().map(|p| p.tokens.len()).sum();
        self.watch.note(format!(
            "harm of {} units at {} widths: {} probes, {tokens} tokens of exact prefill, then {} short passes",
            2 * config.layers * config.kv_heads,
            self.harm.measured.len(),
            self.probes.len(),
            self.probes.len() * passes,
        ));
        let mut stored = Checkpoint::open(checkpoint)?;
        if stored.len() > 0 {
            self.watch.note(format!("{}: {} results of before are used", checkpoint.display(), stored.len()));
        }
        let key = Key { options: &self.harm, rounding: self.rounding, metadata };
        let measure =
            |probe: &Probe, advance: &mut dyn FnMut()| probe_harm(&self.judge, probe, &self.harm, advance);
        let mut harms = self.each_probe("measuring harm", passes, |probe, advance| {
            stored.get_or(key.of(probe, "widths"), || measure(probe, advance))
        })?;
        let map = HarmMap::of(config.layers, config.kv_heads, &harms, &self.harm);
        if !self.freedom.allows_absent() {
            return Ok(map);
        }

        let heads = map.expendable();
        let passes = heads.len() + 1;
        self.watch.note(format!(
            "{} heads without history: {} passes over whole probes",
            heads.len(),
            self.probes.len() * passes
        ));
        let what = format!("no history of {heads:?}");
        let absent = self.each_probe("leaving out history", passes, |probe, advance| {
            stored.get_or(key.of(probe, &what), || absent_harm(&self.judge, probe, &heads, advance))
        })?;
        for (harm, found) in harms.iter_mut().zip(absent) {
            harm.absent = heads.iter().copied().zip(found).collect();
        }
        Ok(HarmMap::of(config.layers, config.kv_heads, &harms, &self.harm))
    }

    /// Runs `measure` on every probe as a stage in which each takes `passes`.
    fn each_probe<T>(
        &self,
        stage: &'static str,
        passes: usize,
        mut measure: impl FnMut(&Probe, &mut dyn FnMut()) -> Result<T, CalibrateError>,
    ) -> Result<Vec<T>, CalibrateError> {
        self.watch.begin(stage, self.probes.len() * passes);
        let mut all = Vec::with_capacity(self.probes.len());
        for probe in self.probes {
            let mut done = 0;
            all.push(measure(probe, &mut || {
                done += 1;
                self.watch.advance(1);
            })?);
            // A stored result took no pass.
            self.watch.advance(passes.saturating_sub(done));
        }
        self.watch.end();
        Ok(all)
    }

    /// Finds a table for each mean and verifies it on fresh probes.
    pub fn choose(
        &self,
        map: &HarmMap,
        means: &[MeanBits],
    ) -> Result<(Vec<Chosen>, Vec<Refused>), CalibrateError> {
        let candidates =
            means.iter().map(|&mean| self.candidate(map, mean)).collect::<Result<Vec<_>, _>>()?;
        // Everything through the quantized cache, as in serving.
        let mut tables = vec![WidthTable::uniform(map.layers, map.kv_heads, 2)];
        for candidate in &candidates {
            tables.push(candidate.start.clone());
            tables.extend(candidate.refined.as_ref().map(|r| r.table.clone()));
        }
        self.watch.begin("verifying", self.fresh.len() * (tables.len() + 1));
        let scores = self.judge.verify(self.fresh, &tables, || self.watch.advance(1))?;
        self.watch.end();

        let mut verified = tables.into_iter().zip(scores);
        let uniform = verified.next().map(|(_, scores)| scores).unwrap_or_default();
        let mut chosen = Vec::with_capacity(candidates.len());
        for Candidate { mean, start, refined } in candidates {
            let count = 1 + usize::from(refined.is_some());
            let harm = |scores: &Scores| scores.relative_to(&uniform);
            let best = verified.by_ref().take(count).min_by(|a, b| harm(&a.1).total_cmp(&harm(&b.1)));
            let (table, scores) = best.unwrap_or((start, Scores::default()));
            let tried = refined.map_or(1, |r| r.tried);
            chosen.push(Chosen { mean, table, uniform: uniform.clone(), scores, tried });
        }
        Ok((chosen, Vec::new()))
    }

    /// The table that single harms give, and the one after bits were moved.
    fn candidate(&self, map: &HarmMap, mean: MeanBits) -> Result<Candidate, CalibrateError> {
        let head_dim = self.judge.transformer.config().head_dim;
        let start = solve(map, mean, head_dim, &self.freedom)?;
        let (rounds, lead) = (self.refine_rounds, self.harm.lead);
        if rounds == 0 {
            return Ok(Candidate { mean, start, refined: None });
        }
        let options = RefineOptions { rounds, lead, ..RefineOptions::default() };
        self.watch.begin("moving bits", rounds * self.probes.len() * (options.moves + 3));
        let refined = refine(&self.judge, self.probes, map, &start, &options, || self.watch.advance(1))?;
        self.watch.end();
        self.watch.note(format!(
            "{mean} bits: {:.3} of the harm of two bits everywhere from single harms, {:.3} after {} tables",
            refined.before, refined.after, refined.tried
        ));
        Ok(Candidate { mean, start, refined: Some(refined) })
    }
}
