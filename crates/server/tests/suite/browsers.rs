//! Web pages of others: what a browser would let them send is refused.

use axum::body::Body;
use axum::http::Request;
use oscar_server::ServerConfig;
use serde_json::json;

use crate::client::{Answer, Client};
use crate::fake::Script;

async fn post(client: &Client, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let request =
        headers.iter().fold(Request::post(path), |request, (name, value)| request.header(*name, *value));
    client.send(request.body(Body::from(body.to_owned())).unwrap()).await
}

const CHAT: &str = r#"{"messages": [{"role": "user", "content": "Hi"}]}"#;
const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn bodies_must_be_json() {
    let client = Client::new();
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""] {
        let headers = [("content-type", kind)];
        let headers = if kind.is_empty() { &[][..] } else { &headers };
        for (path, body) in [("/v1/chat/completions", CHAT), ("/abort_request", r#"{"abort_all": true}"#)] {
            assert_eq!(
                post(&client, path, headers, body).await.error(415)["code"],
                "not_json",
                "{kind} {path}"
            );
        }
    }
    post(&client, "/v1/chat/completions", &[JSON], CHAT).await.ok();
    post(&client, "/flush_cache", &[], "").await.ok();
}

#[tokio::test]
async fn foreign_origins_are_refused() {
    let config = ServerConfig { cors_origins: vec!["https://app.example".into()], ..Default::default() };
    let client = Client::with(config, Script::default());
    let host = ("host", "127.0.0.1:8000");
    for origin in ["https://evil.example", "null", "http://127.0.0.1:9000"] {
        for (path, body) in [("/v1/chat/completions", CHAT), ("/flush_cache", "")] {
            let answer = post(&client, path, &[JSON, host, ("origin", origin)], body).await;
            assert_eq!(answer.error(403)["code"], "foreign_origin", "{origin} {path}");
        }
    }
    for origin in ["http://127.0.0.1:8000", "https://app.example"] {
        post(&client, "/v1/chat/completions", &[JSON, host, ("origin", origin)], CHAT).await.ok();
    }
}

#[tokio::test]
async fn a_loopback_server_answers_to_loopback_names() {
    let get = |host: &str| Request::get("/internal/state").header("host", host).body(Body::empty()).unwrap();
    let client = Client::new();
    for host in ["attacker.example", "attacker.example:8000", "localhost.attacker.example", "10.0.0.1", "::"]
    {
        assert_eq!(client.send(get(host)).await.error(421)["code"], "unknown_host", "{host}");
    }
    for host in ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "127.1.2.3"] {
        client.send(get(host)).await.ok();
    }
    let config = ServerConfig { allowed_hosts: vec!["api.example".into()], ..Default::default() };
    Client::with(config, Script::default()).send(get("api.example")).await.ok();
    let config = ServerConfig { loopback: false, allow_anonymous: true, ..Default::default() };
    Client::with(config, Script::default()).send(get("api.example")).await.ok();
}

#[tokio::test]
async fn every_answer_is_hardened() {
    let client = Client::new();
    let answers = [
        client.get("/health").await,
        client.get("/").await,
        client.get("/nothing").await,
        client.chat(&json!({"messages": [{"role": "user", "content": "Hi"}]})).await,
        client.chat(&json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true})).await,
        client.chat(&json!({})).await,
    ];
    for answer in answers {
        assert_eq!(answer.headers["x-content-type-options"], "nosniff");
        assert_eq!(answer.headers["x-frame-options"], "DENY");
        assert_eq!(answer.headers["referrer-policy"], "no-referrer");
        assert!(
            answer.headers["content-security-policy"].to_str().unwrap().contains("frame-ancestors 'none'")
        );
    }
}

#[test]
fn other_machines_are_served_with_a_key_or_on_demand() {
    let open = ServerConfig { loopback: false, host: "0.0.0.0".into(), ..Default::default() };
    let message = open.check_exposure().unwrap_err().to_string();
    assert!(message.contains("--allow-anonymous") && message.contains("0.0.0.0"), "{message}");
    ServerConfig { allow_anonymous: true, ..open }.check_exposure().unwrap();
    ServerConfig::default().check_exposure().unwrap();
}
