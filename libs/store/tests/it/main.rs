//! Tests of the store through its public face.

mod smoke;
