//! `oscar calibrate --bits`: widths for each layer, head and side, by the harm they do to text and
//! to answers.

use crate::progress;
use anyhow::{Result, bail};
use indicatif::ProgressBar;
use oscar_calibrate::bits::{Freedom, Scores, Watch, WidthTable};
use oscar_calibrate::{CalibratedModel, CodeRounding, WidthOptions};
use oscar_codec::{MeanBits, Side};
use std::cell::RefCell;

#[derive(clap::Args)]
pub struct BitsArgs {
    /// Also choose a code width of 0 to 4 bits for each head and side of all layers but sliding ones,
    /// at these mean sizes (bits an element with scale and minimum, 1.25 to 4.25); `--kv oscar` then
    /// uses the table of 2.25, `--kv oscar:1.75` that of 1.75
    #[arg(long, value_name = "MEAN[,MEAN…]", value_delimiter = ',')]
    pub bits: Vec<MeanBits>,
    /// Tokens of a probe: text or a task with its answer
    #[arg(long, value_name = "N", default_value_t = 2560)]
    pub probe_tokens: usize,
    /// Probes of each kind, at most: text, echo, copy, running_sum, niah_uuid, niah_lines
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub probes: usize,
    /// Widths at which every unit is measured; the others follow from the codes' error, unless a
    /// unit's width is uncertain. For large models one or two are enough
    #[arg(long, value_name = "WIDTH[,WIDTH…]", value_delimiter = ',', default_values_t = [1, 2, 4])]
    pub harm_widths: Vec<u32>,
    /// Kinds of probes
    #[arg(long, value_name = "KIND[,KIND…]", value_delimiter = ',')]
    pub probe_kinds: Vec<String>,
    /// Passes in which bits are moved between units that interact; 0 keeps the table the single
    /// harms give. 1 if absent, or 0 where --widths that skip some, --widths-by or --widths-of bind the table
    #[arg(long, value_name = "N")]
    pub refine: Option<usize>,
    /// Take the harms that the file of --rotations holds instead of measuring them; tables are still
    /// verified. Its tables of means that are not asked for stay
    #[arg(long, requires = "rotations")]
    pub reuse_harms: bool,
    /// How codes are rounded: query-aware (`shaped`, the default if the rotations allow it)
    /// or to the nearest level
    #[arg(long, value_name = "nearest|shaped")]
    pub rounding: Option<CodeRounding>,
    /// Widths a unit may have; with 0, a head may keep no history and read its BF16 windows alone.
    /// 5 may be added for caches on the CPU; a GPU refuses such a table
    #[arg(long, value_name = "WIDTH[,WIDTH…]", value_delimiter = ',', default_values_t = [0, 1, 2, 3, 4])]
    pub widths: Vec<u32>,
    /// Units that have a width of their own: each head, or all heads of a layer and side together
    #[arg(long, value_enum, value_name = "UNIT", default_value_t = WidthsBy::Head)]
    pub widths_by: WidthsBy,
    /// Sides whose widths differ; the other side has the mean width everywhere
    #[arg(long, value_enum, value_name = "SIDE", default_value_t = WidthsOf::Both)]
    pub widths_of: WidthsOf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WidthsBy {
    Head,
    Layer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WidthsOf {
    Both,
    Keys,
    Values,
}

impl BitsArgs {
    fn freedom(&self) -> Freedom {
        Freedom {
            widths: self.widths.clone(),
            by_layer: self.widths_by == WidthsBy::Layer,
            side: match self.widths_of {
                WidthsOf::Both => None,
                WidthsOf::Keys => Some(Side::Key),
                WidthsOf::Values => Some(Side::Value),
            },
        }
    }

    /// The options of the library; `None` if no widths are wanted.
    pub fn options(&self) -> Result<Option<WidthOptions>> {
        if self.bits.is_empty() {
            return Ok(None);
        }
        let freedom = self.freedom();
        let defaults = WidthOptions::of_means(self.bits.clone());
        Ok(Some(WidthOptions {
            probe_tokens: self.probe_tokens,
            probes: self.probes,
            kinds: match self.probe_kinds.is_empty() {
                true => defaults.kinds,
                false => self.probe_kinds.iter().map(|kind| kind.parse()).collect::<Result<_, _>>()?,
            },
            measured: self.harm_widths.clone(),
            refine_rounds: self.refine_rounds(&freedom, defaults.refine_rounds)?,
            freedom,
            rounding: self.rounding,
            reuse_harms: self.reuse_harms,
            means: defaults.means,
            memory: defaults.memory,
        }))
    }

    /// Moving single bits would break what binds the table.
    fn refine_rounds(&self, freedom: &Freedom, default: usize) -> Result<usize> {
        match (self.refine, freedom.moves_freely()) {
            (Some(rounds @ 1..), false) => bail!(
                "--refine {rounds} moves bits between any two units: leave it out with --widths that skip some, --widths-by or --widths-of"
            ),
            (given, free) => Ok(given.unwrap_or(if free { default } else { 0 })),
        }
    }
}

/// A calibration on the terminal.
#[derive(Default)]
pub struct Bars(RefCell<Option<ProgressBar>>);

impl Watch for Bars {
    fn begin(&self, stage: &'static str, passes: usize) {
        *self.0.borrow_mut() = Some(progress::bar(stage, passes as u64));
    }

    fn advance(&self, passes: usize) {
        if let Some(bar) = &*self.0.borrow() {
            bar.inc(passes as u64);
        }
    }

    fn end(&self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }

    fn note(&self, text: String) {
        progress::note!("{text}");
    }
}

/// The verified tables for people.
pub fn describe(result: &CalibratedModel) -> String {
    let CalibratedModel { file, chosen, refused, .. } = result;
    let [_, kv_heads, head_dim] = file.shape();
    let layers = &file.bits.layers;
    let two_bits = WidthTable::uniform(layers.len(), kv_heads, 2).mean_bits(head_dim);
    let mut header = vec!["cache".to_owned(), "bits".to_owned(), "harm".to_owned()];
    let mut rows = Vec::new();
    for (index, c) in chosen.iter().enumerate() {
        if index == 0 {
            header.extend(c.uniform.groups().map(|g| format!("KL {}", g.name)));
            rows.push(row("oscar2".into(), c.uniform.relative_to(&c.uniform), two_bits, &c.uniform));
        }
        rows.push(row(format!("oscar:{}", c.mean), c.harm(), c.table.mean_bits(head_dim), &c.scores));
    }
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut out = crate::table::render(&header, &rows);
    for c in chosen {
        out.push_str(&format!("\noscar:{} = {} ({} repairs)", c.mean, c.table.describe(layers), c.repairs));
    }
    for r in refused {
        out.push_str(&format!("\noscar:{} refused: {}", r.mean, r.reason));
    }
    out
}

fn row(name: String, harm: f64, bits: f64, scores: &Scores) -> Vec<String> {
    let mut row = vec![name, format!("{bits:.2}"), format!("{harm:.3}")];
    row.extend(scores.groups().map(|g| format!("{:.5}", g.divergence)));
    row
}
