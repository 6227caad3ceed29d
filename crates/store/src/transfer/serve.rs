//! A desk on a TCP port.

use super::desk::TransferDesk;
use super::wire::{Ask, Question, Verdict, answer_head, kinds_byte};
use crate::counters::add;
use crate::deadline::Deadline;
use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Most connections at once; further ones are closed.
const CONNECTIONS: usize = 256;
/// How long a question may be waited for.
const IDLE: Duration = Duration::from_secs(30);
/// How long an answer may take to be read.
const ANSWER: Duration = Duration::from_secs(60);

/// How often tickets are looked through for those whose time is over.
const EXPIRE: Duration = Duration::from_secs(1);

/// Hands out the pages of a desk until the process ends, on threads of its own.
///
/// # Errors
/// If the system gives no thread.
pub fn serve_desk(desk: Arc<TransferDesk>, listener: TcpListener) -> io::Result<()> {
    let (open, kept) = (Arc::new(AtomicUsize::new(0)), desk.clone());
    let expire = move || {
        loop {
            std::thread::sleep(EXPIRE);
            kept.expire();
        }
    };
    Builder::new().name("transfer-expire".into()).spawn(expire)?;
    let accept = move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // Out of files, most likely. It passes.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            let place = Place::take(&open);
            let desk = desk.clone();
            let Some(place) = place else {
                add(&desk.counters.bad_connections, 1);
                continue;
            };
            // Without a thread the connection is closed, and the other machine computes the prompt.
            let _ = Builder::new().name("transfer".into()).spawn(move || {
                let _place = place;
                if answer_all(&desk, &stream).is_err_and(|error| error.kind() == io::ErrorKind::InvalidData) {
                    add(&desk.counters.bad_connections, 1);
                }
            });
        }
    };
    Builder::new().name("transfer-accept".into()).spawn(accept).map(drop)
}

/// One of the places for connections; free again when it is dropped.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(open: &Arc<AtomicUsize>) -> Option<Self> {
        let free = |count| (count < CONNECTIONS).then_some(count + 1);
        open.fetch_update(Ordering::SeqCst, Ordering::SeqCst, free).ok()?;
        Some(Self(open.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn answer_all(desk: &TransferDesk, stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    while let Some(question) = Question::read(&mut Deadline { stream, until: Instant::now() + IDLE })? {
        answer(desk, question, &mut Deadline { stream, until: Instant::now() + ANSWER })?;
    }
    Ok(())
}

/// Answers one question.
fn answer(desk: &TransferDesk, question: Question, to: &mut impl Write) -> io::Result<()> {
    let Question { ticket, fingerprint, ask } = question;
    if fingerprint != desk.fingerprint {
        add(&desk.counters.other_fingerprints, 1);
        return to.write_all(&answer_head(Verdict::OtherFingerprint, 0));
    }
    let found = match &ask {
        Ask::Find(hashes) => desk.find(ticket, hashes).map(|kinds| {
            let mut bytes = answer_head(Verdict::Answered, kinds.len());
            bytes.extend(kinds.into_iter().map(kinds_byte));
            (bytes, Vec::new())
        }),
        Ask::Get(names) => {
            desk.get(ticket, names).map(|pages| (answer_head(Verdict::Answered, pages.len()), pages))
        }
        Ask::Release => {
            desk.release(ticket);
            Some((answer_head(Verdict::Answered, 0), Vec::new()))
        }
    };
    let Some((head, pages)) = found else {
        add(&desk.counters.unknown_tickets, 1);
        return to.write_all(&answer_head(Verdict::NoTicket, 0));
    };
    to.write_all(&head)?;
    for page in pages {
        let bytes = page.as_deref().map_or(&[][..], Vec::as_slice);
        to.write_all(&(bytes.len() as u64).to_le_bytes())?;
        to.write_all(bytes)?;
        add(&desk.counters.sent_pages, usize::from(page.is_some()));
        add(&desk.counters.sent_bytes, bytes.len());
    }
    Ok(())
}
