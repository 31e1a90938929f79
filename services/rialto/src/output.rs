//! Writing to stdout and stderr without the panics of `println!` when nobody reads.

use std::{
    borrow::Cow,
    io::{self, Write as _},
    sync::atomic::{AtomicBool, Ordering},
};

use rialto_runtime::telemetry::{Format, say_json};
use tracing::Level;

/// Writes a line to stdout at once.
pub(crate) fn line(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.write_all(b"\n")?;
    stdout.flush()
}

/// Writes text to stdout at once.
pub(crate) fn text(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Whether stderr is a log of JSON lines.
static JSON_LOG: AtomicBool = AtomicBool::new(false);

/// From now on stderr is the log of a server: its problems are lines of the log, as JSON when that is the format.
pub(crate) fn log_problems(format: Format) {
    JSON_LOG.store(format == Format::Json, Ordering::Relaxed);
}

/// Says on stderr what is wrong.
pub(crate) fn error(problem: &str) {
    say(Level::ERROR, "error", problem);
}

/// Says on stderr what may be wrong.
pub(crate) fn warning(problem: &str) {
    say(Level::WARN, "warning", problem);
}

fn say(level: Level, name: &str, problem: &str) {
    match JSON_LOG.load(Ordering::Relaxed) {
        true => say_json(level, problem),
        false => complain(&format!("{name}: {problem}")),
    }
}

/// Writes a line to stderr, if somebody listens.
pub(crate) fn complain(text: &str) {
    let mut stderr = io::stderr().lock();
    // There is no third place to say that this failed.
    drop(writeln!(stderr, "{text}"));
}

/// Text of a stranger as a terminal may see it: escape sequences are shown, not obeyed.
pub(crate) fn harmless(text: &str) -> Cow<'_, str> {
    let dangerous = |c: char| (c.is_control() && !matches!(c, '\n' | '\t')) || is_bidi(c);
    if !text.contains(dangerous) {
        return Cow::Borrowed(text);
    }
    let show = |c: char| match c {
        '\u{0}'..='\u{1f}' if dangerous(c) => char::from_u32(0x2400 + u32::from(c)).unwrap_or('\u{fffd}'),
        _ if dangerous(c) => '\u{fffd}',
        _ => c,
    };
    // A line end of Windows is a line end.
    Cow::Owned(text.replace("\r\n", "\n").chars().map(show).collect())
}

/// Characters that change the order of what is around them.
const fn is_bidi(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::harmless;

    #[test]
    fn what_an_agent_writes_does_not_move_the_cursor() {
        assert_eq!(harmless("plain é\n\ttext\r\n"), "plain é\n\ttext\n");
        assert_eq!(harmless("\u{1b}[2Jgone\u{7}\u{9b}31m\u{202e}txt\r"), "␛[2Jgone␇\u{fffd}31m\u{fffd}txt␍");
    }
}
