"""Cases A: what is on the wire, well-formed and otherwise. Names say the symptom seen in the field."""

import json
import time
import uuid

import httpx
import pytest

from rialto import connect
from wires import ERROR_INFO, WIRES, Fault, answer, get, message, post, send, state, until


def endpoint(clients) -> str:
    return clients("jsonrpc").url


def rpc_raw(clients, body: str | bytes, content_type: str | None = "application/json") -> httpx.Response:
    headers = {"a2a-version": "1.0"} | ({} if content_type is None else {"content-type": content_type})
    return httpx.post(endpoint(clients), content=body, headers=headers, timeout=30)


BROKEN = [
    ('{"jsonrpc":"2.0","id":7,"params":{}}', -32600, 7),
    ('{"jsonrpc":"2.0","id":7,', -32700, None),
    ("", -32700, None),
    ('"hi"', -32600, None),
    ('{"jsonrpc":"2.0","id":7,"method":5}', -32600, 7),
    ("[]", -32600, None),
    ('[{"jsonrpc":"2.0","id":1,"method":"GetTask","params":{"id":"x"}}]', -32600, None),
    ("null", -32600, None),
    ("7", -32600, None),
    ("{}", -32600, None),
    ('{"jsonrpc":"1.0","id":"a","method":"GetTask","params":{"id":"x"}}', -32600, "a"),
    ('{"id":"a","method":"GetTask","params":{"id":"x"}}', -32600, "a"),
    ('{"jsonrpc":"2.0","id":[1],"method":"GetTask","params":{"id":"x"}}', -32600, None),
    ('{"jsonrpc":"2.0","id":true,"method":"GetTask","params":{"id":"x"}}', -32600, None),
    ('{"jsonrpc":"2.0","id":1.5,"method":"GetTask","params":{"id":"x"}}', -32600, None),
    ('{"jsonrpc":"2.0","id":{},"method":"GetTask","params":{"id":"x"}}', -32600, None),
    ('{"jsonrpc":"2.0","id":7,"method":"Nope","params":{}}', -32601, 7),
    ('{"jsonrpc":"2.0","id":7,"method":"tasks/list","params":{}}', -32601, 7),
    ('{"jsonrpc":"2.0","id":7,"method":"GetTask","params":[]}', -32602, 7),
    ('{"jsonrpc":"2.0","id":7,"method":"GetTask","params":"x"}', -32602, 7),
    ('{"jsonrpc":"2.0","id":7,"method":"GetTask","params":{}}', -32602, 7),
    ('{"jsonrpc":"2.0","id":7,"method":"GetTask"}', -32602, 7),
    (b'{"jsonrpc":"2.0","id":7,"method":"GetTask","params":{"id":"\xff\xfe"}}', -32700, None),
    ("\ufeff{}", -32700, None),
    ("{} {}", -32700, None),
    ('{"jsonrpc":"2.0","id":7,"method":"GetTask","params":{"id":"x"},}', -32700, None),
    ('{"jsonrpc":"2.0","id":7,"method":"SendMessage","params":' + "[" * 20_000 + "]" * 20_000 + "}", -32700, None),
    ('{"jsonrpc":"2.0","id":7,"method":"SendMessage","params":{"message":' + '{"metadata":' * 20_000 + "1" + "}" * 20_002,
     -32700, None),
    ('{"jsonrpc":"2.0","id":7,"method":"SendMessage","params":{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"data":'
     + "[" * 20_000 + "]" * 20_000 + "}]}}}", -32700, None),
]


