//! The sockets, on a thread of their own.

use crate::EventsConfig;
use crate::endpoint::Endpoint;
use crate::journal::Journal;
use crate::zmtp::{self, Received};
use bytes::Bytes;
use oscar_engine::{CacheEvent, CacheEventSink};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{sleep, timeout};

/// After so long without a change an empty batch is sent, so that readers see what they missed.
const HEARTBEAT: Duration = Duration::from_secs(3);

/// How long a reader may take to receive one batch.
const PATIENCE: Duration = Duration::from_secs(5);

/// Connections of each socket at once.
const CONNECTIONS: usize = 64;

/// Subscriptions of one reader.
const MOST_TOPICS: usize = 64;

/// The number in the message that ends a replay: −1 in vLLM's words.
const END: u64 = u64::MAX;

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("cannot publish on {endpoint}: {error}; is the port taken?")]
    Listen { endpoint: Endpoint, error: io::Error },
    #[error("the publisher's thread could not start: {0}")]
    Thread(#[from] io::Error),
}

/// Publishes until its sink and all clones of it are dropped.
#[derive(Debug)]
pub struct EventPublisher {
    /// What was asked for, with the ports that were bound.
    pub config: EventsConfig,
    /// For [`EngineOptions::cache_events`](oscar_engine::EngineOptions::cache_events).
    pub sink: Arc<dyn CacheEventSink>,
}

impl EventPublisher {
    /// Binds the sockets and starts the thread.
    ///
    /// # Errors
    /// If an address cannot be bound, or the system gives no thread.
    pub fn start(mut config: EventsConfig) -> Result<Self, PublishError> {
        let listen = |endpoint: &mut Endpoint| {
            let bound = std::net::TcpListener::bind(endpoint.0).and_then(|listener| {
                endpoint.0 = listener.local_addr()?;
                Ok(listener)
            });
            bound.map_err(|error| PublishError::Listen { endpoint: *endpoint, error })
        };
        let events = listen(&mut config.endpoint)?;
        let replay = config.replay.as_mut().map(listen).transpose()?;
        let (sender, changes) = unbounded_channel();
        let (ready, started) = std::sync::mpsc::channel();
        let theirs = config.clone();
        std::thread::Builder::new().name("kv-events".into()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(ready.send(Err(PublishError::Thread(error)))),
            };
            runtime.block_on(async {
                match Sockets::open(&theirs, events, replay) {
                    Ok(sockets) => {
                        // `start` waits for it.
                        let _ = ready.send(Ok(()));
                        sockets.run(theirs, changes).await;
                    }
                    Err(error) => drop(ready.send(Err(error.into()))),
                }
            });
        })?;
        let ended = || PublishError::Thread(io::Error::other("it ended at once"));
        started.recv().unwrap_or_else(|_| Err(ended()))?;
        Ok(Self { config, sink: Arc::new(Sink(sender)) })
    }
}

#[derive(Debug)]
struct Sink(UnboundedSender<Vec<CacheEvent>>);

impl CacheEventSink for Sink {
    fn send(&self, events: Vec<CacheEvent>) {
        // The thread ends only after this is dropped.
        let _ = self.0.send(events);
    }
}

struct Sockets {
    events: TcpListener,
    replay: Option<TcpListener>,
}

/// The queues of the readers that are connected.
type Readers = Arc<Mutex<Vec<mpsc::Sender<Arc<[Bytes; 3]>>>>>;

impl Sockets {
    fn open(
        config: &EventsConfig,
        events: std::net::TcpListener,
        replay: Option<std::net::TcpListener>,
    ) -> io::Result<Self> {
        let listener = |listener: std::net::TcpListener| {
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        };
        tracing::info!(endpoint = %config.endpoint, "publishing changes of the prefix cache");
        Ok(Self { events: listener(events)?, replay: replay.map(listener).transpose()? })
    }

    async fn run(self, config: EventsConfig, mut changes: UnboundedReceiver<Vec<CacheEvent>>) {
        let journal = Arc::new(Mutex::new(Journal::new(config.encoding, config.buffer_steps)));
        let topic = Bytes::from(config.topic);
        let readers = Readers::default();
        let (theirs, head, pages) = (readers.clone(), topic.clone(), journal.clone());
        let mut accepting = vec![tokio::spawn(each_connection(self.events, move |stream| {
            subscriber(stream, theirs.clone())
        }))];
        accepting.extend(self.replay.map(|listener| {
            tokio::spawn(each_connection(listener, move |stream| answer(stream, pages.clone(), head.clone())))
        }));
        let mut events = vec![CacheEvent::Cleared];
        loop {
            let batch = lock(&journal).append(now(), &events);
            match batch {
                Ok(batch) => {
                    let frames = Arc::new([topic.clone(), number(batch.number), batch.payload]);
                    // A reader that is too slow misses the batch and asks for it on the replay socket.
                    lock(&readers).retain(|reader| {
                        !matches!(reader.try_send(frames.clone()), Err(mpsc::error::TrySendError::Closed(_)))
                    });
                }
                Err(error) => tracing::error!(%error, "a batch of cache events could not be packed"),
            }
            events = match timeout(HEARTBEAT, changes.recv()).await {
                Ok(Some(changes)) => changes,
                Ok(None) => break,
                Err(_) => Vec::new(),
            };
        }
        accepting.iter().for_each(|task| task.abort());
    }
}

