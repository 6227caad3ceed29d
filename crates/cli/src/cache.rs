//! The cache of a model: a format with the rotations, widths and clip ratios of its file.

use crate::cpu_experts::{self, WeightBytes};
use crate::device::AnyBackend;
use crate::options::{CacheArgs, OpenModel};
use crate::progress::note;
use crate::rotations::{self, Found};
use anyhow::{Context, Result, bail};
use oscar_calibrate::{CodeRounding, RotationFile};
use oscar_codec::{
    CacheLayout, CodeLayout, FormatTable, KvFormat, MeanBits, RotationKind, RotationSet, RowPageCodec, Side,
    SideSpec,
};
use oscar_models::Holding;
use oscar_runner::{Ranks, Runner, RunnerOptions};
use std::path::Path;

impl OpenModel {
    /// The cache layout of a format, with the clip ratios of the rotation file if it has them.
    pub fn cache(&self, format: KvFormat, args: &CacheArgs) -> Result<Cache> {
        self.config.check_format(format)?;
        let found = match format.rotation() == RotationKind::Calibrated {
            true => self.found_rotations(args)?,
            false => None,
        };
        self.cache_of(format, args, found.as_ref())
    }

    /// [`Self::cache`] with the rotations that were found; without any, Hadamard.
    pub fn cache_of(&self, format: KvFormat, args: &CacheArgs, found: Option<&Found>) -> Result<Cache> {
        let c = &self.config;
        if let (kind, Some(file)) = (format.rotation(), &args.rotations)
            && kind != RotationKind::Calibrated
        {
            note!("note: --rotations {file} is not used: {format} has its own ({})", kind.describe());
        }
        let windows = format.windows(args.sink, args.recent)?;
        let layout = c
            .cache_layout(format, windows, CodeLayout::CpuTile)
            .or_else(|_| c.cache_layout(format, windows, CodeLayout::Logical))?;
        let (rotations, origin, layout) = match format.rotation() {
            RotationKind::Calibrated => self.rotations(format, args, found, layout)?,
            kind => (kind.data_free(c.cache_layers(), c.kv_heads, c.head_dim)?, kind.describe(), layout),
        };
        Ok(Cache { layout, rotations, rotation_origin: origin })
    }

    /// The rotations that the user names, or those that are found. None with `--rotations hadamard`.
    ///
    /// # Errors
    /// If the file that the user names cannot be read or was made for another model.
    pub fn found_rotations(&self, args: &CacheArgs) -> Result<Option<Found>> {
        match args.rotations.as_deref() {
            Some("hadamard") => Ok(None),
            Some(path) => {
                let file = RotationFile::load(Path::new(path))?;
                let place = || format!("--rotations {path}");
                file.check_model(&self.weights.fingerprint(), &self.config).with_context(place)?;
                Ok(Some(Found { file, origin: path.to_owned() }))
            }
            None => rotations::find(self),
        }
    }

    /// The bytes of the rotation file for calibrated formats; none for Hadamard rotations.
    pub fn rotation_bytes(&self, args: &CacheArgs) -> Result<Option<Vec<u8>>> {
        match args.rotations.as_deref() {
            Some("hadamard") => Ok(None),
            Some(path) => Ok(Some(std::fs::read(path).with_context(|| format!("--rotations {path}"))?)),
            None => rotations::find_bytes(self),
        }
    }

    fn rotations(
        &self,
        format: KvFormat,
        args: &CacheArgs,
        found: Option<&Found>,
        layout: CacheLayout,
    ) -> Result<(Option<RotationSet>, String, CacheLayout)> {
        let Some(Found { file, origin }) = found else {
            refuse_mean(format)?;
            let c = &self.config;
            let origin = match args.rotations.as_deref() {
                Some("hadamard") => "Hadamard (as asked)",
                _ => "Hadamard: the model has no rotations of its own, make them with `oscar calibrate`",
            };
            let hadamard = RotationSet::hadamard(c.cache_layers(), c.kv_heads, c.head_dim)?;
            return Ok((Some(hadamard), origin.to_owned(), layout));
        };
        if let KvFormat::OscarMixed { mean } = format {
            let (layout, widths) = with_widths(layout, mean, file)?;
            return Ok((Some(file.rotations.clone()), format!("{origin}; {widths}"), layout));
        }
        let layout = with_clips(layout, format, file)?;
        Ok((Some(file.rotations.clone()), origin.clone(), layout))
    }
}

