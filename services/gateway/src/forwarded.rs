//! Under which URL a client reaches us: configured, told by a trusted proxy, or the address that we listen on.

use std::{net::IpAddr, net::SocketAddr, str::FromStr};

use anyhow::{Context as _, ensure};
use axum::http::{HeaderMap, HeaderName, header, uri::Authority};
use rialto_runtime::config::Config;
use url::Url;

use crate::agents::host_name;

const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// The start of public URLs: `https://a.example`, or with a path in front of all mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    https: bool,
    /// With the port if it is not the scheme's own.
    authority: String,
    /// Without `/` at the end.
    path: String,
}

impl Base {
    pub(crate) fn url(&self) -> String {
        format!("{}://{}{}", if self.https { "https" } else { "http" }, self.authority, self.path)
    }

    /// As gRPC clients dial it.
    pub(crate) fn host_and_port(&self) -> String {
        match self.authority.parse::<Authority>().ok().and_then(|authority| authority.port_u16()) {
            Some(_) => self.authority.clone(),
            None => format!("{}:{}", self.authority, if self.https { 443 } else { 80 }),
        }
    }

    /// The same, for an agent that has a host of its own.
    fn at_host(&self, host: &str) -> Self {
        let port = self.authority.parse::<Authority>().ok().and_then(|authority| authority.port_u16());
        let authority = port.map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        Self { authority, ..self.clone() }
    }
}

/// A network in CIDR form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    bits: u8,
}

impl FromStr for Network {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr =
            address.parse().with_context(|| format!("{text:?} is not a network such as \"10.0.0.0/8\""))?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(most), str::parse).with_context(|| format!("{text:?} is not a network"))?;
        ensure!(bits <= most, "{text:?} has more than {most} bits");
        Ok(Self { address, bits })
    }
}

impl Network {
    fn contains(&self, address: IpAddr) -> bool {
        let prefix = |bits: u128, width: u8| bits.checked_shr(u32::from(width - self.bits)).unwrap_or(0);
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                prefix(u32::from(own).into(), 32) == prefix(u32::from(other).into(), 32)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => prefix(own.into(), 128) == prefix(other.into(), 128),
            _ => false,
        }
    }
}

/// Finds the [`Base`] of each request.
#[derive(Debug)]
pub(crate) struct Forwarded {
    fixed: bool,
    base: Base,
    proxies: Vec<Network>,
}

impl Forwarded {
    pub(crate) fn new(config: &Config, local: SocketAddr) -> anyhow::Result<Self> {
        let proxies = config.trusted_proxies.iter().map(|net| net.parse()).collect::<anyhow::Result<_>>();
        let base = match &config.public_url {
            Some(url) => parse(url).context("public-url")?,
            // An address that means "all of mine" is nothing to dial; on this machine, its name is.
            None if local.ip().is_unspecified() => {
                Base { https: false, authority: format!("localhost:{}", local.port()), path: String::new() }
            }
            None => Base { https: false, authority: local.to_string(), path: String::new() },
        };
        Ok(Self { fixed: config.public_url.is_some(), base, proxies: proxies.context("trusted-proxies")? })
    }

    /// The base of an agent with this host, for a request that came from `peer`.
    pub(crate) fn base(&self, headers: &HeaderMap, peer: Option<IpAddr>, host: Option<&str>) -> Base {
        let trusted = || peer.is_some_and(|peer| self.proxies.iter().any(|proxy| proxy.contains(peer)));
        let told = if !self.fixed && trusted() { told(headers, self.base.https) } else { None };
        match (told, host) {
            (Some(told), _) => told,
            (None, Some(host)) => self.base.at_host(host),
            (None, None) => self.base.clone(),
        }
    }
}

fn parse(text: &str) -> anyhow::Result<Base> {
    let url = Url::parse(text).with_context(|| format!("{text:?} is not a URL"))?;
    let https = url.scheme() == "https";
    ensure!(https || url.scheme() == "http", "{text:?} must start with https:// or http://");
    ensure!(url.query().is_none() && url.fragment().is_none(), "{text:?} must have no query and no fragment");
    ensure!(url.username().is_empty() && url.password().is_none(), "the URL must hold no credentials");
    let host = url.host_str().with_context(|| format!("{text:?} has no host"))?;
    let authority = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
    Ok(Base { https, authority, path: url.path().trim_end_matches('/').to_owned() })
}

