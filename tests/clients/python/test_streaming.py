"""Cases B: streams. Names say the symptom seen in the field."""

import json
import threading
import time

import httpx
import pytest

from rialto import connect
from wires import WIRES, Fault, answer, fold, get, message, post, send, sse, state, until


def stream(client, text: str, **members):
    return client.stream("SendStreamingMessage", {"message": message(text, **members)})


def subscribe(client, task: dict):
    return client.stream("SubscribeToTask", {"id": task["id"]})


def test_c25_errors_known_before_the_stream_arrive_inside_a_200_event_stream(clients, wire):
    unary = clients(wire.name, "/unary")
    done = send(wire, "echo x")
    cases = [
        ("TASK_NOT_FOUND", lambda: stream(wire, "echo x", taskId="00000000-0000-4000-8000-000000000000")),
        ("TASK_NOT_FOUND", lambda: subscribe(wire, {"id": "nope"})),
        ("UNSUPPORTED_OPERATION", lambda: subscribe(wire, done)),
        ("UNSUPPORTED_OPERATION", lambda: stream(wire, "echo x", taskId=done["id"])),
        ("UNSUPPORTED_OPERATION", lambda: stream(unary, "echo x")),
        ("UNSUPPORTED_OPERATION", lambda: subscribe(unary, {"id": "nope"})),
        ("CONTENT_TYPE_NOT_SUPPORTED", lambda: wire.stream(
            "SendStreamingMessage", {"message": message(parts=[{"raw": "AAAA", "mediaType": "application/x-nope"}])})),
        ("INVALID_PARAMS", lambda: wire.stream("SendStreamingMessage", {"message": message(parts=[{}])})),
        ("VERSION_NOT_SUPPORTED", lambda: wire.stream("SubscribeToTask", {"id": done["id"]}, version="99.0")),
    ]
    for reason, call in cases:
        # The HTTP wires raise when opening: the answer was no event stream.
        with pytest.raises(Fault) as fault:
            opened = call()
            assert wire.name == "grpc", "the error came inside the stream"
            list(opened)
        fault.value.is_(reason)


