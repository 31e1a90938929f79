//! Server-sent events, read as the HTML standard says: any line end, fields over several lines, comments.

use std::collections::VecDeque;

use bytes::Bytes;
use futures::{StreamExt as _, stream, stream::BoxStream};

use super::{Failure, Result};

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Event {
    /// `data`, its lines joined by `\n`.
    pub(super) data: String,
    /// The newest `id` so far.
    pub(super) id: Option<String>,
}

pub(super) type Events = BoxStream<'static, Result<Event>>;

/// The events in a stream of chunks. What follows the last blank line is not an event.
pub(super) fn events(chunks: BoxStream<'static, Result<Bytes>>, limit: usize) -> Events {
    let start = (chunks, Parser::new(limit), VecDeque::new());
    stream::try_unfold(start, |(mut chunks, mut parser, mut ready)| async move {
        loop {
            if let Some(event) = ready.pop_front() {
                return Ok(Some((event, (chunks, parser, ready))));
            }
            let Some(chunk) = chunks.next().await.transpose()? else { return Ok(None) };
            ready.extend(parser.feed(&chunk)?);
        }
    })
    .boxed()
}

/// Cuts bytes into events, however they are cut into chunks.
#[derive(Debug)]
struct Parser {
    limit: usize,
    /// The line that is not complete yet.
    line: Vec<u8>,
    /// The last byte was a CR; an LF right after it belongs to the same line end.
    after_cr: bool,
    /// A byte order mark may come first.
    first: bool,
    data: Option<String>,
    id: Option<String>,
}

impl Parser {
    const fn new(limit: usize) -> Self {
        Self { limit, line: Vec::new(), after_cr: false, first: true, data: None, id: None }
    }

    fn feed(&mut self, chunk: &[u8]) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        let mut rest = chunk;
        while !rest.is_empty() {
            if std::mem::take(&mut self.after_cr) && rest[0] == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let end = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let (line, after) = end.map_or((rest, None), |end| (&rest[..end], Some(&rest[end..])));
            if self.line.len() + line.len() + self.data.as_ref().map_or(0, String::len) > self.limit {
                return Err(Failure::garbage(format_args!("an event larger than {} MiB", self.limit >> 20)));
            }
            self.line.extend_from_slice(line);
            let Some(after) = after else { break };
            self.after_cr = after[0] == b'\r';
            rest = &after[1..];
            let line = std::mem::take(&mut self.line);
            events.extend(self.line(&line));
        }
        Ok(events)
    }

    /// A complete line, without its end; a blank one completes an event.
    fn line(&mut self, line: &[u8]) -> Option<Event> {
        let line = String::from_utf8_lossy(line);
        let line = if std::mem::take(&mut self.first) { line.trim_start_matches('\u{feff}') } else { &line };
        if line.is_empty() {
            return self.data.take().map(|data| Event { data, id: self.id.clone() });
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            // Comments, `event`, `retry` and what is to come: nothing that this client acts on.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(chunks: &[&[u8]]) -> Vec<(String, Option<String>)> {
        let mut parser = Parser::new(1000);
        let events = chunks.iter().flat_map(|chunk| parser.feed(chunk).unwrap());
        events.map(|event| (event.data, event.id)).collect()
    }

    fn event(data: &str, id: Option<&str>) -> (String, Option<String>) {
        (data.to_owned(), id.map(ToOwned::to_owned))
    }

    #[test]
    fn any_line_end_ends_a_line() {
        for stream in ["data: a\n\ndata:b\n\n", "data: a\r\n\r\ndata:b\r\n\r\n", "data: a\r\rdata:b\r\r"] {
            assert_eq!(parse(&[stream.as_bytes()]), [event("a", None), event("b", None)], "{stream:?}");
        }
    }

    #[test]
    fn data_over_several_lines_is_one_text() {
        assert_eq!(parse(&[b"data: {\ndata:  1\ndata\ndata:}\n\n"]), [event("{\n 1\n\n}", None)]);
    }

    #[test]
    fn comments_and_unknown_fields_are_no_events() {
        assert_eq!(parse(&[b"\xef\xbb\xbf: hi\n\nretry: 5\nx: y\n\nevent: error\ndata: a\n\n"]), [event("a", None)]);
    }

    #[test]
    fn an_id_stays_until_the_next_one() {
        let stream = b"id: 1\ndata: a\n\ndata: b\n\nid\ndata: c\n\nid: 4\n\n";
        assert_eq!(parse(&[stream]), [event("a", Some("1")), event("b", Some("1")), event("c", Some(""))]);
    }

    #[test]
    fn what_a_cut_leaves_behind_is_no_event() {
        assert_eq!(parse(&[b"data: a\n\ndata: {\"half\":"]), [event("a", None)]);
        assert_eq!(parse(&[b"data: a\n\ndata: whole\n"]), [event("a", None)]);
    }

    #[test]
    fn an_endless_line_is_refused_not_stored() {
        let mut parser = Parser::new(100);
        assert!((0..20).any(|_| parser.feed(b"data: aaaaaaaaaa").is_err()));
        let mut parser = Parser::new(100);
        assert!((0..20).any(|_| parser.feed(b"data: aaaaaaaaaa\n").is_err()));
    }

    proptest! {
        #[test]
        fn where_chunks_are_cut_does_not_matter(
            lines in prop::collection::vec("(data|id|event|)(:| |: )?[aé:]{0,4}(\r\n|\n|\r)", 0..20),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let stream = lines.concat().into_bytes();
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let chunks: Vec<_> = cuts.windows(2).map(|cut| &stream[cut[0]..cut[1]]).collect();
            prop_assert_eq!(parse(&chunks), parse(&[&stream]));
        }
    }
}
