"""A tenant that trains while others abuse the server.

`python -m tests.bench.server.bench_abuse` starts a server with two keys on this machine, over
a tiny model. One key's clients train; a process of its own sends their heartbeats, twenty a second
for each. For `--seconds` nobody disturbs them, and then, for as long each, the other key, or
somebody without one, sends what is named below. Told of each are heartbeats in milliseconds, works
in a second, futures that were lost, and by how much the API process's memory grew at most over that
before. `--files` starts the server with no more open files than that.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import zstandard

from penstock.server.api.wire import tinker_pb2 as pb
from tests.bench.pages import write_section
from tests.bench.server.bench_server_clients import Client, Seen, connection, session_of
from tests.server.serving import Server, write_model

TITLE, WRITTEN = (
    "Training server under hostile clients",
    "Written by `tests/bench/server/bench_abuse.py`.",
)
VICTIM, ATTACKER = "tml-victim", "tml-attacker"
JSON, PROTO = "application/json", "application/x-protobuf"
CLIENTS = 2
BEATS_A_SECOND = 20
GOALS = {"heartbeat p99 ms": 250.0, "lost futures": 0, "memory MiB": 512.0}

Attack = Callable[[str, float], Coroutine[Any, Any, Counter[str]]]


@cache
def sparse_body(rows: int = 1024, columns: int = 32768) -> bytes:
    """Ten kilobytes that claim to be [rows, columns] targets."""
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.ones(rows, "<i4").tobytes()
    sparse = pb.SparseCsr(crow_indices=np.zeros(rows + 1, "<i8").tobytes())
    tensor = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[rows, columns], sparse_csr=sparse)
    datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
    return request.SerializeToString()


@cache
def brackets_body(count: int = 32_000_000) -> bytes:
    """Nine kilobytes of zstd that are 96 MB of empty arrays."""
    return zstandard.compress(b"[" + b"[]," * count + b"[]]")


@cache
def keys_body(count: int = 1_000_000) -> bytes:
    """An object of a million keys that nobody knows."""
    return json.dumps({f"k{index}": 0 for index in range(count)}).encode()


async def posting(
    url: str, until: float, path: str, body: bytes, headers: dict[str, str], at_once: int = 4
) -> Counter[str]:
    """The same body again and again, on so many connections."""
    seen: Counter[str] = Counter()

    async def post() -> None:
        async with connection(url, ATTACKER) as http:
            while time.time() < until:
                try:
                    answer = await http.post(path, content=body, headers=headers)
                    seen[str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    seen[type(error).__name__] += 1
                    await asyncio.sleep(0.05)

    await asyncio.gather(*(post() for _ in range(at_once)))
    return seen


async def sparse(url: str, until: float) -> Counter[str]:
    body = zstandard.compress(sparse_body())
    headers = {"Content-Type": PROTO, "Content-Encoding": "zstd"}
    return await posting(url, until, "/api/v1/forward_backward", body, headers)


async def sparse_within_limits(url: str, until: float) -> Counter[str]:
    body = zstandard.compress(sparse_body(16384, 1000))
    headers = {"Content-Type": PROTO, "Content-Encoding": "zstd"}
    return await posting(url, until, "/api/v1/forward_backward", body, headers)


async def brackets(url: str, until: float) -> Counter[str]:
    headers = {"Content-Type": JSON, "Content-Encoding": "zstd"}
    told = await asyncio.gather(
        posting(url, until, "/api/v1/forward_backward", brackets_body(), headers, 2),
        posting(url, until, "/api/v1/create_session", brackets_body(), headers, 2),
        posting(url, until, "/api/v1/forward", brackets_body(690_000), headers, 2),
    )
    return sum(told, Counter())


async def keys(url: str, until: float) -> Counter[str]:
    headers = {"Content-Type": JSON}
    told = await asyncio.gather(
        posting(url, until, "/api/v1/forward_backward", keys_body(), headers, 2),
        posting(url, until, "/api/v1/create_session", keys_body(), headers, 2),
    )
    return sum(told, Counter())


async def stalled(url: str, until: float) -> Counter[str]:
    """Bodies that lack one byte."""
    lengths = [4 << 20] * 64 + [64 << 20] * 8
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {ATTACKER}\r\n"
        "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    )
    return await holding(url, until, [(head.format(n).encode(), n - 1) for n in lengths])


async def half_open(url: str, until: float) -> Counter[str]:
    """Connections that send half a header, of nobody."""
    return await holding(url, until, [(b"GET /api/v1/sessions HTTP/1.1\r\nHost", 0)] * 1500)


async def holding(url: str, until: float, begun: list[tuple[bytes, int]]) -> Counter[str]:
    """Connections that begin to send, and are made again when they are closed."""
    seen: Counter[str] = Counter()
    host, port = httpx.URL(url).host, httpx.URL(url).port
    piece = b" " * 65536

    async def hold(head: bytes, length: int) -> None:
        while time.time() < until:
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except OSError as error:
                seen[type(error).__name__] += 1
                await asyncio.sleep(0.5)
                continue
            try:
                writer.write(head)
                for at in range(0, length, len(piece)):
                    writer.write(piece[: length - at])
                    await writer.drain()
                answer = await asyncio.wait_for(reader.read(100), max(0.1, until - time.time()))
                seen[answer[9:12].decode() or "closed"] += 1
            except TimeoutError:
                seen["held"] += 1
            except OSError as error:
                seen[type(error).__name__] += 1
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            await asyncio.sleep(0.05)

    await asyncio.gather(*(hold(*each) for each in begun))
    return seen


async def all_at_once(url: str, until: float) -> Counter[str]:
    told = await asyncio.gather(*(attack(url, until) for attack in ATTACKS.values()))
    return sum(told, Counter())


ATTACKS: dict[str, Attack] = {
    "oversized sparse targets": sparse,
    "sparse targets within limits": sparse_within_limits,
    "deeply nested JSON": brackets,
    "JSON with many unknown keys": keys,
    "request bodies that never end": stalled,
    "half-open connections": half_open,
}


def attack_of(told: tuple[str, str, float]) -> dict[str, int]:
    """One attack, in a process of its own."""
    name, url, until = told
    os.nice(5)
    attack = all_at_once if name == "all at once" else ATTACKS[name]
    return dict(asyncio.run(attack(url, until)))


async def beat(url: str, sessions: list[str], until: float) -> tuple[list[float], int]:
    """Seconds that each heartbeat took, and how many were not answered with 200."""
    taken: list[float] = []
    failed = 0

    async def live(session: str) -> None:
        nonlocal failed
        async with connection(url, VICTIM) as http:
            while time.time() < until:
                began = time.perf_counter()
                try:
                    body = {"session_id": session}
                    answer = await http.post("/api/v1/session_heartbeat", json=body)
                    failed += answer.status_code != 200
                except httpx.HTTPError:
                    failed += 1
                took = time.perf_counter() - began
                taken.append(took)
                await asyncio.sleep(max(0.0, 1 / BEATS_A_SECOND - took))

    await asyncio.gather(*map(live, sessions))
    return taken, failed


def beats_of(told: tuple[str, list[str], float]) -> tuple[list[float], int]:
    """The same, in a process of its own."""
    return asyncio.run(beat(*told))


async def train(url: str, seconds: float, base_model: str, first: int) -> Seen:
    """The victim's clients."""
    seen = Seen()
    until = time.monotonic() + seconds
    async with AsyncExitStack() as stack:
        lives = []
        for number in range(first, first + CLIENTS):
            http = await stack.enter_async_context(connection(url, VICTIM))
            lives.append(Client(http, seen, number, until, 8).live(base_model, trains=True))
        await asyncio.gather(*lives)
    return seen


