"""Workers die in the midst of each kind of command, and engines do: who waits is told at once,
models are put back to their last checkpoint, and work goes on."""

import asyncio
import time

import pytest

from penstock.server.protocol.envelopes import Failure
from penstock.server.protocol.requests import (
    AddEndpoint,
    CreateModel,
    DeleteCheckpoint,
    GetModel,
    ListCheckpoints,
    LoadState,
    OptimStep,
    Sample,
    SaveSamplerWeights,
    SaveState,
    SyncWeights,
    UnloadModel,
    ZeroGrad,
)
from penstock.server.protocol.types import Array, Endpoint, LoraConfig
from penstock.server.protocol.worker_commands import (
    CreateModelCommand,
    ExportCommand,
    ForwardBackwardCommand,
    GenerateCommand,
    LoadCheckpointCommand,
    SaveCheckpointCommand,
    UnloadModelCommand,
    WeightSyncCommand,
)
from tests.server.engine_house import a_pass, a_step, house, sampling
from tests.server.scheduler.test_sessions import soon

AT_ONCE = 1.0
"""Seconds."""

WORKS = {
    ForwardBackwardCommand: a_pass(),
    OptimStep: a_step(),
    ZeroGrad: ZeroGrad(model="m"),
    SaveCheckpointCommand: SaveState(model="m", name="new"),
    LoadCheckpointCommand: LoadState(model="m", path="m/weights/old"),
    ExportCommand: SaveSamplerWeights(model="m", name="new"),
    UnloadModelCommand: UnloadModel(model="m", save=False),
    CreateModelCommand: CreateModel(
        session="s", model="n", base_model=None, lora=LoraConfig(rank=2)
    ),
    GenerateCommand: Sample(prompt=Array.of([1], "int32"), sampling=sampling()),
    WeightSyncCommand: SyncWeights(model="m"),
}
"""What is asked for where the workers are to die of an order."""


async def learn(client, length, first):
    await client.do(a_pass("m", length), first)
    return (await client.do(a_step(), first + 1)).metrics["learnt"]


async def trained(here):
    """A model that has learnt 5 at its checkpoint, and 7 by now."""
    await here.client.begin()
    assert await learn(here.client, 5, 1) == 5
    await here.client.do(SaveState(model="m", name="old"), 3)
    assert await learn(here.client, 2, 4) == 7
    await here.client.do(AddEndpoint(endpoint=Endpoint(host="localhost", port=1)))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", WORKS, ids=lambda kind: kind.__name__)
def test_workers_that_die_over_a_command_are_told_of_at_once_and_the_model_put_back(
    tmp_path, kind, moment
):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            here.workers.dies = lambda order: moment if isinstance(order, kind) else None
            began = time.monotonic()
            lost = await here.client.fails(WORKS[kind])
            assert time.monotonic() - began < AT_ONCE
            assert (lost.category, lost.code) == ("server", "lost")
            await here.client.workers("down")
            here.start_workers()
            await here.client.workers("ready")
            assert (await here.client.do(GetModel(model="m"))).info.corrupted
            first = await here.client.fails(a_pass("m", 1), 6)
            assert (first.category, first.code) == ("server", "lost")
            assert "step 1 (m/weights/old)" in first.error
            assert not (await here.client.do(GetModel(model="m"))).info.corrupted
            # With or without the number that failed.
            assert await learn(here.client, 1, 6) == 6
            names = [c.name for c in (await here.client.do(ListCheckpoints())).checkpoints]
            assert names == ["weights/000000", "weights/old"]
            await here.client.do(SaveState(model="m", name="new"))
            await here.client.do(SaveSamplerWeights(model="m", name="new"))

    asyncio.run(check())


