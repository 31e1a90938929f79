//! The admin API as the command line calls it.

use std::{path::Path, time::Duration};

use reqwest::{Method, Response, StatusCode};
use rialto_runtime::Secret;
use serde::de::DeserializeOwned;
use url::Url;

use super::api::Problem;
use crate::client::{cause, connector};

/// Longer than whoever answers waits for task-store.
const PATIENCE: Duration = Duration::from_secs(30);

/// The largest answer that is read.
const MAX_ANSWER: usize = 64 << 20;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// An argument is wrong.
    Usage(String),
    /// There is no such thing, or it cannot be done to it.
    Refused(String),
    /// Nobody answers, or not as an admin port does.
    Unusable(String),
}

/// An admin port.
#[derive(Debug)]
pub(super) struct Client {
    http: reqwest::Client,
    base: Url,
    token: Option<Secret>,
}

impl Client {
    pub(super) fn new(base: Url, token: Option<Secret>) -> Result<Self, Failure> {
        let http = connector(&base).map_err(|error| Failure::Unusable(error.to_string()))?;
        Ok(Self { http, base, token })
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: &[&str], query: &[(&str, String)]) -> Result<T, Failure> {
        self.call(Method::GET, path, query, None).await
    }

    pub(super) async fn post<T: DeserializeOwned>(&self, path: &[&str], body: Option<String>) -> Result<T, Failure> {
        self.call(Method::POST, path, &[], body).await
    }

    pub(super) async fn delete<T: DeserializeOwned>(
        &self,
        path: &[&str],
        query: &[(&str, String)],
    ) -> Result<T, Failure> {
        self.call(Method::DELETE, path, query, None).await
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<String>,
    ) -> Result<T, Failure> {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(["admin", "v1"]).extend(path);
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut request = self.http.request(method, url).timeout(PATIENCE);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token.expose());
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let response = request.send().await.map_err(|error| self.lost(&error))?;
        let status = response.status();
        let body = self.read(response).await?;
        if status.is_success() {
            return serde_json::from_slice(&body).map_err(|error| self.strange(&error.to_string()));
        }
        let problem: Option<Problem> = serde_json::from_slice(&body).ok();
        Err(match (status, problem) {
            (StatusCode::UNAUTHORIZED, _) => Failure::Unusable(match self.token {
                Some(_) => format!("{} does not take this token", self.name()),
                None => format!("{} asks for a token; name the file that has it with --token-file", self.name()),
            }),
            // What only the server can judge are options, by the same names.
            (StatusCode::BAD_REQUEST, Some(problem)) => Failure::Usage(match problem.field {
                Some(_) => format!("--{}", problem.detail),
                None => problem.detail,
            }),
            (StatusCode::NOT_FOUND | StatusCode::CONFLICT, Some(problem)) => Failure::Refused(problem.detail),
            (_, Some(problem)) => Failure::Unusable(format!("{}: {}", self.name(), problem.detail)),
            (status, None) => self.strange(&status.to_string()),
        })
    }

    async fn read(&self, mut response: Response) -> Result<Vec<u8>, Failure> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.lost(&error))? {
            if body.len() + chunk.len() > MAX_ANSWER {
                return Err(self.strange("an endless answer"));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    /// As people write it.
    fn name(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    fn lost(&self, error: &reqwest::Error) -> Failure {
        let what = match error {
            error if error.is_timeout() => {
                return Failure::Unusable(format!("{} gives no answer in time", self.name()));
            }
            error if error.is_connect() => "cannot reach",
            _ => "lost the connection to",
        };
        Failure::Unusable(format!("{what} {}: {}", self.name(), cause(error)))
    }

    fn strange(&self, what: &str) -> Failure {
        Failure::Unusable(format!("{} does not answer as an admin port does ({what}); see --admin-url", self.name()))
    }
}

/// Reads a token from its file.
pub(super) fn read_token(file: &Path) -> Result<Secret, Failure> {
    let read = std::fs::read_to_string(file);
    let token = read.map_err(|error| Failure::Unusable(format!("cannot read {}: {error}", file.display())))?;
    let token = token.trim();
    match token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Err(Failure::Unusable(format!("{} holds no token: one line of visible characters", file.display()))),
        false => Ok(Secret::from(token.to_owned())),
    }
}