@pytest.mark.parametrize("body, code, ident", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", None])
def test_c1_broken_jsonrpc_bodies_are_answered_by_the_web_framework(clients, body, code, ident, content_type):
    response = rpc_raw(clients, body, content_type)
    assert response.status_code == 200 and response.headers["content-type"].startswith("application/json")
    answered = response.json()
    assert answered["jsonrpc"] == "2.0" and "result" not in answered and "id" in answered
    if content_type == "text/plain":
        assert answered["error"]["code"] == -32005
        return
    accepted = {code}
    if isinstance(body, str) and body.startswith("\ufeff"):
        accepted.add(-32600)
    if isinstance(body, str) and len(body) > 10_000:
        accepted |= {-32602, -32600}
        ident = answered["id"]  # which may be read before the depth is noticed
    assert answered["error"]["code"] in accepted, answered
    assert answered["id"] == ident, answered


@pytest.mark.parametrize("ident", ['"a"', "7", "-3", "0", '""', "null", "9007199254740991", '"\\u00e9\\ud83d\\ude00"'])
def test_the_request_id_comes_back_unchanged(clients, ident):
    body = f'{{"jsonrpc":"2.0","id":{ident},"method":"GetTask","params":{{"id":"nope"}}}}'
    answered = rpc_raw(clients, body).json()
    assert answered["id"] == json.loads(ident) and answered["error"]["code"] == -32001


def test_a_request_without_id_is_processed_and_answered_with_null(clients):
    body = {"jsonrpc": "2.0", "method": "SendMessage", "params": {"message": message("echo no id")}}
    answered = rpc_raw(clients, json.dumps(body)).json()
    assert answered["id"] is None and answer(answered["result"]["task"]) == "no id"


@pytest.mark.parametrize(
    "parts, index",
    [
        ([{"mediaType": "application/json"}], 0), ([{}], 0), ([{"text": "a"}, {}], 1),
        ([{"text": "a"}, {"filename": "f"}, {"text": "b"}], 1), ([{"text": "a"}, {"metadata": {"a": 1}}], 1),
    ],
)
def test_c3_a_part_with_no_content_member_is_accepted(wire, parts, index):
    with pytest.raises(Fault) as fault:
        send(wire, parts=parts)
    fault.value.is_("INVALID_PARAMS")
    assert f"message.parts[{index}]" in " ".join([fault.value.message, *fault.value.fields])


def test_c3_an_empty_text_and_a_null_data_are_content(wire):
    assert state(send(wire, parts=[{"text": "echo x"}, {"text": ""}])) in ("COMPLETED", "FAILED")
    assert state(send(wire, parts=[{"text": "data"}, {"data": None}])) in ("COMPLETED", "FAILED")


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
@pytest.mark.parametrize(
    "part",
    [{"text": "a", "url": "https://f.example.test/x"}, {"text": "a", "data": 1}, {"text": 5}, {"raw": "not base64!"},
     {"url": 5}, {"text": "a", "mediaType": 7}, {"text": "a", "metadata": []}, "hi", 7, None, ["a"]],
)
def test_a_part_of_the_wrong_shape_is_refused(clients, name, part):
    with pytest.raises(Fault) as fault:
        send(clients(name), parts=[part])
    fault.value.is_("INVALID_PARAMS")


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
@pytest.mark.parametrize("member", ["messageId", "role", "parts"])
@pytest.mark.parametrize("value", ["absent", None, "", [], {}])
def test_a_required_member_that_is_missing_is_named(clients, name, member, value):
    sent = message("echo x")
    if value == "absent":
        del sent[member]
    else:
        sent[member] = value
    with pytest.raises(Fault) as fault:
        clients(name).call("SendMessage", {"message": sent})
    fault.value.is_("INVALID_PARAMS")
    assert member in " ".join([fault.value.message, *fault.value.fields])


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
@pytest.mark.parametrize("where", ["params", "message", "configuration", "part"])
def test_c5_strict_parser_refuses_forward_compatible_extra_fields(clients, name, where):
    new = {"x_new": 1, "xOther": {"deep": [None]}}
    sent = {"message": message("echo same"), "configuration": {}}
    {"params": sent, "message": sent["message"], "configuration": sent["configuration"],
     "part": sent["message"]["parts"][0]}[where].update(new)
    client = clients(name)
    task = client.call("SendMessage", sent)["task"]
    assert (state(task), answer(task)) == ("COMPLETED", "same")
    assert "x_new" not in json.dumps(get(client, task)) and "xOther" not in json.dumps(task)


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
def test_proto_names_are_accepted_and_never_emitted(clients, name):
    client = clients(name)
    sent = {"message_id": str(uuid.uuid4()), "role": 1, "parts": [{"text": "echo x", "media_type": "text/plain"}]}
    task = client.call("SendMessage", {"message": sent, "configuration": {"history_length": 1}})["task"]
    assert state(task) == "COMPLETED" and len(task["history"]) == 1
    assert "_id" not in json.dumps(task) and "media_type" not in json.dumps(task)


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
@pytest.mark.parametrize("role", ["ROLE_ROBOT", "user", 99, -1, True, {}, "ROLE_UNSPECIFIED", 0])
def test_c7_unknown_roles_are_mangled_into_a_made_up_word(clients, name, role):
    with pytest.raises(Fault) as fault:
        send(clients(name), "echo x", role=role)
    fault.value.is_("INVALID_PARAMS")
    assert "role" in " ".join([fault.value.message, *fault.value.fields])


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
@pytest.mark.parametrize("status", ["TASK_STATE_NOPE", "working", "WORKING", "99"])
def test_c7_unknown_states_are_mangled_into_a_made_up_word(clients, name, status):
    with pytest.raises(Fault) as fault:
        clients(name).call("ListTasks", {"status": status})
    fault.value.is_("INVALID_PARAMS")
    assert "status" in " ".join([fault.value.message, *fault.value.fields])


@pytest.mark.one_process
def test_c9_a_stored_status_may_have_no_timestamp(clients, server, context):
    single, main = clients("jsonrpc", "/single"), clients("jsonrpc")
    busy = post(single, "sleep:3", contextId=f"{context}-busy")
    waiting = post(single, "echo late", contextId=context)
    canceled = post(main, "sleep:60", contextId=f"{context}-c")
    stamps = {"SUBMITTED": get(single, waiting), "INPUT_REQUIRED": send(main, "ask"), "FAILED": send(main, "fail"),
              "COMPLETED": send(main, "echo x"), "AUTH_REQUIRED": send(main, "auth")}
    stamps["WORKING"] = until(single, busy, "WORKING")
    before = get(main, canceled)["status"]["timestamp"]
    stamps["CANCELED"] = main.call("CancelTask", {"id": canceled["id"]})
    assert stamps["CANCELED"]["status"]["timestamp"] >= before
    for expected, task in stamps.items():
        assert state(task) == expected
        client = single if expected in ("SUBMITTED", "WORKING") else main
        listed = client.call("ListTasks", {"contextId": task["contextId"]})["tasks"]
        for one in (task, get(client, task), *listed):
            assert len(one["status"]["timestamp"]) == len("2026-01-01T00:00:00.000Z")
            assert one["status"]["timestamp"].endswith("Z")
    done = until(single, waiting, "COMPLETED")
    assert done["status"]["timestamp"] >= stamps["SUBMITTED"]["status"]["timestamp"]


NUMBERS = '{"one":1,"neg":-7,"max":9007199254740991,"min":-9007199254740991,"frac":0.1,"zero":0,"list":[1,[2]]}'


@pytest.mark.parametrize("reader", ["jsonrpc", "rest", "sse", "list"])
@pytest.mark.parametrize("writer", ["jsonrpc", "rest", "grpc"])
def test_c11_integers_in_data_parts_come_back_as_floats(clients, writer, reader, context):
    numbers = json.loads(NUMBERS)
    parts = [{"text": "data"}, {"data": numbers, "metadata": numbers}]
    sent = send(clients(writer), parts=parts, contextId=context)
    if reader == "list":
        raw = httpx.get(
            f"{clients('rest').url}/tasks", headers={"a2a-version": "1.0"},
            params={"contextId": context, "includeArtifacts": "true", "historyLength": 9},
        ).text
    elif reader == "sse":
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendStreamingMessage", "params": {"message": message(parts=parts)}}
        raw = rpc_raw(clients, json.dumps(body)).text
    elif reader == "rest":
        raw = httpx.get(f"{clients('rest').url}/tasks/{sent['id']}", headers={"a2a-version": "1.0"}).text
    else:
        body = {"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": sent["id"]}}
        raw = rpc_raw(clients, json.dumps(body)).text
    compact = raw.replace(" ", "")
    for wanted in ('"one":1', '"neg":-7', '"max":9007199254740991', '"min":-9007199254740991', '"frac":0.1', '"zero":0',
                   '"list":[1,[2]]'):
        hits = compact.count(wanted)
        exact = sum(compact.count(wanted + end) for end in ",}]")
        # In the answer, and with its metadata in the history.
        assert hits >= 2 and hits == exact, (wanted, hits, exact, raw)


