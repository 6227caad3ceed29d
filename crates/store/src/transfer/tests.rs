//! Two sides on loopback, and everything that can go wrong between them.

use super::wire::{answer_head, kinds_byte};
use super::*;
use crate::{Fingerprint, FingerprintParts, Loaded, Page, PageKind, PageName, PageRef, PageStore};
use oscar_cache::{PageHash, PrefixKey, StoredKinds};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCKS: usize = 4;
const PAYLOAD: usize = 3000;

fn fingerprint(model: &str) -> Fingerprint {
    FingerprintParts::default().text("model", model).finish().0
}

fn tokens() -> Vec<u32> {
    (0..BLOCKS as u32 * 64).map(|i| i * 7 % 1000).collect()
}

fn chain() -> Vec<PageHash> {
    PageHash::chain(PrefixKey::new(None, &tokens())).collect()
}

fn payload(block: usize) -> Vec<u8> {
    (0..PAYLOAD).map(|i| (i * 31 + block * 7) as u8).collect()
}

fn name(block: usize) -> PageName {
    PageName { hash: chain()[block], block: block as u32, kind: PageKind::Coded }
}

fn pages() -> Vec<Page> {
    let tokens = tokens();
    let page = |block: usize| {
        let asked = PageRef { name: name(block), tokens: &tokens[block * 64..][..64] };
        let mut page = Page::new(asked, 128, PAYLOAD);
        page.payload().extend(payload(block));
        page
    };
    (0..BLOCKS).map(page).collect()
}

