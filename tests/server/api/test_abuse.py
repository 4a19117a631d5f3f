"""Requests that cost a client little and the server much are refused before they cost it, and keep
nobody else from being served."""

import asyncio
import json
import logging
import os
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard

from penstock.core import env
from penstock.server.api import futures
from penstock.server.api.errors import ApiError
from penstock.server.api.futures import ResultFormat
from penstock.server.api.log_limit import LINES, SECONDS, LogLimit
from penstock.server.api.middleware import body_limit
from penstock.server.api.middleware.body_limit import BodyLease, BodyMemory
from penstock.server.api.wire import codec_pool, response_bodies
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.api.wire.codec_pool import CodecPool
from penstock.server.api.wire.response_bodies import CHUNK_BYTES, ChunkedResponse, ResultJob
from penstock.server.protocol import requests
from penstock.server.protocol.results import ForwardBackwardResult
from penstock.server.protocol.types import Array
from tests.bench.server.bench_abuse import brackets_body, keys_body, sparse_body
from tests.server.api.engine_of_a_table import MODEL, client, never
from tests.server.api.requests_of_clients import (
    ALICE,
    BOB,
    KEYS,
    PROTO,
    forward_backward,
    retrieve,
    run,
    sample,
)
from tests.turns import one_day_in

JSON = {"Content-Type": "application/json"}
ZSTD = {"Content-Encoding": "zstd"}
BEAT = {"session_id": "s"}


@pytest.mark.parametrize("rows", [1024, 1])
def test_sparse_targets_are_counted_before_they_are_filled(rows):
    """Ten kilobytes of [1024, 32768] targets, and of one row of 2^25."""
    body = sparse_body(rows, 1 << 25 if rows == 1 else 32768)

    async def scenario():
        async with client() as (http, engine):
            tracemalloc.start()
            for packed, headers in ((body, PROTO), (zstandard.compress(body), PROTO | ZSTD)):
                answer = await http.post(
                    "/api/v1/forward_backward", content=packed, headers=headers
                )
                assert answer.status_code == 400, answer.text
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
            tracemalloc.stop()
            assert engine.app.state.service.codec_pool.jobs == 0
            # The numbers are given up, so that what comes after them does not wait for them.
            assert [(ask.seq, ask.operation.data) for ask in engine.asks] == [(1, ())] * 2

    run(scenario())


@one_day_in(2, of=1)
def test_sparse_targets_within_limits_are_filled_outside_the_event_loop():
    async def scenario():
        async with client() as (http, engine):
            content = zstandard.compress(sparse_body(1024, 1000))
            answer = await http.post(
                "/api/v1/forward_backward", content=content, headers=PROTO | ZSTD
            )
            assert answer.status_code == 200, answer.text
            assert engine.app.state.service.codec_pool.jobs == 1
            (work,) = engine.works(requests.ForwardBackward)
            assert work.data[0].inputs["target_tokens"].shape == (1024, 1000)

    run(scenario())


