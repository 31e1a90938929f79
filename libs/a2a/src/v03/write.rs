//! 1.0 objects in the forms of 0.3, written without a copy in between.

use base64::{display::Base64Display, engine::general_purpose::STANDARD};
use serde::{
    Serialize, Serializer,
    ser::{Error, SerializeMap},
};

use super::{WRAPPED, WRAPPED_VALUE, words::Word};
use crate::{
    v1::{
        self, Artifact, ListTaskPushNotificationConfigsResponse, Message, Part, SendMessageResponse, Task,
        TaskArtifactUpdateEvent, TaskPushNotificationConfig, TaskStatus, TaskStatusUpdateEvent, part::Content,
        send_message_response, stream_response::Payload,
    },
    wkt::{Struct, Value, value},
};

/// An answer as 0.3 writes it: a task, a message, what `message/send` gives (bare, without a wrapper), a push config,
/// or the array of all of them.
///
/// Writing fails on what no valid 1.0 object holds: a part or a response without content, NaN, a timestamp out of
/// range.
#[derive(Clone, Copy, Debug)]
pub struct Form<'a, T>(pub &'a T);

/// What a stream or a webhook brings, as 0.3 writes it: bare, told apart by `kind`.
///
/// Writing fails as with [`Form`].
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// The event.
    pub event: &'a v1::StreamResponse,
    /// Whether the stream ends with it. 0.3 clients stop reading at `final: true`, so a task that waits for somebody
    /// says so only then; a task that has ended always does.
    pub last: bool,
}

/// An object being written.
struct Object<M>(M);

impl<M: SerializeMap> Object<M> {
    fn new<S: Serializer<SerializeMap = M, Error = M::Error>>(serializer: S) -> Result<Self, M::Error> {
        serializer.serialize_map(None).map(Self)
    }

    fn of_kind<S: Serializer<SerializeMap = M, Error = M::Error>>(serializer: S, kind: &str) -> Result<Self, M::Error> {
        let mut object = Self::new(serializer)?;
        object.set("kind", kind)?;
        Ok(object)
    }

    fn set(&mut self, key: &str, value: &(impl Serialize + ?Sized)) -> Result<(), M::Error> {
        self.0.serialize_entry(key, value)
    }

    /// Unless it is empty.
    fn text(&mut self, key: &str, text: &str) -> Result<(), M::Error> {
        if text.is_empty() { Ok(()) } else { self.set(key, text) }
    }

    /// Unless it is empty.
    fn texts(&mut self, key: &str, texts: &[String]) -> Result<(), M::Error> {
        if texts.is_empty() { Ok(()) } else { self.set(key, texts) }
    }

    /// Unless it is empty.
    fn forms<'a, T>(&mut self, key: &str, forms: &'a [T]) -> Result<(), M::Error>
    where
        Form<'a, T>: Serialize,
    {
        if forms.is_empty() { Ok(()) } else { self.set(key, &Forms(forms)) }
    }

    /// If it is set.
    fn some(&mut self, key: &str, value: Option<&impl Serialize>) -> Result<(), M::Error> {
        value.map_or(Ok(()), |value| self.set(key, value))
    }

    fn end(self) -> Result<M::Ok, M::Error> {
        self.0.end()
    }
}

struct Forms<'a, T>(&'a [T]);

impl<'a, T> Serialize for Forms<'a, T>
where
    Form<'a, T>: Serialize,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(Form))
    }
}

impl Serialize for Form<'_, Task> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Task { id, context_id, status, artifacts, history, metadata } = self.0;
        let mut object = Object::of_kind(serializer, "task")?;
        object.set("id", id)?;
        object.set("contextId", context_id)?;
        object.set("status", &Status(status.as_ref()))?;
        object.forms("artifacts", artifacts)?;
        object.forms("history", history)?;
        object.some("metadata", metadata.as_ref())?;
        object.end()
    }
}

/// 0.3 requires a status, so one that is not set is written too.
struct Status<'a>(Option<&'a TaskStatus>);

impl Serialize for Status<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let state = self.0.map(TaskStatus::state).unwrap_or_default();
        let mut object = Object::new(serializer)?;
        object.set("state", state.word().unwrap_or("unknown"))?;
        object.some("message", self.0.and_then(|status| status.message.as_ref()).map(Form).as_ref())?;
        object.some("timestamp", self.0.and_then(|status| status.timestamp.as_ref()))?;
        object.end()
    }
}

impl Serialize for Form<'_, Message> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let message = self.0;
        let mut object = Object::of_kind(serializer, "message")?;
        object.set("messageId", &message.message_id)?;
        object.text("contextId", &message.context_id)?;
        object.text("taskId", &message.task_id)?;
        // Whoever left the role out of a stored message, it was not the client.
        object.set("role", message.role().word().unwrap_or("agent"))?;
        object.set("parts", &Forms(&message.parts))?;
        object.some("metadata", message.metadata.as_ref())?;
        object.texts("extensions", &message.extensions)?;
        object.texts("referenceTaskIds", &message.reference_task_ids)?;
        object.end()
    }
}

impl Serialize for Form<'_, Artifact> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Artifact { artifact_id, name, description, parts, metadata, extensions } = self.0;
        let mut object = Object::new(serializer)?;
        object.set("artifactId", artifact_id)?;
        object.text("name", name)?;
        object.text("description", description)?;
        object.set("parts", &Forms(parts))?;
        object.some("metadata", metadata.as_ref())?;
        object.texts("extensions", extensions)?;
        object.end()
    }
}

