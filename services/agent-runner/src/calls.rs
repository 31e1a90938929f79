//! Calls to task-store that are repeated until they are answered.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use rialto_a2a::{Error, Kind};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// A call that is not answered by then is repeated.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often an internal error is tried again: it may be a bug, which no patience heals.
const INTERNAL_TRIES: usize = 5;

/// Why a call has no result.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The lease ended while trying: the turn is somebody else's.
    Lost,
    /// The same call would be refused again.
    Refused(Error),
}

/// Makes a call again and again, with growing pauses, until it is answered, refused, or `lost`.
///
/// Every call to task-store may be repeated: its ids are made before the first try.
pub(crate) async fn persist<T, F>(
    name: &'static str,
    lost: &CancellationToken,
    mut call: impl FnMut() -> F + Send,
) -> Result<T, Failure>
where
    F: Future<Output = Result<tonic::Response<T>, tonic::Status>> + Send,
{
    let (mut tries, mut internal) = (0_u64, 0);
    let mut pauses = pauses();
    loop {
        let error = match timeout(CALL_TIMEOUT, call()).await {
            Ok(Ok(reply)) => return Ok(reply.into_inner()),
            Ok(Err(status)) => {
                let error = Error::from_status(&status);
                internal += usize::from(error.kind == Kind::Internal);
                // The status is for the log only; the error is what strangers may see.
                debug!(call = name, code = ?status.code(), detail = status.message(), "call failed");
                error
            }
            Err(_) => Kind::Deadline.into(),
        };
        if !is_transient(error.kind) || internal >= INTERNAL_TRIES {
            return Err(Failure::Refused(error));
        }
        let pause = pauses.next().unwrap_or(MAX_PAUSE);
        if tries == 0 {
            warn!(call = name, %error, "task-store did not answer, trying again until it does");
        }
        tries += 1;
        tokio::select! {
            biased;
            () = lost.cancelled() => return Err(Failure::Lost),
            () = sleep(error.retry_after.map_or(pause, |after| after.min(pause))) => {}
        }
    }
}

const MAX_PAUSE: Duration = Duration::from_secs(2);

/// Growing pauses with jitter, without end.
pub(crate) fn pauses() -> impl Iterator<Item = Duration> + Send {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(50))
        .with_max_delay(MAX_PAUSE)
        .with_jitter()
        .without_max_times()
        .build()
}

const fn is_transient(kind: Kind) -> bool {
    matches!(kind, Kind::Unavailable | Kind::Deadline | Kind::Internal | Kind::RateLimited | Kind::QueueFull)
}
