//! What answers for an agent, and how it talks to the runner.

pub mod command;
mod echo;
pub mod openai;

use std::{fmt, sync::Arc};

use bytes::Bytes;
use rialto_a2a::{
    v1::{Artifact, Message, Part, part},
    wkt::Struct,
};
use rialto_runtime::config;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

pub use self::echo::Echo;

/// Events that may wait for the runner before [`Events::send`] waits.
const WAITING_EVENTS: usize = 4;

/// What answers for an agent. One value serves all turns of the agent, many at a time.
///
/// The runner owns everything around it: slots, attempts, fences, the deadline, and what reaches the task.
#[async_trait::async_trait]
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Whether turns are to be handed the earlier conversation; reading it costs the store.
    fn reads_conversation(&self) -> bool {
        true
    }

    /// Answers one turn: sends events while it works, returns how the turn ends.
    ///
    /// The future is dropped when the turn has to stop at once (fenced, cut off); dropping it must stop the work.
    ///
    /// # Errors
    /// [`Crash`] when the attempt is lost and the turn should be tried again. A panic is one too.
    async fn run(&self, turn: &Turn, events: &Events) -> Result<End, Crash>;

    /// What the agent says about tasks of its own that wait for authorization, in a turn or between turns. Asked again
    /// and again while the runner runs. Cancel-safe.
    async fn granted(&self) -> Grant {
        std::future::pending().await
    }

    /// Lets go of what outlives a turn, such as idle processes; no turn runs any more.
    async fn close(&self) {}
}

/// Makes the backend that the agent's section asks for.
///
/// # Errors
/// When the section cannot work, such as a command without a program.
pub fn open(agent: &config::Agent) -> anyhow::Result<Arc<dyn Backend>> {
    Ok(match &agent.backend {
        config::Backend::Echo {} => Arc::new(Echo),
        config::Backend::Command { command, cwd, env, persistent } => {
            Arc::new(command::Command::new(command::Options {
                agent: agent.id.clone(),
                command: command.clone(),
                cwd: cwd.clone(),
                env: env.clone(),
                persistent: *persistent,
                kill_grace: agent.kill_grace.0,
                slots: agent.max_concurrent,
            })?)
        }
        config::Backend::Openai {
            model,
            base_url,
            api_key,
            system_prompt,
            temperature,
            max_output_tokens,
            images,
            first_token_timeout,
            stall_timeout,
        } => Arc::new(openai::Openai::new(openai::Options {
            agent: agent.id.clone(),
            model: model.clone(),
            base_url: base_url.clone().unwrap_or_else(|| openai::OPENAI.to_owned()),
            api_key: api_key.clone(),
            system_prompt: system_prompt.clone(),
            temperature: *temperature,
            max_output_tokens: *max_output_tokens,
            images: *images,
            first_token_timeout: first_token_timeout.0,
            stall_timeout: stall_timeout.0,
            turn_timeout: agent.turn_timeout.0,
            ..openai::Options::default()
        })?),
    })
}

/// One message to answer, and what is known about it.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// The agent's id.
    pub agent: String,
    /// The task that this turn belongs to.
    pub task_id: String,
    /// The conversation that the task belongs to. Unique only together with `tenant` and `owner`.
    pub context_id: String,
    /// The tenant that the caller speaks to; empty without.
    pub tenant: String,
    /// Who the caller is; empty when authentication is off.
    pub owner: String,
    /// Which turn of the task this is, from 1.
    pub number: u32,
    /// Which attempt at this turn, from 1. Planned stops do not count.
    pub attempt: u32,
    /// The same in every attempt at this turn, in no other turn: a key for side effects that must not repeat.
    pub idempotency_key: String,
    /// What is to be answered.
    pub message: Message,
    /// The task's messages before this one, oldest first.
    pub history: Vec<Message>,
    /// The context's earlier messages (this task's included) within the configured window, oldest first.
    pub conversation: Vec<Message>,
    /// Steps that earlier attempts completed ([`AgentEvent::Journal`]), oldest first.
    pub journal: Vec<Bytes>,
    /// The task's metadata.
    pub metadata: Struct,
    /// What came with the grant, when this turn stopped for authorization and got it.
    pub granted: Option<Struct>,
    /// W3C trace context of this turn, for what the backend does; empty when its sender has none.
    pub traceparent: String,
    /// Fires when the work is no longer wanted: end soon, or be dropped after the grace period.
    pub cancel: CancellationToken,
    /// Fires when the process wants to stop: a turn that ends within the grace period counts, one that does not
    /// is run again elsewhere, without its attempt being counted.
    pub stopping: CancellationToken,
}