def test_nothing_is_said_to_be_lost_where_nothing_was(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            assert await learn(here.client, 5, 1) == 5
            await here.client.do(SaveState(model="m", name="old"), 3)
            here.workers.end.drop()
            here.start_workers()
            await here.client.workers("ready")
            assert await learn(here.client, 1, 4) == 6

    asyncio.run(check())


def test_what_was_lost_is_told_however_often_the_workers_died_since(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            for _ in range(2):
                here.workers.end.drop()
                await here.client.workers("down")
                here.start_workers()
                await here.client.workers("ready")
                assert (await here.client.do(GetModel(model="m"))).info.corrupted
            assert (await here.client.fails(a_pass("m", 1), 6)).code == "lost"

    asyncio.run(check())


def test_a_step_does_not_go_without_the_gradients_that_were_lost(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            await here.client.do(a_pass("m", 3), 6)
            here.workers.end.drop()
            here.start_workers()
            await here.client.workers("ready")
            for _ in range(2):
                assert (await here.client.fails(a_step(), 7)).code == "lost"
            assert await learn(here.client, 1, 7) == 6

    asyncio.run(check())


def test_what_waits_is_done_by_the_next_workers(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin("m")
            await here.client.begin("n")
            here.workers.slowly = 0.05
            here.workers.dies = lambda order: (
                "before" if isinstance(order, ForwardBackwardCommand) else None
            )
            under_way = await here.client.ask(a_pass("m"), 1)
            waits = await here.client.ask(a_pass("n", 3), 1)
            drawn = await here.client.ask(WORKS[GenerateCommand])
            assert (await under_way).code == "lost"
            await asyncio.sleep(0.1)
            assert not waits.done()
            assert not drawn.done()
            here.start_workers()
            assert (await waits).metrics["loss:sum"] == 3
            assert len((await drawn).sequences) == 1
            # Nothing had been learnt, so nothing was lost but the pass itself.
            await here.client.do(a_pass("m"), 1)

    asyncio.run(check())


def test_a_model_without_a_checkpoint_begins_anew_as_it_was_made(tmp_path):
    async def check():
        async with house(tmp_path, skip_initial_checkpoint=True) as here:
            await here.client.begin("m", rank=4)
            assert await learn(here.client, 5, 1) == 5
            here.workers.end.drop()
            here.start_workers()
            await here.client.workers("ready")
            assert "step 0 (its beginning)" in (await here.client.fails(a_pass(), 3)).error
            assert here.workers.models["m"].lora == LoraConfig(rank=4)
            assert await learn(here.client, 1, 3) == 1

    asyncio.run(check())


def test_loading_a_checkpoint_asks_for_nothing_that_was_lost(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            here.workers.end.drop()
            here.start_workers()
            await here.client.workers("ready")
            await here.client.do(LoadState(model="m", path="m/weights/000000"), 6)
            assert await learn(here.client, 1, 7) == 1

    asyncio.run(check())


@pytest.mark.parametrize("between", ["nothing", "a work"])
def test_workers_that_die_again_and_again_are_given_up_unless_they_do_a_work_between(
    tmp_path, between
):
    async def check():
        async with house(tmp_path, worker_max_restarts=2) as here:
            await here.client.begin()
            last = "failed" if between == "nothing" else "down"
            for state in ("down", "down", last):
                here.workers.dies = lambda order: (
                    "before" if isinstance(order, ForwardBackwardCommand) else None
                )
                if between == "a work":
                    await here.client.do(WORKS[GenerateCommand])
                assert (await here.client.fails(a_pass())).code == "lost"
                await here.client.workers(state)
                if state != "failed":
                    here.start_workers()
                    await here.client.workers("ready")

    asyncio.run(check())


def test_workers_that_never_do_a_work_are_given_up(tmp_path):
    async def check():
        async with house(tmp_path, worker_max_restarts=2) as here:
            await here.client.begin()
            for state in ("down", "down", "failed"):
                here.workers.end.drop()
                await here.client.workers(state)
                waits = await here.client.ask(a_pass())
                if state == "down":
                    here.start_workers(
                        lambda order: "before" if isinstance(order, CreateModelCommand) else None
                    )
                    await here.client.workers("starting" if waits is None else "down")
            failed = await waits
            assert (failed.category, failed.code) == ("server", "unavailable")
            assert "worker_max_restarts is 2" in failed.error
            assert (await here.client.fails(a_step())).code == "unavailable"
            here.start_workers()
            await here.client.workers("ready")
            await here.client.do(a_pass())

    asyncio.run(check())


def test_where_nobody_starts_workers_any_more_nobody_waits_for_them(tmp_path):
    async def check():
        async with house(tmp_path, given_up=tmp_path / "given-up") as here:
            await here.client.begin()
            here.workers.end.drop()
            await here.client.workers("down")
            waits = await here.client.ask(a_pass())
            await asyncio.sleep(0.1)
            assert not waits.done()
            (tmp_path / "given-up").touch()
            assert (await waits).code == "unavailable"
            assert "not restarted" in here.client.statuses[-1].reason

    asyncio.run(check())


def test_workers_that_failed_and_end_are_asked_for_nothing_and_counted_once(tmp_path):
    async def check():
        async with house(tmp_path, worker_max_restarts=1) as here:
            await here.client.begin("m")
            await here.client.begin("n")
            here.workers.breaks = lambda order: (
                isinstance(order, ForwardBackwardCommand) and order.model == "m"
            )
            here.workers.slowly = 0.02
            breaks = await here.client.ask(a_pass("m"), 1)
            waits = await here.client.ask(a_pass("n"), 1)
            step = await here.client.ask(a_step("m"), 2)
            assert (await breaks).code == "internal"
            await asyncio.sleep(0.2)
            assert here.client.statuses[-1].workers == "down"
            assert not waits.done()
            here.start_workers()
            await waits
            # The gradients that it was to take are gone with the pass.
            assert (await step).code == "lost"

    asyncio.run(check())


def test_workers_that_are_silent_are_taken_for_lost(tmp_path):
    async def check():
        async with house(tmp_path, worker_connection_timeout=0.3) as here:
            await here.client.begin()
            here.workers.slowly = 60.0
            under_way = await here.client.ask(a_pass())
            here.workers.is_silent = True
            assert (await under_way).code == "lost"
            assert "nothing was heard of them for 0.3 s" in here.client.statuses[-1].reason

    asyncio.run(check())


def test_an_operation_that_takes_too_long_is_given_up(tmp_path):
    async def check():
        async with house(tmp_path, operation_timeout=0.2) as here:
            await here.client.begin()
            here.workers.slowly = 60.0
            failed = await here.client.fails(a_pass())
            assert failed.code == "lost"
            assert "operation_timeout (0.2 s)" in failed.error

    asyncio.run(check())


def test_requests_that_run_together_have_time_as_long_as_any_of_them_ends(tmp_path):
    async def check():
        async with house(tmp_path, operation_timeout=2.0) as here:
            await here.client.begin()
            here.workers.slowly = 0.5
            asked = [await here.client.ask(WORKS[GenerateCommand]) for _ in range(5)]
            ended = [await future for future in asked]
            assert [len(result.sequences) for result in ended] == [1] * 5

    asyncio.run(check())


def test_an_engine_that_dies_over_a_pass_does_not_count_it_twice(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            here.workers.slowly = 0.1
            await here.client.ask(a_pass("m", 3), 6)
            await asyncio.sleep(0.05)
            await here.kill_engine()
            await asyncio.sleep(0.1)
            here.workers.slowly = 0.0
            here.start_engine()
            here.meet()
            await here.client.workers("ready")
            failed = await here.client.fails(a_pass("m", 3), 6)
            assert failed.code == "lost"
            assert await learn(here.client, 3, 6) == 8

    asyncio.run(check())


def test_an_engine_and_workers_that_die_together_go_on_from_the_checkpoint(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            await here.kill_engine()
            here.start_engine()
            here.start_workers()
            await here.client.workers("ready")
            assert (await here.client.fails(a_step(), 6)).code == "lost"
            assert await learn(here.client, 1, 6) == 6

    asyncio.run(check())


def test_a_model_whose_checkpoint_was_deleted_is_put_back_to_the_next_best(tmp_path):
    async def check():
        async with house(tmp_path, skip_initial_checkpoint=True) as here:
            await here.client.begin()
            await learn(here.client, 5, 1)
            await here.client.do(SaveState(model="m", name="one"), 3)
            await learn(here.client, 5, 4)
            await here.client.do(SaveState(model="m", name="two"), 6)
            await here.kill_engine()
            for file in (tmp_path / "weights/m/two").iterdir():
                file.unlink()
            (tmp_path / "weights/m/two").rmdir()
            here.start_engine()
            here.start_workers()
            await here.client.workers("ready")
            failed = await here.client.fails(a_pass(), 7)
            assert isinstance(failed, Failure)
            assert "step 1 (m/weights/one)" in failed.error
            assert await learn(here.client, 1, 7) == 6

    asyncio.run(check())


def test_a_model_that_was_made_anew_is_not_put_back_to_a_checkpoint_of_another_rank(tmp_path):
    async def check():
        async with house(tmp_path, skip_initial_checkpoint=True) as here:
            await here.client.begin("m", rank=4)
            await learn(here.client, 5, 1)
            await here.client.do(SaveState(model="m", name="one"), 3)
            await here.client.do(UnloadModel(model="m", save=False), 4)
            await here.client.begin("m", rank=2)
            await learn(here.client, 3, 1)
            await here.client.do(SaveState(model="m", name="two"), 3)
            await here.client.do(DeleteCheckpoint(model="m", name="weights/two"))
            here.workers.end.drop()
            here.start_workers()
            await here.client.workers("ready")
            assert "step 0 (its beginning)" in (await here.client.fails(a_pass(), 4)).error
            assert here.workers.models["m"].lora == LoraConfig(rank=2)
            assert await learn(here.client, 1, 4) == 1

    asyncio.run(check())


def test_a_model_that_cannot_be_loaded_again_is_not_left_at_the_workers(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            here.workers.end.drop()
            await here.client.workers("down")
            here.start_workers().fails = lambda order: isinstance(order, LoadCheckpointCommand)
            await here.client.workers("ready")
            assert here.workers.models == {}
            failed = await here.client.fails(a_pass(), 6)
            assert failed.code == "gone"
            assert "it could not be restored: this order is refused" in failed.error

    asyncio.run(check())


def test_what_was_overwritten_is_not_taken_for_what_a_model_went_on_from(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            await here.client.begin("n")
            await here.client.do(LoadState(model="n", path="m/weights/old"))
            await here.client.do(SaveState(model="m", name="old", overwrite=True), 6)
            here.workers.end.drop()
            here.start_workers()
            await here.client.workers("ready")
            failed = await here.client.fails(a_pass("n", 1), 1)
            assert failed.code == "lost"
            assert "step 0 (n/weights/000000)" in failed.error
            await here.client.do(a_pass("n", 1), 1)
            assert (await here.client.do(a_step("n"), 2)).metrics["learnt"] == 1
            assert await learn(here.client, 1, 7) == 8

    asyncio.run(check())


def test_an_engine_that_comes_again_knows_what_its_workers_hold(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await trained(here)
            await here.client.do(a_pass("m", 3), 6)
            await here.restart_engine()
            await here.client.do(SaveState(model="m", name="new"))
            here.workers.end.drop()
            here.start_workers()
            await here.client.workers("ready")
            failed = await here.client.fails(a_step(), 7)
            assert failed.code == "lost"
            assert "step 2 (m/weights/new)" in failed.error

    asyncio.run(check())


LOST = {
    "a pass": (a_pass(), ForwardBackwardCommand),
    "a pass without gradients": (a_pass(forward_only=True), ForwardBackwardCommand),
    "a draw": (WORKS[GenerateCommand], GenerateCommand),
    "weights to send": (SyncWeights(model="m"), WeightSyncCommand),
}


@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_an_operation_that_was_lost_is_tried_again_as_often_as_is_written(tmp_path, what, deaths):
    work, kind = LOST[what]

    async def check():
        async with house(tmp_path, worker_max_retries=2) as here:
            await here.client.begin()
            await here.client.do(AddEndpoint(endpoint=Endpoint(host="127.0.0.1", port=1)))
            here.workers.dies = lambda order: "before" if isinstance(order, kind) else None
            asked = await here.client.ask(work)
            for death in range(1, deaths + 1):
                await soon(lambda death=death: here.engine._workers.consecutive_losses == death)
                if death == 3:
                    break
                here.start_workers(
                    lambda order, dies=deaths > death: (
                        "before" if dies and isinstance(order, kind) else None
                    )
                )
            ended = await asked
            lost = isinstance(ended, Failure) and ended.code == "lost"
            assert lost == (deaths == 3)

    asyncio.run(check())


def test_an_operation_whose_model_lost_something_is_not_tried_again(tmp_path):
    async def check():
        async with house(tmp_path, worker_max_retries=2) as here:
            await here.client.begin()
            await here.client.do(a_pass())
            here.workers.dies = lambda order: (
                "before" if isinstance(order, ForwardBackwardCommand) else None
            )
            assert (await here.client.fails(a_pass())).code == "lost"
            here.start_workers()
            # It is told of what it lost, as ever, and begins again.
            assert (await here.client.fails(a_pass())).code == "lost"
            await here.client.do(a_pass())

    asyncio.run(check())
