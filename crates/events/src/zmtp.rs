//! ZMTP 3.0, the wire protocol of ZeroMQ, as far as a PUB and a ROUTER socket need it: a greeting,
//! the NULL mechanism, frames.
//!
//! Written here because the sockets ask for no key and the `zeromq` crate (0.7) reserves whatever
//! length a frame's header states: ten bytes from anyone who reaches the port ended the process. Here
//! a frame, a message and a handshake are bounded before anything is stored.

use bytes::Bytes;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

/// How long the handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Largest frame that a reader may send: a topic, or the number of a batch.
const MOST_FRAME: u64 = 64 << 10;

/// Most frames of one message.
const MOST_FRAMES: usize = 16;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What a peer sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    Message(Vec<Vec<u8>>),
    /// The name of a command and what follows it.
    Command(Vec<u8>, Vec<u8>),
}

/// The receiving half of a connection.
pub struct Receiver(OwnedReadHalf);

/// The sending half of a connection.
pub struct Sender(OwnedWriteHalf);

/// Greets a peer as a socket of type `own`; its type must be one of `theirs`.
///
/// # Errors
/// If the peer does not speak the protocol in time.
pub async fn accept(stream: TcpStream, own: &str, theirs: &[&str]) -> io::Result<(Receiver, Sender)> {
    stream.set_nodelay(true)?;
    let (reader, writer) = stream.into_split();
    let (mut receiver, mut sender) = (Receiver(reader), Sender(writer));
    let greeted = async {
        sender.0.write_all(&greeting()).await?;
        let mut greeting = [0; 64];
        receiver.0.read_exact(&mut greeting).await?;
        let is_zmtp = greeting[0] == 0xff && greeting[9] & 1 == 1 && greeting[10] >= 3;
        if !is_zmtp || greeting[12..32] != *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
            return Err(invalid("no ZMTP 3 greeting with the NULL mechanism"));
        }
        let mut ready = property("Socket-Type", own);
        ready.extend(property("Identity", ""));
        sender.command("READY", &ready).await?;
        match receiver.receive().await? {
            Received::Command(name, rest) if name == b"READY" => match socket_type(&rest) {
                Some(kind) if theirs.iter().any(|known| known.as_bytes() == kind) => Ok(()),
                _ => Err(invalid("a socket of another type")),
            },
            _ => Err(invalid("no READY command")),
        }
    };
    timeout(HANDSHAKE, greeted).await??;
    Ok((receiver, sender))
}

fn greeting() -> [u8; 64] {
    let mut bytes = [0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn property(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![name.len() as u8];
    bytes.extend_from_slice(name.as_bytes());
    bytes.extend_from_slice(&(value.len() as u32).to_be_bytes());
    bytes.extend_from_slice(value.as_bytes());
    bytes
}

/// The value of the property `Socket-Type`.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (&length, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(length))?;
        let (length, rest) = rest.split_at_checked(4)?;
        let length = u32::from_be_bytes(length.try_into().ok()?) as usize;
        let (value, rest) = rest.split_at_checked(length)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
}

impl Receiver {
    /// The next message or command.
    ///
    /// # Errors
    /// If the peer has gone, or sends something too large or malformed.
    pub async fn receive(&mut self) -> io::Result<Received> {
        let mut frames = Vec::new();
        loop {
            let flags = self.0.read_u8().await?;
            if flags & !(MORE | LONG | COMMAND) != 0 {
                return Err(invalid("reserved flags"));
            }
            let length = match flags & LONG != 0 {
                true => self.0.read_u64().await?,
                false => u64::from(self.0.read_u8().await?),
            };
            if length > MOST_FRAME || frames.len() == MOST_FRAMES {
                return Err(invalid("a message that is too large"));
            }
            let mut frame = vec![0; length as usize];
            self.0.read_exact(&mut frame).await?;
            if flags & COMMAND != 0 {
                let (&name, rest) = frame.split_first().ok_or_else(|| invalid("an empty command"))?;
                let (name, rest) =
                    rest.split_at_checked(usize::from(name)).ok_or_else(|| invalid("a cut command"))?;
                return Ok(Received::Command(name.to_vec(), rest.to_vec()));
            }
            frames.push(frame);
            if flags & MORE == 0 {
                return Ok(Received::Message(frames));
            }
        }
    }
}

impl Sender {
    /// Sends a message of several frames.
    ///
    /// # Errors
    /// If the peer has gone, or takes longer than `patience` to read it.
    pub async fn send(&mut self, frames: &[Bytes], patience: Duration) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
        for (index, frame) in frames.iter().enumerate() {
            put(&mut bytes, if index + 1 < frames.len() { MORE } else { 0 }, frame);
        }
        timeout(patience, self.0.write_all(&bytes)).await?
    }

    pub async fn command(&mut self, name: &str, rest: &[u8]) -> io::Result<()> {
        let mut body = vec![name.len() as u8];
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(rest);
        let mut bytes = Vec::new();
        put(&mut bytes, COMMAND, &body);
        timeout(HANDSHAKE, self.0.write_all(&bytes)).await?
    }
}

fn put(bytes: &mut Vec<u8>, flags: u8, frame: &[u8]) {
    match u8::try_from(frame.len()) {
        Ok(length) => bytes.extend_from_slice(&[flags, length]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend_from_slice(&(frame.len() as u64).to_be_bytes());
        }
    }
    bytes.extend_from_slice(frame);
}

fn invalid(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB";

    /// What the server makes of the bytes of a client, after the handshake.
    async fn outcome(bytes: &[u8]) -> io::Result<Received> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        client.write_all(bytes).await.unwrap();
        client.shutdown().await.unwrap();
        let (mut receiver, _sender) = accept(listener.accept().await?.0, "PUB", &["SUB"]).await?;
        receiver.receive().await
    }

    #[tokio::test]
    async fn frames_are_bounded_before_they_are_stored() {
        let hello = [&greeting()[..], READY].concat();
        let after = |rest: &[u8]| [&hello[..], rest].concat();
        let message = outcome(&after(b"\x01\x01a\x00\x02bc")).await.unwrap();
        assert_eq!(message, Received::Message(vec![b"a".to_vec(), b"bc".to_vec()]));
        let command = outcome(&after(b"\x04\x07\x04PING\x00\x01")).await.unwrap();
        assert_eq!(command, Received::Command(b"PING".to_vec(), vec![0, 1]));
        let many = [1, 0].repeat(100);
        for bytes in
            [&b"\x02\x6f\x63\x63\x63\x63\x63\x63\x63"[..], b"\x08\x00", b"\x04\x00", b"\x04\x01\x09", &many]
        {
            assert_eq!(
                outcome(&after(bytes)).await.unwrap_err().kind(),
                io::ErrorKind::InvalidData,
                "{bytes:?}"
            );
        }
        let router = [&greeting()[..], b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"].concat();
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 200], &router] {
            assert!(outcome(bytes).await.is_err(), "{bytes:?}");
        }
    }
}
