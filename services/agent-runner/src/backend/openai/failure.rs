//! Attempts that gave no answer: what the caller is told, and whether another try may help.

use std::time::Duration;

use reqwest::{Response, header::HeaderMap};
use rialto_runtime::Secret;
use serde_json::Value;
use tokio::time::timeout;

use super::super::End;

/// How much of an error's body is read, and how much of it is logged.
const MAX_BODY: usize = 8 << 10;
const MAX_LOGGED: usize = 1 << 10;
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// Why an attempt gave no answer.
#[derive(Debug)]
pub(super) struct Failure {
    /// How the turn ends, if this was the last attempt. Callers see its reason: no word of the endpoint is in it.
    pub end: End,
    /// What happened, for the trace: an HTTP status, or a word.
    pub kind: String,
    /// What happened, for the log.
    pub detail: String,
    /// Another attempt may do better.
    pub transient: bool,
    /// The endpoint asks for this pause.
    pub retry_after: Option<Duration>,
}

impl Failure {
    pub(super) fn transient(kind: &str, reason: &str, detail: impl Into<String>) -> Self {
        let end = End::Failed(reason.to_owned());
        Self { end, kind: kind.to_owned(), detail: detail.into(), transient: true, retry_after: None }
    }

    pub(super) fn lasting(kind: &str, reason: &str, detail: impl Into<String>) -> Self {
        Self { transient: false, ..Self::transient(kind, reason, detail) }
    }

    /// The connection failed; `reqwest` must not get to say the URL.
    pub(super) fn connection(reason: &str, error: reqwest::Error) -> Self {
        let error = error.without_url();
        let mut detail = error.to_string();
        let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&error);
        while let Some(error) = cause {
            detail = format!("{detail}: {error}");
            cause = error.source();
        }
        Self::transient("connection", reason, detail)
    }

    /// The endpoint answered with another status than success.
    pub(super) async fn refused(mut response: Response, key: Option<&Secret>) -> Self {
        let status = response.status();
        let retry_after = retry_after(response.headers());
        let mut body = Vec::new();
        let read = async {
            while body.len() < MAX_BODY
                && let Ok(Some(bytes)) = response.chunk().await
            {
                let room = MAX_BODY - body.len();
                body.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
        };
        // The status says enough, should the rest not come.
        timeout(BODY_TIMEOUT, read).await.ok();
        let error = serde_json::from_slice::<Value>(&body).ok().map(|mut body| body["error"].take());
        let detail = loggable(&body, key);
        Self { retry_after, ..Self::judged(Some(status.as_u16()), error.as_ref(), detail) }
    }

    /// The endpoint says in the place of an answer, or in the middle of it, that there will be none.
    pub(super) fn reported(error: &Value, key: Option<&Secret>) -> Self {
        let detail = loggable(error.to_string().as_bytes(), key);
        let status = error["code"].as_u64().and_then(|code| u16::try_from(code).ok());
        Self::judged(status.filter(|status| (400..600).contains(status)), Some(error), detail)
    }

    fn judged(status: Option<u16>, error: Option<&Value>, detail: String) -> Self {
        let code = error.and_then(|error| error["code"].as_str()).unwrap_or_default();
        let kind = status.map_or_else(|| "error".to_owned(), |status| status.to_string());
        match (code, status) {
            ("content_filter" | "content_policy_violation", _) => {
                Self { end: filtered(), ..Self::lasting(&kind, "", detail) }
            }
            ("context_length_exceeded", _) => {
                Self::lasting(&kind, "the conversation is too long for the model", detail)
            }
            ("insufficient_quota", _) => Self::lasting(&kind, "the model endpoint's quota is used up", detail),
            (_, None) => Self::transient(&kind, "the model endpoint reported an error", detail),
            (_, Some(429)) => Self::transient(&kind, "the model endpoint is busy (HTTP 429)", detail),
            (_, Some(status @ (408 | 425 | 500..))) => {
                Self::transient(&kind, &format!("the model endpoint failed (HTTP {status})"), detail)
            }
            (_, Some(status)) => {
                Self::lasting(&kind, &format!("the model endpoint refused the request (HTTP {status})"), detail)
            }
        }
    }
}

