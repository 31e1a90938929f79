//! Tests of the store through its public face.

#![expect(clippy::unwrap_used, reason = "a panic is how tests fail, in their helpers as well")]
#![expect(clippy::disallowed_methods, reason = "tests wait for the tasks that they spawn")]

mod crash;
mod folder;
mod sqlite;
mod worker;
