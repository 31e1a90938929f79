"""Cases C: turns, contexts, cancel. Names say the symptom seen in the field."""

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from rialto import Server, eventually, is_release, scripted
from wires import TERMINAL, WIRES, Fault, answer, get, message, post, send, state, until
from wires import wire as open_wire


def refused(reason: str, call) -> Fault:
    with pytest.raises(Fault) as fault:
        call()
    return fault.value.is_(reason)


def test_c47_a_machine_answers_faster_than_the_server_cleans_up(clients):
    def loop(name: str, rounds: int):
        client = clients(name)
        for number in range(rounds):
            task = post(client, "ask")
            while state(get(client, task, historyLength=0)) != "INPUT_REQUIRED":
                time.sleep(0.001)
            done = send(client, f"answer {number}", taskId=task["id"])
            assert (done["id"], state(done)) == (task["id"], "COMPLETED")
            assert f"answer {number}" in answer(done)

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(loop, name, rounds) for name, rounds in zip(WIRES, (200, 150, 150), strict=True)]:
            one.result(100)


def test_c47_the_watcher_of_a_stream_answers_at_once(wire):
    for _ in range(30):
        events = list(wire.stream("SendStreamingMessage", {"message": message("ask")}))
        task = events[0]["task"]
        done = send(wire, "quick", taskId=task["id"])
        assert state(done) == "COMPLETED"


@pytest.mark.one_process
def test_c49_which_states_accept_messages_is_anybodys_guess(clients, context):
    for name in WIRES:
        client, single = clients(name), clients(name, "/single")
        busy = post(single, "sleep:2")
        until(single, busy, "WORKING")
        waiting = post(single, "echo later")
        canceled = post(client, "sleep:60")
        client.call("CancelTask", {"id": canceled["id"]})
        finals = {"COMPLETED": send(client, "echo x"), "FAILED": send(client, "fail"), "CANCELED": canceled}
        for expected, task in finals.items():
            before = get(client, task)
            assert state(before) == expected
            refused("UNSUPPORTED_OPERATION", lambda: send(client, "echo more", taskId=task["id"]))
            assert get(client, task) == before
        for task in (busy, waiting):
            fault = refused("UNSUPPORTED_OPERATION", lambda: send(single, "echo more", taskId=task["id"]))
            assert fault.message == "Task is already working."
        assert state(send(client, "yes", taskId=send(client, "ask")["id"])) == "COMPLETED"
        assert state(send(client, "granted", taskId=send(client, "auth")["id"])) == "COMPLETED"
        done = until(single, waiting, "COMPLETED")
        assert answer(done) == "later" and len(done["history"]) == 2


def test_c48_a_second_message_to_a_running_task_is_refused_and_changes_nothing(wire):
    task = post(wire, "sleep:1")
    for _ in range(5):
        refused("UNSUPPORTED_OPERATION", lambda: send(wire, "echo no", taskId=task["id"]))
        refused("UNSUPPORTED_OPERATION", lambda: list(
            wire.stream("SendStreamingMessage", {"message": message("echo no", taskId=task["id"])})))
    done = until(wire, task, "COMPLETED")
    assert [one["role"] for one in done["history"]] == ["ROLE_USER", "ROLE_AGENT"]


def test_c48_with_queue_the_second_message_runs_after_the_first(clients, context):
    for name in WIRES:
        client = clients(name, "/queue")
        place = f"{context}-{name}"
        first = post(client, "sleep:1", contextId=place)
        others = [post(client, f"echo {n}", contextId=place) for n in range(3)]
        assert state(get(client, others[0])) == "SUBMITTED"
        finished = []
        for task in [first, *others]:
            done = until(client, task, "COMPLETED")
            finished.append(done["status"]["timestamp"])
        assert finished == sorted(finished)


