//! Traces, as a collector receives them: OTLP over HTTP. The bytes are read by their wire format, not
//! by the messages that wrote them. A binary of its own, because a process has one subscriber.
#![allow(dead_code)]

#[path = "suite/client.rs"]
mod client;
#[path = "suite/fake.rs"]
mod fake;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use oscar_server::{LogFormat, TraceOptions, init_logging_and_traces};
use serde_json::json;

use crate::client::Client;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Takes messages and answers 200; returns its address and their bodies.
fn collector() -> (String, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, bodies) = channel();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            // A connection may carry several messages.
            loop {
                let (mut head, mut line) = (Vec::new(), String::new());
                while reader.read_line(&mut line).unwrap_or(0) > 2 {
                    head.push(std::mem::take(&mut line).trim().to_ascii_lowercase());
                    line.clear();
                }
                let Some(request) = head.first() else { break };
                assert!(request.starts_with("post /v1/traces "), "{request}");
                assert!(head.contains(&"content-type: application/x-protobuf".to_owned()), "{head:?}");
                let length = head.iter().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                let mut body = vec![0; length.parse().unwrap()];
                reader.read_exact(&mut body).unwrap();
                sender.send(body).unwrap();
                reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
            }
        }
    });
    (address, bodies)
}

/// The fields of a message of protobuf: bytes, or numbers as their bytes.
fn fields(mut bytes: &[u8]) -> HashMap<u64, Vec<Vec<u8>>> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }
    let mut all: HashMap<u64, Vec<Vec<u8>>> = HashMap::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => varint(&mut bytes).to_le_bytes().to_vec(),
            kind => {
                let length = match kind {
                    1 => 8,
                    2 => varint(&mut bytes) as usize,
                    5 => 4,
                    other => panic!("wire type {other}"),
                };
                let (value, rest) = bytes.split_at(length);
                bytes = rest;
                value.to_vec()
            }
        };
        all.entry(key >> 3).or_default().push(value);
    }
    all
}

/// A span as the test needs it.
#[derive(Debug)]
struct Span {
    trace: String,
    id: String,
    parent: String,
    name: String,
    kind: u64,
    start: u64,
    end: u64,
    attributes: HashMap<String, String>,
    events: Vec<String>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}

fn attributes(list: Option<&Vec<Vec<u8>>>) -> HashMap<String, String> {
    let one = |entry: &Vec<u8>| {
        let entry = fields(entry);
        let value = fields(&entry[&2][0]);
        let text = match (value.get(&1), value.get(&3)) {
            (Some(text), _) => String::from_utf8(text[0].clone()).unwrap(),
            (_, Some(int)) => number(&int[0]).to_string(),
            _ => String::new(),
        };
        (String::from_utf8(entry[&1][0].clone()).unwrap(), text)
    };
    list.into_iter().flatten().map(one).collect()
}

/// The spans of an `ExportTraceServiceRequest`.
fn spans(body: &[u8]) -> Vec<Span> {
    let mut all = Vec::new();
    for group in &fields(body)[&1] {
        let group = fields(group);
        let resource = attributes(fields(&group[&1][0]).get(&1));
        assert_eq!(resource["service.name"], "oscar");
        for scope in &group[&2] {
            for span in &fields(scope)[&2] {
                let span = fields(span);
                let text = |field: u64| span.get(&field).map_or(&[][..], |value| &value[0]);
                let events = span.get(&11).into_iter().flatten();
                all.push(Span {
                    trace: hex(text(1)),
                    id: hex(text(2)),
                    parent: hex(text(4)),
                    name: String::from_utf8(text(5).to_vec()).unwrap(),
                    kind: number(text(6)),
                    start: number(text(7)),
                    end: number(text(8)),
                    attributes: attributes(span.get(&9)),
                    events: events
                        .map(|event| String::from_utf8(fields(event)[&2][0].clone()).unwrap())
                        .collect(),
                });
            }
        }
    }
    all
}

#[tokio::test]
async fn spans_reach_a_collector() {
    let (address, bodies) = collector();
    let options = TraceOptions::new(&address, 1.0).unwrap();
    let guard = init_logging_and_traces(LogFormat::Text, "error", &options).unwrap();
    let client = Client::saying("hello");
    let chat = |traceparent: Option<String>| {
        let mut request = Request::post("/v1/chat/completions").header("content-type", "application/json");
        if let Some(traceparent) = traceparent {
            request = request.header("traceparent", traceparent);
        }
        let body = json!({"messages": [{"role": "user", "content": "hi"}]}).to_string();
        client.send(request.body(Body::from(body)).unwrap())
    };
    chat(Some(format!("00-{TRACE}-{PARENT}-01"))).await.ok();
    chat(Some("00-1bf7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00".to_owned())).await.ok();
    chat(None).await.ok();
    // The engine of these tests has no steps: two requests that one step serves.
    let request = |name| tracing::info_span!(target: "oscar_server::middleware", "http", request_id = name);
    let (one, two) = (request("one"), request("two"));
    let step = tracing::debug_span!(target: "oscar_engine::serving", "step", number = 7u64);
    step.follows_from(&one);
    step.follows_from(&two);
    step.follows_from(&two);
    tracing::debug!(target: "oscar_engine::serving", parent: &one, "admitted");
    drop(step);
    drop((one, two));
    // The span of a request ends with the last task that serves it.
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(guard);

    let mut all: Vec<Span> = Vec::new();
    while let Ok(body) = bodies.recv_timeout(Duration::from_millis(500)) {
        all.extend(spans(&body));
    }
    let by = |name: &str, key: &str, value: &str| -> Vec<&Span> {
        all.iter()
            .filter(|span| span.name == name && span.attributes.get(key).is_some_and(|v| v == value))
            .collect()
    };
    let served = by("http", "http.route", "/v1/chat/completions");
    assert_eq!(served.len(), 2, "the request that is not sampled leaves no span: {all:?}");
    let given: Vec<_> = served.iter().filter(|span| span.trace == TRACE).collect();
    assert_eq!(given.len(), 1);
    assert_eq!((given[0].parent.as_str(), given[0].kind), (PARENT, 2));
    assert_eq!(given[0].attributes["http.response.status_code"], "200");
    let own = served.iter().find(|span| span.trace != TRACE).unwrap();
    assert_eq!((own.trace.len(), own.parent.as_str()), (32, ""));
    let steps = by("step", "number", "7");
    assert_eq!(steps.len(), 2, "one for each request: {steps:?}");
    for name in ["one", "two"] {
        let request = by("http", "request_id", name)[0];
        let step = steps.iter().find(|step| step.parent == request.id).unwrap();
        assert_eq!((&step.trace, step.kind), (&request.trace, 1));
        assert!(request.start <= step.start && step.start <= step.end && step.end <= request.end);
        assert_eq!(request.events.contains(&"admitted".to_owned()), name == "one");
    }
    let mut ids: Vec<&String> = all.iter().map(|span| &span.id).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), all.len());
}