def test_c29_subscribe_only_works_for_tasks_that_were_started_as_streams(wire):
    task = post(wire, "sleep:1")
    events = list(subscribe(wire, task))
    assert events[0]["task"]["id"] == task["id"] and "task" not in events[-1]
    assert events[-1]["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert fold(events)["artifacts"] == get(wire, task)["artifacts"]


def test_subscribe_works_for_a_task_that_waits_for_input(wire):
    task = send(wire, "ask")
    with subscribe(wire, task) as events:
        assert state(next(events)["task"]) == "INPUT_REQUIRED"
        done = send(wire, "go on", taskId=task["id"])
        rest = list(events)
    assert rest[-1]["statusUpdate"]["status"] == done["status"]


def test_c33_appended_chunks_pile_up_as_separate_artifacts(wire):
    events = list(stream(wire, "chunks:40x2"))
    streamed = fold(events)
    assert len({event["artifactUpdate"]["artifact"]["artifactId"] for event in events if "artifactUpdate" in event}) == 1
    stored = get(wire, streamed)
    assert len(stored["artifacts"]) == 1 and stored["artifacts"] == streamed["artifacts"]
    assert send(wire, "chunks:40x2")["artifacts"][0]["parts"] == stored["artifacts"][0]["parts"]


def test_c33_metadata_of_appended_chunks_is_dropped(clients):
    for name in WIRES:
        client = clients(name, "/extra")
        for rest, parts in (("", [{"text": "Hello"}, {"text": " world"}]), (" replace", [{"text": "new"}])):
            streamed = fold(stream(client, f"artifact{rest}"))
            [artifact] = streamed["artifacts"]
            assert artifact["artifactId"] == "a1" and artifact["parts"] == parts
            assert artifact.get("metadata", {}) == ({} if rest else {"j": 1, "k": 2})
            assert get(client, streamed)["artifacts"] == send(client, f"artifact{rest}")["artifacts"] == [artifact]


def test_an_append_to_an_artifact_that_never_was_is_an_agent_error(wire):
    task = send(wire, "unknownappend")
    assert state(task) == "FAILED" and not task.get("artifacts")


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
def test_c35_streaming_is_advertised_but_the_body_is_empty(clients, name):
    client = clients(name)
    request = client._request("SendStreamingMessage", {"message": message("echo hi")})
    begun = time.monotonic()
    response = client.http.send(request, stream=True)
    chunks = response.iter_bytes()
    first = next(chunks)
    assert time.monotonic() - begun < 1
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    assert "no-cache" in response.headers["cache-control"] and "no-transform" in response.headers["cache-control"]
    assert response.headers["x-accel-buffering"] == "no" and "content-encoding" not in response.headers
    body = (first + b"".join(chunks)).decode()
    events = [client._event(data) for _, _, data in sse(iter(body.split("\n")))]
    assert "task" in events[0] and state(events[-1]["statusUpdate"]) == "COMPLETED"
    assert answer(fold(events)) == "hi"


def test_c35_grpc_streams_start_at_once(clients):
    begun = time.monotonic()
    with stream(clients("grpc"), "sleep:2") as events:
        assert "task" in next(events)
        assert time.monotonic() - begun < 1


def test_events_are_not_held_back_until_the_end(wire):
    arrivals = []
    for event in stream(wire, "chunks:20x100"):
        if "artifactUpdate" in event:
            arrivals.append(time.monotonic())
    assert arrivals[-1] - arrivals[0] > 1.5


@pytest.mark.parametrize("encoding", ["gzip, br", "gzip", "identity", "*"])
def test_c37_event_streams_are_compressed_and_buffered(clients, encoding):
    client = clients("rest")
    request = client._request("SendStreamingMessage", {"message": message("chunks:10x50")}, headers={"accept-encoding": encoding})
    response = client.http.send(request, stream=True)
    assert "content-encoding" not in response.headers
    times = [time.monotonic() for _ in response.iter_bytes()]
    assert times[-1] - times[0] > 0.3


def test_c39_several_watchers_see_different_orders_or_die_together(clients, rpc):
    task = post(rpc, "status:50x50")
    seen, threads = {}, []

    def watch(number: int):
        with subscribe(clients(WIRES[number % 3]), task) as events:
            seen[number] = []
            for event in events:
                seen[number].append(event)
                if number == 4 and len(seen[number]) == 5:
                    return  # hangs up in the middle

    for number in range(5):
        threads.append(threading.Thread(target=watch, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join(30)
    assert len(seen[4]) == 5
    tails = [events[1:] for number, events in seen.items() if number != 4]
    longest = max(tails, key=len)
    assert len(longest) > 40
    for tail in tails:
        assert tail == longest[len(longest) - len(tail):]
        assert state(tail[-1]["statusUpdate"]) == "COMPLETED"
    assert state(get(rpc, task)) == "COMPLETED"


def test_c43_the_id_in_stream_events_is_not_the_id_that_get_knows(wire, context):
    with stream(wire, "chunks:200x20", contextId=context) as events:
        task = next(events)["task"]
        assert task["contextId"] == context and get(wire, task)["id"] == task["id"]
        with subscribe(wire, task) as again:
            assert next(again)["task"]["id"] == task["id"]
        assert state(wire.call("CancelTask", {"id": task["id"]})) == "CANCELED"
        rest = list(events)
    for event in rest:
        [update] = event.values()
        assert (update["taskId"], update["contextId"]) == (task["id"], context)
    assert state(rest[-1]["statusUpdate"]) == "CANCELED"


def test_a_stream_closes_when_the_agent_asks_and_stays_open_for_a_credential(wire):
    begun = time.monotonic()
    assert state(fold(stream(wire, "ask"))) == "INPUT_REQUIRED"
    assert time.monotonic() - begun < 5
    with stream(wire, "auth") as events:
        task = next(events)["task"]
        until(wire, task, "AUTH_REQUIRED")
        waiting = next(event for event in events if "statusUpdate" in event and state(event["statusUpdate"]) == "AUTH_REQUIRED")
        assert waiting["statusUpdate"]["status"]["message"]["parts"]
        send(wire, "granted", taskId=task["id"])
        assert state(list(events)[-1]["statusUpdate"]) == "COMPLETED"


def test_hanging_up_does_not_cancel_the_work(wire):
    with stream(wire, "sleep:1") as events:
        task = next(events)["task"]
    assert state(get(wire, task)) in ("SUBMITTED", "WORKING")
    done = until(wire, task, "COMPLETED")
    assert answer(done)


def numbered(response: httpx.Response):
    for _, ident, data in sse(response.iter_lines()):
        yield int(ident), json.loads(data)


def open_rest(clients, path: str, last: int | None = None, verb: str = "GET") -> httpx.Response:
    client = clients("rest")
    headers = {"a2a-version": "1.0"} | ({} if last is None else {"last-event-id": str(last)})
    return client.http.send(client.http.build_request(verb, client.url + path, headers=headers), stream=True)


def test_c31_events_between_disconnect_and_resubscribe_are_lost(clients, rpc):
    """With Last-Event-ID: every event once, by number; a client that drops again and again rebuilds everything."""
    task = post(rpc, "chunks:100x10")
    response = open_rest(clients, f"/tasks/{task['id']}:subscribe")
    events, last, connections = [], None, 0
    while True:
        connections += 1
        finished = True
        for count, (number, event) in enumerate(numbered(response)):
            if "task" in event:
                assert last is None, "a snapshot came although the rest was asked for"
            elif last is not None:
                assert number == last + 1, (number, last)
            last = number
            events.append(event)
            if count == 6:
                finished = False
                break
        response.close()
        if finished:
            break
        response = open_rest(clients, f"/tasks/{task['id']}:subscribe", last)
        assert response.status_code == 200, response.read()
    stored = get(rpc, task)
    assert connections > 5 and state(stored) == "COMPLETED"
    rebuilt = fold(events)
    assert rebuilt["artifacts"] == stored["artifacts"] and rebuilt["status"] == stored["status"]


def test_c31_without_numbers_snapshot_and_rest_are_the_whole(wire):
    task = post(wire, "chunks:100x20")
    for _ in range(5):
        with subscribe(wire, task) as events:
            taken = [event for _, event in zip(range(4), events, strict=False)]
        assert len(taken) == 4 and "task" in taken[0]
    taken = list(subscribe(wire, task))
    stored = get(wire, task)
    assert "task" in taken[0] and state(fold(taken)) == state(stored) == "COMPLETED"
    assert fold(taken)["artifacts"] == stored["artifacts"]


def test_the_rest_of_an_ended_task_can_be_read_by_number(clients, rpc):
    task = send(rpc, "chunks:10x1")
    begun = time.monotonic()
    response = open_rest(clients, f"/tasks/{task['id']}:subscribe", 2)
    assert response.status_code == 200
    rest = list(numbered(response))
    assert time.monotonic() - begun < 1
    assert [number for number, _ in rest] == list(range(3, 3 + len(rest)))
    assert state(rest[-1][1]["statusUpdate"]) == "COMPLETED"
    whole = open_rest(clients, f"/tasks/{task['id']}:subscribe", rest[-1][0])
    assert whole.status_code == 200 and list(numbered(whole)) == []
    without = open_rest(clients, f"/tasks/{task['id']}:subscribe")
    assert without.status_code == 400
    without.close()


def test_the_rest_of_a_silent_task_comes_at_once(clients, rpc):
    for task in (send(rpc, "ask"), post(rpc, "sleep:20")):
        response = open_rest(clients, f"/tasks/{task['id']}:subscribe")
        events = numbered(response)
        (last, _), begun = next(events), time.monotonic()
        response.close()
        if last < 2:
            until(rpc, task, "WORKING")
        response = open_rest(clients, f"/tasks/{task['id']}:subscribe", 1)
        assert next(numbered(response))[0] == 2
        assert time.monotonic() - begun < 2
        response.close()
        rpc.call("CancelTask", {"id": task["id"]})


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "99999999999999999999999", "", "\u00bd".encode(), "1,2", "9" * 5000])
def test_an_odd_last_event_id_breaks_the_stream(clients, rpc, value):
    """It is refused, or read as none; never a hang or a server error."""
    task = post(rpc, "sleep:1")
    client = clients("rest")
    request = client.http.build_request(
        "GET", f"{client.url}/tasks/{task['id']}:subscribe", headers={"a2a-version": "1.0", "last-event-id": value})
    response = client.http.send(request, stream=True)
    body = response.read().decode()
    assert response.status_code in (200, 400), body
    if response.status_code == 200:
        assert '"task"' in body.split("data:")[1]
    else:
        assert response.json()["error"]["code"] == 400


def test_subscribing_while_the_task_ends_hangs_or_misses_the_end(clients):
    """Either the whole rest, or the refusal of an ended task; a hundred times on each binding."""
    for name in WIRES:
        client, ended = clients(name), 0
        for _ in range(100):
            task = post(client, "echo x")
            try:
                events = list(subscribe(client, task))
                assert state(fold(events)) == "COMPLETED" and fold(events)["artifacts"] == get(client, task)["artifacts"]
            except Fault as fault:
                fault.is_("UNSUPPORTED_OPERATION")
                ended += 1
                assert state(get(client, task)) == "COMPLETED"
        assert ended < 100


def test_text_pieces_are_one_artifact_and_one_message(wire):
    events = list(stream(wire, "text:200x1"))
    seen, wanted = fold(events), "".join(f"{n}\n" for n in range(1, 201))
    stored = get(wire, seen)
    assert answer(seen) == answer(stored) == wanted
    assert [one["artifactId"] for one in stored["artifacts"]] == ["answer"]
    assert [one["role"] for one in stored["history"]] == ["ROLE_USER", "ROLE_AGENT"]
    assert "".join(part["text"] for part in stored["history"][1]["parts"]) == wanted


def test_answers_as_status_messages(clients):
    for name in WIRES:
        events = list(stream(clients(name, "/status"), "text:5x50"))
        texts = [
            part["text"] for event in events if state(event.get("statusUpdate") or {"status": {"state": ""}}) == "WORKING"
            for part in event["statusUpdate"]["status"].get("message", {}).get("parts", [])
        ]
        assert "".join(texts) == "1\n2\n3\n4\n5\n"
        assert not any("artifactUpdate" in event for event in events)
        stored = get(clients(name, "/status"), fold(events))
        assert [one["role"] for one in stored["history"]] == ["ROLE_USER", "ROLE_AGENT"]


def test_a_client_that_vanishes_in_the_middle_of_an_event_harms_nobody(server, rpc):
    for _ in range(30):
        with connect(server, receive_buffer=2048) as stream_:
            body = json.dumps({"message": message("chunks:200x1")}).encode()
            stream_.sendall(
                b"POST /message:stream HTTP/1.1\r\nhost: x\r\na2a-version: 1.0\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body))
            assert stream_.recv(10)
    assert answer(send(rpc, "echo alive")) == "alive"


def test_c167_stream_events_use_the_old_kind_member(clients):
    for name in WIRES:
        events = list(stream(clients(name), "status:1x100")) + list(stream(clients(name), "chunks:2x1"))
        kinds = {next(iter(event)) for event in events}
        assert kinds == {"task", "statusUpdate", "artifactUpdate"}
        for event in events:
            assert len(event) == 1
            text = json.dumps(event)
            assert '"kind"' not in text and '"final"' not in text


def test_c27_progress_messages_arrive_in_order_and_stay_out_of_the_history(wire):
    events = list(stream(wire, "status:20x5"))
    texts = [
        "".join(part["text"] for part in event["statusUpdate"]["status"]["message"]["parts"])
        for event in events if event.get("statusUpdate", {}).get("status", {}).get("message")
        and state(event["statusUpdate"]) == "WORKING"
    ]
    assert len(texts) == 20 and texts == sorted(texts, key=lambda text: int("".join(filter(str.isdigit, text)) or 0))
    assert len(get(wire, fold(events))["history"]) <= 2
