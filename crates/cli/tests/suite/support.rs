use serde_json::Value;
use std::process::{Command, Output, Stdio};

/// The binary with nothing on standard input. It uses neither the network nor the user's folder.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oscar"));
    command.stdin(Stdio::null()).env("HF_HUB_OFFLINE", "1");
    command.env("OSCAR_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command
}

pub fn oscar(args: &[&str]) -> Output {
    command().args(args).output().unwrap()
}

/// Standard output of a run that must succeed.
pub fn succeed(args: &[&str]) -> String {
    let out = oscar(args);
    assert!(out.status.success(), "oscar {args:?} failed: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Every line of standard output as JSON, of a run that must succeed.
pub fn json_lines(args: &[&str]) -> Vec<Value> {
    succeed(args)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")))
        .collect()
}

/// Exit status and standard error of a run that must fail.
pub fn fail(args: &[&str]) -> (i32, String) {
    let out = oscar(args);
    assert!(!out.status.success(), "oscar {args:?} should have failed");
    (out.status.code().unwrap_or(-1), String::from_utf8(out.stderr).unwrap())
}
