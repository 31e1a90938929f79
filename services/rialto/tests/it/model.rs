//! `dev --model`, against an endpoint of the test's own.

use nix::sys::signal::Signal;
use rialto_testkit::llm::{KEY, Llm};

use crate::process::{Dev, lines, rialto, shown};

fn dev(base_url: &str, key: &str) -> Dev {
    let ports = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    let mut command = rialto(&[["dev", "--ephemeral", "--model", "fake"].as_slice(), &ports].concat());
    command.env("OPENAI_BASE_URL", base_url).env("OPENAI_API_KEY", key);
    Dev::spawn(command)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_answers_and_remembers_the_conversation() {
    let llm = Llm::start().await.unwrap();
    let dev = dev(&llm.base_url(), KEY);
    let first = lines(&dev.client(&["call", "hello"])).remove(0)["task"].clone();
    assert_eq!(first["artifacts"][0]["parts"][0]["text"], "you said: hello", "{first}");
    assert_eq!(first["metadata"]["usage"]["totalTokens"], 12, "{first}");
    let second = dev.client(&["call", "roles", "--context", first["contextId"].as_str().unwrap()]);
    let second = lines(&second).remove(0)["task"].clone();
    assert_eq!(second["artifacts"][0]["parts"][0]["text"], "user assistant user", "{second}");
    assert_eq!(llm.requests().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_goes_wrong_at_the_endpoint_is_a_failed_task_and_no_secret_leaves() {
    let llm = Llm::start().await.unwrap();
    let dev = dev(&llm.base_url(), KEY);
    let output = dev.client(&["call", "code:403:any"]);
    assert_eq!(output.status.code(), Some(1));
    let task = lines(&output).remove(0)["task"].clone();
    let reason = &task["status"]["message"]["parts"][0]["text"];
    assert_eq!(reason, "the model endpoint refused the request (HTTP 403)", "{task}");
    dev.signal(Signal::SIGTERM);
    let (code, _, stderr) = dev.wait();
    // The endpoint's own words, which repeat the key, are for the operator.
    assert!(code == 0 && stderr.contains("internal detail, (secret)") && !stderr.contains(KEY), "{stderr}");
}

#[test]
fn without_a_key_there_is_one_clear_line() {
    for key in [None, Some("")] {
        let mut command = rialto(&["dev", "--ephemeral", "--model", "fake"]);
        command.env_remove("OPENAI_API_KEY");
        command.envs(key.map(|key| ("OPENAI_API_KEY", key)));
        insta::allow_duplicates! {
            insta::assert_snapshot!(shown(&command.output().unwrap(), &[]), @r"
            exit 2
            ---
            error: --model needs OPENAI_API_KEY in the environment; an endpoint that asks for no key takes any
            ");
        }
    }
    let mut command = rialto(&["dev", "--ephemeral", "--model", "fake"]);
    let output = command.env("OPENAI_API_KEY", KEY).env("OPENAI_BASE_URL", "nowhere").output().unwrap();
    insta::assert_snapshot!(shown(&output, &[]), @r#"
    exit 2
    ---
    error: agents[0].backend.base-url: OPENAI_BASE_URL in the environment must be an http or https URL such as "http://127.0.0.1:11434/v1" (--model)
    "#);
}
