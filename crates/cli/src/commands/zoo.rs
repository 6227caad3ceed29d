//! `oscar zoo`: official RotationZoo files, inspected, converted and verified.

use crate::table;
use anyhow::{Context, Result, bail};
use oscar_calibrate::RotationFile;
use oscar_calibrate::zoo::{self, Choice, ZooFile};
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(clap::Subcommand)]
pub enum What {
    /// What a rotation file holds (.pt of the zoo, or our .safetensors)
    Inspect {
        file: PathBuf,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// The key and value files of a model in the zoo: in the Hugging Face cache, or downloaded into
    /// it
    Find {
        /// Root of the zoo instead: a directory, or a Hugging Face cache directory that holds it
        #[arg(long)]
        root: Option<PathBuf>,
        /// Model folder, e.g. Qwen3-8B
        model: String,
        /// A particular sampling folder; the one with the most tokens if absent
        #[arg(long)]
        named: Option<String>,
    },
    /// Two .pt files to one .safetensors, or one .safetensors to two .pt files
    Convert {
        /// Key rotations (.pt), with --value
        #[arg(long, requires = "value")]
        key: Option<PathBuf>,
        /// Value rotations (.pt), with --key
        #[arg(long, requires = "key")]
        value: Option<PathBuf>,
        /// KV heads of the model: a per-layer file does not say
        #[arg(long, value_name = "N")]
        kv_heads: Option<usize>,
        /// Our rotation file, to be written as .pt
        #[arg(long, conflicts_with = "key")]
        from: Option<PathBuf>,
        /// Drop what .pt cannot hold (key means, clip ratios) instead of refusing
        #[arg(long)]
        lossy: bool,
        /// A .safetensors file, or a directory for the two .pt files
        #[arg(long, value_name = "FILE|DIR")]
        out: PathBuf,
    },
    /// Check that every rotation is finite and orthogonal
    Verify {
        file: PathBuf,
        /// Largest |RᵀR − I| allowed
        #[arg(long, default_value_t = 1e-5)]
        tolerance: f64,
    },
}

const KEY_FILE: &str = "k_rotation_qqt_r_h_pbr.pt";
const VALUE_FILE: &str = "v_rotation_sst_r_h_pbr.pt";

pub fn run(what: &What) -> Result<()> {
    match what {
        What::Inspect { file, json } => inspect(file, *json),
        What::Find { root, model, named } => find(root.as_deref(), model, named.as_deref()),
        What::Convert { key: Some(key), value: Some(value), kv_heads, out, .. } => {
            to_safetensors(key, value, *kv_heads, out)
        }
        What::Convert { from: Some(from), lossy, out, .. } => to_pt(from, *lossy, out),
        What::Convert { .. } => {
            bail!("give --key and --value (two .pt files), or --from (a .safetensors file)")
        }
        What::Verify { file, tolerance } => verify(file, *tolerance),
    }
}

fn is_ours(file: &Path) -> bool {
    file.extension().is_some_and(|e| e == "safetensors")
}

fn inspect(file: &Path, as_json: bool) -> Result<()> {
    if is_ours(file) {
        let f = RotationFile::load(file)?;
        let m = &f.metadata;
        let [layers, heads, d] = f.shape();
        if as_json {
            println!("{}", serde_json::to_value(m)?);
        } else {
            println!(
                "{}: {layers} layers × {heads} KV heads of {d}, {:?} granularity",
                file.display(),
                m.granularity
            );
            println!(
                "statistic {}, composition {}, keys centred: {}, clip {}",
                m.statistic, m.composition, m.centred, m.clip
            );
            println!("{} tokens in {} sequences; {}; {}", m.tokens, m.sequences, m.tool, m.note);
            println!("model {}", m.model_fingerprint.as_deref().unwrap_or("unknown"));
            for (mean, table) in &f.bits.tables {
                println!("widths for {mean} bits: {}", table.describe(&f.bits.layers));
            }
        }
        return Ok(());
    }
    let f = ZooFile::read(file)?;
    let worst = f.orthogonality_error();
    let first = f.layers.values().next().context("the file holds no layers")?;
    let heads = first.heads.map_or("one rotation a layer".to_owned(), |h| format!("{h} KV heads"));
    if as_json {
        println!(
            "{}",
            json!({"format_version": f.format_version, "objective": f.objective, "source_grouping": f.source_grouping,
                   "layers": f.layers.len(), "heads": first.heads, "head_dim": first.head_dim,
                   "orthogonality_error": worst.map(|w| w.1), "metadata": f.metadata})
        );
        return Ok(());
    }
    println!(
        "{}: RotationZoo format {}, objective {}, grouping {}, {} layers, {heads}, head size {}",
        file.display(),
        f.format_version,
        f.objective,
        f.source_grouping,
        f.layers.len(),
        first.head_dim
    );
    if let Some((layer, error)) = worst {
        println!("largest |RᵀR − I|: {error:.2e} (layer {layer})\n");
    }
    let rows: Vec<Vec<String>> = f
        .layers
        .iter()
        .map(|(id, layer)| {
            let spectrum = layer.eigenvalues.as_ref().filter(|e| e.len() == layer.head_dim);
            let participation = spectrum.map(|e| {
                let (sum, squares) =
                    e.iter().fold((0.0, 0.0), |(s, q), &v| (s + f64::from(v), q + f64::from(v).powi(2)));
                format!("{:.1}", sum * sum / squares)
            });
            vec![
                id.to_string(),
                format!("{:.1e}", layer.orthogonality_error()),
                spectrum.map_or("–".into(), |e| format!("{:.2e}", e[e.len() - 1] / e[0])),
                participation.unwrap_or_else(|| "–".into()),
            ]
        })
        .collect();
    println!("{}", table::render(&["layer", "|RᵀR − I|", "condition", "participation"], &rows));
    Ok(())
}

fn find(root: Option<&Path>, model: &str, named: Option<&str>) -> Result<()> {
    let choice = named.map_or(Choice::MostTokens, Choice::Named);
    let pair = match root {
        Some(root) => zoo::find_pair(root, model, choice)?,
        None => find_in_cache(model, choice)?,
    };
    println!("{}\n  keys   {}\n  values {}", pair.name, pair.keys.display(), pair.values.display());
    Ok(())
}

/// Looks where the Hugging Face client keeps the zoo; what is not there may be on the hub.
fn find_in_cache(model: &str, choice: Choice<'_>) -> Result<zoo::Candidate> {
    let mut problems = Vec::new();
    for hub in oscar_models::hub_cache_folders() {
        match zoo::cached_root(&hub).and_then(|root| zoo::find_pair(&root, model, choice)) {
            Ok(pair) => return Ok(pair),
            Err(error) => problems.push(error.to_string()),
        }
    }
    match crate::hub::offline_by_environment() {
        true => bail!("{model} is not here ({}), and HF_HUB_OFFLINE is set", problems.join("; ")),
        false => download(model, choice, &problems),
    }
}

#[cfg(feature = "hub")]
fn download(model: &str, choice: Choice<'_>, _problems: &[String]) -> Result<zoo::Candidate> {
    let wanted = |listing: &[String]| zoo::files_of(listing, model);
    let root = oscar_models::hub::download_files(zoo::REPOSITORY, wanted, &mut crate::hub::Bars::default())
        .with_context(|| format!("{model} in {}", zoo::REPOSITORY))?;
    Ok(zoo::find_pair(&root, model, choice)?)
}

#[cfg(not(feature = "hub"))]
fn download(model: &str, _choice: Choice<'_>, problems: &[String]) -> Result<zoo::Candidate> {
    bail!(
        "{model} is not here ({}); this build does not download: build with `--features hub`, fetch {} yourself, or give \
         --root",
        problems.join("; "),
        zoo::REPOSITORY
    )
}

fn to_safetensors(key: &Path, value: &Path, kv_heads: Option<usize>, out: &Path) -> Result<()> {
    let (k, v) = (ZooFile::read(key)?, ZooFile::read(value)?);
    let own = k.layers.values().next().and_then(|l| l.heads);
    let Some(heads) = kv_heads.or(own) else {
        bail!(
            "{} holds one rotation a layer and does not say how many KV heads the model has: give --kv-heads",
            key.display()
        );
    };
    if !(1..=1024).contains(&heads) {
        bail!("--kv-heads {heads}: between 1 and 1024");
    }
    // Official names tell the statistic: qqt belongs to keys, sst to values.
    if k.objective.starts_with("sst") || v.objective.starts_with("qqt") {
        bail!(
            "the files are swapped: {} holds '{}', {} holds '{}'",
            key.display(),
            k.objective,
            value.display(),
            v.objective
        );
    }
    RotationFile::from_zoo(&k, &v, heads)?.save(out)?;
    println!("{}", out.display());
    Ok(())
}

fn to_pt(from: &Path, lossy: bool, out: &Path) -> Result<()> {
    let (k, v) = RotationFile::load(from)?.to_zoo(lossy)?;
    std::fs::create_dir_all(out).with_context(|| format!("--out {}", out.display()))?;
    for (name, file) in [(KEY_FILE, &k), (VALUE_FILE, &v)] {
        let path = out.join(name);
        zoo::write::write(file, &path)?;
        println!("{}", path.display());
    }
    Ok(())
}

fn verify(file: &Path, tolerance: f64) -> Result<()> {
    let error = if is_ours(file) {
        let f = RotationFile::load(file)?;
        let heads = f.rotations.heads();
        heads
            .iter()
            .flat_map(|h| [h.key.orthogonality_error(), h.value.orthogonality_error()])
            .fold(0.0, f64::max)
    } else {
        let f = ZooFile::read(file)?;
        f.validate()?;
        f.orthogonality_error().map_or(0.0, |w| w.1)
    };
    if tolerance.is_nan() || error > tolerance {
        bail!("{}: largest |RᵀR − I| is {error:.2e}, allowed {tolerance:.1e}", file.display());
    }
    println!("{}: every rotation is finite and orthogonal, largest |RᵀR − I| {error:.2e}", file.display());
    Ok(())
}
