"""Cases I: what gRPC can get wrong, beside the bindings over HTTP. Names say the symptom seen in the field."""

import socket
import threading
import time

import grpc
import httpx
import pytest
from a2a.types import a2a_pb2 as pb
from google.protobuf import json_format

from rialto import Running, Server, eventually, scripted
from wires import WIRES, Fault, Grpc, Rest, answer, fold, get, message, post, send, state, until
from wires import wire as open_wire

EXTENSION = "https://ext.example.test/v1"
MIB = 1 << 20


@pytest.fixture
def connection(clients):
    """A client with one connection of its own."""
    shared = clients("grpc")
    one = Grpc(shared.url, shared.tenant, connections=1)
    yield one
    one.close()


def test_c139_a_long_error_message_kills_the_whole_connection(connection, clients):
    extra = clients("grpc", "/extra").tenant
    with connection.stream("SendStreamingMessage", {"message": message("status:100x20")}) as events:
        seen = [next(events)]
        for operation, params, code in (
            ("GetTask", {"id": "x" * 20_000}, "NOT_FOUND"),
            ("SendMessage", {"message": message(parts=[{}] * 3000)}, "INVALID_ARGUMENT"),
            ("SendMessage", {"message": message(parts=[{}] * 250)}, "INVALID_ARGUMENT"),
            ("SendMessage", {"message": message("echo x", contextId="z" * 20_000)}, "INVALID_ARGUMENT"),
            ("SendMessage", {"message": message(parts=[{"text": "x", "mediaType": "y" * 20_000}])}, "INVALID_ARGUMENT"),
            ("ListTasks", {"pageToken": "y" * 20_000}, "INVALID_ARGUMENT"),
            ("GetTask", {"id": "x", "tenant": "t" * 20_000}, "NOT_FOUND"),
        ):
            with pytest.raises(Fault) as fault:
                connection.call(operation, params)
            assert fault.value.code == code, str(fault.value)
            assert fault.value.details and len(str(fault.value)) <= 4096, "no class, or too long"
        # An agent that fails at length.
        failed = connection.call("SendMessage", {"tenant": extra, "message": message("fail 100000")})["task"]
        assert state(failed) == "FAILED"
        assert failed["status"]["message"]["parts"][0]["text"].startswith("\u00e9" * 100)
        stream = {"tenant": extra, "message": message("fail 100000")}
        last = list(connection.stream("SendStreamingMessage", stream))[-1]
        assert last["statusUpdate"]["status"]["message"]["parts"] == failed["status"]["message"]["parts"]
        assert connection.call("GetTask", {"tenant": extra, "id": failed["id"]})["status"] == failed["status"]
        # The stream beside all that is untouched.
        seen += events
    texts = [event["statusUpdate"]["status"].get("message", {"parts": []})["parts"] for event in seen[1:]]
    assert [text["text"] for [text] in filter(None, texts)] == [f"status {n}" for n in range(1, 101)]
    assert state(seen[-1]["statusUpdate"]) == "COMPLETED"


def test_c141_what_was_stored_can_be_read_on_one_binding_only(clients):
    task = send(clients("jsonrpc"), "bytes:5000000")
    for name in WIRES:
        client = clients(name)
        assert answer(get(client, task)) == "x" * 5_000_000, name
        streamed = fold(client.stream("SendStreamingMessage", {"message": message("bytes:5000000")}))
        assert answer(streamed) == "x" * 5_000_000, name
        page = client.call("ListTasks", {"contextId": task["contextId"], "includeArtifacts": True})
        assert answer(page["tasks"][0]) == "x" * 5_000_000, name


def test_c141_a_large_part_goes_in_by_one_binding_only(clients):
    """One documented limit, 10 MiB unless configured, for requests of all bindings."""
    large, too_large = "y" * 5_000_000, "y" * (10 * MIB)
    for name, other in zip(WIRES, (*WIRES[1:], WIRES[0]), strict=True):
        client = clients(name)
        task = send(client, f"echo {large}")
        assert (state(task), answer(task)) == ("COMPLETED", large), name
        assert get(clients(other), task)["history"][0]["parts"] == [{"text": f"echo {large}"}], (name, other)
        with pytest.raises(Fault) as fault:
            send(client, f"echo {too_large}")
        codes = {"jsonrpc": (413, -32600), "rest": (413, "RESOURCE_EXHAUSTED"), "grpc": (None, "RESOURCE_EXHAUSTED")}
        assert (fault.value.status, fault.value.code) == codes[name], str(fault.value)
        assert fault.value.info["reason"] == "PAYLOAD_TOO_LARGE" and str(10 * MIB) in fault.value.message


