//! The forms of 0.3: as the official SDKs have them, there and back, and refused.

use std::collections::BTreeMap;

use rialto_a2a::{
    Error, Kind, json as proto_json,
    v1::{self, part::Content, stream_response::Payload},
    v03::{self, Event, Form, Method, Request},
    wkt::{Struct, Value as Wkt, value},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::golden::floats;

#[derive(Deserialize)]
struct Vectors {
    events: Vec<Vector>,
    requests: Vec<Params>,
    cards: Vec<Vector>,
    refused: Vec<Params>,
}

#[derive(Deserialize)]
struct Vector {
    json: Value,
    v1: Value,
}

#[derive(Deserialize)]
struct Params {
    method: String,
    params: Value,
    v1: Option<Value>,
}

fn vectors() -> Vectors {
    serde_json::from_str(include_str!("../golden/v03.json")).unwrap()
}

fn from_v1<T: DeserializeOwned>(json: &Value) -> T {
    proto_json::from_value(json.clone()).unwrap()
}

pub(crate) fn read(method: Method, params: &Value) -> Result<Request, Error> {
    Request::read(method, &params.to_string())
}

pub(crate) fn written(form: &impl Serialize) -> Value {
    serde_json::to_value(form).unwrap()
}

#[test]
fn objects_are_those_of_the_official_sdks() {
    let vectors = vectors().events;
    assert!(vectors.len() > 40);
    for Vector { json, v1 } in &vectors {
        let event = v03::read_event(&json.to_string()).unwrap();
        assert_eq!(event, from_v1(v1), "{json}");
        assert_eq!(floats(written(&Event { event: &event, last: false })), floats(json.clone()));
        // What is sent are bytes, which do not pass through a tree.
        let text = serde_json::to_string(&Event { event: &event, last: false }).unwrap();
        assert_eq!(floats(serde_json::from_str(&text).unwrap()), floats(json.clone()));
        let response = match &event.payload {
            Some(Payload::Task(task)) => v1::send_message_response::Payload::Task(task.clone()),
            Some(Payload::Message(message)) => v1::send_message_response::Payload::Message(message.clone()),
            _ => continue,
        };
        let response = v1::SendMessageResponse { payload: Some(response) };
        assert_eq!(floats(written(&Form(&response))), floats(json.clone()));
    }
}

#[test]
fn requests_are_those_of_the_official_sdks() {
    let vectors = vectors().requests;
    assert!(vectors.len() > 50);
    for Params { method, params, v1 } in &vectors {
        let method = Method::parse(method).unwrap();
        let v1 = v1.as_ref().unwrap();
        match read(method, params).unwrap() {
            Request::SendMessage(request) | Request::SendStreamingMessage(request) => {
                assert_eq!(request, from_v1(v1), "{params}");
            }
            Request::GetTask(request) => assert_eq!(request, from_v1(v1), "{params}"),
            Request::CancelTask(request) => assert_eq!(request, from_v1(v1), "{params}"),
            Request::SubscribeToTask(request) => assert_eq!(request, from_v1(v1), "{params}"),
            Request::CreatePushConfig(config) => {
                assert_eq!(config, from_v1(v1), "{params}");
                assert_eq!(&written(&Form(&config)), params, "the answer has the form of the params");
                let page = v1::ListTaskPushNotificationConfigsResponse {
                    configs: vec![config.clone(), config],
                    next_page_token: String::new(),
                };
                assert_eq!(written(&Form(&page)), json!([params, params]));
            }
            Request::GetPushConfig(request) => assert_eq!(request, from_v1(v1), "{params}"),
            Request::GetAnyPushConfig(request) => {
                assert_eq!(v1["taskId"], request.task_id);
                assert_eq!((v1.get("id"), request.page_size), (None, 1));
            }
            Request::ListPushConfigs(request) => assert_eq!(request, from_v1(v1), "{params}"),
            Request::DeletePushConfig(request) => assert_eq!(request, from_v1(v1), "{params}"),
            Request::GetExtendedCard(request) => assert_eq!(request, from_v1(v1), "{params}"),
        }
    }
}

#[test]
fn what_the_official_sdk_refuses_is_refused() {
    for Params { method, params, .. } in &vectors().refused {
        let error = read(Method::parse(method).unwrap(), params).expect_err(&format!("{method} {params}"));
        assert_eq!(error.kind, Kind::InvalidParams, "{method} {params}");
    }
}

/// Fails unless every member of `part` is in `whole`.
fn contains(whole: &Value, part: &Value, path: &str) {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            for (key, value) in part {
                contains(whole.get(key).unwrap_or(&Value::Null), value, &format!("{path}/{key}"));
            }
        }
        (Value::Array(whole), Value::Array(part)) => {
            assert_eq!(whole.len(), part.len(), "{path}");
            whole.iter().zip(part).for_each(|(whole, part)| contains(whole, part, path));
        }
        _ => assert_eq!(whole, part, "{path}"),
    }
}

