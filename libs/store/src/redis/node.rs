//! One server, and the connection to it that all calls share.

use std::{sync::Arc, time::Duration};

use futures::StreamExt;
use redis::{AsyncConnectionConfig, Client, RedisError, RedisResult, Role, aio::MultiplexedConnection};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::config::{Place, Target};
use crate::{Error, Result};

/// How long calls wait for a server that cannot be reached; after this they fail at once until it is back.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long one try to connect may take.
const CONNECT: Duration = Duration::from_secs(2);

/// How long a Sentinel may say nothing before it is asked again.
const SILENCE: Duration = Duration::from_secs(30);

/// Back-off between tries: doubles from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A server whose connection is kept up in the background: a `MultiplexedConnection` never reconnects by itself.
#[derive(Debug)]
pub(super) struct Node {
    state: watch::Sender<State>,
    stop: CancellationToken,
}

/// A working connection, as far as is known.
pub(super) struct Up {
    pub(super) connection: MultiplexedConnection,
    /// For connections of one's own.
    pub(super) client: Client,
    /// Counts the connections of a node.
    pub(super) generation: u64,
}

impl std::fmt::Debug for Up {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Up").field("generation", &self.generation).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
enum State {
    Up(Arc<Up>),
    Down { since: Instant, why: Arc<str> },
}

/// Which server a node is.
#[derive(Clone, Debug)]
pub(super) enum Which {
    /// The one at this place.
    At(Place),
    /// The master that the Sentinels name at the moment.
    Master,
}

impl Node {
    /// Starts to connect.
    pub(super) fn new(target: Arc<Target>, which: Which, tasks: &TaskTracker, stop: &CancellationToken) -> Self {
        let state = watch::Sender::new(State::Down { since: Instant::now(), why: "not connected yet".into() });
        let stop = stop.child_token();
        tasks.spawn(stop.clone().run_until_cancelled_owned(keep_up(target, which, state.clone())));
        Self { state, stop }
    }

    /// The connection; waits a little when there is none.
    pub(super) async fn up(&self, deadline: Instant) -> Result<Arc<Up>> {
        let mut state = self.state.subscribe();
        loop {
            let (since, why) = match &*state.borrow_and_update() {
                State::Up(up) => return Ok(Arc::clone(up)),
                State::Down { since, why } => (*since, Arc::clone(why)),
            };
            match timeout_at(deadline.min(since + PATIENCE), state.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) | Err(_) => return Err(Error::Unavailable(why.to_string())),
            }
        }
    }

    /// Waits until this connection is of no use any more.
    pub(super) async fn replaced(&self, generation: u64) {
        let mut state = self.state.subscribe();
        let replaced = state.wait_for(|state| !matches!(state, State::Up(up) if up.generation == generation));
        // There is always a sender: this node has it.
        drop(replaced.await);
    }

    /// Says that this connection is of no use any more: from now on, calls wait for the next one.
    pub(super) fn broken(&self, generation: u64) {
        broken(&self.state, generation);
    }
}

fn broken(state: &watch::Sender<State>, generation: u64) {
    state.send_if_modified(|state| {
        let current = matches!(state, State::Up(up) if up.generation == generation);
        if current {
            *state = State::Down { since: Instant::now(), why: "the connection to redis broke".into() };
        }
        current
    });
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn keep_up(target: Arc<Target>, which: Which, state: watch::Sender<State>) {
    let mut generation = 0;
    loop {
        generation += 1;
        let mut pause = PAUSES.0;
        let (up, place) = loop {
            let error = match timeout(CONNECT, connect(&target, &which, generation, &state)).await {
                Ok(Ok(connected)) => break connected,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no connection within {CONNECT:?}"),
            };
            state.send_if_modified(|state| {
                if let State::Down { why, .. } = state
                    && **why != *error
                {
                    tracing::warn!(%error, "cannot connect to redis; trying on");
                    *why = error.into();
                }
                // Nobody needs to wake up for another reason.
                false
            });
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        };
        if generation > 1 {
            tracing::info!("connected to redis again");
        }
        let mut changes = state.subscribe();
        state.send_replace(State::Up(Arc::new(up)));
        let switched = async {
            match which {
                Which::At(_) => std::future::pending().await,
                Which::Master => switched(&target, &place).await,
            }
        };
        tokio::select! {
            down = changes.wait_for(|state| matches!(state, State::Down { .. })) => drop(down),
            () = switched => {
                tracing::info!("the sentinels name another master");
                broken(&state, generation);
            }
        }
    }
}

async fn connect(
    target: &Target,
    which: &Which,
    generation: u64,
    state: &watch::Sender<State>,
) -> RedisResult<(Up, Place)> {
    let place = match which {
        Which::At(place) => place.clone(),
        Which::Master => master(target).await?,
    };
    let client = target.server(&place)?;
    let state = state.clone();
    let lost = move |push: redis::PushInfo| {
        // So a connection that breaks while idle is replaced before it is needed.
        if push.kind == redis::PushKind::Disconnection {
            broken(&state, generation);
        }
        Ok::<_, ()>(())
    };
    // Deadlines are set around calls, so the client's own (500 ms by default) are off.
    let settings =
        AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None).set_push_sender(lost);
    let mut connection = client.get_multiplexed_async_connection_with_config(&settings).await?;
    if let Which::Master = which
        && !matches!(redis::cmd("ROLE").query_async(&mut connection).await?, Role::Primary { .. })
    {
        // The Sentinels lag behind a fail-over.
        return Err((redis::ErrorKind::Client, "the server that the sentinels name is not a master").into());
    }
    Ok((Up { connection, client, generation }, place))
}

/// Returns when the Sentinels name another master than this one. A master that was replaced in good order goes
/// on taking writes for ten seconds, and they would be lost.
async fn switched(target: &Target, place: &Place) {
    let name = target.sentinel.as_deref().unwrap_or_default();
    loop {
        for host in &target.hosts {
            let subscribing = async {
                let mut subscription = target.sentinel(host)?.get_async_pubsub().await?;
                subscription.subscribe("+switch-master").await?;
                // It may have happened before.
                let named = master(target).await?;
                Ok::<_, RedisError>((subscription.into_on_message(), named))
            };
            let Ok(Ok((mut messages, named))) = timeout(CONNECT, subscribing).await else { continue };
            if named != *place {
                return;
            }
            // After a long silence it is better to make sure.
            while let Ok(Some(message)) = timeout(SILENCE, messages.next()).await {
                let payload: String = message.get_payload().unwrap_or_default();
                if payload.split(' ').next() == Some(name) {
                    return;
                }
            }
            break;
        }
        sleep(PAUSES.1).await;
    }
}

/// Asks the Sentinels, in order, until one knows.
pub(super) async fn master(target: &Target) -> RedisResult<Place> {
    let name = target.sentinel.as_deref().unwrap_or_default();
    let mut last = RedisError::from((redis::ErrorKind::EmptySentinelList, "no sentinel"));
    for host in &target.hosts {
        let asking = async {
            let mut connection = target.sentinel(host)?.get_multiplexed_async_connection().await?;
            let mut question = redis::cmd("SENTINEL");
            question.arg("GET-MASTER-ADDR-BY-NAME").arg(name).query_async::<Option<Place>>(&mut connection).await
        };
        match timeout(CONNECT / 4, asking).await {
            Ok(Ok(Some(place))) => return Ok(place),
            Ok(Ok(None)) => {
                last = (redis::ErrorKind::MasterNameNotFoundBySentinel, "the sentinels do not know the master").into();
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = (redis::ErrorKind::Io, "a sentinel does not answer").into(),
        }
    }
    Err(last)
}