def test_c48_the_same_context_is_busy_for_a_new_task_too(wire, context):
    busy = post(wire, "sleep:1", contextId=context)
    fault = refused("UNSUPPORTED_OPERATION", lambda: send(wire, "echo no", contextId=context))
    assert fault.message == "Task is already working."
    until(wire, busy, "COMPLETED")
    assert wire.call("ListTasks", {"contextId": context})["totalSize"] == 1
    assert state(send(wire, "echo now", contextId=context)) == "COMPLETED"


def test_of_many_answers_to_one_question_more_than_one_is_taken(clients):
    """Twenty clients answer at once: one is taken, the others are told so, and nothing of theirs remains."""
    for round_ in range(10):
        task = send(clients("jsonrpc"), "ask")

        def reply(number, task=task):
            try:
                return answer(send(clients(WIRES[number % 3]), f"reply-{number}", taskId=task["id"]))
            except Fault as fault:
                fault.is_("UNSUPPORTED_OPERATION")
                return None

        with ThreadPoolExecutor(20) as pool:
            taken = [text for text in pool.map(reply, range(20)) if text is not None]
        assert len(taken) == 1, (round_, taken)
        done = get(clients("grpc"), task)
        assert state(done) == "COMPLETED" and len(done["history"]) == 4
        assert str(done).count("reply-") == str(done).count(taken[0])


def test_c51_task_id_without_context_id_or_with_the_wrong_one(wire, context):
    task = send(wire, "ask")
    send(wire, "echo other", contextId=context)
    before = get(wire, task)
    for wrong in (context, str(uuid.uuid4())):
        refused("INVALID_PARAMS", lambda: send(wire, "no", taskId=task["id"], contextId=wrong))
        assert get(wire, task) == before
        assert wire.call("ListTasks", {"contextId": wrong})["totalSize"] == (wrong == context)
    done = send(wire, "yes", taskId=task["id"])
    assert (done["contextId"], state(done)) == (task["contextId"], "COMPLETED")
    both = send(wire, "ask")
    done = send(wire, "yes", taskId=both["id"], contextId=both["contextId"])
    assert (done["id"], state(done)) == (both["id"], "COMPLETED")


def test_client_made_task_ids_cannot_create_tasks(wire):
    for ident in ("nope", str(uuid.uuid4()), f"{uuid.uuid4()}00", "0" * 34, "../x", "a" * 5000, "\u00e9", "%"):
        refused("TASK_NOT_FOUND", lambda: send(wire, "echo x", taskId=ident))
        refused("TASK_NOT_FOUND", lambda: get(wire, ident))


def test_a_repeated_message_id_is_a_new_message(wire):
    first, second = (
        wire.call("SendMessage", {"message": message("echo x") | {"messageId": "same"}})["task"] for _ in range(2))
    assert first["id"] != second["id"] and first["contextId"] != second["contextId"]


def test_c55_conversation_state_leaks_between_contexts(clients, context):
    """50 conversations at once: each knows what was said in it, and nothing else."""

    def talk(number: int):
        client, place = clients(WIRES[number % 3]), f"{context}-{number}"
        send(client, f"remember: secret-{number}", contextId=place)
        assert answer(send(client, "what did I say?", contextId=place)) == f"secret-{number}"
        assert answer(send(client, "what did I say?", contextId=f"{place}-new")) == "nothing"
        assert answer(send(client, "what did I say?")) == "nothing"
        # The same context id at another agent is another context.
        assert answer(send(clients(WIRES[number % 3], "/queue"), "what did I say?", contextId=place)) == "nothing"

    with ThreadPoolExecutor(25) as pool:
        list(pool.map(talk, range(50)))


def test_c57_cancel_changes_the_label_but_the_work_goes_on(wire):
    task = post(wire, "sleep:60")
    until(wire, task, "WORKING")
    begun = time.monotonic()
    assert state(wire.call("CancelTask", {"id": task["id"]})) == "CANCELED"
    assert time.monotonic() - begun < 2
    refused("TASK_NOT_CANCELABLE", lambda: wire.call("CancelTask", {"id": task["id"]}))
    assert state(get(wire, task)) == "CANCELED"


