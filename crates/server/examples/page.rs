//! The server over an engine that recites a script: for working on the web page without a model.
//!
//! `cargo run -p oscar-server --example page -- 8000 [KEY]`

#[path = "../tests/suite/fake.rs"]
#[allow(dead_code)]
mod fake;

use std::sync::Arc;
use std::time::Duration;

use fake::{END_OF_TURN, FakeEngine, Script};
use oscar_server::{ApiKey, GenerationDefaults, Keys, Role, ServerConfig, serve};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let port = arguments.next().and_then(|port| port.parse().ok()).unwrap_or(8000);
    let text = fake::text();
    let reply = "<think>The user wants to see the page at work.</think>\n\nHere is **bold** text, `code`, and \
        <b>no markup</b> <script>alert(1)</script>:\n\n```rust\nfn main() {\n    println!(\"2 bits\");\n}\n```\n\n\
        The first tokens and the last ones stay in BF16; everything between is code. "
        .to_owned();
    let script = Script {
        replies: vec![reply.clone() + &"And so it goes on, page after page. ".repeat(40)],
        pace: Some(Duration::from_millis(12)),
        context: 32_768,
        fail_after: None,
    };
    let engine = FakeEngine::new(script, &text.tokenizer);
    let keys = arguments.map(|key| ApiKey::new(None, Role::Operator, &key));
    let config = ServerConfig { port, keys: Keys::new(keys.collect()), ..Default::default() };
    let defaults = GenerationDefaults { stop_tokens: vec![END_OF_TURN], ..Default::default() };
    println!("http://127.0.0.1:{port}/");
    serve(config, Arc::new(engine), Arc::new(text), defaults, std::future::pending()).await
}
