"""A server that is stopped ends what is under way and saves what is not saved; the next goes on."""

import asyncio
import logging
import time

import pytest

from penstock.server.protocol.requests import (
    CreateModel,
    CreateSession,
    GetSession,
    ListCheckpoints,
    OptimStep,
    SaveState,
)
from penstock.server.protocol.types import LoraConfig
from penstock.server.protocol.worker_commands import (
    ForwardBackwardCommand,
    LoadCheckpointCommand,
    SaveCheckpointCommand,
)
from penstock.server.scheduler import shutdown
from tests.server.engine_house import a_pass, a_step, house


async def learn(client, length, first, model="m"):
    await client.do(a_pass(model, length), first)
    return (await client.do(a_step(model), first + 1)).metrics


def lines(caplog, word):
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


def orders(here, kind):
    return [order for order in here.workers.orders if isinstance(order, kind)]


def test_what_was_learnt_is_saved_and_the_next_start_goes_on_from_there(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    async def check():
        async with house(tmp_path) as here:
            await here.client.begin("m")
            await here.client.begin("n")
            assert (await learn(here.client, 5, 1))["learnt"] == 5
            await here.stop_engine()
            assert [order.model for order in orders(here, SaveCheckpointCommand)] == ["m", "n", "m"]
            [line] = lines(caplog, "is saved at step")
            assert line.startswith("model m is saved at step 1: m/weights/checkpoint-")
            await here.start_again()
            assert (await here.client.do(GetSession(session="s"))).models == ("m", "n")
            assert await learn(here.client, 1, 3) == {"step": 2, "learnt": 6}
            assert await learn(here.client, 1, 1, "n") == {"step": 1, "learnt": 1}

    asyncio.run(check())


def test_a_checkpoint_that_was_moved_away_keeps_no_other_model_from_being_saved(tmp_path):
    async def check():
        async with house(tmp_path / "out") as here:
            await here.client.begin("m")
            await here.client.begin("n")
            await learn(here.client, 5, 1, "n")
            moved = tmp_path / "moved"
            (tmp_path / "out/weights/m/000000").rename(moved)
            (tmp_path / "out/weights/m/000000").symlink_to(moved)
            await here.stop_engine()
            assert {order.model for order in orders(here, SaveCheckpointCommand)[2:]} == {"m", "n"}
            await here.start_again()
            assert await learn(here.client, 1, 3, "n") == {"step": 2, "learnt": 6}

    asyncio.run(check())


def test_what_another_version_left_behind_keeps_no_engine_from_starting(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await learn(here.client, 5, 1)
            await here.stop_engine()
            (tmp_path / "server" / "left.msgpack").write_bytes(b"\x81\xa5other\x01\xc1")
            endpoint = '[{"host": "127.0.0.1", "port": 1}]'
            (tmp_path / "server" / "endpoints.json").write_text(endpoint)
            await here.start_again()
            assert await learn(here.client, 1, 3) == {"step": 2, "learnt": 6}

    asyncio.run(check())


def test_what_is_saved_already_is_not_saved_again(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await learn(here.client, 5, 1)
            await here.client.do(SaveState(model="m", name="mine"), 3)
            saved = len(orders(here, SaveCheckpointCommand))
            await here.stop_engine()
            assert len(orders(here, SaveCheckpointCommand)) == saved
            await here.start_again()
            assert await learn(here.client, 1, 4) == {"step": 2, "learnt": 6}

    asyncio.run(check())


def test_passes_whose_step_waits_are_seen_through_and_nothing_else_is_begun(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin("m")
            await here.client.begin("n")
            here.workers.slowly = 0.05
            under_way = await here.client.ask(a_pass("m", 2), 1)
            others = [await here.client.ask(a_pass("n"), 1), await here.client.ask(a_step("n"), 2)]
            second = await here.client.ask(a_pass("m", 3), 2)
            step = await here.client.ask(a_step("m"), 3)
            beyond = await here.client.ask(a_pass("m"), 4)
            while not orders(here, ForwardBackwardCommand):
                await asyncio.sleep(0.01)
            await here.stop_engine()
            assert [order.model for order in orders(here, ForwardBackwardCommand)] == ["m", "m"]
            assert (await under_way).metrics["loss:sum"] == 2
            assert (await second).metrics["loss:sum"] == 3
            assert (await step).metrics == {"step": 1, "learnt": 5}
            # Who waits for these is not told that they failed, and asks again.
            assert not any(each.done() for each in [*others, beyond])
            await here.start_again()
            assert await learn(here.client, 1, 4) == {"step": 2, "learnt": 6}
            assert await learn(here.client, 4, 1, "n") == {"step": 1, "learnt": 4}

    asyncio.run(check())


def test_a_step_that_is_on_its_way_is_waited_for(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await here.client.do(a_pass("m", 5), 1)
            here.engine.stop()
            await asyncio.sleep(0.1)
            assert (await here.client.do(a_step(), 2)).metrics["learnt"] == 5
            await here.stop_engine()
            await here.start_again()
            assert await learn(here.client, 1, 3) == {"step": 2, "learnt": 6}

    asyncio.run(check())


def test_what_was_done_is_answered_after_a_new_start_and_not_done_again(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            passed = await here.client.do(a_pass("m", 5), 1)
            stepped = await here.client.do(a_step(), 2)
            wrong = await here.client.fails(a_pass("m", 33), 3)
            await here.stop_engine()
            await here.start_again()
            assert await here.client.do(a_pass("m", 5), 1) == passed
            assert await here.client.do(a_step(), 2) == stepped
            assert (await here.client.fails(a_pass("m", 33), 3)).error == wrong.error
            assert orders(here, ForwardBackwardCommand) == orders(here, OptimStep) == []
            assert await learn(here.client, 1, 4) == {"step": 2, "learnt": 6}
            # What was left is told to the next process alone.
            await here.kill_engine()
            await here.start_again()
            assert not (tmp_path / "server" / "left.msgpack").exists()

    asyncio.run(check())


def test_a_model_that_was_made_just_before_is_not_said_to_be_anothers(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.do(CreateSession(session="s"))
            new = CreateModel(session="s", model="m", base_model=None, lora=LoraConfig(rank=8))
            made = await here.client.do(new)
            await here.stop_engine()
            await here.start_again()
            assert await here.client.do(new) == made

    asyncio.run(check())


def test_gradients_that_no_step_took_are_told_to_be_lost(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await learn(here.client, 5, 1)
            await here.client.do(a_pass("m", 7), 3)
            await here.stop_engine()
            assert "gradients since then are not" in lines(caplog, "is saved at step")[-1]
            await here.start_again()
            failed = await here.client.fails(a_step(), 4)
            assert (failed.category, failed.code) == ("server", "lost")
            assert "step 1" in failed.error
            assert await learn(here.client, 1, 4) == {"step": 2, "learnt": 6}

    asyncio.run(check())


def test_gradients_that_were_refused_are_not_told_to_be_lost(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            here.workers.fails = lambda order: isinstance(order, OptimStep)
            here.workers.refusal = "not_finite"
            await here.client.do(a_pass("m", 5), 1)
            assert (await here.client.fails(a_step(), 2)).code == "not_finite"
            await here.stop_engine()
            assert "gradients" not in lines(caplog, "is saved at step")[-1]
            await here.start_again()
            assert await learn(here.client, 1, 3) == {"step": 1, "learnt": 1}

    asyncio.run(check())


def test_what_could_not_be_saved_in_time_is_said_and_was_lost(tmp_path, caplog):
    async def check():
        async with house(tmp_path, stop_timeout=0.3) as here:
            for model in ("m", "n", "saved"):
                await here.client.begin(model)
            for model in ("m", "n"):
                await learn(here.client, 5, 1, model)
            here.workers.slowly = 60.0
            began = time.monotonic()
            await here.stop_engine()
            assert time.monotonic() - began < 5
            assert sorted(lines(caplog, "is not saved")) == [
                f"model {model} is not saved since step 0: stop_timeout expired; it is 0.3 s"
                for model in ("m", "n")
            ]
            await here.start_again()
            assert (await here.client.fails(a_pass(), 3)).code == "lost"
            assert await learn(here.client, 1, 3) == {"step": 1, "learnt": 1}

    asyncio.run(check())


def test_a_model_for_which_there_is_no_room_does_not_keep_others_from_being_saved(tmp_path, caplog):
    async def check():
        async with house(tmp_path) as here:
            for model in ("m", "n"):
                await here.client.begin(model)
                await learn(here.client, 5, 1, model)
            here.workers.fails = lambda order: (
                isinstance(order, SaveCheckpointCommand) and order.model == "n"
            )
            await here.stop_engine()
            assert lines(caplog, "is not saved") == [
                "model n is not saved since step 0: this order is refused"
            ]
            await here.start_again()
            assert await learn(here.client, 1, 3) == {"step": 2, "learnt": 6}

    asyncio.run(check())


def test_workers_that_die_over_a_save_are_not_waited_for(tmp_path, caplog):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await learn(here.client, 5, 1)
            here.workers.dies = lambda order: (
                "before" if isinstance(order, SaveCheckpointCommand) else None
            )
            began = time.monotonic()
            await here.stop_engine()
            assert time.monotonic() - began < 5
            [line] = lines(caplog, "is not saved")
            assert "the workers were lost" in line

    asyncio.run(check())


@pytest.mark.parametrize("ours", [True, False])
def test_workers_leave_with_an_engine_that_is_their_own_alone(tmp_path, ours):
    async def check():
        async with house(tmp_path, ends_workers=ours) as here:
            await here.client.begin()
            await learn(here.client, 5, 1)
            await here.stop_engine()
            assert here.workers.has_left == ours
            if not ours:
                here.start_engine()
                here.meet()
                await here.client.workers("ready")
                assert orders(here, LoadCheckpointCommand) == []
                assert await learn(here.client, 1, 3) == {"step": 2, "learnt": 6}

    asyncio.run(check())


def test_workers_stay_where_the_api_does(tmp_path, monkeypatch):
    monkeypatch.setattr(shutdown, "API_SECONDS", 0.2)

    async def check():
        async with house(tmp_path, ends_workers=True) as here:
            await here.client.hello("api")
            await here.client.begin()
            await learn(here.client, 5, 1)
            here.engine.stop()
            # It is told what can be told without workers until the end.
            assert len((await here.client.do(ListCheckpoints())).checkpoints) >= 1
            await asyncio.wait_for(here.engine_tasks[0], 20)
            assert not here.workers.has_left

    asyncio.run(check())
