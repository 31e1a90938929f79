//! One claimed turn, from Begin to Finish: attempts, deadline, cancel, and what becomes of each event.

use std::{
    panic::AssertUnwindSafe,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt as _;
use opentelemetry::trace::SpanContext;
use prost::Message as _;
use rialto_a2a::{Error, Kind};
use rialto_rpc::tasks::{
    BeginRequest, Claim, FinishRequest, HandBackRequest, HeldTurn, Outcome, RecordRequest, RunEntry, TaskStoreClient,
    Turn as Begun,
};
use rialto_runtime::{config, telemetry::trace};
use rialto_store::worker::{Outcome as Settled, Work};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span, error, field::Empty, info, info_span, warn};

use crate::{
    backend::{AgentEvent, Backend, Crash, End, Events, Turn},
    calls::{Failure, pauses, persist},
    held::Held,
    observe::{self, Figures},
    scribe::{self, Page, Place, Scribe, Style, Urgency},
};

/// How long the first event of a turn waits for company. A short answer then needs no call of its own.
const FIRST_LINGER: Duration = Duration::from_millis(2);
/// Between two flushes: what a watcher does not notice, and a model's tokens share.
const FLUSH_INTERVAL: Duration = Duration::from_millis(20);

/// The newest form of a run entry that is understood here.
pub(crate) const SCHEMA: u32 = 1;
/// How long an entry that cannot be handled here is kept from coming right back.
const NOT_HERE: Duration = Duration::from_secs(1);

/// Works on the turns of one agent.
#[derive(Debug)]
pub(crate) struct Turns {
    pub agent: config::Agent,
    pub backend: Arc<dyn Backend>,
    pub client: TaskStoreClient,
    pub held: Held,
    pub figures: Figures,
    /// Turns that still run have to be handed back now.
    pub grace_over: CancellationToken,
}

/// How an attempt stopped.
#[derive(Debug)]
enum Stop {
    /// The backend came to an end, or broke the rules.
    Ended(End),
    /// The backend is gone without one.
    Crashed(String),
    TimedOut,
    Canceled,
    /// Somebody else owns the turn.
    Fenced,
    /// The process has to go.
    GraceOver,
}

/// What is left to do after an attempt.
#[derive(Debug)]
enum Attempt {
    /// Nothing here; with what figures call it.
    Settled(Settled, &'static str),
    /// In this way.
    Crashed(String),
}

impl Attempt {
    const fn outcome(&self) -> &'static str {
        match self {
            Self::Settled(_, outcome) => outcome,
            Self::Crashed(_) => "crashed",
        }
    }
}

type Recording<'a> = Pin<Box<dyn Future<Output = Result<Outcome, Failure>> + Send + 'a>>;

impl Turns {
    /// Sees a claimed turn through.
    pub(crate) async fn work(&self, work: &Work) -> Settled {
        let _slot = self.figures.slot();
        let run = match RunEntry::decode(work.claimed.entry.payload.clone()) {
            Ok(run) if run.schema > SCHEMA => {
                warn!(schema = run.schema, "a run entry is left for a newer runner");
                sleep(NOT_HERE).await;
                return Settled::HandBack;
            }
            Ok(run) if !run.task_id.is_empty() => run,
            _ => return Settled::Bury { reason: "not a run entry".to_owned() },
        };
        let claim = Claim {
            shard: work.claimed.shard.into(),
            stream: work.claimed.stream.clone(),
            entry: work.claimed.entry.id.to_string(),
            consumer: work.consumer.to_string(),
        };
        let sender = trace::parse(&run.traceparent);
        let mut pauses = pauses();
        let mut crash = String::new();
        loop {
            let begin = self.begin(&run, &claim, std::mem::take(&mut crash), &work.lost);
            let begun = match trace::within(sender.clone(), begin).await {
                Ok(Some(begun)) => begun,
                Ok(None) | Err(Failure::Lost) => return Settled::Settled,
                Err(Failure::Refused(error)) => {
                    error!(task.id = run.task_id, %error, "task-store refuses to begin the turn");
                    if matches!(error.kind, Kind::TaskNotFound | Kind::InvalidParams) {
                        return Settled::Bury { reason: error.to_string() };
                    }
                    sleep(NOT_HERE).await;
                    return Settled::HandBack;
                }
            };
            let held = HeldTurn {
                task_id: run.task_id.clone(),
                turn_id: run.turn_id.clone(),
                fence: begun.fence,
                claim: Some(claim.clone()),
                crashed: false,
            };
            let number = begun.attempt;
            if number == 1 {
                self.figures.begun(&run, sender.as_ref());
            }
            let (started, span) = (Instant::now(), self.span(&held, number, sender.as_ref()));
            let attempt = self.attempt(&held, &run, begun, work).instrument(span).await;
            self.figures.ended(started, attempt.outcome());
            crash = match attempt {
                Attempt::Settled(settled, _) => return settled,
                Attempt::Crashed(crash) => crash,
            };
            if number >= self.agent.max_attempts.max(1) {
                warn!(task.id = held.task_id, attempt = number, crash, "the agent crashed, for the last time");
                // To begin again is what ends the turn now.
                continue;
            }
            warn!(task.id = held.task_id, attempt = number, crash, "the agent crashed, the turn is tried again");
            // The entry stays claimed, and its slot taken, while the crash cools down.
            tokio::select! {
                biased;
                () = work.lost.cancelled() => return Settled::Settled,
                () = work.stopping.cancelled() => {
                    return self.hand_back(HeldTurn { crashed: true, ..held }, &work.lost).await;
                }
                () = sleep(pauses.next().unwrap_or(NOT_HERE)) => {}
            }
        }
    }