def test_c11_a_grpc_reader_gets_the_same_numbers(clients):
    task = send(clients("jsonrpc"), parts=[{"text": "data"}, {"data": json.loads(NUMBERS)}])
    read = get(clients("grpc"), task)
    assert json.loads(NUMBERS) in [part.get("data") for artifact in read["artifacts"] for part in artifact["parts"]]


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
@pytest.mark.parametrize("number", ["9007199254740993", "-9007199254740993", "18446744073709551615", "1e400"])
@pytest.mark.parametrize("where", ["data", "metadata"])
def test_c11_a_number_that_a_double_cannot_hold_is_kept_or_refused_never_altered(clients, name, number, where):
    part = {"data": {"over": "HERE"}} if where == "data" else {"data": 1, "metadata": {"over": "HERE"}}
    params = {"message": message(parts=[{"text": "data"}, part])}
    if name == "jsonrpc":
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params})
        response = rpc_raw(clients, body.replace('"HERE"', number))
        refused = response.json().get("error", {}).get("code") in (-32602, -32700)
    else:
        headers = {"a2a-version": "1.0", "content-type": "application/json"}
        body = json.dumps(params).replace('"HERE"', number)
        response = httpx.post(f"{clients(name).url}/message:send", content=body, headers=headers)
        refused = response.status_code == 400
    assert refused or f'"over":{number}' in response.text.replace(" ", ""), response.text


