//! Whatever a message holds, JSON and protobuf give it back.

use proptest::{
    collection::{btree_map, vec},
    prelude::*,
};
use prost::Message as _;
use rialto_a2a::{
    json,
    v1::{self, part::Content, stream_response::Payload},
    wkt::{MAX_SAFE_INTEGER, Struct, Timestamp, Value},
};

pub(crate) fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        "[a-z_]{1,8}",
        "\\PC{0,6}",
        any::<String>().prop_map(|s| s.chars().take(5).collect())
    ]
}

#[expect(clippy::cast_precision_loss, reason = "exact within the range")]
pub(crate) fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::NULL),
        any::<bool>().prop_map(Value::from),
        (-MAX_SAFE_INTEGER..=MAX_SAFE_INTEGER).prop_map(|n| Value::from(n as f64)),
        // No zero: JSON has no -0 and takes its sign.
        (prop::num::f64::NORMAL | prop::num::f64::NEGATIVE).prop_map(Value::from),
        text().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![vec(inner.clone(), 0..4).prop_map(Value::from), object(inner).prop_map(Value::from)]
    })
}

fn object(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Struct> {
    btree_map(text(), value, 0..4).prop_map(|fields| Struct { fields })
}

pub(crate) fn metadata() -> impl Strategy<Value = Option<Struct>> {
    prop::option::weighted(0.3, object(value()))
}

pub(crate) fn part() -> impl Strategy<Value = v1::Part> {
    let content = prop_oneof![
        text().prop_map(Content::Text),
        vec(any::<u8>(), 0..9).prop_map(|bytes| Content::Raw(bytes.into())),
        text().prop_map(Content::Url),
        value().prop_map(Content::Data),
    ];
    (prop::option::weighted(0.9, content), metadata(), text(), text())
        .prop_map(|(content, metadata, filename, media_type)| v1::Part { content, metadata, filename, media_type })
}

pub(crate) fn message() -> impl Strategy<Value = v1::Message> {
    (text(), text(), 0..3, vec(part(), 0..3), metadata(), vec(text(), 0..3)).prop_map(
        |(message_id, context_id, role, parts, metadata, extensions)| v1::Message {
            message_id,
            context_id,
            role,
            parts,
            metadata,
            extensions,
            ..Default::default()
        },
    )
}

pub(crate) fn timestamp() -> impl Strategy<Value = Timestamp> {
    (-62_135_596_800_i64..=253_402_300_799, 0..1_000_000_000).prop_map(|(seconds, nanos)| Timestamp { seconds, nanos })
}

fn event() -> impl Strategy<Value = v1::StreamResponse> {
    let status = (0..9, prop::option::of(message()), prop::option::of(timestamp()))
        .prop_map(|(state, message, timestamp)| v1::TaskStatus { state, message, timestamp });
    let artifact = (text(), vec(part(), 0..3), metadata()).prop_map(|(name, parts, metadata)| v1::Artifact {
        name,
        parts,
        metadata,
        ..Default::default()
    });
    let task = (text(), prop::option::of(status), vec(artifact, 0..2), vec(message(), 0..2), metadata()).prop_map(
        |(id, status, artifacts, history, metadata)| v1::Task {
            id,
            status,
            artifacts,
            history,
            metadata,
            ..Default::default()
        },
    );
    prop_oneof![task.prop_map(Payload::Task), message().prop_map(Payload::Message)]
        .prop_map(|payload| v1::StreamResponse { payload: Some(payload) })
}

proptest! {
    #[test]
    fn messages_survive_json_and_protobuf(event in event()) {
        let text = json::to_string(&event).unwrap();
        prop_assert_eq!(&json::from_str::<v1::StreamResponse>(&text).unwrap(), &event);
        prop_assert_eq!(&json::from_slice::<v1::StreamResponse>(text.as_bytes()).unwrap(), &event);
        prop_assert_eq!(&json::from_value::<v1::StreamResponse>(json::to_value(&event).unwrap()).unwrap(), &event);
        prop_assert_eq!(&v1::StreamResponse::decode(&event.encode_to_vec()[..]).unwrap(), &event);
    }

    #[test]
    fn timestamps_survive_their_text(timestamp in timestamp()) {
        prop_assert_eq!(timestamp.to_string().parse(), Ok(timestamp));
        prop_assert_eq!(Timestamp::from_millis(timestamp.as_millis()).as_millis(), timestamp.as_millis());
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "[\\[\\]{}:,\"0-9a-zA-Z.+\\- \\\\]{0,60}") {
        // Accepted or refused, both are fine.
        json::from_str::<v1::SendMessageRequest>(&text).ok();
        json::from_str::<v1::Part>(&format!(r#"{{"data":{text}}}"#)).ok();
        text.parse::<Timestamp>().ok();
    }
}