impl Serialize for Form<'_, Part> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Part { content, metadata, .. } = self.0;
        let content = content.as_ref().ok_or_else(|| S::Error::custom("a part without content"))?;
        let kind = match content {
            Content::Text(_) => "text",
            Content::Raw(_) | Content::Url(_) => "file",
            Content::Data(_) => "data",
        };
        let mut object = Object::of_kind(serializer, kind)?;
        match content {
            Content::Text(text) => object.set("text", text)?,
            Content::Raw(_) | Content::Url(_) => object.set("file", &File(self.0))?,
            Content::Data(Value { kind: Some(value::Kind::StructValue(data)) }) => object.set("data", data)?,
            Content::Data(data) => {
                object.set("data", &Wrapped(data))?;
                object.set("metadata", &Flagged(metadata.as_ref()))?;
                return object.end();
            }
        }
        object.some("metadata", metadata.as_ref())?;
        object.end()
    }
}

/// The `file` of a part.
struct File<'a>(&'a Part);

impl Serialize for File<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Part { content, filename, media_type, .. } = self.0;
        let mut object = Object::new(serializer)?;
        match content {
            Some(Content::Raw(bytes)) => object.set("bytes", &Base64(bytes))?,
            Some(Content::Url(url)) => object.set("uri", url)?,
            _ => {}
        }
        object.text("mimeType", media_type)?;
        object.text("name", filename)?;
        object.end()
    }
}

struct Base64<'a>(&'a [u8]);

impl Serialize for Base64<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&Base64Display::new(self.0, &STANDARD))
    }
}

/// The data of a part, which must be an object, when it is none.
struct Wrapped<'a>(&'a Value);

impl Serialize for Wrapped<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map([(WRAPPED_VALUE, self.0)])
    }
}

/// The metadata of a part whose data is wrapped.
struct Flagged<'a>(Option<&'a Struct>);

impl Serialize for Flagged<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = Object::new(serializer)?;
        for (key, value) in self.0.into_iter().flat_map(|metadata| &metadata.fields).filter(|(key, _)| *key != WRAPPED)
        {
            object.set(key, value)?;
        }
        object.set(WRAPPED, &true)?;
        object.end()
    }
}

impl Serialize for Form<'_, SendMessageResponse> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0.payload {
            Some(send_message_response::Payload::Task(task)) => Form(task).serialize(serializer),
            Some(send_message_response::Payload::Message(message)) => Form(message).serialize(serializer),
            None => Err(S::Error::custom("a response without content")),
        }
    }
}

impl Serialize for Event<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.event.payload {
            Some(Payload::Task(task)) => Form(task).serialize(serializer),
            Some(Payload::Message(message)) => Form(message).serialize(serializer),
            Some(Payload::StatusUpdate(update)) => self.status_update(update, serializer),
            Some(Payload::ArtifactUpdate(update)) => Form(update).serialize(serializer),
            None => Err(S::Error::custom("an event without content")),
        }
    }
}

impl Event<'_> {
    fn status_update<S: Serializer>(&self, update: &TaskStatusUpdateEvent, serializer: S) -> Result<S::Ok, S::Error> {
        let TaskStatusUpdateEvent { task_id, context_id, status, metadata } = update;
        let state = status.as_ref().map(TaskStatus::state).unwrap_or_default();
        let mut object = Object::of_kind(serializer, "status-update")?;
        object.set("taskId", task_id)?;
        object.set("contextId", context_id)?;
        object.set("status", &Status(status.as_ref()))?;
        object.set("final", &(state.is_terminal() || self.last && state.is_interrupted()))?;
        object.some("metadata", metadata.as_ref())?;
        object.end()
    }
}

impl Serialize for Form<'_, TaskArtifactUpdateEvent> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let TaskArtifactUpdateEvent { task_id, context_id, artifact, append, last_chunk, metadata } = self.0;
        let artifact = artifact.as_ref().ok_or_else(|| S::Error::custom("an update without an artifact"))?;
        let mut object = Object::of_kind(serializer, "artifact-update")?;
        object.set("taskId", task_id)?;
        object.set("contextId", context_id)?;
        object.set("artifact", &Form(artifact))?;
        object.set("append", append)?;
        object.set("lastChunk", last_chunk)?;
        object.some("metadata", metadata.as_ref())?;
        object.end()
    }
}

impl Serialize for Form<'_, TaskPushNotificationConfig> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = Object::new(serializer)?;
        object.set("taskId", &self.0.task_id)?;
        object.set("pushNotificationConfig", &PushConfig(self.0))?;
        object.end()
    }
}

impl Serialize for Form<'_, ListTaskPushNotificationConfigsResponse> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Forms(&self.0.configs).serialize(serializer)
    }
}

struct PushConfig<'a>(&'a TaskPushNotificationConfig);

impl Serialize for PushConfig<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let TaskPushNotificationConfig { id, url, token, authentication, .. } = self.0;
        let mut object = Object::new(serializer)?;
        object.text("id", id)?;
        object.set("url", url)?;
        object.text("token", token)?;
        object.some("authentication", authentication.as_ref().map(Authentication).as_ref())?;
        object.end()
    }
}

struct Authentication<'a>(&'a v1::AuthenticationInfo);

impl Serialize for Authentication<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let v1::AuthenticationInfo { scheme, credentials } = self.0;
        let mut object = Object::new(serializer)?;
        object.set("schemes", &[scheme])?;
        object.text("credentials", credentials)?;
        object.end()
    }
}