#[test]
fn a_card_is_one_of_both_versions() {
    for Vector { json: mut old, v1 } in vectors().cards {
        let card: v1::AgentCard = from_v1(&v1);
        let both = floats(v03::card(&card).unwrap());
        // 0.3 recommends to repeat the preferred interface among all of them.
        let preferred = json!({"url": old["url"], "transport": old["preferredTransport"]});
        let mut all = vec![preferred];
        all.extend(old["additionalInterfaces"].as_array().cloned().unwrap_or_default());
        old["additionalInterfaces"] = all.into();
        contains(&both, &floats(old), "");
        contains(&both, &floats(v1), "");
        assert_eq!(from_v1::<v1::AgentCard>(&both), card, "1.0 clients read what they would read without 0.3");
    }
}

fn agent_card() -> v1::AgentCard {
    let interface = |binding: &str, url: &str, tenant: &str, version: &str| json!({"protocolBinding": binding, "url": url, "tenant": tenant, "protocolVersion": version});
    from_v1(&json!({
        "name": "Echo",
        "version": "1.2.3",
        "supportedInterfaces": [
            interface("GRPC", "agents.example:443", "", "1.0"),
            interface("JSONRPC", "https://agents.example/t", "t", "0.3"),
            interface("JSONRPC", "https://agents.example/echo", "", "0.3"),
            interface("JSONRPC", "https://agents.example/echo", "", "1.0"),
            interface("HTTP+JSON", "https://agents.example/echo", "", "0.3.0"),
            interface("HTTP+JSON", "https://agents.example/older", "", "0.2.6"),
        ],
        "capabilities": {"streaming": true, "extendedAgentCard": true},
        "defaultInputModes": ["text/plain"],
        "securitySchemes": {
            "key": {"apiKeySecurityScheme": {"location": "header", "name": "X-Key"}},
            "bearer": {"httpAuthSecurityScheme": {"scheme": "Bearer", "bearerFormat": "JWT", "description": "A token"}},
            "code": {"oauth2SecurityScheme": {"flows": {"authorizationCode": {
                "authorizationUrl": "https://a", "tokenUrl": "https://t", "scopes": {"x": "X"}, "pkceRequired": true,
            }}, "oauth2MetadataUrl": "https://m"}},
            "device": {"oauth2SecurityScheme": {"flows": {"deviceCode": {
                "deviceAuthorizationUrl": "https://d", "tokenUrl": "https://t",
            }}}},
            "implicit": {"oauth2SecurityScheme": {"flows": {"implicit": {"authorizationUrl": "https://a"}}}},
            "openid": {"openIdConnectSecurityScheme": {"openIdConnectUrl": "https://o"}},
            "mtls": {"mtlsSecurityScheme": {}},
        },
        "securityRequirements": [
            {"schemes": {"bearer": {}, "mtls": {}}}, {"schemes": {"code": {"list": ["x", "y"]}}}
        ],
        "skills": [
            {"id": "a", "name": "A", "description": "Does a.", "tags": ["a"], "securityRequirements": [{"schemes": {"key": {}}}]},
            {"id": "b", "name": "B", "description": "Does b.", "tags": ["b"]},
        ],
        "signatures": [{"protected": "eyJhbGciOiJFUzI1NiJ9", "signature": "c2ln"}],
    }))
}

#[test]
fn a_card_in_full() {
    insta::assert_json_snapshot!(v03::card(&agent_card()).unwrap());
}

