//! Models behind an OpenAI-compatible chat-completions endpoint. `docs/agents.md` has the rules.

mod answer;
mod chat;
mod failure;

use std::time::Duration;

use anyhow::{Context as _, ensure};
use backon::{BackoffBuilder as _, ExponentialBuilder};
use bytes::Bytes;
use opentelemetry::KeyValue;
use reqwest::{
    Client, Url,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue},
    redirect::Policy,
};
use rialto_a2a::wkt::{Struct, Value};
use rialto_runtime::{Secret, telemetry::trace};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{Instrument as _, Span, field::Empty, info_span, warn};

use self::{
    answer::{Answer, Broken, Event, Usage},
    failure::Failure,
};
use super::{AgentEvent, Backend, Crash, End, Events, Turn};
use crate::observe::MODELS;

/// OpenAI's own endpoint.
pub const OPENAI: &str = "https://api.openai.com/v1";

/// Requests for one answer.
const ATTEMPTS: usize = 4;
/// A pause longer than this is not waited for: somebody waits for the answer.
const MAX_PAUSE: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// After the last word: time for the count of tokens.
const FAREWELL: Duration = Duration::from_secs(5);

/// Which model answers, and how it is asked.
#[derive(Clone, Debug)]
pub struct Options {
    /// The agent's id, for the log.
    pub agent: String,
    /// The model, by the endpoint's name.
    pub model: String,
    /// Where the API is; `/chat/completions` is added.
    pub base_url: String,
    /// Sent as bearer token; without it, none is.
    pub api_key: Option<Secret>,
    /// Comes before the conversation.
    pub system_prompt: Option<String>,
    /// The endpoint's default if not set.
    pub temperature: Option<f64>,
    /// The endpoint's default if not set.
    pub max_output_tokens: Option<u32>,
    /// Images of messages are shown to the model, instead of being mentioned.
    pub images: bool,
    /// From the request to the first sign of an answer.
    pub first_token_timeout: Duration,
    /// Between two pieces of an answer.
    pub stall_timeout: Duration,
    /// Of the whole turn: no pause begins that would not end in time.
    pub turn_timeout: Duration,
    /// Before the second attempt; it doubles, with jitter, before each further one.
    pub first_pause: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            agent: String::new(),
            model: String::new(),
            base_url: OPENAI.to_owned(),
            api_key: None,
            system_prompt: None,
            temperature: None,
            max_output_tokens: None,
            images: false,
            first_token_timeout: Duration::from_secs(120),
            stall_timeout: Duration::from_secs(60),
            turn_timeout: Duration::from_secs(3600),
            first_pause: Duration::from_millis(500),
        }
    }
}

/// The backend.
#[derive(Debug)]
pub struct Openai {
    options: Options,
    client: Client,
    url: Url,
    authorization: Option<HeaderValue>,
    /// The endpoint knows the newer name of the limit on tokens.
    newer_limit: bool,
}