def ready(seconds: float) -> None:
    """Of a process that has read this file, and has what it sends."""
    for body in (brackets_body(), brackets_body(690_000), keys_body()):
        assert body
    time.sleep(seconds)


def memory_of(pid: int, what: str) -> float:
    """VmRSS or VmHWM of a process, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def measure(
    server: Server, name: str, asked: argparse.Namespace, first: int, beside: ProcessPoolExecutor
) -> dict[str, Any]:
    """One phase."""
    base = str(server.model)
    pid = server.processes()["api"]
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    idle = memory_of(pid, "VmRSS")
    sessions = [session_of(number) for number in range(first, first + CLIENTS)]
    for session in sessions:
        body = {"session_id": session, "tags": [], "sdk_version": "bench"}
        headers = {"X-API-Key": VICTIM}
        httpx.post(f"{server.url}/api/v1/create_session", json=body, headers=headers, timeout=60)
    until = time.time() + asked.seconds
    beats = beside.submit(beats_of, (server.url, sessions, until))
    attack = None if name == "none" else beside.submit(attack_of, (name, server.url, until))
    seen = asyncio.run(train(server.url, asked.seconds, base, first))
    taken, failed = beats.result()
    attacked = attack.result() if attack else {}
    assert server.processes()["api"] == pid, server.log[-4000:]
    return {
        "heartbeat p50 ms": round(1e3 * statistics.median(taken), 1),
        "heartbeat p99 ms": round(1e3 * float(np.quantile(taken, 0.99)), 1),
        "heartbeats": len(taken),
        "heartbeats failed": failed,
        "works a second": round(seen.done.total() / asked.seconds, 1),
        "lost futures": seen.lost + seen.failed.total(),
        "memory MiB": round(memory_of(pid, "VmHWM") - idle),
        "load": round(os.getloadavg()[0], 1),
        "attacker saw": attacked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--files", type=int)
    parser.add_argument("--only", choices=["none", *ATTACKS, "all at once"])
    asked = parser.parse_args()
    names = [asked.only] if asked.only else ["none", *ATTACKS, "all at once"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "keys").write_text(f"{VICTIM}\n{ATTACKER}\n")
        (folder / "keys").chmod(0o600)
        fields = {"api_keys_file": str(folder / "keys")}
        server = Server(folder / "server", write_model(folder / "model"), **fields)
        stack.callback(server.stop)
        server.start(180, files=asked.files)
        beside = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
        stack.enter_context(beside)
        # Both take their time to begin.
        for begun in [beside.submit(ready, 5.0) for _ in range(2)]:
            begun.result()
        told: dict[str, Any] = {}
        for index, name in enumerate(names):
            told[name] = measure(server, name, asked, 100 * index, beside)
            print(name, json.dumps(told[name]), flush=True)
        log = len(server.log)
    lines = [f"{name}: {json.dumps(each)}" for name, each in told.items()]
    lines.append(f"log: {log} characters; open files: {asked.files or 'as many as come'}")
    print(lines[-1])
    missed = [
        f"{name}: {goal}"
        for name, each in told.items()
        for goal, most in GOALS.items()
        if each[goal] > most
    ]
    if missed:
        print(f"over what it may be: {missed}")
    if not asked.only:
        what = f"{CLIENTS} clients train, {asked.seconds:g} s of each attack."
        write_section("cpu", TITLE, [WRITTEN, "", what, "", "```", *lines, "```"])


if __name__ == "__main__":
    main()
