"""Cases G: lists and long conversations. Names say the symptom seen in the field."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest

from rialto import Server, scripted
from wires import WIRES, Fault, answer, get, post, send, state
from wires import wire as open_wire


def pages(client, size: int, **filters):
    """All pages; each is checked against the rules that hold for every page."""
    token, found = "", []
    while True:
        page = client.call("ListTasks", {"pageSize": size, "pageToken": token, **filters})
        assert {"tasks", "nextPageToken", "pageSize", "totalSize"} <= set(page)
        assert page["pageSize"] == size and len(page["tasks"]) <= size
        found.append(page)
        token = page["nextPageToken"]
        if not token:
            return found
        assert len(page["tasks"]) == size
        assert len(found) < 1000


def test_c107_tasks_with_equal_timestamps_are_skipped():
    with Server([scripted("scripted", "/")]) as server:
        client = open_wire("jsonrpc", server.url)
        with ThreadPoolExecutor(60) as pool:
            made = {task["id"] for task in pool.map(lambda n: send(client, f"echo {n}"), range(60))}
        assert len(made) == 60
        for name in WIRES:
            reader = open_wire(name, server.url)
            for size in (7, 1, 60, 59, 100):
                found = pages(reader, size)
                assert [page["totalSize"] for page in found] == [60] * len(found)
                tasks = [task for page in found for task in page["tasks"]]
                assert {task["id"] for task in tasks} == made and len(tasks) == 60
                order = [(task["status"]["timestamp"], task["id"]) for task in tasks]
                assert order == sorted(order, reverse=True)
            assert reader.call("ListTasks", {})["pageSize"] == 50
        # A page that was read stays read while new tasks arrive.
        first = client.call("ListTasks", {"pageSize": 20})
        for n in range(5):
            send(client, f"echo new {n}")
        rest, token = [], first["nextPageToken"]
        while token:
            page = client.call("ListTasks", {"pageSize": 20, "pageToken": token})
            rest += [task["id"] for task in page["tasks"]]
            token = page["nextPageToken"]
        assert sorted([task["id"] for task in first["tasks"]] + rest) == sorted(made)


@pytest.mark.parametrize("size", [0, -1, 101, 1_000_000_000, "x", 1.5, 2**31, True])
def test_c109_page_sizes_out_of_range_are_accepted(wire, size):
    if wire.name == "grpc" and not (isinstance(size, int) and not isinstance(size, bool) and size < 2**31):
        pytest.skip("not expressible in protobuf")
    with pytest.raises(Fault) as fault:
        wire.call("ListTasks", {"pageSize": size})
    fault.value.is_("INVALID_PARAMS")
    assert "pageSize" in " ".join([fault.value.message, *fault.value.fields])


def test_c109_page_sizes_in_range_are_the_ones_used(wire, context):
    send(wire, "echo x", contextId=context)
    for size in (1, 2, 50, 99, 100):
        assert wire.call("ListTasks", {"pageSize": size, "contextId": context})["pageSize"] == size


def test_c109_page_tokens_are_trusted(wire, context):
    for n in range(4):
        send(wire, f"echo {n}", contextId=context)
    first = wire.call("ListTasks", {"pageSize": 2, "contextId": context})
    token = first["nextPageToken"]
    assert token and wire.call("ListTasks", {"pageSize": 2, "contextId": context, "pageToken": ""}) == first
    second = wire.call("ListTasks", {"pageSize": 2, "contextId": context, "pageToken": token})
    assert second["nextPageToken"] == "" and len(second["tasks"]) == 2
    bad = ["x", token + "A", token[:-1], token[1:], token.swapcase(), "A" * len(token), "=" * 8, "é", "a" * 100_000]
    for place in range(len(token)):
        swapped = "A" if token[place] != "A" else "B"
        bad.append(token[:place] + swapped + token[place + 1:])
    for one in bad:
        if one == token or (wire.name == "rest" and len(one) > 50_000):
            continue
        with pytest.raises(Fault) as fault:
            wire.call("ListTasks", {"pageSize": 2, "contextId": context, "pageToken": one})
        fault.value.is_("INVALID_PARAMS")
    for other in ({}, {"contextId": f"{context}-other"}, {"contextId": context, "status": "TASK_STATE_COMPLETED"},
                  {"contextId": context, "statusTimestampAfter": "2020-01-01T00:00:00Z"}):
        with pytest.raises(Fault) as fault:
            wire.call("ListTasks", {"pageSize": 2, "pageToken": token, **other})
        fault.value.is_("INVALID_PARAMS")


def test_c109_a_token_of_one_agent_opens_nothing_of_another(clients, context):
    one, other = clients("jsonrpc"), clients("jsonrpc", "/open")
    for client in (one, other):
        for n in range(3):
            send(client, f"echo {n}", contextId=context)
    token = one.call("ListTasks", {"pageSize": 2, "contextId": context})["nextPageToken"]
    with pytest.raises(Fault) as fault:
        other.call("ListTasks", {"pageSize": 2, "contextId": context, "pageToken": token})
    fault.value.is_("INVALID_PARAMS")
    assert one.call("ListTasks", {"contextId": context})["totalSize"] == 3


def shift(timestamp: str, milliseconds: int) -> str:
    moved = datetime.fromisoformat(timestamp) + timedelta(milliseconds=milliseconds)
    return moved.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def test_c111_filters_combine_wrongly_or_the_bound_is_exclusive(wire, context):
    done = []
    for n in range(3):
        done.append(send(wire, f"echo {n}", contextId=context))
        time.sleep(0.003)
    asked = send(wire, "ask", contextId=context)
    middle = done[1]["status"]["timestamp"]

    def ids(**filters):
        page = wire.call("ListTasks", {"contextId": context, **filters})
        assert page["totalSize"] == len(page["tasks"])
        return [task["id"] for task in page["tasks"]]

    newest_first = [asked["id"]] + [task["id"] for task in done[::-1]]
    assert ids() == newest_first
    assert ids(statusTimestampAfter=middle) == newest_first[:3]
    assert ids(statusTimestampAfter=shift(middle, 1)) == newest_first[:2]
    assert ids(statusTimestampAfter=shift(middle, -1)) == newest_first[:3]
    assert ids(statusTimestampAfter=middle, status="TASK_STATE_COMPLETED") == newest_first[1:3]
    assert ids(status="TASK_STATE_INPUT_REQUIRED") == [asked["id"]]
    assert ids(status="TASK_STATE_FAILED") == []
    assert ids(statusTimestampAfter="2999-01-01T00:00:00Z") == []
    empty = wire.call("ListTasks", {"contextId": "nobody-knows-this"})
    assert (empty["tasks"], empty["totalSize"], empty["nextPageToken"]) == ([], 0, "")
    if wire.name != "grpc":
        plus = datetime.fromisoformat(middle).astimezone().isoformat(timespec="milliseconds")
        assert ids(statusTimestampAfter=plus) == newest_first[:3]
        for bad in ("yesterday", "2026-13-01T00:00:00Z", "2026-01-01", "1", "2026-01-01T00:00:00"):
            with pytest.raises(Fault) as fault:
                ids(statusTimestampAfter=bad)
            fault.value.is_("INVALID_PARAMS")


def test_lists_hold_artifacts_only_when_asked(wire, context):
    send(wire, "echo x", contextId=context)
    for flags, wanted in (({}, False), ({"includeArtifacts": False}, False), ({"includeArtifacts": True}, True)):
        [task] = wire.call("ListTasks", {"contextId": context, **flags})["tasks"]
        assert ("artifacts" in task) == wanted and (not wanted or answer(task) == "x")


def test_a_task_that_moves_on_moves_in_the_list(wire, context):
    asked = send(wire, "ask", contextId=context)
    other = send(wire, "echo x", contextId=context)
    order = [task["id"] for task in wire.call("ListTasks", {"contextId": context})["tasks"]]
    assert order == [other["id"], asked["id"]]
    send(wire, "yes", taskId=asked["id"])
    order = [task["id"] for task in wire.call("ListTasks", {"contextId": context})["tasks"]]
    assert order == [asked["id"], other["id"]]
    assert wire.call("ListTasks", {"contextId": context, "status": "TASK_STATE_INPUT_REQUIRED"})["totalSize"] == 0


def test_c113_long_conversations_get_slower_each_turn(clients):
    client = clients("jsonrpc", "/chat")
    task, times = None, []
    for n in range(1000):
        members = {"taskId": task["id"]} if task else {}
        begun = time.monotonic()
        task = send(client, f"echo {n}", configuration={"historyLength": 1}, **members)
        times.append(time.monotonic() - begun)
        assert state(task) == "INPUT_REQUIRED" and len(task["history"]) == 1
    # The quickest of many: what the machine does besides makes turns slower, never quicker.
    early, late = min(times[50:250]), min(times[-200:])
    assert late < 2 * early + 0.005, (early, late)
    reads = []
    for length in (1, 1, 1, 1, 1):
        begun = time.monotonic()
        read = get(client, task, historyLength=length)
        reads.append(time.monotonic() - begun)
        assert len(read["history"]) == 1
    assert min(reads) < 0.1
    assert len(get(client, task)["history"]) == 2000
    listed = client.call("ListTasks", {"contextId": task["contextId"]})
    assert listed["totalSize"] == 1


def test_lists_stay_fast_with_many_tasks(clients, context):
    client = clients("jsonrpc")

    def page() -> float:
        begun = time.monotonic()
        client.call("ListTasks", {"pageSize": 50})
        return time.monotonic() - begun

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda n: post(client, f"echo {n}"), range(100)))
        before = sorted(page() for _ in range(20))[10]
        list(pool.map(lambda n: post(client, f"echo {n}"), range(2000)))
    after = sorted(page() for _ in range(20))[10]
    assert after < 3 * before + 0.02, (before, after)
