//! The admin port: probes for everybody, everything else for the operator.

use std::{net::IpAddr, sync::Arc};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header, uri::Authority},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
};
use rialto_runtime::Secret;
use subtle::ConstantTimeEq as _;

use super::health::{self, Needs};
use crate::admin::Problem;

/// What the admin port serves. `guarded` is for the operator alone: with a token, whoever has it; without one,
/// whoever is on this machine.
pub(super) fn router(needs: Needs, token: Option<Secret>, guarded: impl IntoIterator<Item = Router>) -> Router {
    let guarded = guarded.into_iter().fold(Router::new(), Router::merge);
    // What there is and what not is for the operator as well.
    let guarded = guarded.fallback(|| async { Problem::new(StatusCode::NOT_FOUND, "there is no such page") });
    let guarded = guarded.layer(middleware::from_fn_with_state(Arc::new(token), only_operators));
    health::probes(needs).merge(guarded)
}

async fn only_operators(State(token): State<Arc<Option<Secret>>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    match &*token {
        Some(token) if has(headers, token) => next.run(request).await,
        Some(_) => {
            let problem = Problem::new(StatusCode::UNAUTHORIZED, "this needs `Authorization: Bearer <admin-token>`");
            ([(header::WWW_AUTHENTICATE, "Bearer")], problem).into_response()
        }
        None if is_of_a_page(headers) => {
            let detail = "the admin port is not for web pages; set an admin-token-file";
            Problem::new(StatusCode::FORBIDDEN, detail).into_response()
        }
        None => next.run(request).await,
    }
}

/// Whether the token is there. Takes the same time for every wrong one of a length.
fn has(headers: &HeaderMap, token: &Secret) -> bool {
    let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().split_at_checked(7));
    shown.is_some_and(|(scheme, shown)| {
        scheme.eq_ignore_ascii_case(b"bearer ") && bool::from(shown.ct_eq(token.expose().as_bytes()))
    })
}

/// Whether a page in a browser on this machine asks: it says where it is from, or calls us by a name of its own.
fn is_of_a_page(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()?.parse::<Authority>().ok());
    let by_name = host.is_some_and(|host| {
        let host = host.host();
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        host != "localhost" && address.parse::<IpAddr>().is_err()
    });
    by_name || headers.contains_key(header::ORIGIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn a_token_is_compared_whole() {
        let token = Secret::from("0123456789abcdef".to_owned());
        let shown = |value: &str| has(&headers(&[("authorization", value)]), &token);
        assert!(shown("Bearer 0123456789abcdef") && shown("bearer 0123456789abcdef"));
        for wrong in ["", "Bearer", "Bearer ", "Bearer 0123456789abcde", "Bearer 0123456789abcdefg", "0123456789abcdef"]
        {
            assert!(!shown(wrong), "{wrong}");
        }
        assert!(!has(&headers(&[]), &token));
    }

    #[test]
    fn a_page_in_a_browser_is_no_operator() {
        for host in ["127.0.0.1:8081", "localhost:8081", "[::1]:8081", "localhost"] {
            assert!(!is_of_a_page(&headers(&[("host", host)])), "{host}");
            assert!(is_of_a_page(&headers(&[("host", host), ("origin", "http://localhost")])), "{host}");
        }
        assert!(is_of_a_page(&headers(&[("host", "rebound.example:8081")])));
    }
}
