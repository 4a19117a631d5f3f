"""Many clients of one training server: `python -m tests.bench.server.bench_server_clients`.

`--url` names a server that runs; without it one is started on this machine, over a tiny model.
Each of `--clients` has a session and a connection of its own and works without a pause: the first
`--models` of them train a model each (a pass of four samples in protobuf, a step, and every tenth
time a checkpoint), the others draw `--tokens` from the base model. After `--seconds` they wait for
what is under way. Another process tells once a second for each session that its client lives, so
that how long that takes is not how long the clients here keep one another waiting.

Told are heartbeats and requests in milliseconds, works in a second, and futures that were lost:
handed out, and then answered with neither a result nor a failure that says why. Of a server that
was started here they are written to docs/benchmarks.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from penstock.server.api.wire import tinker_pb2 as pb
from tests.bench.pages import write_section
from tests.server.serving import Server, write_model

TITLE, WRITTEN = (
    "Training server with many clients",
    "Written by `tests/bench/server/bench_server_clients.py`.",
)
SAMPLES, TOKENS = 4, 64
SAVE_EVERY = 10
GOALS = {"heartbeat p99 ms": 250.0, "lost futures": 0}
"""At most. The SDK gives a heartbeat up after ten seconds."""
PROTO = "application/x-protobuf"
RUN = f"{os.getpid()}"
"""So that sessions of one run are not those of another."""


@dataclass
class Seen:
    """What all clients saw."""

    beats: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    handed_out: int = 0
    lost: int = 0


class Client:
    """One session and what it does."""

    def __init__(
        self, http: httpx.AsyncClient, seen: Seen, number: int, until: float, tokens: int
    ) -> None:
        self._http, self._seen, self._number, self._until = http, seen, number, until
        self._tokens = tokens
        self._session = session_of(number)
        self._seq = 0

    async def live(self, base_model: str, *, trains: bool) -> None:
        """Work until it is time."""
        body = {"session_id": self._session, "tags": [], "sdk_version": "bench"}
        await self._post("create_session", body)
        await (self._train(base_model) if trains else self._draw(base_model))

    async def _train(self, base_model: str) -> None:
        made = {"session_id": self._session, "model_seq_id": 0, "base_model": base_model}
        lora = {"rank": 4, "train_unembed": False}
        model = f"{self._session}:train:0"
        if "error" in await self._future("create_model", made | {"lora_config": lora}):
            return
        while time.monotonic() < self._until:
            self._seq += 1
            await self._pass(model)
            await self._future("optim_step", self._numbered(model, adam_params={}))
            if self._seq % SAVE_EVERY == 0:
                await self._future("save_weights", self._numbered(model, overwrite=True, path="a"))

    async def _draw(self, base_model: str) -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]}
        body = {"session_id": self._session, "sampling_session_seq_id": 0, "base_model": base_model}
        sampler = (await self._post("create_sampling_session", body))["sampling_session_id"]
        asked = {
            "prompt": prompt,
            "sampling_params": {"max_tokens": self._tokens},
            "sampling_session_id": sampler,
        }
        while time.monotonic() < self._until:
            await self._future("asample", asked)

    def _numbered(self, model: str, **body: Any) -> dict[str, Any]:
        self._seq += 1
        return {"model_id": model, "seq_id": self._seq, **body}

    async def _pass(self, model: str) -> None:
        request = pb.ForwardBackwardRequest(
            model_id=model, seq_id=self._seq, loss_fn="cross_entropy"
        )
        draw = np.random.default_rng(self._number + self._seq)
        for _ in range(SAMPLES):
            tokens = draw.integers(1, 200, TOKENS + 1)
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
            target = datum.loss_fn_inputs["target_tokens"]
            target.dense, target.dtype = tokens[1:].astype("<i8").tobytes(), pb.DTYPE_INT64
            target.shape.append(TOKENS)
        await self._future("forward_backward", request.SerializeToString())

    async def _future(self, call: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """Hand a work over and wait for its end."""
        handed = await self._post(call, body)
        if "request_id" not in handed:
            return handed
        self._seen.handed_out += 1
        name = {"request_id": handed["request_id"], "allow_metadata_only": False}
        for _ in range(100):
            told = await self._post("retrieve_future", name)
            if told.get("type") == "try_again":
                continue
            if told.get("code") == "gone":
                break
            if "error" in told:
                self._seen.failed[f"{call}: {told['error'][:80]}"] += 1
            else:
                self._seen.done[call] += 1
            return told
        self._seen.lost += 1
        return {"error": "lost"}

    async def _post(self, call: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """One answer; of one that is refused for now, the one that comes later."""
        kind = PROTO if isinstance(body, bytes) else "application/json"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            began = time.perf_counter()
            answer = await self._http.post(
                f"/api/v1/{call}", content=content, headers={"Content-Type": kind}
            )
            if call != "retrieve_future":
                self._seen.requests.append(time.perf_counter() - began)
            if answer.status_code not in (429, 503):
                return answer.json()
            self._seen.refused[f"{call}: {answer.status_code}"] += 1
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))


def session_of(number: int) -> str:
    """The session of the client of this number."""
    return f"bench-{RUN}-{number}"


def connection(url: str, key: str) -> httpx.AsyncClient:
    """To a server that is reached in the clear."""
    return httpx.AsyncClient(
        base_url=url, headers={"X-API-Key": key}, verify=False, timeout=120, trust_env=False
    )


async def beat(url: str, key: str, sessions: Sequence[str], until: float) -> list[float]:
    """Seconds that each heartbeat took; those of a second are spread over it."""
    taken: list[float] = []

    async def live(session: str, at: float) -> None:
        async with connection(url, key) as http:
            while (now := time.time()) < until:
                await asyncio.sleep((at - now) % 1)
                began = time.perf_counter()
                body = {"session_id": session}
                answer = await http.post("/api/v1/session_heartbeat", json=body)
                # The first come before their sessions do.
                if answer.status_code != 410:
                    answer.raise_for_status()
                    taken.append(time.perf_counter() - began)

    lives = [live(session, number / len(sessions)) for number, session in enumerate(sessions)]
    await asyncio.gather(*lives)
    return taken


def beats_of(told: tuple[str, str, list[str], float]) -> list[float]:
    """The same, as a process of its own does it."""
    return asyncio.run(beat(*told))


async def measure(url: str, asked: argparse.Namespace) -> Seen:
    """All clients at once."""
    seen = Seen()
    async with AsyncExitStack() as stack:
        https = [
            await stack.enter_async_context(connection(url, asked.key))
            for _ in range(asked.clients)
        ]
        told = (await https[0].get("/api/v1/get_server_capabilities")).json()
        base_model = told["supported_models"][0]["model_name"]
        until = time.monotonic() + asked.seconds
        lives: list[Awaitable[None]] = [
            Client(http, seen, number, until, asked.tokens).live(
                base_model, trains=number < asked.models
            )
            for number, http in enumerate(https)
        ]
        await asyncio.gather(*lives)
    return seen


def told_of(seen: Seen, seconds: float) -> dict[str, Any]:
    """What was seen, as numbers."""
    return {
        "heartbeats": len(seen.beats),
        "heartbeat p50 ms": round(1e3 * statistics.median(seen.beats), 2),
        "heartbeat p99 ms": round(1e3 * float(np.quantile(seen.beats, 0.99)), 2),
        "request p99 ms": round(1e3 * float(np.quantile(seen.requests, 0.99)), 2),
        "futures": seen.handed_out,
        "lost futures": seen.lost,
        "works a second": round(seen.done.total() / seconds, 1),
        "done": dict(seen.done),
        "failed": dict(seen.failed),
        "refused for now": dict(seen.refused),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    parser.add_argument("--key", default="tml-bench")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    with ExitStack() as stack:
        url = asked.url
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            fields = {"max_pending_requests": 4 * asked.clients}
            server = Server(folder / "server", write_model(folder / "model"), **fields)
            stack.callback(server.stop)
            url = server.start(180).url
        sessions = [session_of(number) for number in range(asked.clients)]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as beside:
            # It takes its time to begin.
            beside.submit(os.getpid).result()
            until = time.time() + asked.seconds
            beats = beside.submit(beats_of, (url, asked.key, sessions, until))
            seen = asyncio.run(measure(url, asked))
            seen.beats = beats.result()
    told = told_of(seen, asked.seconds)
    lines = json.dumps(told, indent=2)
    print(lines)
    if asked.url is None:
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, clients and server"
        what = f"{asked.clients} clients for {asked.seconds:g} s, {asked.models} of which train."
        write_section("cpu", TITLE, [WRITTEN, "", f"{what} {machine}.", "", "```", lines, "```"])
    missed = {name: told[name] for name, goal in GOALS.items() if told[name] > goal}
    if missed:
        sys.exit(f"over what it may be: {missed}")


if __name__ == "__main__":
    main()
