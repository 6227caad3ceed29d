//! A log writer that never makes anyone wait.
//!
//! Lines go through a bounded queue to a thread that writes them. A line that finds the queue full, or that cannot be
//! written (closed pipe, full disk), is dropped and counted.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Log lines that were dropped since the start.
pub fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Lines that may wait to be written.
const QUEUE: usize = 4096;

enum Message {
    Line(Vec<u8>),
    /// Everything before it has been written.
    Flush(Sender<()>),
}

/// The sending end of the queue.
#[derive(Clone, Debug)]
pub struct LogWriter(SyncSender<Message>);

impl LogWriter {
    /// Starts the thread that writes to `output`.
    pub fn start(output: impl Write + Send + 'static) -> io::Result<Self> {
        let (sender, messages) = sync_channel(QUEUE);
        std::thread::Builder::new().name("log".into()).spawn(move || write_all(output, &messages))?;
        Ok(Self(sender))
    }

    /// Waits until the lines so far are written, but no longer than `patience`.
    pub fn flush(&self, patience: Duration) {
        let (done, wait) = channel();
        if self.0.try_send(Message::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(patience);
        }
    }
}

fn write_all(mut output: impl Write, messages: &Receiver<Message>) {
    for message in messages {
        match message {
            Message::Line(line) => {
                if output.write_all(&line).and_then(|()| output.flush()).is_err() {
                    DROPPED.fetch_add(1, Ordering::Relaxed);
                }
            }
            // Whoever waited may have given up.
            Message::Flush(done) => drop(done.send(())),
        }
    }
}

/// One line in the making; it is queued when it is complete.
pub struct Line<'a> {
    queue: &'a LogWriter,
    bytes: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        let line = std::mem::take(&mut self.bytes);
        if !line.is_empty() && self.queue.0.try_send(Message::Line(line)).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { queue: self, bytes: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::Receiver;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Blocks until it is allowed to go on, then fails.
    struct Broken(Receiver<()>);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_arrive_whole_and_in_order() {
        let output = Shared::default();
        let writer = LogWriter::start(output.clone()).unwrap();
        for number in 0..3 {
            let mut line = writer.make_writer();
            write!(line, "line ").unwrap();
            writeln!(line, "{number}").unwrap();
        }
        writer.flush(Duration::from_secs(20));
        assert_eq!(output.0.lock().unwrap().as_slice(), b"line 0\nline 1\nline 2\n");
    }

    #[test]
    fn an_output_that_hangs_or_fails_costs_lines_and_nothing_else() {
        let (go_on, gate) = channel();
        let writer = LogWriter::start(Broken(gate)).unwrap();
        let before = dropped();
        // One line is with the thread, the queue takes its fill, the rest is dropped at once.
        for _ in 0..QUEUE + 100 {
            writeln!(writer.make_writer(), "x").unwrap();
        }
        assert!(dropped() >= before + 99, "{}", dropped() - before);
        drop(go_on);
        writer.flush(Duration::from_secs(20));
    }
}
