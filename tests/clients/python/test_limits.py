"""Bounds: each is the same on every binding, is told as an error that a client can act on, and lets others go on."""

import json
import time

import grpc
import httpx
import pytest
from a2a.types import a2a_pb2 as pb
from a2a.types import a2a_pb2_grpc

from rialto import Server, connect, eventually, scripted
from wires import WIRES, Fault, answer, get, message, post, send, state, until
from wires import wire as open_wire

CODES = {
    "QUEUE_FULL": (-32603, 503, "RESOURCE_EXHAUSTED"), "DEADLINE": (-32603, 504, "DEADLINE_EXCEEDED"),
    "PAYLOAD_TOO_LARGE": (-32600, 413, "RESOURCE_EXHAUSTED"), "INVALID_PARAMS": (-32602, 400, "INVALID_ARGUMENT"),
}


@pytest.fixture(scope="module")
def tight():
    """A server whose bounds are narrow enough to be met."""
    agents = [
        scripted("scripted", "/"),
        scripted("tiny", "/tiny", **{"max-concurrent": 1, "max-waiting": 2}),
        scripted("hurry", "/hurry", **{"max-concurrent": 1, "queue-timeout": "1s"}),
        scripted("brief", "/brief", **{"turn-timeout": "1s", "kill-grace": "1s"}),
        scripted("forgetful", "/forgetful", **{"task-ttl": "1s"}),
    ]
    limits = {
        "request-size": "100kB", "task-size": "1MiB", "parts": 10, "blocking-timeout": "2s", "keep-alive": "500ms",
        "header-timeout": "1s", "body-timeout": "1s", "subscription-idle": "2s",
    }
    with Server(agents, limits=limits) as running:
        yield running


@pytest.fixture
def at(tight):
    made = []

    def client(name: str, mount: str = ""):
        made.append(open_wire(name, tight.url + mount))
        return made[-1]

    yield client
    for one in made:
        one.close()


def refused(reason: str, call) -> Fault:
    with pytest.raises(Fault) as caught:
        call()
    fault = caught.value
    code, http, status = CODES[reason]
    assert fault.info.get("reason") == reason, str(fault)
    if fault.wire == "jsonrpc":
        assert fault.code == code and fault.status == (http if http in (413, 503, 504) else 200), str(fault)
    elif fault.wire == "rest":
        assert (fault.code, fault.status) == (status, http), str(fault)
    else:
        assert fault.code == status, str(fault)
    return fault


def test_a_full_queue_takes_more_or_forgets_what_it_took(at):
    for name in WIRES:
        client = at(name, "/tiny")
        busy = post(client, "sleep:1")
        until(client, busy, "WORKING")
        waiting = [post(client, f"echo {n}") for n in range(2)]
        fault = refused("QUEUE_FULL", lambda client=client: send(client, "echo late"))
        if name != "grpc":
            assert int(fault.headers["retry-after"]) >= 1
        for n, task in enumerate(waiting):
            assert answer(until(client, task, "COMPLETED")) == str(n)
        assert answer(send(client, "echo again")) == "again"


def test_c133_waiting_in_the_queue_is_not_counted(at):
    client = at("jsonrpc", "/hurry")
    busy = post(client, "sleep:3")
    until(client, busy, "WORKING")
    late = post(client, "echo late")
    failed = until(client, late, "FAILED")
    assert not failed.get("artifacts") and failed["status"]["message"]["parts"][0]["text"]
    assert state(until(client, busy, "COMPLETED")) == "COMPLETED"


def test_a_turn_that_never_ends_is_cut_off(at):
    for text in ("sleep:60", "hang"):
        client = at("rest", "/brief")
        task = post(client, text)
        assert until(client, task, "FAILED")["status"]["message"]["parts"][0]["text"]
    assert answer(send(at("rest", "/brief"), "echo x")) == "x"


def test_a_blocking_call_that_takes_too_long_loses_its_task(at, context):
    for name in WIRES:
        client, place = at(name), f"{context}-{name}"
        fault = refused("DEADLINE", lambda client=client, place=place: send(client, "sleep:3", contextId=place))
        [task] = client.call("ListTasks", {"contextId": place})["tasks"]
        assert task["id"] in str(fault.info) or state(task) == "WORKING"
        assert answer(until(client, task, "COMPLETED"))


def test_c115_an_ended_task_is_kept_for_ever(at, context):
    client = at("jsonrpc", "/forgetful")
    done, asked = send(client, "echo x", contextId=context), send(client, "ask", contextId=f"{context}-open")
    assert state(get(client, done)) == "COMPLETED"
    eventually(lambda: client.call("ListTasks", {"contextId": context})["totalSize"] == 0, 20)
    with pytest.raises(Fault) as fault:
        get(client, done)
    fault.value.is_("TASK_NOT_FOUND")
    assert state(get(client, asked)) == "INPUT_REQUIRED"


def test_c141_different_limits_on_different_bindings(at):
    for name in WIRES:
        client = at(name)
        for call in ("SendMessage", "SendStreamingMessage"):
            def big(client=client, call=call):
                params = {"message": message("echo " + "x" * 150_000)}
                return list(client.stream(call, params)) if "Stream" in call else client.call(call, params)

            refused("PAYLOAD_TOO_LARGE", big)
        assert len(answer(send(client, "echo " + "x" * 90_000))) == 90_000
        refused("INVALID_PARAMS", lambda client=client: send(client, parts=[{"text": "a"}] * 11))
        assert state(send(client, parts=[{"text": "echo"}] * 10)) == "COMPLETED"


