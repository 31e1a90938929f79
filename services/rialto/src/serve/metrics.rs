//! `/metrics`, for Prometheus.

use axum::{
    Router,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
    routing::get,
};
use rialto_runtime::telemetry;
use tracing::error;

pub(super) fn router() -> Router {
    Router::new().route("/metrics", get(async || metrics()))
}

fn metrics() -> Response {
    match telemetry::metrics_text() {
        Ok(text) => ([(header::CONTENT_TYPE, telemetry::METRICS_TYPE)], text).into_response(),
        Err(error) => {
            error!(error, "the metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
