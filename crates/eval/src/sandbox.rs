//! Runs a model's code to test it: only if the user allows it, in a process of its own, without
//! network, with limits of time, memory and file size.
//!
//! The limits come from `unshare` (network and process namespaces) and the shell's `ulimit`. If the
//! system refuses them, nothing is run: there is no weaker mode. **Not** protected: files that the
//! user may read or write.

use crate::error::{EvalError, Result};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Limits of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub time: Duration,
    pub memory_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { time: Duration::from_secs(10), memory_bytes: 2 << 30 }
    }
}

/// Largest file the code may write.
const FILE_BYTES: u64 = 16 << 20;
const PATIENCE: Duration = Duration::from_millis(10);

/// A checked way to run Python code.
#[derive(Clone, Debug)]
pub struct Sandbox {
    limits: Limits,
}

impl Sandbox {
    /// Checks that this system can isolate code.
    pub fn new(limits: Limits) -> Result<Self> {
        let sandbox = Self { limits };
        let refused = |why: String| {
            EvalError::Sandbox(format!(
                "code cannot be run safely here ({why}): `unshare` (util-linux, with user namespaces allowed) and `python3` \
                 are needed; run on such a machine, e.g. in a container with --security-opt seccomp=unconfined"
            ))
        };
        // The check: isolated code sees no network interface except its own loopback.
        let probe = "import socket\nassert [n for _, n in socket.if_nameindex()] == ['lo'], 'network'\n";
        match sandbox.run(probe) {
            Ok(true) => Ok(sandbox),
            Ok(false) => Err(refused("a test program failed in isolation".into())),
            Err(error) => Err(refused(error.to_string())),
        }
    }

    /// Whether the program ends by itself, in time, with status 0.
    pub fn passes(&self, program: &str) -> Result<bool> {
        self.run(program)
    }

    fn run(&self, program: &str) -> Result<bool> {
        let failed = |what: &str, e: std::io::Error| EvalError::Sandbox(format!("{what}: {e}"));
        let dir = tempfile::tempdir().map_err(|e| failed("a folder for the code", e))?;
        std::fs::write(dir.path().join("program.py"), program).map_err(|e| failed("writing the code", e))?;
        let limits = format!(
            "ulimit -v {}; ulimit -t {}; ulimit -f {}; ulimit -c 0; exec python3 -I program.py",
            self.limits.memory_bytes / 1024,
            self.limits.time.as_secs().max(1) + 1,
            FILE_BYTES / 512,
        );
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
        // A process namespace of its own: when its first process dies, everything the code started
        // dies too.
        let mut child = Command::new("unshare")
            .args(["--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--", "sh", "-c", &limits])
            .current_dir(dir.path())
            .env_clear()
            .env("PATH", path)
            .env("HOME", dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|e| failed("unshare", e))?;
        let started = Instant::now();
        loop {
            match child.try_wait().map_err(|e| failed("waiting for the code", e))? {
                Some(status) => return Ok(status.success()),
                None if started.elapsed() >= self.limits.time => {
                    let killed = child.kill().and_then(|()| child.wait());
                    return killed.map(|_| false).map_err(|e| failed("ending the code", e));
                }
                None => std::thread::sleep(PATIENCE),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_isolated_and_limited_or_refused() {
        let limits = Limits { time: Duration::from_secs(2), memory_bytes: 1 << 30 };
        let sandbox = match Sandbox::new(limits) {
            Ok(sandbox) => sandbox,
            Err(error) => {
                // A machine without namespaces or Python must refuse, and say what is missing.
                assert!(error.to_string().contains("unshare"), "{error}");
                return;
            }
        };
        for (program, passes) in [
            ("assert 1 + 1 == 2", true),
            ("assert 1 + 1 == 3", false),
            ("raise SystemExit(3)", false),
            ("x = bytearray(2 << 30)", false),
            ("import socket; socket.create_connection(('127.0.0.1', 1), 1)", false),
            ("while True: pass", false),
            ("import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)", false),
        ] {
            assert_eq!(sandbox.passes(program).unwrap(), passes, "{program}");
        }
    }
}
