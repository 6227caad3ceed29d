//! Pages of a store that others may write to, pages that come from other machines, and the sockets
//! that publish the prefix cache.

use oscar_events::{EventPublisher, EventsConfig};
use oscar_fuzz::fuzz;
use oscar_store::{
    Ask, Counters, DeskOptions, DirectoryStore, FingerprintParts, Page, PageKind, PageName, PageRef,
    PageStore, PeerRules, Peers, Question, StoreLimits, TransferDesk, serve_desk, verify_file,
};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn only_file(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter_map(|path| if path.is_dir() { only_file(&path) } else { Some(path) })
        .find(|path| path.extension().is_some_and(|ending| ending == "coded"))
}

/// Whatever a file holds, a page that is returned is the one that was stored.
#[test]
fn page_files() {
    let root = tempfile::tempdir().unwrap();
    let (fingerprint, about) = FingerprintParts::default().text("model", "fuzz").finish();
    let counters = Arc::new(Counters::default());
    let store =
        DirectoryStore::open(root.path(), fingerprint, &about, StoreLimits::default(), counters).unwrap();
    let tokens: Vec<u32> = (5..69).collect();
    let hash = oscar_cache::PageHash::chain(oscar_cache::PrefixKey::new(None, &tokens)).next().unwrap();
    let name = PageName { hash, block: 0, kind: PageKind::Coded };
    let asked = PageRef { name, tokens: &tokens };
    let payload: Vec<u8> = (0..600u32).map(|i| (i * i) as u8).collect();
    let mut page = Page::new(asked, 64, payload.len());
    page.payload().extend_from_slice(&payload);
    assert_eq!(store.put_many(&[page.seal(&fingerprint)]), [true]);
    let path = only_file(root.path()).expect("the page is a file");
    let whole = std::fs::read(&path).unwrap();
    fuzz("page_files", std::slice::from_ref(&whole), 1000, |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let valid = verify_file(&path).is_ok_and(|verified| verified.is_ok());
        let found = store.get_many(&[asked]).remove(0);
        assert_eq!(valid, found.is_some());
        if let Some(found) = found {
            assert_eq!((found.payload(), found.progress()), (&payload[..], 64));
        }
        // A damaged page may be removed from its folder, so the folder is not asked for here.
        std::fs::write(&path, &whole).unwrap();
    });
}

/// Whatever a machine asks or answers, a page that arrives is the one that was sent.
#[test]
fn transfers() {
    let (fingerprint, _) = FingerprintParts::default().text("model", "fuzz").finish();
    let tokens: Vec<u32> = (5..69).collect();
    let hash = oscar_cache::PageHash::chain(oscar_cache::PrefixKey::new(None, &tokens)).next().unwrap();
    let name = PageName { hash, block: 0, kind: PageKind::Coded };
    let asked = PageRef { name, tokens: &tokens };
    let payload: Vec<u8> = (0..600u32).map(|i| (i * i) as u8).collect();
    let mut page = Page::new(asked, 128, payload.len());
    page.payload().extend_from_slice(&payload);
    let options = DeskOptions { bytes: 1 << 20, time: Duration::from_secs(3600) };
    let desk = Arc::new(TransferDesk::new(fingerprint, options));
    let ticket = desk.keep(vec![page], tokens.len()).unwrap();
    let bind = || TcpListener::bind("127.0.0.1:0").unwrap();
    let listener = bind();
    let own = listener.local_addr().unwrap();
    serve_desk(desk.clone(), listener).unwrap();
    let question = |ask| Question { ticket: ticket.id, fingerprint, ask }.to_bytes();
    let questions = [question(Ask::Find(vec![hash])), question(Ask::Get(vec![name]))];

    // Questions: read in memory, and some by the desk itself.
    fuzz("transfer_questions", &questions, 5000, |bytes| {
        if let Ok(Some(read)) = Question::read(&mut &bytes[..]) {
            assert!(bytes.starts_with(&read.to_bytes()));
        }
    });
    fuzz("transfer_desk", &questions, 60, |bytes| {
        let mut stream = TcpStream::connect(own).unwrap();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let mut stream = TcpStream::connect(own).unwrap();
    stream.write_all(&questions[1]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer.len() > payload.len(), "the desk still answers");

    // Answers: a machine that says whatever this run says.
    let said = Arc::new(Mutex::new(answer.clone()));
    let (listener, saying) = (bind(), said.clone());
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // The whole question, so that closing resets nothing.
            let _ = Question::read(&mut stream);
            let _ = stream.write_all(&saying.lock().unwrap());
        }
    });
    let peers = Arc::new(Peers::new(fingerprint, payload.len(), Duration::from_secs(20)));
    let rules = PeerRules(vec![format!("127.0.0.1:{port}").parse().unwrap()]);
    let fetch = || {
        let remote = peers.open(rules.ticket("127.0.0.1", port, ticket.id).unwrap());
        let found = remote.get_many(&[asked]).remove(0);
        if let Some(found) = &found {
            assert_eq!((found.payload(), found.progress()), (&payload[..], 128));
        }
        found.is_some()
    };
    assert!(fetch(), "a right answer is taken");
    fuzz("transfer_answers", std::slice::from_ref(&answer), 300, |bytes| {
        *said.lock().unwrap() = bytes.to_vec();
        fetch();
    });
}

/// The bytes of a ZeroMQ client (ZMTP 3.0) that asks the replay socket for everything.
fn replay_request() -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
    bytes.extend_from_slice(b"NULL");
    bytes.resize(64, 0);
    let mut ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER".to_vec();
    ready.extend_from_slice(b"\x08Identity\x00\x00\x00\x00");
    bytes.extend_from_slice(&[4, ready.len() as u8]);
    bytes.extend_from_slice(&ready);
    bytes.extend_from_slice(&[1, 0]);
    bytes.extend_from_slice(&[0, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
    bytes
}

/// Sends bytes and reads until `end` has come, the server closes, or the time is over.
fn talk(address: SocketAddr, bytes: &[u8], end: &[u8], patience: Duration) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    // The server may close before all is sent.
    let _ = stream.write_all(bytes);
    stream.set_read_timeout(Some(patience)).unwrap();
    let (mut seen, mut piece) = (Vec::new(), [0; 4096]);
    while !seen.windows(end.len()).any(|part| part == end) {
        match stream.read(&mut piece) {
            Ok(count) if count > 0 => seen.extend_from_slice(&piece[..count]),
            _ => break,
        }
    }
    seen
}

/// Clients that speak nonsense do not stop the publisher.
#[test]
fn event_sockets() {
    let mut config = EventsConfig::new("tcp://127.0.0.1:0".parse().unwrap());
    config.replay = Some("tcp://127.0.0.1:0".parse().unwrap());
    let publisher = EventPublisher::start(config).unwrap();
    let port = |endpoint: &oscar_events::Endpoint| SocketAddr::from(([127, 0, 0, 1], endpoint.port()));
    let events = port(&publisher.config.endpoint);
    let replay = port(publisher.config.replay.as_ref().unwrap());
    // The number of the message that ends a replay.
    let (request, end) = (replay_request(), [0xff; 8]);
    let is_answered =
        || talk(replay, &request, &end, Duration::from_secs(20)).windows(8).any(|part| part == end);
    assert!(is_answered(), "a replay is answered before anything else was sent");
    fuzz("event_sockets", std::slice::from_ref(&request), 60, |bytes| {
        for address in [events, replay] {
            talk(address, bytes, &end, Duration::from_millis(2));
        }
    });
    assert!(is_answered(), "a replay is answered after all that");
}
