//! The response: events of a stream, or one JSON document from an endpoint that does not stream.

use reqwest::{Response, header::CONTENT_TYPE};
use rialto_net::sse::Parser;
use serde::Deserialize;
use serde_json::Value;

/// An answer in one document: what the answer's text may be (8 MiB), and what JSON adds.
const MAX_DOCUMENT: usize = 12 << 20;
/// The largest event; a piece of an answer is some hundred bytes.
const MAX_EVENT: usize = 1 << 20;

/// Why the rest of a response cannot be read.
#[derive(Debug)]
pub(super) enum Broken {
    /// The connection failed.
    Connection(reqwest::Error),
    /// It is not an answer in any form that is known here.
    Invalid(String),
}

/// What one event says.
#[derive(Debug)]
pub(super) enum Event {
    Chunk(Box<Chunk>),
    /// The endpoint says that nothing follows.
    Done,
}

/// A response that is being read.
#[derive(Debug)]
pub(super) struct Answer {
    response: Response,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Stream(Parser),
    Document,
    /// It was read.
    Over,
}

impl Answer {
    pub(super) fn new(response: Response) -> Result<Self, Broken> {
        let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        let form = match kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
            "application/json" => Form::Document,
            // Somebody else's page, such as a proxy's.
            "text/html" => return Err(Broken::Invalid("a web page".to_owned())),
            // Some endpoints name their streams wrong, or not at all.
            _ => Form::Stream(Parser::new(MAX_EVENT)),
        };
        Ok(Self { response, form })
    }

    /// The next event; `None` at the end of the response.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, Broken> {
        match &mut self.form {
            Form::Stream(parser) => loop {
                if let Some(event) = parser.pop() {
                    return match event.data.trim_ascii() {
                        "[DONE]" => Ok(Some(Event::Done)),
                        json => Ok(Some(Event::Chunk(Box::new(parse(json.as_bytes())?)))),
                    };
                }
                match self.response.chunk().await.map_err(Broken::Connection)? {
                    Some(bytes) => {
                        parser.feed(&bytes).map_err(|_| Broken::Invalid("an event is too large".to_owned()))?;
                    }
                    None => return Ok(None),
                }
            },
            Form::Document => {
                let mut document = Vec::new();
                while let Some(bytes) = self.response.chunk().await.map_err(Broken::Connection)? {
                    if document.len() + bytes.len() > MAX_DOCUMENT {
                        return Err(Broken::Invalid("the document is too large".to_owned()));
                    }
                    document.extend_from_slice(&bytes);
                }
                self.form = Form::Over;
                Ok(Some(Event::Chunk(Box::new(parse(&document)?))))
            }
            Form::Over => Ok(None),
        }
    }
}

fn parse(json: &[u8]) -> Result<Chunk, Broken> {
    serde_json::from_slice(json).map_err(|error| Broken::Invalid(error.to_string()))
}

