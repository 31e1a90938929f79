//! The methods of protocol 1.0.

use rialto_a2a::{Result, json as protojson, v1::ListTasksRequest};
use serde::de::DeserializeOwned;

use super::whole;
use crate::{
    bindings::{Reply, rest::Page},
    call::Call,
    operations::Operations,
};

/// The operations by their names on this wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    SendMessage,
    SendStreamingMessage,
    GetTask,
    ListTasks,
    CancelTask,
    SubscribeToTask,
    CreatePushConfig,
    GetPushConfig,
    ListPushConfigs,
    DeletePushConfig,
    GetExtendedCard,
}

const NAMES: [(&str, Method); 11] = [
    ("SendMessage", Method::SendMessage),
    ("SendStreamingMessage", Method::SendStreamingMessage),
    ("GetTask", Method::GetTask),
    ("ListTasks", Method::ListTasks),
    ("CancelTask", Method::CancelTask),
    ("SubscribeToTask", Method::SubscribeToTask),
    ("CreateTaskPushNotificationConfig", Method::CreatePushConfig),
    ("GetTaskPushNotificationConfig", Method::GetPushConfig),
    ("ListTaskPushNotificationConfigs", Method::ListPushConfigs),
    ("DeleteTaskPushNotificationConfig", Method::DeletePushConfig),
    ("GetExtendedAgentCard", Method::GetExtendedCard),
];

impl Method {
    pub(super) fn parse(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, method)| *method)
    }

    pub(super) fn name(self) -> &'static str {
        NAMES.iter().find(|(_, known)| *known == self).map_or("", |(name, _)| *name)
    }
}

pub(super) async fn run(operations: &Operations, call: &Call, method: Method, params: &str, id: &str) -> Result<Reply> {
    fn read<T: DeserializeOwned>(params: &str) -> Result<T> {
        protojson::from_str(params)
    }
    let stream = |events| Ok(Reply::Stream(Box::new(events)));
    match method {
        Method::SendMessage => whole(id, &operations.send_message(call, read(params)?).await?),
        Method::SendStreamingMessage => stream(operations.send_streaming_message(call, read(params)?).await?),
        Method::GetTask => whole(id, &operations.get_task(call, read(params)?).await?),
        Method::ListTasks => {
            let request: ListTasksRequest = read(params)?;
            let include_artifacts = request.include_artifacts();
            let page = operations.list_tasks(call, request).await?;
            whole(id, &Page { page: &page, include_artifacts })
        }
        Method::CancelTask => whole(id, &operations.cancel_task(call, read(params)?).await?),
        Method::SubscribeToTask => stream(operations.subscribe_to_task(call, read(params)?).await?),
        Method::CreatePushConfig => whole(id, &operations.create_push_config(call, &read(params)?)?),
        Method::GetPushConfig => whole(id, &operations.get_push_config(call, &read(params)?)?),
        Method::ListPushConfigs => whole(id, &operations.list_push_configs(call, &read(params)?)?),
        Method::DeletePushConfig => {
            operations.delete_push_config(call, &read(params)?)?;
            whole(id, &())
        }
        Method::GetExtendedCard => whole(id, &operations.get_extended_card(call, &read(params)?)?),
    }
}
