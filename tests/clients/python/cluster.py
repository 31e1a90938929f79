"""A cluster of real processes behind a balancer: `cluster` of the test kit, and one address for all of its gateways.

    python3 cluster.py [arguments of `cluster`]

Serves the agents of this folder's tests; prints one line of JSON as `cluster` does, with `url` added, and ends with its
stdin. `run.sh` hands that line to clients of all languages in `RIALTO_TESTS_CLUSTER`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rialto import agents, agents_of_0_3, binary, scripted_agent

HERE = Path(__file__).resolve().parent
HTTP2 = b"PRI * HTTP/2.0\r\n"


def everything() -> list[dict]:
    """The agents of all suites; those of 0.3 below `/v03`."""
    return [*agents(), *agents_of_0_3("/v03")]


class Cluster:
    """A cluster for tests that stop, count or compare its processes. `settings` go into the configuration."""

    def __init__(self, served: list[dict] | None = None, gateways: int = 2, task_stores: int = 2, runners: int = 3, **settings):
        self.counts = {"gateways": gateways, "task-stores": task_stores, "runners": runners}
        self.config = {"agents": served or everything(), **settings}

    def __enter__(self) -> Cluster:
        flags = [part for name, count in self.counts.items() for part in (f"--{name}", str(count))]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "cluster.py"), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, text=True, env=os.environ | {"RIALTO_TESTS_CONFIG": json.dumps(self.config)},
        )
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise AssertionError(f"no cluster: {self.log.read()[-3000:]}")
        self.started = json.loads(line)
        self.url, self.gateways = self.started["url"], self.started["gateways"]
        return self

    def pid(self, name: str) -> int:
        """Of `gateway-0`, `task-store-1` and so on."""
        return next(one["pid"] for one in self.started["processes"] if one["name"] == name)

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        try:
            assert self.process.wait(30) == 0
        finally:
            self.process.kill()
            self.log.close()


class Balancer:
    """Gives each connection to the next address. HTTP/1.1 connections are closed after one request, so that the next
    one goes elsewhere; those of HTTP/2 stay where they are."""

    def __init__(self):
        self.targets: itertools.cycle | None = None
        self.count = 0
        self.tasks = set()

    async def start(self) -> int:
        self.server = await asyncio.start_server(self.accepted, "127.0.0.1", 0, limit=1 << 18)
        return self.server.sockets[0].getsockname()[1]

    def point_to(self, urls: list[str]) -> None:
        addresses = [url.removeprefix("http://").rstrip("/").rsplit(":", 1) for url in urls]
        self.targets, self.count = itertools.cycle(addresses), len(addresses)

    async def connect(self):
        for _ in range(self.count):
            host, port = next(self.targets)
            try:
                return await asyncio.open_connection(host, int(port))
            except OSError:
                continue  # a gateway that is down
        raise ConnectionError("no gateway")

    def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Nothing else keeps a task that waits for a peer.
        task = asyncio.create_task(self.serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await self.connect()
        except ConnectionError:
            writer.transport.abort()
            return
        await asyncio.gather(self.pump(reader, there[1], request=True), self.pump(there[0], writer))
        writer.close()
        there[1].close()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bool = False) -> None:
        try:
            if request:
                first = await reader.readuntil(b"\r\n")
                writer.write(first if first == HTTP2 else first + b"connection: close\r\n")
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
            writer.write_eof()
        except asyncio.IncompleteReadError as short:
            writer.write(short.partial)
            writer.write_eof()
        except (OSError, asyncio.LimitOverrunError):
            # Whatever is wrong at one end is wrong at both.
            writer.transport.abort()


async def serve() -> int:
    balancer = Balancer()
    url = f"http://127.0.0.1:{await balancer.start()}"
    given = os.environ.get("RIALTO_TESTS_CONFIG")
    config = json.loads(given) if given else {"agents": everything()}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config | {"public-url": url}, file)  # JSON is YAML
        file.flush()
        program = os.environ.get("CLUSTER_BIN") or str(scripted_agent().with_name("cluster"))
        process = await asyncio.create_subprocess_exec(
            program, *sys.argv[1:], "--binary", str(binary()), file.name,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
        )
        line = await process.stdout.readline()
        if not line:
            return await process.wait() or 1
        started = json.loads(line)
        balancer.point_to(started["gateways"])
        print(json.dumps(started | {"url": url}), flush=True)
        stdin = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([stdin, asyncio.create_task(process.wait())], return_when=asyncio.FIRST_COMPLETED)
        process.stdin.close()
        code = await process.wait()
    os._exit(code)  # a read of stdin that is under way holds nobody up


if __name__ == "__main__":
    sys.exit(asyncio.run(serve()))