def test_c13_old_http_and_grpc_codes_for_a2a_errors(wire):
    done = send(wire, "echo x")["id"]

    def refused(reason, operation, params):
        with pytest.raises(Fault) as fault:
            wire.call(operation, params)
        fault.value.is_(reason)

    refused("TASK_NOT_CANCELABLE", "CancelTask", {"id": done})
    refused("UNSUPPORTED_OPERATION", "SendMessage", {"message": message("echo y", taskId=done)})
    push = {"taskId": done, "url": "https://hook.example.test/"}
    refused("PUSH_NOTIFICATION_NOT_SUPPORTED", "CreateTaskPushNotificationConfig", push)
    refused("PUSH_NOTIFICATION_NOT_SUPPORTED", "GetTaskPushNotificationConfig", {"taskId": done, "id": "c"})
    refused("PUSH_NOTIFICATION_NOT_SUPPORTED", "ListTaskPushNotificationConfigs", {"taskId": done})
    refused("PUSH_NOTIFICATION_NOT_SUPPORTED", "DeleteTaskPushNotificationConfig", {"taskId": done, "id": "c"})
    inline = {"message": message("echo z"), "configuration": {"taskPushNotificationConfig": {"url": push["url"]}}}
    refused("PUSH_NOTIFICATION_NOT_SUPPORTED", "SendMessage", inline)
    refused("UNSUPPORTED_OPERATION", "GetExtendedAgentCard", {})
    odd = message(parts=[{"raw": "AAAA", "mediaType": "application/x-nope"}])
    refused("CONTENT_TYPE_NOT_SUPPORTED", "SendMessage", {"message": odd})
    for operation in ("GetTask", "CancelTask"):
        refused("TASK_NOT_FOUND", operation, {"id": "nope"})
    refused("TASK_NOT_FOUND", "SendMessage", {"message": message("echo y", taskId="nope")})


VERSIONS = {
    "1.0": True, "1.0.7": True, "1.0.0.0": True,
    "99.0": False, "1": False, "1.0,0.3": False, "abc": False, "": False, None: False, "1.1": False, "0.3": False,
    "v1.0": False, "1.0-rc1": False, "1.": False, ".1": False, "1..0": False, "2.0": False, "1.0;q=1": False,
    "1" * 5000 + ".0": False,
}


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: repr(version)[:12])
def test_c15_the_version_is_ignored_or_its_absence_differs_per_binding(wire, version):
    served = VERSIONS[version]
    with pytest.raises(Fault) as fault:
        wire.call("GetTask", {"id": "nope"}, version=version)
    fault.value.is_("TASK_NOT_FOUND" if served else "VERSION_NOT_SUPPORTED")
    if not served:
        assert "1.0" in fault.value.info["metadata"]["supportedVersions"]


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
def test_c15_the_version_may_come_as_a_query_parameter(clients, name):
    for query, reason in (("1.0", "TASK_NOT_FOUND"), ("99.0", "VERSION_NOT_SUPPORTED")):
        with pytest.raises(Fault) as fault:
            clients(name).call("GetTask", {"id": "nope"}, version=None, query={"A2A-Version": query})
        fault.value.is_(reason)


