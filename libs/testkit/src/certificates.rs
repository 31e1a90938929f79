//! Certificates of an authority that exists for one test.

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// An authority.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// A new one, which nobody knows.
    ///
    /// # Errors
    /// When no key can be made.
    pub fn new() -> anyhow::Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem })
    }

    /// Its own certificate.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate for names and addresses, and its key.
    ///
    /// # Errors
    /// When a name is none.
    pub fn issue(&self, names: &[&str]) -> anyhow::Result<(String, String)> {
        self.issue_until(names, 4096)
    }

    /// As [`Authority::issue`], for a certificate that is over when this year begins.
    ///
    /// # Errors
    /// When a name is none.
    pub fn issue_until(&self, names: &[&str], year: i32) -> anyhow::Result<(String, String)> {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names)?;
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok((certificate.pem(), key.serialize_pem()))
    }
}