def test_a_task_grows_beyond_its_bound(at):
    client = at("jsonrpc")
    task = send(client, "bytes:3000000")
    assert state(task) == "FAILED" and task["status"]["message"]["parts"][0]["text"]
    assert len(json.dumps(get(client, task))) < 2_000_000
    assert answer(send(client, "echo alive")) == "alive"


def test_a_silent_stream_is_cut_by_proxies(tight):
    """Comments keep it alive; they are no events."""
    client = open_wire("rest", tight.url)
    response = client.http.send(client._request("SendStreamingMessage", {"message": message("silent:1.8")}), stream=True)
    body = response.read().decode()
    comments = [line for line in body.split("\n") if line.startswith(":")]
    assert len(comments) >= 2 and body.count("data:") >= 2


def test_a_subscription_that_nobody_needs_stays_open_for_ever(at):
    for name in WIRES:
        client = at(name)
        task = send(client, "ask")
        begun = time.monotonic()
        try:
            events = list(client.stream("SubscribeToTask", {"id": task["id"]}))
            assert len(events) == 1
        except Fault as fault:
            assert fault.message
        assert 1.5 < time.monotonic() - begun < 8


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST /message:send HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"])
def test_a_client_that_never_finishes_its_request_holds_a_connection(tight, sent):
    with connect(tight) as stream:
        stream.sendall(sent)
        stream.settimeout(10)
        received = b""
        begun = time.monotonic()
        while chunk := stream.recv(4096):
            received += chunk
        assert time.monotonic() - begun < 8
        assert received == b"" or received.startswith((b"HTTP/1.1 408", b"HTTP/1.1 400", b"HTTP/1.1 504")), received


def test_grpc_that_is_not_ours_is_answered_by_grpc(server):
    host, port = server.address
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for path, request, code in (
            ("/lf.a2a.v1.A2AService/Nope", b"", "UNIMPLEMENTED"), ("/nope.Nope/Nope", b"", "UNIMPLEMENTED"),
            ("/lf.a2a.v1.A2AService/GetTask", b"\xff\xff\xff", "INVALID_ARGUMENT"),
            ("/lf.a2a.v1.A2AService/GetTask", b"\x12\x02\xff\xfe", "INVALID_ARGUMENT"),
        ):
            call = channel.unary_unary(path)
            with pytest.raises(grpc.RpcError) as error:
                call(request, metadata=[("a2a-version", "1.0")], timeout=5)
            assert error.value.code().name in (code, "INTERNAL"), error.value
            assert error.value.code().name == code or "decode" in error.value.details(), error.value


def test_grpc_metadata_that_no_client_should_send_causes_a_panic(server, rpc):
    host, port = server.address
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        stub = a2a_pb2_grpc.A2AServiceStub(channel)
        for metadata in (
            [("authorization", "\x7f~")], [("a2a-extensions-bin", b"\xff\x00")], [("a2a-version", "1.0"), ("a2a-version", "0.3")],
            [("grpc-timeout", "1n")], [("x" * 200, "y" * 3000)], [("last-event-id", "abc")],
        ):
            try:
                stub.GetTask(pb.GetTaskRequest(id="nope"), metadata=[("a2a-version", "1.0"), *metadata], timeout=5)
                raise AssertionError("the task does not exist")
            except grpc.RpcError as error:
                assert error.code().name in ("NOT_FOUND", "UNAUTHENTICATED", "FAILED_PRECONDITION", "INVALID_ARGUMENT",
                                             "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL"), error
            except ValueError:
                pass  # the client library would not send it
    assert answer(send(rpc, "echo alive")) == "alive"


def test_forwarded_headers_of_strangers_are_believed(server):
    plain = httpx.get(f"{server.url}/.well-known/agent-card.json").json()
    for header, value in (("x-forwarded-host", "evil.example.test"), ("forwarded", "host=evil.example.test;proto=https"),
                          ("x-forwarded-proto", "https"), ("x-forwarded-prefix", "/evil"), ("x-forwarded-port", "1")):
        assert httpx.get(f"{server.url}/.well-known/agent-card.json", headers={header: value}).json() == plain


def test_other_web_origins_may_read_cards_and_nothing_else(server):
    ask = {"origin": "https://web.example.test", "access-control-request-method": "POST",
           "access-control-request-headers": "a2a-version,authorization,last-event-id,content-type"}
    for path in ("/", "/message:send", "/message:stream", "/tasks"):
        assert "access-control-allow-origin" not in httpx.options(server.url + path, headers=ask).headers
        got = httpx.get(server.url + path, headers={"origin": ask["origin"]})
        assert "access-control-allow-origin" not in got.headers
    card = httpx.get(f"{server.url}/.well-known/agent-card.json", headers={"origin": ask["origin"]})
    assert card.headers["access-control-allow-origin"] == "*" and "access-control-allow-credentials" not in card.headers


def test_configured_web_origins_may_call():
    with Server([scripted("scripted", "/")], **{"cors-origins": ["https://web.example.test"]}) as server:
        ask = {"origin": "https://web.example.test", "access-control-request-method": "POST",
               "access-control-request-headers": "a2a-version,authorization,last-event-id,content-type"}
        allowed = httpx.options(f"{server.url}/message:stream", headers=ask).headers
        assert allowed["access-control-allow-origin"] == "https://web.example.test"
        named = {one.strip().lower() for one in allowed["access-control-allow-headers"].split(",")}
        assert {"a2a-version", "last-event-id", "content-type"} <= named
        other = httpx.options(f"{server.url}/message:stream", headers=ask | {"origin": "https://evil.example.test"}).headers
        assert other.get("access-control-allow-origin") != "https://evil.example.test"
