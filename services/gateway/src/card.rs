//! What an agent's card says, and the bytes that say it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Response, StatusCode, header},
};
use bytes::Bytes;
use jiff::{Timestamp, fmt::rfc2822};
use rialto_a2a::{
    Error, Result, json,
    v1::{AgentCapabilities, AgentCard, AgentExtension, AgentInterface, AgentProvider, AgentSkill},
    v03,
};
use rialto_runtime::config::{self, Binding};

use crate::{EVENT_NUMBER, call::Version, forwarded::Base};

/// Cards of one agent that are kept, one per public URL; more than one only behind proxies of several names.
const KEPT: usize = 16;

/// All of a card but its URLs.
#[derive(Debug)]
pub(crate) struct Template {
    card: AgentCard,
    bindings: Vec<Binding>,
    /// Whether clients of 0.3 are to find their way, too.
    serves_v03: bool,
    /// Most recently used last.
    made: Mutex<VecDeque<(Base, Arc<Card>)>>,
}

/// A card as it is served.
#[derive(Debug)]
pub(crate) struct Card {
    json: Bytes,
    etag: HeaderValue,
}

/// The extensions of a card: the configured ones, and ours.
pub(crate) fn extensions(card: &config::Card) -> Result<Vec<AgentExtension>> {
    let configured = card.extensions.iter().map(|extension| {
        let params = extension.params.clone().map(|params| json::from_value(params.into())).transpose();
        Ok(AgentExtension {
            uri: extension.uri.clone(),
            description: extension.description.clone(),
            required: extension.required,
            params: params.map_err(|error: Error| error.within(&extension.uri))?,
        })
    });
    let mut all = configured.collect::<Result<Vec<_>>>()?;
    if card.streaming && all.iter().all(|extension| extension.uri != EVENT_NUMBER) {
        all.push(AgentExtension {
            uri: EVENT_NUMBER.to_owned(),
            description: "Events carry their number in metadata, so that a subscription can be resumed after it."
                .to_owned(),
            ..AgentExtension::default()
        });
    }
    Ok(all)
}

impl Template {
    /// Fills what is REQUIRED (spec §4.4.1) and not configured.
    pub(crate) fn new(agent: &config::Agent, extensions: Vec<AgentExtension>) -> Self {
        let config = &agent.card;
        let or = |text: &str, fallback: &str| if text.trim().is_empty() { fallback } else { text }.to_owned();
        let name = or(config.name.as_deref().unwrap_or_default(), &agent.id);
        let description = or(&config.description, &name);
        let skill = |skill: &config::Skill| AgentSkill {
            id: skill.id.clone(),
            name: skill.name.clone(),
            description: skill.description.clone(),
            tags: skill.tags.clone(),
            examples: skill.examples.clone(),
            input_modes: skill.input_modes.clone(),
            output_modes: skill.output_modes.clone(),
            security_requirements: Vec::new(),
        };
        let mut skills: Vec<_> = config.skills.iter().map(skill).collect();
        if skills.is_empty() {
            skills.push(AgentSkill {
                id: agent.id.clone(),
                name: name.clone(),
                description: description.clone(),
                tags: vec![agent.id.clone()],
                ..AgentSkill::default()
            });
        }
        let card = AgentCard {
            name,
            description,
            provider: config.provider.as_ref().map(|provider| AgentProvider {
                url: provider.url.clone(),
                organization: provider.organization.clone(),
            }),
            version: config.version.clone(),
            documentation_url: config.documentation_url.clone(),
            icon_url: config.icon_url.clone(),
            capabilities: Some(AgentCapabilities {
                streaming: Some(config.streaming),
                push_notifications: Some(false),
                extended_agent_card: Some(false),
                extensions,
            }),
            default_input_modes: config.input_modes.clone(),
            default_output_modes: config.output_modes.clone(),
            skills,
            ..AgentCard::default()
        };
        Self { card, bindings: config.bindings.clone(), serves_v03: agent.a2a_v03, made: Mutex::default() }
    }

