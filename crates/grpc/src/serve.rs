//! The gRPC server: the two services and their health.

use crate::control::ControlService;
use crate::inference::InferenceService;
use oscar_server::Frontend;
use std::future::Future;
use std::io;
use std::time::Duration;
use tokio::net::TcpListener;
use tonic::codegen::tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use vllm_proto::control_server::ControlServer;
use vllm_proto::inference_server::InferenceServer;

/// After the end was asked for, how long streams may take to send their last messages.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Facts that only the caller knows.
#[derive(Clone, Debug)]
pub struct GrpcConfig {
    /// A directory with the tokenizer and the chat template, or a name on the hub: Dynamo's front end
    /// reads them from there.
    pub model_id: String,
    /// Most sequences that run at once.
    pub max_running_requests: usize,
    /// Most tokens of one step.
    pub max_batched_tokens: usize,
    /// Where the changes of the prefix cache are published.
    pub kv_events: Option<KvEventSource>,
}

/// A publisher of cache events as an orchestrator finds it.
#[derive(Clone, Debug)]
pub struct KvEventSource {
    /// `tcp://HOST:PORT`; `*` for the host of the gRPC server.
    pub endpoint: String,
    pub replay_endpoint: String,
    pub topic: String,
    pub buffer_steps: usize,
    pub high_water_mark: usize,
}

/// Serves until `stop` is ready. From `drain` on the services say that they are not serving; running
/// requests go on.
///
/// # Errors
/// If the socket fails.
pub async fn serve(
    listener: TcpListener,
    frontend: Frontend,
    config: GrpcConfig,
    drain: impl Future<Output = ()> + Send + 'static,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let services = ["vllm.Control", "vllm.Inference", ""];
    for service in services {
        reporter.set_service_status(service, ServingStatus::Serving).await;
    }
    let draining = tokio::spawn(async move {
        drain.await;
        for service in services {
            reporter.set_service_status(service, ServingStatus::NotServing).await;
        }
    });
    let largest = frontend.largest_message();
    let inference = InferenceServer::new(InferenceService::new(frontend.clone()));
    let control = ControlServer::new(ControlService::new(frontend, config));
    let (stopped, stopping) = tokio::sync::oneshot::channel();
    let server = Server::builder()
        .add_service(health)
        .add_service(inference.max_decoding_message_size(largest))
        .add_service(control.max_decoding_message_size(largest))
        .serve_with_incoming_shutdown(TcpListenerStream::new(listener), async move {
            stop.await;
            // The other side may have gone: then the server has failed.
            let _ = stopped.send(());
        });
    let ended = tokio::select! {
        ended = server => ended.map_err(io::Error::other),
        () = async {
            if stopping.await.is_err() {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(LAST_WORDS).await;
        } => Ok(()),
    };
    draining.abort();
    ended
}
