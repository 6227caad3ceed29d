//! A server as a child process of this one.

use super::http;
use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Ends with its owner.
pub struct ServerProcess {
    child: Child,
    pub address: String,
    /// The thread that reads the log drops the pipe when this is set.
    log_closed: Arc<AtomicBool>,
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Already gone is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ServerProcess {
    /// Starts `oscar serve` on a free port and reads the address it prints.
    pub fn start(flags: &[String]) -> Result<Self> {
        let program = std::env::current_exe().context("the path of this program")?;
        let mut command = Command::new(program);
        command.args(["serve", "--port=0"]).args(flags).stdin(Stdio::null()).stdout(Stdio::null());
        command.env_remove("OSCAR_API_KEYS").env_remove("OSCAR_OPERATOR_KEYS").stderr(Stdio::piped());
        let mut child = command.spawn().context("starting `oscar serve`")?;
        let Some(pipe) = child.stderr.take() else { bail!("the server has no log pipe") };
        let mut log = BufReader::new(pipe);
        let mut seen = String::new();
        let address = loop {
            let begin = seen.len();
            ensure!(log.read_line(&mut seen)? > 0, "the server ended before it served:\n{seen}");
            if let Some((_, rest)) = seen[begin..].split_once(" on http://") {
                break rest.split_whitespace().next().unwrap_or_default().to_owned();
            }
        };
        let log_closed = Arc::new(AtomicBool::new(false));
        let closed = log_closed.clone();
        std::thread::spawn(move || {
            let mut line = Vec::new();
            while !closed.load(Ordering::Relaxed) && log.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                line.clear();
            }
        });
        Ok(Self { child, address, log_closed })
    }

    /// From the next line on nobody reads the log, and the pipe is closed.
    pub fn close_log(&self) {
        self.log_closed.store(true, Ordering::Relaxed);
    }

    /// Resident memory in bytes.
    pub fn resident_bytes(&self) -> Result<usize> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))
            .context("the server has ended, or this system has no /proc")?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok());
        Ok(kilobytes.context("no VmRSS in /proc")? << 10)
    }

    pub fn open_files(&self) -> Result<usize> {
        let folder = format!("/proc/{}/fd", self.child.id());
        Ok(std::fs::read_dir(&folder).with_context(|| folder)?.count())
    }

    /// Ends the server as `kill -9` does.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Asks the server to end; the exit status.
    pub fn terminate(&mut self, patience: Duration) -> Result<i32> {
        let pid = self.child.id().to_string();
        ensure!(Command::new("kill").args(["-TERM", &pid]).status()?.success(), "kill -TERM {pid}");
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code().unwrap_or(-1));
            }
            ensure!(begun.elapsed() < patience, "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the server to end while it streams an answer, which must arrive whole; the exit status.
    pub fn end_while_streaming(&mut self, patience: Duration) -> Result<i32> {
        let body = json!({"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 100,
            "ignore_eos": true, "stream": true});
        let mut stream = http::send(&self.address, "/v1/chat/completions", &body.to_string(), &[])?;
        stream.set_read_timeout(Some(patience))?;
        stream.peek(&mut [0; 16])?;
        let reader = std::thread::spawn(move || http::read(&mut stream, http::Pace::Fast));
        let status = self.terminate(patience)?;
        let Ok(answer) = reader.join() else { bail!("the reader of a stream panicked") };
        ensure!(answer?.body.contains("[DONE]"), "a stream was cut off while the server drained");
        Ok(status)
    }
}
