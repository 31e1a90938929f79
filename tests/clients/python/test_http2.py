"""HTTP/2 without TLS on the same port: what browsers behind a proxy, gRPC and impatient clients share."""

import asyncio
import json

import httpx

from wires import answer, fold, get, message, sse, state

HEADERS = {"a2a-version": "1.0", "content-type": "application/json"}


def client(**options) -> httpx.AsyncClient:
    return httpx.AsyncClient(http1=False, http2=True, timeout=60, **options)


async def events_of(http: httpx.AsyncClient, url: str, text: str) -> list[dict]:
    async with http.stream("POST", f"{url}/message:stream", json={"message": message(text)}, headers=HEADERS) as response:
        assert response.http_version == "HTTP/2" and response.status_code == 200
        lines = [line async for line in response.aiter_lines()]
    return [json.loads(data) for _, _, data in sse(iter(lines))]


async def test_cards_calls_and_streams(server, rpc):
    async with client() as http:
        card = await http.get(f"{server.url}/.well-known/agent-card.json")
        assert card.http_version == "HTTP/2" and card.json()["name"]
        sent = await http.post(f"{server.url}/message:send", json={"message": message("echo two")}, headers=HEADERS)
        assert answer(sent.json()["task"]) == "two"
        body = {"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": sent.json()["task"]["id"]}}
        assert (await http.post(server.url, json=body, headers=HEADERS)).json()["result"]["id"] == sent.json()["task"]["id"]
        missing = await http.get(f"{server.url}/tasks/nope", headers=HEADERS)
        assert missing.status_code == 404 and missing.json()["error"]["status"] == "NOT_FOUND"
        seen = fold(await events_of(http, server.url, "chunks:50x2"))
        assert seen["artifacts"] == get(rpc, seen)["artifacts"]


async def test_many_streams_of_one_connection_starve_each_other(server):
    """More than a connection may have at a time: the rest waits for its turn, none is lost."""
    async with client(limits=httpx.Limits(max_connections=1)) as http:
        await http.get(f"{server.url}/health")
        results = await asyncio.gather(*(events_of(http, server.url, "text:10x20") for _ in range(300)))
    for events in results:
        assert state(events[-1]["statusUpdate"]) == "COMPLETED"
        assert answer(fold(events)) == "".join(f"{n}\n" for n in range(1, 11))


async def test_a_reset_stream_takes_its_connection_along(server, rpc):
    async with client(limits=httpx.Limits(max_connections=1)) as http:
        steady = asyncio.create_task(events_of(http, server.url, "chunks:100x20"))
        for _ in range(50):
            sent = {"message": message("sleep:1")}
            async with http.stream("POST", f"{server.url}/message:stream", json=sent, headers=HEADERS) as response:
                await anext(response.aiter_lines())  # and hang up
        seen = fold(await steady)
    assert state(seen) == "COMPLETED" and seen["artifacts"] == get(rpc, seen)["artifacts"]
