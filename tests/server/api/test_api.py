"""The HTTP side: who is let in, how often, and what is refused."""

import asyncio
import json
import logging

import httpx
import pytest
import zstandard

from penstock.config.server.config import ServerConfig
from penstock.core.errors import ConfigError
from penstock.server.api.__main__ import serve
from penstock.server.api.middleware.auth import owner_of_key
from penstock.server.api.routes.unsupported import ABSENT
from penstock.server.launch.job import ServerJob
from penstock.server.protocol import codec, envelopes, requests, results
from tests.server.api.engine_of_a_table import MODEL, client, failure, heard_of, never
from tests.server.api.requests_of_clients import (
    ALICE,
    BOB,
    KEYS,
    STEP,
    retrieve,
    run,
    step,
)


def test_without_a_key_nobody_is_let_in():
    unlike = httpx.Headers([(b"X-API-Key", "Ünlike".encode())])
    tries = [
        ({}, 401),
        ({"X-API-Key": "tml-of-alic"}, 401),
        (unlike, 401),
        (ALICE, 200),
        (BOB, 200),
    ]

    async def scenario():
        async with client(keys=KEYS) as (http, engine):
            for headers, status in tries:
                answer = await http.get("/api/v1/sessions", headers=headers)
                assert answer.status_code == status
            assert len(engine.asks) == 2

    run(scenario())


def test_a_key_is_told_neither_to_the_engine_nor_to_the_log_nor_back(caplog):
    async def scenario():
        caplog.set_level(logging.DEBUG)
        async with client(keys=KEYS) as (http, engine):
            wrong = await http.get("/api/v1/sessions", headers={"X-API-Key": "tml-wrong"})
            await http.get("/api/v1/sessions", headers=ALICE)
            assert [ask.owner for ask in engine.asks] == [owner_of_key("tml-of-alice")]
            told = wrong.text + caplog.text + repr(engine.asks)
            assert "tml-" not in told

    run(scenario())


def test_owners_do_not_see_the_futures_of_others():
    async def scenario():
        async with client(keys=KEYS) as (http, _):
            name = await step(http, headers=ALICE)
            assert (await retrieve(http, name, headers=BOB)).status_code == 410
            cancelled = await http.post(
                "/api/v1/cancel_future", json={"request_id": name}, headers=BOB
            )
            assert cancelled.status_code == 410
            assert (await retrieve(http, name, headers=ALICE)).json()["metrics"]["grad_norm"] == 1.5

    run(scenario())