def test_c57_a_side_effect_goes_on_after_cancel(clients, tmp_path):
    """An agent that never looks up from its work is stopped soon all the same."""
    counter = tmp_path / "counter"
    client = clients("grpc", "/extra")
    task = post(client, f"count {counter}")
    eventually(lambda: counter.exists() and counter.stat().st_size > 10)
    assert state(client.call("CancelTask", {"id": task["id"]})) == "CANCELED"
    time.sleep(2)
    counted = counter.read_text()
    time.sleep(1)
    assert counter.read_text() == counted
    assert set(counted.split()) == {"1"}


def test_c57_an_agent_that_ignores_cancel_is_killed_and_its_slot_is_free(clients):
    client = clients("jsonrpc", "/impatient")  # one slot, 1 s of grace
    task = post(client, "hang")
    until(client, task, "WORKING")
    assert state(client.call("CancelTask", {"id": task["id"]})) == "CANCELED"
    begun = time.monotonic()
    assert answer(send(client, "echo free")) == "free"
    assert time.monotonic() - begun < 8
    assert state(get(client, task)) == "CANCELED"


@pytest.mark.one_process
def test_a_queued_turn_that_was_canceled_never_runs(clients):
    client = clients("jsonrpc", "/single")
    busy = post(client, "sleep:1")
    waiting = post(client, "echo never")
    assert state(client.call("CancelTask", {"id": waiting["id"]})) == "CANCELED"
    assert answer(send(client, "echo next")) == "next"
    assert not get(client, waiting).get("artifacts") and state(get(client, busy)) == "COMPLETED"


def test_a_task_that_waits_for_input_can_be_canceled(wire):
    for text in ("ask", "auth"):
        task = send(wire, text)
        assert state(wire.call("CancelTask", {"id": task["id"]})) == "CANCELED"
        refused("UNSUPPORTED_OPERATION", lambda: send(wire, "late", taskId=task["id"]))


def test_cancel_and_the_end_of_the_work_race_to_one_result(clients):
    client = clients("jsonrpc")

    def race(_):
        task = post(client, "echo x")
        try:
            result = state(client.call("CancelTask", {"id": task["id"]}))
        except Fault as fault:
            result = state(get(client, task))
            assert fault.info["reason"] == "TASK_NOT_CANCELABLE" and result == "COMPLETED"
        assert result in TERMINAL
        for _ in range(3):
            assert state(get(client, task)) == result
        return result

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(race, range(200)))
    assert set(results) <= {"CANCELED", "COMPLETED"}


@pytest.mark.parametrize("text, expected", [("ask", "INPUT_REQUIRED"), ("auth", "AUTH_REQUIRED")])
def test_c59_a_blocking_call_hangs_when_the_agent_asks_something(wire, text, expected):
    begun = time.monotonic()
    assert state(send(wire, text)) == expected
    assert time.monotonic() - begun < 5


def test_c61_blocking_calls_fail_under_load_although_the_task_is_stored(clients):
    deadline = time.monotonic() + 5
    lock, done = threading.Lock(), []

    def caller(number: int):
        client = clients(WIRES[number % 3])
        while time.monotonic() < deadline:
            text = uuid.uuid4().hex
            task = send(client, f"echo {text}")
            assert (state(task), answer(task)) == ("COMPLETED", text)
            read = get(client, task)
            assert read == task
            with lock:
                done.append(1)

    with ThreadPoolExecutor(300) as pool:
        for one in [pool.submit(caller, number) for number in range(300)]:
            one.result(60)
    assert len(done) >= 300


def test_a_failing_or_crashing_agent_is_a_failed_task_with_a_reason(clients):
    for text in ("fail", "noend", "panic", "exit"):
        task = send(clients("jsonrpc"), text)
        assert state(task) == "FAILED", text
        assert task["status"]["message"]["parts"][0]["text"]
        assert ".rs:" not in str(task["status"]) and "panicked" not in str(task["status"])
    assert answer(send(clients("jsonrpc"), "echo alive")) == "alive"


