//! The A2A protocol as Rust types: what every room says to every other one.
//!
//! This crate owns the generated messages of `lf.a2a.v1` ([`v1`]), their ProtoJSON ([`json`]), what makes a
//! message valid ([`validate`]), the one error taxonomy with its form on each wire ([`error`]), and the task
//! state machine ([`state`]). It is pure: no tokio, no I/O, no clock, no configuration, and nothing about how
//! a request arrives or where a task is kept.

pub mod error;
pub mod json;
pub mod state;
mod text;
pub mod v03;
pub mod validate;
mod wire;
pub mod wkt;

pub use error::{Error, Kind, Result, Violation};

/// The generated messages of package `lf.a2a.v1`.
///
/// Their serde implementations are for [`json`] only: used alone they miss ProtoJSON's rules for `null`.
#[expect(clippy::all, clippy::allow_attributes, reason = "generated")]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/lf.a2a.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/lf.a2a.v1.serde.rs"));
}

/// The encoded `google.protobuf.FileDescriptorSet` of `a2a.proto` and its imports, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/a2a.bin"));

impl From<v1::part::Content> for v1::Part {
    fn from(content: v1::part::Content) -> Self {
        Self { content: Some(content), ..Self::default() }
    }
}

impl v1::Part {
    /// A part that is text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        v1::part::Content::Text(text.into()).into()
    }

    /// A part that is JSON.
    #[must_use]
    pub fn data(value: impl Into<wkt::Value>) -> Self {
        v1::part::Content::Data(value.into()).into()
    }
}
