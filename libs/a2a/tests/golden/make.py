#!/usr/bin/env python3
"""Writes contract.json and vectors.json from the official Python SDK.

Run with `pip install a2a-sdk==1.3.0`; the output is the same each time. contract.json is what the SDK's descriptor
says about every message, enum and method. vectors.json holds messages as JSON that Python reads, the JSON that it
writes, and their protobuf bytes, and JSON that it refuses.
"""

import base64
import importlib.metadata
import json
import pathlib
import random

from a2a.types import a2a_pb2
from google.api import field_behavior_pb2
from google.protobuf import json_format, message_factory, struct_pb2, timestamp_pb2
from google.protobuf.descriptor import FieldDescriptor as F

HERE = pathlib.Path(__file__).parent
FILE = a2a_pb2.DESCRIPTOR
assert importlib.metadata.version("a2a-sdk") == "1.3.0"

SCALARS = {F.TYPE_STRING: "string", F.TYPE_BYTES: "bytes", F.TYPE_BOOL: "bool", F.TYPE_INT32: "int32"}


def kind(field):
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map<{kind(key)}, {kind(value)}>"
    named = field.message_type or field.enum_type
    return named.full_name if named is not None else SCALARS[field.type]


def describe(field):
    """`number name jsonName type`, then what else is true of the field."""
    oneof = field.containing_oneof
    synthetic = oneof is not None and len(oneof.fields) == 1 and oneof.name == f"_{field.name}"
    facts = [
        (field.is_repeated, "repeated"),
        (field.has_presence, "presence"),
        (oneof is not None and not synthetic, f"oneof={oneof.name if oneof else ''}"),
        (
            field_behavior_pb2.REQUIRED in field.GetOptions().Extensions[field_behavior_pb2.field_behavior],
            "REQUIRED",
        ),
    ]
    words = [str(field.number), field.name, field.json_name, kind(field)]
    return " ".join(words + [fact for true, fact in facts if true])


def contract():
    service = FILE.services_by_name["A2AService"]
    return {
        "package": FILE.package,
        "messages": {
            name: [describe(field) for field in sorted(message.fields, key=lambda f: f.number)]
            for name, message in sorted(FILE.message_types_by_name.items())
        },
        "enums": {
            name: {value.name: value.number for value in enum.values}
            for name, enum in sorted(FILE.enum_types_by_name.items())
        },
        "methods": {
            m.name: " ".join(
                [m.input_type.full_name, m.output_type.full_name] + ["stream"] * m.server_streaming
            )
            for m in service.methods
        },
    }


WORDS = ["", "a", "Grüße", "日本語 🦀", 'quote " and \\ and \n', "urn:x:1", "0", "null", "\u2028<&>\u007f"]
NUMBERS = [0, 1, -7, 0.1, 1.5, 9007199254740991, -9007199254740991, 1e300, 5e-324, 123456.789]


