//! The least of the protocol of Redis and Valkey (RESP 2): commands go out as arrays of strings, and
//! their replies are read in the same order. No dependency does less, and every exchange has to end at
//! a point in time, whatever the server does.

use crate::deadline::Deadline;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Longest line of a reply.
const LINE: u64 = 4096;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Done,
    Number(i64),
    /// `None`: there is no such key.
    Value(Option<Vec<u8>>),
    /// The server refused the command.
    Refused(String),
}

/// Appends a command.
pub fn command(to: &mut Vec<u8>, parts: &[&[u8]]) {
    to.extend_from_slice(format!("*{}\r\n", parts.len()).as_bytes());
    for part in parts {
        to.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
        to.extend_from_slice(part);
        to.extend_from_slice(b"\r\n");
    }
}

/// Sends `count` commands and reads their replies, in which no value has more than `most` bytes.
///
/// # Errors
/// If the connection fails or the time is over. It is of no use afterwards.
pub fn exchange(
    stream: &TcpStream,
    commands: &[u8],
    count: usize,
    most: usize,
    time: Duration,
) -> io::Result<Vec<Reply>> {
    let mut until = Deadline { stream, until: Instant::now() + time };
    until.write_all(commands)?;
    // Exactly the replies to these commands come, so nothing is left in the buffer.
    let mut from = BufReader::with_capacity(1 << 16, until);
    (0..count).map(|_| read_reply(&mut from, most)).collect()
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

fn read_line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    from.take(LINE).read_until(b'\n', &mut line)?;
    match line.strip_suffix(b"\r\n") {
        Some(line) => Ok(String::from_utf8_lossy(line).into_owned()),
        None if line.is_empty() => Err(ErrorKind::UnexpectedEof.into()),
        None => Err(invalid("a line of a reply does not end")),
    }
}

/// Reads one reply.
fn read_reply(from: &mut impl BufRead, most: usize) -> io::Result<Reply> {
    let line = read_line(from)?;
    let number = |text: &str| text.parse::<i64>().map_err(|_| invalid("a reply without a number"));
    match line.split_at_checked(1) {
        Some(("+", _)) => Ok(Reply::Done),
        Some(("-", problem)) => Ok(Reply::Refused(problem.to_owned())),
        Some((":", text)) => Ok(Reply::Number(number(text)?)),
        Some(("$", text)) => match number(text)? {
            -1 => Ok(Reply::Value(None)),
            length if usize::try_from(length).is_ok_and(|length| length <= most) => {
                let mut bytes = Vec::new();
                from.take(length as u64).read_to_end(&mut bytes)?;
                let mut end = [0; 2];
                from.read_exact(&mut end)?;
                match end == *b"\r\n" {
                    true => Ok(Reply::Value(Some(bytes))),
                    false => Err(invalid("a value is longer than it says")),
                }
            }
            _ => Err(invalid("a value that is longer than any page")),
        },
        _ => Err(invalid("an unknown reply")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_replies_have_the_published_form() {
        let mut bytes = Vec::new();
        command(&mut bytes, &[b"SET", b"key", b"a\r\nb"]);
        assert_eq!(bytes, b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$4\r\na\r\nb\r\n");
        let read = |text: &str| read_reply(&mut text.as_bytes(), 5);
        assert_eq!(read("+OK\r\n").unwrap(), Reply::Done);
        assert_eq!(read(":-3\r\n").unwrap(), Reply::Number(-3));
        assert_eq!(read("$-1\r\n").unwrap(), Reply::Value(None));
        assert_eq!(read("$5\r\na\r\nbc\r\n").unwrap(), Reply::Value(Some(b"a\r\nbc".to_vec())));
        assert_eq!(read("-OOM no room\r\n").unwrap(), Reply::Refused("OOM no room".to_owned()));
        for bad in [
            "",
            "+OK",
            "$6\r\nabcdef\r\n",
            "$-2\r\n",
            "$x\r\n",
            "$3\r\nabcd\r\n",
            "$3\r\nab",
            "*1\r\n",
            "\r\n",
            "é",
        ] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        assert!(read(&format!("+{}\r\n", "x".repeat(5000))).is_err(), "a line without end");
    }
}
