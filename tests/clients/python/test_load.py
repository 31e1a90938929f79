"""Many streams, slow readers, memory: nobody stalls or starves anybody else."""

import asyncio
import json
import socket
import threading
import time

import pytest

from rialto import Server, connect, is_release, scripted
from wires import WIRES, answer, fold, get, post, send, state
from wires import wire as open_wire

RELEASE_ONLY = pytest.mark.skipif(not is_release(), reason="says nothing of a debug build: set RIALTO_BIN to a release build")


def subscribe_request(task: dict) -> bytes:
    return (
        f"GET /tasks/{task['id']}:subscribe HTTP/1.1\r\nhost: x\r\na2a-version: 1.0\r\nconnection: close\r\n\r\n"
    ).encode()


def events_of(raw: bytes) -> list[dict]:
    """Events of a chunked HTTP/1.1 answer that was read to its end."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"chunked" in head.lower(), head
    body = bytearray()
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            break
        body += rest[:length]
        rest = rest[length + 2:]
    return [
        json.loads(line.removeprefix("data:")) for line in body.decode().split("\n") if line.startswith("data:")
    ]


def chunk_texts(events: list[dict]) -> list[str]:
    artifact = fold(events)["artifacts"]
    assert len(artifact) == 1
    return [part["text"] for part in artifact[0]["parts"]]


def expected_texts(client, task: dict) -> list[str]:
    [artifact] = get(client, task)["artifacts"]
    return [part["text"] for part in artifact["parts"]]


async def test_stalled_streams_delay_the_other_streams():
    """500 streams, 50 of which read nothing: the other 450 have every event as soon as it is there."""
    with Server([scripted("scripted", "/")]) as server:
        client = open_wire("jsonrpc", server.url)
        tasks = [post(client, "chunks:40x100") for _ in range(10)]

        async def read(task):
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(subscribe_request(task))
            raw = await reader.read(-1)
            writer.close()
            return raw, time.monotonic()

        stalled = []
        for task in tasks:
            for _ in range(5):
                stalled.append(connect(server, receive_buffer=1024))
                stalled[-1].sendall(subscribe_request(task))
        reading = [asyncio.create_task(read(task)) for task in tasks for _ in range(45)]
        loop = asyncio.get_running_loop()

        def finished():
            while any(state(get(client, task, historyLength=0)) != "COMPLETED" for task in tasks):
                time.sleep(0.02)
            return time.monotonic()

        ended = loop.run_in_executor(None, finished)
        results = await asyncio.wait_for(asyncio.gather(*reading), 60)
        ended = await ended
        for number, (raw, at) in enumerate(results):
            task = tasks[number // 45]
            assert chunk_texts(events_of(raw)) == expected_texts(client, task)
            assert at - ended < 2, f"a reader was {at - ended:.1f} s late"
        for one in stalled:
            one.close()
        assert answer(send(client, "echo alive")) == "alive"


def test_c41_a_slow_watcher_eats_memory_or_misses_events():
    """50 readers of 200 B/s on 5,000 chunks, and one normal reader that must not notice."""
    with Server([scripted("scripted", "/")]) as server:
        client, rest = open_wire("jsonrpc", server.url), open_wire("rest", server.url)
        answer(send(client, "chunks:200x0"))
        before = server.rss()
        task = post(client, "chunks:5000x1")
        slow = []
        for _ in range(50):
            slow.append(connect(server, receive_buffer=2048))
            slow[-1].sendall(subscribe_request(task))
        heads = [bytearray() for _ in slow]
        stop = threading.Event()

        def trickle():
            while not stop.wait(0.1):
                for one, head in zip(slow, heads, strict=True):
                    head += one.recv(20)

        thread = threading.Thread(target=trickle)
        thread.start()
        begun, peak, events = time.monotonic(), 0, []
        for event in rest.stream("SubscribeToTask", {"id": task["id"]}):
            events.append(event)
            if len(events) % 200 == 0:
                peak = max(peak, server.rss())
        took = time.monotonic() - begun
        wanted = expected_texts(client, task)
        assert len(wanted) == 5000 and chunk_texts(events) == wanted
        assert took < 45, f"the normal reader needed {took:.1f} s"
        time.sleep(0.5)
        peak = max(peak, server.rss())
        assert peak - before < 100e6, f"memory grew by {(peak - before) / 1e6:.0f} MB"
        stop.set()
        thread.join()
        # Whoever reads on has lost nothing, or is told to subscribe again.
        for one, head in list(zip(slow, heads, strict=True))[:5]:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            while chunk := one.recv(1 << 20):
                head += chunk
            got = events_of(bytes(head))
            if "error" in got[-1]:
                assert got[-1]["error"]["message"]
            else:
                assert chunk_texts(got) == wanted
        for one in slow:
            one.close()


def test_a_stalled_grpc_stream_stalls_the_others_of_its_connection():
    with Server([scripted("scripted", "/")]) as server:
        client = open_wire("grpc", server.url)
        task = post(client, "chunks:3000x1")
        stalled = [client.stream("SubscribeToTask", {"id": task["id"]}) for _ in range(10)]
        for one in stalled:
            next(one)
        begun = time.monotonic()
        events = list(client.stream("SubscribeToTask", {"id": task["id"]}))
        assert time.monotonic() - begun < 40
        assert chunk_texts(events) == expected_texts(client, task)
        assert answer(send(client, "echo quick")) == "quick"
        for one in stalled:
            one.close()


def test_a_crowd_of_idle_connections_and_half_requests_keeps_others_out(server, rpc):
    crowd = [connect(server) for _ in range(200)]
    for number, one in enumerate(crowd):
        if number % 2:
            one.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    begun = time.monotonic()
    for _ in range(20):
        assert answer(send(rpc, "echo x")) == "x"
    assert time.monotonic() - begun < 5
    for one in crowd:
        one.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 1000, b"GET", b"\r\n" * 5000, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"a" * 512,
     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 300, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
     b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
     b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\nfffffffffffffffff\r\n"],
    ids=range(10),
)
def test_garbage_on_a_connection_harms_nobody(server, rpc, garbage):
    for _ in range(5):
        with connect(server) as stream:
            try:
                stream.sendall(garbage)
                stream.shutdown(socket.SHUT_WR)
                stream.settimeout(5)
                while stream.recv(65536):
                    pass
            except OSError:
                pass
    assert answer(send(rpc, "echo alive")) == "alive"


@RELEASE_ONLY
def test_an_idle_server_needs_much_memory():
    with Server([scripted("scripted", "/")]) as server:
        client = open_wire("jsonrpc", server.url)
        assert answer(send(client, "echo x")) == "x"
        time.sleep(1)
        assert server.rss() < 60e6, f"{server.rss() / 1e6:.0f} MB"


@RELEASE_ONLY
def test_a_thousand_open_streams_need_much_memory():
    with Server([scripted("scripted", "/")]) as server:
        clients = [open_wire(name, server.url) for name in WIRES]
        tasks = [post(clients[0], "ask") for _ in range(20)]
        time.sleep(0.5)
        streams = [clients[0].stream("SubscribeToTask", {"id": tasks[n % 20]["id"]}) for n in range(1000)]
        for one in streams:
            assert "task" in next(one)
        assert server.rss() < 150e6, f"{server.rss() / 1e6:.0f} MB"
        done = send(clients[0], "yes", taskId=tasks[0]["id"])
        assert state(done) == "COMPLETED"
        for one in streams[::20]:
            assert state(list(one)[-1]["statusUpdate"]) == "COMPLETED"
        for one in streams:
            one.close()