SMALL = "/api/v1/create_session"
LARGE = "/api/v1/forward_backward"
FLOODS = {
    "brackets of a small body": (SMALL, brackets_body(4_000_000), ZSTD, 413),
    "brackets of samples": (LARGE, brackets_body(4_000_000), ZSTD, 413),
    "keys of a small body": (SMALL, keys_body(100_000), {}, 413),
    "few enough keys of a small body": (SMALL, keys_body(9_000), {}, 400),
    "keys of a heartbeat": ("/api/v1/session_heartbeat", keys_body(9_000), {}, 400),
    "keys within a small body": (SMALL, b'{"tags": [0, %b]}' % keys_body(9_000), {}, 400),
    "keys of samples": (LARGE, keys_body(100_000), {}, 400),
    "a window of 2 GiB": (LARGE, bytes.fromhex("28b52ffd00a8"), ZSTD, 400),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_what_decodes_to_much_more_than_was_sent_is_refused_for_little_memory(name):
    path, body, headers, status = FLOODS[name]

    async def scenario():
        async with client() as (http, _):
            tracemalloc.start()
            answer = await http.post(path, content=body, headers=JSON | headers)
            assert answer.status_code == status, answer.text
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
            tracemalloc.stop()

    run(scenario())


def test_a_step_with_too_many_keys_is_none_and_does_not_hold_up_those_after_it():
    async def scenario():
        async with client() as (http, engine):
            body = {"model_id": MODEL, "seq_id": 1, **{f"k{index}": 0 for index in range(100)}}
            answer = await http.post("/api/v1/optim_step", json=body)
            assert answer.status_code == 400
            assert "has 102 keys; 64 may be" in answer.json()["error"]
            assert [(ask.seq, ask.operation.data) for ask in engine.asks] == [(1, ())]

    run(scenario())


@pytest.mark.slow
def test_others_are_served_while_a_body_is_decoded(monkeypatch):
    for name in (env.SERVER_KEYS, env.ENGINE_SECRET, env.WORKERS_SECRET):
        monkeypatch.setenv(name, "a-secret-of-the-server")

    async def scenario():
        async with client(keys=KEYS) as (http, engine):
            pool: CodecPool = engine.app.state.service.codec_pool
            await pool.start()
            [process] = pool._idle
            environment = Path(f"/proc/{process._process.pid}/environ").read_bytes()
            assert b"a-secret-of-the-server" not in environment
            # From its start on: modules are read for a second, beside heartbeats.
            niceness = os.getpriority(os.PRIO_PROCESS, process._process.pid)
            assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + codec_pool.NICENESS)
            os.kill(process._process.pid, signal.SIGSTOP)
            large = json.dumps(
                {"forward_backward_input": {"data": [sample([1] * 100_000)]}}
            ).encode()
            passing = asyncio.create_task(http.post(LARGE, content=large, headers=JSON | ALICE))
            for who in (BOB, ALICE):
                beat = await http.post("/api/v1/session_heartbeat", json=BEAT, headers=who)
                assert beat.status_code == 200
                assert (await http.get("/api/v1/sessions", headers=who)).status_code == 200
            # Another owner's large body has a process of its own.
            assert (await http.post(LARGE, content=large, headers=JSON | BOB)).status_code == 200
            assert not passing.done()
            os.kill(process._process.pid, signal.SIGCONT)
            assert (await passing).status_code == 200
            assert len(engine.works(requests.ForwardBackward)) == 2

    run(scenario())


@one_day_in(2, of=1)
def test_a_body_that_takes_more_time_or_memory_than_one_may_is_refused_and_others_are_not(
    monkeypatch,
):
    body = json.dumps({"forward_backward_input": {"data": [sample([7] * 400_000)]}}).encode()

    async def post(http):
        return (await http.post(LARGE, content=body, headers=JSON)).status_code

    async def scenario():
        async with client() as (http, engine):
            pool: CodecPool = engine.app.state.service.codec_pool
            monkeypatch.setattr(codec_pool, "JOB_SECONDS", 0.001)
            assert await post(http) == 413
            monkeypatch.setattr(codec_pool, "JOB_SECONDS", 60.0)
            enough, pool._memory = pool._memory, 32 << 20
            assert await post(http) == 413
            pool._memory = enough
            for process in pool._idle:
                await process.end()
            pool._idle.clear()
            assert await post(http) == 200

    run(scenario())


@one_day_in(2, of=1)
def test_the_start_of_a_process_does_not_count_against_the_time_of_its_first_job(monkeypatch):
    body = json.dumps({"forward_backward_input": {"data": [sample([7] * 100_000)]}}).encode()

    async def scenario():
        async with client() as (http, engine):
            pool: CodecPool = engine.app.state.service.codec_pool
            monkeypatch.setattr(codec_pool, "JOB_SECONDS", 2.0)
            await pool.start()
            [process] = pool._idle
            os.kill(process._process.pid, signal.SIGSTOP)  # a machine that is busy
            passing = asyncio.create_task(http.post(LARGE, content=body, headers=JSON))
            await asyncio.sleep(2.5)
            os.kill(process._process.pid, signal.SIGCONT)
            assert (await passing).status_code == 200
            # A job does have a limit, and the process that exceeds it is replaced.
            os.kill(process._process.pid, signal.SIGSTOP)
            assert (await http.post(LARGE, content=body, headers=JSON)).status_code == 413
            assert pool._idle == []

    run(scenario())


def test_a_process_that_does_not_start_is_the_servers_fault_and_not_the_bodys(monkeypatch):
    body = json.dumps({"forward_backward_input": {"data": [sample([7] * 100_000)]}}).encode()

    async def scenario():
        async with client() as (http, engine):
            monkeypatch.setattr(codec_pool, "START_SECONDS", 0.001)
            answer = await http.post(LARGE, content=body, headers=JSON)
            assert answer.status_code == 503
            assert answer.headers["Retry-After"] == "1"
            monkeypatch.setattr(codec_pool, "START_SECONDS", 60.0)
            assert (await http.post(LARGE, content=body, headers=JSON)).status_code == 200
            assert len(engine.works(requests.ForwardBackward)) == 1

    run(scenario())