    async fn begin(
        &self,
        run: &RunEntry,
        claim: &Claim,
        crash: String,
        lost: &CancellationToken,
    ) -> Result<Option<Begun>, Failure> {
        let window = match self.backend.reads_conversation() {
            true => self.agent.context_window,
            false => config::ContextWindow { messages: 0, ..self.agent.context_window },
        };
        let request = BeginRequest {
            run: Some(run.clone()),
            claim: Some(claim.clone()),
            window_messages: window.messages,
            window_bytes: window.bytes.0,
            max_attempts: self.agent.max_attempts,
            commit_id: Bytes::copy_from_slice(uuid::Uuid::now_v7().as_bytes()),
            crash,
        };
        let reply = persist("Begin", lost, || {
            let (mut client, request) = (self.client.clone(), request.clone());
            async move { client.begin(request).await }
        });
        Ok(reply.await?.turn)
    }

    /// Of an attempt; part of its sender's trace, and of every log line about it.
    fn span(&self, held: &HeldTurn, attempt: u32, sender: Option<&SpanContext>) -> Span {
        trace::under(
            || sender.cloned(),
            || {
                info_span!(
                    "turn",
                    otel.kind = "consumer",
                    agent = self.agent.id,
                    task.id = held.task_id,
                    attempt,
                    outcome = Empty,
                    otel.status_code = Empty,
                )
            },
        )
    }

    async fn attempt(&self, held: &HeldTurn, run: &RunEntry, begun: Begun, work: &Work) -> Attempt {
        let _hold = self.held.add(&work.claimed, held.clone(), work.canceled.clone());
        let lost = &work.lost;
        let (turn, place) = self.introduce(held, run, begun, work);
        let style = Style { answer: self.agent.answer, reply: self.agent.reply, turn_end: self.agent.turn_end };
        let mut scribe = Scribe::new(style, place);

        let attempt = match self.drive(held, &turn, &mut scribe, work).await {
            Stop::Ended(end) => self.finish(held, &mut scribe, end, lost).await,
            Stop::TimedOut => self.finish(held, &mut scribe, End::Failed("turn timed out".to_owned()), lost).await,
            Stop::Canceled => self.confirm_cancel(held, lost).await,
            Stop::Crashed(reason) => Attempt::Crashed(reason),
            Stop::Fenced => fenced(),
            Stop::GraceOver => Attempt::Settled(self.hand_back(held.clone(), lost).await, "handed_back"),
        };
        Span::current().record("outcome", attempt.outcome());
        if matches!(attempt.outcome(), "failed" | "crashed") {
            Span::current().record("otel.status_code", "error");
        }
        attempt
    }

    /// What the backend, and what the scribe, must know about the turn.
    fn introduce(&self, held: &HeldTurn, run: &RunEntry, begun: Begun, work: &Work) -> (Turn, Place) {
        let task = begun.task.unwrap_or_default();
        let place = Place {
            task_id: held.task_id.clone(),
            context_id: task.context_id.clone(),
            turn: begun.number,
            next_event: begun.next_event,
            journal: begun.journal.clone(),
            stale: begun.stale_artifacts.into_iter().collect(),
            iac_code: task.metadata.as_ref().map(scribe::iac_code).unwrap_or_default(),
            kept: begun.kept_artifacts.into_iter().collect(),
        };
        let turn = Turn {
            agent: self.agent.id.clone(),
            task_id: held.task_id.clone(),
            context_id: task.context_id,
            tenant: begun.tenant,
            owner: begun.owner,
            number: place.turn,
            attempt: begun.attempt,
            idempotency_key: hex(&held.turn_id),
            message: begun.message.unwrap_or_default(),
            history: task.history,
            conversation: begun.conversation,
            journal: begun.journal.into_iter().map(|entry| entry.payload).collect(),
            metadata: task.metadata.unwrap_or_default(),
            granted: begun.granted.map(|granted| granted.metadata.unwrap_or_default()),
            traceparent: trace::current().as_ref().map_or_else(|| run.traceparent.clone(), trace::traceparent),
            cancel: CancellationToken::new(),
            stopping: work.stopping.clone(),
        };
        (turn, place)
    }

