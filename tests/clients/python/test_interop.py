"""Cases K: what other clients do. Names say the symptom seen in the field."""

import json

import grpc
import httpx
import pytest
from a2a.types import a2a_pb2 as pb
from a2a.types import a2a_pb2_grpc

from rialto import AGENTS
from wires import WIRES, Fault, answer, get, message, post, send, state, until
from wires import wire as open_wire

HEADERS = {"a2a-version": "1.0"}


def card_of(base: str) -> dict:
    response = httpx.get(f"{base}/.well-known/agent-card.json")
    assert response.status_code == 200, response.text
    return response.json()


def test_c163_a_client_that_sends_only_the_context_orphans_the_parked_task(clients, wire, context):
    parked = send(wire, "ask", contextId=context)
    for n in range(5):
        other = send(wire, f"echo {n}", contextId=context)
        assert other["id"] != parked["id"] and answer(other) == str(n)
    waiting = wire.call("ListTasks", {"contextId": context, "status": "TASK_STATE_INPUT_REQUIRED"})
    assert [task["id"] for task in waiting["tasks"]] == [parked["id"]]
    assert wire.call("ListTasks", {"contextId": context})["totalSize"] == 6


def test_c163_the_option_continues_the_one_task_that_waits(clients, context):
    for name in WIRES:
        client, place = clients(name, "/continue"), f"{context}-{name}"
        parked = send(client, "ask", contextId=place)
        done = send(client, "the answer", contextId=place)
        assert (done["id"], state(done)) == (parked["id"], "COMPLETED") and "the answer" in answer(done)
        fresh = send(client, "echo new", contextId=place)
        assert fresh["id"] != parked["id"]
        assert client.call("ListTasks", {"contextId": place})["totalSize"] == 2


def test_c165_clients_stream_although_the_card_says_no(clients, context):
    for name in WIRES:
        client = clients(name, "/unary")
        for operation, params in (
            ("SendStreamingMessage", {"message": message("echo x", contextId=context)}), ("SubscribeToTask", {"id": "x"}),
        ):
            with pytest.raises(Fault) as fault:
                list(client.stream(operation, params))
            fault.value.is_("UNSUPPORTED_OPERATION")
        assert client.call("ListTasks", {"contextId": context})["totalSize"] == 0
        assert state(send(client, "echo x")) == "COMPLETED"


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
@pytest.mark.parametrize("accept", ["text/event-stream", "application/json", "*/*", "text/html", "application/a2a+json", "x"])
def test_c165_the_accept_header_decides_instead_of_the_method(clients, name, accept):
    client = clients(name)
    assert answer(client.call("SendMessage", {"message": message("echo x")}, headers={"accept": accept})["task"]) == "x"
    events = list(client.stream("SendStreamingMessage", {"message": message("echo x")}, headers={"accept": accept}))
    assert "task" in events[0] and state(events[-1]["statusUpdate"]) == "COMPLETED"


@pytest.mark.parametrize("mount", [mount for _, mount, _ in AGENTS])
def test_c171_card_url_plus_standard_path_is_404(server, mount):
    base = server.url + mount.rstrip("/")
    card = card_of(base)
    assert {one["protocolBinding"] for one in card["supportedInterfaces"]} == {"JSONRPC", "HTTP+JSON", "GRPC"}
    sent = message("echo x")
    headers = HEADERS | {"a2a-extensions": "https://ext.example.test/v1"}
    for one in card["supportedInterfaces"]:
        assert one["protocolVersion"] == "1.0"
        tenant = one.get("tenant", "")
        params = {"message": sent} | ({"tenant": tenant} if tenant else {})
        if one["protocolBinding"] == "HTTP+JSON":
            root = f"{one['url'].rstrip('/')}/{tenant}".rstrip("/")
            assert httpx.post(f"{root}/message:send", json={"message": sent}, headers=headers).status_code == 200
            assert httpx.get(f"{root}/tasks", headers=headers).status_code == 200
            extended = httpx.get(f"{root}/extendedAgentCard", headers=headers)
            assert extended.json()["error"]["details"][0]["reason"] == "UNSUPPORTED_OPERATION"
        elif one["protocolBinding"] == "JSONRPC":
            body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
            response = httpx.post(one["url"], json=body, headers=headers)
            assert response.status_code == 200 and "result" in response.json(), response.text
        else:
            assert "://" not in one["url"] and "/" not in one["url"]
            with grpc.insecure_channel(one["url"]) as channel:
                stub = a2a_pb2_grpc.A2AServiceStub(channel)
                listed = stub.ListTasks(pb.ListTasksRequest(tenant=tenant), metadata=list(headers.items()), timeout=10)
                assert listed.page_size == 50


