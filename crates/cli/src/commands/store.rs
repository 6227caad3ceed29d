//! `oscar store`: what a directory of stored pages holds, whether it is sound, and making it smaller.

use crate::options::parse_size;
use crate::progress::bytes;
use crate::store::parse_age;
use crate::table;
use anyhow::{Context, Result, bail};
use oscar_store::{Defect, Entry, Listing, PageKind, StoreLimits, list, prune, verify_file};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

#[derive(clap::Subcommand)]
pub enum What {
    /// Show the models and caches whose pages a directory holds
    Ls {
        /// Directory that `oscar serve --store` used
        dir: PathBuf,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Read every page and compare checksums; fails if one is damaged
    Verify {
        /// Directory that `oscar serve --store` used
        dir: PathBuf,
        /// Remove damaged pages
        #[arg(long)]
        remove: bool,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Remove pages that nobody used for long, then the least recently used ones; servers may run
    Prune {
        /// Directory that `oscar serve --store` used
        dir: PathBuf,
        /// Size that may be left
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: Option<usize>,
        /// Longest time since the last use that is kept, e.g. 12h or 7d
        #[arg(long, value_name = "AGE", value_parser = parse_age)]
        age: Option<Duration>,
        /// Remove every page
        #[arg(long, conflicts_with_all = ["size", "age"])]
        all: bool,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
}

pub fn run(what: &What) -> Result<()> {
    match what {
        What::Ls { dir, json } => ls(dir, *json),
        What::Verify { dir, remove, json } => verify(dir, *remove, *json),
        What::Prune { dir, size, age, all, json } => {
            let limits = match all {
                true => StoreLimits { bytes: Some(0), age: None },
                false => StoreLimits { bytes: size.map(|size| size as u64), age: *age },
            };
            if limits == StoreLimits::default() {
                bail!("say what may be left: --size SIZE, --age AGE, or --all for nothing");
            }
            remove_pages(dir, limits, *json)
        }
    }
}

fn listed(dir: &Path) -> Result<Listing> {
    list(dir).with_context(|| dir.display().to_string())
}

fn ls(dir: &Path, as_json: bool) -> Result<()> {
    let Listing { pages, about, .. } = listed(dir)?;
    let mut folders: BTreeMap<&str, Vec<&Entry>> =
        about.keys().map(|name| (name.as_str(), Vec::new())).collect();
    pages.iter().for_each(|page| folders.entry(&page.fingerprint).or_default().push(page));
    let mut lines = Vec::new();
    for (name, pages) in folders {
        let about = about.get(name).map_or("", String::as_str);
        let fact = |key: &str| {
            let line = about.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
            line.unwrap_or("unknown").to_owned()
        };
        let count = |kind| pages.iter().filter(|page| page.kind == kind).count();
        let size: u64 = pages.iter().map(|page| page.bytes).sum();
        let age = pages
            .iter()
            .map(|page| page.used)
            .max()
            .and_then(|used| SystemTime::now().duration_since(used).ok());
        let counts =
            [PageKind::Coded, PageKind::Full, PageKind::Part, PageKind::Sliding, PageKind::State].map(count);
        if as_json {
            let [coded, full, part, sliding, states] = counts;
            println!(
                "{}",
                json!({"fingerprint": name, "model": fact("model"), "cache": fact("cache"), "device": fact("device"),
                       "coded_pages": coded, "full_pages": full, "part_pages": part,
                       "sliding_pages": sliding, "states": states, "bytes": size,
                       "idle_seconds": age.map(|age| age.as_secs())})
            );
        }
        let [coded, full, part, sliding, states] = counts.map(|count| count.to_string());
        let idle = age.map_or_else(String::new, |age| format!("{} s", age.as_secs()));
        lines.push(vec![
            name.to_owned(),
            fact("model"),
            fact("cache"),
            coded,
            full,
            part,
            sliding,
            states,
            bytes(size as usize),
            idle,
        ]);
    }
    if !as_json {
        let header = [
            "fingerprint",
            "model",
            "cache",
            "quantized pages",
            "BF16",
            "parts",
            "sliding",
            "states",
            "size",
            "unused for",
        ];
        println!("{}", table::render(&header, &lines));
    }
    Ok(())
}

fn verify(dir: &Path, remove: bool, as_json: bool) -> Result<()> {
    let listing = listed(dir)?;
    let (mut sound, mut corrupt, mut wrong, mut vanished, mut removed) = (0, 0, 0, 0, 0);
    for page in &listing.pages {
        let defect = match verify_file(&page.path) {
            Ok(Ok(())) => {
                sound += 1;
                continue;
            }
            Ok(Err(defect)) => defect,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                vanished += 1;
                continue;
            }
            Err(error) => return Err(error).with_context(|| page.path.display().to_string()),
        };
        match defect {
            Defect::Corrupt(_) => corrupt += 1,
            Defect::WrongFingerprint => wrong += 1,
        }
        eprintln!("{}: {defect}", page.path.display());
        removed += usize::from(remove && std::fs::remove_file(&page.path).is_ok());
    }
    let unfinished = listing.temporary.len();
    if as_json {
        println!(
            "{}",
            json!({"sound": sound, "corrupt": corrupt, "wrong_fingerprint": wrong, "vanished": vanished,
                   "unfinished": unfinished, "removed": removed})
        );
    } else {
        println!(
            "{sound} pages are sound, {corrupt} damaged, {wrong} of another model; {unfinished} unfinished files"
        );
    }
    match corrupt + wrong > removed {
        true => bail!("{} damaged pages; --remove removes them", corrupt + wrong - removed),
        false => Ok(()),
    }
}

fn remove_pages(dir: &Path, limits: StoreLimits, as_json: bool) -> Result<()> {
    let pruned = prune(dir, limits, 0).with_context(|| dir.display().to_string())?;
    if as_json {
        println!(
            "{}",
            json!({"too_old": pruned.too_old, "too_many": pruned.too_many, "abandoned": pruned.abandoned,
                   "freed_bytes": pruned.freed, "left_bytes": pruned.left})
        );
    } else {
        println!(
            "removed {} pages by age, {} by size and {} unfinished files: {} freed, {} left",
            pruned.too_old,
            pruned.too_many,
            pruned.abandoned,
            bytes(pruned.freed as usize),
            bytes(pruned.left as usize)
        );
    }
    Ok(())
}
