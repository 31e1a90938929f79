"""The official Python SDK, unmodified, on each binding that its client factory knows."""

import asyncio
import uuid

import grpc
import httpx
import pytest
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.helpers import new_text_message
from a2a.types import a2a_pb2 as pb
from a2a.utils.errors import (
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from google.protobuf import json_format

BINDINGS = ["JSONRPC", "HTTP+JSON", "GRPC"]
pytestmark = pytest.mark.parametrize("binding", BINDINGS)


class Sdk:
    """What the SDK's factory makes of our card, for one binding: streaming or not."""

    def __init__(self, base: str, binding: str):
        self.base, self.binding = base, binding
        self.http = httpx.AsyncClient(timeout=60)
        self.made = []

    async def client(self, **config):
        made = await ClientFactory(
            ClientConfig(
                supported_protocol_bindings=[self.binding], httpx_client=self.http,
                grpc_channel_factory=grpc.aio.insecure_channel, **config,
            )
        ).create_from_url(self.base)
        self.made.append(made)
        return made

    async def send(self, text: str, *, now: bool = False, **members) -> pb.Task:
        """Waits for the answer, or does not."""
        client = await self.client(streaming=False, polling=now)
        events = [event async for event in client.send_message(request(text, **members))]
        assert len(events) == 1 and events[0].HasField("task"), events
        return events[0].task

    async def close(self):
        for made in self.made:
            await made.close()
        await self.http.aclose()


def request(text: str, task_id: str = "", context_id: str = "", **configuration) -> pb.SendMessageRequest:
    sent = new_text_message(text, task_id=task_id or None, context_id=context_id or None, role=pb.ROLE_USER)
    return pb.SendMessageRequest(message=sent, configuration=pb.SendMessageConfiguration(**configuration))


def answer(task: pb.Task) -> str:
    return "".join(part.text for artifact in task.artifacts for part in artifact.parts)


def fold(events: list[pb.StreamResponse]) -> pb.Task:
    """The task as a client sees it after these events."""
    assert events[0].HasField("task"), events[0]
    task = pb.Task()
    for event in events:
        kind = event.WhichOneof("payload")
        if kind == "task":
            task.CopyFrom(event.task)
        elif kind == "status_update":
            assert event.status_update.task_id == task.id
            task.status.CopyFrom(event.status_update.status)
        elif kind == "artifact_update":
            new = event.artifact_update.artifact
            old = next((one for one in task.artifacts if one.artifact_id == new.artifact_id), None)
            if old is None:
                task.artifacts.append(new)
            elif event.artifact_update.append:
                old.parts.extend(new.parts)
            else:
                old.CopyFrom(new)
    return task


def state(task: pb.Task) -> str:
    return pb.TaskState.Name(task.status.state).removeprefix("TASK_STATE_")


@pytest.fixture
async def sdk(server, binding):
    one = Sdk(server.url, binding)
    yield one
    await one.close()


async def test_card_resolver_finds_an_interface_for_each_binding(server, binding):
    async with httpx.AsyncClient() as http:
        card = await A2ACardResolver(http, server.url).get_agent_card()
    offered = {(one.protocol_binding, one.protocol_version) for one in card.supported_interfaces}
    assert (binding, "1.0") in offered
    assert card.capabilities.streaming and card.name and card.default_input_modes and card.default_output_modes


async def test_blocking_send(sdk):
    task = await sdk.send("echo hello")
    assert (state(task), answer(task)) == ("COMPLETED", "hello")
    assert task.id and task.context_id and task.status.HasField("timestamp")
    assert [message.role for message in task.history] == [pb.ROLE_USER, pb.ROLE_AGENT]


async def test_stream_and_get_agree(sdk):
    client = await sdk.client(streaming=True)
    events = [event async for event in client.send_message(request("chunks:20x5"))]
    assert events[0].HasField("task") and events[-1].status_update.status.state == pb.TASK_STATE_COMPLETED
    seen = fold(events)
    stored = await client.get_task(pb.GetTaskRequest(id=seen.id))
    assert list(stored.artifacts) == list(seen.artifacts) and stored.status == seen.status


async def test_list_pages(sdk):
    context = f"ctx-{uuid.uuid4()}"
    client = await sdk.client(streaming=False)
    sent = [(await sdk.send(f"echo {n}", context_id=context)).id for n in range(7)]
    found, token, pages = [], "", 0
    while True:
        page = await client.list_tasks(pb.ListTasksRequest(context_id=context, page_size=3, page_token=token))
        assert page.total_size == 7 and page.page_size == 3
        found += [task.id for task in page.tasks]
        assert all(not task.artifacts and not task.history for task in page.tasks)
        pages, token = pages + 1, page.next_page_token
        if not token:
            break
    assert pages == 3 and found == sent[::-1]
    rich = await client.list_tasks(pb.ListTasksRequest(context_id=context, include_artifacts=True, history_length=1))
    assert [answer(task) for task in rich.tasks] == [str(n) for n in range(7)][::-1]
    assert all(len(task.history) == 1 for task in rich.tasks)


async def test_cancel_a_running_task(sdk):
    client = await sdk.client(streaming=False)
    task = await sdk.send("sleep:60", now=True)
    canceled = await client.cancel_task(pb.CancelTaskRequest(id=task.id))
    assert state(canceled) == "CANCELED"
    assert state(await client.get_task(pb.GetTaskRequest(id=task.id))) == "CANCELED"
    with pytest.raises(TaskNotCancelableError):
        await client.cancel_task(pb.CancelTaskRequest(id=task.id))


async def test_subscribe_to_a_task_that_was_sent_without_a_stream(sdk):
    client = await sdk.client(streaming=True)
    task = await sdk.send("chunks:30x20", now=True)
    events = [event async for event in client.subscribe(pb.SubscribeToTaskRequest(id=task.id))]
    stored = await client.get_task(pb.GetTaskRequest(id=task.id))
    assert state(stored) == "COMPLETED"
    assert list(fold(events).artifacts) == list(stored.artifacts)


async def test_resubscribe_after_hanging_up(sdk):
    client = await sdk.client(streaming=True)
    task, stream = None, client.send_message(request("chunks:60x20"))
    async for event in stream:
        task = event.task if event.HasField("task") else task
        if event.HasField("artifact_update"):
            break
    await stream.aclose()
    for _ in range(3):
        again = client.subscribe(pb.SubscribeToTaskRequest(id=task.id))
        assert (await anext(again)).task.id == task.id
        await anext(again)
        await again.aclose()
    events = [event async for event in client.subscribe(pb.SubscribeToTaskRequest(id=task.id))]
    stored = await client.get_task(pb.GetTaskRequest(id=task.id))
    assert state(stored) == "COMPLETED"
    assert list(fold(events).artifacts) == list(stored.artifacts)


async def test_next_turn_by_task_id_of_a_task_that_waits(sdk):
    first = await sdk.send("ask")
    assert state(first) == "INPUT_REQUIRED" and first.status.message.parts
    second = await sdk.send("seven", task_id=first.id)
    assert (second.id, second.context_id, state(second)) == (first.id, first.context_id, "COMPLETED")
    assert "seven" in answer(second)
    assert [message.role for message in second.history] == [pb.ROLE_USER, pb.ROLE_AGENT] * 2


async def test_next_turn_by_context_id_is_a_new_task(sdk):
    first = await sdk.send("echo one")
    second = await sdk.send("echo two", context_id=first.context_id)
    assert second.context_id == first.context_id and second.id != first.id
    assert answer(second) == "two"


async def test_streamed_turns_of_one_task(sdk):
    client = await sdk.client(streaming=True)
    events = [event async for event in client.send_message(request("ask"))]
    asked = fold(events)
    assert state(asked) == "INPUT_REQUIRED"
    events = [event async for event in client.send_message(request("eight", task_id=asked.id))]
    done = fold(events)
    assert (done.id, state(done)) == (asked.id, "COMPLETED") and "eight" in answer(done)


async def test_auth_required_is_answered_at_once_and_can_be_continued(sdk):
    task = await asyncio.wait_for(sdk.send("auth"), 5)
    assert state(task) == "AUTH_REQUIRED" and task.status.message.parts
    done = await asyncio.wait_for(sdk.send("granted", task_id=task.id), 10)
    assert (done.id, state(done)) == (task.id, "COMPLETED")


async def test_errors_arrive_as_the_exceptions_of_the_sdk(sdk):
    client = await sdk.client(streaming=False)
    done = await sdk.send("echo done")
    with pytest.raises(TaskNotFoundError):
        await client.get_task(pb.GetTaskRequest(id="nope"))
    with pytest.raises(TaskNotFoundError):
        await sdk.send("echo x", task_id=str(uuid.uuid4()))
    with pytest.raises(UnsupportedOperationError):
        await sdk.send("echo x", task_id=done.id)
    with pytest.raises(TaskNotCancelableError):
        await client.cancel_task(pb.CancelTaskRequest(id=done.id))
    with pytest.raises(InvalidParamsError):
        await client.list_tasks(pb.ListTasksRequest(page_size=101))
    with pytest.raises(InvalidParamsError):
        await client.get_task(pb.GetTaskRequest(id=done.id, history_length=-1))
    with pytest.raises(PushNotificationNotSupportedError):
        await client.create_task_push_notification_config(
            pb.TaskPushNotificationConfig(task_id=done.id, url="https://hook.example.test/")
        )


async def test_stream_errors_arrive_as_the_exceptions_of_the_sdk(sdk):
    client = await sdk.client(streaming=True)
    done = await sdk.send("echo done")
    with pytest.raises(TaskNotFoundError):
        [event async for event in client.subscribe(pb.SubscribeToTaskRequest(id="nope"))]
    with pytest.raises(UnsupportedOperationError):
        [event async for event in client.subscribe(pb.SubscribeToTaskRequest(id=done.id))]
    with pytest.raises(TaskNotFoundError):
        [event async for event in client.send_message(request("echo x", task_id=str(uuid.uuid4())))]


async def test_a_failing_agent_is_a_failed_task_not_an_error(sdk):
    task = await sdk.send("fail")
    assert state(task) == "FAILED" and task.status.message.parts


async def test_numbers_in_data_parts_keep_their_value(sdk):
    numbers = {"one": 1, "neg": -7, "max": 9007199254740991, "frac": 0.1, "deep": [{"zero": 0}, [1, 2.5]]}
    client = await sdk.client(streaming=False)
    sent = pb.SendMessageRequest(message=new_text_message("data", role=pb.ROLE_USER))
    json_format.ParseDict({"data": numbers}, sent.message.parts.add())
    [event] = [event async for event in client.send_message(sent)]
    [part] = [part for artifact in event.task.artifacts for part in artifact.parts if part.HasField("data")]
    assert json_format.MessageToDict(part.data) == numbers


async def test_history_length(sdk):
    client = await sdk.client(streaming=False)
    first = await sdk.send("ask")
    await sdk.send("nine", task_id=first.id)
    whole = await client.get_task(pb.GetTaskRequest(id=first.id))
    assert len(whole.history) == 4
    for length in (0, 1, 2, 3, 4, 9):
        task = await client.get_task(pb.GetTaskRequest(id=first.id, history_length=length))
        assert list(task.history) == list(whole.history)[max(0, 4 - length):]
    sent = await sdk.send("echo short", history_length=0)
    assert not sent.history


async def test_many_clients_at_once(sdk):
    tasks = await asyncio.gather(*(sdk.send(f"echo {n}") for n in range(40)))
    assert [answer(task) for task in tasks] == [str(n) for n in range(40)]
    assert len({task.id for task in tasks}) == 40