    /// The card with the URLs of an agent that is reached under `base`.
    pub(crate) fn at(&self, agent: &crate::agents::Agent, base: &Base) -> Result<Arc<Card>> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = made.iter().position(|(known, _)| known == base) {
            let hit = made.remove(at).expect("just found");
            let card = Arc::clone(&hit.1);
            made.push_back(hit);
            return Ok(card);
        }
        let mut card = AgentCard { supported_interfaces: self.interfaces(agent, base), ..self.card.clone() };
        if let Some(provider) = card.provider.as_mut().filter(|provider| provider.url.is_empty()) {
            // REQUIRED; whoever runs the agent runs the site that it is on.
            provider.url = base.url();
        }
        let json = Bytes::from(v03::card(&card)?.to_string());
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &json);
        let hex: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let etag = HeaderValue::from_str(&format!("\"sha256-{hex}\"")).expect("hex is fit for a header");
        let card = Arc::new(Card { json, etag });
        if made.len() == KEPT {
            made.pop_front();
        }
        made.push_back((base.clone(), Arc::clone(&card)));
        Ok(card)
    }

    /// One interface per binding, one more per binding and tenant, and one for 0.3, which has no tenants.
    fn interfaces(&self, agent: &crate::agents::Agent, base: &Base) -> Vec<AgentInterface> {
        let url = format!("{}{}", base.url(), agent.mount);
        let tenants = || std::iter::once("").chain(agent.tenants.iter().map(String::as_str));
        let one = |binding: Binding, tenant: &str| {
            let (protocol_binding, url, tenant) = match binding {
                Binding::Jsonrpc => ("JSONRPC", url.clone(), tenant.to_owned()),
                Binding::Rest => ("HTTP+JSON", url.clone(), tenant.to_owned()),
                // A gRPC address has no path, so the tenant says the mount too.
                Binding::Grpc => {
                    let path = format!("{}/{tenant}", agent.mount);
                    ("GRPC", base.host_and_port(), path.trim_matches('/').to_owned())
                }
            };
            AgentInterface {
                url,
                protocol_binding: protocol_binding.to_owned(),
                tenant,
                protocol_version: Version::V1.name().to_owned(),
            }
        };
        let v03 = self
            .serves_v03
            .then(|| AgentInterface { protocol_version: Version::V03.name().to_owned(), ..one(Binding::Jsonrpc, "") });
        let v1 = tenants().flat_map(|tenant| self.bindings.iter().map(move |&binding| one(binding, tenant)));
        v1.chain(v03).collect()
    }
}

impl Card {
    /// Answers GET and HEAD, or 304 when the client has these bytes already.
    pub(crate) fn respond(&self, request: &HeaderMap, max_age_secs: u64, since: Timestamp) -> Response<Body> {
        let fresh = match request.get(header::IF_NONE_MATCH) {
            Some(known) => matches_etag(known, &self.etag),
            None => request.get(header::IF_MODIFIED_SINCE).is_some_and(|date| is_current(date, since)),
        };
        let mut response = match fresh {
            true => Response::new(Body::empty()),
            false => Response::new(Body::from(self.json.clone())),
        };
        if fresh {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let headers = response.headers_mut();
        if !fresh {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        headers.insert(header::ETAG, self.etag.clone());
        for (name, value) in [
            (header::CACHE_CONTROL, format!("public, max-age={max_age_secs}")),
            (
                header::LAST_MODIFIED,
                rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&since).unwrap_or_default(),
            ),
        ] {
            headers.insert(name, HeaderValue::try_from(value).expect("digits and letters"));
        }
        response
    }
}

/// `If-None-Match`: a list of tags, weak or strong, or `*`.
fn matches_etag(known: &HeaderValue, etag: &HeaderValue) -> bool {
    let Ok(known) = known.to_str() else { return false };
    known.split(',').map(str::trim).any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag).as_bytes() == etag)
}

/// `If-Modified-Since`, to the second.
fn is_current(date: &HeaderValue, since: Timestamp) -> bool {
    let date = date.to_str().ok().and_then(|date| rfc2822::DateTimeParser::new().parse_timestamp(date).ok());
    date.is_some_and(|date| date.as_second() >= since.as_second())
}
