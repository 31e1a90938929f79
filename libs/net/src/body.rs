//! Request bodies, bounded in size and time.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

/// How long the rest of a refused body is read and thrown away, so that a client that is still writing gets to
/// read the refusal instead of a reset connection.
const DRAIN: Duration = Duration::from_secs(2);

/// Why a body could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// It is larger than this many bytes.
    #[error("the body is larger than {0} bytes")]
    TooLarge(usize),
    /// It did not arrive in time.
    #[error("the body did not arrive in time")]
    TimedOut,
    /// The client went away or broke the protocol.
    #[error("the body ended early")]
    Broken,
}

/// Reads a whole request body of at most `limit` bytes within `time`.
///
/// A body that is too large is drained for a moment before the refusal is returned, unless the client waits for
/// permission to send it (`Expect: 100-continue`).
///
/// # Errors
/// [`BodyError`]; the connection is then of no further use, except after [`BodyError::TooLarge`].
pub async fn read<B>(headers: &HeaderMap, mut body: B, limit: usize, time: Duration) -> Result<Bytes, BodyError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let deadline = Instant::now() + time;
    if body.size_hint().lower() > limit as u64 {
        if !headers.contains_key(header::EXPECT) {
            drain(&mut body).await;
        }
        return Err(BodyError::TooLarge(limit));
    }
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    while let Some(frame) = timeout_at(deadline, body.frame()).await.map_err(|_| BodyError::TimedOut)? {
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
        if first.len() + all.len() + data.len() > limit {
            drain(&mut body).await;
            return Err(BodyError::TooLarge(limit));
        }
        // Most bodies are one frame, which is then not copied.
        if first.is_empty() && all.is_empty() {
            first = data;
            continue;
        }
        if all.is_empty() {
            let expected = usize::try_from(body.size_hint().lower()).unwrap_or(0);
            all.reserve(first.len() + data.len() + expected.min(limit));
            all.extend_from_slice(&std::mem::take(&mut first));
        }
        all.extend_from_slice(&data);
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

async fn drain<B: Body + Unpin>(body: &mut B) {
    let deadline = Instant::now() + DRAIN;
    while let Ok(Some(Ok(_))) = timeout_at(deadline, body.frame()).await {}
}

/// A request body that fails when it has not ended by a deadline, for servers that read bodies themselves.
#[derive(Debug)]
pub struct Deadline<B> {
    body: B,
    deadline: Instant,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl<B> Deadline<B> {
    /// `body`, which has to end within `time`.
    pub fn new(body: B, time: Duration) -> Self {
        Self { body, deadline: Instant::now() + time, sleep: None }
    }
}

impl<B: Body + Unpin> Body for Deadline<B>
where
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Data = B::Data;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, Self::Error>>> {
        let this = self.get_mut();
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context) {
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        // A timer is made only for a body that is not there at once.
        let sleep = this.sleep.get_or_insert_with(|| Box::pin(sleep_until(this.deadline)));
        sleep.as_mut().poll(context).map(|()| Some(Err(Box::new(BodyError::TimedOut).into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
