//! Which files of a hub repository a model needs. Pure selection: no network here, so it is tested
//! without one.

use crate::error::LoadError;
use crate::weights::{INDEX_FILE, SINGLE_FILE, ShardIndex};

/// Everything but the weights; only `config.json` must exist.
const SMALL_FILES: [&str; 10] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// The files to fetch first, and whether an index among them must be read to find the weights.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Selection {
    pub(crate) files: Vec<String>,
    pub(crate) sharded: bool,
}

/// Chooses from a repository's listing. One whole weight file is preferred to shards, as when
/// opening.
pub(crate) fn select(repository: &str, listing: &[String]) -> Result<Selection, LoadError> {
    let listed = |name: &str| listing.iter().any(|file| file == name);
    let missing = |file: &str| LoadError::MissingFile { place: repository.to_owned(), file: file.to_owned() };
    if !listed("config.json") {
        return Err(missing("config.json"));
    }
    let mut files: Vec<String> =
        SMALL_FILES.into_iter().filter(|name| listed(name)).map(str::to_owned).collect();
    let sharded = !listed(SINGLE_FILE);
    let weights = if sharded { INDEX_FILE } else { SINGLE_FILE };
    if !listed(weights) {
        return Err(missing(&format!("{SINGLE_FILE} or {INDEX_FILE}")));
    }
    files.push(weights.to_owned());
    Ok(Selection { files, sharded })
}

/// The shards that an index names. Each must be in the listing.
pub(crate) fn shards(repository: &str, index: &[u8], listing: &[String]) -> Result<Vec<String>, LoadError> {
    let shards = ShardIndex::parse(index)?.shard_names();
    match shards.iter().find(|shard| !listing.contains(shard)) {
        Some(absent) => Err(LoadError::MissingFile { place: repository.to_owned(), file: absent.clone() }),
        None => Ok(shards),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(files: &[&str]) -> Vec<String> {
        files.iter().map(|file| (*file).to_owned()).collect()
    }

    #[test]
    fn takes_what_is_needed_and_nothing_else() {
        let all = listing(&[
            ".gitattributes",
            "README.md",
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model.safetensors",
            "pytorch_model.bin",
            "original/consolidated.00.pth",
            "onnx/model.onnx",
        ]);
        let selection = select("org/m", &all).unwrap();
        assert_eq!(
            selection.files,
            ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
        );
        assert!(!selection.sharded);
    }

    #[test]
    fn shards_come_from_the_index() {
        let all = listing(&[
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "consolidated.safetensors",
        ]);
        let selection = select("org/m", &all).unwrap();
        assert!(selection.sharded && selection.files.contains(&INDEX_FILE.to_owned()));
        let index = br#"{"metadata": {}, "weight_map": {"a": "model-00002-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"}}"#;
        assert_eq!(
            shards("org/m", index, &all).unwrap(),
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        );
        let message = shards("org/m", index, &all[..3]).unwrap_err().to_string();
        assert!(message.contains("model-00002-of-00002.safetensors"), "{message}");
    }

    #[test]
    fn a_repository_without_safetensors_is_refused() {
        let message = select("org/m", &listing(&["config.json", "model.gguf"])).unwrap_err().to_string();
        assert!(message.contains("model.safetensors"), "{message}");
        assert!(select("org/m", &listing(&["model.safetensors"])).is_err());
    }

    #[test]
    fn an_index_cannot_ask_for_files_elsewhere() {
        let all = listing(&["config.json", "../secret.safetensors"]);
        let index = br#"{"weight_map": {"a": "../secret.safetensors"}}"#;
        assert!(matches!(shards("org/m", index, &all), Err(LoadError::UnsafeFileName { .. })));
    }
}