/// A piece of an answer, or a whole one. Everything may be missing or null, and unknown members may be there:
/// endpoints differ.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Chunk {
    pub id: Option<String>,
    pub model: Option<String>,
    choices: Option<Vec<Choice>>,
    usage: Option<Value>,
    error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Choice {
    index: Option<u32>,
    /// In a stream.
    delta: Option<Said>,
    /// In a document.
    message: Option<Said>,
    finish_reason: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Said {
    /// Text, or pieces some of which are text.
    content: Option<Value>,
    /// Text in place of an answer.
    refusal: Option<String>,
    /// What a model thinks before it speaks, by two names.
    reasoning_content: Option<Value>,
    reasoning: Option<Value>,
}

/// What the first choice says; more than one is never asked for.
#[derive(Debug, Default)]
pub(super) struct Piece {
    pub text: String,
    /// The model is at work, though nothing is said.
    pub thinking: bool,
    pub finish_reason: Option<String>,
}

impl Chunk {
    /// Takes out what is said.
    pub(super) fn piece(&mut self) -> Piece {
        let choices = self.choices.take().unwrap_or_default();
        let Some(choice) = choices.into_iter().find(|choice| choice.index.unwrap_or_default() == 0) else {
            return Piece::default();
        };
        let said = choice.delta.or(choice.message).unwrap_or_default();
        let thinking = [&said.reasoning_content, &said.reasoning].into_iter().flatten().any(|it| !is_empty(it));
        let mut text = text(said.content.unwrap_or_default());
        text.push_str(&said.refusal.unwrap_or_default());
        Piece { text, thinking, finish_reason: choice.finish_reason }
    }

    /// Tokens used, once they are known.
    pub(super) fn usage(&mut self) -> Option<Usage> {
        let usage = self.usage.take().filter(Value::is_object)?;
        let count = |pointer: &str| usage.pointer(pointer).and_then(Value::as_u64);
        Some(Usage {
            input: count("/prompt_tokens"),
            output: count("/completion_tokens"),
            total: count("/total_tokens"),
            cached_input: count("/prompt_tokens_details/cached_tokens"),
        })
    }

    /// What the endpoint says instead of an answer.
    pub(super) fn error(&mut self) -> Option<Value> {
        self.error.take().filter(|error| !is_empty(error))
    }
}

/// Tokens of a request and its answer, as far as the endpoint counts them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub input: Option<u64>,
    pub output: Option<u64>,
    pub total: Option<u64>,
    pub cached_input: Option<u64>,
}

fn text(content: Value) -> String {
    match content {
        Value::String(text) => text,
        Value::Array(pieces) => pieces.iter().filter_map(|piece| piece.get("text")?.as_str()).collect(),
        _ => String::new(),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(json: &str) -> Chunk {
        parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn what_endpoints_say_differently_reads_the_same() {
        for (json, said) in [
            (r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"logprobs":null}],"x":{}}"#, "a"),
            (r#"{"choices":[{"delta":{"content":null}}],"usage":null,"error":null}"#, ""),
            (r#"{"choices":[{"delta":null,"finish_reason":null}]}"#, ""),
            (r#"{"choices":[]}"#, ""),
            (r#"{"choices":null}"#, ""),
            (r#"{"choices":[{"index":1,"delta":{"content":"b"}},{"index":0,"delta":{"content":"a"}}]}"#, "a"),
            (r#"{"choices":[{"index":1,"delta":{"content":"b"}}]}"#, ""),
            (r#"{"choices":[{"delta":{"content":[{"type":"thinking"},{"type":"text","text":"a"},7]}}]}"#, "a"),
            (r#"{"choices":[{"delta":{"content":null,"refusal":"no"}}]}"#, "no"),
            (r#"{"choices":[{"message":{"role":"assistant","content":"whole"}}]}"#, "whole"),
            ("{}", ""),
        ] {
            let piece = chunk(json).piece();
            assert_eq!((piece.text.as_str(), piece.thinking), (said, false), "{json}");
        }
        for json in [r#"{"reasoning_content":"hm"}"#, r#"{"content":"","reasoning":[{"text":"hm"}]}"#] {
            let piece = chunk(&format!(r#"{{"choices":[{{"delta":{json}}}]}}"#)).piece();
            assert_eq!((piece.text.as_str(), piece.thinking), ("", true), "{json}");
        }
    }

    #[test]
    fn usage_is_what_can_be_read_of_it() {
        let mut whole = chunk(
            r#"{"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":2}}}"#,
        );
        let usage = whole.usage().unwrap();
        assert_eq!((usage.input, usage.output, usage.total, usage.cached_input), (Some(3), Some(4), Some(7), Some(2)));
        let usage = chunk(r#"{"usage":{"prompt_tokens":-1,"total_tokens":"many"}}"#).usage().unwrap();
        assert_eq!((usage.input, usage.output, usage.total), (None, None, None));
        assert!(chunk(r#"{"usage":7}"#).usage().is_none());
    }

    #[test]
    fn what_is_no_answer_is_invalid() {
        for json in ["", "nonsense", "[1]", r#"{"choices":"x"}"#] {
            assert!(matches!(parse(json.as_bytes()), Err(Broken::Invalid(_))), "{json}");
        }
    }
}
