//! The least of an HTTP client: one request on a connection of its own.

use anyhow::{Context, Result, bail};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// How an answer is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    Fast,
    /// A few bytes at a time.
    Slow,
    /// Hangs up after that many bytes.
    Leave(usize),
}

pub struct Answer {
    /// 0 if the client left before it came.
    pub status: u16,
    pub body: String,
    /// Milliseconds between two pieces with events, the first of which is not the answer's first.
    pub gaps: Vec<f64>,
}

/// Sends a request, a GET if the body is empty.
pub fn send(address: &str, path: &str, body: &str, headers: &[(&str, &str)]) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    let method = if body.is_empty() { "GET" } else { "POST" };
    let mut head =
        format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    let defaults = [("Host", address), ("Content-Type", "application/json")];
    for (name, value) in
        defaults.iter().filter(|(name, _)| !headers.iter().any(|h| h.0 == *name)).chain(headers)
    {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all((head + "\r\n").as_bytes())?;
    match stream.write_all(body.as_bytes()) {
        // A refusal may come before all is sent.
        Err(error) if !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
            Err(error)
        }
        _ => Ok(stream),
    }
}

/// Reads the answer to its end, as far as the pace allows.
pub fn read(stream: &mut TcpStream, pace: Pace) -> Result<Answer> {
    let mut bytes = Vec::new();
    let mut piece = [0; 8192];
    let (mut gaps, mut last, mut events) = (Vec::new(), Instant::now(), 0);
    loop {
        let most = match pace {
            Pace::Fast => piece.len(),
            Pace::Slow => {
                std::thread::sleep(Duration::from_millis(15));
                256
            }
            Pace::Leave(after) if bytes.len() >= after => {
                return Ok(Answer { status: 0, body: String::new(), gaps });
            }
            Pace::Leave(_) => 200,
        };
        match stream.read(&mut piece[..most]) {
            Ok(0) => break,
            Ok(read) => {
                bytes.extend_from_slice(&piece[..read]);
                // Comments that keep a connection alive are no events.
                if piece[..read].windows(6).any(|text| text == b"data: ") {
                    events += 1;
                    if events > 2 {
                        gaps.push(last.elapsed().as_secs_f64() * 1e3);
                    }
                    last = Instant::now();
                }
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset && !bytes.is_empty() => break,
            Err(error) => return Err(error).context("reading the answer"),
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { bail!("no HTTP answer: {text:?}") };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no status")?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Ok(Answer { status, body: if chunked { unchunked(body)? } else { body.to_owned() }, gaps })
}

/// Sends and reads.
pub fn call(
    address: &str,
    path: &str,
    body: &str,
    headers: &[(&str, &str)],
    patience: Duration,
) -> Result<Answer> {
    let mut stream = send(address, path, body, headers)?;
    stream.set_read_timeout(Some(patience))?;
    read(&mut stream, Pace::Fast)
}

/// The text of a chunked body, which must end with its empty chunk.
fn unchunked(mut body: &str) -> Result<String> {
    let mut text = String::new();
    loop {
        let chunk = body.split_once("\r\n").and_then(|(size, rest)| {
            let size = usize::from_str_radix(size, 16).ok()?;
            Some((rest.get(..size)?, rest.get(size + 2..)?))
        });
        let Some((chunk, rest)) = chunk else {
            bail!("a chunked answer is cut off after {} bytes", text.len())
        };
        if chunk.is_empty() {
            return Ok(text);
        }
        text.push_str(chunk);
        body = rest;
    }
}