/// The endpoint does not let the model answer this.
pub(super) fn filtered() -> End {
    End::Rejected("the model endpoint's content filter does not allow an answer".to_owned())
}

/// Pauses that an endpoint asks for are seconds, or milliseconds in a header of their own. A date is not read:
/// the pause is then the usual one.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let number = |name: &str| headers.get(name)?.to_str().ok()?.trim().parse::<f64>().ok();
    let seconds = number("retry-after-ms").map(|millis| millis / 1000.0).or_else(|| number("retry-after"))?;
    // What no duration can be: less than nothing, or more than there is.
    Duration::try_from_secs_f64(seconds).ok()
}

/// The beginning of a text from outside, without the key, which some endpoints repeat.
fn loggable(body: &[u8], key: Option<&Secret>) -> String {
    let mut text = String::from_utf8_lossy(body).into_owned();
    if let Some(key) = key.map(Secret::expose).filter(|key| !key.is_empty()) {
        text = text.replace(key, "(secret)");
        if body.len() >= MAX_BODY {
            // Half a key may be at the end.
            text.truncate(text.floor_char_boundary(text.len().saturating_sub(key.len())));
        }
    }
    text.truncate(text.floor_char_boundary(MAX_LOGGED));
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn judged(status: u16, code: &str) -> (End, bool) {
        let failure = Failure::judged(Some(status), Some(&json!({"code": code})), String::new());
        (failure.end, failure.transient)
    }

    #[test]
    fn what_may_pass_is_tried_again() {
        for status in [408, 425, 429, 500, 502, 503, 504, 529] {
            assert!(judged(status, "").1, "{status}");
        }
        for status in [301, 400, 401, 403, 404, 422] {
            assert!(!judged(status, "").1, "{status}");
        }
        assert_eq!(
            judged(429, "insufficient_quota"),
            (End::Failed("the model endpoint's quota is used up".to_owned()), false)
        );
        let long = End::Failed("the conversation is too long for the model".to_owned());
        assert_eq!(judged(400, "context_length_exceeded"), (long, false));
        assert_eq!(judged(400, "content_filter"), (filtered(), false));
    }

    #[test]
    fn an_error_in_a_stream_is_judged_by_its_code() {
        let reported = |error: Value| {
            let failure = Failure::reported(&error, None);
            (failure.end, failure.transient)
        };
        let some = || End::Failed("the model endpoint reported an error".to_owned());
        assert_eq!(reported(json!({"message": "overloaded"})), (some(), true));
        assert_eq!(reported(json!("overloaded")), (some(), true));
        assert_eq!(reported(json!({"code": "server_error"})), (some(), true));
        assert_eq!(reported(json!({"code": "content_filter"})), (filtered(), false));
        assert!(!reported(json!({"code": 400})).1);
        assert_eq!(
            reported(json!({"code": 502})),
            (End::Failed("the model endpoint failed (HTTP 502)".to_owned()), true)
        );
    }

    #[test]
    fn only_a_sensible_pause_is_waited_for() {
        let after = |name: &'static str, value: &str| {
            retry_after(&[(name.parse().unwrap(), value.parse().unwrap())].into_iter().collect())
        };
        assert_eq!(after("retry-after", "3"), Some(Duration::from_secs(3)));
        assert_eq!(after("retry-after-ms", "250"), Some(Duration::from_millis(250)));
        for value in ["-1", "NaN", "inf", "1e300", "", "Wed, 21 Oct 2026 07:28:00 GMT"] {
            assert_eq!(after("retry-after", value), None, "{value:?}");
        }
    }

    #[test]
    fn the_key_is_in_no_log_not_even_half_of_it() {
        let key = "sk-0123456789abcdef".repeat(10);
        let secret = Some(&Secret::from(key.clone()));
        assert_eq!(loggable(format!("wrong key: {key}!").as_bytes(), secret), "wrong key: (secret)!");
        for shift in 0..key.len() {
            let echoed = format!("{}{}", "y".repeat(shift), key.repeat(100));
            let text = loggable(&echoed.as_bytes()[..MAX_BODY], secret);
            assert!(text.len() <= MAX_LOGGED && !text.contains("0123"), "{shift}: {text}");
        }
    }
}