@pytest.fixture(scope="module")
def watchful():
    """A server with few streams, that looks after its peers every second."""
    limits = {"streams": 3, "ping-interval": "1s", "ping-timeout": "1s"}
    with Server([scripted("scripted", "/")], limits=limits) as running:
        yield running


class BlackHole:
    """A TCP proxy that can stop to move bytes without closing anything, as a network does that loses its peers."""

    def __init__(self, target: Running):
        self.target, self.open, self.sockets, self.sent = target, threading.Event(), [], 0
        self.open.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                here, _ = self.listener.accept()
            except OSError:
                return
            there = socket.create_connection(self.target.address)
            self.sockets += [here, there]
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self.pump, args=(one, other, one is here), daemon=True).start()

    def pump(self, one: socket.socket, other: socket.socket, sent: bool) -> None:
        try:
            while chunk := one.recv(1 << 16):
                self.sent += sent
                self.open.wait()
                other.sendall(chunk)
            self.open.wait()
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self.open.set()
        for one in (self.listener, *self.sockets):
            one.close()


def take(client, task: dict):
    """A subscription, once there is a place for it."""

    def subscribe():
        try:
            events = client.stream("SubscribeToTask", {"id": task["id"]})
            next(events)
            return events
        except Fault as fault:
            assert fault.info["reason"] == "UNAVAILABLE", str(fault)

    return eventually(subscribe, timeout=30, every=0.05, what="a free place")


def test_c143_the_subscriptions_of_a_dead_peer_are_kept_for_ever(watchful):
    direct = open_wire("grpc", watchful.url)
    task = send(direct, "ask")
    hole = BlackHole(watchful)
    lost = Grpc("{}:{}".format(*hole.address), direct.tenant)
    held = [take(lost, task) for _ in range(3)]
    with pytest.raises(Fault) as full:
        next(direct.stream("SubscribeToTask", {"id": task["id"]}))
    assert full.value.info["reason"] == "UNAVAILABLE"
    # A peer that answers pings is alive, however silent its streams are.
    time.sleep(3)
    with pytest.raises(Fault):
        next(direct.stream("SubscribeToTask", {"id": task["id"]}))
    hole.open.clear()
    begun = time.monotonic()
    take(direct, task).close()
    assert time.monotonic() - begun < 20, "interval and time-out are a second each"
    for one in held:
        one.close()
    lost.close()
    hole.close()
    direct.close()


