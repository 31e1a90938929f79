//! Finding out who an agent is.

use rialto_a2a::v1::{AgentCard, AgentInterface};
use url::Url;

use super::{Binding, Failure, Result, http::Http};

const MAX_CARD: usize = 1 << 20;

/// The card at its well-known place below `url`, as the agent wrote it.
pub(crate) async fn fetch(url: &Url) -> Result<Vec<u8>> {
    Http::new(url.as_str())?.get_bytes("/.well-known/agent-card.json", MAX_CARD).await
}

pub(super) async fn read(url: &Url) -> Result<AgentCard> {
    let card = fetch(url).await?;
    rialto_a2a::json::from_slice(&card).map_err(|error| Failure::garbage(format_args!("the agent card: {error}")))
}

/// The interface to talk to; cards list theirs in order of preference.
pub(super) fn pick(card: &AgentCard, wanted: Option<Binding>) -> Option<(Binding, &AgentInterface)> {
    card.supported_interfaces.iter().find_map(|interface| {
        let binding =
            Binding::ALL.into_iter().find(|binding| interface.protocol_binding.eq_ignore_ascii_case(binding.name()))?;
        let version = &interface.protocol_version;
        let fits = version.is_empty() || version == "1" || version.starts_with("1.");
        (fits && wanted.is_none_or(|wanted| wanted == binding)).then_some((binding, interface))
    })
}
