//! `oscar serve`: the OpenAI-compatible server.

mod calibrate;
mod config;
mod keys;
mod load;
mod signals;
mod socket;

use anyhow::Result;
pub use config::Flags;
pub use load::LoadArgs;
use oscar_server::init_logging;
use socket::Socket;
use std::sync::Arc;

pub fn run(flags: &Flags) -> Result<()> {
    let config = flags.resolve()?;
    if flags.print_config {
        print!("{}", toml::to_string_pretty(&config)?);
        return Ok(());
    }
    let _log = init_logging(config.log_format(), &config.log)?;
    let socket = Socket::open(config.server()?, config.key_source())?;
    let progress = socket.progress();
    let mut loaded = config.load.load(&progress)?;
    loaded.options = config.complete(loaded.options.clone(), loaded.backend());
    let mut server = socket.config().clone();
    loaded.introduce(&mut server);
    let name = loaded.model.name.clone();
    progress.begin("starting the engine", 0);
    let (engine, text, defaults) = loaded.start()?;
    socket.serve(server, engine, Arc::new(text), defaults, &name)
}
