//! The table: every message, and every field of it that can be wrong. A test holds it against the descriptor.
//!
//! A bare field is checked if it is set. `[required]` must be set, `[present]` is REQUIRED in the proto but may be
//! empty, `[one of ..]` is a oneof that must have a member, `[enum E]` holds a known number, `[a..=b]` an integer that is
//! in range if set.

use super::checks::{Check, Faults, Require, fill_field};
use crate::v1;

macro_rules! rules {
    ($($message:ident { $($field:ident $([$($rule:tt)+])?),* $(,)? })*) => {
        $(
            impl Check for v1::$message {
                fn check<'m>(&'m self, _faults: &mut Faults<'m>) {
                    $(check!(_faults, self, $field $(, $($rule)+)?);)*
                }

                fn fill(&self, _json: &mut serde_json::Value) {
                    $(fill!(_json, self, $field $(, $($rule)+)?);)*
                }
            }
        )*

        /// The table as data: message, field, whether it is REQUIRED.
        #[cfg(test)]
        pub(super) const TABLE: &[(&str, &[(&str, bool)])] = &[
            $((stringify!($message), &[$((stringify!($field), is_required!($($($rule)+)?))),*])),*
        ];
    };
}

macro_rules! check {
    ($faults:ident, $self:ident, $field:ident) => {
        $faults.at(stringify!($field), |faults| $self.$field.check(faults))
    };
    ($faults:ident, $self:ident, $field:ident, present) => {
        check!($faults, $self, $field)
    };
    ($faults:ident, $self:ident, $field:ident, required) => {
        $faults.at(stringify!($field), |faults| $self.$field.require(faults))
    };
    ($faults:ident, $self:ident, $field:ident, one of $members:literal) => {
        match &$self.$field {
            Some(member) => member.check($faults),
            None => $faults.note(concat!("needs exactly one of ", $members)),
        }
    };
    ($faults:ident, $self:ident, $field:ident, enum $name:ident) => {
        $faults.at(stringify!($field), |faults| faults.known::<v1::$name>($self.$field, stringify!($name), false))
    };
    ($faults:ident, $self:ident, $field:ident, required enum $name:ident) => {
        $faults.at(stringify!($field), |faults| faults.known::<v1::$name>($self.$field, stringify!($name), true))
    };
    ($faults:ident, $self:ident, $field:ident, present $range:expr) => {
        check!($faults, $self, $field, $range)
    };
    ($faults:ident, $self:ident, $field:ident, $range:expr) => {
        $faults.at(stringify!($field), |faults| faults.within($self.$field.into(), &$range))
    };
}

macro_rules! fill {
    ($json:ident, $self:ident, $field:ident) => {
        fill_field($json, stringify!($field), &$self.$field, None)
    };
    ($json:ident, $self:ident, $field:ident, present) => {
        fill!($json, $self, $field, required)
    };
    ($json:ident, $self:ident, $field:ident, required) => {
        fill_field($json, stringify!($field), &$self.$field, Some(empty(&$self.$field)))
    };
    ($json:ident, $self:ident, $field:ident, one of $members:literal) => {
        $self.$field.fill($json)
    };
    ($json:ident, $self:ident, $field:ident, $($scalar:tt)+) => {
        ()
    };
}

#[cfg(test)]
macro_rules! is_required {
    (required $($enum:tt)*) => {
        true
    };
    (present $($range:tt)*) => {
        true
    };
    ($($other:tt)*) => {
        false
    };
}

/// The members of oneofs that can be wrong.
macro_rules! members {
    ($($module:ident::$oneof:ident { $($member:ident $field:literal),* })*) => {$(
        impl Check for v1::$module::$oneof {
            fn check<'m>(&'m self, faults: &mut Faults<'m>) {
                $(if let Self::$member(member) = self {
                    faults.at($field, |faults| member.check(faults));
                })*
            }

            fn fill(&self, json: &mut serde_json::Value) {
                $(if let Self::$member(member) = self {
                    fill_field(json, $field, member, None);
                })*
            }
        }
    )*};
}

fn empty<T: Require>(_field: &T) -> serde_json::Value {
    T::empty()
}

