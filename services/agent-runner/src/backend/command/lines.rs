use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt as _};

/// A line, or a piece of one that is longer than the bound.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Without the line feed.
    pub bytes: Vec<u8>,
    /// The line ends here.
    pub whole: bool,
}

/// Reads lines in bounded memory.
#[derive(Debug)]
pub(super) struct Lines<R> {
    reader: R,
    max: usize,
    buffer: Vec<u8>,
}

impl<R: AsyncBufRead + Unpin> Lines<R> {
    pub(super) fn new(reader: R, max: usize) -> Self {
        Self { reader, max, buffer: Vec::new() }
    }

    /// The next line; one longer than the bound comes in pieces. The last may lack its line feed. Cancel-safe.
    pub(super) async fn next(&mut self) -> io::Result<Option<Piece>> {
        loop {
            let available = self.reader.fill_buf().await?;
            if available.is_empty() {
                let bytes = std::mem::take(&mut self.buffer);
                return Ok((!bytes.is_empty()).then_some(Piece { bytes, whole: true }));
            }
            let end = available.iter().position(|byte| *byte == b'\n');
            let room = self.max - self.buffer.len();
            let take = end.unwrap_or(available.len()).min(room);
            self.buffer.extend_from_slice(&available[..take]);
            let whole = end == Some(take);
            self.reader.consume(take + usize::from(whole));
            if whole || self.buffer.len() == self.max {
                return Ok(Some(Piece { bytes: std::mem::take(&mut self.buffer), whole }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A reader that hands out the given chunks one by one.
    fn read(chunks: Vec<Vec<u8>>, max: usize) -> Vec<Piece> {
        let chunks = chunks.into_iter().map(|chunk| Ok::<_, io::Error>(bytes::Bytes::from(chunk)));
        let reader = tokio_util::io::StreamReader::new(futures::stream::iter(chunks));
        let mut lines = Lines::new(reader, max);
        futures::executor::block_on(async {
            let mut pieces = Vec::new();
            while let Some(piece) = lines.next().await.unwrap() {
                pieces.push(piece);
            }
            pieces
        })
    }

    proptest! {
        #[test]
        fn pieces_are_bounded_and_lose_nothing(
            chunks in proptest::collection::vec(proptest::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 1..20), 0..20),
            max in 1_usize..12,
        ) {
            let all = chunks.concat();
            let pieces = read(chunks, max);
            let mut joined = Vec::new();
            for piece in &pieces {
                prop_assert!(piece.bytes.len() <= max);
                prop_assert!(!piece.bytes.contains(&b'\n'));
                joined.extend_from_slice(&piece.bytes);
                if piece.whole {
                    joined.push(b'\n');
                }
            }
            let mut expected = all;
            if expected.last().is_some_and(|last| *last != b'\n') && pieces.last().is_some_and(|last| last.whole) {
                expected.push(b'\n');
            }
            prop_assert_eq!(joined, expected);
        }
    }
}
