#!/usr/bin/env python3
"""Writes v03.json from two official Python SDKs; the output is the same each time.

Run it twice. With `pip install a2a-sdk==0.3.26` it makes objects and requests as that SDK's own pydantic models write
them, and requests that they refuse. With `pip install a2a-sdk==1.3.0`, in another environment, it adds to each what
that SDK makes of it in 1.0.
"""

import base64
import enum
import importlib.metadata
import json
import pathlib
import random
import types
import typing

from pydantic import BaseModel, RootModel, ValidationError

FILE = pathlib.Path(__file__).parent / "v03.json"
TERMINAL = ("completed", "canceled", "failed", "rejected")

# Method, the model of its request, and what converts it.
METHODS = [
    ("message/send", "SendMessageRequest", "to_core_send_message_request"),
    ("message/stream", "SendStreamingMessageRequest", "to_core_send_message_request"),
    ("tasks/get", "GetTaskRequest", "to_core_get_task_request"),
    ("tasks/cancel", "CancelTaskRequest", "to_core_cancel_task_request"),
    ("tasks/resubscribe", "TaskResubscriptionRequest", "to_core_subscribe_to_task_request"),
    (
        "tasks/pushNotificationConfig/set",
        "SetTaskPushNotificationConfigRequest",
        "to_core_create_task_push_notification_config_request",
    ),
    (
        "tasks/pushNotificationConfig/get",
        "GetTaskPushNotificationConfigRequest",
        "to_core_get_task_push_notification_config_request",
    ),
    (
        "tasks/pushNotificationConfig/list",
        "ListTaskPushNotificationConfigRequest",
        "to_core_list_task_push_notification_config_request",
    ),
    (
        "tasks/pushNotificationConfig/delete",
        "DeleteTaskPushNotificationConfigRequest",
        "to_core_delete_task_push_notification_config_request",
    ),
    (
        "agent/getAuthenticatedExtendedCard",
        "GetAuthenticatedExtendedCardRequest",
        "to_core_get_extended_agent_card_request",
    ),
]

EVENTS = ["Task", "Message", "TaskStatusUpdateEvent", "TaskArtifactUpdateEvent"]

TEXT = {"kind": "text", "text": "hi"}


def said(**changes):
    return {"message": {"messageId": "m", "role": "user", "kind": "message", "parts": [TEXT]} | changes}


def configured(**configuration):
    return said() | {"configuration": configuration}


# What nobody may send; 0.3.26 refuses each.
REFUSED = [
    ("message/send", {}),
    ("message/send", {"message": {}}),
    ("message/send", {"message": []}),
    ("message/send", {"message": ["m", "", "", "user"]}),
    ("message/send", said(messageId=None)),
    ("message/send", said(role=None)),
    ("message/send", said(role="ROLE_USER")),
    ("message/send", said(role="robot")),
    ("message/send", said(kind="task")),
    ("message/send", said(parts=None)),
    ("message/send", said(parts={})),
    ("message/send", said(parts=[None])),
    ("message/send", said(parts=[["text", "a"]])),
    ("message/send", said(parts=[TEXT, {}])),
    ("message/send", said(parts=[{"kind": "text"}])),
    ("message/send", said(parts=[{"kind": "image", "text": "a"}])),
    ("message/send", said(parts=[{"kind": "file", "text": "a"}])),
    ("message/send", said(parts=[{"kind": "text", "text": 5}])),
    ("message/send", said(parts=[{"kind": "file", "file": {}}])),
    ("message/send", said(parts=[{"kind": "file", "file": "a"}])),
    ("message/send", said(parts=[{"kind": "data", "data": [1]}])),
    ("message/send", said(parts=[{"kind": "data", "data": None}])),
    ("message/send", said(metadata=[])),
    ("message/send", said(extensions="a")),
    ("message/send", said() | {"metadata": "a"}),
    ("message/send", configured(historyLength="abc")),
    ("message/send", configured(historyLength=1.5)),
    ("message/send", configured(blocking="maybe")),
    ("message/send", configured(pushNotificationConfig={})),
    ("message/send", configured(pushNotificationConfig={"url": "u", "authentication": {"credentials": "c"}})),
    ("message/stream", {}),
    ("tasks/get", {}),
    ("tasks/get", {"id": 5}),
    ("tasks/get", {"id": "t", "historyLength": []}),
    ("tasks/cancel", {}),
    ("tasks/cancel", {"id": "t", "metadata": []}),
    ("tasks/resubscribe", {}),
    ("tasks/pushNotificationConfig/set", {"taskId": "t"}),
    ("tasks/pushNotificationConfig/set", {"pushNotificationConfig": {"url": "u"}}),
    ("tasks/pushNotificationConfig/set", {"taskId": "t", "pushNotificationConfig": {}}),
    ("tasks/pushNotificationConfig/get", {}),
    ("tasks/pushNotificationConfig/list", {}),
    ("tasks/pushNotificationConfig/delete", {"id": "t"}),
    ("tasks/pushNotificationConfig/delete", {"pushNotificationConfigId": "c"}),
]