/// A desk with one ticket on a port of its own.
fn desk(time: Duration) -> (Arc<TransferDesk>, Ticket, u16) {
    let options = DeskOptions { bytes: 1 << 20, time };
    let desk = Arc::new(TransferDesk::new(fingerprint("test"), options));
    let ticket = desk.keep(pages(), tokens().len()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    serve_desk(desk.clone(), listener).unwrap();
    (desk, ticket, port)
}

fn peers(model: &str, patience: Duration) -> Arc<Peers> {
    Arc::new(Peers::new(fingerprint(model), PAYLOAD, patience))
}

fn open(peers: &Arc<Peers>, port: u16, id: TicketId) -> RemotePages {
    let rules = PeerRules(vec![format!("127.0.0.1:{port}").parse().unwrap()]);
    peers.open(rules.ticket("127.0.0.1", port, id).unwrap())
}

fn fetch(remote: &RemotePages) -> Vec<Option<Loaded>> {
    let tokens = tokens();
    let asked = |block: usize| PageRef { name: name(block), tokens: &tokens[block * 64..][..64] };
    remote.get_many(&(0..BLOCKS).map(asked).collect::<Vec<_>>())
}

/// Whatever came is right.
fn check(found: &[Option<Loaded>]) -> usize {
    for (block, loaded) in found.iter().enumerate() {
        if let Some(loaded) = loaded {
            assert_eq!((loaded.payload(), loaded.progress()), (&payload(block)[..], 128));
        }
    }
    found.iter().flatten().count()
}

const PATIENCE: Duration = Duration::from_secs(20);
const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn pages_arrive_as_they_went_and_a_ticket_ends_when_it_is_released() {
    let (desk, ticket, port) = desk(MINUTE);
    let peers = peers("test", PATIENCE);
    let remote = open(&peers, port, ticket.id);
    let coded = StoredKinds { coded: true, ..StoredKinds::default() };
    assert_eq!(remote.exists_prefix(&chain(), &PageKind::ALL), [coded; BLOCKS]);
    let mut other = chain();
    other[2] = PageHash::from_bytes([1; 32]);
    assert_eq!(remote.exists_prefix(&other, &PageKind::ALL), [coded; 2], "up to the first that is not there");
    assert_eq!(check(&fetch(&remote)), BLOCKS);
    // The desk counts a page once it has sent it, which may be after its arrival.
    let begun = Instant::now();
    while desk.stats().sent_pages < BLOCKS as u64 && begun.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    let held = desk.stats();
    assert_eq!((held.tickets, held.tickets_held, held.sent_pages), (1, 1, BLOCKS as u64));
    remote.release();
    assert_eq!((desk.stats().tickets_held, desk.stats().held_bytes), (0, 0));
    let again = open(&peers, port, ticket.id);
    assert_eq!(again.exists_prefix(&chain(), &PageKind::ALL), []);
    let stats = peers.stats();
    assert_eq!((stats.fetched_pages, stats.fallbacks, stats.expired), (BLOCKS as u64, 1, 1));
    assert_eq!(desk.stats().unknown_tickets, 1);
}

#[test]
fn a_ticket_expires() {
    let (desk, ticket, port) = desk(Duration::from_millis(1));
    std::thread::sleep(Duration::from_millis(5));
    let peers = peers("test", PATIENCE);
    assert_eq!(open(&peers, port, ticket.id).exists_prefix(&chain(), &PageKind::ALL), []);
    assert_eq!((peers.stats().expired, desk.stats().tickets_expired), (1, 1));
    assert_eq!(desk.stats().held_bytes, 0);
}

#[test]
fn another_model_gets_nothing() {
    let (desk, ticket, port) = desk(MINUTE);
    let peers = peers("other", PATIENCE);
    let remote = open(&peers, port, ticket.id);
    assert_eq!(remote.exists_prefix(&chain(), &PageKind::ALL), []);
    assert_eq!(check(&fetch(&remote)), 0);
    let stats = peers.stats();
    assert_eq!((stats.fallbacks, stats.wrong_fingerprint), (1, 1), "counted once");
    assert_eq!((desk.stats().other_fingerprints, desk.stats().sent_pages), (1, 0));
}

#[test]
fn a_desk_keeps_no_more_than_it_may() {
    let (desk, _, _) = desk(MINUTE);
    let held = desk.stats().held_bytes as usize;
    assert!(desk.has_room((1 << 20) - held) && !desk.has_room((1 << 20) - held + 1));
    assert!(!desk.has_room(usize::MAX) && !desk.has_room(0), "a ticket for nothing is none");
    assert_eq!(desk.stats().tickets_refused, 3);
}

/// A machine in the middle that changes one byte of what the desk sends.
fn tampering(port: u16, place: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        let (mut from, mut to, mut at) = (server, client, 0);
        let mut piece = [0; 1000];
        while let Ok(count @ 1..) = from.read(&mut piece) {
            if (at..at + count).contains(&place) {
                piece[place - at] ^= 0x10;
            }
            at += count;
            if to.write_all(&piece[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
    own
}

#[test]
fn a_bit_that_flips_on_the_way_is_seen() {
    let (_, ticket, port) = desk(MINUTE);
    // Magic, verdict, count, length, then header and payload of the first, second and last page.
    for place in [3, 8, 12, 16, 24, 30, 100, 400, 500, 3000, 4000, 7000, 13000] {
        // A length that grows makes the client wait for bytes that never come.
        let peers = peers("test", Duration::from_millis(500));
        let remote = open(&peers, tampering(port, place), ticket.id);
        assert!(check(&fetch(&remote)) < BLOCKS, "byte {place}");
        let stats = peers.stats();
        assert_eq!(stats.fallbacks, 1, "byte {place}: {stats:?}");
        assert_eq!(check(&fetch(&remote)), 0, "nothing more is asked");
    }
}

/// A machine that answers everybody with these bytes, piece by piece.
fn answering(bytes: Vec<u8>, piece: usize, pause: Duration) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for mut stream in listener.incoming().flatten() {
            for part in bytes.chunks(piece) {
                std::thread::sleep(pause);
                if stream.write_all(part).is_err() {
                    break;
                }
            }
            open.push(stream);
        }
    });
    port
}

/// A lie of the other machine: its bytes, how they are counted.
type Lie = (&'static str, Vec<u8>, fn(&TransferStats) -> u64);

#[test]
fn a_machine_that_lies_gets_the_prompt_computed_here() {
    let sealed = pages().remove(1).seal(&fingerprint("test"));
    let foreign = pages().remove(0).seal(&fingerprint("other"));
    let answer = |page: &[u8], length: u64| {
        [answer_head(Verdict::Answered, BLOCKS), length.to_le_bytes().to_vec(), page.to_vec()].concat()
    };
    let lies: [Lie; 6] = [
        ("another page", answer(&sealed.bytes, sealed.bytes.len() as u64), |s| s.corrupt),
        ("another model\'s page", answer(&foreign.bytes, foreign.bytes.len() as u64), |s| {
            s.wrong_fingerprint
        }),
        ("a page without end", answer(&sealed.bytes, 1 << 60), |s| s.corrupt),
        ("more pages than asked for", answer_head(Verdict::Answered, BLOCKS + 1), |s| s.corrupt),
        ("fewer pages", answer_head(Verdict::Answered, 0), |s| s.expired),
        ("nonsense", b"HTTP/1.1 200 OK\r\n\r\n".to_vec(), |s| s.corrupt),
    ];
    for (what, bytes, counter) in lies {
        let peers = peers("test", Duration::from_secs(5));
        let port = answering(bytes, usize::MAX, Duration::ZERO);
        let remote = open(&peers, port, TicketId([5; 16]));
        assert_eq!(check(&fetch(&remote)), 0, "{what}");
        let stats = peers.stats();
        assert_eq!((stats.fallbacks, counter(&stats)), (1, 1), "{what}: {stats:?}");
    }
    // It says that it has pages and then has none.
    let kinds = vec![kinds_byte(StoredKinds { coded: true, ..StoredKinds::default() }); BLOCKS];
    let bytes = [answer_head(Verdict::Answered, BLOCKS), kinds].concat();
    let peers = peers("test", Duration::from_secs(5));
    let remote = open(&peers, answering(bytes, usize::MAX, Duration::ZERO), TicketId([5; 16]));
    assert_eq!(remote.exists_prefix(&chain(), &PageKind::ALL).len(), BLOCKS);
}

#[test]
fn a_machine_that_is_slow_or_gone_is_left_alone() {
    // Bytes come all the time, but never all of them.
    let slow = answering(answer_head(Verdict::Answered, BLOCKS), 1, Duration::from_millis(40));
    let silent = answering(Vec::new(), 1, Duration::ZERO);
    // Nobody listens on port 1. A port that was free a moment ago may be another test's by now.
    let gone = 1;
    for (port, late) in [(slow, 1), (silent, 1), (gone, 0)] {
        let peers = peers("test", Duration::from_millis(200));
        assert_eq!(open(&peers, port, TicketId([5; 16])).exists_prefix(&chain(), &PageKind::ALL), []);
        let stats = peers.stats();
        assert_eq!((stats.fallbacks, stats.timeouts, stats.unreachable), (1, late, 1 - late), "{stats:?}");
        // The next request does not wait.
        assert_eq!(open(&peers, port, TicketId([6; 16])).exists_prefix(&chain(), &PageKind::ALL), []);
        assert_eq!((peers.stats().fallbacks, peers.stats().timeouts), (2, late));
    }
}

#[test]
fn nonsense_does_not_stop_a_desk() {
    let (desk, ticket, port) = desk(MINUTE);
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"OSCARKV\x02", &[0; 64], b"OSC"] {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        // The desk closes without a word.
        assert_eq!(stream.read(&mut [0; 16]).unwrap_or(0), 0);
    }
    let peers = peers("test", PATIENCE);
    assert_eq!(check(&fetch(&open(&peers, port, ticket.id))), BLOCKS);
    assert_eq!(desk.stats().bad_connections, 3, "one was cut off, three were no questions");
}
