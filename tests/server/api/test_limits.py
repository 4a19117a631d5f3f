"""How many sessions and models may be open, and that refused ones cost nothing."""

import asyncio

import pytest

from penstock.server.protocol.requests import (
    CreateSession,
    EndSession,
    GetSession,
    SaveSamplerWeights,
    UnloadModel,
)
from penstock.server.protocol.worker_commands import ExportCommand
from penstock.server.scheduler import expiry
from tests.server.engine_house import a_pass, house
from tests.server.scheduler.test_sessions import create, soon


def test_no_more_sessions_are_open_than_may_be(tmp_path):
    async def check():
        async with house(tmp_path, max_sessions=3, max_owner_sessions=2) as here:
            for name in ("a", "b", "a"):
                await here.client.do(CreateSession(session=name))
            refused = await here.client.fails(CreateSession(session="c"))
            assert (refused.category, refused.code) == ("user", "busy")
            assert "2 sessions of yours are open, and max_owner_sessions is 2" in refused.error
            await here.client.do(CreateSession(session="x"), owner="two")
            refused = await here.client.fails(CreateSession(), owner="two")
            assert "3 sessions are open, and max_sessions is 3" in refused.error
            await here.client.do(EndSession(session="a"))
            await here.client.do(CreateSession(session="c"))

    asyncio.run(check())


def test_sessions_that_ended_are_not_known_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(expiry, "ENDED_SESSION_SECONDS", 0.5)

    def files():
        return len(list((tmp_path / "server" / "sessions").iterdir()))

    async def check():
        async with house(tmp_path, idle_session_timeout=5.0) as here:
            await here.client.do(CreateSession(session="lives"))
            await here.client.do(CreateSession(session="ended"))
            await here.client.do(EndSession(session="ended"))
            assert (await here.client.fails(GetSession(session="ended"))).code == "gone"
            assert files() == 2
            await soon(lambda: files() == 1)
            assert (await here.client.fails(GetSession(session="ended"))).code == "not_found"
            await here.client.do(GetSession(session="lives"))

    asyncio.run(check())


@pytest.mark.slow
def test_what_is_saved_for_a_sampler_goes_with_a_session_that_ends_meanwhile(tmp_path):
    async def check():
        async with house(tmp_path, idle_session_timeout=2.0) as here:
            await here.client.begin()
            here.workers.slowly = 0.1
            save = SaveSamplerWeights(model="m", session="s", number=1, keep=False)
            saving = await here.client.ask(save)
            await soon(lambda: isinstance(here.workers.orders[-1], ExportCommand))
            await here.client.do(EndSession(session="s"))
            assert (await saving).code == "gone"
            await soon(lambda: not any((tmp_path / "sampler_weights/m").iterdir()))

    asyncio.run(check())


@pytest.mark.slow
def test_no_more_models_are_open_than_may_be(tmp_path):
    async def check():
        async with house(tmp_path, max_models=3, max_owner_models=2) as here:
            await here.client.do(CreateSession(session="s"))
            await here.client.do(CreateSession(session="t"), owner="two")
            here.workers.slowly = 0.05
            asked = [await here.client.ask(create(name)) for name in ("a", "b", "c")]
            refused = await asked[2]
            # Those that are still to be made count.
            assert not asked[0].done()
            assert (refused.category, refused.code) == ("user", "busy")
            assert "2 models of yours are open, and max_owner_models is 2" in refused.error
            await here.client.do(create("x", session="t"), owner="two")
            refused = await here.client.fails(create("y", session="t"), owner="two")
            assert "3 models are open, and max_models is 3" in refused.error
            assert sorted(here.workers.models) == ["a", "b", "x"]
            await here.client.do(UnloadModel(model="a"))
            await here.client.do(create("c"))

    asyncio.run(check())


def test_a_model_that_something_waits_to_be_done_with_is_not_one_that_nothing_was(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.do(CreateSession(session="s"))
            here.workers.slowly = 0.05
            made = await here.client.ask(create("m"))
            passed = await here.client.ask(a_pass(), 1)
            await made
            assert not passed.done()
            assert (await here.client.fails(create("m"))).code == "exists"
            await passed

    asyncio.run(check())
