//! The documents agree with the tree: links lead to files, and every crate is on the map.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn documents() -> Vec<PathBuf> {
    let folders = ["", "docs", "docs/benchmarks", "docs/benchmarks/data", "models/oscar-15m"];
    let entries = folders.iter().flat_map(|folder| fs::read_dir(root().join(folder)).unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

#[test]
fn links_between_documents_lead_to_files() {
    let documents = documents();
    assert!(documents.len() > 8, "{documents:?}");
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let path = document.parent().unwrap().join(file);
            assert!(path.exists(), "{}: {target} does not exist", document.display());
        }
    }
}

#[test]
fn every_crate_is_on_the_map() {
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let path = entry.unwrap().path();
        if path.join("Cargo.toml").exists() {
            let name = format!("`crates/{}`", path.file_name().unwrap().to_string_lossy());
            assert!(map.contains(&name), "ARCHITECTURE.md has no section on {name}");
        }
    }
}

#[test]
fn paths_on_the_map_exist() {
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let is_path =
        |text: &&str| (text.contains("/src/") || text.starts_with("docs/")) && !text.contains("NAME");
    for path in map.split('`').skip(1).step_by(2).filter(is_path) {
        let inside = root().join("crates").join(path);
        assert!(inside.exists() || root().join(path).exists(), "ARCHITECTURE.md names {path}");
    }
}
