//! The request: A2A messages as the messages of a chat.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rialto_a2a::{
    json,
    v1::{Message, Part, Role, part},
};
use serde::Serialize;

use super::{Options, Turn};

/// The body of a request.
#[derive(Debug, Serialize)]
pub(super) struct Request<'a> {
    model: &'a str,
    messages: Vec<Line>,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f64>,
    /// What most servers know.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    /// What OpenAI's newer models insist on.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
}

#[derive(Debug, Serialize)]
struct StreamOptions {
    include_usage: bool,
}

/// A message of a chat.
#[derive(Debug, PartialEq, Serialize)]
struct Line {
    role: &'static str,
    content: Content,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    /// Text and images; many servers take plain text only, so this form is for messages with images.
    Pieces(Vec<Piece>),
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Piece {
    Text { text: String },
    ImageUrl { image_url: ImageUrl },
}

#[derive(Debug, PartialEq, Serialize)]
struct ImageUrl {
    url: String,
}

impl<'a> Request<'a> {
    /// The conversation before the turn, then its message.
    pub(super) fn new(options: &'a Options, newer_limit: bool, turn: &Turn) -> Self {
        let (max_tokens, max_completion_tokens) = match newer_limit {
            true => (None, options.max_output_tokens),
            false => (options.max_output_tokens, None),
        };
        Self {
            model: &options.model,
            messages: lines(options, turn),
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            temperature: options.temperature,
            max_tokens,
            max_completion_tokens,
        }
    }
}

fn lines(options: &Options, turn: &Turn) -> Vec<Line> {
    let system =
        options.system_prompt.iter().map(|prompt| Line { role: "system", content: Content::Text(prompt.clone()) });
    let mut spoken: Vec<(Role, Vec<Piece>)> = Vec::new();
    for message in turn.conversation.iter().chain([&turn.message]) {
        let role = if message.role() == Role::Agent { Role::Agent } else { Role::User };
        let pieces = pieces(message, options.images && role == Role::User);
        match spoken.last_mut() {
            // The window cut off the question to this answer.
            None if role == Role::Agent => {}
            // Templates of many models accept nothing but turns by turns; a canceled turn has no answer.
            Some((last, said)) if *last == role => {
                for piece in pieces {
                    add(said, piece, "\n\n");
                }
            }
            _ => spoken.push((role, pieces)),
        }
    }
    let spoken = spoken.into_iter().map(|(role, mut pieces)| {
        let content = match pieces.as_mut_slice() {
            [] => Content::Text(String::new()),
            [Piece::Text { text }] => Content::Text(std::mem::take(text)),
            _ => Content::Pieces(pieces),
        };
        Line { role: if role == Role::Agent { "assistant" } else { "user" }, content }
    });
    system.chain(spoken).collect()
}

fn pieces(message: &Message, images: bool) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(1);
    for part in &message.parts {
        if let Some(piece) = piece(part, images) {
            add(&mut pieces, piece, "\n");
        }
    }
    pieces
}

/// Texts in a row are one text.
fn add(pieces: &mut Vec<Piece>, piece: Piece, between: &str) {
    match (pieces.last_mut(), piece) {
        (Some(Piece::Text { text: last }), Piece::Text { text }) => {
            last.push_str(between);
            last.push_str(&text);
        }
        (_, piece) => pieces.push(piece),
    }
}

/// A part as a model can take it; of what it cannot take, that it was there.
fn piece(part: &Part, images: bool) -> Option<Piece> {
    let is_image = images && part.media_type.starts_with("image/");
    let text = match part.content.as_ref()? {
        part::Content::Text(text) => text.clone(),
        part::Content::Data(data) => json::to_string(data).ok()?,
        part::Content::Url(url) if is_image => return Some(image(url.clone())),
        part::Content::Url(url) => format!("[{}: {url}]", label(part)),
        part::Content::Raw(raw) if is_image => {
            return Some(image(format!("data:{};base64,{}", part.media_type, STANDARD.encode(raw))));
        }
        part::Content::Raw(raw) => match std::str::from_utf8(raw) {
            Ok(text) if is_text(&part.media_type) => text.to_owned(),
            _ => format!("[{}: {} bytes]", label(part), raw.len()),
        },
    };
    Some(Piece::Text { text })
}

const fn image(url: String) -> Piece {
    Piece::ImageUrl { image_url: ImageUrl { url } }
}

fn is_text(media_type: &str) -> bool {
    media_type.starts_with("text/") || media_type.starts_with("application/json")
}

/// `file notes.pdf, application/pdf`, as far as it is known.
fn label(part: &Part) -> String {
    let name = if part.filename.is_empty() { "file".to_owned() } else { format!("file {}", part.filename) };
    if part.media_type.is_empty() { name } else { format!("{name}, {}", part.media_type) }
}