@pytest.mark.slow
def test_results_that_wait_to_be_written_are_not_copied_yet():
    size = 4 << 20
    result = ForwardBackwardResult(
        outputs=({"logprobs": Array.of(np.zeros(size // 4), "float32")},), metrics={}
    )
    job = ResultJob(result_format=ResultFormat("forward"), encoding="protobuf")

    async def scenario():
        pool = CodecPool(1 << 20)
        await pool.start()
        [process] = pool._idle
        os.kill(process._process.pid, signal.SIGSTOP)
        tracemalloc.start()
        tasks = [asyncio.create_task(pool.write("a", job, result)) for _ in range(8)]
        await asyncio.sleep(0.2)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # One of them, and what of it waits to be read.
        assert size < held < 3 * size
        os.kill(process._process.pid, signal.SIGCONT)
        assert len({await task for task in tasks}) == 1
        await pool.stop()

    run(scenario())


def test_owners_take_turns_at_having_bodies_decoded():
    async def scenario():
        pool, order = CodecPool(1 << 20), []
        go = asyncio.Event()

        async def turn(owner):
            async with pool._acquire_slot(owner):
                order.append(owner)
                await go.wait()

        tasks = [asyncio.create_task(turn(owner)) for owner in "aaaabcb"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # One of each owner at a time, and two in all.
        assert order == ["a", "b"]
        tasks[1].cancel()
        go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(order) == list("aaabbc")
        assert order.index("c") < 4
        assert pool._busy == set()
        assert not pool._waiting

    run(scenario())


def test_the_memory_of_bodies_is_shared_fairly():
    async def scenario():
        async with asyncio.timeout(10) as old, asyncio.timeout(10) as young:
            held = BodyMemory(max_bytes=100, max_owner_bytes=80)
            first, second = BodyLease("a", deadline=old), BodyLease("a", deadline=young)
            held.take(first, 40)
            held.take(second, 40)
            with pytest.raises(ApiError) as refused:
                held.take(first, 1)
            assert refused.value.status_code == 429
            # Who holds most gives up the youngest that still arrives.
            other = BodyLease("b")
            held.take(other, 30)
            assert (first.is_evicted, second.is_evicted) == (False, True)
            assert held.held_bytes == 70
            # Nobody takes more than others have.
            with pytest.raises(ApiError):
                held.take(other, 40)
            held.release(first)
            held.release(other)
            assert held.held_bytes == 0
            young.reschedule(None)

    run(scenario())


def test_bodies_that_do_not_end_keep_nobody_else_out(monkeypatch):
    monkeypatch.setattr(body_limit, "UNCOUNTED_BYTES", 100)
    monkeypatch.setattr("penstock.server.api.app.SHARED_BYTES", 500)
    go = asyncio.Event()

    async def stalled():
        yield b" " * 240
        await go.wait()
        yield b"{}"

    async def scenario():
        async with client(keys=KEYS, max_request_bytes=1000) as (http, _):

            def post(headers, content):
                headers = JSON | headers
                return asyncio.create_task(http.post(LARGE, content=content, headers=headers))

            slow = [post(ALICE, stalled()) for _ in range(12)]
            async with asyncio.timeout(10):
                while sum(task.done() for task in slow) < 5:
                    await asyncio.sleep(0.01)
            for who in (ALICE, BOB):
                beat = await http.post("/api/v1/session_heartbeat", json=BEAT, headers=who)
                assert beat.status_code == 200
            large = json.dumps({"forward_backward_input": {"data": []}}).encode().ljust(900)
            assert (await post(BOB, large)).status_code == 422
            go.set()
            assert {task.result().status_code for task in slow if await task} == {422, 429}

    run(scenario())


def test_a_body_that_arrives_too_slowly_is_broken_off(monkeypatch):
    monkeypatch.setattr(body_limit, "BODY_SECONDS", 0.05)

    async def slow():
        for _ in range(1000):
            yield b" "
            await asyncio.sleep(0.01)

    async def scenario():
        async with client() as (http, _):
            for path in (SMALL, LARGE):
                answer = await http.post(path, content=slow(), headers=JSON)
                assert answer.status_code == 408
                assert "did not arrive" in answer.json()["error"]

    run(scenario())


def test_works_that_wait_are_bounded_by_what_they_take(monkeypatch):
    monkeypatch.setattr(futures, "MAX_OWNER_PENDING_BYTES", 4000)

    async def scenario():
        async with client({requests.ForwardBackward: never}, keys=KEYS, headers=ALICE) as (http, _):
            # 16 bytes of each token.
            for status in (200, 200, 429):
                answer = await forward_backward(http, sample([1] * 100))
                assert answer.status_code == status, answer.text
            http.headers = BOB
            assert (await forward_backward(http, sample([1] * 100))).status_code == 200

    run(scenario())


def test_the_results_of_one_owner_cost_no_other_theirs():
    async def scenario():
        async with client(keys=KEYS, headers=BOB, max_result_bytes=3300) as (http, engine):
            # 800 bytes of each result.
            mine = (await forward_backward(http, sample([1] * 200))).json()["request_id"]
            assert (await retrieve(http, mine)).status_code == 200
            http.headers = ALICE
            names = []
            for _ in range(5):
                told = await forward_backward(http, sample([1] * 200))
                names.append(told.json()["request_id"])
                await retrieve(http, names[-1])
            codes = [(await retrieve(http, name)).status_code for name in names]
            assert codes == [410, 410, 200, 200, 200]
            http.headers = BOB
            assert (await retrieve(http, mine)).status_code == 200
            service = engine.app.state.service
            assert service.futures._result_bytes.total() == 4 * 800

    run(scenario())


def test_a_large_result_is_written_once_and_says_the_same(monkeypatch):
    async def scenario():
        async with client() as (http, engine):
            told = await forward_backward(
                http, sample([1, 2, 3]), model=MODEL, loss_fn="cross_entropy"
            )
            name = told.json()["request_id"]
            said = {}
            for _ in range(2):
                for accept in ("application/json", "application/x-protobuf"):
                    answer = await retrieve(http, name, headers={"Accept": accept})
                    assert answer.headers["content-type"] == accept
                    assert answer.content == said.setdefault(accept, answer.content)
                monkeypatch.setattr(response_bodies, "INLINE_ARRAYS", -1)
            again = await retrieve(http, name, headers={"Accept": "application/json"})
            assert again.content == said["application/json"]
            assert engine.app.state.service.codec_pool.jobs == 2
            monkeypatch.setattr(response_bodies, "INLINE_ARRAYS", 512)
            monkeypatch.setattr(response_bodies, "MAX_JSON_BYTES", 10)
            refused = (await retrieve(http, name)).json()
            assert refused["category"] == "user"
            assert "send fewer samples at once" in refused["error"]

    run(scenario())


def test_a_large_answer_is_handed_over_in_pieces():
    sent = []

    async def send(message):
        sent.append(message)

    body = np.arange(CHUNK_BYTES, dtype=np.int32).tobytes()
    asyncio.run(ChunkedResponse(body)({}, None, send))  # pyright: ignore[reportArgumentType]
    pieces = [message["body"] for message in sent[1:]]
    assert b"".join(pieces) == body
    assert {len(piece) for piece in pieces} == {CHUNK_BYTES}
    assert [message["more_body"] for message in sent[1:]] == [True, True, True, False]
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()


def test_a_log_takes_so_many_lines_of_a_kind_and_says_how_many_were_left_out():
    now = [0.0]
    limit = LogLimit(clock=lambda: now[0])

    def line(template, *args):
        record = logging.LogRecord("uvicorn", logging.WARNING, "", 0, template, args, None)
        return record.getMessage() if limit.filter(record) else None

    written = [line("bad request of %s", number) for number in range(1000)]
    assert sum(each is not None for each in written) == LINES
    assert line("another %s", 1) == "another 1"
    now[0] += SECONDS
    assert line("bad request of %s", 7) == (f"bad request of 7 ({1000 - LINES} more were left out)")
    assert line("bad request of %s", 8) == "bad request of 8"


def test_tensors_of_the_same_bytes_are_read_the_same_within_and_without_the_event_loop():
    """What a process of its own decodes is the ask itself, which reaches the engine as it is."""

    async def scenario():
        async with client() as (http, engine):
            request = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=3, loss_fn="cross_entropy")
            for _ in range(65):
                datum = request.data.add()
                datum.model_input.add().encoded_text.tokens = np.ones(2, "<i4").tobytes()
                target = datum.loss_fn_inputs["target_tokens"]
                target.dense, target.dtype = np.ones(2, "<i8").tobytes(), pb.DTYPE_INT64
            answer = await http.post(LARGE, content=request.SerializeToString(), headers=PROTO)
            assert answer.status_code == 200
            del request.data[60:]
            answer = await http.post(LARGE, content=request.SerializeToString(), headers=PROTO)
            assert answer.status_code == 200
            assert engine.app.state.service.codec_pool.jobs == 1
            first, second = engine.asks
            assert (first.seq, second.seq) == (3, 3)
            assert first.operation.data[:60] == second.operation.data
            assert (await retrieve(http, first.id)).status_code == 200

    run(scenario())