class Maker:
    """Random messages, the same ones for the same seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def json(self, depth=0):
        kinds = ["null", "bool", "number", "text"] + ["list", "object"] * (depth < 3)
        match self.random.choice(kinds):
            case "null":
                return None
            case "bool":
                return self.random.random() < 0.5
            case "number":
                return self.random.choice(NUMBERS)
            case "text":
                return self.random.choice(WORDS)
            case "list":
                return [self.json(depth + 1) for _ in range(self.random.randrange(3))]
            case "object":
                return {self.random.choice(WORDS): self.json(depth + 1) for _ in range(self.random.randrange(3))}

    def value(self, field, depth):
        match field.type:
            case F.TYPE_STRING:
                return self.random.choice(WORDS)
            case F.TYPE_BYTES:
                return self.random.randbytes(self.random.randrange(5))
            case F.TYPE_BOOL:
                return self.random.random() < 0.7
            case F.TYPE_INT32:
                return self.random.choice([0, 1, -1, 50, 2**31 - 1, -(2**31)])
            case F.TYPE_ENUM:
                return self.random.choice(field.enum_type.values).number
        return self.message(field.message_type, depth + 1)

    def message(self, descriptor, depth=0):
        new = message_factory.GetMessageClass(descriptor)()
        match descriptor.full_name:
            case "google.protobuf.Struct":
                members = {self.random.choice(WORDS): self.json() for _ in range(self.random.randrange(4))}
                return json_format.ParseDict(members, new)
            case "google.protobuf.Value":
                return json_format.ParseDict(self.json(), new)
            case "google.protobuf.Timestamp":
                nanos = self.random.choice([0, 123_000_000, 123_456_000, 123_456_789])
                return timestamp_pb2.Timestamp(seconds=self.random.randrange(-(2**35), 2**37), nanos=nanos)
        for field in descriptor.fields:
            message = field.message_type is not None
            if self.random.random() < (0.15 * depth if message else 0.3):
                continue
            if message and field.message_type.GetOptions().map_entry:
                for _ in range(self.random.randrange(3)):
                    key, value = field.message_type.fields
                    made = self.value(value, depth + 1)
                    if value.message_type is not None:
                        getattr(new, field.name)[self.random.choice(WORDS)].CopyFrom(made)
                    else:
                        getattr(new, field.name)[self.random.choice(WORDS)] = made
            elif field.is_repeated:
                count = self.random.randrange(1 if depth > 2 else 3)
                getattr(new, field.name).extend(self.value(field, depth) for _ in range(count))
            elif message:
                getattr(new, field.name).CopyFrom(self.value(field, depth))
            else:
                setattr(new, field.name, self.value(field, depth))
        return new


# What people send. Each is read by Python's json_format with unknown fields ignored.
READ = [
    ("SendMessageRequest", {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hi"}]}}),
    ("SendMessageRequest", {"message": {"message_id": "m", "role": 1, "parts": [{"text": "", "media_type": "a/b"}]}}),
    ("SendMessageRequest", {"x": 1, "message": {"x": [1], "parts": [{"x": {}, "text": "a"}]}, "configuration": {"x": 0}}),
    ("Part", {"data": None}),
    ("Part", {"data": {"one": 1, "neg": -7, "max": 9007199254740991, "frac": 0.1, "none": None, "deep": [[{}]]}}),
    ("Part", {"text": None, "url": "u", "metadata": None, "filename": None}),
    ("Part", {"raw": "+/+/aQ=="}),
    ("Part", {"raw": "-_-_aQ=="}),
    ("Part", {"raw": "-_-_aQ"}),
    ("GetTaskRequest", {"id": "t", "historyLength": "10"}),
    ("GetTaskRequest", {"id": "t", "historyLength": 0}),
    ("GetTaskRequest", {"id": "t", "historyLength": 2.0}),
    ("TaskStatus", {"state": "TASK_STATE_WORKING", "timestamp": "2026-03-12T10:00:00.5+02:00"}),
    ("TaskStatus", {"state": 8, "timestamp": "9999-12-31T23:59:59.999999999Z"}),
    ("TaskStatus", {"state": None, "timestamp": "0001-01-01T00:00:00Z"}),
    ("AgentCapabilities", {"streaming": False, "extendedAgentCard": None}),
    ("SecurityRequirement", {"schemes": {"x": {"list": ["a"]}, "y": {}}}),
    ("ListTasksRequest", {"includeArtifacts": False, "pageSize": 100, "status": "TASK_STATE_FAILED"}),
]

# What nobody may send. Python refuses each.
REFUSED = [
    ("Message", {"role": "ROLE_ROBOT"}),
    ("TaskStatus", {"state": "working"}),
    ("Part", {"text": "a", "url": "b"}),
    ("Part", {"text": 5}),
    ("Message", {"parts": {}}),
    ("Message", {"parts": [None]}),
    ("Message", {"metadata": []}),
    ("Message", {"extensions": [None]}),
    ("GetTaskRequest", {"historyLength": 2147483648}),
    ("GetTaskRequest", {"historyLength": "abc"}),
    ("GetTaskRequest", {"historyLength": 1.5}),
    ("GetTaskRequest", {"historyLength": True}),
    ("TaskArtifactUpdateEvent", {"append": "true"}),
    ("TaskStatus", {"timestamp": "yesterday"}),
    ("TaskStatus", {"timestamp": "2026-02-30T00:00:00Z"}),
    ("TaskStatus", {"timestamp": "2026-03-12T10:00:00"}),
]


def vectors():
    made = []
    for name, given in READ:
        message = json_format.ParseDict(given, getattr(a2a_pb2, name)(), ignore_unknown_fields=True)
        made.append((name, given, message))
    for seed in range(2):
        for name, descriptor in sorted(FILE.message_types_by_name.items()):
            message = Maker(f"{name} {seed}").message(descriptor)
            made.append((name, json_format.MessageToDict(message), message))
    read = [
        {
            "type": name,
            "given": given,
            "json": json_format.MessageToDict(message),
            "protobuf": base64.b64encode(message.SerializeToString(deterministic=True)).decode(),
        }
        for name, given, message in made
    ]
    for name, given in REFUSED:
        try:
            # Not ignoring unknown fields: Python would ignore unknown enum values with them.
            json_format.ParseDict(given, getattr(a2a_pb2, name)())
        except json_format.ParseError:
            continue
        raise AssertionError(f"Python takes {name} {given}")
    return {"read": read, "refused": [{"type": name, "given": given} for name, given in REFUSED]}


def write(name, content):
    def lines(value, depth):
        if isinstance(value, (dict, list)) and depth < 2 and value:
            pad = " " * (depth + 1)
            items = value.items() if isinstance(value, dict) else ((None, v) for v in value)
            body = ",\n".join(
                pad + (f"{json.dumps(key)}: " if key is not None else "") + lines(v, depth + 1) for key, v in items
            )
            opening, closing = "{}" if isinstance(value, dict) else "[]"
            return f"{opening}\n{body}\n{' ' * depth}{closing}"
        return json.dumps(value, ensure_ascii=False, sort_keys=depth > 1)

    (HERE / name).write_text(lines(content, 0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write("contract.json", contract())
    write("vectors.json", vectors())
