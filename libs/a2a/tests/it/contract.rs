//! Our proto says the same as the descriptor inside the official SDK.

use prost_reflect::{DescriptorPool, FieldDescriptor, Kind, Value as Reflected};
use rialto_a2a::FILE_DESCRIPTOR_SET;
use serde_json::{Map, Value, json};

/// `number name jsonName type`, then what else is true of the field: as `make.py` writes it.
fn describe(field: &FieldDescriptor) -> String {
    let mut words = vec![
        field.number().to_string(),
        field.name().to_owned(),
        field.json_name().to_owned(),
        match field.kind() {
            Kind::Message(map) if field.is_map() => {
                let (key, value) = (map.map_entry_key_field(), map.map_entry_value_field());
                format!("map<{}, {}>", name(&key.kind()), name(&value.kind()))
            }
            kind => name(&kind),
        },
    ];
    if field.is_list() || field.is_map() {
        words.push("repeated".into());
    }
    if field.supports_presence() {
        words.push("presence".into());
    }
    if let Some(oneof) = field.containing_oneof().filter(|oneof| !oneof.is_synthetic()) {
        words.push(format!("oneof={}", oneof.name()));
    }
    let behavior = field.parent_pool().get_extension_by_name("google.api.field_behavior").unwrap();
    if let Reflected::List(values) = &*field.options().get_extension(&behavior)
        && values.iter().any(|value| value.as_enum_number() == Some(2))
    {
        words.push("REQUIRED".into());
    }
    words.join(" ")
}

fn name(kind: &Kind) -> String {
    match kind {
        Kind::Message(message) => message.full_name().to_owned(),
        Kind::Enum(values) => values.full_name().to_owned(),
        scalar => format!("{scalar:?}").to_lowercase(),
    }
}

#[test]
fn every_message_enum_and_method_is_that_of_the_official_sdk() {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let ours = |package: &str| package == "lf.a2a.v1";
    let messages: Map<_, _> = pool
        .all_messages()
        .filter(|message| ours(message.package_name()) && !message.is_map_entry())
        .map(|message| {
            let mut fields: Vec<_> = message.fields().collect();
            fields.sort_by_key(FieldDescriptor::number);
            (message.name().to_owned(), fields.iter().map(describe).collect())
        })
        .collect();
    let enums: Map<_, _> = pool
        .all_enums()
        .filter(|values| ours(values.package_name()))
        .map(|values| {
            let numbers: Map<_, _> = values.values().map(|v| (v.name().to_owned(), v.number().into())).collect();
            (values.name().to_owned(), Value::from(numbers))
        })
        .collect();
    let service = pool.get_service_by_name("lf.a2a.v1.A2AService").unwrap();
    let methods: Map<_, _> = service
        .methods()
        .map(|method| {
            let stream = if method.is_server_streaming() { " stream" } else { "" };
            let text = format!("{} {}{stream}", method.input().full_name(), method.output().full_name());
            (method.name().to_owned(), text.into())
        })
        .collect();
    let contract: Value = serde_json::from_str(include_str!("../golden/contract.json")).unwrap();
    let own = json!({"package": "lf.a2a.v1", "messages": messages, "enums": enums, "methods": methods});
    similar(&own, &contract, "");
}

/// Equal, and if not, says where instead of showing all.
fn similar(own: &Value, official: &Value, path: &str) {
    match (own, official) {
        (Value::Object(own), Value::Object(official)) => {
            assert_eq!(own.keys().collect::<Vec<_>>(), official.keys().collect::<Vec<_>>(), "in {path}");
            for (key, value) in own {
                similar(value, &official[key], &format!("{path}/{key}"));
            }
        }
        _ => assert_eq!(own, official, "in {path}"),
    }
}
