//! Case C3 and its kin, and the proof that the table is complete.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use prost_reflect::{DescriptorPool, Kind as Type, Value as Reflected};
use serde_json::json;

use super::*;
use crate::{
    error::Kind,
    v1::{self, part::Content},
    wkt::{Timestamp, Value},
};

/// `field: description` of every fault, one a line.
fn faults(message: &impl Validate) -> String {
    let error = message.validate().expect_err("must be refused");
    assert_eq!(error.kind, Kind::InvalidParams);
    error.violations.iter().map(|v| format!("{}: {}\n", v.field, v.description)).collect()
}

fn request(parts: &str) -> v1::SendMessageRequest {
    json::from_str(&format!(r#"{{"message":{{"messageId":"m","role":"ROLE_USER","parts":{parts}}}}}"#)).unwrap()
}

#[test]
fn a_part_without_content_is_refused_by_name() {
    insta::assert_snapshot!(faults(&request(r#"[{"mediaType":"application/json"}]"#)), @"message.parts[0]: needs exactly one of text, raw, url and data");
    insta::assert_snapshot!(faults(&request("[{}]")), @"message.parts[0]: needs exactly one of text, raw, url and data");
    insta::assert_snapshot!(faults(&request(r#"[{"text":"a"},{},{"text":null}]"#)), @r"
    message.parts[1]: needs exactly one of text, raw, url and data
    message.parts[2]: needs exactly one of text, raw, url and data
    ");
    for set in [r#"{"text":""}"#, r#"{"raw":""}"#, r#"{"url":""}"#, r#"{"data":null}"#, r#"{"data":{}}"#] {
        request(&format!("[{set}]")).validate().unwrap();
    }
}

#[test]
fn every_missing_field_is_named_at_once() {
    insta::assert_snapshot!(faults(&v1::SendMessageRequest::default()), @"message: is required");
    let request: v1::SendMessageRequest = json::from_str(
        r#"{"message":{"parts":[]},"configuration":{"historyLength":-1,"taskPushNotificationConfig":{"authentication":{}}}}"#,
    )
    .unwrap();
    insta::assert_snapshot!(faults(&request), @r"
    message.messageId: is required
    message.role: is required
    message.parts: must have at least one element
    configuration.taskPushNotificationConfig.url: is required
    configuration.taskPushNotificationConfig.authentication.scheme: is required
    configuration.historyLength: must be 0 or more
    ");
    insta::assert_snapshot!(request.validate().unwrap_err(), @"Invalid parameters: message.messageId: is required (and 5 more)");
    insta::assert_snapshot!(faults(&v1::StreamResponse::default()), @": needs exactly one of task, message, statusUpdate and artifactUpdate");
    let update = v1::stream_response::Payload::ArtifactUpdate(v1::TaskArtifactUpdateEvent {
        artifact: Some(v1::Artifact::default()),
        ..Default::default()
    });
    insta::assert_snapshot!(faults(&v1::StreamResponse { payload: Some(update) }), @r"
    artifactUpdate.taskId: is required
    artifactUpdate.contextId: is required
    artifactUpdate.artifact.artifactId: is required
    artifactUpdate.artifact.parts: must have at least one element
    ");
}

#[test]
fn numbers_outside_an_enum_or_range_are_refused() {
    let message = |role| v1::Message {
        message_id: "m".into(),
        role,
        parts: vec![v1::Part { content: Some(Content::Text(String::new())), ..Default::default() }],
        ..Default::default()
    };
    insta::assert_snapshot!(faults(&message(0)), @"role: is required");
    insta::assert_snapshot!(faults(&message(99)), @"role: 99 is no Role");
    message(1).validate().unwrap();
    let list = v1::ListTasksRequest {
        status: -3,
        page_size: Some(0),
        history_length: Some(-1),
        status_timestamp_after: Some(Timestamp { seconds: 0, nanos: -1 }),
        ..Default::default()
    };
    insta::assert_snapshot!(faults(&list), @r"
    status: -3 is no TaskState
    pageSize: must be from 1 to 100
    historyLength: must be 0 or more
    statusTimestampAfter: not an RFC 3339 timestamp with Z or an offset, in the years 1 to 9999
    ");
    v1::ListTasksRequest { page_size: Some(100), ..Default::default() }.validate().unwrap();
    assert!(v1::ListTasksRequest { page_size: Some(101), ..Default::default() }.validate().is_err());
    v1::ListTasksResponse::default().validate().unwrap();
}

#[test]
fn what_json_cannot_say_is_refused_from_protobuf_too() {
    let cancel = |value: Value| v1::CancelTaskRequest {
        id: "t".into(),
        metadata: Some([("a", Value::from(vec![true.into(), value]))].into_iter().collect()),
        ..Default::default()
    };
    insta::assert_snapshot!(faults(&cancel(f64::NAN.into())), @"metadata.a[1]: NaN and Infinity are not JSON");
    insta::assert_snapshot!(faults(&cancel(f64::INFINITY.into())), @"metadata.a[1]: NaN and Infinity are not JSON");
    let nest = |depth| (0..depth).fold(Value::NULL, |inner, _| Value::from(vec![inner]));
    cancel(nest(30)).validate().unwrap();
    assert!(faults(&cancel(nest(31))).ends_with("[0]: nested deeper than 32 levels\n"));
}

#[test]
fn a_thousand_faults_are_not_all_told() {
    let parts = format!("[{}]", ["{}"; 3000].join(","));
    assert_eq!(request(&parts).validate().unwrap_err().violations.len(), 32);
}

#[test]
fn a_card_is_completed_for_signing_with_required_fields_only() {
    let card: v1::AgentCard = json::from_value(json!({
        "name": "a",
        "supportedInterfaces": [{"url": "u", "tenant": ""}],
        "provider": {},
        "skills": [{"id": "s", "securityRequirements": [{"schemes": {"x": {"list": []}}}]}],
        "securitySchemes": {"o": {"oauth2SecurityScheme": {"flows": {"deviceCode": {"tokenUrl": "t"}}}}},
        "signatures": [{"header": {"k": 1}}],
    }))
    .unwrap();
    insta::assert_json_snapshot!(card_json_with_required(&card).unwrap(), @r#"
    {
      "capabilities": {},
      "defaultInputModes": [],
      "defaultOutputModes": [],
      "description": "",
      "name": "a",
      "provider": {
        "organization": "",
        "url": ""
      },
      "securitySchemes": {
        "o": {
          "oauth2SecurityScheme": {
            "flows": {
              "deviceCode": {
                "deviceAuthorizationUrl": "",
                "scopes": {},
                "tokenUrl": "t"
              }
            }
          }
        }
      },
      "signatures": [
        {
          "header": {
            "k": 1
          },
          "protected": "",
          "signature": ""
        }
      ],
      "skills": [
        {
          "description": "",
          "id": "s",
          "name": "",
          "securityRequirements": [
            {
              "schemes": {
                "x": {}
              }
            }
          ],
          "tags": []
        }
      ],
      "supportedInterfaces": [
        {
          "protocolBinding": "",
          "protocolVersion": "",
          "url": "u"
        }
      ],
      "version": ""
    }
    "#);
    insta::assert_json_snapshot!(card_json_with_required(&v1::AgentCard::default()).unwrap(), @r#"
    {
      "capabilities": {},
      "defaultInputModes": [],
      "defaultOutputModes": [],
      "description": "",
      "name": "",
      "skills": [],
      "supportedInterfaces": [],
      "version": ""
    }
    "#);
}

/// Message and field names of the table; messages by lower case, since prost renames `APIKey…`.
fn table() -> BTreeMap<String, BTreeMap<&'static str, bool>> {
    rules::TABLE.iter().map(|(name, fields)| (name.to_lowercase(), fields.iter().copied().collect())).collect()
}

#[test]
fn the_table_has_every_required_field_and_everything_that_can_be_wrong_inside() {
    let pool = DescriptorPool::decode(crate::FILE_DESCRIPTOR_SET).unwrap();
    let behavior = pool.get_extension_by_name("google.api.field_behavior").unwrap();
    let table = table();
    let mut seen = BTreeSet::new();
    let mut required_in_proto = 0;
    for message in pool.all_messages().filter(|m| m.package_name() == "lf.a2a.v1" && !m.is_map_entry()) {
        let name = message.name().to_lowercase();
        let rows = table.get(&name).unwrap_or_else(|| panic!("{name} has no row"));
        seen.insert(name.clone());
        for field in message.fields() {
            let options = field.options();
            let annotated = match &*options.get_extension(&behavior) {
                Reflected::List(values) => values.iter().any(|v| v.as_enum_number() == Some(2)),
                other => panic!("{other:?}"),
            };
            required_in_proto += usize::from(annotated);
            let oneof = field.containing_oneof().filter(|oneof| !oneof.is_synthetic());
            let row = oneof.as_ref().map_or(field.name(), |oneof| oneof.name()).to_owned();
            assert_eq!(rows.get(&row[..]).copied().unwrap_or(false), annotated, "{name}.{row}: REQUIRED");
            let inner = match field.kind() {
                Type::Message(map) if field.is_map() => match map.map_entry_value_field().kind() {
                    Type::Message(value) => Some(value),
                    _ => None,
                },
                Type::Message(inner) => Some(inner),
                Type::Enum(_) => {
                    assert!(rows.contains_key(&row[..]), "{name}.{row}: enum unchecked");
                    None
                }
                _ => None,
            };
            let matters = |inner: &prost_reflect::MessageDescriptor| {
                table.get(&inner.name().to_lowercase()).is_none_or(|rows| !rows.is_empty())
            };
            if inner.is_some_and(|inner| matters(&inner) || inner.name() == "StringList") && oneof.is_none() {
                assert!(rows.contains_key(&row[..]), "{name}.{row}: not looked into");
            }
            assert!(oneof.is_none() || rows.contains_key(&row[..]), "{name}.{row}: oneof unchecked");
        }
        let fields: BTreeSet<_> = message.fields().map(|f| f.name().to_owned()).collect();
        let oneofs: BTreeSet<_> = message.oneofs().map(|o| o.name().to_owned()).collect();
        for row in rows.keys() {
            assert!(fields.contains(*row) || oneofs.contains(*row), "{name}.{row} is not in the proto");
        }
    }
    assert_eq!(seen.len(), table.len());
    assert!(required_in_proto > 50, "{required_in_proto}");
}

/// Sets one field at a time to nothing and expects exactly its violation: the table is not only complete but works.
#[test]
fn each_required_field_of_each_message_is_missed_when_absent() {
    let task = v1::Task {
        id: "t".into(),
        status: Some(v1::TaskStatus { state: 1, ..Default::default() }),
        ..Default::default()
    };
    let bytes = task.encode_to_vec();
    assert!(v1::Task::decode(&bytes[..]).unwrap().validate().is_ok());
    assert_eq!(faults(&v1::Task { id: String::new(), ..task.clone() }), "id: is required\n");
    assert_eq!(faults(&v1::Task { status: None, ..task.clone() }), "status: is required\n");
    assert_eq!(faults(&v1::Task { status: Some(v1::TaskStatus::default()), ..task }), "status.state: is required\n");
}