#[test]
fn a_card_without_an_old_interface_stays_as_it_is() {
    let mut card = agent_card();
    card.supported_interfaces.retain(|interface| interface.protocol_version == "1.0" || !interface.tenant.is_empty());
    assert_eq!(v03::card(&card).unwrap(), rialto_a2a::validate::card_json_with_required(&card).unwrap());
}

#[test]
fn methods_have_the_names_of_one_version_only() {
    for method in Method::ALL {
        assert_eq!(Method::parse(method.name()), Some(method));
        assert_eq!(Method::parse(method.operation()), None);
    }
    assert_eq!(Method::parse("tasks/list"), None, "never existed");
    let pool = prost_reflect::DescriptorPool::decode(rialto_a2a::FILE_DESCRIPTOR_SET).unwrap();
    let service = pool.get_service_by_name("lf.a2a.v1.A2AService").unwrap();
    let mut operations: Vec<_> = Method::ALL.map(Method::operation).into();
    operations.push("ListTasks");
    operations.sort_unstable();
    let mut all: Vec<_> = service.methods().map(|method| method.name().to_owned()).collect();
    all.sort_unstable();
    assert_eq!(operations, all);
}

fn said(parts: &Value) -> Value {
    json!({"message": {"messageId": "m", "role": "user", "parts": parts}})
}

