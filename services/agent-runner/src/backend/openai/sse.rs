//! Server-sent events, as far as chat completions use them: the `data` of each event. Comments, which some
//! endpoints send to keep a connection, and all other fields are skipped.

use std::collections::VecDeque;

/// The largest event; a piece of an answer is some hundred bytes.
const MAX_EVENT: usize = 1 << 20;

/// An event is larger than any answer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooLarge;

/// Cuts bytes into events, however they are cut into chunks.
#[derive(Debug, Default)]
pub(super) struct Parser {
    /// A line whose end has not come.
    line: Vec<u8>,
    data: Option<Vec<u8>>,
    ready: VecDeque<Vec<u8>>,
}

impl Parser {
    /// Takes what was received.
    pub(super) fn feed(&mut self, mut chunk: &[u8]) -> Result<(), TooLarge> {
        while let Some(end) = chunk.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&chunk[..end], &chunk[end + 1..]);
            self.reserve(line)?;
            if self.line.is_empty() {
                self.end_line(line);
            } else {
                let mut whole = std::mem::take(&mut self.line);
                whole.extend_from_slice(line);
                self.end_line(&whole);
            }
            chunk = rest;
        }
        self.reserve(chunk)?;
        self.line.extend_from_slice(chunk);
        Ok(())
    }

    /// The next complete event.
    pub(super) fn pop(&mut self) -> Option<Vec<u8>> {
        self.ready.pop_front()
    }

    fn reserve(&self, more: &[u8]) -> Result<(), TooLarge> {
        let held = self.line.len() + self.data.as_ref().map_or(0, Vec::len);
        if held + more.len() > MAX_EVENT { Err(TooLarge) } else { Ok(()) }
    }

    /// A line without its end; a blank one completes an event.
    fn end_line(&mut self, line: &[u8]) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            self.ready.extend(self.data.take());
            return;
        }
        let Some(value) = line.strip_prefix(b"data:") else { return };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match &mut self.data {
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
            None => self.data = Some(value.to_vec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(chunks: &[&[u8]]) -> Vec<String> {
        let mut parser = Parser::default();
        for chunk in chunks {
            parser.feed(chunk).unwrap();
        }
        std::iter::from_fn(|| parser.pop()).map(|event| String::from_utf8(event).unwrap()).collect()
    }

    #[test]
    fn events_are_what_stands_before_a_blank_line() {
        assert_eq!(parse(&[b"data: a\n\ndata:b\r\n\r\ndata: half"]), ["a", "b"]);
        assert_eq!(parse(&[b"data: {\ndata:  1\ndata:\ndata:}\n\n"]), ["{\n 1\n\n}"]);
        assert_eq!(parse(&[b": PROCESSING\n\nid: 1\nevent: x\nretry: 5\ndata: a\n\nid: 2\n\n"]), ["a"]);
        assert_eq!(parse(&[b"<html>data: a</html>\n\n"]), Vec::<String>::new());
    }

    #[test]
    fn an_endless_event_is_refused_not_stored() {
        for piece in [[b'x'; 1000].as_slice(), &[b"data: ".as_slice(), &[b'x'; 1000], b"\n"].concat()] {
            let mut parser = Parser::default();
            let fed = (0..=MAX_EVENT / 900).find(|_| parser.feed(piece).is_err());
            assert!(fed.is_some() && parser.line.len() <= MAX_EVENT && parser.pop().is_none());
        }
    }

    proptest! {
        #[test]
        fn where_chunks_are_cut_does_not_matter(
            lines in prop::collection::vec("(data: ?|id: |: |)[aé:]{0,4}(\r\n|\n)", 0..20),
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
