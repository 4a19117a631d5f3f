"""Heartbeats are answered whatever the engine is at, and before requests that came earlier."""

import asyncio

from penstock.server.protocol import envelopes, results
from penstock.server.protocol import requests as works
from tests.server.api.engine_of_a_table import client, failure
from tests.server.api.requests_of_clients import run

BEAT = "/api/v1/session_heartbeat"


async def beat(http, session="s"):
    return (await http.post(BEAT, json={"session_id": session})).status_code


def answers(*told):
    """An engine that answers its first words about sessions so, and none after them."""
    left = list(told)
    return {works.Heartbeat: lambda _: left.pop(0) if left else None}


def test_a_session_that_is_known_lives_while_the_engine_says_nothing():
    async def scenario():
        async with client(answers(results.HeartbeatResult())) as (http, engine):
            assert [await beat(http) for _ in range(5)] == [200] * 5
            assert engine.works(works.Heartbeat) == [works.Heartbeat(sessions=("s",))]

    run(scenario())


def test_a_session_that_was_just_made_is_known():
    async def scenario():
        async with client(answers()) as (http, _):
            made = await http.post("/api/v1/create_session", json={"session_id": "new"})
            assert await beat(http, made.json()["session_id"]) == 200

    run(scenario())


def test_the_engine_is_told_of_all_that_live_together():
    async def scenario():
        engine_says = answers(*[results.HeartbeatResult()] * 9)
        async with client(engine_says, idle_session_timeout=0.4) as (http, engine):
            for _ in range(3):
                assert [await beat(http, session) for session in ("s", "t", "u")] == [200] * 3
            await asyncio.sleep(0.15)
            *first, together = engine.works(works.Heartbeat)
            assert [work.sessions for work in first] == [("s",), ("t",), ("u",)]
            assert sorted(together.sessions) == ["s", "t", "u"]

    run(scenario())


def test_a_session_that_is_gone_is_told_so_once_the_engine_says_it():
    async def scenario():
        gone = results.HeartbeatResult(sessions=("s",))
        async with client(
            answers(results.HeartbeatResult(), gone, gone), idle_session_timeout=0.2
        ) as (
            http,
            _,
        ):
            assert await beat(http) == 200
            assert await beat(http) == 200
            await asyncio.sleep(0.15)
            assert await beat(http) == 410

    run(scenario())


def test_a_word_that_the_engine_refused_is_said_again():
    async def scenario():
        busy, gone = failure("not now", "busy"), results.HeartbeatResult(sessions=("s",))
        said = answers(results.HeartbeatResult(), busy, gone, gone)
        async with client(said, idle_session_timeout=0.2) as (http, _):
            assert await beat(http) == 200
            assert await beat(http) == 200
            # It is said again after a while; `run` ends a scenario that does not.
            while (status := await beat(http)) == 200:
                await asyncio.sleep(0.05)
            assert status == 410

    run(scenario())


def test_a_session_that_its_client_ends_is_asked_for_again():
    async def scenario():
        gone = results.HeartbeatResult(sessions=("s",))
        async with client(answers(results.HeartbeatResult(), gone)) as (http, _):
            assert await beat(http) == 200
            assert (await http.post("/api/v1/sessions/s/finish")).status_code == 204
            assert await beat(http) == 410

    run(scenario())


def test_nobody_lives_while_there_is_no_engine():
    async def scenario():
        async with client(answers(results.HeartbeatResult())) as (http, engine):
            assert await beat(http) == 200
            engine.app.state.service.scheduler.status = None
            assert await beat(http) == 503
            engine.app.state.service.scheduler.status = envelopes.Status(workers="ready")
            assert await beat(http) == 200

    run(scenario())


def test_a_heartbeat_is_served_before_a_burst_of_requests_that_came_before_it():
    async def scenario():
        async with client() as (http, _):
            assert await beat(http) == 200
            ended = []

            async def end(name, request):
                await request
                ended.append(name)

            async with asyncio.TaskGroup() as burst:
                for _ in range(200):
                    burst.create_task(end("page", http.get("/")))
                burst.create_task(end("beat", beat(http)))
            assert ended.index("beat") < 20
            assert len(ended) == 201

    run(scenario())


def test_who_gives_up_waiting_takes_nobodys_turn():
    async def scenario():
        async with client() as (http, _):
            requests = [asyncio.create_task(http.get("/")) for _ in range(50)]
            await asyncio.sleep(0)
            for request in requests[::2]:
                request.cancel()
            answers = [*await asyncio.gather(*requests[1::2]), await http.get("/")]
            assert {answer.status_code for answer in answers} == {200}

    run(scenario())