class Maker:
    """Objects in which anything may be set; what is set is not empty, so that unset and empty stay apart."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def text(self):
        return "".join(self.random.choices("abcxyz ÄÖ✓/\"", k=self.random.randint(1, 8)))

    def any(self, depth=0):
        r = self.random
        leaves = [None, True, False, r.randint(-9, 9), r.random(), 9007199254740991, "", self.text()]
        if depth < 2 and r.random() < 0.3:
            return r.choice([[self.any(depth + 1) for _ in range(2)], {self.text(): self.any(depth + 1)}, {}])
        return r.choice(leaves)

    def value(self, model, name, kind):
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if name == "bytes":
            return base64.b64encode(self.random.randbytes(self.random.randint(0, 9))).decode()
        if name == "timestamp":
            return self.random.choice(["2026-03-12T10:00:00Z", "2026-03-12T10:00:00.500Z", "1999-12-31T23:59:59.000001Z"])
        if origin in (typing.Union, types.UnionType):
            return self.value(model, name, self.random.choice([a for a in arguments if a is not type(None)]))
        if origin is typing.Literal:
            return arguments[0]
        if origin is list:
            # One is all that 1.0 keeps of the schemes of a webhook.
            count = 1 if name == "schemes" else self.random.randint(1, 2)
            return [self.value(model, name, arguments[0]) for _ in range(count)]
        if origin is dict:
            value = (lambda: self.any()) if arguments[1] is typing.Any else lambda: self.value(model, "", arguments[1])
            return {self.text(): value() for _ in range(self.random.randint(1, 2))}
        if kind is str:
            return self.text()
        if kind is bool:
            return name == "required" or self.random.random() < 0.5
        if kind is int:
            return self.random.randint(1, 99)
        if issubclass(kind, enum.Enum):
            return self.random.choice(list(kind)).value
        return self.model(kind)

    def model(self, model):
        if issubclass(model, RootModel):
            return self.value(model, "root", model.model_fields["root"].annotation)
        # 1.0 has one flow per scheme, and nothing of these.
        one = self.random.choice(list(model.model_fields)) if model.__name__ == "OAuthFlows" else None
        never = {"state_transition_history", "signatures", "preferred_transport", "protocol_version"}
        always = {"append", "last_chunk", "supports_authenticated_extended_card"}
        members = {}
        for name, field in model.model_fields.items():
            if name in never or one not in (None, name):
                continue
            if field.is_required() or name in always or one or name == "kind" or self.random.random() < 0.6:
                members[field.alias or name] = self.value(model, name, field.annotation)
        return members


def canonical(model, given):
    """As the SDK writes what it read."""
    return model.model_validate(given).model_dump(mode="json", by_alias=True, exclude_none=True)


def old():
    from a2a import types as sdk

    events, requests, cards = [], [], []
    for seed in range(12):
        for name in EVENTS:
            made = Maker(f"{name} {seed}").model(getattr(sdk, name))
            if name == "TaskStatusUpdateEvent":
                made["final"] = made["status"]["state"] in TERMINAL
            events.append({"type": name, "json": canonical(getattr(sdk, name), made)})
    for method, name, _ in METHODS:
        model = getattr(sdk, name)
        for seed in range(6 if "params" in model.model_fields else 1):
            maker = Maker(f"{name} {seed}")
            request = {"id": 1, "jsonrpc": "2.0", "method": method}
            if "params" in model.model_fields:
                request["params"] = maker.value(model, "params", model.model_fields["params"].annotation)
            requests.append({"method": method, "params": canonical(model, request).get("params", {})})
    for seed in range(8):
        cards.append({"json": canonical(sdk.AgentCard, Maker(f"AgentCard {seed}").model(sdk.AgentCard))})
    models = {method: getattr(sdk, name) for method, name, _ in METHODS}
    for method, params in REFUSED:
        try:
            models[method].model_validate({"id": 1, "jsonrpc": "2.0", "method": method, "params": params})
        except ValidationError:
            continue
        raise AssertionError(f"0.3.26 takes {method} {params}")
    refused = [{"method": method, "params": params} for method, params in REFUSED]
    return {"events": events, "requests": requests, "cards": cards, "refused": refused}


def new():
    from a2a.compat.v0_3 import conversions, types as sdk
    from google.protobuf.json_format import MessageToDict

    made = json.loads(FILE.read_text(encoding="utf-8"))
    for event in made["events"]:
        result = sdk.SendStreamingMessageSuccessResponse.model_validate({"result": event["json"]})
        event["v1"] = MessageToDict(conversions.to_core_stream_response(result))
    by_method = {method: (getattr(sdk, name), getattr(conversions, convert)) for method, name, convert in METHODS}
    for request in made["requests"]:
        model, convert = by_method[request["method"]]
        whole = {"id": 1, "jsonrpc": "2.0", "method": request["method"], "params": request["params"]}
        request["v1"] = MessageToDict(convert(model.model_validate(whole)))
    for card in made["cards"]:
        card["v1"] = MessageToDict(conversions.to_core_agent_card(sdk.AgentCard.model_validate(card["json"])))
    return made


def write(content):
    parts = []
    for name, entries in content.items():
        lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False, sort_keys=True)}" for entry in entries)
        parts.append(f" {json.dumps(name)}: [\n{lines}\n ]")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write({"0.3.26": old, "1.3.0": new}[importlib.metadata.version("a2a-sdk")]())
