//! Whatever an object holds, 0.3 gives it back but for the losses that are documented.

use proptest::{collection::vec, prelude::*};
use rialto_a2a::{
    v1::{self, part::Content, stream_response::Payload},
    v03::{self, Event, Form, Method, Request},
    wkt::value,
};
use serde_json::json;

use crate::{
    round_trip::{message, metadata, part, text, timestamp, value},
    v03::{parts, read, written},
};

fn artifact() -> impl Strategy<Value = v1::Artifact> {
    (text(), text(), text(), vec(full_part(), 0..3), metadata(), vec(text(), 0..2)).prop_map(
        |(artifact_id, name, description, parts, metadata, extensions)| v1::Artifact {
            artifact_id,
            name,
            description,
            parts,
            metadata,
            extensions,
        },
    )
}

/// With content: without, there is nothing to write.
fn full_part() -> impl Strategy<Value = v1::Part> {
    part().prop_map(|part| v1::Part { content: part.content.or(Some(Content::Text(String::new()))), ..part })
}

fn full_message() -> impl Strategy<Value = v1::Message> {
    (message(), text(), vec(text(), 0..2), vec(full_part(), 0..3)).prop_map(
        |(message, task_id, reference_task_ids, parts)| v1::Message { task_id, reference_task_ids, parts, ..message },
    )
}

fn status() -> impl Strategy<Value = v1::TaskStatus> {
    (0..9, prop::option::of(full_message()), prop::option::of(timestamp()))
        .prop_map(|(state, message, timestamp)| v1::TaskStatus { state, message, timestamp })
}

fn event() -> impl Strategy<Value = v1::StreamResponse> {
    let task = (text(), text(), status(), vec(artifact(), 0..2), vec(full_message(), 0..2), metadata()).prop_map(
        |(id, context_id, status, artifacts, history, metadata)| {
            Payload::Task(v1::Task { id, context_id, status: Some(status), artifacts, history, metadata })
        },
    );
    let status_update = (text(), text(), status(), metadata()).prop_map(|(task_id, context_id, status, metadata)| {
        Payload::StatusUpdate(v1::TaskStatusUpdateEvent { task_id, context_id, status: Some(status), metadata })
    });
    let artifact_update = (text(), text(), artifact(), any::<[bool; 2]>(), metadata()).prop_map(
        |(task_id, context_id, artifact, [append, last_chunk], metadata)| {
            let artifact = Some(artifact);
            Payload::ArtifactUpdate(v1::TaskArtifactUpdateEvent {
                task_id,
                context_id,
                artifact,
                append,
                last_chunk,
                metadata,
            })
        },
    );
    prop_oneof![task, full_message().prop_map(Payload::Message), status_update, artifact_update]
        .prop_map(|payload| v1::StreamResponse { payload: Some(payload) })
}

/// What is left after 0.3: exactly the losses that the module documents.
trait Lose {
    fn lose(&mut self);
}

impl<T: Lose> Lose for Vec<T> {
    fn lose(&mut self) {
        self.iter_mut().for_each(Lose::lose);
    }
}

impl<T: Lose> Lose for Option<T> {
    fn lose(&mut self) {
        self.iter_mut().for_each(Lose::lose);
    }
}

impl Lose for v1::Part {
    fn lose(&mut self) {
        if matches!(self.content, Some(Content::Text(_) | Content::Data(_))) {
            self.filename.clear();
            self.media_type.clear();
        }
        let wrapped = matches!(&self.content, Some(Content::Data(data)) if !matches!(data.kind, Some(value::Kind::StructValue(_))));
        if wrapped {
            self.metadata.take_if(|metadata| metadata.fields.is_empty());
        }
    }
}

impl Lose for v1::Message {
    fn lose(&mut self) {
        if self.role == 0 {
            self.role = v1::Role::Agent.into();
        }
        self.parts.lose();
    }
}

impl Lose for v1::Artifact {
    fn lose(&mut self) {
        self.parts.lose();
    }
}

impl Lose for v1::StreamResponse {
    fn lose(&mut self) {
        match self.payload.as_mut().unwrap() {
            Payload::Task(task) => {
                task.status.as_mut().unwrap().message.lose();
                task.artifacts.lose();
                task.history.lose();
            }
            Payload::Message(message) => message.lose(),
            Payload::StatusUpdate(update) => update.status.as_mut().unwrap().message.lose(),
            Payload::ArtifactUpdate(update) => update.artifact.lose(),
        }
    }
}

fn push_config() -> impl Strategy<Value = v1::TaskPushNotificationConfig> {
    let authentication = prop::option::of(("[a-zA-Z]{1,8}", text()))
        .prop_map(|both| both.map(|(scheme, credentials)| v1::AuthenticationInfo { scheme, credentials }));
    (text(), "[a-z]{1,8}", "[a-z:/]{1,9}", text(), authentication).prop_map(
        |(id, task_id, url, token, authentication)| v1::TaskPushNotificationConfig {
            tenant: String::new(),
            id,
            task_id,
            url,
            token,
            authentication,
        },
    )
}

proptest! {
    #[test]
    fn events_survive_0_3_but_for_the_known_losses(mut event in event(), last in any::<bool>()) {
        let text = serde_json::to_string(&Event { event: &event, last }).unwrap();
        let back = v03::read_event(&text).unwrap();
        event.lose();
        prop_assert_eq!(back, event);
    }

    #[test]
    fn messages_can_be_sent_on_as_they_were_received(mut message in full_message(), metadata in metadata()) {
        message.lose();
        let mut params = json!({"message": written(&Form(&message))});
        if let Some(metadata) = &metadata {
            params["metadata"] = written(metadata);
        }
        match read(Method::SendMessage, &params) {
            Ok(Request::SendMessage(request)) => {
                prop_assert_eq!(request.message.unwrap(), message);
                prop_assert_eq!(request.metadata, metadata);
            }
            Ok(other) => panic!("{other:?}"),
            Err(_) => prop_assert!(message.message_id.is_empty() || message.parts.is_empty()),
        }
    }

    #[test]
    fn push_configs_survive_0_3(config in push_config()) {
        let read = read(Method::CreatePushConfig, &written(&Form(&config))).unwrap();
        prop_assert_eq!(read, Request::CreatePushConfig(config));
    }

    #[test]
    fn data_of_any_kind_survives_0_3(data in value(), metadata in metadata()) {
        let mut part = v1::Part { metadata, ..v1::Part::data(data) };
        let back = parts(&json!([written(&Form(&part))]));
        part.lose();
        prop_assert_eq!(back, [part]);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "[\\[\\]{}:,\"0-9a-zA-Z.+\\- \\\\]{0,60}") {
        v03::read_event(&text).ok();
        for method in Method::ALL {
            Request::read(method, &text).ok();
        }
        Request::read(Method::SendMessage, &format!(r#"{{"message":{{"parts":[{text}]}}}}"#)).ok();
    }
}