impl Openai {
    /// A backend that opens no connection before its first turn. Needs a process-wide TLS provider.
    ///
    /// # Errors
    /// When URL or key cannot be used.
    pub fn new(options: Options) -> anyhow::Result<Self> {
        let mut url = Url::parse(&options.base_url).context("the base URL cannot be used")?;
        ensure!(matches!(url.scheme(), "http" | "https"), "the base URL must begin with http:// or https://");
        url.path_segments_mut()
            .map_err(|()| anyhow::anyhow!("the base URL cannot be used"))?
            .pop_if_empty()
            .extend(["chat", "completions"]);
        let authorization = options.api_key.as_ref().map(|key| {
            let value = HeaderValue::try_from(format!("Bearer {}", key.expose()));
            value.map(|mut value| {
                value.set_sensitive(true);
                value
            })
        });
        let authorization = authorization.transpose().ok().context("the API key holds characters that no key has")?;
        let host = url.host_str().unwrap_or_default();
        let local = is_local(host);
        if authorization.is_some() && url.scheme() == "http" && !local {
            warn!(agent = options.agent, host, "the key for the model travels unencrypted; use https");
        }
        let newer_limit = [".openai.com", ".azure.com"].iter().any(|domain| host.ends_with(domain));
        // Whoever is redirected to must not get the key, nor the conversation.
        let builder = Client::builder()
            .redirect(Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(concat!("rialto/", env!("CARGO_PKG_VERSION")));
        // The environment's proxy is for what is outside of this machine.
        let builder = if local { builder.no_proxy() } else { builder };
        let client = builder.build().context("cannot make an HTTP client")?;
        Ok(Self { options, client, url, authorization, newer_limit })
    }

    async fn answer(&self, turn: &Turn, events: &Events) -> End {
        let started = Instant::now();
        let request = chat::Request::new(&self.options, self.newer_limit, turn);
        let body =
            Bytes::from(serde_json::to_vec(&request).expect("strings and finite numbers can be written as JSON"));
        drop(request);
        let mut pauses = ExponentialBuilder::default()
            .with_min_delay(self.options.first_pause)
            .with_max_times(ATTEMPTS - 1)
            .with_jitter()
            .build();
        loop {
            let mut spoken = false;
            let failure = match self.attempt(body.clone(), events, &mut spoken).await {
                Ok(end) => {
                    self.took(started, None);
                    return end;
                }
                Err(failure) => failure,
            };
            let Failure { end, kind, detail, transient, retry_after } = failure;
            let left = self.options.turn_timeout.saturating_sub(started.elapsed());
            let pause = pauses
                .next()
                .filter(|_| transient && !spoken)
                .map(|pause| pause.max(retry_after.unwrap_or_default()))
                .filter(|pause| *pause <= MAX_PAUSE && *pause < left);
            let again = pause.is_some();
            warn!(
                agent = self.options.agent,
                model = self.options.model,
                kind,
                ?detail,
                again,
                "the model gave no answer"
            );
            let Some(pause) = pause else {
                Span::current().record("error.type", kind.as_str()).record("otel.status_code", "error");
                self.took(started, Some(kind));
                return match end {
                    // What was said cannot be unsaid, and another answer would not continue it.
                    End::Failed(_) if spoken => End::Failed("the model's answer was cut off".to_owned()),
                    end => end,
                };
            };
            sleep(pause).await;
        }
    }

    /// Asks once, and passes the answer on. `spoken` is set as soon as a part of it is.
    async fn attempt(&self, body: Bytes, events: &Events, spoken: &mut bool) -> Result<End, Failure> {
        let mut deadline = Instant::now() + self.options.first_token_timeout;
        let mut request = self.client.post(self.url.clone()).header(CONTENT_TYPE, "application/json").body(body);
        request = request.header(ACCEPT, "text/event-stream, application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization.clone());
        }
        let key = self.options.api_key.as_ref();
        let late = || Failure::lasting("timeout", "the model did not begin to answer in time", "no answer");
        let unreachable = |error| Failure::connection("the model endpoint cannot be reached", error);
        let response = timeout_at(deadline, request.send()).await.map_err(|_| late())?.map_err(unreachable)?;
        if !response.status().is_success() {
            return Err(Failure::refused(response, key).await);
        }

        let mut answer = Answer::new(response).map_err(broken)?;
        let (mut named, mut begun, mut usage, mut finish_reason) = (false, false, None, None);
        loop {
            let event = match timeout_at(deadline, answer.next()).await {
                Ok(Ok(event)) => event,
                // Nothing of the answer is missing, only the count of tokens may be.
                _ if finish_reason.is_some() => break,
                Ok(Err(error)) => return Err(broken(error)),
                Err(_) if !begun => return Err(late()),
                Err(_) => return Err(Failure::lasting("timeout", "the model stopped answering", "a stall")),
            };
            let mut chunk = match event {
                Some(Event::Chunk(chunk)) => chunk,
                None if finish_reason.is_none() => return Err(cut("the response ended early")),
                None | Some(Event::Done) => break,
            };
            if let Some(error) = chunk.error() {
                return Err(Failure::reported(&error, key));
            }
            if !std::mem::replace(&mut named, true) {
                record("gen_ai.response.id", chunk.id.as_deref());
                record("gen_ai.response.model", chunk.model.as_deref());
            }
            usage = chunk.usage().or(usage);
            let piece = chunk.piece();
            if !piece.text.is_empty() {
                *spoken = true;
                events.text(piece.text.clone()).await;
            }
            // Empty pieces are no sign of life.
            if !piece.text.is_empty() || piece.thinking {
                begun = true;
                deadline = Instant::now() + self.options.stall_timeout;
            }
            if piece.finish_reason.is_some() {
                finish_reason = piece.finish_reason;
                deadline = Instant::now() + FAREWELL.min(self.options.stall_timeout);
            }
        }
        self.report(usage.unwrap_or_default(), finish_reason.as_deref(), events).await;
        Ok(match finish_reason.as_deref() {
            Some("content_filter") => failure::filtered(),
            Some("tool_calls" | "function_call") => {
                End::Failed("the model asked for a tool, and this agent has none".to_owned())
            }
            _ => End::Done(Vec::new()),
        })
    }

    /// Says in the task's metadata and in the trace what the answer has cost, and why it ended.
    async fn report(&self, usage: Usage, finish_reason: Option<&str>, events: &Events) {
        let counts = [
            ("inputTokens", usage.input),
            ("outputTokens", usage.output),
            ("totalTokens", usage.total.or_else(|| usage.input?.checked_add(usage.output?))),
            ("cachedInputTokens", usage.cached_input),
        ];
        let counted = counts
            .into_iter()
            .filter_map(|(name, count)| Some((name, Value::from(u32::try_from(count?).unwrap_or(u32::MAX)))));
        let said = counted.chain([("model", Value::from(self.options.model.as_str()))]);
        events.send(AgentEvent::Usage(said.collect())).await;
        if let Some(reason) = finish_reason {
            // The endpoint's own words stay here.
            let known = ["stop", "length", "content_filter", "tool_calls", "function_call"];
            let reason = if known.contains(&reason) { reason } else { "other" };
            trace::set_list("gen_ai.response.finish_reasons", vec![reason.to_owned().into()]);
            let metadata: Struct = [("finishReason", reason)].into_iter().collect();
            events.send(AgentEvent::Metadata(metadata)).await;
        }
        let span = Span::current();
        for (name, of, count) in [
            ("gen_ai.usage.input_tokens", "input", usage.input),
            ("gen_ai.usage.output_tokens", "output", usage.output),
        ] {
            if let Some(count) = count {
                span.record(name, count);
                let [operation, provider, model] = self.labels();
                MODELS.tokens.record(count, &[operation, provider, model, KeyValue::new("gen_ai.token.type", of)]);
            }
        }
        if let Some(count) = usage.cached_input {
            span.record("gen_ai.usage.cache_read.input_tokens", count);
        }
    }

    /// Notes how long an answer took, further tries included, or how long there was none.
    fn took(&self, started: Instant, error: Option<String>) {
        let error = error.map(|error| KeyValue::new("error.type", error));
        let labels: Vec<_> = self.labels().into_iter().chain(error).collect();
        MODELS.duration.record(started.elapsed().as_secs_f64(), &labels);
    }

    fn labels(&self) -> [KeyValue; 3] {
        [
            KeyValue::new("gen_ai.operation.name", "chat"),
            KeyValue::new("gen_ai.provider.name", "openai"),
            KeyValue::new("gen_ai.request.model", self.options.model.clone()),
        ]
    }

    /// One answer of a model, by the GenAI semantic conventions.
    fn span(&self, turn: &Turn) -> Span {
        let model = self.options.model.as_str();
        info_span!(
            "chat",
            "otel.name" = format!("chat {model}"),
            "otel.kind" = "client",
            "gen_ai.operation.name" = "chat",
            "gen_ai.provider.name" = "openai",
            "gen_ai.request.model" = model,
            "gen_ai.request.temperature" = self.options.temperature,
            "gen_ai.request.max_tokens" = self.options.max_output_tokens,
            "gen_ai.conversation.id" = turn.context_id,
            "server.address" = self.url.host_str(),
            "server.port" = self.url.port_or_known_default(),
            "gen_ai.response.id" = Empty,
            "gen_ai.response.model" = Empty,
            "gen_ai.usage.input_tokens" = Empty,
            "gen_ai.usage.output_tokens" = Empty,
            "gen_ai.usage.cache_read.input_tokens" = Empty,
            "error.type" = Empty,
            "otel.status_code" = Empty,
        )
    }
}

/// Notes the beginning of a text from outside.
fn record(field: &str, text: Option<&str>) {
    if let Some(text) = text {
        Span::current().record(field, &text[..text.floor_char_boundary(128)]);
    }
}

fn cut(detail: impl Into<String>) -> Failure {
    Failure::transient("cut", "the model's answer was cut off", detail)
}

fn broken(error: Broken) -> Failure {
    match error {
        Broken::Connection(error) => Failure::connection("the model's answer was cut off", error),
        Broken::Invalid(detail) => Failure::lasting("invalid", "the model endpoint gave an invalid answer", detail),
    }
}

fn is_local(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.to_canonical().is_loopback())
}

#[async_trait::async_trait]
impl Backend for Openai {
    async fn run(&self, turn: &Turn, events: &Events) -> Result<End, Crash> {
        tokio::select! {
            biased;
            // Dropping the request ends its connection: nobody pays for words that nobody reads.
            () = turn.cancel.cancelled() => Ok(End::Failed("canceled".to_owned())),
            end = self.answer(turn, events).instrument(self.span(turn)) => Ok(end),
        }
    }
}
