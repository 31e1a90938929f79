"""`kill -9` in the middle of everything, restart on the same data: what was answered stays true, what ran goes on."""

import os
import random
import subprocess
import threading
import time
import uuid
from pathlib import Path

import httpx
import pytest

from rialto import Server, binary, eventually, scripted
from wires import TERMINAL, WIRES, Fault, answer, fold, get, post, send, sse, state, until
from wires import wire as open_wire

AGENT = {"lease": "2s", "max-attempts": 20, "max-concurrent": 64}


class Book:
    """What clients were told. All of it must still be true after a crash."""

    def __init__(self):
        self.lock = threading.Lock()
        self.final: dict[str, tuple[str, str]] = {}
        self.accepted: dict[str, str] = {}

    def saw(self, task: dict, text: str) -> None:
        with self.lock:
            if state(task) in TERMINAL:
                self.final[task["id"]] = (state(task), answer(task))
            self.accepted[task["id"]] = text


def traffic(client, book: Book, stop: threading.Event, seed: int) -> None:
    """One client that sends until the server is gone."""
    pick = random.Random(seed)
    asked = None
    try:
        while not stop.is_set():
            text = uuid.uuid4().hex
            match pick.randrange(10):
                case 0 | 1 | 2 | 3:
                    book.saw(send(client, f"echo {text}"), text)
                case 4 | 5:
                    book.saw(post(client, f"echo {text}"), text)
                case 6:
                    book.saw(post(client, "sleep:1"), "")
                case 7:
                    book.saw(post(client, "chunks:20x20"), "")
                case _:
                    if asked is None:
                        asked = send(client, "ask")
                        book.saw(asked, "")
                    else:
                        book.saw(send(client, text, taskId=asked["id"]), text)
                        asked = None
    except (httpx.TransportError, Fault, AssertionError, ValueError) as error:
        if isinstance(error, Fault):
            assert error.code in ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL") or error.info.get("reason") in (
                "UNAVAILABLE", "INTERNAL_ERROR"), error
    finally:
        client.close()


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
            except (OSError, IndexError):
                pass
    return found


