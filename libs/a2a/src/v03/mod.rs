//! Protocol 0.3 for clients that speak nothing newer: their requests as the 1.0 ones, our answers in their shapes.
//!
//! Only the JSON-RPC forms. A method name belongs to one version ([`Method::parse`]), so both are served on one URL.
//! [`Request::read`] gives what the 1.0 operations take; [`Form`], [`Event`], [`card`] and [`error`] write what they
//! answer, straight from the 1.0 types. [`read_event`] is the way back, for answers of a 0.3 agent.
//!
//! What 0.3 cannot say is lost on the way there: `filename` and `mediaType` of text and data parts, tenants, the
//! device code flow, and that a role was not set (it is written as `agent`). Data that is no object is wrapped in
//! `{"value": …}` and flagged by `data_part_compat` in the part's metadata, as the official SDK does, and unwrapped
//! here; metadata that held only the flag then comes back as none, and a list of [`json::MAX_DEPTH`] levels has become
//! one too deep to read. What 1.0 cannot say is lost on the way here: all but the first of a webhook's authentication
//! schemes, `final`, and the metadata of requests other than sending and canceling.

mod card;
mod read;
mod words;
mod write;

use serde_json::Value;

pub use self::{
    card::card,
    read::read_event,
    write::{Event, Form},
};
use crate::{
    error::{Error, Kind, Result, Violation},
    json, v1,
    validate::Validate,
};

/// The header in which 0.3 clients name extensions, and in which they are told of the activated ones.
pub const EXTENSIONS_HEADER: &str = "x-a2a-extensions";

/// Marks a data part whose `data` was wrapped in an object.
const WRAPPED: &str = "data_part_compat";
/// The member that holds what was wrapped.
const WRAPPED_VALUE: &str = "value";

/// The methods of 0.3. There is no way to list tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// `message/send`.
    SendMessage,
    /// `message/stream`.
    SendStreamingMessage,
    /// `tasks/get`.
    GetTask,
    /// `tasks/cancel`.
    CancelTask,
    /// `tasks/resubscribe`.
    SubscribeToTask,
    /// `tasks/pushNotificationConfig/set`.
    CreatePushConfig,
    /// `tasks/pushNotificationConfig/get`.
    GetPushConfig,
    /// `tasks/pushNotificationConfig/list`.
    ListPushConfigs,
    /// `tasks/pushNotificationConfig/delete`.
    DeletePushConfig,
    /// `agent/getAuthenticatedExtendedCard`.
    GetExtendedCard,
}

impl Method {
    /// Every method.
    pub const ALL: [Self; 10] = [
        Self::SendMessage,
        Self::SendStreamingMessage,
        Self::GetTask,
        Self::CancelTask,
        Self::SubscribeToTask,
        Self::CreatePushConfig,
        Self::GetPushConfig,
        Self::ListPushConfigs,
        Self::DeletePushConfig,
        Self::GetExtendedCard,
    ];

    /// The method of this name; none of the 1.0 names is among them.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.names().0 == name)
    }

    /// The `method` of a 0.3 request.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.names().0
    }

    /// The name of the 1.0 operation that does the same.
    #[must_use]
    pub const fn operation(self) -> &'static str {
        self.names().1
    }

    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::SendMessage => ("message/send", "SendMessage"),
            Self::SendStreamingMessage => ("message/stream", "SendStreamingMessage"),
            Self::GetTask => ("tasks/get", "GetTask"),
            Self::CancelTask => ("tasks/cancel", "CancelTask"),
            Self::SubscribeToTask => ("tasks/resubscribe", "SubscribeToTask"),
            Self::CreatePushConfig => ("tasks/pushNotificationConfig/set", "CreateTaskPushNotificationConfig"),
            Self::GetPushConfig => ("tasks/pushNotificationConfig/get", "GetTaskPushNotificationConfig"),
            Self::ListPushConfigs => ("tasks/pushNotificationConfig/list", "ListTaskPushNotificationConfigs"),
            Self::DeletePushConfig => ("tasks/pushNotificationConfig/delete", "DeleteTaskPushNotificationConfig"),
            Self::GetExtendedCard => ("agent/getAuthenticatedExtendedCard", "GetExtendedAgentCard"),
        }
    }
}

