"""Three gateways, two task-stores, three runners, and nginx in front of them as its manual has it."""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cluster import Cluster
from rialto import eventually
from wires import TERMINAL, WIRES, Fault, Grpc, JsonRpc, Rest, answer, fold, get, message, post, send, sse, state, until

CLIENTS = {"jsonrpc": JsonRpc, "rest": Rest, "grpc": Grpc}


@pytest.fixture(scope="module")
def house():
    with Cluster(gateways=3) as running:
        yield running


class Nginx:
    """`proxy_pass` and `grpc_pass` to all gateways, and nothing else that is not the default."""

    def __init__(self, gateways: list[str]):
        self.folder = Path(tempfile.mkdtemp(prefix="nginx-"))
        # An address that nobody else takes ports of.
        address = "127.{}.{}.{}".format(*(random.randint(1, 254) for _ in range(3)))
        self.url, self.grpc = f"http://{address}:8080", f"{address}:8081"
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in gateways)
        paths = "".join(
            f"{name}_temp_path {self.folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        (self.folder / "nginx.conf").write_text(f"""
            daemon off; pid {self.folder}/pid; error_log stderr; events {{}}
            http {{
                access_log off; {paths}
                upstream gateways {{ {servers} }}
                server {{ listen {address}:8080; location / {{ proxy_pass http://gateways; }} }}
                server {{ listen {self.grpc} http2; location / {{ grpc_pass grpc://gateways; }} }}
            }}
        """)

    def __enter__(self):
        program = os.environ.get("NGINX_BIN") or shutil.which("nginx") or "/usr/sbin/nginx"
        self.log = (self.folder / "stderr").open("w+")
        command = [program, "-p", str(self.folder), "-c", str(self.folder / "nginx.conf")]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

        def answers():
            assert self.process.poll() is None, (self.folder / "stderr").read_text()
            try:
                return httpx.get(f"{self.url}/health").status_code == 200
            except httpx.TransportError:
                return False

        eventually(answers, what="nginx")
        return self

    def client(self, name: str):
        return CLIENTS[name](self.grpc if name == "grpc" else self.url)

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)
        self.log.close()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def nginx(house):
    with Nginx(house.gateways) as running:
        yield running


def at(house, gateway: int, name: str):
    """A client of one gateway, past every balancer."""
    url = house.gateways[gateway]
    return CLIENTS[name](url.removeprefix("http://") if name == "grpc" else url)


def numbers(task: dict | None) -> list[str]:
    return answer(task or {}).splitlines()


def counted(n: int) -> list[str]:
    return [str(number) for number in range(1, n + 1)]


@pytest.mark.parametrize("name, encoding", [(name, None) for name in WIRES] + [(name, "gzip, br") for name in WIRES[:2]])
def test_c37_proxies_hold_events_back_until_the_end(nginx, name, encoding):
    client, arrivals, events = nginx.client(name), [], []
    headers = {"accept-encoding": encoding} if encoding else None
    for event in client.stream("SendStreamingMessage", {"message": message("chunks:20x100")}, headers=headers):
        events.append(event)
        arrivals += [time.monotonic()] if "artifactUpdate" in event else []
    assert numbers(fold(events)) == counted(20) and state(events[-1]["statusUpdate"]) == "COMPLETED"
    # 19 pauses of 100 ms; a proxy that holds them back lets all go at once.
    assert arrivals[-1] - arrivals[0] > 1.5 and len({round(at, 2) for at in arrivals}) > 10
    client.close()


@pytest.mark.parametrize("name", ["jsonrpc", "rest"])
def test_c37_what_tells_proxies_to_pass_events_on_is_missing(house, nginx, name):
    direct, behind = at(house, 0, name), nginx.client(name)
    for client in (direct, behind):
        request = client._request(
            "SendStreamingMessage", {"message": message("echo x")}, headers={"accept-encoding": "gzip, br"})
        response = client.http.send(request, stream=True)
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in response.headers
        # nginx keeps this one for itself.
        assert response.headers.get("x-accel-buffering") == ("no" if client is direct else None)
        response.read()
        client.close()


def dropping(nginx, by_number: bool, seed: int) -> int:
    """A client that drops its connection every 400 to 900 ms and subscribes again, at whichever gateway comes next.
    Returns how many connections it took."""
    pick, client, rest = random.Random(seed), nginx.client(WIRES[seed % 3]), nginx.client("rest")
    task = post(client, "chunks:100x50")
    seen, last, connections = None, None, 0
    while True:
        drop_at = time.monotonic() + pick.uniform(0.4, 0.9)
        connections += 1
        try:
            if by_number:
                headers = {} if last is None else {"last-event-id": str(last)}
                response = rest._open(rest._request("SubscribeToTask", {"id": task["id"]}, headers=headers))
                events, close = ((int(number), rest._event(data)) for _, number, data in sse(response.iter_lines())), response.close
            else:
                opened = client.stream("SubscribeToTask", {"id": task["id"]})
                events, close = ((None, event) for event in opened), opened.close
            for number, event in events:
                if number is not None:
                    assert last is None or number == last + 1, f"after {last} came {number}"
                    assert "task" not in event or last is None, "a snapshot although the rest was asked for"
                    last = number
                seen = fold([event] if "task" in event else [{"task": seen}, event])
                # At any time, what the client has is the beginning of the whole: nothing missing, nothing twice.
                assert numbers(seen) == counted(len(numbers(seen)))
                if time.monotonic() > drop_at:
                    break
            close()
        except Fault as ended:
            # It ended while nobody looked.
            ended.is_("UNSUPPORTED_OPERATION")
            assert not by_number
            seen = get(client, task)
        if state(seen) in TERMINAL:
            break
    stored = get(client, task)
    assert state(stored) == "COMPLETED" and numbers(seen) == counted(100)
    assert (seen["artifacts"], seen["status"]) == (stored["artifacts"], stored["status"])
    client.close()
    rest.close()
    return connections


def test_c31_events_between_disconnect_and_resubscribe_are_lost(nginx):
    """20 runs at once, half of them by number, half by snapshot."""
    with ThreadPoolExecutor(20) as pool:
        runs = [pool.submit(dropping, nginx, seed % 2 == 0, seed) for seed in range(20)]
        assert all(run.result(90) >= 4 for run in runs)


def test_c57_cancel_through_another_gateway_changes_the_label_but_the_work_goes_on(house, tmp_path):
    for number, name in enumerate(WIRES):
        counter = tmp_path / f"counter-{name}"
        asks, cancels, reads = (at(house, (number + step) % 3, name) for step in range(3))
        extra = {} if name != "grpc" else {"tenant": "extra"}
        if name != "grpc":
            for client in (asks, cancels, reads):
                client.url += "/extra"
        params = {"message": message(f"count {counter}"), "configuration": {"returnImmediately": True}}
        task = asks.call("SendMessage", params | extra)["task"]
        eventually(lambda counter=counter: counter.exists() and counter.stat().st_size > 10)
        assert state(cancels.call("CancelTask", {"id": task["id"]} | extra)) == "CANCELED"

        def still(counter=counter) -> bool:
            """No count in five times the time between two."""
            before = counter.stat().st_size
            time.sleep(0.5)
            return counter.stat().st_size == before

        eventually(still, timeout=20)  # 2 s on a quiet machine
        assert state(reads.call("GetTask", {"id": task["id"]} | extra)) == "CANCELED"
        assert set(counter.read_text().split()) == {"1"}, "another runner took it up"
        for client in (asks, cancels, reads):
            client.close()


def test_c57_what_ignores_a_cancel_from_another_gateway_keeps_its_slot(house):
    """Each of the three runners has one slot, and one second of patience."""
    clients = [at(house, number, "rest") for number in range(3)]
    for client in clients:
        client.url += "/impatient"
    tasks = [post(clients[0], "hang") for _ in range(3)]
    for task in tasks:
        until(clients[1], task, "WORKING")
    waiting = post(clients[0], "echo free")
    for task in tasks:
        assert state(clients[2].call("CancelTask", {"id": task["id"]})) == "CANCELED"
    assert answer(until(clients[1], waiting, "COMPLETED", timeout=20)) == "free"
    for client in clients:
        client.close()


def test_c61_blocking_calls_fail_under_load_although_the_task_is_stored(house):
    """200 callers at once, spread over all gateways; each task is read through another one."""
    deadline = time.monotonic() + 5
    lock, done = threading.Lock(), []

    def caller(number: int) -> None:
        sends, reads = at(house, number % 3, WIRES[number // 3 % 3]), at(house, (number + 1) % 3, WIRES[number % 3])
        while True:
            text = uuid.uuid4().hex
            task = send(sends, f"echo {text}")
            assert (state(task), answer(task)) == ("COMPLETED", text)
            assert get(reads, task) == task
            with lock:
                done.append(task["id"])
            if time.monotonic() > deadline:
                break
        sends.close()
        reads.close()

    with ThreadPoolExecutor(200) as pool:
        for one in [pool.submit(caller, number) for number in range(200)]:
            one.result(90)
    assert len(done) == len(set(done)) >= 200


def same_order(one: list, other: list) -> bool:
    """Whether one is a piece of the other, or goes on where the other ends."""
    if one[0] not in other:
        one, other = other, one
    rest = other[other.index(one[0]):]
    both = min(len(one), len(rest))
    return one[:both] == rest[:both]


def test_c39_watchers_of_several_gateways_see_different_orders_or_die_together(house):
    """Five watchers on three gateways; one hangs up, one gateway is killed. The last test: a gateway stays dead."""
    asks = at(house, 0, "rest")
    task = post(asks, "status:50x50")
    seen: dict[int, list] = {number: [] for number in range(5)}
    ended = {}

    def watch(number: int) -> None:
        client = at(house, number % 3, WIRES[number % 3])
        try:
            with client.stream("SubscribeToTask", {"id": task["id"]}) as events:
                for event in events:
                    seen[number].append(event)
                    if number == 4 and len(seen[number]) == 5:
                        return
            ended[number] = "well"
        except (httpx.TransportError, Fault, AssertionError) as cut:
            ended[number] = cut

    threads = [threading.Thread(target=watch, args=(number,)) for number in seen]
    for thread in threads:
        thread.start()
    eventually(lambda: all(len(events) >= 5 for events in seen.values()), 20)
    os.kill(house.pid("gateway-2"), signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    # Those of the dead gateway (2) and the one that hung up (4) have the beginning, the others all of it.
    assert [number for number in seen if ended.get(number) == "well"] == [0, 1, 3], ended
    for number, (snapshot, *events) in seen.items():
        assert "task" in snapshot and events
        if number in (0, 1, 3):
            assert state(events[-1]["statusUpdate"]) == "COMPLETED"
        for _, *others in seen.values():
            assert same_order(events, others)
    assert state(get(asks, task)) == "COMPLETED"
    assert answer(send(asks, "echo alive")) == "alive"
    asks.close()