pub(crate) fn parts(parts: &Value) -> Vec<v1::Part> {
    match read(Method::SendMessage, &said(parts)).unwrap() {
        Request::SendMessage(request) => request.message.unwrap().parts,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_kind_may_be_missing_but_not_lie() {
    let given = json!([{"text": ""}, {"kind": null, "file": {"uri": "u"}}, {"data": {}, "text": null, "what": 1}]);
    let expected = [v1::Part::text(""), Content::Url("u".into()).into(), v1::Part::data(Struct::default())];
    assert_eq!(parts(&given), expected);
}

#[test]
fn bytes_come_in_either_alphabet() {
    for text in ["+/+/aQ==", "-_-_aQ==", "+/+/aQ", "-_-_aQ"] {
        let file = parts(&json!([{"kind": "file", "file": {"bytes": text, "mimeType": "image/png", "name": "a.png"}}]));
        let expected = v1::Part {
            media_type: "image/png".into(),
            filename: "a.png".into(),
            ..Content::Raw(vec![0xfb, 0xff, 0xbf, 0x69].into()).into()
        };
        assert_eq!(file, [expected]);
    }
}

#[test]
fn nothing_said_means_wait_and_everything() {
    let configuration = |configuration: Value| {
        let mut params = said(&json!([{"kind": "text", "text": "a"}]));
        params["configuration"] = configuration;
        match read(Method::SendMessage, &params).unwrap() {
            Request::SendMessage(request) => request.configuration,
            other => panic!("{other:?}"),
        }
    };
    let default = v1::SendMessageConfiguration::default();
    assert_eq!(configuration(json!(null)), None);
    for waits in [json!({}), json!({"blocking": true}), json!({"blocking": null, "historyLength": null})] {
        assert_eq!(configuration(waits), Some(default.clone()));
    }
    for all in [json!({"historyLength": 0}), json!({"historyLength": 0.0}), json!({"historyLength": "0"})] {
        assert_eq!(configuration(all), Some(default.clone()));
    }
    for two in [json!({"historyLength": 2}), json!({"historyLength": 2.0}), json!({"historyLength": "2"})] {
        assert_eq!(configuration(two).unwrap().history_length, Some(2));
    }
    assert!(configuration(json!({"blocking": false})).unwrap().return_immediately);
    let config = json!({"pushNotificationConfig": {"url": "u", "authentication": {"schemes": []}}});
    assert_eq!(configuration(config).unwrap().task_push_notification_config.unwrap().authentication, None);
}

fn nested(levels: usize) -> Value {
    (0..levels).fold(json!(1), |inner, _| json!({ "a": inner }))
}

#[test]
fn refusals_name_the_field_as_the_client_knows_it() {
    let text = json!([{"kind": "text", "text": "a"}]);
    let with = |member: &str, value: Value| {
        let mut params = said(&text);
        params[member] = value;
        params
    };
    let config = |config: Value| with("configuration", json!({ "pushNotificationConfig": config }));
    let set = |config: Value| json!({"taskId": "t", "pushNotificationConfig": config});
    let credentials = json!({"url": "u", "authentication": {"schemes": [], "credentials": "c"}});
    let cases = [
        (Method::SendMessage, json!({})),
        (Method::SendMessage, json!({"message": {}})),
        (Method::SendMessage, json!({"message": ["m", "", "", "user"]})),
        (Method::SendMessage, json!({"message": {"messageId": "m", "role": "ROLE_USER", "parts": text}})),
        (Method::SendMessage, json!({"message": {"kind": "task", "messageId": "m", "role": "user", "parts": text}})),
        (Method::SendMessage, said(&json!([]))),
        (Method::SendMessage, said(&json!([{"text": "a"}, null]))),
        (Method::SendMessage, said(&json!([{"text": "a"}, {"kind": "text"}]))),
        (Method::SendMessage, said(&json!([{"kind": "text", "text": "a", "data": {}}]))),
        (Method::SendMessage, said(&json!([{"kind": "file", "text": "a"}]))),
        (Method::SendMessage, said(&json!([{"kind": "image", "text": "a"}]))),
        (Method::SendMessage, said(&json!([{"kind": "text", "text": 5}]))),
        (Method::SendMessage, said(&json!([{"kind": "file", "file": {"bytes": "aQ==", "uri": "u"}}]))),
        (Method::SendMessage, said(&json!([{"kind": "file", "file": {"bytes": "a?"}}]))),
        (Method::SendMessage, said(&json!([{"kind": "data", "data": {"n": 9_007_199_254_740_993_u64}}]))),
        (Method::SendMessage, said(&json!([{"kind": "data", "data": nested(33)}]))),
        (Method::SendMessage, with("configuration", json!({"historyLength": -1}))),
        (Method::SendMessage, with("configuration", json!({"historyLength": "ten"}))),
        (Method::SendMessage, with("configuration", json!({"historyLength": 4_294_967_297_u64}))),
        (Method::SendMessage, config(json!({"url": ""}))),
        (Method::SendMessage, config(credentials.clone())),
        (Method::GetTask, json!({"id": null})),
        (Method::GetTask, json!({"id": "t", "historyLength": 1e30})),
        (Method::CreatePushConfig, json!({"pushNotificationConfig": {"url": "u"}})),
        (Method::CreatePushConfig, json!({"taskId": "t"})),
        (Method::CreatePushConfig, set(json!({"url": 5}))),
        (Method::CreatePushConfig, set(credentials)),
        (Method::GetPushConfig, json!({"pushNotificationConfigId": "c"})),
        (Method::GetPushConfig, json!({})),
        (Method::ListPushConfigs, json!({})),
        (Method::DeletePushConfig, json!({})),
    ];
    let told: Vec<_> = cases
        .iter()
        .map(|(method, params)| {
            let error = read(*method, params).expect_err(&params.to_string());
            assert_eq!(error.kind, Kind::InvalidParams);
            let fields: Vec<_> = error.violations.iter().map(|v| format!("{}: {}", v.field, v.description)).collect();
            format!("{} | {}", method.name(), fields.join(" | "))
        })
        .collect();
    insta::assert_snapshot!(told.join("\n"));
    assert!(read(Method::SendMessage, &said(&json!([{"kind": "data", "data": nested(32)}]))).is_ok());
    assert_eq!(Request::read(Method::GetTask, "{").unwrap_err().kind, Kind::Parse);
}

#[test]
fn final_says_that_the_stream_ends() {
    let is_final = |state: v1::TaskState, last: bool| {
        let status = v1::TaskStatus { state: state.into(), ..Default::default() };
        let update = v1::TaskStatusUpdateEvent { status: Some(status), ..Default::default() };
        let event = v1::StreamResponse { payload: Some(Payload::StatusUpdate(update)) };
        written(&Event { event: &event, last })["final"].as_bool().unwrap()
    };
    for number in 0..=8 {
        let state = v1::TaskState::try_from(number).unwrap();
        assert_eq!(is_final(state, false), state.is_terminal());
        assert_eq!(is_final(state, true), state.is_terminal() || state.is_interrupted());
    }
}

#[test]
fn events_in_full() {
    let answer = v1::Part { metadata: Some(Struct::from_iter([("k", "v")])), ..v1::Part::data(1) };
    let agent = v1::Message {
        message_id: "m2".into(),
        context_id: "c".into(),
        task_id: "t".into(),
        role: v1::Role::Agent.into(),
        parts: vec![v1::Part::text("Which one?"), Content::Raw(b"png".as_slice().into()).into(), answer],
        ..Default::default()
    };
    let status = v1::TaskStatus {
        state: v1::TaskState::InputRequired.into(),
        message: Some(agent.clone()),
        timestamp: Some("2026-03-12T10:00:00.5Z".parse().unwrap()),
    };
    let artifact = v1::Artifact {
        artifact_id: "a".into(),
        name: "answer".into(),
        parts: vec![Content::Url("https://x/y".into()).into()],
        ..Default::default()
    };
    let task = v1::Task {
        id: "t".into(),
        context_id: "c".into(),
        status: Some(status.clone()),
        artifacts: vec![artifact.clone()],
        history: vec![agent.clone()],
        metadata: Some(Struct::default()),
    };
    let payloads = [
        Payload::Task(task),
        Payload::Message(agent),
        Payload::StatusUpdate(v1::TaskStatusUpdateEvent {
            task_id: "t".into(),
            context_id: "c".into(),
            status: Some(status),
            metadata: None,
        }),
        Payload::ArtifactUpdate(v1::TaskArtifactUpdateEvent {
            task_id: "t".into(),
            context_id: "c".into(),
            artifact: Some(artifact),
            append: true,
            last_chunk: false,
            metadata: None,
        }),
    ];
    let events = payloads.map(|payload| {
        let event = v1::StreamResponse { payload: Some(payload) };
        written(&Event { event: &event, last: true })
    });
    insta::assert_json_snapshot!(events);
}

#[test]
fn what_has_no_content_is_not_written() {
    let empty = v1::StreamResponse { payload: None };
    assert!(serde_json::to_string(&Event { event: &empty, last: true }).is_err());
    assert!(serde_json::to_string(&Form(&v1::SendMessageResponse { payload: None })).is_err());
    let message = v1::Message { parts: vec![v1::Part::default()], ..Default::default() };
    assert!(serde_json::to_string(&Form(&message)).is_err());
}

#[test]
fn errors_have_codes_that_0_3_knows() {
    let told: Vec<_> = Kind::ALL.into_iter().map(|kind| v03::error(&kind.into()).to_string()).collect();
    insta::assert_snapshot!(told.join("\n"));
    let detailed = Error::invalid("message.role", "is required").with("fact", "x");
    assert_eq!(
        v03::error(&detailed),
        json!({"code": -32602, "message": "Invalid parameters: message.role: is required"})
    );
}

#[test]
fn answers_of_agents_say_what_they_are() {
    for text in [r#"{"id": "t"}"#, r#"{"kind": "story"}"#, r#"[]"#, r#"["task"]"#, "null"] {
        assert_eq!(v03::read_event(text).unwrap_err().kind, Kind::InvalidParams, "{text}");
    }
    let status = json!({"state": "working", "timestamp": "2026-03-12T10:00:00.000001+00:00"});
    let event = json!({"kind": "status-update", "taskId": "t", "contextId": "c", "status": status, "final": false});
    let event = v03::read_event(&event.to_string()).unwrap();
    let Some(Payload::StatusUpdate(update)) = event.payload else { panic!("{event:?}") };
    assert_eq!(update.status.unwrap().timestamp.unwrap().to_string(), "2026-03-12T10:00:00.000001Z");
}

#[test]
fn a_flag_without_the_wrapping_is_only_metadata() {
    let flag = json!({"data_part_compat": true});
    for data in [json!({"value": 1, "more": 2}), json!({}), json!({"values": 1})] {
        let part = &parts(&json!([{"kind": "data", "data": data, "metadata": flag}]))[0];
        assert!(matches!(&part.content, Some(Content::Data(Wkt { kind: Some(value::Kind::StructValue(_)) }))));
        assert_eq!(part.metadata.as_ref().unwrap().fields, BTreeMap::from([("data_part_compat".into(), true.into())]));
    }
}