/// A request of a 0.3 client, as the 1.0 operations take it. It names no tenant.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Answer with [`Form`] of the response.
    SendMessage(v1::SendMessageRequest),
    /// Answer with [`Event`]s.
    SendStreamingMessage(v1::SendMessageRequest),
    /// Answer with [`Form`] of the task.
    GetTask(v1::GetTaskRequest),
    /// Answer with [`Form`] of the task.
    CancelTask(v1::CancelTaskRequest),
    /// Answer with [`Event`]s.
    SubscribeToTask(v1::SubscribeToTaskRequest),
    /// Answer with [`Form`] of the config.
    CreatePushConfig(v1::TaskPushNotificationConfig),
    /// Answer with [`Form`] of the config.
    GetPushConfig(v1::GetTaskPushNotificationConfigRequest),
    /// `tasks/pushNotificationConfig/get` that names no config: list one, and answer with [`Form`] of that one.
    GetAnyPushConfig(v1::ListTaskPushNotificationConfigsRequest),
    /// Answer with [`Form`] of all pages in one response.
    ListPushConfigs(v1::ListTaskPushNotificationConfigsRequest),
    /// Answer with `null`.
    DeletePushConfig(v1::DeleteTaskPushNotificationConfigRequest),
    /// Answer with [`card`].
    GetExtendedCard(v1::GetExtendedAgentCardRequest),
}

impl Request {
    /// Reads the `params` of a request, an object's text, and validates the request.
    ///
    /// # Errors
    /// [`Kind::InvalidParams`] that names the fields as 0.3 does; [`Kind::Parse`] when this is not JSON.
    pub fn read(method: Method, params: &str) -> Result<Self> {
        const CONFIG: &[(&str, &str)] = &[
            ("url", "pushNotificationConfig.url"),
            ("authentication.scheme", "pushNotificationConfig.authentication.schemes"),
        ];
        const IDS: &[(&str, &str)] = &[("taskId", "id"), ("id", "pushNotificationConfigId")];

        Ok(match method {
            Method::SendMessage => Self::SendMessage(send(params)?),
            Method::SendStreamingMessage => Self::SendStreamingMessage(send(params)?),
            Method::GetTask => Self::GetTask(valid(task(params)?.into(), &[])?),
            Method::CancelTask => Self::CancelTask(valid(task(params)?.into(), &[])?),
            Method::SubscribeToTask => Self::SubscribeToTask(valid(task(params)?.into(), &[])?),
            Method::CreatePushConfig => {
                let config: v1::TaskPushNotificationConfig = json::from_str::<read::SetPushConfig>(params)?.into();
                if config.task_id.is_empty() {
                    return Err(Error::invalid("taskId", "is required"));
                }
                Self::CreatePushConfig(valid(config, CONFIG)?)
            }
            Method::GetPushConfig => {
                let params = task(params)?;
                match params.names_config() {
                    true => Self::GetPushConfig(valid(params.into(), IDS)?),
                    false => Self::GetAnyPushConfig(v1::ListTaskPushNotificationConfigsRequest {
                        page_size: 1,
                        ..valid(params.into(), IDS)?
                    }),
                }
            }
            Method::ListPushConfigs => Self::ListPushConfigs(valid(task(params)?.into(), IDS)?),
            Method::DeletePushConfig => Self::DeletePushConfig(valid(task(params)?.into(), IDS)?),
            Method::GetExtendedCard => Self::GetExtendedCard(v1::GetExtendedAgentCardRequest::default()),
        })
    }
}

fn send(params: &str) -> Result<v1::SendMessageRequest> {
    const NAMES: &[(&str, &str)] = &[
        (
            "configuration.taskPushNotificationConfig.authentication.scheme",
            "configuration.pushNotificationConfig.authentication.schemes",
        ),
        ("configuration.taskPushNotificationConfig", "configuration.pushNotificationConfig"),
    ];
    valid(json::from_str::<read::Send>(params)?.into(), NAMES)
}

fn task(params: &str) -> Result<read::TaskParams> {
    json::from_str(params)
}

/// The request, if it is complete; else what is wrong, in the names that 0.3 has for what 1.0 calls otherwise.
fn valid<T: Validate>(request: T, names: &[(&str, &str)]) -> Result<T> {
    let rename = |Violation { field, description }| {
        let renamed = names.iter().find_map(|(new, old)| match field.strip_prefix(new)? {
            rest if rest.is_empty() || rest.starts_with(['.', '[']) => Some(format!("{old}{rest}")),
            _ => None,
        });
        Violation { field: renamed.unwrap_or(field), description }
    };
    match request.validate() {
        Ok(()) => Ok(request),
        Err(error) => Err(Error::from_violations(error.violations.into_iter().map(rename).collect())),
    }
}

/// The `error` member of a JSON-RPC response. 0.3 leaves `data` free-form and its SDKs send none; the message says it
/// all. The two codes that 0.3 does not know are internal errors to its clients, as with the official SDK.
#[must_use]
pub fn error(error: &Error) -> Value {
    let mut json = error.to_jsonrpc();
    if let Value::Object(members) = &mut json {
        members.remove("data");
        if matches!(error.kind, Kind::ExtensionSupportRequired | Kind::VersionNotSupported) {
            members.insert("code".to_owned(), Kind::Internal.wire().jsonrpc.into());
        }
    }
    json
}