def test_each_agent_has_its_own_tasks(clients, context):
    for name in WIRES:
        here, there = clients(name), clients(name, "/open")
        task = send(here, "ask", contextId=context)
        for call in (
            lambda: get(there, task), lambda: there.call("CancelTask", {"id": task["id"]}),
            lambda: list(there.stream("SubscribeToTask", {"id": task["id"]})),
            lambda: send(there, "echo x", taskId=task["id"]),
        ):
            with pytest.raises(Fault) as fault:
                call()
            fault.value.is_("TASK_NOT_FOUND")
        assert there.call("ListTasks", {"contextId": context})["totalSize"] == 0


def test_tenants_see_each_other(server):
    base = server.url + "/tenants"
    card = card_of(base)
    for binding, tenants in (("JSONRPC", ["", "blue", "red"]), ("GRPC", ["tenants", "tenants/blue", "tenants/red"])):
        listed = [one.get("tenant", "") for one in card["supportedInterfaces"] if one["protocolBinding"] == binding]
        assert sorted(listed) == tenants
    for name in WIRES:
        red, blue, none = (open_wire(name, base, tenant) for tenant in ("red", "blue", ""))
        task = send(red, "ask")
        assert get(red, task) == task
        for other in (blue, none):
            for call in (
                lambda other=other: get(other, task), lambda other=other: send(other, "x", taskId=task["id"]),
                lambda other=other: other.call("CancelTask", {"id": task["id"]}),
                lambda other=other: list(other.stream("SubscribeToTask", {"id": task["id"]})),
            ):
                with pytest.raises(Fault) as fault:
                    call()
                fault.value.is_("TASK_NOT_FOUND")
            assert other.call("ListTasks", {"contextId": task["contextId"]})["totalSize"] == 0
        green = "tenants/green" if name == "grpc" else "green"
        with pytest.raises(Fault) as fault:
            red.call("GetTask", {"id": task["id"], "tenant": green})
        assert fault.value.info["reason"] in ("TASK_NOT_FOUND", "INVALID_PARAMS", "METHOD_NOT_FOUND")


def test_path_and_body_that_disagree_are_refused(clients):
    rest, task = clients("rest"), send(clients("rest"), "ask")
    response = httpx.post(f"{rest.url}/tasks/{task['id']}:cancel", json={"id": "another"}, headers=HEADERS)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["details"][0]["reason"] == "INVALID_PARAMS"
    assert state(get(rest, task)) == "INPUT_REQUIRED"
    for body in (None, {}, {"id": task["id"]}):
        one = send(rest, "ask")
        content = None if body is None else json.dumps(body | ({"id": one["id"]} if body else {}))
        response = httpx.post(f"{rest.url}/tasks/{one['id']}:cancel", content=content, headers=HEADERS)
        assert response.status_code == 200 and state(response.json()) == "CANCELED", response.text


def test_the_card_has_validators_and_an_unchanged_card_is_not_sent_again(server):
    url = f"{server.url}/.well-known/agent-card.json"
    first = httpx.get(url)
    assert first.headers["content-type"].startswith("application/json")
    assert "max-age" in first.headers["cache-control"] and first.headers["etag"] and first.headers["last-modified"]
    assert first.headers["access-control-allow-origin"] == "*"
    for header, name in (("if-none-match", "etag"), ("if-modified-since", "last-modified")):
        again = httpx.get(url, headers={header: first.headers[name]})
        assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == first.headers["etag"]
    assert httpx.get(url, headers={"if-none-match": '"other"'}).status_code == 200
    assert httpx.get(url, headers={"if-none-match": f'"x", W/{first.headers["etag"].removeprefix("W/")}'}).status_code == 304
    head = httpx.head(url)
    assert head.status_code == 200 and head.content == b"" and head.headers["etag"] == first.headers["etag"]


def test_the_card_has_every_required_member(server):
    for _, mount, settings in AGENTS:
        card = card_of(server.url + mount.rstrip("/"))
        for member in ("name", "description", "supportedInterfaces", "version", "capabilities", "defaultInputModes",
                       "defaultOutputModes", "skills"):
            assert member in card, (mount, member)
        assert card["capabilities"]["streaming"] == settings.get("card", {}).get("streaming", True)
        assert not card["capabilities"].get("pushNotifications") and not card["capabilities"].get("extendedAgentCard")
        assert all(url.startswith(server.url) or "://" not in url for url in (one["url"] for one in card["supportedInterfaces"]))


def test_health_says_one_thing(server):
    response = httpx.get(f"{server.url}/health")
    assert response.status_code == 200 and response.json() == {"status": "healthy"}


def test_the_extensions_that_were_activated_are_echoed(clients):
    client = clients("rest", "/picky")
    headers = HEADERS | {"a2a-extensions": "https://unknown.example.test/x, https://ext.example.test/v1"}
    response = httpx.post(f"{client.url}/message:send", json={"message": message("echo x")}, headers=headers)
    assert response.status_code == 200 and response.headers["a2a-extensions"] == "https://ext.example.test/v1"
