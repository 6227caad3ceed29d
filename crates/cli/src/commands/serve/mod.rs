//! `oscar serve`: the OpenAI-compatible server.

mod calibrate;
mod config;
mod events;
mod eviction;
mod grpc;
mod keys;
mod load;
mod signals;
mod socket;

use crate::progress::note;
use crate::transfer;
use anyhow::{Result, ensure};
pub use config::Flags;
use grpc::Grpc;
pub use load::LoadArgs;
use oscar_codec::PAGE_TOKENS;
use oscar_events::EventPublisher;
use oscar_grpc::GrpcConfig;
use socket::Socket;
use std::sync::Arc;

pub fn run(flags: &Flags) -> Result<()> {
    let config = flags.resolve()?;
    if flags.print_config {
        print!("{}", toml::to_string_pretty(&config)?);
        return Ok(());
    }
    ensure!(
        !config.grpc.dynamo || config.load.model.model.is_some(),
        "--dynamo needs --model: Dynamo's front end reads the tokenizer from the model's folder"
    );
    let _log = config.init_logging()?;
    let events = config.events.resolve(config.grpc.dynamo && !config.load.no_prefix_cache)?;
    ensure!(
        events.is_none() || !config.load.no_prefix_cache,
        "--kv-events tells of the prefix cache, which --no-prefix-cache switches off"
    );
    let socket = Socket::open(config.server()?, config.key_source())?;
    let publisher = events.map(EventPublisher::start).transpose()?;
    let grpc = config.grpc.open(config.allow_anonymous)?;
    let (pages, transfers) = config.transfer.open()?;
    let progress = socket.progress();
    let mut loaded = config.load.load(&config.transfer, &progress)?;
    loaded.options = config.complete(loaded.options.clone(), loaded.backend());
    let mut server = socket.config().clone();
    if let (Some(desk), Some(listener), Some(address)) = (&loaded.options.desk, pages, &transfers.desk) {
        transfer::serve(desk.clone(), listener, address)?;
    }
    server.transfer = transfers;
    if let Some(publisher) = &publisher {
        loaded.options.cache_events = Some(publisher.sink.clone());
        server.kv_events = Some(events::announcement(publisher, PAGE_TOKENS));
        note!("KV events: {}", publisher.config.endpoint);
        if !publisher.config.endpoint.is_loopback() {
            note!("  whoever reaches that port reads the tokens of prompts without a salt");
        }
    }
    loaded.introduce(&mut server);
    let name = loaded.model.name.clone();
    progress.begin("starting the engine", 0);
    let model_id = loaded.model_id();
    let (engine, text, defaults) = loaded.start()?;
    let context = engine.info().context;
    let grpc = grpc.map(|listener| Grpc {
        listener,
        config: GrpcConfig {
            model_id,
            max_running_requests: config.load.max_batch,
            max_batched_tokens: config.load.step_tokens.unwrap_or(context),
            kv_events: publisher.as_ref().map(grpc::event_source),
        },
        dynamo: config.grpc.dynamo.then(|| config.grpc.dynamo_python.clone()),
    });
    socket.serve(server, engine, Arc::new(text), defaults, &name, grpc)
}