/// What a backend says while it works.
#[derive(Clone, Debug, PartialEq)]
pub enum AgentEvent {
    /// A piece of the answer's text.
    Text(String),
    /// Progress, for watchers only: a WORKING status with a message.
    Status(Vec<Part>),
    /// A result, or a piece of one.
    Artifact(Box<Chunk>),
    /// A completed step, in the backend's own form: handed to the next attempt, should this one be lost.
    Journal(Bytes),
    /// What the turn has used so far, such as tokens: the member `usage` of the task's metadata.
    Usage(Struct),
    /// Merged into the task's metadata.
    Metadata(Struct),
}

/// A task of the agent that waits for authorization has it, and goes on.
#[derive(Debug)]
pub struct Grant {
    /// The task.
    pub task_id: String,
    /// For the turn that goes on, and for nobody else.
    pub metadata: Struct,
    /// Dropped once the grant is stored or refused.
    pub done: oneshot::Sender<()>,
}

/// An artifact, or a piece of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chunk {
    /// Id, name, description, parts and metadata.
    pub artifact: Artifact,
    /// Extends the artifact of that id, which must exist, instead of creating or replacing it.
    pub append: bool,
    /// Nothing more comes for this artifact.
    pub last: bool,
}

/// How a turn ends.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// In the state that the agent's `turn-end` names; the parts are the closing words, or the whole answer.
    Done(Vec<Part>),
    /// COMPLETED, with optional closing words.
    Completed(Vec<Part>),
    /// INPUT_REQUIRED, with the question.
    InputRequired(Vec<Part>),
    /// AUTH_REQUIRED, with what is needed. The turn runs again once it is granted.
    AuthRequired(Vec<Part>),
    /// FAILED, with the reason, which the caller sees.
    Failed(String),
    /// REJECTED, with the reason, which the caller sees.
    Rejected(String),
}

impl End {
    /// The end of a backend that stopped without naming one.
    #[must_use]
    pub fn without_result() -> Self {
        Self::Failed("the agent ended without a result".to_owned())
    }

    /// The end of a turn whose backend broke the rules; the log has the detail.
    #[must_use]
    pub fn invalid(detail: impl fmt::Display) -> Self {
        Self::Failed(format!("invalid agent response: {detail}"))
    }
}

/// The attempt is lost; the reason is for the log.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Crash(pub String);

/// Where a backend sends its events. Bounded: sending waits while the runner is behind.
#[derive(Clone, Debug)]
pub struct Events(mpsc::Sender<AgentEvent>);

impl Events {
    /// The two ends of a turn's events. The runner makes them; tests of a backend may, too.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<AgentEvent>) {
        let (sender, receiver) = mpsc::channel(WAITING_EVENTS);
        (Self(sender), receiver)
    }

    /// Sends one event. Never completes once nobody listens: the turn is about to be dropped.
    pub async fn send(&self, event: AgentEvent) {
        if self.0.send(event).await.is_err() {
            std::future::pending().await
        }
    }

    /// Sends a piece of the answer's text.
    pub async fn text(&self, text: impl Into<String>) {
        self.send(AgentEvent::Text(text.into())).await;
    }
}

/// A part that holds text.
#[must_use]
pub fn text_part(text: impl Into<String>) -> Part {
    Part { content: Some(part::Content::Text(text.into())), ..Part::default() }
}
