//! Every dependency has a licence that deny.toml allows and comes from crates.io. A stand-in for
//! `cargo deny check licenses sources`, which takes minutes to install.

use serde_json::Value;
use std::process::Command;

/// Whether an SPDX expression can be satisfied with these licences. `/` is the old form of `OR`.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    any_of(&mut rest, allowed) == Some(true) && rest.is_empty()
}

/// `None` if the expression ends too early.
fn any_of(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let mut found = all_of(words, allowed)?;
    while words.first() == Some(&"OR") {
        *words = &words[1..];
        found |= all_of(words, allowed)?;
    }
    Some(found)
}

fn all_of(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let mut found = one(words, allowed)?;
    while words.first() == Some(&"AND") {
        *words = &words[1..];
        found &= one(words, allowed)?;
    }
    Some(found)
}

fn one(words: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let (first, rest) = words.split_first()?;
    *words = rest;
    if *first == "(" {
        let found = any_of(words, allowed)?;
        let (close, rest) = words.split_first()?;
        *words = rest;
        return (*close == ")").then_some(found);
    }
    let mut id = (*first).to_owned();
    if words.first() == Some(&"WITH") {
        id = format!("{id} WITH {}", words.get(1)?);
        *words = &words[2..];
    }
    Some(allowed.contains(&id))
}

#[test]
fn expressions_are_read_as_spdx_means_them() {
    let allowed = ["MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
    for good in [
        "MIT",
        "GPL-3.0 OR MIT",
        "MIT/GPL-3.0",
        "Zlib AND (GPL-3.0 OR MIT)",
        "Apache-2.0 WITH LLVM-exception OR GPL-2.0",
    ] {
        assert!(is_allowed(good, &allowed), "{good}");
    }
    for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "Apache-2.0", "(MIT", "MIT)", "MIT OR", "AND MIT"] {
        assert!(!is_allowed(bad, &allowed), "{bad}");
    }
}

#[test]
fn every_dependency_has_an_allowed_licence_and_comes_from_crates_io() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let deny: toml::Table = std::fs::read_to_string(format!("{root}/deny.toml")).unwrap().parse().unwrap();
    let allowed: Vec<String> = deny["licenses"]["allow"].clone().try_into().unwrap();
    let host = Command::new("rustc").args(["--print", "host-tuple"]).output().unwrap();
    let host = String::from_utf8(host.stdout).unwrap();
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--offline",
            "--locked",
            "--filter-platform",
            host.trim(),
        ])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100, "{} packages", packages.len());
    for package in packages {
        let name = &package["name"];
        let licence = package["license"].as_str().unwrap_or_default();
        assert!(is_allowed(licence, &allowed), "{name}: licence '{licence}' is not in deny.toml");
        let source = package["source"].as_str();
        assert!(
            source.is_none_or(|s| s == "registry+https://github.com/rust-lang/crates.io-index"),
            "{name} comes from {source:?}"
        );
        // A dependency of ours must say which version it needs.
        for dependency in package["dependencies"].as_array().unwrap().iter().filter(|_| source.is_none()) {
            let open = dependency["req"] == "*" && dependency["path"].is_null();
            assert!(!open, "{name} takes any version of {}", dependency["name"]);
        }
    }
}
