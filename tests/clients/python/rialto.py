"""A `rialto dev` process, started the way a person starts it, and killed the way machines die."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

# What `cluster.py` says about the cluster that this run is for, if it is for one.
CLUSTER: dict | None = json.loads(os.environ.get("RIALTO_TESTS_CLUSTER") or "null")

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent


def binary() -> Path:
    """The binary under test: `RIALTO_BIN`, else what was built last."""
    if given := os.environ.get("RIALTO_BIN"):
        return Path(given).resolve()
    built = [ROOT / "target" / profile / "rialto" for profile in ("debug", "ci-release", "release")]
    built = [path for path in built if path.exists()]
    if not built:
        raise SystemExit("no rialto binary: run `cargo build -p rialto`, or set RIALTO_BIN")
    return max(built, key=lambda path: path.stat().st_mtime)


def scripted_agent() -> Path:
    """The agent whose messages are commands; it is built beside the binary."""
    if given := os.environ.get("SCRIPTED_AGENT_BIN"):
        return Path(given).resolve()
    near = [binary().parent / "scripted_agent"]
    near += [ROOT / "target" / profile / "scripted_agent" for profile in ("debug", "ci-release", "release")]
    for path in near:
        if path.exists():
            return path
    raise SystemExit("no scripted agent: run `cargo build -p rialto-testkit --bins`, or set SCRIPTED_AGENT_BIN")


def is_release() -> bool:
    """Whether numbers about speed and memory mean anything for this binary."""
    return binary().parent.name in ("release", "ci-release") or os.environ.get("RIALTO_RELEASE") == "1"


def scripted(name: str, mount: str = "/", **settings) -> dict:
    """The section of a scripted agent."""
    backend = {"type": "command", "command": [str(scripted_agent())], "persistent": True}
    backend |= settings.pop("backend", {})
    return {"id": name, "mount": mount, "backend": backend, **settings}


def python_agent(name: str, mount: str, script: str, **settings) -> dict:
    """The section of an agent that is a Python script of this folder."""
    command = [sys.executable, str(HERE / "agents" / script)]
    return {"id": name, "mount": mount, "backend": {"type": "command", "command": command}, **settings}


# What the tests of the current protocol talk to: id, mount, settings.
AGENTS = [
    ("scripted", "/", {}),
    ("unary", "/unary", {"card": {"streaming": False}}),
    ("single", "/single", {"max-concurrent": 1}),
    ("queue", "/queue", {"when-busy": "queue"}),
    ("open", "/open", {"turn-end": "input-required"}),
    # Its tasks grow by messages only: no artifact for each turn.
    ("chat", "/chat", {"turn-end": "input-required", "answer": "status"}),
    ("status", "/status", {"answer": "status"}),
    ("talk", "/talk", {"reply": "message"}),
    ("continue", "/continue", {"continue-waiting": True}),
    ("tenants", "/tenants", {"tenants": ["red", "blue"]}),
    ("impatient", "/impatient", {"kill-grace": "1s", "max-concurrent": 1}),
    ("picky", "/picky", {"card": {"extensions": [{"uri": "https://ext.example.test/v1", "required": True}]}}),
]


def agents() -> list[dict]:
    """The sections of `AGENTS`, and of what the scripted agent has no command for."""
    extra = python_agent("extra", "/extra", "extra.py", **{"kill-grace": "1s"})
    return [*(scripted(name, mount, **settings) for name, mount, settings in AGENTS), extra]


def agents_of_0_3(under: str = "") -> list[dict]:
    """What the tests of protocol 0.3 talk to, mounted at or below `under`."""
    return [
        scripted("old", under or "/", **{"a2a-0.3": True}),
        scripted("old-talk", f"{under}/talk", reply="message", **{"a2a-0.3": True}),
        scripted("new", f"{under}/new"),
    ]


class Running:
    """A server that somebody else started."""

    def __init__(self, url: str):
        self.url = url

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname, parts.port


class Server(Running):
    """One `rialto dev`. Its data outlive it when `data` is given."""

    def __init__(self, agents: list[dict], data: Path | None = None, flags: list[str] | None = None, **settings):
        self.folder = Path(tempfile.mkdtemp(prefix="rialto-test-"))
        self.config = self.folder / "rialto.yaml"
        self.config.write_text(json.dumps({"agents": agents, **settings}))  # JSON is YAML
        self.data = data
        self.flags = flags or []
        self.process: subprocess.Popen | None = None
        super().__init__("")
        self.log = self.folder / "stderr.log"

    def start(self, timeout: float = 30) -> Server:
        command = [str(binary()), "dev", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        command += ["--config", str(self.config), *self.flags]
        command += ["--data", str(self.data)] if self.data else ["--ephemeral"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log.open("ab"), stdin=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )
        lines: queue.Queue[str] = queue.Queue()
        stdout = self.process.stdout
        threading.Thread(target=lambda: [lines.put(line) for line in stdout], daemon=True).start()
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = lines.get(timeout=0.05)
                break
            except queue.Empty:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise AssertionError(f"rialto did not start: {self.stderr()[-3000:]}") from None
        assert line.startswith("ready: http://"), f"the first line of stdout is {line!r}"
        self.url = line.removeprefix("ready: ").strip().rstrip("/")
        return self

    def stderr(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def rss(self) -> int:
        """Resident memory in bytes, agents' processes not counted."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))

    def kill(self) -> None:
        """`kill -9`: no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self, timeout: float = 20) -> int:
        """SIGTERM, as an orchestrator does it. Returns the exit code."""
        return self._end(signal.SIGTERM, timeout)

    def _end(self, how: signal.Signals, timeout: float = 20) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"rialto ignored {how.name} for {timeout} s") from None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_) -> None:
        self.kill()


def connect(server: Running, receive_buffer: int | None = None) -> socket.socket:
    """A bare TCP connection; a small receive buffer makes a slow reader felt soon."""
    stream = socket.socket()
    if receive_buffer:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    stream.settimeout(30)
    stream.connect(server.address)
    return stream


def eventually(check, timeout: float = 10, every: float = 0.01, what: str = "it"):
    """Asks until `check` answers something true; returns that."""
    deadline = time.monotonic() + timeout
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {timeout} s (last answer: {answer!r})")
        time.sleep(every)
