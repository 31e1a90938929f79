//! The `openai` backend against an endpoint that misbehaves on demand (`rialto_testkit::llm` has the prompts).

use std::time::Duration;

use rialto_a2a::{
    json,
    v1::{Role, TaskState},
    wkt::Struct,
};
use rialto_agent_runner::backend::{
    AgentEvent, Backend as _, End, Events, Turn,
    openai::{Openai, Options},
};
use rialto_runtime::{
    Secret,
    config::{self, ContextWindow, TurnEnd},
    units::Span,
};
use rialto_testkit::{
    chaos::ChaosProxy,
    llm::{KEY, Llm},
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use crate::{
    fake::message,
    lab::{Lab, agent},
};

/// Every prompt that ends well, or has to be given up, does so within this.
const PATIENCE: Duration = Duration::from_secs(10);

fn options(llm: &Llm) -> Options {
    install_tls();
    Options {
        agent: "a".to_owned(),
        model: "fake".to_owned(),
        base_url: llm.base_url(),
        api_key: Some(KEY.to_owned().into()),
        first_token_timeout: Duration::from_secs(5),
        stall_timeout: Duration::from_millis(300),
        first_pause: Duration::from_millis(5),
        ..Options::default()
    }
}

fn install_tls() {
    // A second call in one process finds the first one's work.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
}

/// What became of a turn.
#[derive(Debug, PartialEq)]
struct Heard {
    end: End,
    text: String,
    usage: Value,
    metadata: Value,
}

async fn run(backend: &Openai, turn: &Turn) -> Heard {
    let (events, mut receiver) = Events::channel();
    let mut heard =
        Heard { end: End::Done(Vec::new()), text: String::new(), usage: Value::Null, metadata: Value::Null };
    let said = async {
        while let Some(event) = receiver.recv().await {
            let plain = |data: Struct| json::to_value(&data).unwrap();
            match event {
                AgentEvent::Text(text) => heard.text.push_str(&text),
                AgentEvent::Usage(usage) => heard.usage = plain(usage),
                AgentEvent::Metadata(metadata) => heard.metadata = plain(metadata),
                other => panic!("{other:?}"),
            }
        }
    };
    let end = async {
        let end = backend.run(turn, &events).await.expect("no attempt of the runner's is wasted");
        drop(events);
        end
    };
    let (end, ()) = timeout(PATIENCE, async { tokio::join!(end, said) }).await.expect("it ends");
    Heard { end, ..heard }
}

fn turn(prompt: &str) -> Turn {
    Turn { message: message(Role::User, prompt), ..Turn::default() }
}

async fn ask_with(options: Options, prompt: &str) -> Heard {
    run(&Openai::new(options).unwrap(), &turn(prompt)).await
}

async fn ask(llm: &Llm, prompt: &str) -> Heard {
    ask_with(options(llm), prompt).await
}

fn done() -> End {
    End::Done(Vec::new())
}

fn failed(reason: &str) -> End {
    End::Failed(reason.to_owned())
}

/// An agent of the configuration, as a runner opens it.
fn configured(llm: &Llm) -> config::Agent {
    install_tls();
    agent(config::Backend::Openai {
        model: "fake".to_owned(),
        base_url: Some(llm.base_url()),
        api_key: Some(Secret::from(KEY.to_owned())),
        system_prompt: Some("be brief".to_owned()),
        temperature: None,
        max_output_tokens: None,
        images: false,
        first_token_timeout: Span::secs(5),
        stall_timeout: Span::secs(5),
    })
}

#[tokio::test]
async fn an_answer_is_streamed_and_its_tokens_are_counted() {
    let llm = Llm::start().await.unwrap();
    let heard = ask(&llm, "text:5x10").await;
    assert_eq!((heard.end, heard.text.as_str()), (done(), "1 2 3 4 5 "));
    assert_eq!(heard.metadata, json!({"finishReason": "stop"}));
    assert_eq!(heard.usage, json!({"inputTokens": 10, "outputTokens": 5, "totalTokens": 15, "model": "fake"}));
    let requests = llm.requests();
    assert_eq!(requests.len(), 1);
    assert_eq!((&requests[0]["model"], &requests[0]["stream"]), (&json!("fake"), &json!(true)));
    llm.until_open(0).await;
}

#[tokio::test]
async fn the_task_keeps_the_answer_and_what_it_cost() {
    let llm = Llm::start().await.unwrap();
    let task = Lab::with([configured(&llm)]).ask("text:3x1").await;
    assert_eq!(task.state, TaskState::Completed);
    assert_eq!(task.artifact_text("answer"), "1 2 3 ");
    assert_eq!(task.agent_texts(), ["1 2 3 "]);
    let metadata = json::to_value(&task.metadata).unwrap();
    let usage = json!({"inputTokens": 20, "outputTokens": 3, "totalTokens": 23, "model": "fake"});
    assert_eq!(metadata, json!({"finishReason": "stop", "usage": usage}));
}

#[tokio::test]
async fn the_conversation_within_its_window_is_history() {
    let llm = Llm::start().await.unwrap();
    let mut agent = configured(&llm);
    agent.turn_end = TurnEnd::InputRequired;
    agent.context_window = ContextWindow { messages: 3, ..ContextWindow::default() };
    let lab = Lab::with([agent]);
    let task_id = lab.send("one").await;
    for text in ["two", "three"] {
        lab.over(&task_id).await;
        lab.turn(&task_id, message(Role::User, text)).await;
    }
    lab.over(&task_id).await;
    let contents = |request: &Value| {
        let lines = request["messages"].as_array().unwrap().iter();
        lines.map(|line| line["content"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let requests = llm.requests();
    assert_eq!(contents(&requests[1]), ["be brief", "one", "you said: one", "two"]);
    // The window begins with an answer, whose question nobody knows any more.
    assert_eq!(contents(&requests[2]), ["be brief", "two", "you said: two", "three"]);
}

#[tokio::test]
async fn a_busy_or_failing_endpoint_is_asked_again() {
    let llm = Llm::start().await.unwrap();
    for (n, prompt) in ["status:429:2", "status:500:3", "status:503", "status:408", "cut:0"].iter().enumerate() {
        let before = llm.requests().len();
        let heard = ask(&llm, prompt).await;
        assert_eq!((heard.end, heard.text.as_str()), (done(), "recovered"), "{prompt}");
        assert_eq!(llm.requests().len() - before, [3, 4, 2, 2, 2][n], "{prompt}");
    }
}

#[tokio::test]
async fn an_endpoint_that_keeps_failing_is_given_up_once() {
    let llm = Llm::start().await.unwrap();
    let task = Lab::with([configured(&llm)]).ask("status:503:99").await;
    assert_eq!((task.state, task.attempts), (TaskState::Failed, 1));
    // Not a word of what the endpoint says about itself.
    assert_eq!(task.status_text(), "the model endpoint failed (HTTP 503)");
    assert_eq!(task.agent_texts(), ["the model endpoint failed (HTTP 503)"]);
    assert_eq!(llm.requests().len(), 4);
}

#[tokio::test]
async fn the_endpoint_says_when_to_come_back() {
    let llm = Llm::start().await.unwrap();
    let started = Instant::now();
    assert_eq!(ask(&llm, "status:429:1:0.3").await.text, "recovered");
    assert!(started.elapsed() >= Duration::from_millis(300));
    // Nobody waits that long for an answer.
    assert_eq!(ask(&llm, "status:429:1:61").await.end, failed("the model endpoint is busy (HTTP 429)"));
    // The turn would be over by then.
    let hasty = Options { turn_timeout: Duration::from_secs(2), ..options(&llm) };
    assert_eq!(ask_with(hasty, "status:503:1:3").await.end, failed("the model endpoint failed (HTTP 503)"));
    assert_eq!(llm.requests().len(), 4);
}

#[tokio::test]
async fn a_refusal_is_not_asked_for_again() {
    let llm = Llm::start().await.unwrap();
    for (prompt, end) in [
        ("status:400:9", failed("the model endpoint refused the request (HTTP 400)")),
        ("status:404:9", failed("the model endpoint refused the request (HTTP 404)")),
        ("code:429:insufficient_quota", failed("the model endpoint's quota is used up")),
        ("code:400:context_length_exceeded", failed("the conversation is too long for the model")),
        (
            "code:400:content_filter",
            End::Rejected("the model endpoint's content filter does not allow an answer".to_owned()),
        ),
    ] {
        let before = llm.requests().len();
        let heard = ask(&llm, prompt).await;
        assert_eq!((heard.end, heard.text.as_str(), llm.requests().len() - before), (end, "", 1), "{prompt}");
    }
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_without_one_none_is_sent() {
    let llm = Llm::start().await.unwrap();
    for api_key in [Some(Secret::from("sk-wrong".to_owned())), None] {
        let heard = ask_with(Options { api_key, ..options(&llm) }, "hello").await;
        assert_eq!(heard.end, failed("the model endpoint refused the request (HTTP 401)"));
    }
    assert_eq!(llm.requests().len(), 0);
}

#[tokio::test]
async fn whoever_is_redirected_to_learns_nothing() {
    let llm = Llm::start().await.unwrap();
    assert_eq!(ask(&llm, "redirect").await.end, failed("the model endpoint refused the request (HTTP 307)"));
    assert_eq!(llm.requests().len(), 1);
}

#[tokio::test]
async fn an_answer_that_is_cut_off_stays_and_is_not_asked_for_again() {
    let llm = Llm::start().await.unwrap();
    for prompt in ["cut:2:9", "short", "garbage:2", "error:2", "stall"] {
        let before = llm.requests().len();
        let heard = ask(&llm, prompt).await;
        assert_eq!((heard.end, heard.text.as_str()), (failed("the model's answer was cut off"), "one two"), "{prompt}");
        assert_eq!(llm.requests().len() - before, 1, "{prompt}");
    }
    let task = Lab::with([configured(&llm)]).ask("cut:2:9").await;
    assert_eq!((task.state, task.attempts), (TaskState::Failed, 1));
    assert_eq!(task.artifact_text("answer"), "one two");
}

#[tokio::test]
async fn nonsense_is_no_answer() {
    let llm = Llm::start().await.unwrap();
    for (prompt, reason, requests) in [
        ("garbage:0", "the model endpoint gave an invalid answer", 1),
        ("page", "the model endpoint gave an invalid answer", 1),
        ("huge", "the model endpoint gave an invalid answer", 1),
        ("error:0", "the model endpoint failed (HTTP 503)", 4),
        ("cut:0:9", "the model's answer was cut off", 4),
    ] {
        let before = llm.requests().len();
        let heard = ask(&llm, prompt).await;
        assert_eq!((heard.end, heard.text.as_str()), (failed(reason), ""), "{prompt}");
        assert_eq!(llm.requests().len() - before, requests, "{prompt}");
    }
}

#[tokio::test]
async fn silence_has_a_deadline() {
    let llm = Llm::start().await.unwrap();
    let hasty = Options { first_token_timeout: Duration::from_millis(200), ..options(&llm) };
    // Empty pieces are silence too.
    for prompt in ["deaf", "silent"] {
        let heard = ask_with(hasty.clone(), prompt).await;
        assert_eq!(heard.end, failed("the model did not begin to answer in time"), "{prompt}");
    }
    assert_eq!(llm.requests().len(), 2);
    llm.until_open(0).await;
    // Thoughts are not.
    let heard = ask_with(Options { stall_timeout: Duration::from_millis(250), ..hasty }, "think").await;
    assert_eq!((heard.end, heard.text.as_str()), (done(), "one two"));
}

#[tokio::test]
async fn answers_end_in_many_ways() {
    let llm = Llm::start().await.unwrap();
    let rejected = End::Rejected("the model endpoint's content filter does not allow an answer".to_owned());
    for (prompt, end, reason) in [
        ("finish:length", done(), "length"),
        ("finish:whatever", done(), "other"),
        ("finish:content_filter", rejected, "content_filter"),
        ("finish:tool_calls", failed("the model asked for a tool, and this agent has none"), "tool_calls"),
        ("bare", done(), "stop"),
        ("lingers", done(), "stop"),
        ("document", done(), "stop"),
    ] {
        let heard = ask(&llm, prompt).await;
        let expected = (end, "one two", &json!({"finishReason": reason}));
        assert_eq!((heard.end, heard.text.as_str(), &heard.metadata), expected, "{prompt}");
        assert_eq!(heard.usage["model"], "fake", "{prompt}");
    }
}

#[tokio::test]
async fn a_cancel_hangs_up_at_once() {
    let llm = Llm::start().await.unwrap();
    let backend = Openai::new(Options { stall_timeout: Duration::from_secs(60), ..options(&llm) }).unwrap();
    for prompt in ["stall", "deaf", "status:429:9:30"] {
        let turn = turn(prompt);
        let before = llm.requests().len();
        let cancel = async {
            match prompt {
                "status:429:9:30" => {
                    while llm.requests().len() == before {
                        tokio::task::yield_now().await;
                    }
                }
                _ => llm.until_open(1).await,
            }
            turn.cancel.cancel();
        };
        let (heard, ()) = tokio::join!(run(&backend, &turn), cancel);
        assert!(matches!(heard.end, End::Failed(_)), "{heard:?}");
        timeout(PATIENCE, llm.until_open(0)).await.expect("the endpoint sees it");
    }
    let lab = Lab::with([configured(&llm)]);
    let task_id = lab.send("stall").await;
    lab.until(&task_id, |task| !task.events.is_empty()).await;
    lab.cancel(&task_id, false);
    lab.over(&task_id).await;
    timeout(PATIENCE, llm.until_open(0)).await.expect("the endpoint sees it");
}

#[tokio::test]
async fn a_turn_that_is_dropped_hangs_up() {
    let llm = Llm::start().await.unwrap();
    let backend = Openai::new(Options { stall_timeout: Duration::from_secs(60), ..options(&llm) }).unwrap();
    let turn = turn("stall");
    let (events, _receiver) = Events::channel();
    tokio::select! {
        _ = backend.run(&turn, &events) => unreachable!("a stall"),
        () = llm.until_open(1) => {}
    }
    timeout(PATIENCE, llm.until_open(0)).await.expect("the endpoint sees it");
}

#[tokio::test]
async fn a_network_that_comes_back_is_good_enough() {
    let llm = Llm::start().await.unwrap();
    let proxy = ChaosProxy::start(llm.address()).await.unwrap();
    let base_url = format!("http://{}/v1/", proxy.address());
    let patient = Options { base_url, first_pause: Duration::from_millis(100), ..options(&llm) };
    proxy.cut();
    let mend = async {
        while proxy.accepted() == 0 {
            tokio::task::yield_now().await;
        }
        proxy.mend();
    };
    let (heard, ()) = tokio::join!(ask_with(patient.clone(), "hello"), mend);
    assert_eq!((heard.end, heard.text.as_str()), (done(), "you said: hello"));

    drop(proxy);
    let hasty = Options { first_pause: Duration::from_millis(1), ..patient };
    assert_eq!(ask_with(hasty, "hello").await.end, failed("the model endpoint cannot be reached"));
}

#[tokio::test]
async fn what_cannot_work_stops_the_start() {
    install_tls();
    let error = |change: fn(&mut Options)| {
        let mut options = Options { model: "m".to_owned(), ..Options::default() };
        change(&mut options);
        format!("{:#}", Openai::new(options).unwrap_err())
    };
    assert_eq!(error(|it| it.api_key = Some("a\nb".to_owned().into())), "the API key holds characters that no key has");
    assert_eq!(error(|it| it.base_url = "ftp://x".to_owned()), "the base URL must begin with http:// or https://");
    assert!(error(|it| it.base_url = "nowhere".to_owned()).starts_with("the base URL cannot be used"));
}