    /// Runs the backend and stores what it says, until one of the two comes to an end.
    async fn drive(&self, held: &HeldTurn, turn: &Turn, scribe: &mut Scribe, work: &Work) -> Stop {
        let lost = &work.lost;
        let (events, mut receiver) = Events::channel();
        let mut run = pin!(AssertUnwindSafe(self.backend.run(turn, &events)).catch_unwind());
        let mut deadline = pin!(sleep(self.agent.turn_timeout.0));
        let mut flush = pin!(sleep_until(Instant::now()));
        let mut recording: Option<Recording<'_>> = None;
        // Whether `flush` is set for what waits now.
        let mut armed = false;
        let mut next_flush = Instant::now();
        let mut ended: Option<End> = None;

        let stop = loop {
            if recording.is_none() {
                if let Some(end) = ended {
                    return Stop::Ended(end);
                }
                if scribe.is_due() {
                    recording = Some(self.record(held, &scribe.send(), lost));
                    armed = false;
                }
            }
            // Events before the backend's end, the end before a flush: the last events then go with the Finish.
            tokio::select! {
                biased;
                () = lost.cancelled() => return Stop::Fenced,
                () = work.canceled.cancelled() => break Stop::Canceled,
                () = self.grace_over.cancelled() => return Stop::GraceOver,
                () = &mut deadline => break Stop::TimedOut,
                outcome = answer(&mut recording), if recording.is_some() => {
                    recording = None;
                    next_flush = Instant::now() + FLUSH_INTERVAL;
                    match outcome {
                        Ok(Outcome::Ok) => scribe.stored(),
                        Ok(Outcome::Canceled) => break Stop::Canceled,
                        Ok(Outcome::Fenced) | Err(Failure::Lost) => return Stop::Fenced,
                        Err(Failure::Refused(error)) => {
                            scribe.discard();
                            return refused(&error).map_or_else(Stop::Crashed, Stop::Ended);
                        }
                    }
                }
                Some(event) = receiver.recv(), if scribe.has_room() => match scribe.push(event) {
                    Ok(Urgency::Soon) if armed => {}
                    Ok(urgency) => {
                        let soon = (Instant::now() + FIRST_LINGER).max(next_flush);
                        flush.as_mut().reset(if urgency == Urgency::Now { Instant::now() } else { soon });
                        armed = true;
                    }
                    Err(invalid) => return Stop::Ended(invalid_response(&invalid.0)),
                },
                result = &mut run, if ended.is_none() => match result {
                    Ok(Ok(end)) => match drain(&mut receiver, scribe) {
                        Ok(()) => ended = Some(end),
                        Err(end) => return Stop::Ended(end),
                    },
                    Ok(Err(Crash(reason))) => return Stop::Crashed(reason),
                    Err(_) => return Stop::Crashed("the backend panicked".to_owned()),
                },
                () = &mut flush, if armed && recording.is_none() && ended.is_none() => {
                    armed = false;
                    if scribe.is_waiting() {
                        recording = Some(self.record(held, &scribe.send(), lost));
                    }
                }
            }
        };

        // The work is not wanted any more. What is said from here on is not, either.
        turn.cancel.cancel();
        let over = async {
            loop {
                tokio::select! {
                    biased;
                    Some(_) = receiver.recv() => {}
                    _ = &mut run => break,
                }
            }
        };
        if ended.is_none() && timeout(self.agent.kill_grace.0, over).await.is_err() {
            warn!("the agent did not stop in time and is cut off");
        }
        stop
    }

