//! `oscar serve --kv-transfer-listen` and `--kv-transfer-peer`: one machine computes a prompt, another continues it.

use crate::families::folder;
use crate::server::Server;
use crate::support::fail;
use oscar_models::Family;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

const COMMON: [&str; 7] = ["--port", "0", "--context", "2048", "--threads", "1", "--exact-hits"];

fn serve(flags: &[&str]) -> Server {
    Server::start_with(None, &[&COMMON[..], flags].concat())
}

/// A completion or a chat about a text of about 1000 tokens, different for each number.
fn body(number: usize, fields: &Value) -> (&'static str, Value) {
    let text: Vec<String> =
        (0..60).map(|i| format!("Line {i} of text {number} says {}.", i * number + 7)).collect();
    let (path, prompt) = match number % 2 {
        0 => ("/v1/completions", json!({"prompt": text.join("\n")})),
        _ => ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": text.join("\n")}]})),
    };
    let mut body = json!({"model": "oscar-15m", "max_tokens": 24, "ignore_eos": true});
    for more in [&prompt, fields] {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    }
    (path, body)
}

fn ask(server: &Server, number: usize, fields: &Value) -> Value {
    let (path, body) = body(number, fields);
    let answer = server.send("POST", path, None, Some(&body));
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn with(fields: &Value, more: &Value) -> Value {
    let mut fields = fields.clone();
    fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    fields
}

/// Text of a completion or a chat.
fn text(answer: &Value) -> String {
    let choice = &answer["choices"][0];
    choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_owned()
}

/// Has a prompt computed for another machine; the ticket.
fn prefill(server: &Server, number: usize, fields: &Value) -> Value {
    let keep =
        json!({"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true, "remote_host": null}});
    let answer = ask(server, number, &with(fields, &keep));
    let ticket = answer["kv_transfer_params"].clone();
    assert_eq!(ticket["do_remote_prefill"], true, "{answer}");
    ticket
}

/// Where the prompt's tokens came from.
fn from_peer(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["peer"].as_u64().unwrap_or(0)
}

/// A machine in the middle that flips a bit of what the first machine sends, if there is so much.
fn tampering(port: u64, place: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let server = TcpStream::connect(("127.0.0.1", port as u16)).unwrap();
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            let (mut from, mut to, mut at) = (server, client, 0);
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut piece) {
                if (at..at + count).contains(&place) {
                    piece[place - at] ^= 1;
                }
                at += count;
                if to.write_all(&piece[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        }
    });
    own
}

#[test]
fn a_prompt_of_one_machine_continues_on_another_token_for_token() {
    let mut first = serve(&["--kv-transfer-listen", "127.0.0.1:0"]);
    assert!(first.seen.contains("pages for other machines: 127.0.0.1:"), "{}", first.seen);
    let port = prefill(&first, 100, &json!({}))["remote_port"].as_u64().unwrap();
    let middle = tampering(port, 50_000);
    let peers = [format!("127.0.0.1:{port}"), format!("127.0.0.1:{middle}")];
    let second = serve(&["--kv-transfer-peer", &peers[0], "--kv-transfer-peer", &peers[1]]);
    let greedy = json!({"temperature": 0});
    let drawn = json!({"temperature": 1.0, "seed": 5, "top_p": 0.9});
    let salted = json!({"temperature": 0, "cache_salt": "tenant"});

    for (number, fields) in [(1, &greedy), (2, &greedy), (3, &drawn), (4, &drawn), (5, &salted)] {
        let ticket = prefill(&first, number, fields);
        let split = ask(&second, number, &with(fields, &json!({"kv_transfer_params": ticket})));
        // Almost all of the prompt was fetched; the last page is computed where the answer is.
        let prompt = split["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(from_peer(&split) + 128 > prompt && from_peer(&split) > 500, "{split}");
        assert_eq!(ticket["remote_num_tokens"].as_u64().unwrap() / 64, prompt / 64);
        // The same on one machine. The salt keeps it from finding what was fetched.
        let alone = match number {
            5 => ask(&first, number, &greedy),
            _ => ask(&second, number, &with(fields, &json!({"cache_salt": "alone"}))),
        };
        assert_eq!(text(&split), text(&alone), "{number}");
        assert_eq!(split["usage"]["completion_tokens"], alone["usage"]["completion_tokens"]);
    }
    let fallbacks = |reason: &str| {
        let counted = second.metric(&format!("oscar_kv_transfer_{reason}_total"));
        (second.metric("oscar_kv_transfer_fallbacks_total"), counted)
    };
    assert_eq!(fallbacks("expired"), (0.0, 0.0));
    assert!(second.metric("oscar_kv_transfer_fetched_pages_total") > 50.0);

    // Used tickets are forgotten: one that comes again, or never was, costs a prefill.
    let expected = text(&ask(&first, 6, &greedy));
    let ticket = prefill(&first, 6, &greedy);
    let mut unknown = ticket.clone();
    unknown["remote_request_id"] = json!("0123456789abcdef0123456789abcdef");
    let answer = ask(&second, 6, &with(&greedy, &json!({"kv_transfer_params": unknown})));
    assert_eq!((text(&answer), from_peer(&answer)), (expected, 0));
    assert_eq!(fallbacks("expired"), (1.0, 1.0));
    // What the tree has is not fetched.
    let answer = ask(&second, 6, &with(&greedy, &json!({"kv_transfer_params": ticket})));
    assert_eq!(from_peer(&answer), 0, "{answer}");
    assert!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 500);

    // A bit flips on the way.
    let expected = text(&ask(&first, 8, &greedy));
    let mut ticket = prefill(&first, 8, &greedy);
    ticket["remote_port"] = json!(middle);
    let answer = ask(&second, 8, &with(&greedy, &json!({"kv_transfer_params": ticket})));
    assert_eq!(text(&answer), expected);
    assert_eq!(fallbacks("corrupt"), (2.0, 1.0));

    // Another cache format: nothing of it is used.
    let other = serve(&["--kv", "bf16", "--kv-transfer-peer", &peers[0]]);
    let ticket = prefill(&first, 10, &greedy);
    let answer = ask(&other, 10, &with(&greedy, &json!({"kv_transfer_params": ticket})));
    let alone = ask(&other, 10, &with(&greedy, &json!({"cache_salt": "alone"})));
    assert_eq!((text(&answer), from_peer(&answer)), (text(&alone), 0));
    assert_eq!(other.metric("oscar_kv_transfer_wrong_fingerprint_total"), 1.0);
    drop(other);

    // The first machine is killed.
    let expected = text(&ask(&first, 12, &greedy));
    let ticket = prefill(&first, 12, &greedy);
    first.signal("-KILL");
    first.wait();
    let answer = ask(&second, 12, &with(&greedy, &json!({"kv_transfer_params": ticket})));
    assert_eq!((text(&answer), from_peer(&answer)), (expected, 0));
    assert_eq!(fallbacks("unreachable"), (3.0, 1.0));

    // A request cannot make the server connect anywhere else.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let foreign = listener.local_addr().unwrap().port();
    for (field, value) in [
        ("remote_port", json!(foreign)),
        ("remote_host", json!("localhost")),
        ("remote_host", json!("169.254.169.254")),
        ("remote_host", json!(7)),
        ("remote_port", json!("http")),
        ("remote_request_id", json!("../../etc")),
    ] {
        let mut ticket = ticket.clone();
        ticket[field] = value;
        let (path, body) = body(12, &json!({"kv_transfer_params": ticket}));
        let answer = second.send("POST", path, None, Some(&body));
        assert_eq!(answer.status, 400, "{}", answer.body);
        let param = answer.json()["error"]["param"].as_str().unwrap().to_owned();
        let named = if field == "remote_port" && ticket[field].is_number() { "remote_host" } else { field };
        assert_eq!(param, format!("kv_transfer_params.{named}"), "{}", answer.body);
    }
    assert!(listener.accept().is_err(), "nobody connected");

    // Neither a second ticket nor both sides at once.
    for (params, more) in [
        (json!({"do_remote_decode": true}), json!({})),
        (with(&ticket, &json!({"do_remote_decode": true})), json!({})),
        (ticket.clone(), json!({"prompt": ["one", "two"]})),
        (json!({"do_remote_decode": "yes"}), json!({})),
    ] {
        let (path, body) = body(12, &with(&more, &json!({"kv_transfer_params": params})));
        let answer = second.send("POST", path, None, Some(&body));
        assert_eq!(answer.status, 400, "{}", answer.body);
        assert!(answer.json()["error"]["param"].as_str().unwrap().starts_with("kv_transfer_params"));
    }
}

/// Two servers of a model: the second one answers from the pages of a prompt that the first one read
/// as if it had read the prompt itself.
fn continues_elsewhere(model: &[&str]) -> [Server; 2] {
    let first = serve(&[model, &["--kv-transfer-listen", "127.0.0.1:0"]].concat());
    let greedy = json!({"temperature": 0});
    let ticket = prefill(&first, 2, &greedy);
    let peer = format!("127.0.0.1:{}", ticket["remote_port"]);
    let second = serve(&[model, &["--kv-transfer-peer", &peer]].concat());
    let split = ask(&second, 2, &with(&greedy, &json!({"kv_transfer_params": ticket})));
    assert!(from_peer(&split) > 500, "{split}");
    let alone = ask(&second, 2, &with(&greedy, &json!({"cache_salt": "alone"})));
    assert_eq!(text(&split), text(&alone));
    [first, second]
}

/// The windows of sliding layers travel with the other pages.
#[test]
fn a_prompt_of_a_sliding_model_continues_on_another_machine() {
    let dir = folder(Family::Gemma3);
    let path = dir.path().to_str().unwrap();
    let model = ["--model", path, "--served-model-name", "oscar-15m", "--kv", "oscar2", "--device", "cpu"];
    let [_, second] = continues_elsewhere(&model);
    // The window of 24 tokens is one page at the end of each of the prompts, and all of the second's
    // while there is room.
    let pages = second.metric(r#"oscar_kv_pages{format="sliding",holder="all"}"#);
    assert!(pages > 8.0, "{pages}");
}

/// The recurrent state at the end of the prompt travels with the pages.
#[test]
fn a_prompt_of_a_delta_model_continues_on_another_machine() {
    let dir = folder(Family::Qwen3_5);
    let path = dir.path().to_str().unwrap();
    let model = ["--model", path, "--served-model-name", "oscar-15m", "--kv", "oscar2", "--device", "cpu"];
    continues_elsewhere(&model);
}

/// Latent rows travel as they are.
#[test]
fn a_prompt_of_a_latent_model_continues_on_another_machine() {
    let dir = folder(Family::DeepseekV3);
    let path = dir.path().to_str().unwrap();
    let model = ["--model", path, "--served-model-name", "oscar-15m", "--device", "cpu"];
    let [first, _] = continues_elsewhere(&model);
    assert!(first.seen.contains("latent attention (MLA): its cache is bf16"), "{}", first.seen);
}

#[test]
fn wrong_addresses_are_refused_at_the_start() {
    let refused = |flags: &[&str]| fail(&[&["serve", "--port", "0", "--device", "cpu"], flags].concat()).1;
    for (flags, needle) in [
        (&["--kv-transfer-listen", "0.0.0.0:0"][..], "--kv-transfer-announce"),
        (&["--kv-transfer-listen", "nowhere"], "ADDRESS:PORT"),
        (&["--kv-transfer-peer", "host"], "HOST:PORT"),
        (&["--kv-transfer-peer", "10.0.0.0/99:1"], "HOST:PORT"),
        (&["--kv-transfer-announce", "host"], "--kv-transfer-listen"),
        (&["--kv-transfer-peer", "host:1", "--no-prefix-cache"], "--no-prefix-cache"),
    ] {
        let message = refused(flags);
        assert!(message.contains(needle), "{flags:?}: {message}");
    }
}
