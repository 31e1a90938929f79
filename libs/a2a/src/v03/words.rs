//! The closed lists of words, which 0.3 writes in lower case.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserializer,
    de::{Error, Unexpected, Visitor},
};

use crate::v1;

/// A type whose values are words.
pub(super) trait Word: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];

    fn word(self) -> Option<&'static str> {
        Self::WORDS.iter().find(|(_, value)| *value == self).map(|(word, _)| *word)
    }
}

impl Word for v1::Role {
    const WORDS: &'static [(&'static str, Self)] = &[("user", Self::User), ("agent", Self::Agent)];
}

impl Word for v1::TaskState {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("submitted", Self::Submitted),
        ("working", Self::Working),
        ("input-required", Self::InputRequired),
        ("completed", Self::Completed),
        ("canceled", Self::Canceled),
        ("failed", Self::Failed),
        ("rejected", Self::Rejected),
        ("auth-required", Self::AuthRequired),
        ("unknown", Self::Unspecified),
    ];
}

/// The `kind` of a part.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum PartKind {
    Text,
    File,
    Data,
}

impl Word for PartKind {
    const WORDS: &'static [(&'static str, Self)] = &[("text", Self::Text), ("file", Self::File), ("data", Self::Data)];
}

/// The `kind` of a message where nothing else can stand.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct IsMessage;

impl Word for IsMessage {
    const WORDS: &'static [(&'static str, Self)] = &[("message", Self)];
}

/// The `kind` of what a stream brings.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum EventKind {
    Task,
    Message,
    StatusUpdate,
    ArtifactUpdate,
}

impl Word for EventKind {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("task", Self::Task),
        ("message", Self::Message),
        ("status-update", Self::StatusUpdate),
        ("artifact-update", Self::ArtifactUpdate),
    ];
}

/// Reads a word; an empty one is none.
pub(super) fn word<'de, W: Word, D: Deserializer<'de>>(deserializer: D) -> Result<Option<W>, D::Error> {
    struct Words<W>(PhantomData<W>);

    impl<W: Word> Visitor<'_> for Words<W> {
        type Value = Option<W>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            for (index, (word, _)) in W::WORDS.iter().enumerate() {
                let before = match index {
                    0 => "",
                    last if last + 1 == W::WORDS.len() => " or ",
                    _ => ", ",
                };
                write!(f, "{before}{word:?}")?;
            }
            Ok(())
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Option<W>, E> {
            match W::WORDS.iter().find(|(word, _)| *word == text) {
                Some((_, value)) => Ok(Some(*value)),
                None if text.is_empty() => Ok(None),
                None => Err(E::invalid_value(Unexpected::Str(text), &self)),
            }
        }
    }

    deserializer.deserialize_str(Words(PhantomData))
}
