use rialto_a2a::v1::{Artifact, Part, part};

use super::{AgentEvent, Backend, Chunk, Crash, End, Events, Turn};

/// Answers with the message: its text parts, joined by newlines, as text; all other parts as the artifact `parts`.
#[derive(Clone, Copy, Debug)]
pub struct Echo;

#[async_trait::async_trait]
impl Backend for Echo {
    fn reads_conversation(&self) -> bool {
        false
    }

    async fn run(&self, turn: &Turn, events: &Events) -> Result<End, Crash> {
        let mut texts = Vec::new();
        let mut others: Vec<Part> = Vec::new();
        for part in &turn.message.parts {
            match &part.content {
                Some(part::Content::Text(text)) => texts.push(text.as_str()),
                _ => others.push(part.clone()),
            }
        }
        if !texts.is_empty() {
            events.text(texts.join("\n")).await;
        }
        if !others.is_empty() {
            let artifact = Artifact { artifact_id: artifact_id(turn.number), parts: others, ..Artifact::default() };
            events.send(AgentEvent::Artifact(Box::new(Chunk { artifact, append: false, last: true }))).await;
        }
        Ok(End::Done(Vec::new()))
    }
}

/// Ids are unique in the task, which may have many turns.
fn artifact_id(turn: u32) -> String {
    if turn <= 1 { "parts".to_owned() } else { format!("parts-{turn}") }
}