/// Serves connections, at most [`CONNECTIONS`] at once.
async fn each_connection<F: Future<Output = io::Result<()>> + Send + 'static>(
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> F,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            // Out of files or memory: others have to leave first.
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(place) = places.clone().try_acquire_owned() else {
            tracing::warn!(%peer, "too many readers of cache events");
            continue;
        };
        let serving = serve(stream);
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::debug!(%peer, %error, "a reader of cache events has gone");
            }
            drop(place);
        });
    }
}

/// Sends a reader the batches whose topic it subscribed to.
async fn subscriber(stream: TcpStream, readers: Readers) -> io::Result<()> {
    let (mut receiver, mut sender) = zmtp::accept(stream, "PUB", &["SUB", "XSUB"]).await?;
    let (queue, mut batches) = mpsc::channel(EventsConfig::HIGH_WATER_MARK);
    lock(&readers).push(queue);
    // Receiving is not safe to cancel in the middle of a frame, so a task of its own does it.
    let (asked, mut requests) = mpsc::channel(1);
    let receiving = tokio::spawn(async move {
        while let Ok(received) = receiver.receive().await {
            if asked.send(received).await.is_err() {
                return;
            }
        }
    });
    let mut topics: Vec<Vec<u8>> = Vec::new();
    let served = async {
        loop {
            tokio::select! {
                request = requests.recv() => match request {
                    None => return Ok(()),
                    Some(Received::Command(name, rest)) if name == b"PING" => {
                        // Two bytes say how long the peer waits; the rest comes back.
                        sender.command("PONG", rest.get(2..).unwrap_or_default()).await?;
                    }
                    Some(request) => subscribe(&mut topics, request),
                },
                batch = batches.recv() => {
                    let Some(batch) = batch else { return Ok(()) };
                    if topics.iter().any(|topic| batch[0].starts_with(topic)) {
                        sender.send(&batch[..], PATIENCE).await?;
                    }
                }
            }
        }
    };
    let outcome = served.await;
    receiving.abort();
    outcome
}

/// Adds or removes a topic: as a message in ZMTP 3.0, as a command since.
fn subscribe(topics: &mut Vec<Vec<u8>>, request: Received) {
    let (adds, topic) = match request {
        Received::Command(name, topic) if name == b"SUBSCRIBE" => (true, topic),
        Received::Command(name, topic) if name == b"CANCEL" => (false, topic),
        Received::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
            Some((&kind @ (0 | 1), topic)) => (kind == 1, topic.to_vec()),
            _ => return,
        },
        Received::Command(..) => return,
    };
    match adds {
        true if topics.len() < MOST_TOPICS => topics.push(topic),
        true => tracing::debug!("a reader of cache events has too many subscriptions"),
        false => {
            if let Some(at) = topics.iter().position(|known| *known == topic) {
                topics.remove(at);
            }
        }
    }
}

/// Answers requests for missed batches. The last frame of a request is the first number; each batch
/// is sent as `"" | topic | number | payload`, and a last message has the number [`END`].
async fn answer(stream: TcpStream, journal: Arc<Mutex<Journal>>, topic: Bytes) -> io::Result<()> {
    let (mut receiver, mut sender) = zmtp::accept(stream, "ROUTER", &["REQ", "DEALER", "ROUTER"]).await?;
    loop {
        let frames = match receiver.receive().await? {
            Received::Message(frames) => frames,
            Received::Command(name, rest) => {
                if name == b"PING" {
                    sender.command("PONG", rest.get(2..).unwrap_or_default()).await?;
                }
                continue;
            }
        };
        let start = frames.last().and_then(|frame| <[u8; 8]>::try_from(&frame[..]).ok());
        let Some(start) = start.map(u64::from_be_bytes) else {
            tracing::debug!("a request for cache events without a number");
            continue;
        };
        let batches = lock(&journal).replay(start, now()).map_err(io::Error::other)?;
        tracing::debug!(start, batches = batches.len(), "sending missed cache events again");
        let end = [Bytes::new(), Bytes::new(), number(END), Bytes::new()];
        let batches = batches.into_iter();
        let messages =
            batches.map(|batch| [Bytes::new(), topic.clone(), number(batch.number), batch.payload]);
        for message in messages.chain([end]) {
            sender.send(&message, PATIENCE).await?;
        }
    }
}

fn number(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// Ignores poisoning: what is locked here is valid after every statement.
fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