def test_a_page_of_another_name_is_not_let_in_where_there_are_no_keys():
    async def scenario():
        async with client() as (http, _):
            for host, status in (("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("evil.com", 421)):
                answer = await http.get("/api/v1/sessions", headers={"Host": host})
                assert answer.status_code == status, host

    run(scenario())


def test_off_loopback_nothing_is_served_without_keys(tmp_path):
    config = ServerConfig(model_path="builtin:tiny", output_dir=str(tmp_path))
    job = ServerJob(
        config=config,
        mode="auto",
        output_dir=tmp_path,
        config_path="builtin:tiny",
        weights=None,
        tokenizer="builtin:bytes",
        api_host="0.0.0.0",
        api_port=1,
        engine_address="tcp://127.0.0.1:1",
        workers_bind="tcp://127.0.0.1:1",
        workers_address="tcp://127.0.0.1:1",
    )
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0, which other machines reach"):
        asyncio.run(serve(job, keys=()))


def test_more_than_a_minutes_requests_are_told_to_come_later_but_not_heartbeats():
    async def scenario():
        async with client(requests_per_minute=2) as (http, _):
            codes = [(await http.get("/api/v1/sessions")).status_code for _ in range(2)]
            assert codes == [200, 200]
            late = await http.get("/api/v1/sessions")
            assert (late.status_code, late.headers["retry-after"]) == (429, "30")
            for _ in range(5):
                beat = await http.post("/api/v1/session_heartbeat", json={"session_id": "s"})
                assert beat.status_code == 200

    run(scenario())


def test_an_owner_waits_for_so_many_futures_and_no_more():
    async def scenario():
        async with client({requests.OptimStep: never}, keys=KEYS, max_pending_requests=2) as (
            http,
            engine,
        ):
            await step(http, headers=ALICE)
            await step(http, headers=ALICE)
            third = await http.post("/api/v1/optim_step", json=STEP, headers=ALICE)
            assert (third.status_code, third.json()["code"]) == (429, "busy")
            await step(http, headers=BOB)
            await engine.answer(engine.asks[0], failure("no"))
            await asyncio.sleep(0.05)
            await step(http, headers=ALICE)

    run(scenario())


def test_a_body_that_is_too_long_is_refused_packed_or_not():
    async def scenario():
        async with client(max_request_bytes=10_000) as (http, _):
            long = json.dumps({"session_id": "s", "x": "y" * 20_000}).encode()
            headers = {"Content-Type": "application/json"}
            told = await http.post("/api/v1/session_heartbeat", content=long, headers=headers)
            assert told.status_code == 413

            async def in_parts():
                for _ in range(30):
                    yield b" " * 1000

            untold = await http.post(
                "/api/v1/session_heartbeat", content=in_parts(), headers=headers
            )
            assert untold.status_code == 413
            bomb = zstandard.compress(b" " * 50_000_000)
            assert len(bomb) < 10_000
            packed = headers | {"Content-Encoding": "zstd"}
            unpacked = await http.post("/api/v1/session_heartbeat", content=bomb, headers=packed)
            assert unpacked.status_code == 413
            frames = zstandard.compress(b'{"session_') + zstandard.compress(b'id": "s"}')
            in_frames = await http.post("/api/v1/session_heartbeat", content=frames, headers=packed)
            assert in_frames.status_code == 200, in_frames.text
            no_zstd = await http.post("/api/v1/session_heartbeat", content=b"{}", headers=packed)
            assert no_zstd.status_code == 400
            gzip = headers | {"Content-Encoding": "gzip"}
            other = await http.post("/api/v1/session_heartbeat", content=b"{}", headers=gzip)
            assert other.status_code == 415

    run(scenario())


def test_the_loss_of_the_engine_fails_what_waits_at_once_and_what_comes_is_told_to_wait():
    async def scenario():
        async with client({requests.OptimStep: never}, poll_seconds=10.0) as (http, engine):
            name = await step(http)
            poll = asyncio.create_task(retrieve(http, name))
            await asyncio.sleep(0.05)
            ours = engine.end._other
            assert ours is not None
            engine.end.drop()
            async with asyncio.timeout(2):
                told = (await poll).json()
            assert (told["category"], told["code"]) == ("server", "lost")
            refused = await http.post("/api/v1/optim_step", json=STEP)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await http.get("/health")).json()["status"] == "unreachable"

            engine.end.join(ours)
            await heard_of(engine.app)
            assert len(set(engine.hellos)) == 2
            engine.table[requests.OptimStep] = lambda _: results.OptimStepResult(metrics={})
            assert (await retrieve(http, await step(http))).json()["metrics"] == {}

    run(scenario())


def test_health_says_whether_work_can_be_done():
    async def scenario():
        async with client() as (http, engine):
            seen = []
            for workers in ("ready", "starting", "down", "failed"):
                await engine.end.send(envelopes.Status(workers=workers, reason="why"))
                await asyncio.sleep(0.05)
                answer = await http.get("/health")
                seen.append((answer.status_code, answer.json()["status"]))
            assert seen == [(200, "healthy"), (503, "starting"), (503, "down"), (503, "failed")]
            late = await http.post("/api/v1/optim_step", json=STEP)
            assert (late.status_code, late.json()["code"]) == (503, "unavailable")
            assert (await http.get("/api/v1/healthz")).json() == {"status": "ok"}

    run(scenario())


def test_metrics_count_requests_by_their_route():
    async def scenario():
        async with client() as (http, _):
            await http.get("/api/v1/sessions/one")
            await http.get("/api/v1/sessions/two")
            text = (await http.get("/metrics")).text
            route = 'route="/api/v1/sessions/{session_id}"'
            assert f'penstock_requests_total{{method="GET",{route},status="200"}} 2.0' in text
            assert "penstock_workers_ready 1.0" in text

    run(scenario())


def refusing(code: codec.Code):
    return lambda _: failure("not so", code)


def test_what_the_engine_refuses_is_told_by_its_status():
    statuses: dict[codec.Code, int] = {
        "not_found": 404,
        "exists": 409,
        "storage_limit": 507,
        "gone": 410,
        "invalid": 400,
    }

    async def scenario():
        async with client() as (http, engine):
            for code, status in statuses.items():
                engine.table[requests.DeleteCheckpoint] = refusing(code)
                answer = await http.delete(f"/api/v1/training_runs/{MODEL}/checkpoints/weights/a")
                assert answer.status_code == status
                assert answer.json() == {"error": "not so", "category": "user", "code": code}

    run(scenario())


def test_a_session_that_has_ended_is_finished_and_one_that_is_not_there_is_not():
    statuses: dict[codec.Code, int] = {"gone": 204, "not_found": 404}

    async def scenario():
        async with client() as (http, engine):
            for code, status in statuses.items():
                engine.table[requests.EndSession] = refusing(code)
                assert (await http.post("/api/v1/sessions/s/finish")).status_code == status

    run(scenario())


NO_BODIES = [
    (b"", "application/json", 422),
    (b"null", "application/json", 422),
    (b"[]", "application/json", 422),
    (b'"\\ud800"', "application/json", 400),
    (b'{"model_id": "\\udfff"}', "application/json", 400),
    (b'{"model_id": NaN}', "application/json", 400),
    (b"[" * 10_000, "application/json", 400),
    (b"\xff\xfe", "application/json", 400),
    (b'{"model_id": "a/../b"}', "application/json", 422),
    (b'{"model_id": 1e999}', "application/json", 422),
    (b'{"model_id": "a", "seq_id": 1' + b"0" * 400 + b"}", "application/json", 422),
    (b'{"model_id": "a", "gradient_clip": 1e999}', "application/json", 422),
    (b'{"model_id": "a", "stray": 1}', "application/json", 422),
    (b"{}", "text/plain", 415),
    (b"model_id=a", "application/x-www-form-urlencoded", 415),
    (b"{}", "", 415),
    (b"\x00" * 100, "application/x-protobuf", 422),
]


def test_a_body_that_is_none_is_the_clients_fault():
    async def scenario():
        async with client() as (http, _):
            for body, kind, status in NO_BODIES:
                headers = {"Content-Type": kind} if kind else {}
                answer = await http.post("/api/v1/optim_step", content=body, headers=headers)
                assert (answer.status_code, answer.json()["category"]) == (status, "user"), body
                path = "/api/v1/forward_backward"
                answer = await http.post(path, content=body, headers=headers)
                assert 400 <= answer.status_code < 500, body
                assert answer.json()["category"] == "user"

    run(scenario())


def test_a_path_that_leads_elsewhere_is_none():
    paths = ["", "tinker://", "tinker://a/weights/../../x", "file:///etc/passwd", "a/weights/b/c"]

    async def scenario():
        async with client() as (http, engine):
            for path in paths:
                answer = await http.post("/api/v1/load_weights", json={"path": path})
                assert answer.status_code in (400, 422), path
            assert engine.works(requests.LoadState) == []

    run(scenario())


def test_what_is_not_offered_says_why():
    named = {"session_id": "s", "model_id": MODEL, "checkpoint": "weights/a"}

    async def scenario():
        async with client() as (http, engine):
            for path, (methods, reason) in ABSENT.items():
                written = path.replace(":path}", "}").format(**named)
                for method in methods.split():
                    answer = await http.request(method, written)
                    assert answer.status_code == 404, path
                    assert answer.json()["error"] == f"{written} is not offered here: {reason}"
            for method, path in (("GET", "/api/v1/nothing/of/the/kind"), ("GET", "/sleep")):
                answer = await http.request(method, path)
                assert answer.status_code in (404, 405), path
                assert answer.json()["code"] == "not_found"
            assert engine.asks == []

    run(scenario())


def test_a_question_that_is_not_known_is_not_passed_over():
    async def scenario():
        async with client() as (http, _):
            asked = await http.get("/api/v1/training_runs?project_id=p")
            assert asked.status_code == 400
            assert "project_id" in asked.json()["error"]

    run(scenario())
