//! TLS on the server's socket.
//!
//! Certificate and key are PEM files. They can be read again while the server runs: connections
//! that are open keep the certificate they began with.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig, crypto};
use tokio_rustls::server::TlsStream;

/// Why certificate and key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{path} cannot be read as PEM: {error}")]
    Pem { path: PathBuf, error: pem::Error },
    #[error("{path} holds no certificate")]
    NoCertificate { path: PathBuf },
    #[error("{certificate} and {key} cannot be used together: {error}")]
    Pair { certificate: PathBuf, key: PathBuf, error: rustls::Error },
}

/// A certificate and its key. Clones share them.
#[derive(Clone)]
pub struct Tls(Arc<Inner>);

struct Inner {
    certificate: PathBuf,
    key: PathBuf,
    config: RwLock<Arc<ServerConfig>>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("certificate", &self.0.certificate).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads a chain of certificates, the server's own first, and its private key.
    ///
    /// # Errors
    /// If a file is not PEM, holds nothing useful, or the two do not belong together.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let config = RwLock::new(config(certificate, key)?);
        Ok(Self(Arc::new(Inner { certificate: certificate.to_owned(), key: key.to_owned(), config })))
    }

    /// Reads both files again. New connections use them.
    ///
    /// # Errors
    /// As [`Tls::read`]; the old certificate then stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let new = config(&self.0.certificate, &self.0.key)?;
        *self.0.config.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// The handshake of a connection.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let config = self.0.config.read().unwrap_or_else(PoisonError::into_inner).clone();
        TlsAcceptor::from(config).accept(stream).await
    }
}

fn config(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |error| TlsError::Pem { path, error }
    };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>())
        .map_err(unreadable(certificate))?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { path: certificate.to_owned() });
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(unreadable(key))?;
    let pair = |error| TlsError::Pair { certificate: certificate.to_owned(), key: key.to_owned(), error };
    let mut config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(pair)?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
