//! The publisher with real ZeroMQ readers.

use bytes::Bytes;
use oscar_engine::{CacheEvent, PageHash};
use oscar_events::{Encoding, EventPublisher, EventsConfig};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

const PATIENCE: Duration = Duration::from_secs(30);

fn page(parent: Option<PageHash>, token: u32) -> (PageHash, CacheEvent) {
    let tokens: Arc<[u32]> = [token; 64].into();
    let hash = PageHash::of(parent.as_ref(), &tokens);
    (hash, CacheEvent::Stored { parent, hash, tokens })
}

fn config(topic: &str) -> EventsConfig {
    let any = "tcp://127.0.0.1:0".parse().unwrap();
    let (topic, encoding) = (topic.to_owned(), Encoding::Map);
    EventsConfig { replay: Some(any), topic, encoding, buffer_steps: 4, ..EventsConfig::new(any) }
}

async fn receive(socket: &mut impl SocketRecv) -> Vec<Bytes> {
    timeout(PATIENCE, socket.recv()).await.expect("a message in time").unwrap().into_vec()
}

fn number(frame: &Bytes) -> u64 {
    u64::from_be_bytes(frame[..].try_into().unwrap())
}

/// The numbers and payloads that the replay socket sends, without the end.
async fn replay(config: &EventsConfig, start: u64) -> Vec<(u64, Bytes)> {
    let mut dealer = DealerSocket::new();
    dealer.connect(&format!("tcp://127.0.0.1:{}", config.replay.unwrap().port())).await.unwrap();
    let mut request = ZmqMessage::from(Bytes::copy_from_slice(&start.to_be_bytes()));
    request.push_front(Bytes::new());
    dealer.send(request).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let frames = receive(&mut dealer).await;
        let [empty, topic, number, payload] = &frames[..] else { panic!("{frames:?}") };
        assert!(empty.is_empty());
        if number[..] == [0xff; 8] {
            assert!(topic.is_empty() && payload.is_empty());
            return batches;
        }
        assert_eq!(topic, config.topic.as_bytes());
        batches.push((self::number(number), payload.clone()));
    }
}

#[tokio::test]
async fn readers_get_numbered_batches_and_what_they_missed() {
    let publisher = EventPublisher::start(config("kv@host@model")).unwrap();
    let config = &publisher.config;
    let mut reader = SubSocket::new();
    reader.connect(&format!("tcp://127.0.0.1:{}", config.endpoint.port())).await.unwrap();
    reader.subscribe("kv@").await.unwrap();
    let mut stranger = SubSocket::new();
    stranger.connect(&format!("tcp://127.0.0.1:{}", config.endpoint.port())).await.unwrap();
    stranger.subscribe("other").await.unwrap();
    // The subscription takes effect at some moment; the first heartbeat shows it.
    let frames = receive(&mut reader).await;
    assert_eq!(frames[0], "kv@host@model");
    let heartbeat = number(&frames[1]);
    assert!(heartbeat >= 1, "AllBlocksCleared was 0");
    assert_eq!(frames[2][frames[2].len() - 2..], [0x90, 0x00], "an empty list, and the rank");

    let (first, stored) = page(None, 7);
    publisher.sink.send(vec![stored.clone()]);
    let frames = receive(&mut reader).await;
    assert_eq!(number(&frames[1]), heartbeat + 1);
    let live = frames[2].clone();
    assert!(live.windows(11).any(|bytes| bytes == b"BlockStored"));
    // Missed: the same bytes again.
    assert_eq!(replay(config, heartbeat + 1).await, [(heartbeat + 1, live)]);
    assert_eq!(replay(config, 1000).await, []);
    // A reader that begins gets all pages that are held, cleared before.
    let (_, second) = page(Some(first), 8);
    publisher.sink.send(vec![second, CacheEvent::Removed { hash: PageHash::of(None, &[1]) }]);
    assert_eq!(number(&receive(&mut reader).await[1]), heartbeat + 2);
    let snapshot = replay(config, 0).await;
    let [(last, payload)] = &snapshot[..] else { panic!("{snapshot:?}") };
    assert_eq!(*last, heartbeat + 2);
    let at = |word: &[u8]| payload.windows(word.len()).position(|bytes| bytes == word);
    assert!(at(b"AllBlocksCleared").unwrap() < at(b"BlockStored").unwrap());
    assert!(at(b"BlockRemoved").is_none());
    assert!(timeout(Duration::from_millis(50), stranger.recv()).await.is_err(), "another topic");
}

#[tokio::test]
async fn nonsense_on_the_replay_socket_is_ignored() {
    let publisher = EventPublisher::start(config("")).unwrap();
    let mut dealer = DealerSocket::new();
    let port = publisher.config.replay.unwrap().port();
    dealer.connect(&format!("tcp://127.0.0.1:{port}")).await.unwrap();
    for bytes in [&b""[..], b"seven", &[0; 4096]] {
        dealer.send(ZmqMessage::from(Bytes::copy_from_slice(bytes))).await.unwrap();
    }
    assert_eq!(replay(&publisher.config, 0).await.len(), 1);
}

#[test]
fn a_port_that_is_taken_is_named() {
    let first = EventPublisher::start(config("")).unwrap();
    let error = EventPublisher::start(EventsConfig::new(first.config.endpoint)).unwrap_err();
    assert!(error.to_string().contains(&first.config.endpoint.to_string()), "{error}");
}