def gone(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_what_was_answered_is_lost_when_the_process_is_killed(tmp_path):
    """10 rounds of traffic and `kill -9`."""
    book, pick = Book(), random.Random(7)
    left_over = []
    for round_ in range(10):
        server = Server([scripted("scripted", "/", **AGENT)], data=tmp_path / "data").start()
        stop = threading.Event()
        threads = [
            threading.Thread(target=traffic, args=(open_wire(WIRES[n % 3], server.url), book, stop, round_ * 100 + n))
            for n in range(12)
        ]
        for thread in threads:
            thread.start()
        time.sleep(pick.uniform(0.3, 1.5))
        left_over += children(server.process.pid)
        server.kill()
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a client hung on a dead server"
    with Server([scripted("scripted", "/", **AGENT)], data=tmp_path / "data") as server:
        client = open_wire("jsonrpc", server.url)
        assert len(book.accepted) > 100 and len(book.final) > 30
        for ident, seen in book.final.items():
            task = get(client, ident)
            assert (state(task), answer(task)) == seen
        for ident, text in book.accepted.items():
            task = eventually(
                lambda ident=ident: (now := get(client, ident)) and state(now) in (*TERMINAL, "INPUT_REQUIRED") and now,
                60, what=f"the end of {ident}")
            assert state(task) in ("COMPLETED", "INPUT_REQUIRED"), task["status"]
            assert text in answer(task)
        for name in ("WORKING", "SUBMITTED"):
            eventually(lambda name=name: client.call("ListTasks", {"status": f"TASK_STATE_{name}"})["totalSize"] == 0, 60)
        finished = [task for task in book.accepted if state(get(client, task)) == "COMPLETED"]
        assert len(finished) > 100
        assert answer(send(client, "echo alive")) == "alive"
    # An agent's process does not outlive the server that it worked for.
    for pid in left_over:
        eventually(lambda pid=pid: gone(pid), 15, what=f"the end of agent process {pid}")


def test_a_stream_that_is_resumed_after_a_crash_repeats_or_loses_events(tmp_path):
    """Numbers go on over four crashes of one turn; what the client rebuilds is what is stored."""
    agents, data = [scripted("scripted", "/", **AGENT)], tmp_path / "data"
    server = Server(agents, data=data).start()
    task = post(open_wire("jsonrpc", server.url), "chunks:150x20")
    last, events = None, []
    for crash in range(5):
        headers = {"a2a-version": "1.0"} | ({} if last is None else {"last-event-id": str(last)})
        ends_at = time.monotonic() + 1.5
        try:
            with httpx.stream("GET", f"{server.url}/tasks/{task['id']}:subscribe", headers=headers, timeout=60) as response:
                assert response.status_code == 200, response.read()
                for _, ident, data_ in sse(response.iter_lines()):
                    event = httpx.Response(200, content=data_).json()
                    if "task" in event:
                        assert last is None
                    elif last is not None:
                        assert int(ident) == last + 1
                    last = int(ident)
                    events.append(event)
                    if crash < 4 and time.monotonic() > ends_at and len(events) > 3:
                        server.kill()
        except (httpx.TransportError, AssertionError):
            if crash == 4 or server.process.poll() is None:
                raise
        if server.process.poll() is None:
            break
        server = Server(agents, data=data).start()
    client = open_wire("jsonrpc", server.url)
    stored = until(client, task, "COMPLETED", timeout=30)
    rebuilt = fold(events)
    assert rebuilt["status"] == stored["status"] and rebuilt["artifacts"] == stored["artifacts"]
    assert len(stored["artifacts"][0]["parts"]) == 150
    server.kill()


def test_a_stop_cuts_events_or_loses_turns(tmp_path):
    """SIGTERM: streams end between two events, the exit code is 0, the turns go on after the restart."""
    agents, data = [scripted("scripted", "/", **AGENT)], tmp_path / "data"
    server = Server(agents, data=data, **{"stop-grace": "2s"}).start()
    client = open_wire("rest", server.url)
    tasks = [post(client, "chunks:300x20") for _ in range(5)]
    streams = [client.stream("SubscribeToTask", {"id": task["id"]}) for task in tasks]
    seen = [[next(one), next(one)] for one in streams]
    begun = time.monotonic()
    stopped = threading.Thread(target=lambda: seen.append(server.stop(15)))
    stopped.start()
    for one, events in zip(streams, seen, strict=False):
        try:
            events += list(one)  # `sse` fails when an event was cut
        except Fault as fault:
            assert fault.message
    stopped.join()
    assert seen[-1] == 0 and time.monotonic() - begun < 10
    with Server(agents, data=data) as again:
        client = open_wire("rest", again.url)
        for task in tasks:
            done = until(client, task, *TERMINAL, timeout=40)
            assert state(done) == "COMPLETED" and len(done["artifacts"][0]["parts"]) == 300


def test_two_processes_share_one_data_folder(tmp_path):
    with Server([scripted("scripted", "/")], data=tmp_path / "data") as server:
        second = subprocess.run(
            [str(binary()), "dev", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--config",
             str(server.config), "--data", str(tmp_path / "data")],
            capture_output=True, text=True, timeout=20, env=os.environ,
        )
        assert second.returncode == 2 and second.stdout == "" and str(tmp_path / "data") in second.stderr
        assert answer(send(open_wire("jsonrpc", server.url), "echo alive")) == "alive"


@pytest.mark.parametrize("text", ["ask", "auth"])
def test_a_task_that_waits_is_forgotten_by_a_restart(tmp_path, text):
    agents, data = [scripted("scripted", "/", **AGENT)], tmp_path / "data"
    server = Server(agents, data=data).start()
    task = send(open_wire("jsonrpc", server.url), text)
    server.kill()
    with Server(agents, data=data) as again:
        client = open_wire("grpc", again.url)
        assert get(client, task)["status"] == task["status"]
        done = send(client, "go on", taskId=task["id"])
        assert (done["id"], state(done)) == (task["id"], "COMPLETED")


def test_page_tokens_survive_a_restart(tmp_path):
    agents, data = [scripted("scripted", "/", **AGENT)], tmp_path / "data"
    server = Server(agents, data=data).start()
    client = open_wire("jsonrpc", server.url)
    made = [send(client, f"echo {n}")["id"] for n in range(4)]
    first = client.call("ListTasks", {"pageSize": 2})
    server.kill()
    with Server(agents, data=data) as again:
        second = open_wire("rest", again.url).call("ListTasks", {"pageSize": 2, "pageToken": first["nextPageToken"]})
    assert [task["id"] for task in first["tasks"] + second["tasks"]] == made[::-1]
