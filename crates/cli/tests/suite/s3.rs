//! `oscar serve --store-s3` against moto, an S3 server from PyPI: healthy, without a bucket, stopped and gone.
//!
//! It must be there in CI; elsewhere its absence is a printed note.

use crate::families;
use crate::python;
use crate::redis::{ask, flush, wait_until};
use crate::server::Server;
use crate::support::command;
use oscar_models::Family;
use serde_json::json;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

/// An S3 server with the bucket `pages`; `None` with a note if it cannot be had.
fn start(port: u16) -> Option<Server> {
    let python = python::with(&["moto", "flask", "flask-cors"])?;
    let mut moto = Command::new(python);
    moto.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
    let child = moto.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let server = Server::of(child, format!("127.0.0.1:{port}"));
    wait_until("the S3 server comes up", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    assert_eq!(server.send("PUT", "/pages", None, None).status, 200);
    Some(server)
}

fn variables(endpoint: &str) -> [(&str, &str); 4] {
    [
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "eu-central-1"),
        ("AWS_ENDPOINT_URL_S3", endpoint),
    ]
}

const FLAGS: [&str; 6] =
    ["--port=0", "--context=2048", "--threads=1", "--exact-hits", "--device=cpu", "--store-s3"];

fn serve(endpoint: &str) -> Server {
    let flags = [&FLAGS[..], &["s3://pages/kv"]].concat();
    Server::start_in(None, &flags, &variables(endpoint))
}

#[test]
fn a_bucket_of_pages_is_shared_and_may_be_gone() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let Some(s3) = start(port) else { return };
    let first = serve(&endpoint);
    let expected: Vec<String> = (1..3).map(|number| ask(&first, number).0).collect();
    wait_until("pages are written", || {
        let written = first.metric("oscar_kv_store_shared_written_pages_total");
        first.metric("oscar_kv_store_queued_bytes") == 0.0 && written >= 20.0
    });
    // Another process finds what the first one computed.
    let second = serve(&endpoint);
    let (text, shared) = ask(&second, 1);
    assert_eq!(text, expected[0]);
    assert!(shared > 400, "{shared}");
    // Damaged objects are seen, counted and removed.
    let listing = s3.get("/pages?list-type=2").body;
    let keys: Vec<&str> = listing.split("<Key>").skip(1).filter_map(|rest| rest.split('<').next()).collect();
    assert!(keys.len() >= 20 && keys.iter().all(|key| key.starts_with("kv/")), "{keys:?}");
    for key in keys {
        assert_eq!(s3.send("PUT", &format!("/pages/{key}"), Some("any"), Some(&json!("damage"))).status, 200);
    }
    assert_eq!(ask(&second, 2), (expected[1].clone(), 0));
    assert!(second.metric("oscar_kv_store_corrupt_total") > 0.0);
    // It hangs: requests go on without it.
    s3.signal("-STOP");
    flush(&second);
    assert_eq!(ask(&second, 1), (expected[0].clone(), 0));
    assert!(second.metric("oscar_kv_store_shared_errors_total") > 0.0);
    s3.signal("-CONT");
    drop((s3, second));
    flush(&first);
    assert_eq!(ask(&first, 1), (expected[0].clone(), 0));
    drop(first);
    // Servers start without it, and not with a bucket that is not there or without keys.
    let alone = serve(&endpoint);
    assert_eq!(ask(&alone, 1), (expected[0].clone(), 0));
    assert!(alone.metric("oscar_kv_store_shared_errors_total") > 0.0);
    drop(alone);
    let Some(_s3) = start(port) else { return };
    let refused = |bucket: &str, variables: &[(&str, &str)]| {
        let mut command = command();
        command.arg("serve").args(FLAGS).arg(bucket).envs(variables.iter().copied());
        let out = command.env_remove("AWS_SESSION_TOKEN").output().unwrap();
        assert!(!out.status.success());
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    let message = refused("s3://nothing-here", &variables(&endpoint));
    assert!(message.contains("--store-s3") && message.contains("no such bucket"), "{message}");
    let message = refused("s3://pages", &[("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", "")]);
    assert!(message.contains("AWS_SECRET_ACCESS_KEY"), "{message}");
    let message = refused("https://pages", &variables(&endpoint));
    assert!(message.contains("s3://BUCKET"), "{message}");
}

/// Recurrent states are shared too, and one that is gone costs the hit.
#[test]
fn a_bucket_shares_recurrent_states() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let (Some(s3), dir) = (start(port), families::folder(Family::Qwen3Next)) else { return };
    let model = dir.path().to_str().unwrap();
    let model = ["--model", model, "--served-model-name", "oscar-15m", "--kv", "oscar2"];
    let flags = [&model[..], &FLAGS, &["s3://pages/kv"]].concat();
    let serve = || Server::start_in(None, &flags, &variables(&endpoint));
    let first = serve();
    let expected = ask(&first, 1).0;
    wait_until("pages are written", || {
        let written = first.metric("oscar_kv_store_shared_written_pages_total");
        first.metric("oscar_kv_store_queued_bytes") == 0.0 && written > 0.0
    });
    let second = serve();
    let (text, shared) = ask(&second, 1);
    assert!(text == expected && shared > 400, "{shared}");
    assert_eq!(second.metric("oscar_kv_store_missing_states_total"), 0.0);
    let listing = s3.get("/pages?list-type=2").body;
    let keys = listing.split("<Key>").skip(1).filter_map(|rest| rest.split('<').next());
    let states: Vec<&str> = keys.filter(|key| key.ends_with(".state")).collect();
    assert!(!states.is_empty(), "{listing}");
    for key in states {
        assert_eq!(s3.send("DELETE", &format!("/pages/{key}"), Some("any"), None).status, 204);
    }
    let third = serve();
    assert_eq!(ask(&third, 1), (expected, 0));
    assert_eq!(third.metric("oscar_kv_store_missing_states_total"), 1.0);
}
