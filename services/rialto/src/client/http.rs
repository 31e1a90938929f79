//! What JSON-RPC and REST share: requests over HTTP with bounded answers.

use std::{error::Error as _, fmt::Write as _, net::IpAddr};

use bytes::Bytes;
use futures::{StreamExt as _, stream, stream::BoxStream};
use reqwest::{
    RequestBuilder, Response,
    header::{ACCEPT, CONTENT_TYPE, HeaderValue},
};
use rialto_net::sse::{Event, Parser};
use tokio::time::timeout;
use url::{Host, Url};

use super::{Answered, CONNECT, EVENT_NUMBER, Failure, MAX_ANSWER, Result, SILENCE, VERSION};

pub(super) type Events = BoxStream<'static, Result<Event>>;

/// An interface of an agent, reached over HTTP.
#[derive(Clone, Debug)]
pub(super) struct Http {
    client: reqwest::Client,
    base: Url,
}

impl Http {
    /// # Errors
    /// `base` is not an http or https URL.
    pub(super) fn new(base: &str) -> Result<Self> {
        let fault = |problem: &str| Failure::Usage(format!("{base:?} {problem}"));
        let url = Url::parse(base).map_err(|_| fault("is not a URL such as \"http://127.0.0.1:8080\""))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(fault("must begin with http:// or https://"));
        }
        Ok(Self { client: connector(&url)?, base: url })
    }

    /// The URL of a path of the interface; `path` is empty or begins with `/`, and is encoded already.
    fn url(&self, path: &str) -> String {
        let base = self.base.as_str();
        if path.is_empty() { base.to_owned() } else { format!("{}{path}", base.trim_end_matches('/')) }
    }

    pub(super) fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(self.url(path)).header("a2a-version", VERSION)
    }

    pub(super) fn post(&self, path: &str, body: Vec<u8>) -> RequestBuilder {
        let json = HeaderValue::from_static("application/json");
        self.client.post(self.url(path)).header("a2a-version", VERSION).header(CONTENT_TYPE, json).body(body)
    }

    /// The same for a message, which may have a name (`Idempotency-Key`).
    pub(super) fn post_message(&self, path: &str, body: Vec<u8>, key: Option<&str>) -> RequestBuilder {
        let request = self.post(path, body);
        match key {
            Some(key) => request.header("idempotency-key", key),
            None => request,
        }
    }

    /// Sends a request; the answer's status is the caller's to judge.
    pub(super) async fn send(&self, request: RequestBuilder) -> Result<Response> {
        request.send().await.map_err(|error| self.broken(&error))
    }

    /// Sends a request for an event stream; anything but a stream comes back as the second.
    pub(super) async fn open(&self, request: RequestBuilder) -> Result<Result<Events, Response>> {
        let request =
            request.header(ACCEPT, "text/event-stream, application/json").header("a2a-extensions", EVENT_NUMBER);
        let response = self.send(request).await?;
        let is_stream = response.headers().get(CONTENT_TYPE).is_some_and(|kind| {
            kind.to_str().is_ok_and(|kind| kind.trim_start().to_ascii_lowercase().starts_with("text/event-stream"))
        });
        if !response.status().is_success() || !is_stream {
            return Ok(Err(response));
        }
        let start = (response, self.clone(), Parser::new(MAX_ANSWER));
        let events = stream::try_unfold(start, |(mut response, this, mut parser)| async move {
            loop {
                if let Some(event) = parser.pop() {
                    return Ok(Some((event, (response, this, parser))));
                }
                let chunk = timeout(SILENCE, response.chunk()).await;
                let chunk = chunk.map_err(|_| Failure::Unreachable(format!("{} fell silent", this.base)))?;
                let Some(chunk) = chunk.map_err(|error| this.broken(&error))? else { return Ok(None) };
                parser.feed(&chunk).map_err(Failure::garbage)?;
            }
        });
        Ok(Ok(events.boxed()))
    }

    pub(super) async fn get_bytes(&self, path: &str, limit: usize) -> Result<Vec<u8>> {
        let response = self.send(self.get(path)).await?;
        let status = response.status();
        let url = response.url().clone();
        let body = self.read(response, limit).await?;
        if status.is_success() { Ok(body) } else { Err(refused(status, &url)) }
    }

    /// The body of an answer, whatever its status.
    pub(super) async fn body(&self, response: Response) -> Result<Vec<u8>> {
        self.read(response, MAX_ANSWER).await
    }

    async fn read(&self, mut response: Response, limit: usize) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.broken(&error))? {
            grow(&mut body, &chunk, limit)?;
        }
        Ok(body)
    }

    fn broken(&self, error: &reqwest::Error) -> Failure {
        let what = if error.is_connect() { "cannot reach" } else { "lost the connection to" };
        Failure::Unreachable(format!("{what} {}: {}", self.base, cause(error)))
    }
}

/// What makes connections to a server.
///
/// # Errors
/// Its certificates cannot be judged on this machine.
pub(crate) fn connector(url: &Url) -> Result<reqwest::Client> {
    let mut builder = reqwest::Client::builder()
        .connect_timeout(CONNECT)
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("rialto/", env!("CARGO_PKG_VERSION")));
    if is_loopback(url) {
        builder = builder.no_proxy();
    }
    if url.scheme() == "http" {
        // Machines without any CA certificate can still talk in the clear.
        builder = builder.tls_certs_only([]);
    }
    builder.build().map_err(|error| Failure::Unreachable(sentence(&error)))
}

fn grow(body: &mut Vec<u8>, chunk: &Bytes, limit: usize) -> Result<()> {
    if body.len() + chunk.len() > limit {
        return Err(Failure::garbage(format_args!("it is larger than {} MiB", limit >> 20)));
    }
    body.extend_from_slice(chunk);
    Ok(())
}

/// An answer with a bad status and no A2A error in its body.
pub(super) fn refused(status: reqwest::StatusCode, url: &Url) -> Failure {
    let passing = matches!(status.as_u16(), 429 | 502..=504);
    let message = format!("{url} answered {status}");
    Failure::Answer(Answered { message, code: String::new(), passing })
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        Some(Host::Ipv4(address)) => IpAddr::V4(address).is_loopback(),
        Some(Host::Ipv6(address)) => IpAddr::V6(address).to_canonical().is_loopback(),
        None => false,
    }
}

/// What is at the bottom of an error: `connection refused` and not `error sending request`.
pub(crate) fn cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// An error with all its causes, on one line.
fn sentence(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        write!(text, ": {source}").expect("writing to a string");
        cause = source.source();
    }
    text
}