@pytest.mark.parametrize("version", [" 1.0 ", "\t1.0", "1.0\t "])
def test_c15_blanks_around_the_version_count(server, version):
    """The usual clients cannot even send it."""
    head = f"GET /tasks/nope HTTP/1.1\r\nhost: x\r\na2a-version: {version}\r\nconnection: close\r\n\r\n"
    status, _, body = raw_http(server, head.encode())
    assert status == 404 and json.loads(body)["error"]["details"][0]["reason"] == "TASK_NOT_FOUND"


def test_a_required_extension_that_was_not_declared_is_refused(clients):
    for name in WIRES:
        client = clients(name, "/picky")
        with pytest.raises(Fault) as fault:
            send(client, "echo x")
        fault.value.is_("EXTENSION_SUPPORT_REQUIRED")
        for declared in ("https://ext.example.test/v1", "https://other.example.test/, https://ext.example.test/v1"):
            params = {"message": message("echo x")}
            assert state(client.call("SendMessage", params, headers={"a2a-extensions": declared})["task"]) == "COMPLETED"


def test_c17_get_and_post_disagree_for_subscribe(clients, rpc):
    base = clients("rest").url
    for verb in ("GET", "POST"):
        task = post(rpc, "sleep:1")
        url = f"{base}/tasks/{task['id']}:subscribe"
        with httpx.stream(verb, url, headers={"a2a-version": "1.0"}, timeout=30) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            body = response.read().decode()
        first = json.loads(body.split("data:")[1].split("\n")[0])
        assert first["task"]["id"] == task["id"]


@pytest.mark.parametrize(
    "verb, path",
    [("PUT", "/tasks/T:subscribe"), ("DELETE", "/tasks/T:subscribe"), ("GET", "/tasks/T:cancel"), ("PATCH", "/tasks/T"),
     ("DELETE", "/tasks/T"), ("PUT", "/message:send"), ("GET", "/message:send"), ("GET", "/message:stream"),
     ("POST", "/tasks/T"), ("DELETE", "/tasks"), ("PUT", "/tasks/T/pushNotificationConfigs"),
     ("POST", "/extendedAgentCard"), ("POST", "/.well-known/agent-card.json")],
)
def test_c17_the_wrong_verb_hits_another_route(clients, rpc, verb, path):
    task = send(rpc, "echo x")
    response = httpx.request(
        verb, clients("rest").url + path.replace("T", task["id"]), headers={"a2a-version": "1.0"}
    )
    assert response.status_code == 405 and response.headers["allow"], response.text
    assert response.headers["content-type"].startswith("application/json")
    assert response.json()["error"]["code"] == 405
    assert verb not in response.headers["allow"].replace(" ", "").split(",")


def raw_http(server, request: bytes) -> tuple[int, dict, bytes]:
    """Sends bytes as they are; (status, headers, body) of the answer."""
    with connect(server) as stream:
        stream.sendall(request)
        received = b""
        while chunk := stream.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return int(lines[0].split()[1]), headers, body