/// What the nearest proxy says: `Forwarded` (RFC 7239) or `X-Forwarded-*`.
fn told(headers: &HeaderMap, https: bool) -> Option<Base> {
    // Proxies append, so the last entry is that of the one we trust.
    let last = |name: HeaderName| {
        let value = headers.get_all(name).iter().next_back()?.to_str().ok()?;
        value.rsplit(',').next().map(str::trim)
    };
    let mut host = last(HOST).map(str::to_owned);
    let mut proto = last(PROTO).map(str::to_owned);
    if let Some(element) = last(header::FORWARDED) {
        for pair in element.split(';') {
            let Some((name, value)) = pair.split_once('=') else { continue };
            let value = Some(value.trim().trim_matches('"').to_owned());
            match &name.trim().to_ascii_lowercase()[..] {
                "host" => host = value,
                "proto" => proto = value,
                _ => {}
            }
        }
    }
    let https = match proto.as_deref() {
        Some(proto) => proto.eq_ignore_ascii_case("https"),
        None => https,
    };
    let authority: Authority = host?.parse().ok()?;
    if authority.as_str().contains('@') || host_name(authority.as_str()).is_empty() {
        return None;
    }
    Some(Base { https, authority: authority.as_str().to_ascii_lowercase(), path: String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(
        config: &Config,
        local: &str,
        headers: &[(&str, &str)],
        peer: &str,
        host: Option<&str>,
    ) -> (String, String) {
        let forwarded = Forwarded::new(config, local.parse().unwrap()).unwrap();
        let pairs = headers.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap()));
        let base = forwarded.base(&pairs.collect(), Some(peer.parse().unwrap()), host);
        (base.url(), base.host_and_port())
    }

    #[test]
    fn cards_name_the_url_that_clients_can_use() {
        let pair = |url: &str, grpc: &str| (url.to_owned(), grpc.to_owned());
        let none = Config::default();
        let local = "127.0.0.1:8080";
        assert_eq!(base(&none, local, &[], "127.0.0.1", None), pair("http://127.0.0.1:8080", "127.0.0.1:8080"));
        assert_eq!(base(&none, "0.0.0.0:80", &[], "127.0.0.1", None), pair("http://localhost:80", "localhost:80"));
        assert_eq!(base(&none, "[::1]:81", &[], "127.0.0.1", None), pair("http://[::1]:81", "[::1]:81"));
        let public = Config { public_url: Some("https://a.example/x/".to_owned()), ..Config::default() };
        assert_eq!(base(&public, local, &[], "127.0.0.1", None), pair("https://a.example/x", "a.example:443"));
        assert_eq!(base(&public, local, &[], "::1", Some("b.example")), pair("https://b.example/x", "b.example:443"));

        let lie = [("x-forwarded-host", "evil.example"), ("x-forwarded-proto", "https")];
        assert_eq!(base(&none, local, &lie, "127.0.0.1", None).0, "http://127.0.0.1:8080");
        let behind = Config { trusted_proxies: vec!["10.1.0.0/16".to_owned(), "::1".to_owned()], ..Config::default() };
        assert_eq!(base(&behind, local, &lie, "10.2.0.1", None).0, "http://127.0.0.1:8080");
        let truth = [("x-forwarded-host", "evil.example, A.example"), ("x-forwarded-proto", "https")];
        for peer in ["10.1.2.3", "::ffff:10.1.2.3", "::1"] {
            assert_eq!(base(&behind, local, &truth, peer, None), pair("https://a.example", "a.example:443"));
        }
        let rfc = [("forwarded", "for=1.2.3.4;host=\"c.example:8443\";proto=https")];
        assert_eq!(base(&behind, local, &rfc, "::1", None), pair("https://c.example:8443", "c.example:8443"));
        let junk = [("x-forwarded-host", "a b<script>")];
        assert_eq!(base(&behind, local, &junk, "::1", None).0, "http://127.0.0.1:8080");
    }

    #[test]
    fn wrong_settings_are_named() {
        let fault = |config: Config| format!("{:#}", Forwarded::new(&config, "[::]:1".parse().unwrap()).unwrap_err());
        let url = |url: &str| fault(Config { public_url: Some(url.to_owned()), ..Config::default() });
        insta::assert_snapshot!(url("a.example"), @r#"public-url: "a.example" is not a URL: relative URL without a base"#);
        insta::assert_snapshot!(url("ftp://a.example"), @r#"public-url: "ftp://a.example" must start with https:// or http://"#);
        insta::assert_snapshot!(url("https://a.example?x=1"), @r#"public-url: "https://a.example?x=1" must have no query and no fragment"#);
        let net = |net: &str| fault(Config { trusted_proxies: vec![net.to_owned()], ..Config::default() });
        insta::assert_snapshot!(net("10.0.0.0/33"), @r#"trusted-proxies: "10.0.0.0/33" has more than 32 bits"#);
        insta::assert_snapshot!(net("proxy"), @r#"trusted-proxies: "proxy" is not a network such as "10.0.0.0/8": invalid IP address syntax"#);
    }
}
