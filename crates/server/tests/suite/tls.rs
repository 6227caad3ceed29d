//! The API over TLS.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use oscar_server::{ServerConfig, StartProgress, Starting, Tls};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use crate::fake::Script;
use crate::sockets::{PATIENCE, Server, read_all};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

fn tls(certificate: &str, key: &str) -> Tls {
    Tls::read(&fixture(certificate), &fixture(key)).unwrap()
}

async fn connect(address: std::net::SocketAddr) -> TlsStream<TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(fixture("ca.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}

async fn get(address: std::net::SocketAddr, path: &str) -> (String, Vec<u8>) {
    let mut stream = connect(address).await;
    let shown = stream.get_ref().1.peer_certificates().unwrap()[0].to_vec();
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    (answer, shown)
}

#[tokio::test]
async fn the_api_is_served_over_tls_and_certificates_can_be_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    let install = |name: &str| {
        std::fs::copy(fixture(&format!("{name}.pem")), &certificate).unwrap();
        std::fs::copy(fixture(&format!("{name}.key")), &key).unwrap();
    };
    install("first");
    let tls = Tls::read(&certificate, &key).unwrap();
    let config = ServerConfig { tls: Some(tls.clone()), ..Default::default() };
    let server = Server::start(config, Script::default()).await;
    let (answer, first) = get(server.address, "/v1/models").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    install("second");
    tls.reload().unwrap();
    let (answer, second) = get(server.address, "/health").await;
    assert!(answer.starts_with("HTTP/1.1 200") && first != second, "{answer}");
    // A broken file changes nothing.
    std::fs::write(&certificate, "nonsense").unwrap();
    assert!(tls.reload().unwrap_err().to_string().contains("cert.pem"));
    assert_eq!(get(server.address, "/health").await.1, second);
}

#[tokio::test]
async fn clients_that_do_not_speak_tls_get_nothing_and_hold_no_connection() {
    let config = ServerConfig {
        tls: Some(tls("first.pem", "first.key")),
        header_timeout: Duration::from_millis(300),
        ..Default::default()
    };
    let server = Server::start(config, Script::default()).await;
    for text in ["", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        let answer = tokio::time::timeout(PATIENCE, read_all(stream)).await.unwrap();
        assert!(!answer.contains("HTTP"), "{answer}");
    }
    assert!(get(server.address, "/health").await.0.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn the_start_is_told_over_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let progress = StartProgress::default();
    progress.begin("loading weights", 0);
    let config = ServerConfig { tls: Some(tls("first.pem", "first.key")), ..Default::default() };
    let starting = Starting::new(listener, progress, &config);
    let (answer, _) = get(address, "/health").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("loading weights"), "{answer}");
    starting.finish().await.unwrap();
}

#[test]
fn files_that_do_not_fit_are_named() {
    let of = |certificate: &str, key: &str| {
        Tls::read(&fixture(certificate), &fixture(key)).unwrap_err().to_string()
    };
    assert!(of("first.pem", "second.key").contains("cannot be used together"));
    assert!(of("first.key", "first.key").contains("holds no certificate"));
    assert!(of("first.pem", "first.pem").contains("first.pem"));
    assert!(of("missing.pem", "first.key").contains("missing.pem"));
}