def raw_get(server, target: str, verb: str = "GET") -> tuple[int, dict, bytes]:
    return raw_http(server, (
        f"{verb} {target} HTTP/1.1\r\nhost: x\r\na2a-version: 1.0\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    ).encode("latin-1"))


def test_c19_the_colon_verb_breaks_when_percent_encoded_by_a_proxy(server, rpc):
    for colon in ("%3A", "%3a", ":"):
        task = post(rpc, "sleep:30")
        status, _, body = raw_get(server, f"/tasks/{task['id']}{colon}cancel", "POST")
        assert status == 200, body
        assert state(get(rpc, task)) == "CANCELED"


@pytest.mark.parametrize(
    "target",
    ["/tasks/a%2Fb", "/tasks/..%2f..%2fmetrics", "/tasks/%00", "//tasks/T", "/tasks/T/", "/tasks/../metrics",
     "/tasks/%2e%2e/metrics", "/../metrics", "/metrics", "/readyz", "/livez", "/tasks/T:nope", "/tasks/T%20", "/tasks/%ff",
     "/tasks/%zz", "/tasks/T;x=1", "/tasks/" + "a" * 4000, "/tasks/T:cancel:subscribe", "/tasks/:subscribe", "/TASKS",
     "/tasks//", "/message%3Asend/x", "/%2e%2e/%2e%2e/etc/passwd", "/tasks/T/pushNotificationConfigs/../../..",
     "/tasks/%e9", "/tasks/%c3%28", "/.well-known/../metrics", "/nope/tasks/T", "/nope/.well-known/agent-card.json"],
)
def test_c19_odd_paths_reach_an_admin_route_or_a_framework_page(server, rpc, target):
    task = send(rpc, "echo x")
    status, headers, body = raw_get(server, target.replace("T", task["id"]) if target != "/TASKS" else target)
    assert status in (400, 404, 405), (status, body)
    assert headers["content-type"].startswith("application/json"), (status, headers, body)
    error = json.loads(body)["error"]
    assert error["code"] == status and error["message"] and error["status"]
    assert b"# TYPE" not in body


@pytest.mark.parametrize(
    "parts",
    [[{"raw": "AAAA", "mediaType": "application/x-nope"}], [{"url": "https://f.example.test/x", "mediaType": "video/quux"}],
     [{"text": "echo x"}, {"raw": "AAAA", "mediaType": "application/x-nope"}],
     [{"text": "echo x", "mediaType": "text/nope"}]],
)
def test_c21_unsupported_media_types_are_executed_anyway(wire, parts, context):
    with pytest.raises(Fault) as fault:
        send(wire, parts=parts, contextId=context)
    fault.value.is_("CONTENT_TYPE_NOT_SUPPORTED")
    assert wire.call("ListTasks", {"contextId": context})["totalSize"] == 0


def test_c21_plain_text_and_unknown_output_modes_are_fine(wire):
    for part in ({"text": "echo x"}, {"text": "echo x", "mediaType": "text/plain"},
                 {"text": "echo x", "mediaType": "text/plain; charset=utf-8"}, {"text": "echo x", "mediaType": "TEXT/Plain"}):
        assert answer(send(wire, parts=[part], configuration={"acceptedOutputModes": ["image/heic"]})) == "x"


@pytest.mark.parametrize(
    "given, answered",
    [("application/a2a+json", "application/a2a+json"), ("application/json; charset=utf-8", "application/json"),
     ("application/json", "application/json"), ("APPLICATION/JSON", "application/json"), (None, "application/a2a+json")],
)
def test_c21_both_media_types_of_requests_are_taken_and_mirrored(clients, given, answered):
    headers = {"a2a-version": "1.0"} | ({"content-type": given} if given else {})
    body = json.dumps({"message": message("echo x")})
    response = httpx.post(f"{clients('rest').url}/message:send", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].split(";")[0] == answered


@pytest.mark.parametrize("given", ["text/plain", "application/xml", "multipart/form-data", "x"])
def test_c21_another_media_type_of_a_rest_request_is_refused(clients, given):
    headers = {"a2a-version": "1.0", "content-type": given}
    body = json.dumps({"message": message("echo x")})
    response = httpx.post(f"{clients('rest').url}/message:send", content=body, headers=headers)
    assert response.status_code == 400 and response.headers["content-type"].startswith("application/json")
    assert response.json()["error"]["details"][0]["reason"] == "CONTENT_TYPE_NOT_SUPPORTED"


def test_c23_history_length_zero_still_returns_a_message(wire, context):
    task = send(wire, "ask", contextId=context)
    send(wire, "ten", taskId=task["id"])
    whole = get(wire, task)["history"]
    assert [one["role"] for one in whole] == ["ROLE_USER", "ROLE_AGENT"] * 2
    for length in (0, 1, 2, 3, 4, 5, 2147483647):
        want = whole[max(0, 4 - length):]
        read = get(wire, task, historyLength=length)
        listed = wire.call("ListTasks", {"contextId": context, "historyLength": length})["tasks"][0]
        for one in (read, listed):
            assert one.get("history", []) == want and ("history" in one) == bool(length)
    assert "history" not in wire.call("ListTasks", {"contextId": context})["tasks"][0]
    asked = send(wire, "ask")
    done = send(wire, "two", taskId=asked["id"], configuration={"historyLength": 2})
    assert done["history"] == get(wire, asked)["history"][-2:]
    assert "history" not in send(wire, "echo x", configuration={"historyLength": 0})


@pytest.mark.parametrize("length", [-1, -2147483648, 2147483648, "abc", 1.5, "1.5", "", True, [], {}])
def test_c23_negative_or_odd_history_lengths_are_accepted(wire, length, context):
    if wire.name == "grpc" and not (isinstance(length, int) and -2147483648 <= length < 0):
        pytest.skip("not expressible in protobuf")
    if wire.name == "rest" and isinstance(length, (list, dict)):
        pytest.skip("not expressible in a query")
    task = send(wire, "echo x")
    calls = [("GetTask", {"id": task["id"], "historyLength": length}), ("ListTasks", {"historyLength": length})]
    calls.append(("SendMessage", {"message": message("echo x", contextId=context), "configuration": {"historyLength": length}}))
    for operation, params in calls:
        with pytest.raises(Fault) as fault:
            wire.call(operation, params)
        fault.value.is_("INVALID_PARAMS")
        assert "istoryLength" in " ".join([fault.value.message, *fault.value.fields])
    assert wire.call("ListTasks", {"contextId": context})["totalSize"] == 0


def test_errors_say_nothing_of_the_inside(clients):
    for name in WIRES:
        for operation, params in (("GetTask", {"id": "x' OR 1=1 --"}), ("ListTasks", {"pageToken": "\x00"}),
                                  ("SendMessage", {"message": message("echo x", contextId="/etc/passwd\n")})):
            with pytest.raises(Fault) as fault:
                clients(name).call(operation, params)
            text = str(fault.value).lower()
            assert not any(word in text for word in ("sqlite", ".rs", "panick", "thread", "/src/", "redis", "stack"))
            assert len(fault.value.message) < 2000


@pytest.mark.parametrize("bad", ["", " ", "a b", "a/b", "é", "a" * 129, "a\n", "ctx#1", "a,b"])
def test_a_context_id_outside_the_alphabet_is_refused_not_changed(wire, bad):
    if bad == "":
        assert send(wire, "echo x", contextId="")["contextId"]
        return
    with pytest.raises(Fault) as fault:
        send(wire, "echo x", contextId=bad)
    fault.value.is_("INVALID_PARAMS")
    assert "contextId" in " ".join([fault.value.message, *fault.value.fields])


def test_a_long_but_legal_context_id_is_kept(wire):
    ident = "Az09_.:-" * 16
    assert send(wire, "echo x", contextId=ident)["contextId"] == ident


def test_odd_characters_come_back_unchanged(rpc):
    nasty = 'quote " back \\ slash \u2028 tab\t nul-free \u0001 emoji \U0001f9ea combining e\u0301'
    assert answer(send(rpc, f"echo {nasty}")) == nasty


def test_a_body_over_the_limit_is_refused_without_reading_it_all(clients, server):
    big = json.dumps({"message": message("echo " + "x" * 64_000_000)})
    begun = time.monotonic()
    try:
        response = httpx.post(f"{clients('rest').url}/message:send", content=big, timeout=30,
                              headers={"a2a-version": "1.0", "content-type": "application/json"})
        assert response.status_code == 413 and response.json()["error"]["code"] == 413
        assert response.json()["error"]["details"][0]["@type"] == ERROR_INFO
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        pass  # the server hung up while we were still sending, which a large upload may see
    assert time.monotonic() - begun < 20
    assert answer(send(clients("jsonrpc"), "echo alive")) == "alive"
