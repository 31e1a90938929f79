use std::{fmt, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};

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
    /// One line that says which of them is of no use.
    pub fn new(cert: &str, key: &str, ca: &str) -> Result<Self, String> {
        let chain = certificates("cert", cert)?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
            .map_err(|_| "key: it holds no private key in PEM".to_owned())?;
        let mut roots = RootCertStore::empty();
        for root in certificates("ca", ca)? {
            roots.add(root).map_err(|error| format!("ca: {error}"))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let clients = clients.build().map_err(|error| format!("ca: {error}"))?;
        let wrong = |error: rustls::Error| format!("cert and key: {error}");
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

fn certificates(what: &str, pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| format!("{what}: {error}"))?;
    if found.is_empty() { Err(format!("{what}: it holds no certificate in PEM")) } else { Ok(found) }
}