/// The layout with the file's widths for a mean, and their origin.
fn with_widths(
    layout: CacheLayout,
    mean: Option<MeanBits>,
    file: &RotationFile,
) -> Result<(CacheLayout, String)> {
    let wanted = mean.unwrap_or(MeanBits::DEFAULT);
    let (table, origin) = match file.bits.verified(wanted) {
        Some((found, table)) if found == wanted => {
            (table.clone(), format!("widths by measured harm, {wanted} bits"))
        }
        Some((found, table)) => (
            table.clone(),
            format!(
                "widths by measured harm, {found} bits: {wanted} has no verified table (verified: {})",
                file.bits.means()
            ),
        ),
        None if mean.is_none() => {
            let note = "2 bits everywhere: the rotations have no widths, choose them with `oscar calibrate --bits 2.25`";
            return Ok((layout, note.into()));
        }
        None => bail!(
            "--kv oscar:{wanted}: the rotations have no verified table of at most {wanted} bits; make one with \
             `oscar calibrate --bits {wanted}`, or use oscar2"
        ),
    };
    let formats = table.formats(&layout)?.with_roundings(file.roundings(file.bits.rounding)?)?;
    let origin = match file.bits.rounding {
        CodeRounding::Nearest => origin,
        CodeRounding::Shaped => format!("{origin}, query-aware rounding"),
    };
    Ok((layout.with_coded_table(formats), origin))
}

/// Widths belong to a model's calibrated rotations: without these there is no table.
fn refuse_mean(format: KvFormat) -> Result<()> {
    match format {
        KvFormat::OscarMixed { mean: Some(mean) } => {
            bail!("--kv oscar:{mean} needs calibrated rotations with widths: `oscar calibrate --bits {mean}`")
        }
        _ => Ok(()),
    }
}

/// The layout with the file's clip ratios, if they were chosen for this format's width.
fn with_clips(layout: CacheLayout, format: KvFormat, file: &RotationFile) -> Result<CacheLayout> {
    let KvFormat::Oscar { bits } = format else { return Ok(layout) };
    let (bits, Some(table)) = (u32::from(bits), layout.coded()) else { return Ok(layout) };
    if file.metadata.clip_bits != (bits, bits) {
        if file.metadata.clip != "official" {
            note!(
                "note: the file's clip ratios were fitted for other widths than {format}; the defaults are used"
            );
        }
        return Ok(layout);
    }
    let (layers, heads) = (layout.layers(), layout.kv_heads());
    let codecs = (0..layers * heads)
        .map(|i| {
            let codec = table.codec(i / heads, i % heads);
            let spec = |side, clip| SideSpec { clip, ..codec.spec(side) };
            let (key, value) = (spec(Side::Key, file.clips.key[i]), spec(Side::Value, file.clips.value[i]));
            RowPageCodec::new(layout.head_dim(), key, value, codec.layout())
        })
        .collect::<Result<_, _>>()?;
    Ok(layout.with_coded_table(FormatTable::new(layers, heads, codecs)?))
}

/// A cache layout and the rotations it needs.
pub struct Cache {
    pub layout: CacheLayout,
    pub rotations: Option<RotationSet>,
    pub rotation_origin: String,
}

impl Cache {
    /// Loads the model for this cache, with room for `sequences` sequences of `context` tokens unless the user set
    /// a budget.
    pub fn runner(
        &self,
        model: &OpenModel,
        ranks: impl Into<Ranks<AnyBackend>>,
        args: &CacheArgs,
        context: usize,
        sequences: usize,
        progress: impl FnMut(usize),
    ) -> Result<Runner<AnyBackend>> {
        let ranks = ranks.into();
        let options = RunnerOptions {
            layout: self.layout.clone(),
            rotations: self.rotations.as_ref(),
            context,
            kv_memory: args.kv_memory(sequences, context),
            prefill_chunk: args.prefill_chunk(ranks.lead(), &model.config),
        };
        // A GPU's way to hold weights, as `--cpu-experts` needs one.
        let holding = Holding { fp8: true, fp8_experts: true, mxfp4_experts: false, element_bytes: 2 };
        let weights = WeightBytes::of(model, self.rotations.is_some(), holding);
        cpu_experts::place(ranks.lead(), &model.config, &weights, &options, sequences)?;
        Ok(Runner::load(ranks, &model.config, &model.weights, options, progress)?)
    }
}
