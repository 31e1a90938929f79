"""The three bindings behind one face: `call` and `stream` take and give ProtoJSON objects, and raise `Fault`.

Only the wire formats are written here by hand, so that a test sees what is really sent. gRPC uses the stubs of the SDK.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

import grpc
import httpx
from a2a.types import a2a_pb2 as pb
from a2a.types import a2a_pb2_grpc
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2

from rialto import CLUSTER

# Operation: (verb, path, request type). Members of the request named in the path leave the query and the body.
OPERATIONS = {
    "SendMessage": ("POST", "/message:send", pb.SendMessageRequest),
    "SendStreamingMessage": ("POST", "/message:stream", pb.SendMessageRequest),
    "GetTask": ("GET", "/tasks/{id}", pb.GetTaskRequest),
    "ListTasks": ("GET", "/tasks", pb.ListTasksRequest),
    "CancelTask": ("POST", "/tasks/{id}:cancel", pb.CancelTaskRequest),
    "SubscribeToTask": ("POST", "/tasks/{id}:subscribe", pb.SubscribeToTaskRequest),
    "CreateTaskPushNotificationConfig": (
        "POST", "/tasks/{taskId}/pushNotificationConfigs", pb.TaskPushNotificationConfig),
    "GetTaskPushNotificationConfig": (
        "GET", "/tasks/{taskId}/pushNotificationConfigs/{id}", pb.GetTaskPushNotificationConfigRequest),
    "ListTaskPushNotificationConfigs": (
        "GET", "/tasks/{taskId}/pushNotificationConfigs", pb.ListTaskPushNotificationConfigsRequest),
    "DeleteTaskPushNotificationConfig": (
        "DELETE", "/tasks/{taskId}/pushNotificationConfigs/{id}", pb.DeleteTaskPushNotificationConfigRequest),
    "GetExtendedAgentCard": ("GET", "/extendedAgentCard", pb.GetExtendedAgentCardRequest),
}

# Spec §5.4: reason -> (JSON-RPC code, HTTP status, gRPC status).
ERRORS = {
    "TASK_NOT_FOUND": (-32001, 404, "NOT_FOUND"),
    "TASK_NOT_CANCELABLE": (-32002, 400, "FAILED_PRECONDITION"),
    "PUSH_NOTIFICATION_NOT_SUPPORTED": (-32003, 400, "FAILED_PRECONDITION"),
    "UNSUPPORTED_OPERATION": (-32004, 400, "FAILED_PRECONDITION"),
    "CONTENT_TYPE_NOT_SUPPORTED": (-32005, 400, "INVALID_ARGUMENT"),
    "EXTENDED_AGENT_CARD_NOT_CONFIGURED": (-32007, 400, "FAILED_PRECONDITION"),
    "EXTENSION_SUPPORT_REQUIRED": (-32008, 400, "FAILED_PRECONDITION"),
    "VERSION_NOT_SUPPORTED": (-32009, 400, "FAILED_PRECONDITION"),
    "INVALID_REQUEST": (-32600, 400, "INVALID_ARGUMENT"),
    "INVALID_PARAMS": (-32602, 400, "INVALID_ARGUMENT"),
    "PARSE_ERROR": (-32700, 400, "INVALID_ARGUMENT"),
}
VERSION = "1.0"
ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"


@dataclass
class Fault(Exception):
    """An error answer, as found on its wire."""

    wire: str
    message: str
    code: int | str | None = None
    status: int | None = None
    details: list[dict] = field(default_factory=list)
    headers: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.wire} {self.status} {self.code} {self.message!r} {self.details}"

    @property
    def info(self) -> dict:
        return next((detail for detail in self.details if detail.get("@type") == ERROR_INFO), {})

    @property
    def fields(self) -> list[str]:
        """Names of the fields at fault."""
        return [
            violation["field"] for detail in self.details for violation in detail.get("fieldViolations", [])
        ]

    def is_(self, reason: str) -> Fault:
        """Checks every code of this wire against the table of the spec."""
        jsonrpc, http, status = ERRORS[reason]
        if self.wire == "jsonrpc":
            assert (self.status, self.code) == (200, jsonrpc), str(self)
        elif self.wire == "rest":
            assert (self.status, self.code) == (http, status), str(self)
        else:
            assert self.code == status, str(self)
        assert self.info.get("reason") == reason, str(self)
        assert self.info.get("domain") == "a2a-protocol.org", str(self)
        return self


class Events:
    """An open stream: an iterator of event objects that can be hung up."""

    def __init__(self, events: Iterator[dict], close):
        self._events, self._close = events, close

    def __iter__(self) -> Iterator[dict]:
        return self._events

    def __next__(self) -> dict:
        return next(self._events)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def sse(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """(event, id, data) of each event; comments are dropped."""
    event, ident, data = "message", "", []
    for line in lines:
        if not line:
            if data:
                yield event, ident, "\n".join(data)
            event, ident, data = "message", "", []
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                event = value
            elif name == "id":
                ident = value
            elif name == "data":
                data.append(value)
    assert not data, "the stream was cut within an event"


def _headers(version: str | None, extra: dict | None) -> dict:
    return ({} if version is None else {"a2a-version": version}) | (extra or {})


class _Http:
    def __init__(self, url: str, tenant: str = ""):
        self.url, self.tenant = url, tenant
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.Client(timeout=60, limits=limits)

    def close(self) -> None:
        self.http.close()

    def _open(self, request: httpx.Request) -> httpx.Response:
        response = self.http.send(request, stream=True)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            assert response.status_code == 200
            return response
        try:
            response.read()
        finally:
            response.close()
        self._result(response)
        raise AssertionError(f"a stream was answered with {response.headers.get('content-type')}: {response.text[:500]}")

    def stream(self, operation: str, params: dict | None = None, **options) -> Events:
        """Opens a stream; an error that is known before it starts is raised here."""
        response = self._open(self._request(operation, self._params(params), **options))
        return Events((self._event(data) for _, _, data in sse(response.iter_lines())), response.close)

    def call(self, operation: str, params: dict | None = None, **options):
        return self._result(self.http.send(self._request(operation, self._params(params), **options)))

    def _params(self, params: dict | None) -> dict:
        return ({"tenant": self.tenant} if self.tenant else {}) | (params or {})


class JsonRpc(_Http):
    """JSON-RPC 2.0; `url` is the endpoint."""

    name = "jsonrpc"

    def _request(self, operation, params, version=VERSION, headers=None, query=None):
        body = {"jsonrpc": "2.0", "id": str(uuid.uuid4()), "method": operation, "params": params}
        return self.http.build_request(
            "POST", self.url, json=body, params=query, headers=_headers(version, headers)
        )

    def _result(self, response: httpx.Response):
        assert response.headers["content-type"].startswith("application/json"), response.text[:500]
        body = response.json()
        assert body["jsonrpc"] == "2.0" and ("result" in body) != ("error" in body), body
        # What is too large is refused unread.
        assert response.status_code == 413 or body["id"] == json.loads(response.request.content)["id"], body
        return self._unwrap(body, response)

    def _unwrap(self, body: dict, response: httpx.Response | None):
        if error := body.get("error"):
            raise Fault(
                self.name, error["message"], error["code"], response.status_code if response else 200,
                error.get("data") or [], dict(response.headers) if response else {},
            )
        return body["result"]

    def _event(self, data: str) -> dict:
        return self._unwrap(json.loads(data), None)


class Rest(_Http):
    """HTTP+JSON; `url` is the base."""

    name = "rest"

    def _request(self, operation, params, version=VERSION, headers=None, query=None):
        verb, path, _ = OPERATIONS[operation]
        params = dict(params)
        for member in ("taskId", "id"):
            if f"{{{member}}}" in path:
                path = path.replace(f"{{{member}}}", quote(str(params.pop(member, "")), safe=""))
        if tenant := params.pop("tenant", ""):
            path = f"/{tenant}{path}"
        if verb == "POST":
            content = {"content": json.dumps(params), "params": query}
            headers = {"content-type": "application/a2a+json"} | (headers or {})
        else:
            values = {
                name: ("true" if value else "false") if isinstance(value, bool) else value
                for name, value in params.items()
            }
            content = {"params": values | (query or {})}
        return self.http.build_request(verb, self.url.rstrip("/") + path, headers=_headers(version, headers), **content)

    def _result(self, response: httpx.Response):
        kind = response.headers.get("content-type", "")
        if response.is_success:
            assert kind.startswith(("application/a2a+json", "application/json")), (kind, response.text[:500])
            return response.json()
        assert kind.startswith("application/json"), (response.status_code, kind, response.text[:500])
        error = response.json()["error"]
        assert error["code"] == response.status_code, response.text
        raise Fault(
            self.name, error["message"], error["status"], response.status_code, error.get("details", []),
            dict(response.headers),
        )

    def _event(self, data: str) -> dict:
        event = json.loads(data)
        if error := event.get("error"):
            raise Fault(self.name, error["message"], error["status"], error["code"], error.get("details", []))
        return event


class Grpc:
    """gRPC; `url` is `host:port`. Calls take turns on `connections`, each of which a balancer may send elsewhere."""

    name = "grpc"

    def __init__(
        self, url: str, tenant: str = "", connections: int = len(CLUSTER["gateways"]) if CLUSTER else 1,
        options: list[tuple] = (),
    ):
        self.url, self.tenant = url, tenant
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1), *options]
        self.channels = [grpc.insecure_channel(url, options=options) for _ in range(connections)]
        self.stubs = itertools.cycle([a2a_pb2_grpc.A2AServiceStub(channel) for channel in self.channels])

    def close(self) -> None:
        for channel in self.channels:
            channel.close()

    def _start(self, operation, params, version, headers, timeout):
        request = json_format.ParseDict({"tenant": self.tenant} | (params or {}), OPERATIONS[operation][2]())
        metadata = list(_headers(version, headers).items())
        return getattr(next(self.stubs), operation), request, {"metadata": metadata, "timeout": timeout}

    def call(self, operation: str, params: dict | None = None, version=VERSION, headers=None, timeout=60):
        method, request, options = self._start(operation, params, version, headers, timeout)
        try:
            return _dict(method(request, **options))
        except grpc.RpcError as error:
            raise fault_of(error) from None

    def stream(self, operation: str, params: dict | None = None, version=VERSION, headers=None, timeout=120) -> Events:
        method, request, options = self._start(operation, params, version, headers, timeout)
        call = method(request, **options)

        def events():
            try:
                for event in call:
                    yield _dict(event)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.CANCELLED:
                    raise fault_of(error) from None

        return Events(events(), call.cancel)


def _dict(message) -> dict:
    """As the JSON bindings would have it; the lists that the spec wants even when empty included."""
    value = json_format.MessageToDict(message)
    if isinstance(message, pb.ListTasksResponse):
        value = {"tasks": [], "nextPageToken": "", "pageSize": 0, "totalSize": 0} | value
    return value


def fault_of(error: grpc.RpcError) -> Fault:
    details = []
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert status.code == error.code().value[0] and status.message == error.details(), status
            for detail in status.details:
                kind = detail.type_url.rsplit(".", 1)[-1]
                message = getattr(error_details_pb2, kind)()
                detail.Unpack(message)
                details.append({"@type": detail.type_url, **json_format.MessageToDict(message)})
    return Fault("grpc", error.details(), error.code().name, None, details)


WIRES = ("jsonrpc", "rest", "grpc")


def wire(name: str, base: str, tenant: str = ""):
    """A client of one binding for the agent whose card is under `base`, as that card says.

    A gRPC address has no path, so there the tenant of the card names the agent, too.
    """
    card = httpx.get(f"{base}/.well-known/agent-card.json").json()
    binding = {"jsonrpc": "JSONRPC", "rest": "HTTP+JSON", "grpc": "GRPC"}[name]
    mount = urlsplit(base).path.strip("/") if name == "grpc" else ""
    wanted = f"{mount}/{tenant}".strip("/")
    interface = next(
        entry for entry in card["supportedInterfaces"]
        if entry["protocolBinding"] == binding and entry.get("tenant", "") == wanted
    )
    return {"jsonrpc": JsonRpc, "rest": Rest, "grpc": Grpc}[name](interface["url"], wanted)


def message(text: str | None = None, *, parts: list | None = None, **members) -> dict:
    """A message of a user. Without `parts` it says `text`."""
    return {
        "messageId": str(uuid.uuid4()), "role": "ROLE_USER",
        "parts": [{"text": text}] if parts is None else parts, **members,
    }


def send(client, text: str | None = None, *, configuration: dict | None = None, **members) -> dict:
    """SendMessage; the task."""
    params = {"message": message(text, **members)}
    if configuration is not None:
        params["configuration"] = configuration
    return client.call("SendMessage", params)["task"]


def post(client, text: str, **members) -> dict:
    """SendMessage that does not wait; the task."""
    return send(client, text, configuration={"returnImmediately": True}, **members)


def get(client, task: dict | str, **params) -> dict:
    return client.call("GetTask", {"id": task if isinstance(task, str) else task["id"], **params})


def state(task: dict) -> str:
    return task["status"]["state"].removeprefix("TASK_STATE_")


def until(client, task: dict | str, *states: str, timeout: float = 10) -> dict:
    """The task, once it is in one of these states."""
    deadline = time.monotonic() + timeout
    while state(now := get(client, task)) not in states:
        assert time.monotonic() < deadline, f"not {states} within {timeout} s: {now['status']}"
        time.sleep(0.005)
    return now


TERMINAL = ("COMPLETED", "FAILED", "CANCELED", "REJECTED")


def answer(task: dict) -> str:
    """All text of all artifacts."""
    return "".join(part.get("text", "") for artifact in task.get("artifacts", []) for part in artifact["parts"])


def fold(events) -> dict:
    """The task that a client has after these events: spec §3.1.2, §4.2."""
    task = None
    for event in events:
        assert len(event) == 1, event
        if "task" in event:
            task = json.loads(json.dumps(event["task"]))
            continue
        assert task is not None, f"an event came before the task: {event}"
        if update := event.get("statusUpdate"):
            assert (update["taskId"], update["contextId"]) == (task["id"], task["contextId"])
            task["status"] = update["status"]
        elif update := event.get("artifactUpdate"):
            assert (update["taskId"], update["contextId"]) == (task["id"], task["contextId"])
            new = update["artifact"]
            artifacts = task.setdefault("artifacts", [])
            old = next((one for one in artifacts if one["artifactId"] == new["artifactId"]), None)
            if old is None:
                artifacts.append(new)
            elif update.get("append"):
                old["parts"] += new["parts"]
                if "metadata" in new:
                    old["metadata"] = old.get("metadata", {}) | new["metadata"]
            else:
                artifacts[artifacts.index(old)] = new
    return task
