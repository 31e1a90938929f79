//! What a connection is waiting for, as seen from its bytes and its requests, so that one that wastes a slot can
//! be closed: it sends a head too slowly, or has been idle for too long.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

/// What there is to do about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Look again at this time.
    Fine(Instant),
    /// Idle for too long: close it politely.
    Idle,
    /// A head did not arrive in time: close it.
    Stalled,
}

#[derive(Debug)]
struct State {
    /// Requests whose answer is not complete.
    active: usize,
    protocol: Protocol,
    /// When the head that is being received began.
    head: Option<Instant>,
    /// Since when nothing has been asked.
    idle: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    /// So many bytes of the preface of HTTP/2 were seen, and nothing else.
    Unknown(usize),
    Http1,
    /// It has pings of its own, and its bytes say nothing about requests.
    Http2,
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

impl Protocol {
    fn after(self, bytes: &[u8]) -> Self {
        let Self::Unknown(seen) = self else { return self };
        let expected = &PREFACE[seen..PREFACE.len().min(seen + bytes.len())];
        match bytes.starts_with(expected) {
            false => Self::Http1,
            true if seen + expected.len() == PREFACE.len() => Self::Http2,
            true => Self::Unknown(seen + expected.len()),
        }
    }
}

/// Shared by the bytes, the requests and the keeper of one connection.
#[derive(Clone, Debug)]
pub(crate) struct Clock(Arc<Mutex<State>>);

impl Clock {
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        // A connection that sends nothing at all is as bad as one that sends half a head.
        Self(Arc::new(Mutex::new(State { active: 0, protocol: Protocol::Unknown(0), head: Some(now), idle: now })))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn received(&self, bytes: &[u8]) {
        let mut state = self.lock();
        let before = state.protocol;
        state.protocol = before.after(bytes);
        match state.protocol {
            Protocol::Http2 if before != Protocol::Http2 => state.head = None,
            Protocol::Http1 if state.active == 0 && state.head.is_none() => state.head = Some(Instant::now()),
            _ => {}
        }
    }

    /// A request was read; it is under way until the guard is dropped.
    pub(crate) fn request(&self) -> Active {
        let mut state = self.lock();
        state.active += 1;
        state.head = None;
        Active(self.clone())
    }

    pub(crate) fn check(&self, head: Duration, idle: Duration) -> Verdict {
        let state = self.lock();
        let now = Instant::now();
        if state.active > 0 {
            return Verdict::Fine(now + head);
        }
        match state.head {
            Some(began) if now >= began + head => Verdict::Stalled,
            Some(began) => Verdict::Fine(began + head),
            None if state.protocol == Protocol::Http2 => Verdict::Fine(now + idle),
            None if now >= state.idle + idle => Verdict::Idle,
            None => Verdict::Fine((state.idle + idle).min(now + head)),
        }
    }
}

/// A request that is under way.
#[derive(Debug)]
pub(crate) struct Active(Clock);

impl Drop for Active {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.active -= 1;
        state.idle = Instant::now();
    }
}

/// Bytes of a connection, watched by its [`Clock`].
#[derive(Debug)]
pub(crate) struct Watched<I> {
    pub(crate) io: I,
    pub(crate) clock: Clock,
}

impl<I: AsyncRead + Unpin> AsyncRead for Watched<I> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let read = Pin::new(&mut this.io).poll_read(context, buf);
        if let Poll::Ready(Ok(())) = &read
            && buf.filled().len() > before
        {
            this.clock.received(&buf.filled()[before..]);
        }
        read
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Watched<I> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(context, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(context, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