def test_c143_pings_of_clients_are_answered_with_goaway(watchful):
    """Ten times as often as is documented, with and without calls."""
    options = [
        ("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0),
    ]
    line = BlackHole(watchful)  # that only counts
    client = Grpc("{}:{}".format(*line.address), options=options, connections=1)
    done = send(client, "echo before")
    before = line.sent
    time.sleep(4)
    assert line.sent - before >= 3, "no pings of an idle client"
    events = list(client.stream("SendStreamingMessage", {"message": message("silent:4")}))
    assert state(events[-1]["statusUpdate"]) == "COMPLETED"
    assert get(client, done)["id"] == done["id"]
    assert len(line.sockets) == 2, "there was a second connection"
    client.close()
    line.close()


@pytest.mark.parametrize("version, served", [("1.0", True), ("0.3", False), ("9.9", False), ("", False), (None, False)])
def test_c145_the_version_is_read_from_http_headers_only(wire, version, served):
    task = send(wire, "echo x")
    if served:
        assert wire.call("GetTask", {"id": task["id"]}, version=version)["id"] == task["id"]
        return
    for call in (wire.call, lambda *args, **options: list(wire.stream(*args, **options))):
        with pytest.raises(Fault) as fault:
            call("SendStreamingMessage" if call != wire.call else "GetTask",
                 {"message": message("echo x")} if call != wire.call else {"id": task["id"]}, version=version)
        assert fault.value.is_("VERSION_NOT_SUPPORTED").info["metadata"]["supportedVersions"] == "1.0"


@pytest.mark.parametrize("lines", [[f"urn:x, {EXTENSION},urn:y"], ["urn:x", EXTENSION], [EXTENSION, EXTENSION]])
def test_c145_extensions_are_read_from_http_headers_only(clients, lines):
    """A list, and one line each; what is in effect is told by results, errors and streams alike."""
    grpc_, rest = clients("grpc", "/picky"), clients("rest", "/picky")
    metadata = [("a2a-version", "1.0"), *(("a2a-extensions", line) for line in lines)]
    stub = next(grpc_.stubs)
    request = json_format.ParseDict({"tenant": grpc_.tenant, "message": message("echo x")}, pb.SendMessageRequest())

    def told(call) -> list[str]:
        both = [*call.initial_metadata(), *call.trailing_metadata()]
        return [value for key, value in both if key == "a2a-extensions"]

    _, call = stub.SendMessage.with_call(request, metadata=metadata)
    assert told(call) == [EXTENSION]
    stream = stub.SendStreamingMessage(request, metadata=metadata)
    assert [EXTENSION] == [value for key, value in stream.initial_metadata() if key == "a2a-extensions"]
    assert len(list(stream)) > 1
    with pytest.raises(grpc.RpcError) as refused:
        stub.GetTask(pb.GetTaskRequest(tenant=grpc_.tenant, id="nope"), metadata=metadata)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND and told(refused.value) == [EXTENSION]
    with pytest.raises(Fault) as without:
        grpc_.call("SendMessage", {"message": message("echo x")})
    without.value.is_("EXTENSION_SUPPORT_REQUIRED")

    sent = httpx.post(f"{rest.url}/message:send", json={"message": message("echo x")}, headers=metadata)
    assert sent.status_code == 200 and sent.headers.get_list("a2a-extensions") == [EXTENSION]
    with httpx.stream("POST", f"{rest.url}/message:stream", json={"message": message("echo x")}, headers=metadata) as told_:
        assert told_.headers.get_list("a2a-extensions") == [EXTENSION] and len(told_.read()) > 0


def test_c147_a_client_deadline_cancels_the_agent(clients, context):
    client = clients("grpc")
    with pytest.raises(Fault) as fault:
        client.call("SendMessage", {"message": message("sleep:4", contextId=context)}, timeout=1)
    assert fault.value.code == "DEADLINE_EXCEEDED"
    [task] = client.call("ListTasks", {"contextId": context})["tasks"]
    assert state(task) in ("SUBMITTED", "WORKING")
    done = until(client, task, "COMPLETED")
    assert answer(done) == "sleep:4" and len(done["history"]) == 2


def test_c147_a_reset_in_mid_stream_cancels_the_agent(clients):
    client = clients("grpc")
    events = client.stream("SendStreamingMessage", {"message": message("chunks:20x50")})
    task = next(events)["task"]
    next(events)
    events.close()
    done = until(client, task, "COMPLETED")
    assert answer(done) == "".join(f"{n}\n" for n in range(1, 21))


def test_c147_a_deadline_of_a_millisecond_leaves_half_a_task(clients, context):
    """It was made, and then it is done, or it never was."""
    client, late = clients("grpc"), 0
    places = [f"{context}-{number}" for number in range(60)]
    for number, place in enumerate(places):
        try:
            # Deadlines grow from 0.2 ms, which nothing meets, to 19 ms.
            client.call("SendMessage", {"message": message(f"echo {number}", contextId=place)}, timeout=0.0002 * 1.08**number)
        except Fault as fault:
            assert fault.code == "DEADLINE_EXCEEDED", str(fault)
            late += 1
    assert late > 0
    # Whatever was under way has arrived once a later message of the same agent is answered.
    send(client, "echo last")
    for number, place in enumerate(places):
        tasks = client.call("ListTasks", {"contextId": place})["tasks"]
        assert len(tasks) <= 1
        for task in tasks:
            done = until(client, task, "COMPLETED")
            assert answer(done) == str(number) and len(done["history"]) == 2


def test_c147_what_serves_an_abandoned_stream_is_left_behind(watchful):
    """Three places; a hundred streams that were reset, or whose deadline came, give theirs back."""
    client = open_wire("grpc", watchful.url)
    task = send(client, "ask")
    for number in range(100):
        events = take(client, task)
        events.close()
    for _ in range(6):
        with pytest.raises(Fault) as fault:
            list(client.stream("SendStreamingMessage", {"message": message("sleep:2")}, timeout=0.3))
        assert fault.value.code in ("DEADLINE_EXCEEDED", "UNAVAILABLE"), str(fault.value)
    held = [take(client, task) for _ in range(3)]
    for one in held:
        one.close()
    client.close()
