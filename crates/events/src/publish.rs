//! The sockets, on a thread of their own.

use crate::EventsConfig;
use crate::endpoint::Endpoint;
use crate::journal::{Batch, Journal};
use bytes::Bytes;
use oscar_engine::{CacheEvent, CacheEventSink};
use std::io;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::timeout;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// After so long without a change an empty batch is sent, so that readers see what they missed.
const HEARTBEAT: Duration = Duration::from_secs(3);

/// How long a reader may take to receive one batch of a replay.
const PATIENCE: Duration = Duration::from_secs(5);

/// The number in the message that ends a replay: −1 in vLLM's words.
const END: u64 = u64::MAX;

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("cannot publish on {endpoint}: {error}; is the port taken?")]
    Listen { endpoint: Endpoint, error: io::Error },
    #[error("the ZeroMQ socket cannot be used: {0}")]
    Socket(#[from] ZmqError),
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
            let bound = TcpListener::bind(endpoint.0).and_then(|listener| {
                endpoint.0 = listener.local_addr()?;
                Ok(listener)
            });
            bound.map_err(|error| PublishError::Listen { endpoint: *endpoint, error })
        };
        let events = listen(&mut config.endpoint)?;
        let replay = config.replay.as_mut().map(listen).transpose()?;
        let (sender, changes) = unbounded_channel();
        let (ready, started) = mpsc::channel();
        let theirs = config.clone();
        std::thread::Builder::new().name("kv-events".into()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => return drop(ready.send(Err(PublishError::Thread(error)))),
            };
            runtime.block_on(async {
                match Sockets::open(&theirs, events, replay).await {
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
    events: PubSocket,
    replay: Option<RouterSocket>,
}

impl Sockets {
    async fn open(
        config: &EventsConfig,
        events: TcpListener,
        replay: Option<TcpListener>,
    ) -> Result<Self, ZmqError> {
        let mut publisher = PubSocket::new();
        publisher.bind_listener(events).await?;
        let replay = match replay {
            None => None,
            Some(listener) => {
                let mut router = RouterSocket::new();
                router.bind_listener(listener).await?;
                Some(router)
            }
        };
        tracing::info!(endpoint = %config.endpoint, "publishing changes of the prefix cache");
        Ok(Self { events: publisher, replay })
    }

    async fn run(mut self, config: EventsConfig, mut changes: UnboundedReceiver<Vec<CacheEvent>>) {
        let journal = Arc::new(Mutex::new(Journal::new(config.encoding, config.buffer_steps)));
        let topic = Bytes::from(config.topic);
        let replay = self.replay.map(|socket| tokio::spawn(answer(socket, journal.clone(), topic.clone())));
        let mut events = vec![CacheEvent::Cleared];
        loop {
            let batch = lock(&journal).append(now(), &events);
            match batch {
                Ok(batch) => {
                    let message = message([topic.clone()], &batch);
                    if let Err(error) = self.events.send(message).await {
                        tracing::warn!(%error, "a batch of cache events could not be sent");
                    }
                }
                Err(error) => tracing::error!(%error, "a batch of cache events could not be packed"),
            }
            events = match timeout(HEARTBEAT, changes.recv()).await {
                Ok(Some(changes)) => changes,
                Ok(None) => break,
                Err(_) => Vec::new(),
            };
        }
        if let Some(replay) = replay {
            replay.abort();
        }
    }
}

/// Answers requests for missed batches. A request is `reader | "" | number`; each batch is sent as
/// `reader | "" | topic | number | payload`, and a last message has the number [`END`].
async fn answer(mut socket: RouterSocket, journal: Arc<Mutex<Journal>>, topic: Bytes) {
    loop {
        let Ok(request) = socket.recv().await else { return };
        let frames = request.into_vec();
        let (Some(reader), Some(start)) = (frames.first(), frames.last()) else { continue };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]).map(u64::from_be_bytes) else {
            tracing::debug!("a request for cache events without a number");
            continue;
        };
        let batches = lock(&journal).replay(start, now());
        let batches = match batches {
            Ok(batches) => batches,
            Err(error) => {
                tracing::error!(%error, "missed cache events could not be packed");
                continue;
            }
        };
        tracing::debug!(start, batches = batches.len(), "sending missed cache events again");
        let head = [reader.clone(), Bytes::new(), topic.clone()];
        let end = message(
            [reader.clone(), Bytes::new(), Bytes::new()],
            &Batch { number: END, payload: Bytes::new() },
        );
        let messages = batches.iter().map(|batch| message(head.clone(), batch)).chain([end]);
        for message in messages {
            if !matches!(timeout(PATIENCE, socket.send(message)).await, Ok(Ok(()))) {
                // The reader has gone, or does not read.
                break;
            }
        }
    }
}

/// The frames of `head`, then the batch's number and payload.
fn message<const N: usize>(head: [Bytes; N], batch: &Batch) -> ZmqMessage {
    let mut message = ZmqMessage::from(batch.payload.clone());
    message.push_front(Bytes::copy_from_slice(&batch.number.to_be_bytes()));
    for frame in head.into_iter().rev() {
        message.push_front(frame);
    }
    message
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// Ignores poisoning: the journal is valid after every statement.
fn lock(journal: &Mutex<Journal>) -> std::sync::MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(PoisonError::into_inner)
}
