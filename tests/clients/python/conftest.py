"""One server for all tests that do not need one of their own: `rialto dev`, or the cluster that is there already."""

import pytest

import wires
from rialto import CLUSTER, Running, Server, agents


def pytest_configure(config):
    config.addinivalue_line("markers", "one_process: about what one process of a server does")


def pytest_collection_modifyitems(config, items):
    """Of a cluster, what can be asked of any server; the rest starts servers of its own or is about one process."""
    if CLUSTER:
        asked = [one for one in items if "server" in one.fixturenames and not one.get_closest_marker("one_process")]
        config.hook.pytest_deselected(items=[one for one in items if one not in asked])
        items[:] = asked


@pytest.fixture(scope="session")
def server():
    if CLUSTER:
        yield Running(CLUSTER["url"])
        return
    with Server(agents()) as running:
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