rules! {
    // Requests.
    SendMessageRequest { message [required], configuration, metadata }
    SendMessageConfiguration { task_push_notification_config, history_length [0..=i32::MAX] }
    GetTaskRequest { id [required], history_length [0..=i32::MAX] }
    ListTasksRequest {
        status [enum TaskState],
        page_size [1..=100],
        history_length [0..=i32::MAX],
        status_timestamp_after,
    }
    CancelTaskRequest { id [required], metadata }
    SubscribeToTaskRequest { id [required] }
    TaskPushNotificationConfig { url [required], authentication }
    AuthenticationInfo { scheme [required] }
    GetTaskPushNotificationConfigRequest { task_id [required], id [required] }
    DeleteTaskPushNotificationConfigRequest { task_id [required], id [required] }
    ListTaskPushNotificationConfigsRequest { task_id [required], page_size [0..=i32::MAX] }
    GetExtendedAgentCardRequest {}

    // Tasks.
    Message { message_id [required], role [required enum Role], parts [required], metadata }
    Part { content [one of "text, raw, url and data"], metadata }
    Task { id [required], status [required], artifacts, history, metadata }
    TaskStatus { state [required enum TaskState], message, timestamp }
    Artifact { artifact_id [required], parts [required], metadata }
    TaskStatusUpdateEvent { task_id [required], context_id [required], status [required], metadata }
    TaskArtifactUpdateEvent { task_id [required], context_id [required], artifact [required], metadata }

    // Responses. A page may be empty.
    SendMessageResponse { payload [one of "task and message"] }
    StreamResponse { payload [one of "task, message, statusUpdate and artifactUpdate"] }
    ListTasksResponse {
        tasks [present],
        next_page_token [present],
        page_size [present 0..=i32::MAX],
        total_size [present 0..=i32::MAX],
    }
    ListTaskPushNotificationConfigsResponse { configs }

    // Cards.
    AgentCard {
        name [required],
        description [required],
        supported_interfaces [required],
        provider,
        version [required],
        capabilities [required],
        security_schemes,
        security_requirements,
        default_input_modes [required],
        default_output_modes [required],
        skills [required],
        signatures,
    }
    AgentInterface { url [required], protocol_binding [required], protocol_version [required] }
    AgentProvider { url [required], organization [required] }
    AgentCapabilities { extensions }
    AgentExtension { params }
    AgentSkill { id [required], name [required], description [required], tags [required], security_requirements }
    AgentCardSignature { protected [required], signature [required], header }
    StringList {}
    SecurityRequirement { schemes }
    SecurityScheme { scheme [one of "the five security schemes"] }
    ApiKeySecurityScheme { location [required], name [required] }
    HttpAuthSecurityScheme { scheme [required] }
    OAuth2SecurityScheme { flows [required] }
    OpenIdConnectSecurityScheme { open_id_connect_url [required] }
    MutualTlsSecurityScheme {}
    OAuthFlows { flow [one of "the five OAuth flows"] }
    AuthorizationCodeOAuthFlow { authorization_url [required], token_url [required], scopes [present] }
    ClientCredentialsOAuthFlow { token_url [required], scopes [present] }
    ImplicitOAuthFlow {}
    PasswordOAuthFlow {}
    DeviceCodeOAuthFlow { device_authorization_url [required], token_url [required], scopes [present] }
}

members! {
    part::Content { Data "data" }
    send_message_response::Payload { Task "task", Message "message" }
    stream_response::Payload {
        Task "task", Message "message", StatusUpdate "status_update", ArtifactUpdate "artifact_update"
    }
    security_scheme::Scheme {
        ApiKeySecurityScheme "api_key_security_scheme",
        HttpAuthSecurityScheme "http_auth_security_scheme",
        Oauth2SecurityScheme "oauth2_security_scheme",
        OpenIdConnectSecurityScheme "open_id_connect_security_scheme"
    }
    o_auth_flows::Flow {
        AuthorizationCode "authorization_code",
        ClientCredentials "client_credentials",
        DeviceCode "device_code"
    }
}
