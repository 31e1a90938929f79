//! Everything about one task.

use rialto_a2a::{
    Error,
    wkt::{Value, value::Kind as ValueKind},
};
use rialto_rpc::tasks::{AgentRef, ArtifactFacts, InspectRequest, TaskFacts, TurnFacts, WaitingFacts};

use super::{crew::Crew, no_task, unsigned};
use crate::{
    Inner,
    cancel::hex,
    keys::TaskId,
    read::Shape,
    stored::{Head, Phase},
};

impl Inner {
    pub(super) async fn inspect(&self, request: &InspectRequest) -> Result<TaskFacts, Error> {
        let task = TaskId::parse(&request.id, self.store.engine.shards()).ok_or_else(|| no_task(&request.id))?;
        let held = self.store.head(task).await?.ok_or_else(|| no_task(&request.id))?;
        let head = &held.value;
        let unknown = AgentRef { id: head.agent().to_owned(), lease_ms: 0 };
        let agent = request.agents.iter().find(|agent| agent.id == head.agent()).unwrap_or(&unknown);
        let crew = Crew::of(&self.store, [agent]).await?;
        let (wait, detail) = self.waits_for(task, &held, &crew).await?;
        let context = self.store.context(task.shard(), &head.scope_key().context(&head.context_id)).await?;
        let context = context.as_ref().map(|held| &*held.value).filter(|context| context.since_ms <= head.created_ms);
        let turn = head.turn.as_ref();
        let turn = match turn {
            None => None,
            Some(turn) => Some(TurnFacts {
                id: hex(&turn.id),
                number: turn.number,
                phase: phase(turn.phase()).to_owned(),
                fence: turn.fence,
                attempts: turn.attempts,
                entry: held.run.map(|run| run.to_string()).unwrap_or_default(),
                entry_exists: self.has_entry(task, &held).await?,
                consumer: turn.consumer.clone(),
                consumer_alive: crew.member(head.agent(), &turn.consumer).is_some_and(|member| member.alive),
                queued_at_ms: unsigned(turn.queued_ms),
                deadline_at_ms: unsigned(turn.deadline_ms),
                journal_steps: turn.journal,
                journal_bytes: turn.journal_bytes,
                grants: turn.grants,
                traceparent: turn.traceparent.clone(),
            }),
        };
        let content = match request.content {
            true => {
                let shape = Shape { history: None, artifacts: true };
                self.store.task_from(task, Some(held.clone()), shape).await?.map(|(_, whole)| whole)
            }
            false => None,
        };
        let scope = head.scope();
        let artifacts = head.artifacts.iter();
        Ok(TaskFacts {
            task_id: task.to_string(),
            agent: scope.agent,
            tenant: scope.tenant,
            owner: scope.owner,
            context_id: head.context_id.clone(),
            state: head.state().as_str_name().to_owned(),
            reason: reason(task, head),
            state_at_ms: unsigned(head.status_ms()),
            created_at_ms: unsigned(head.created_ms),
            hidden: head.hidden,
            waits_for: wait.name().to_owned(),
            detail,
            turn,
            first_event: head.first_event,
            last_event: head.last_event,
            messages: head.history_len,
            messages_bytes: head.history_bytes,
            bytes: head.bytes(),
            max_bytes: head.max_bytes,
            artifacts: artifacts
                .map(|artifact| ArtifactFacts { id: artifact.id.clone(), bytes: artifact.bytes, turn: artifact.turn })
                .collect(),
            due_at_ms: unsigned(head.due_ms),
            task_ttl_ms: head.task_ttl_ms,
            context_idle_ms: head.context_idle_ms,
            context_holder: context
                .and_then(|context| TaskId::stored(&context.holder.as_ref()?.task))
                .map(|holder| holder.to_string())
                .unwrap_or_default(),
            waiting: context
                .into_iter()
                .flat_map(|context| &context.waiting)
                .map(|waiting| WaitingFacts {
                    task_id: TaskId::stored(&waiting.task).map(|task| task.to_string()).unwrap_or_default(),
                    queued_at_ms: unsigned(waiting.turn.as_ref().map_or(0, |turn| turn.queued_ms)),
                })
                .collect(),
            content,
        })
    }
}

const fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Done => "done",
        Phase::Waiting => "waiting",
        Phase::Queued => "queued",
        Phase::Running => "running",
        Phase::Stopping => "stopping",
        Phase::Resting => "resting",
    }
}

/// Why the service itself gave the task its status. What an agent says about it is content.
fn reason(task: TaskId, head: &Head) -> String {
    let message = head.status.as_ref().and_then(|status| status.message.as_ref());
    let own = message.filter(|message| message.message_id.starts_with(&format!("{task}-")));
    match own.and_then(|message| message.metadata.as_ref()?.fields.get("reason")) {
        Some(Value { kind: Some(ValueKind::StringValue(reason)) }) => reason.clone(),
        _ => String::new(),
    }
}
