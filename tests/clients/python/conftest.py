"""One server for all tests that do not need one of their own."""

import pytest

import wires
from rialto import Server, python_agent, scripted

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


@pytest.fixture(scope="session")
def server():
    agents = [scripted(name, mount, **settings) for name, mount, settings in AGENTS]
    extra = python_agent("extra", "/extra", "extra.py", **{"kill-grace": "1s"})
    with Server([*agents, extra]) as running:
        yield running
        assert running.process.poll() is None, f"the server died:\n{running.stderr()[-3000:]}"


@pytest.fixture(scope="session")
def clients(server):
    """`clients(binding, mount)`: a client for one agent, opened once."""
    opened = {}

    def client(name: str, mount: str = ""):
        if (name, mount) not in opened:
            opened[name, mount] = wires.wire(name, server.url + mount)
        return opened[name, mount]

    yield client
    for one in opened.values():
        one.close()


@pytest.fixture(params=wires.WIRES)
def wire(request, clients):
    """The scripted agent on each binding."""
    return clients(request.param)


@pytest.fixture
def rpc(clients):
    """The scripted agent by JSON-RPC, for tests in which the binding does not matter."""
    return clients("jsonrpc")


@pytest.fixture
def context():
    """A context that no other test uses."""
    import uuid

    return f"ctx-{uuid.uuid4()}"
