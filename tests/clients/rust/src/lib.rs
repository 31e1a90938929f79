//! Nothing lives here: see `tests/`.
