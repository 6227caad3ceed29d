//! Scripts of `tests/clients` and what they need from outside: Python with packages of PyPI, in environments under the
//! target directory that are kept between runs, and Chromium.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// A Python that has `packages`, or `None` with a note if they cannot be had here. `OSCAR_TEST_PYTHON` names one that
/// has everything already.
///
/// # Panics
/// In CI, where they must be had.
pub fn with(packages: &[&str]) -> Option<PathBuf> {
    with_options(&[], packages)
}

/// What Dynamo 1.6.1 needs at run time. Its own list of dependencies cannot be installed everywhere: it has a package that
/// downloads from another host.
pub const DYNAMO: [&str; 11] = [
    "ai-dynamo==1.6.1",
    "ai-dynamo-runtime==1.6.1",
    "uvloop",
    "packaging",
    "typing_extensions",
    "pyyaml",
    "msgspec",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
];

/// A Python with [`DYNAMO`]; see [`with`].
pub fn dynamo() -> Option<PathBuf> {
    with_options(&["--no-deps"], &DYNAMO)
}

fn with_options(options: &[&str], packages: &[&str]) -> Option<PathBuf> {
    if let Some(python) = std::env::var_os("OSCAR_TEST_PYTHON") {
        return Some(python.into());
    }
    let name = packages.join("-");
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("python-{}", &name[..name.len().min(64)]));
    match install(&folder, &[options, packages].concat()) {
        Ok(python) => Some(python),
        Err(why) => {
            missing(&format!("{packages:?} cannot be installed: {why}"));
            None
        }
    }
}

/// Something from outside is not there: a note, or in CI a failure.
pub fn missing(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    eprintln!("NOT TESTED: {why}");
}

/// A Chromium that runs, or `None` with a note.
///
/// # Panics
/// In CI, where there must be one.
pub fn chromium() -> Option<&'static str> {
    let is_there = |name: &&str| {
        Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    };
    let found = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(is_there);
    if found.is_none() {
        missing("no Chromium is installed");
    }
    found
}

/// Runs a script of `tests/clients` that must end well and say so.
pub fn run_script(python: &Path, script: &str, args: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script);
    let out = Command::new(python)
        .arg(script)
        .args(args)
        .env_remove("OPENAI_BASE_URL")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("is content"), "{stdout}");
}

fn install(folder: &Path, packages: &[&str]) -> Result<PathBuf, String> {
    // Tests run at the same time and may want the same environment.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (python, done) = (folder.join("bin/python"), folder.join("installed"));
    if done.exists() {
        return Ok(python);
    }
    run(Path::new("python3"), &["-m", "venv", "--clear", &folder.to_string_lossy()])?;
    let mut install = vec!["-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"];
    install.extend(packages);
    run(&python, &install)?;
    std::fs::write(done, "").map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(python)
}

fn run(program: &Path, args: &[&str]) -> Result<(), String> {
    let out = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    match out.status.success() {
        true => Ok(()),
        false => Err(format!("{} {args:?}: {}", program.display(), String::from_utf8_lossy(&out.stderr))),
    }
}