#[cfg(test)]
mod tests {
    use rialto_a2a::wkt::Struct;
    use serde_json::{Value, json};

    use super::{super::super::text_part, *};

    fn message(role: Role, parts: Vec<Part>) -> Message {
        Message { role: role.into(), parts, ..Message::default() }
    }

    fn say(role: Role, text: &str) -> Message {
        message(role, vec![text_part(text)])
    }

    fn part(content: part::Content, media_type: &str, filename: &str) -> Part {
        Part {
            content: Some(content),
            media_type: media_type.to_owned(),
            filename: filename.to_owned(),
            ..Part::default()
        }
    }

    fn request(options: &Options, conversation: Vec<Message>, message: Message) -> Value {
        let turn = Turn { conversation, message, ..Turn::default() };
        serde_json::to_value(Request::new(options, false, &turn)).unwrap()
    }

    #[test]
    fn the_conversation_comes_between_the_system_prompt_and_the_message() {
        let options =
            Options { model: "m".to_owned(), system_prompt: Some("be kind".to_owned()), ..Options::default() };
        let conversation = vec![say(Role::User, "one"), say(Role::Agent, "two")];
        let expected = json!({
            "model": "m",
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three"},
            ],
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        assert_eq!(request(&options, conversation, say(Role::User, "three")), expected);
    }

    #[test]
    fn roles_take_turns_whatever_the_window_holds() {
        let conversation = vec![
            say(Role::Agent, "an answer whose question is outside the window"),
            say(Role::User, "a"),
            say(Role::User, "b"),
            say(Role::Agent, "c"),
            say(Role::Agent, "d"),
        ];
        let messages = &request(&Options::default(), conversation, say(Role::User, "e"))["messages"];
        let expected = json!([
            {"role": "user", "content": "a\n\nb"},
            {"role": "assistant", "content": "c\n\nd"},
            {"role": "user", "content": "e"},
        ]);
        assert_eq!(messages, &expected);
    }

    #[test]
    fn every_part_is_something_a_model_can_read() {
        let data: Struct = [("n", 1)].into_iter().collect();
        let data = rialto_a2a::wkt::value::Kind::StructValue(data).into();
        let url = |media_type| part(part::Content::Url("https://x.test/a".to_owned()), media_type, "a");
        let raw = |bytes: &'static [u8], media_type| part(part::Content::Raw(bytes.into()), media_type, "");
        let parts = vec![
            text_part("look"),
            part(part::Content::Data(data), "", ""),
            url("image/png"),
            raw(b"\x01\x02", "image/png"),
            raw(b"a,b", "text/csv"),
            raw(b"\xff", "text/plain"),
            raw(b"\x01", ""),
        ];
        let without = request(&Options::default(), Vec::new(), message(Role::User, parts.clone()));
        assert_eq!(
            without["messages"][0]["content"],
            "look\n{\"n\":1}\n[file a, image/png: https://x.test/a]\n[file, image/png: 2 bytes]\na,b\n\
             [file, text/plain: 1 bytes]\n[file: 1 bytes]"
        );
        let options = Options { images: true, ..Options::default() };
        let with = request(&options, vec![message(Role::User, parts[2..3].to_vec())], message(Role::User, parts));
        let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        let expected = json!([
            image("https://x.test/a"),
            {"type": "text", "text": "look\n{\"n\":1}"},
            image("https://x.test/a"),
            image("data:image/png;base64,AQI="),
            {"type": "text", "text": "a,b\n[file, text/plain: 1 bytes]\n[file: 1 bytes]"},
        ]);
        assert_eq!(with["messages"][0]["content"], expected);
        // An assistant's message cannot hold images.
        let options = Options { images: true, ..Options::default() };
        let conversation = vec![say(Role::User, "draw"), message(Role::Agent, vec![url("image/png")])];
        let answered = request(&options, conversation, say(Role::User, "nice"));
        assert_eq!(answered["messages"][1]["content"], "[file a, image/png: https://x.test/a]");
    }

    #[test]
    fn limits_go_by_the_name_that_the_endpoint_knows() {
        let options = Options { temperature: Some(0.5), max_output_tokens: Some(7), ..Options::default() };
        let turn = Turn { message: say(Role::User, "x"), ..Turn::default() };
        let limits = |newer| {
            let request = serde_json::to_value(Request::new(&options, newer, &turn)).unwrap();
            (request["temperature"].clone(), request["max_tokens"].clone(), request["max_completion_tokens"].clone())
        };
        assert_eq!(limits(false), (json!(0.5), json!(7), Value::Null));
        assert_eq!(limits(true), (json!(0.5), Value::Null, json!(7)));
    }
}
