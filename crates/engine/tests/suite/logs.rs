//! Log lines of the engine thread can be traced to the request they are about.

use crate::client::submit;
use crate::support::Setup;
use oscar_engine::{Engine, EngineOptions, GenerationParams};
use std::io::Write;
use std::sync::{Arc, Mutex};

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn lines_of_the_engine_thread_carry_the_span_of_their_request() {
    let lines = Lines::default();
    let writer = lines.clone();
    // The engine thread logs to the process's subscriber; other tests of this binary do too.
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();
    let engine = Engine::start(Setup::default().embedded(), EngineOptions::new("test")).unwrap();
    let params = GenerationParams { max_tokens: 3, ..GenerationParams::default() };
    for name in ["client-a", "client-b"] {
        let span = tracing::info_span!("http", request_id = name);
        let call = span.in_scope(|| submit(&engine, &[5, 6, 7], params.clone())).unwrap();
        call.finish(&engine, None);
    }
    engine.shutdown();
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    for name in ["client-a", "client-b"] {
        let about = |what: &str| text.lines().filter(|l| l.contains(name) && l.contains(what)).count();
        assert_eq!((about("admitted"), about("ended")), (1, 1), "{name} in\n{text}");
        assert!(text.lines().any(|l| l.contains(name) && l.contains("completion_tokens: 3")), "{text}");
    }
}
