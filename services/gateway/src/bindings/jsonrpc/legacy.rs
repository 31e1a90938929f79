//! The methods of protocol 0.3, over the operations of 1.0.

use std::mem;

use rialto_a2a::{
    Error, Kind, Result,
    v03::{self, Form, Method, Request},
};

use super::whole;
use crate::{bindings::Reply, call::Call, operations::Operations};

pub(super) async fn run(operations: &Operations, call: &Call, method: Method, params: &str, id: &str) -> Result<Reply> {
    let stream = |events| Ok(Reply::Stream(Box::new(events)));
    match Request::read(method, params)? {
        Request::SendMessage(request) => whole(id, &Form(&operations.send_message(call, request).await?)),
        Request::SendStreamingMessage(request) => stream(operations.send_streaming_message(call, request).await?),
        Request::GetTask(request) => whole(id, &Form(&operations.get_task(call, request).await?)),
        Request::CancelTask(request) => whole(id, &Form(&operations.cancel_task(call, request).await?)),
        Request::SubscribeToTask(request) => stream(operations.subscribe_to_task(call, request).await?),
        Request::CreatePushConfig(request) => whole(id, &Form(&operations.create_push_config(call, &request)?)),
        Request::GetPushConfig(request) => whole(id, &Form(&operations.get_push_config(call, &request)?)),
        Request::GetAnyPushConfig(request) => {
            let page = operations.list_push_configs(call, &request)?;
            whole(id, &Form(page.configs.first().ok_or(Kind::TaskNotFound)?))
        }
        Request::ListPushConfigs(mut request) => {
            // 0.3 has no pages here.
            let mut all = operations.list_push_configs(call, &request)?;
            while !all.next_page_token.is_empty() {
                request.page_token = mem::take(&mut all.next_page_token);
                let page = operations.list_push_configs(call, &request)?;
                all.configs.extend(page.configs);
                all.next_page_token = page.next_page_token;
            }
            whole(id, &Form(&all))
        }
        Request::DeletePushConfig(request) => {
            operations.delete_push_config(call, &request)?;
            whole(id, &())
        }
        Request::GetExtendedCard(request) => {
            let card = operations.get_extended_card(call, &request).map_err(|error| match error.kind {
                // To 0.3 it is all the same whether a card was announced.
                Kind::UnsupportedOperation => Error { kind: Kind::ExtendedAgentCardNotConfigured, ..error },
                _ => error,
            })?;
            whole(id, &v03::card(&card)?)
        }
    }
}
