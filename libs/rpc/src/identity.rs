use std::{fmt, sync::Arc};

use rustls::{
    CertificateError, ClientConfig, Error, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject as _},
    server::WebPkiClientVerifier,
};

/// Which part of an [`Identity`] is of no use, and why: `key: it holds no private key in PEM`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// `cert`, `key` or `ca`.
    pub part: &'static str,
    /// One line, without anything of the key.
    pub problem: String,
}

impl Unfit {
    #[expect(clippy::needless_pass_by_value, reason = "for map_err")]
    fn new(part: &'static str, problem: impl ToString) -> Self {
        Self { part, problem: problem.to_string() }
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.part, self.problem)
    }
}

/// Who a process is to the others of its cluster, and whom it believes: mutual TLS. Cheap to clone.
#[derive(Clone)]
pub struct Identity {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl Identity {
    /// From PEM: the certificate with those up to the authority, its key, and the authority. Whoever shows a
    /// certificate of the authority is believed; servers must also have the name that they are called by.
    ///
    /// # Errors
    /// Something that is not PEM, a key of another certificate, a certificate that is over.
    pub fn new(cert: &str, key: &str, ca: &str) -> Result<Self, Unfit> {
        let chain = certificates("cert", cert)?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
            .map_err(|_| Unfit::new("key", "it holds no private key in PEM"))?;
        let mut roots = RootCertStore::empty();
        for root in certificates("ca", ca)? {
            roots.add(root).map_err(|error| Unfit::new("ca", error))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let clients = clients.build().map_err(|error| Unfit::new("ca", error))?;
        // Others refuse it for more reasons, but which of them is wrong then, nobody here can know.
        if let Err(Error::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. })) =
            clients.verify_client_cert(&chain[0], &chain[1..], UnixTime::now())
        {
            return Err(Unfit::new("cert", "it has expired, or one between it and the authority"));
        }
        let wrong = |error: Error| match error {
            Error::InconsistentKeys(_) => Unfit::new("key", "it does not belong to the certificate"),
            error => Unfit::new("cert", error),
        };
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(wrong)?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(wrong)?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(wrong)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(wrong)?;
        server.alpn_protocols = vec![b"h2".to_vec()];
        client.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { server: Arc::new(server), client: Arc::new(client) })
    }

    /// For a port that only the cluster may call.
    #[must_use]
    pub fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    pub(crate) fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity")
    }
}

/// At least one.
fn certificates(part: &'static str, pem: &str) -> Result<Vec<CertificateDer<'static>>, Unfit> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| Unfit::new(part, error))?;
    if found.is_empty() { Err(Unfit::new(part, "it holds no certificate in PEM")) } else { Ok(found) }
}
