"""The last Python SDK of protocol 0.3, unmodified, against an agent that serves it: `a2a-0.3: on`."""

import asyncio
import uuid

import httpx
import pytest
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientJSONRPCError
from a2a.types import (
    DataPart,
    GetTaskPushNotificationConfigParams,
    Message,
    Part,
    PushNotificationConfig,
    Role,
    Task,
    TaskIdParams,
    TaskPushNotificationConfig,
    TaskQueryParams,
    TaskState,
    TaskStatusUpdateEvent,
    TextPart,
)

from rialto import CLUSTER, Running, Server, agents_of_0_3

NUMBERS = "urn:rialto:event-number:v1"


@pytest.fixture(scope="session")
def server():
    if CLUSTER:
        yield Running(CLUSTER["url"] + "/v03")
        return
    with Server(agents_of_0_3()) as running:
        yield running
        assert running.process.poll() is None, f"the server died:\n{running.stderr()[-3000:]}"


class Sdk:
    """What the SDK's factory makes of our card."""

    def __init__(self, base: str):
        self.base, self.http = base, httpx.AsyncClient(timeout=60)

    async def client(self, **config):
        return await ClientFactory.connect(self.base, ClientConfig(httpx_client=self.http, **config))

    async def send(self, text: str, *, now: bool = False, **members) -> Task:
        """Waits for the answer, or does not."""
        client = await self.client(streaming=False, polling=now)
        events = [event async for event in client.send_message(message(text, **members))]
        (task, update), = events
        assert update is None
        return task

    async def stream(self, text: str, **members):
        """The task as the SDK puts it together, and the updates that it came from."""
        client = await self.client(streaming=True)
        events = [event async for event in client.send_message(message(text, **members))]
        return events[-1][0], [update for _, update in events]

    async def get(self, task_id: str, **params) -> Task:
        return await (await self.client()).get_task(TaskQueryParams(id=task_id, **params))


@pytest.fixture
async def sdk(server):
    one = Sdk(server.url)
    yield one
    await one.http.aclose()


def message(text: str, **members) -> Message:
    parts = [Part(root=TextPart(text=text)), *members.pop("parts", [])]
    return Message(message_id=str(uuid.uuid4()), role=Role.user, parts=parts, **members)


def answer(task: Task) -> str:
    return "".join(part.root.text for artifact in task.artifacts or [] for part in artifact.parts)


async def refused(code: int, call) -> str:
    with pytest.raises(A2AClientJSONRPCError) as caught:
        answered = await call
        async for _ in answered if hasattr(answered, "__aiter__") else ():
            pass
    assert caught.value.error.code == code, caught.value.error
    return caught.value.error.message


async def each(stream):
    return [event async for event in stream]


async def test_card_is_one_of_0_3(sdk, server):
    card = await A2ACardResolver(sdk.http, server.url).get_agent_card()
    assert (card.protocol_version, card.preferred_transport, card.url) == ("0.3.0", "JSONRPC", server.url)
    assert [(one.transport, one.url) for one in card.additional_interfaces] == [("JSONRPC", server.url)]
    assert card.capabilities.streaming and not card.supports_authenticated_extended_card
    assert card.skills and card.skills[0].tags and card.description


async def test_blocking_send_and_get(sdk):
    task = await sdk.send("echo hello")
    assert (task.kind, task.status.state, answer(task)) == ("task", TaskState.completed, "hello")
    assert [one.role for one in task.history] == [Role.user, Role.agent]
    assert await sdk.get(task.id) == task
    assert len((await sdk.get(task.id, history_length=1)).history) == 1
    assert (await sdk.get(task.id, history_length=0)).history == task.history, "0 is all to 0.3"


async def test_send_that_does_not_block(sdk):
    task = await sdk.send("sleep:0.3", now=True)
    assert task.status.state in (TaskState.submitted, TaskState.working)
    while (done := await sdk.get(task.id)).status.state != TaskState.completed:
        await asyncio.sleep(0.02)
    assert answer(done)


async def test_stream_and_get_agree(sdk):
    seen, updates = await sdk.stream("chunks:20x5")
    assert updates[0] is None and [one.final for one in updates if isinstance(one, TaskStatusUpdateEvent)][-1]
    assert not any(one.final for one in updates[:-1] if isinstance(one, TaskStatusUpdateEvent))
    stored = await sdk.get(seen.id)
    assert stored.status == seen.status and stored.status.state == TaskState.completed
    assert stored.artifacts[0].artifact_id == seen.artifacts[0].artifact_id and answer(stored) == answer(seen) != ""


async def test_silence_on_a_stream_is_no_event(sdk):
    client = await sdk.client(streaming=True)
    task = await sdk.send("silent:5", now=True)
    (seen, updates), again = await asyncio.gather(
        sdk.stream("silent:5"), each(client.resubscribe(TaskIdParams(id=task.id))))
    assert seen.status.state == TaskState.completed and updates[-1].final
    assert again[-1][0].status.state == TaskState.completed and again[-1][1].final


async def test_cancel_a_running_task(sdk):
    client = await sdk.client()
    task = await sdk.send("sleep:60", now=True)
    assert (await client.cancel_task(TaskIdParams(id=task.id))).status.state == TaskState.canceled
    assert (await sdk.get(task.id)).status.state == TaskState.canceled
    await refused(-32002, client.cancel_task(TaskIdParams(id=task.id)))