def test_a_crashing_agent_takes_no_neighbour_with_it(clients):
    client = clients("jsonrpc")
    steady = post(client, "chunks:100x20")
    crashed = [post(client, "exit") for _ in range(5)]
    for task in crashed:
        until(client, task, "FAILED", timeout=30)
    done = until(client, steady, *TERMINAL, timeout=30)
    assert state(done) == "COMPLETED"


def test_turn_end_input_required_keeps_the_task_open(clients):
    for name in WIRES:
        client = clients(name, "/open")
        task = send(client, "echo one")
        assert state(task) == "INPUT_REQUIRED"
        for word in ("two", "three"):
            task = send(client, f"echo {word}", taskId=task["id"])
            assert state(task) == "INPUT_REQUIRED" and word in answer(task)
        assert len(task["history"]) == 6


def test_an_agent_that_talks_gives_messages_not_tasks(clients, context):
    for name in WIRES:
        client = clients(name, "/talk")
        for configuration in ({}, {"returnImmediately": True}):
            said = client.call("SendMessage", {"message": message("echo hi", contextId=context), "configuration": configuration})
            assert list(said) == ["message"]
            assert said["message"]["role"] == "ROLE_AGENT" and said["message"]["contextId"] == context
            assert said["message"]["parts"] == [{"text": "hi"}] and "taskId" not in said["message"]
        events = list(client.stream("SendStreamingMessage", {"message": message("echo hi")}))
        assert len(events) == 1 and events[0]["message"]["parts"] == [{"text": "hi"}]
        assert client.call("ListTasks", {"contextId": context})["totalSize"] == 0


def test_c45_return_immediately_still_waits_or_has_the_wrong_name():
    """200 tasks run; 100 more are accepted in no time; the 0.3 name of the member is ignored."""
    with Server([scripted("scripted", "/", **{"max-concurrent": 200})]) as server:
        client = open_wire("jsonrpc", server.url)
        with ThreadPoolExecutor(20) as pool:
            running = list(pool.map(lambda _: post(client, "sleep:20"), range(200)))
        eventually(lambda: client.call("ListTasks", {"status": "TASK_STATE_WORKING"})["totalSize"] == 200, 30)
        times = []
        for name in (WIRES * 34)[:100]:
            one = client if name == "jsonrpc" else open_wire(name, server.url)
            begun = time.monotonic()
            task = post(one, "sleep:20")
            times.append(time.monotonic() - begun)
            assert state(task) in ("SUBMITTED", "WORKING") and get(client, task)["id"] == task["id"]
            if one is not client:
                one.close()
        assert sorted(times)[98] < (0.3 if is_release() else 1.0), sorted(times)[-5:]
        for task in running[:150]:
            client.call("CancelTask", {"id": task["id"]})
        # `blocking` is not a member of 1.0: the call blocks, whatever it says.
        begun = time.monotonic()
        task = send(client, "sleep:1", configuration={"blocking": False})
        assert state(task) == "COMPLETED" and time.monotonic() - begun >= 0.9


def test_an_agent_that_rejects_gives_a_rejected_task(clients):
    for name in WIRES:
        client = clients(name, "/extra")
        task = send(client, "reject")
        assert state(task) == "REJECTED" and task["status"]["timestamp"]
        assert task["status"]["message"]["parts"] == [{"text": "not today"}]
        refused("UNSUPPORTED_OPERATION", lambda client=client, task=task: send(client, "env", taskId=task["id"]))


def test_each_turn_has_its_own_idempotency_key(clients):
    client = clients("jsonrpc", "/extra")
    answers = [answer(send(client, "env")).split() for _ in range(3)]
    assert {attempt for attempt, _ in answers} == {"1"} and len({key for _, key in answers}) == 3
