//! The forms of 0.3 as serde reads them, and what they mean in 1.0.
//!
//! All members are optional here, unknown ones ignored: what must be set is decided on the 1.0 side. `kind` may be
//! missing where it says nothing new, but never lie. These are for [`json`] only, which adds `null`, depth, exactness
//! and paths.

use std::fmt;

use base64::{
    Engine,
    alphabet::{STANDARD, URL_SAFE},
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use prost::bytes::Bytes;
use serde::{
    Deserialize, Deserializer,
    de::{Unexpected, Visitor},
};

use super::{
    WRAPPED, WRAPPED_VALUE,
    words::{EventKind, IsMessage, PartKind, word},
};
use crate::{
    error::{Error, Result},
    json,
    v1::{self, part::Content, stream_response::Payload},
    wkt::{Struct, Timestamp, Value},
};

/// Reads what a 0.3 agent answered to `message/send`, sent on a stream, or posted to a webhook.
///
/// # Errors
/// As [`json::from_str`]. That required fields are set is for [`crate::validate`] to say.
pub fn read_event(text: &str) -> Result<v1::StreamResponse> {
    #[derive(Default, Deserialize)]
    #[serde(default, expecting = "an object")]
    struct Tagged {
        #[serde(deserialize_with = "word")]
        kind: Option<EventKind>,
    }
    let payload = match json::from_str::<Tagged>(text)?.kind {
        Some(EventKind::Task) => Payload::Task(json::from_str::<Task>(text)?.into()),
        Some(EventKind::Message) => Payload::Message(json::from_str::<Message>(text)?.into()),
        Some(EventKind::StatusUpdate) => Payload::StatusUpdate(json::from_str::<StatusUpdate>(text)?.into()),
        Some(EventKind::ArtifactUpdate) => Payload::ArtifactUpdate(json::from_str::<ArtifactUpdate>(text)?.into()),
        None => return Err(Error::invalid("kind", "is required")),
    };
    Ok(v1::StreamResponse { payload: Some(payload) })
}

/// The params of `message/send` and `message/stream`.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
pub(super) struct Send {
    message: Option<Message>,
    configuration: Option<Configuration>,
    metadata: Option<Struct>,
}

impl From<Send> for v1::SendMessageRequest {
    fn from(send: Send) -> Self {
        Self {
            message: send.message.map(Into::into),
            configuration: send.configuration.map(Into::into),
            metadata: send.metadata,
            ..Self::default()
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
struct Configuration {
    accepted_output_modes: Vec<String>,
    blocking: Option<bool>,
    #[serde(deserialize_with = "length")]
    history_length: Option<i32>,
    push_notification_config: Option<PushConfig>,
}

impl From<Configuration> for v1::SendMessageConfiguration {
    fn from(configuration: Configuration) -> Self {
        Self {
            accepted_output_modes: configuration.accepted_output_modes,
            task_push_notification_config: configuration.push_notification_config.map(Into::into),
            history_length: configuration.history_length,
            return_immediately: configuration.blocking == Some(false),
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct PushConfig {
    id: String,
    url: String,
    token: String,
    authentication: Option<Authentication>,
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct Authentication {
    schemes: Vec<String>,
    credentials: String,
}

impl From<PushConfig> for v1::TaskPushNotificationConfig {
    fn from(config: PushConfig) -> Self {
        // No scheme and no credentials is a way to say "none"; credentials without a scheme are refused later.
        let authentication = config.authentication.filter(|a| !(a.schemes.is_empty() && a.credentials.is_empty()));
        Self {
            id: config.id,
            url: config.url,
            token: config.token,
            authentication: authentication.map(|Authentication { schemes, credentials }| v1::AuthenticationInfo {
                scheme: schemes.into_iter().next().unwrap_or_default(),
                credentials,
            }),
            ..Self::default()
        }
    }
}

/// The params of `tasks/pushNotificationConfig/set`, and the answer to it.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
pub(super) struct SetPushConfig {
    task_id: String,
    push_notification_config: Option<PushConfig>,
}

impl From<SetPushConfig> for v1::TaskPushNotificationConfig {
    fn from(set: SetPushConfig) -> Self {
        Self { task_id: set.task_id, ..set.push_notification_config.map(Self::from).unwrap_or_default() }
    }
}

/// The params of all methods about a task that is there.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
pub(super) struct TaskParams {
    id: String,
    #[serde(deserialize_with = "length")]
    history_length: Option<i32>,
    push_notification_config_id: String,
    metadata: Option<Struct>,
}

impl TaskParams {
    pub(super) fn names_config(&self) -> bool {
        !self.push_notification_config_id.is_empty()
    }
}

impl From<TaskParams> for v1::GetTaskRequest {
    fn from(TaskParams { id, history_length, .. }: TaskParams) -> Self {
        Self { id, history_length, ..Self::default() }
    }
}

impl From<TaskParams> for v1::CancelTaskRequest {
    fn from(TaskParams { id, metadata, .. }: TaskParams) -> Self {
        Self { id, metadata, ..Self::default() }
    }
}

impl From<TaskParams> for v1::SubscribeToTaskRequest {
    fn from(TaskParams { id, .. }: TaskParams) -> Self {
        Self { id, ..Self::default() }
    }
}

impl From<TaskParams> for v1::GetTaskPushNotificationConfigRequest {
    fn from(params: TaskParams) -> Self {
        Self { task_id: params.id, id: params.push_notification_config_id, ..Self::default() }
    }
}

impl From<TaskParams> for v1::ListTaskPushNotificationConfigsRequest {
    fn from(TaskParams { id, .. }: TaskParams) -> Self {
        Self { task_id: id, ..Self::default() }
    }
}

impl From<TaskParams> for v1::DeleteTaskPushNotificationConfigRequest {
    fn from(params: TaskParams) -> Self {
        Self { task_id: params.id, id: params.push_notification_config_id, ..Self::default() }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
struct Message {
    #[serde(rename = "kind", deserialize_with = "word")]
    _kind: Option<IsMessage>,
    message_id: String,
    context_id: String,
    task_id: String,
    #[serde(deserialize_with = "word")]
    role: Option<v1::Role>,
    parts: Vec<Part>,
    metadata: Option<Struct>,
    extensions: Vec<String>,
    reference_task_ids: Vec<String>,
}

impl From<Message> for v1::Message {
    fn from(message: Message) -> Self {
        Self {
            message_id: message.message_id,
            context_id: message.context_id,
            task_id: message.task_id,
            role: message.role.unwrap_or_default().into(),
            parts: bare(message.parts),
            metadata: message.metadata,
            extensions: message.extensions,
            reference_task_ids: message.reference_task_ids,
        }
    }
}

fn bare(parts: Vec<Part>) -> Vec<v1::Part> {
    parts.into_iter().map(|Part(part)| part).collect()
}

#[derive(Deserialize)]
#[serde(try_from = "RawPart")]
struct Part(v1::Part);

#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct RawPart {
    #[serde(deserialize_with = "word")]
    kind: Option<PartKind>,
    text: Option<String>,
    file: Option<File>,
    data: Option<Struct>,
    metadata: Option<Struct>,
}

impl TryFrom<RawPart> for Part {
    type Error = &'static str;

    fn try_from(RawPart { kind, text, file, data, mut metadata }: RawPart) -> Result<Self, &'static str> {
        let (found, part) = match (text, file, data) {
            (Some(text), None, None) => (PartKind::Text, v1::Part::text(text)),
            (None, Some(File(part)), None) => (PartKind::File, part),
            (None, None, Some(data)) => (PartKind::Data, v1::Part::data(unwrap(data, &mut metadata))),
            _ => return Err("needs exactly one of text, file and data"),
        };
        match kind {
            Some(kind) if kind != found => Err("has a kind that is not its content's"),
            _ => Ok(Self(v1::Part { metadata, ..part })),
        }
    }
}

/// The data itself, if it was no object and had to be wrapped.
fn unwrap(mut data: Struct, metadata: &mut Option<Struct>) -> Value {
    let flag = Value::from(true);
    let flagged = metadata.as_mut().filter(|metadata| metadata.fields.get(WRAPPED) == Some(&flag));
    if let Some(flagged) = flagged
        && data.fields.len() == 1
        && let Some(value) = data.fields.remove(WRAPPED_VALUE)
    {
        flagged.fields.remove(WRAPPED);
        metadata.take_if(|metadata| metadata.fields.is_empty());
        return value;
    }
    data.into()
}

#[derive(Deserialize)]
#[serde(try_from = "RawFile")]
struct File(v1::Part);

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
struct RawFile {
    bytes: Option<Base64>,
    uri: Option<String>,
    mime_type: String,
    name: String,
}

impl TryFrom<RawFile> for File {
    type Error = &'static str;

    fn try_from(file: RawFile) -> Result<Self, &'static str> {
        let content = match (file.bytes, file.uri) {
            (Some(Base64(bytes)), None) => Content::Raw(bytes),
            (None, Some(uri)) => Content::Url(uri),
            _ => return Err("needs exactly one of bytes and uri"),
        };
        Ok(Self(v1::Part { media_type: file.mime_type, filename: file.name, ..content.into() }))
    }
}

/// Either alphabet, with or without padding, as in 1.0.
struct Base64(Bytes);

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        const LENIENT: GeneralPurposeConfig =
            GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
        const ENGINE: GeneralPurpose = GeneralPurpose::new(&STANDARD, LENIENT);
        const URL_SAFE_ENGINE: GeneralPurpose = GeneralPurpose::new(&URL_SAFE, LENIENT);

        struct Text;
        impl Visitor<'_> for Text {
            type Value = Base64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a base64 string")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Base64, E> {
                let engine = if text.contains(['-', '_']) { URL_SAFE_ENGINE } else { ENGINE };
                match engine.decode(text) {
                    Ok(bytes) => Ok(Base64(bytes.into())),
                    Err(error) => Err(E::custom(format_args!("not base64: {error}"))),
                }
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// A `historyLength`: a number or, as in 1.0, its text. 0.3 takes 0 for "all", which is unset in 1.0.
fn length<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i32>, D::Error> {
    struct Length;

    impl Visitor<'_> for Length {
        type Value = Option<i32>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a 32-bit integer")
        }

        fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Option<i32>, E> {
            match i32::try_from(number) {
                Ok(number) => Ok(Some(number).filter(|number| *number != 0)),
                Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
            }
        }

        fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Option<i32>, E> {
            match i64::try_from(number) {
                Ok(number) => self.visit_i64(number),
                Err(_) => Err(E::invalid_value(Unexpected::Unsigned(number), &self)),
            }
        }

        /// [`json`] makes integers of all other integral floats.
        fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Option<i32>, E> {
            match number {
                0.0 => Ok(None),
                _ => Err(E::invalid_value(Unexpected::Float(number), &self)),
            }
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Option<i32>, E> {
            match text.parse() {
                Ok(number) => self.visit_i64(number),
                Err(_) => Err(E::invalid_value(Unexpected::Str(text), &self)),
            }
        }
    }

    deserializer.deserialize_any(Length)
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
struct Task {
    id: String,
    context_id: String,
    status: Option<Status>,
    artifacts: Vec<Artifact>,
    history: Vec<Message>,
    metadata: Option<Struct>,
}

impl From<Task> for v1::Task {
    fn from(task: Task) -> Self {
        Self {
            id: task.id,
            context_id: task.context_id,
            status: task.status.map(Into::into),
            artifacts: task.artifacts.into_iter().map(Into::into).collect(),
            history: task.history.into_iter().map(Into::into).collect(),
            metadata: task.metadata,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "an object")]
struct Status {
    #[serde(deserialize_with = "word")]
    state: Option<v1::TaskState>,
    message: Option<Message>,
    timestamp: Option<Timestamp>,
}

impl From<Status> for v1::TaskStatus {
    fn from(status: Status) -> Self {
        Self {
            state: status.state.unwrap_or_default().into(),
            message: status.message.map(Into::into),
            timestamp: status.timestamp,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
struct Artifact {
    artifact_id: String,
    name: String,
    description: String,
    parts: Vec<Part>,
    metadata: Option<Struct>,
    extensions: Vec<String>,
}

impl From<Artifact> for v1::Artifact {
    fn from(artifact: Artifact) -> Self {
        Self {
            artifact_id: artifact.artifact_id,
            name: artifact.name,
            description: artifact.description,
            parts: bare(artifact.parts),
            metadata: artifact.metadata,
            extensions: artifact.extensions,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
struct StatusUpdate {
    task_id: String,
    context_id: String,
    status: Option<Status>,
    metadata: Option<Struct>,
}

impl From<StatusUpdate> for v1::TaskStatusUpdateEvent {
    fn from(update: StatusUpdate) -> Self {
        Self {
            task_id: update.task_id,
            context_id: update.context_id,
            status: update.status.map(Into::into),
            metadata: update.metadata,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", expecting = "an object")]
struct ArtifactUpdate {
    task_id: String,
    context_id: String,
    artifact: Option<Artifact>,
    append: bool,
    last_chunk: bool,
    metadata: Option<Struct>,
}

impl From<ArtifactUpdate> for v1::TaskArtifactUpdateEvent {
    fn from(update: ArtifactUpdate) -> Self {
        Self {
            task_id: update.task_id,
            context_id: update.context_id,
            artifact: update.artifact.map(Into::into),
            append: update.append,
            last_chunk: update.last_chunk,
            metadata: update.metadata,
        }
    }
}