async def test_resubscribe_to_a_running_task(sdk):
    client = await sdk.client(streaming=True)
    task = await sdk.send("chunks:40x20", now=True)
    first = client.resubscribe(TaskIdParams(id=task.id))
    assert (await anext(first))[0].id == task.id
    await first.aclose()
    events = await each(client.resubscribe(TaskIdParams(id=task.id)))
    stored = await sdk.get(task.id)
    assert events[-1][1].final and stored.status.state == TaskState.completed
    assert answer(events[-1][0]) == answer(stored) != ""


async def test_resubscribe_after_the_last_event(sdk, server):
    """The SDK does not send it, but its users can: by number, as with 1.0."""
    client = await sdk.client(streaming=True, extensions=[NUMBERS])
    numbers, stream = [], client.send_message(message("chunks:30x20"))
    async for task, update in stream:
        numbers.append((update or task).metadata[NUMBERS])
        if len(numbers) == 5:
            break
    await stream.aclose()
    sdk.http.headers["Last-Event-ID"] = str(int(numbers[-1]))
    again = client._transport.resubscribe(TaskIdParams(id=task.id))
    rest = [event.metadata[NUMBERS] async for event in again]
    assert numbers + rest == [n + 1 for n in range(len(numbers) + len(rest))]
    sdk.http.headers["Last-Event-ID"] = "100000"
    assert "Last-Event-ID" in await refused(-32602, each(client.resubscribe(TaskIdParams(id=task.id))))


async def test_next_turn_of_a_task_that_waits(sdk):
    asked = await sdk.send("ask")
    assert asked.status.state == TaskState.input_required and asked.status.message.parts[0].root.text
    done = await sdk.send("seven", task_id=asked.id, context_id=asked.context_id)
    assert (done.id, done.context_id, done.status.state) == (asked.id, asked.context_id, TaskState.completed)
    assert "seven" in answer(done) and len(done.history) == 4
    other = await sdk.send("echo two", context_id=asked.context_id)
    assert other.context_id == asked.context_id and other.id != asked.id


async def test_streamed_turns_of_one_task(sdk):
    asked, updates = await sdk.stream("ask")
    assert asked.status.state == TaskState.input_required and updates[-1].final, "it is the client's turn"
    done, updates = await sdk.stream("nine", task_id=asked.id, context_id=asked.context_id)
    assert done.id == asked.id and done.status.state == TaskState.completed and updates[-1].final


async def test_authorization_keeps_a_stream_open(sdk):
    client = await sdk.client(streaming=True)
    stream = client.send_message(message("auth"))
    async for task, update in stream:
        if task.status.state == TaskState.auth_required:
            break
    assert update is None or not update.final
    granted = await sdk.send("granted", task_id=task.id)
    assert granted.status.state == TaskState.completed
    (task, update) = (await each(stream))[-1]
    assert task.status.state == TaskState.completed and update.final


async def test_reply_that_is_a_message(server):
    sdk = Sdk(server.url + "/talk")
    for streaming in (False, True):
        client = await sdk.client(streaming=streaming)
        replies = [event async for event in client.send_message(message("echo hi"))]
        assert [(one.kind, one.role, one.parts[0].root.text) for one in replies] == [("message", Role.agent, "hi")]
    await sdk.http.aclose()


async def test_data_parts_keep_their_value(sdk):
    data = {"one": 1, "neg": -7, "max": 9007199254740991, "frac": 0.1, "deep": [{"zero": 0}, [1, 2.5]], "none": None}
    task = await sdk.send("data", parts=[Part(root=DataPart(data=data))])
    parts = [part.root for artifact in task.artifacts for part in artifact.parts]
    assert [part.data for part in parts if part.kind == "data"] == [data]


async def test_errors_are_those_of_0_3(sdk, server):
    client = await sdk.client(streaming=False)
    done = await sdk.send("echo done")
    await refused(-32004, sdk.stream("echo x", task_id=done.id))
    await refused(-32001, sdk.get("nope"))
    await refused(-32001, sdk.send("echo x", task_id=str(uuid.uuid4())))
    await refused(-32004, sdk.send("echo x", task_id=done.id))
    await refused(-32602, sdk.get(done.id, history_length=-1))
    hook = PushNotificationConfig(url="https://hook.example.test/")
    await refused(-32003, client.set_task_callback(TaskPushNotificationConfig(task_id=done.id, push_notification_config=hook)))
    await refused(-32003, client.get_task_callback(GetTaskPushNotificationConfigParams(id=done.id)))
    hooked = await sdk.client(streaming=False, push_notification_configs=[hook])
    await refused(-32003, each(hooked.send_message(message("echo x"))))
    streaming = await sdk.client(streaming=True)
    await refused(-32001, each(streaming.resubscribe(TaskIdParams(id="nope"))))
    await refused(-32004, each(streaming.resubscribe(TaskIdParams(id=done.id))))
    # The same client at an agent that serves 1.0 only.
    streaming._transport.url = server.url + "/new"
    await refused(-32601, streaming.get_task(TaskQueryParams(id=done.id)))


async def test_40_calls_at_once(sdk):
    tasks = await asyncio.gather(*(sdk.send(f"echo {n}") for n in range(40)))
    assert [answer(task) for task in tasks] == [str(n) for n in range(40)]
