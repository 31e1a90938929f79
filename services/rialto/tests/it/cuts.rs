//! Streams over a connection that breaks.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use crate::process::{Dev, lines, rialto, scripted, shown};

/// A TCP proxy that cuts every connection after so many bytes of answer.
struct Cutter {
    url: String,
    cuts: Arc<AtomicUsize>,
}

impl Cutter {
    fn start(target: &str, after: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let cuts = Arc::new(AtomicUsize::new(0));
        let (target, counter) = (target.strip_prefix("http://").unwrap().to_owned(), Arc::clone(&cuts));
        thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&target).unwrap());
                let counter = Arc::clone(&counter);
                pipe(client.try_clone().unwrap(), server.try_clone().unwrap(), usize::MAX, None);
                pipe(server, client, after, Some(counter));
            }
        });
        Self { url, cuts }
    }
}

fn pipe(mut from: TcpStream, mut to: TcpStream, mut left: usize, cuts: Option<Arc<AtomicUsize>>) {
    thread::spawn(move || {
        let mut buffer = [0; 512];
        loop {
            let n = from.read(&mut buffer).unwrap_or(0);
            let passed = n.min(left);
            left -= passed;
            if to.write_all(&buffer[..passed]).is_err() || n == 0 {
                break;
            }
            if left == 0 {
                if let Some(cuts) = &cuts {
                    cuts.fetch_add(1, Ordering::Relaxed);
                }
                break;
            }
        }
        drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
    });
}

#[test]
fn a_stream_that_is_cut_again_and_again_shows_every_event_once() {
    let folder = tempfile::tempdir().unwrap();
    for binding in ["jsonrpc", "rest", "grpc"] {
        let dev = Dev::start(&["--ephemeral", "--config", &scripted(folder.path(), "")]);
        let proxy = Cutter::start(&dev.url, if binding == "grpc" { 2500 } else { 6000 });
        // The card leads past the proxy; the binding alone, without a card, does not.
        let front = Front::start(&proxy.url);
        let arguments = ["stream", "chunks:60x20", "--binding", binding, "--timeout", "50s"];
        let output = rialto(&arguments).env("RIALTO_URL", &front.url).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{binding}: {}", shown(&output, &[]));
        assert!(proxy.cuts.load(Ordering::Relaxed) >= 2, "{binding}: nothing was cut");
        let numbers: Vec<_> = lines(&output)
            .iter()
            .filter(|event| event.get("task").is_none())
            .map(|event| {
                let event = event.as_object().unwrap().values().next().unwrap();
                event["metadata"]["urn:rialto:event-number:v1"].as_u64().unwrap()
            })
            .collect();
        let expected: Vec<_> = (2..2 + numbers.len() as u64).collect();
        assert_eq!(numbers, expected, "{binding}");
        assert!(numbers.len() >= 62, "{binding}: {numbers:?}");
    }
}

/// A server whose card says that the agent is at `url`, on all bindings.
struct Front {
    url: String,
}

impl Front {
    fn start(url: &str) -> Self {
        let interfaces: Vec<_> = ["JSONRPC", "HTTP+JSON", "GRPC"]
            .iter()
            .map(|binding| serde_json::json!({"url": url, "protocolBinding": binding, "protocolVersion": "1.0"}))
            .collect();
        let card = serde_json::json!({"name": "front", "supportedInterfaces": interfaces}).to_string();
        Self { url: answering(move |_| ("application/json".to_owned(), card.clone())) }
    }
}

/// A server that answers every request with what `answer` makes of its head.
fn answering(answer: impl Fn(&str) -> (String, String) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let start = head.len();
                if reader.read_line(&mut head).unwrap_or(0) == 0 || head[start..].trim().is_empty() {
                    break;
                }
                let line = head[start..].to_ascii_lowercase();
                length = line.strip_prefix("content-length:").map_or(length, |n| n.trim().parse().unwrap());
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let (kind, body) = answer(&head);
            let response = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n{body}");
            drop(stream.write_all(response.as_bytes()));
        }
    });
    url
}

#[test]
fn a_server_that_answers_nonsense_is_one_line_and_exit_4() {
    let answers = ["", "{", "[]", "{\"result\":7}", "<html>", "{\"jsonrpc\":\"2.0\",\"id\":1}"];
    for answer in answers {
        let url = answering(move |_| ("application/json".to_owned(), answer.to_owned()));
        let front = Front::start(&url);
        for binding in ["jsonrpc", "rest"] {
            let output = rialto(&["task", "get", "x", "--binding", binding, "--url", &front.url]).output().unwrap();
            let text = shown(&output, &[]);
            // An empty object is a task as REST writes it, so nothing of that kind is among the answers.
            assert!(
                output.status.code() == Some(4) || (binding == "rest" && answer.starts_with("{\"")),
                "{answer}: {text}"
            );
            assert!(output.stderr.iter().filter(|byte| **byte == b'\n').count() <= 1, "{text}");
        }
    }
}

#[test]
fn a_server_that_never_gets_on_is_given_up() {
    // Each subscription ends at once, the task works for ever: tries are counted, and they end.
    let events =
        "id: 1\ndata: {\"task\":{\"id\":\"t\",\"contextId\":\"c\",\"status\":{\"state\":\"TASK_STATE_WORKING\"}}}\n\n";
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let url = answering(move |head| {
        seen.lock().unwrap().push(head.to_owned());
        ("text/event-stream".to_owned(), events.to_owned())
    });
    let front = Front::start(&url);
    let arguments = ["stream", "x", "--binding", "rest", "--url", &front.url, "--timeout", "2s"];
    let output = rialto(&arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", shown(&output, &[]));
    let asked = asked.lock().unwrap();
    assert!((2..=8).contains(&asked.len()), "{} connections in 2 s", asked.len());
    assert!(asked[1].to_ascii_lowercase().contains("last-event-id: 1"), "{}", asked[1]);
    assert_eq!(asked.iter().filter(|head| head.starts_with("POST /message:stream")).count(), 1);
}
