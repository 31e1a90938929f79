//! Server-sent events, read as the HTML standard says: any line end, fields over several lines, comments.

use std::collections::VecDeque;

/// One event. Its type and the time to reconnect are not kept: no client here acts on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// `data`, its lines joined by `\n`.
    pub data: String,
    /// The newest `id` so far.
    pub id: Option<String>,
}

/// An event is larger than the reader takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is larger than {0} bytes")]
pub struct TooLarge(usize);

/// Cuts bytes into events, however they are cut into chunks. What follows the last blank line is not an event.
#[derive(Debug)]
pub struct Parser {
    limit: usize,
    /// The line that is not complete yet.
    line: Vec<u8>,
    /// The last byte was a CR; an LF right after it belongs to the same line end.
    after_cr: bool,
    /// A byte order mark may come first.
    first: bool,
    data: Option<String>,
    id: Option<String>,
    ready: VecDeque<Event>,
}

impl Parser {
    /// Reads events of at most `limit` bytes.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self { limit, line: Vec::new(), after_cr: false, first: true, data: None, id: None, ready: VecDeque::new() }
    }

    /// Takes what was received.
    ///
    /// # Errors
    /// [`TooLarge`]; the parser is then of no further use.
    pub fn feed(&mut self, mut chunk: &[u8]) -> Result<(), TooLarge> {
        while !chunk.is_empty() {
            if std::mem::take(&mut self.after_cr) && chunk[0] == b'\n' {
                chunk = &chunk[1..];
                continue;
            }
            let end = chunk.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let line = &chunk[..end.unwrap_or(chunk.len())];
            if self.line.len() + line.len() + self.data.as_ref().map_or(0, String::len) > self.limit {
                return Err(TooLarge(self.limit));
            }
            let Some(end) = end else {
                self.line.extend_from_slice(line);
                break;
            };
            self.after_cr = chunk[end] == b'\r';
            chunk = &chunk[end + 1..];
            if self.line.is_empty() {
                self.end_line(line);
            } else {
                let mut whole = std::mem::take(&mut self.line);
                whole.extend_from_slice(line);
                self.end_line(&whole);
            }
        }
        Ok(())
    }

    /// The next complete event.
    pub fn pop(&mut self) -> Option<Event> {
        self.ready.pop_front()
    }

    /// A complete line, without its end; a blank one completes an event.
    fn end_line(&mut self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        let line = if std::mem::take(&mut self.first) { line.strip_prefix('\u{feff}').unwrap_or(&line) } else { &line };
        if line.is_empty() {
            self.ready.extend(self.data.take().map(|data| Event { data, id: self.id.clone() }));
            return;
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
            // Comments, `event`, `retry` and what is to come.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(chunks: &[&[u8]]) -> Vec<(String, Option<String>)> {
        let mut parser = Parser::new(1000);
        for chunk in chunks {
            parser.feed(chunk).unwrap();
        }
        std::iter::from_fn(|| parser.pop()).map(|event| (event.data, event.id)).collect()
    }

    fn event(data: &str, id: Option<&str>) -> (String, Option<String>) {
        (data.to_owned(), id.map(ToOwned::to_owned))
    }

    #[test]
    fn any_line_end_ends_a_line() {
        for stream in [
            "data: a\n\ndata:b\n\n",
            "data: a\r\n\r\ndata:b\r\n\r\n",
            "data: a\r\rdata:b\r\r",
            "data: a\n\ndata:b\r\n\r\ndata: half",
        ] {
            assert_eq!(parse(&[stream.as_bytes()]), [event("a", None), event("b", None)], "{stream:?}");
        }
    }

    #[test]
    fn data_over_several_lines_is_one_text() {
        assert_eq!(parse(&[b"data: {\ndata:  1\ndata\ndata:\ndata:}\n\n"]), [event("{\n 1\n\n\n}", None)]);
    }

    #[test]
    fn comments_and_unknown_fields_are_no_events() {
        assert_eq!(parse(&[b"\xef\xbb\xbf: hi\n\nretry: 5\nx: y\n\nevent: error\ndata: a\n\n"]), [event("a", None)]);
        assert_eq!(parse(&[b": PROCESSING\n\nevent: x\ndata: a\n\nid: 2\n\n"]), [event("a", None)]);
        assert_eq!(parse(&[b"<html>data: a</html>\n\n"]), []);
        assert_eq!(parse(&[b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"]), [event("a", None)], "one mark at most");
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
    fn an_endless_event_is_refused_not_stored() {
        for piece in [b"x".repeat(100), [b"data: ".as_slice(), &b"x".repeat(100), b"\n"].concat()] {
            let mut parser = Parser::new(1000);
            assert!((0..20).any(|_| parser.feed(&piece) == Err(TooLarge(1000))));
            assert!(parser.line.len() <= 1000 && parser.pop().is_none());
        }
        // Of whole events there may be any number.
        let mut parser = Parser::new(100);
        assert_eq!((0..200).map(|_| parser.feed(b"data: aaaaaaaaaa\n\n")).find(Result::is_err), None);
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
