//! Tests of the store through its public face.

mod sqlite;
mod worker;
