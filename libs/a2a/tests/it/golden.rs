//! JSON and protobuf as Python's protobuf reads and writes them.
//!
//! One difference is meant: Python writes every number of a `Struct` as a float (`1.0`), we write integers as such.
//! Another is not met here: we write all four fields of a `ListTasksResponse`.

use std::fmt::Debug;

use base64::{Engine, engine::general_purpose::STANDARD};
use prost::Message;
use rialto_a2a::{Kind, Result, json as proto_json, v1};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Vectors {
    read: Vec<Read>,
    refused: Vec<Refused>,
}

#[derive(Deserialize)]
struct Read {
    r#type: String,
    given: Value,
    json: Value,
    protobuf: String,
}

#[derive(Deserialize)]
struct Refused {
    r#type: String,
    given: Value,
}

trait Proto: Message + Default + PartialEq + Debug + Serialize + DeserializeOwned {}
impl<T: Message + Default + PartialEq + Debug + Serialize + DeserializeOwned> Proto for T {}

/// What a test does with a message type.
trait Visit {
    fn visit<T: Proto>(self);
}

macro_rules! dispatch {
    ($name:expr, $visit:expr; $($proto:literal $message:ident)*; $($same:ident)*) => {
        match $name {
            $($proto => $visit.visit::<v1::$message>(),)*
            $(stringify!($same) => $visit.visit::<v1::$same>(),)*
            other => panic!("{other} is unknown"),
        }
    };
}

fn dispatch(name: &str, visit: impl Visit) {
    dispatch!(name, visit;
        "APIKeySecurityScheme" ApiKeySecurityScheme
        "HTTPAuthSecurityScheme" HttpAuthSecurityScheme;
        AgentCapabilities AgentCard AgentCardSignature AgentExtension AgentInterface AgentProvider AgentSkill Artifact
        AuthenticationInfo AuthorizationCodeOAuthFlow CancelTaskRequest ClientCredentialsOAuthFlow
        DeleteTaskPushNotificationConfigRequest DeviceCodeOAuthFlow GetExtendedAgentCardRequest
        GetTaskPushNotificationConfigRequest GetTaskRequest ImplicitOAuthFlow ListTaskPushNotificationConfigsRequest
        ListTaskPushNotificationConfigsResponse ListTasksRequest ListTasksResponse Message MutualTlsSecurityScheme
        OAuth2SecurityScheme OAuthFlows OpenIdConnectSecurityScheme Part PasswordOAuthFlow SecurityRequirement
        SecurityScheme SendMessageConfiguration SendMessageRequest SendMessageResponse StreamResponse StringList
        SubscribeToTaskRequest Task TaskArtifactUpdateEvent TaskPushNotificationConfig TaskStatus
        TaskStatusUpdateEvent
    );
}

fn vectors() -> Vectors {
    serde_json::from_str(include_str!("../golden/vectors.json")).unwrap()
}

struct Agrees<'a>(&'a Read);

impl Visit for Agrees<'_> {
    fn visit<T: Proto>(self) {
        let Read { r#type, given, json, protobuf } = self.0;
        let protobuf = STANDARD.decode(protobuf).unwrap();
        let message = T::decode(&protobuf[..]).unwrap();
        assert_eq!(proto_json::from_value::<T>(given.clone()).unwrap(), message, "{type} {given}");
        assert_eq!(proto_json::from_str::<T>(&given.to_string()).unwrap(), message, "{type} {given}");
        // Not the same bytes: prost leaves out default values of map entries, as it may.
        assert_eq!(T::decode(&message.encode_to_vec()[..]).unwrap(), message, "{type} {given}");
        let mut written: Value = serde_json::from_slice(&proto_json::to_vec(&message).unwrap()).unwrap();
        assert_eq!(written, proto_json::to_value(&message).unwrap());
        if r#type == "ListTasksResponse" {
            let empty = [json!([]), json!(0), json!("")];
            written.as_object_mut().unwrap().retain(|_, value| !empty.contains(value));
        }
        assert_eq!(floats(written), floats(json.clone()), "{type} {given}");
    }
}

/// Every number as a float.
pub(crate) fn floats(value: Value) -> Value {
    match value {
        Value::Number(number) => number.as_f64().unwrap().into(),
        Value::Array(values) => values.into_iter().map(floats).collect(),
        Value::Object(members) => members.into_iter().map(|(key, value)| (key, floats(value))).collect(),
        other => other,
    }
}

#[test]
fn json_and_protobuf_are_those_of_python() {
    let vectors = vectors().read;
    assert!(vectors.len() > 100);
    for vector in &vectors {
        dispatch(&vector.r#type, Agrees(vector));
    }
}

struct Refuses<'a>(&'a Refused);

impl Visit for Refuses<'_> {
    fn visit<T: Proto>(self) {
        let results: [Result<T>; 2] =
            [proto_json::from_value(self.0.given.clone()), proto_json::from_str(&self.0.given.to_string())];
        for result in results {
            assert_eq!(result.expect_err(&self.0.given.to_string()).kind, Kind::InvalidParams);
        }
    }
}

#[test]
fn what_python_refuses_is_refused() {
    for vector in &vectors().refused {
        dispatch(&vector.r#type, Refuses(vector));
    }
}