    fn record<'a>(&'a self, held: &'a HeldTurn, page: &Arc<Page>, lost: &'a CancellationToken) -> Recording<'a> {
        let page = page.clone();
        let call = move || {
            let mut client = self.client.clone();
            let Page { first_event, events, journal, metadata } = (*page).clone();
            let (task_id, turn_id) = (held.task_id.clone(), held.turn_id.clone());
            let fence = held.fence;
            let request = RecordRequest { task_id, turn_id, fence, first_event, events, journal, metadata };
            async move { client.record(request).await }
        };
        Box::pin(async move { Ok(persist("Record", lost, call).await?.outcome()) })
    }

    async fn finish(&self, held: &HeldTurn, scribe: &mut Scribe, end: End, lost: &CancellationToken) -> Attempt {
        let ended = observe::outcome(&end, self.agent.turn_end);
        let closing = scribe.close(end);
        match self.call_finish(held, closing.page, closing.history, lost).await {
            Err(Failure::Refused(error)) => {
                warn!(%error, "task-store refuses the end of the turn");
                let end = match refused(&error) {
                    Ok(end) => end,
                    Err(crash) => return Attempt::Crashed(crash),
                };
                // What the agent said cannot be stored: that is then the end that is stored.
                scribe.discard();
                let closing = scribe.close(end);
                let outcome = self.call_finish(held, closing.page, closing.history, lost).await;
                self.settle(held, outcome, "failed", lost).await
            }
            outcome => self.settle(held, outcome, ended, lost).await,
        }
    }

    async fn settle(
        &self,
        held: &HeldTurn,
        outcome: Result<Outcome, Failure>,
        ended: &'static str,
        lost: &CancellationToken,
    ) -> Attempt {
        match outcome {
            Ok(Outcome::Ok) => Attempt::Settled(Settled::Settled, ended),
            Ok(Outcome::Canceled) => self.confirm_cancel(held, lost).await,
            Ok(Outcome::Fenced) | Err(Failure::Lost) => fenced(),
            Err(Failure::Refused(error)) => {
                error!(%error, "task-store refuses to end the turn");
                Attempt::Crashed(format!("task-store refuses its end: {error}"))
            }
        }
    }

    async fn confirm_cancel(&self, held: &HeldTurn, lost: &CancellationToken) -> Attempt {
        match self.call_finish(held, Page::default(), None, lost).await {
            Ok(Outcome::Ok | Outcome::Canceled) => Attempt::Settled(Settled::Settled, "canceled"),
            Ok(Outcome::Fenced) | Err(Failure::Lost) => fenced(),
            Err(Failure::Refused(error)) => {
                error!(%error, "task-store refuses to confirm the cancel");
                Attempt::Crashed(format!("task-store refuses its end: {error}"))
            }
        }
    }

    async fn call_finish(
        &self,
        held: &HeldTurn,
        page: Page,
        history: Option<rialto_a2a::v1::Message>,
        lost: &CancellationToken,
    ) -> Result<Outcome, Failure> {
        let request = FinishRequest {
            task_id: held.task_id.clone(),
            turn_id: held.turn_id.clone(),
            fence: held.fence,
            claim: held.claim.clone(),
            first_event: page.first_event,
            events: page.events,
            history: history.into_iter().collect(),
            metadata: page.metadata,
            journal: page.journal,
        };
        let reply = persist("Finish", lost, || {
            let (mut client, request) = (self.client.clone(), request.clone());
            async move { client.finish(request).await }
        });
        Ok(reply.await?.outcome())
    }

    async fn hand_back(&self, held: HeldTurn, lost: &CancellationToken) -> Settled {
        let request = HandBackRequest { turns: vec![held] };
        let reply = persist("HandBack", lost, || {
            let (mut client, request) = (self.client.clone(), request.clone());
            async move { client.hand_back(request).await }
        });
        match reply.await {
            Ok(_) => {
                info!("the turn is handed back");
                Settled::Settled
            }
            Err(failure) => {
                warn!(?failure, "task-store does not take the turn back");
                Settled::HandBack
            }
        }
    }
}

/// The answer to a call under way. Cancel-safe: the call stays in its place.
async fn answer(recording: &mut Option<Recording<'_>>) -> Result<Outcome, Failure> {
    match recording {
        Some(recording) => recording.await,
        None => std::future::pending().await,
    }
}

/// Takes down what a backend sent before it ended.
fn drain(receiver: &mut mpsc::Receiver<AgentEvent>, scribe: &mut Scribe) -> Result<(), End> {
    while let Ok(event) = receiver.try_recv() {
        scribe.push(event).map_err(|invalid| invalid_response(&invalid.0))?;
    }
    Ok(())
}

fn fenced() -> Attempt {
    warn!("fenced: another attempt owns the turn");
    Attempt::Settled(Settled::Settled, "fenced")
}

fn invalid_response(detail: &str) -> End {
    warn!(detail, "invalid agent response");
    End::invalid(detail)
}

/// The end of a turn whose events task-store does not take because of what they say. Any other refusal is a fault of
/// the platform and no end: the attempt counts as a crash, and the next one may have more luck.
fn refused(error: &Error) -> Result<End, String> {
    match error.kind {
        Kind::InvalidAgentResponse | Kind::InvalidParams => Ok(invalid_response(&error.message)),
        Kind::PayloadTooLarge => Ok(End::Failed("the task is too large".to_owned())),
        _ => Err(format!("task-store refuses its events: {error}")),
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        text
    })
}
