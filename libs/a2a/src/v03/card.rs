//! One card for both versions (spec §8.3.2 allows several interfaces; readers of either ignore what they do not know).

use serde_json::{Map, Value, json};

use crate::{
    error::Result,
    v1::{AgentCard, SecurityRequirement},
    validate::card_json_with_required,
};

/// What 0.3 says in `protocolVersion`.
const VERSION: &str = "0.3.0";

/// The security schemes of 1.0 by their member, with the `type` that says the same in 0.3.
const SCHEMES: [(&str, &str); 5] = [
    ("apiKeySecurityScheme", "apiKey"),
    ("httpAuthSecurityScheme", "http"),
    ("oauth2SecurityScheme", "oauth2"),
    ("openIdConnectSecurityScheme", "openIdConnect"),
    ("mtlsSecurityScheme", "mutualTLS"),
];

/// The JSON of a card that clients of 1.0 and of 0.3 can read: all of 1.0, REQUIRED fields even when empty, and what
/// 0.3 calls otherwise under its own names.
///
/// The 0.3 side names the interfaces whose `protocol_version` is from 0.3 on and below 1.0, the first as `url` and
/// `preferredTransport`; those with a tenant are left out, for 0.3 cannot send one. Without any, this is the 1.0 card
/// alone. Signatures stay valid for readers that know 1.0: they are about the 1.0 fields (spec §8.4).
///
/// # Errors
/// As [`crate::json::to_vec`].
pub fn card(card: &AgentCard) -> Result<Value> {
    let mut value = card_json_with_required(card)?;
    let interfaces: Vec<Value> = card
        .supported_interfaces
        .iter()
        .filter(|interface| is_legacy(&interface.protocol_version) && interface.tenant.is_empty())
        .map(|interface| json!({"url": interface.url, "transport": interface.protocol_binding}))
        .collect();
    if let (Some(preferred), Some(members)) = (interfaces.first(), value.as_object_mut()) {
        members.insert("protocolVersion".into(), VERSION.into());
        members.insert("url".into(), preferred["url"].clone());
        members.insert("preferredTransport".into(), preferred["transport"].clone());
        members.insert("additionalInterfaces".into(), interfaces.into());
        let extended = card.capabilities.as_ref().is_some_and(|capabilities| capabilities.extended_agent_card());
        members.insert("supportsAuthenticatedExtendedCard".into(), extended.into());
        add_security(members, &card.security_requirements);
        for (json, skill) in objects(members.get_mut("skills")).zip(&card.skills) {
            add_security(json, &skill.security_requirements);
        }
        let schemes = members.get_mut("securitySchemes").and_then(Value::as_object_mut);
        schemes.into_iter().flat_map(Map::values_mut).filter_map(Value::as_object_mut).for_each(add_scheme);
    }
    Ok(value)
}

fn is_legacy(version: &str) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(0)), Some(Ok(3..))))
}

fn objects(array: Option<&mut Value>) -> impl Iterator<Item = &mut Map<String, Value>> {
    array.and_then(Value::as_array_mut).into_iter().flatten().filter_map(Value::as_object_mut)
}

/// Adds `security`: alternatives, each the schemes that it takes together with their scopes.
fn add_security(members: &mut Map<String, Value>, requirements: &[SecurityRequirement]) {
    if !requirements.is_empty() {
        let together = |requirement: &SecurityRequirement| -> Value {
            requirement.schemes.iter().map(|(name, scopes)| (name.clone(), Value::from(scopes.list.clone()))).collect()
        };
        members.insert("security".into(), requirements.iter().map(together).collect());
    }
}

/// Merges the 0.3 form of a scheme into the 1.0 one: both sit under the same key. Inside they differ little.
fn add_scheme(scheme: &mut Map<String, Value>) {
    let known = SCHEMES.iter().find_map(|(member, name)| Some((scheme.get(*member)?.as_object()?, name)));
    let Some((members, name)) = known else { return };
    let mut members = members.clone();
    if let Some(location) = members.remove("location") {
        members.insert("in".into(), location);
    }
    if let Some(flows) = members.get_mut("flows").and_then(Value::as_object_mut) {
        flows.remove("deviceCode");
        for flow in flows.values_mut().filter_map(Value::as_object_mut) {
            // Those that 1.0 calls deprecated do not require it there.
            flow.entry("scopes").or_insert_with(|| json!({}));
        }
    }
    members.insert("type".into(), (*name).into());
    scheme.append(&mut members);
}
