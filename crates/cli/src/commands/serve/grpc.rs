//! gRPC beside HTTP, and Dynamo's sidecar, which registers the engine with a fleet.
//!
//! The order of an end: the sidecar takes the engine out of the fleet, then the server drains, then
//! gRPC closes. A sidecar that ends on its own ends the server, and one whose server is gone is killed:
//! a registration without an engine would attract requests.

use super::signals::Stops;
use crate::progress::note;
use anyhow::{Context, Result, anyhow, ensure};
use oscar_events::{EventPublisher, EventsConfig};
use oscar_grpc::{GrpcConfig, KvEventSource};
use oscar_server::{Frontend, serve_frontend};
use serde::Serialize;
use std::future::pending;
use std::net::{SocketAddr, TcpListener};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How long the sidecar may take to deregister. It waits for its running requests, too.
const DEREGISTER: Duration = Duration::from_secs(30);

/// How long gRPC may take to close.
const CLOSE: Duration = Duration::from_secs(5);

/// Settings of the gRPC server.
#[derive(clap::Args, Serialize)]
pub struct GrpcArgs {
    /// Also serve vLLM's gRPC services on this port, e.g. for Dynamo; 0 picks a free one
    #[arg(long, value_name = "N")]
    pub grpc_port: Option<u16>,
    /// Address of the gRPC services. They ask for no key, so another than a loopback address needs
    /// --allow-anonymous
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub grpc_host: String,
    /// Register with a Dynamo fleet: start its sidecar (`python -m dynamo.vllm.sidecar`) and end with
    /// it. DYN_* variables configure it
    #[arg(long)]
    pub dynamo: bool,
    /// Python that has ai-dynamo 1.6.1
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub dynamo_python: String,
}

impl GrpcArgs {
    /// Binds the port, if gRPC is asked for.
    pub fn open(&self, allow_anonymous: bool) -> Result<Option<TcpListener>> {
        let Some(port) = self.grpc_port.or(self.dynamo.then_some(0)) else { return Ok(None) };
        let asked = format!("{}:{port}", self.grpc_host);
        let listener = TcpListener::bind((self.grpc_host.as_str(), port))
            .with_context(|| format!("cannot serve gRPC on {asked}: choose another --grpc-port"))?;
        let open = !listener.local_addr()?.ip().is_loopback();
        ensure!(
            !open || allow_anonymous,
            "anyone who reaches {asked} could use the gRPC services: listen on 127.0.0.1, or say --allow-anonymous"
        );
        listener.set_nonblocking(true)?;
        Ok(Some(listener))
    }
}

/// What the gRPC services tell about the publisher of cache events.
pub fn event_source(publisher: &EventPublisher) -> KvEventSource {
    let EventsConfig { endpoint, replay, topic, buffer_steps, .. } = &publisher.config;
    KvEventSource {
        endpoint: endpoint.to_string(),
        replay_endpoint: replay.map(|replay| replay.to_string()).unwrap_or_default(),
        topic: topic.clone(),
        buffer_steps: *buffer_steps,
        high_water_mark: EventsConfig::HIGH_WATER_MARK,
    }
}

/// A bound port and what is served on it.
pub struct Grpc {
    pub listener: TcpListener,
    pub config: GrpcConfig,
    /// The Python of the sidecar, if there is to be one.
    pub dynamo: Option<String>,
}

impl Grpc {
    /// Serves HTTP and gRPC until a signal, or until one of the parts fails.
    pub async fn serve(self, http: tokio::net::TcpListener, frontend: Frontend, stops: &Stops) -> Result<()> {
        let address = self.listener.local_addr()?;
        let listener = tokio::net::TcpListener::from_std(self.listener)?;
        let (close, closed) = oneshot::channel::<()>();
        let closed = async move { drop(closed.await) };
        let grpc = oscar_grpc::serve(listener, frontend.clone(), self.config, stops.asked(1), closed);
        let mut grpc = tokio::spawn(grpc);
        note!("gRPC: {address}");
        let sidecar = self.dynamo.map(|python| Sidecar::start(&python, address)).transpose()?;
        let (deregistered, drain) = oneshot::channel::<()>();
        let drain = async move { drop(drain.await) };
        let ended = tokio::select! {
            ended = serve_frontend(http, frontend, drain, stops.asked(2)) => ended.context("the server failed"),
            error = watch(sidecar, stops.asked(1), stops.asked(2), deregistered) => Err(error),
            ended = &mut grpc => Err(match ended {
                Ok(Err(error)) => anyhow!(error).context("gRPC failed"),
                Ok(Ok(())) | Err(_) => anyhow!("gRPC ended"),
            }),
        };
        // It may have ended already.
        let _ = close.send(());
        if !grpc.is_finished() {
            let _ = timeout(CLOSE, grpc).await;
        }
        ended
    }
}

/// Stops the sidecar when the server is asked to stop and tells when that is done or `abandon` is
/// ready; ends only with the reason why the server must.
async fn watch(
    sidecar: Option<Sidecar>,
    stop: impl Future<Output = ()>,
    abandon: impl Future<Output = ()>,
    deregistered: oneshot::Sender<()>,
) -> anyhow::Error {
    if let Some(mut sidecar) = sidecar {
        tokio::select! {
            () = stop => tokio::select! {
                () = sidecar.stop() => {}
                // Dropped with the server, it is killed.
                () = abandon => {}
            },
            status = sidecar.0.wait() => {
                let status = status.as_ref().map(ExitStatus::to_string).unwrap_or_else(|error| error.to_string());
                return anyhow!("Dynamo's sidecar ended ({status}), so this engine is in no fleet any more");
            }
        }
    } else {
        stop.await;
    }
    // Nobody listens if the server ended at the same moment.
    let _ = deregistered.send(());
    pending().await
}

/// Dynamo's sidecar. It is killed when this is dropped, and by the kernel when this process is killed.
struct Sidecar(Child);

/// Runs the sidecar's module with its arguments. PR_SET_PDEATHSIG (1) ties it to the thread that starts
/// it, which is the one that runs the server to its end.
const LAUNCHER: &str = r#"
import runpy, sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
sys.argv[0] = "dynamo.vllm.sidecar"
runpy.run_module("dynamo.vllm.sidecar", run_name="__main__", alter_sys=True)
"#;

impl Sidecar {
    fn start(python: &str, address: SocketAddr) -> Result<Self> {
        let address = match address.ip().is_unspecified() {
            true => format!("127.0.0.1:{}", address.port()),
            false => address.to_string(),
        };
        note!("Dynamo: starting its sidecar with {python}");
        let child = Command::new(python)
            .args(["-c", LAUNCHER, "--grpc-endpoint", &address])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("--dynamo-python {python} cannot be started"))?;
        Ok(Self(child))
    }

    /// Lets it deregister; kills it if it takes too long.
    async fn stop(&mut self) {
        tracing::info!("taking this engine out of the fleet");
        terminate(&self.0);
        if timeout(DEREGISTER, self.0.wait()).await.is_err() {
            tracing::warn!("Dynamo's sidecar did not end in time: killing it");
            // It has ended meanwhile, or is killed now.
            let _ = self.0.kill().await;
        }
    }
}

#[cfg(unix)]
fn terminate(child: &Child) {
    use rustix::process::{Pid, Signal, kill_process};
    let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    if let Some(pid) = pid {
        // One that has ended needs no signal.
        let _ = kill_process(pid, Signal::TERM);
    }
}

#[cfg(not(unix))]
fn terminate(_: &Child) {}
