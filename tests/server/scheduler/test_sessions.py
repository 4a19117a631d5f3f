"""Sessions: whose they are, how they end, and that what they hold is saved before it is freed."""

import asyncio
import json
import time

import msgspec
import pytest

from penstock.server.protocol.requests import (
    AddEndpoint,
    CreateModel,
    CreateSampler,
    CreateSession,
    DeleteCheckpoint,
    EndSession,
    GetCapabilities,
    GetCheckpoint,
    GetModel,
    GetSampler,
    GetSession,
    Heartbeat,
    ListCheckpoints,
    ListEndpoints,
    ListModels,
    ListSessions,
    LoadState,
    RemoveEndpoint,
    Sample,
    SaveSamplerWeights,
    SaveState,
    SyncWeights,
    UnloadModel,
    UpdateCheckpoint,
)
from penstock.server.protocol.results import HeartbeatResult
from penstock.server.protocol.types import Array, Endpoint, LoraConfig
from penstock.server.protocol.worker_commands import (
    ForwardBackwardCommand,
    GenerateCommand,
    SaveCheckpointCommand,
    UnloadModelCommand,
    WeightSyncCommand,
)
from penstock.server.scheduler.state_store import (
    QueueState,
    ShutdownState,
    StateStore,
    StateStoreError,
)
from tests.damaging import flip_bit
from tests.server.engine_house import a_pass, a_step, house, sampling
from tests.server.workers.standing_in import SERVED, VOCABULARY


def create(model, **given):
    said = {"session": "s", "base_model": None, "lora": LoraConfig(rank=8)} | given
    return CreateModel(model=model, **said)


def prompt():
    return Array.of([1, 2], "int32")


async def soon(happened):
    async with asyncio.timeout(10):
        while not happened():
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_an_idle_session_is_saved_before_it_is_freed_and_another_goes_on_from_there(tmp_path):
    async def check():
        async with house(tmp_path, idle_session_timeout=0.4) as here:
            await here.client.begin()
            await here.client.do(a_pass("m", 7), 1)
            await here.client.do(a_step(), 2)
            await soon(
                lambda: any(isinstance(order, UnloadModelCommand) for order in here.workers.orders)
            )
            kinds = [type(order) for order in here.workers.orders]
            assert kinds.index(UnloadModelCommand) == len(kinds) - 1
            assert kinds[-2] is SaveCheckpointCommand
            gone = await here.client.fails(a_pass("m"), 3)
            assert gone.code == "gone"
            assert "nothing was heard of its client for 0.4 s" in gone.error
            [path] = [word for word in gone.error.split() if "/weights/" in word]
            await here.client.do(CreateSession(session="s"))
            await here.client.do(create("again", path=path.rstrip("."), optimizer=True))
            await here.client.do(a_pass("again", 1), 1)
            assert (await here.client.do(a_step("again"), 2)).metrics == {"step": 2, "learnt": 8}
            await asyncio.sleep(1.0)
            assert await here.client.do(Heartbeat(sessions=("s",))) == HeartbeatResult(
                sessions=("s",)
            )

    asyncio.run(check())


@pytest.mark.slow
def test_a_session_that_is_heard_of_is_not_idle(tmp_path):
    async def check():
        async with house(tmp_path, idle_session_timeout=0.5) as here:
            await here.client.begin()
            for _ in range(10):
                assert await here.client.do(Heartbeat(sessions=("s",))) == HeartbeatResult()
                await asyncio.sleep(0.1)
            await here.client.do(a_pass(), 1)
            assert not any(isinstance(order, UnloadModelCommand) for order in here.workers.orders)

    asyncio.run(check())


def test_a_session_that_others_say_is_theirs_is_idle_all_the_same(tmp_path):
    async def check():
        async with house(tmp_path, idle_session_timeout=0.4) as here:
            await here.client.begin()

            async def beat():
                while True:
                    await here.client.do(Heartbeat(sessions=("s", "t")), owner="two")
                    await asyncio.sleep(0.02)

            beats = asyncio.create_task(beat())
            await soon(
                lambda: any(isinstance(order, UnloadModelCommand) for order in here.workers.orders)
            )
            assert not beats.done()
            beats.cancel()
            assert (await here.client.fails(a_pass(), 1)).code == "gone"

    asyncio.run(check())


def test_what_cannot_be_saved_is_not_freed(tmp_path):
    async def check():
        async with house(tmp_path, idle_session_timeout=0.3, storage_limit=4000) as here:
            await here.client.begin()
            await here.client.do(a_pass(), 1)
            (tmp_path / "others").write_bytes(b"x" * 2500)
            await asyncio.sleep(0.8)
            assert not any(isinstance(order, UnloadModelCommand) for order in here.workers.orders)
            assert "m" in here.workers.models

    asyncio.run(check())


def test_ending_a_session_does_first_what_was_asked_before_and_saves_it(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            here.workers.slowly = 0.02
            asked = [await here.client.ask(a_pass("m", 3), 1), await here.client.ask(a_step(), 2)]
            await here.client.do(EndSession(session="s"))
            assert (await asked[1]).metrics["learnt"] == 3
            await soon(lambda: isinstance(here.workers.orders[-1], UnloadModelCommand))
            assert [type(order) for order in here.workers.orders[-2:]] == [
                SaveCheckpointCommand,
                UnloadModelCommand,
            ]
            assert await here.client.do(Heartbeat(sessions=("s",))) == HeartbeatResult(
                sessions=("s",)
            )
            told = await here.client.do(ListCheckpoints(model="m"))
            first, _ = told.checkpoints
            assert first.name == "weights/000000"

    asyncio.run(check())


def test_another_owner_finds_nothing_of_what_is_not_his(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            saved = await here.client.do(
                SaveSamplerWeights(model="m", name="v1", session="s", number=1)
            )
            assert saved.sampler == "s:sample:1"
            theirs = [
                a_pass(),
                a_step(),
                SaveState(model="m"),
                LoadState(model="m", path="m/weights/000000"),
                UnloadModel(model="m"),
                EndSession(session="s"),
                GetSession(session="s"),
                create("other"),
                GetModel(model="m"),
                ListCheckpoints(model="m"),
                DeleteCheckpoint(model="m", name="weights/000000"),
                UpdateCheckpoint(model="m", name="weights/000000", public=True),
                GetCheckpoint(path="m/weights/000000"),
                GetSampler(sampler="s:sample:1"),
                Sample(prompt=prompt(), sampling=sampling(), sampler="s:sample:1"),
                Sample(prompt=prompt(), sampling=sampling(), path="m/sampler_weights/v1"),
            ]
            for work in theirs:
                failed = await here.client.fails(work, owner="two")
                assert (failed.code, failed.category) == ("not_found", "user"), work
            beat = Heartbeat(sessions=("s", "t"))
            assert await here.client.do(beat, owner="two") == HeartbeatResult(sessions=("s", "t"))
            assert (await here.client.do(ListSessions(), owner="two")).sessions == ()
            assert (await here.client.do(ListModels(), owner="two")).total == 0
            assert (await here.client.do(ListCheckpoints(), owner="two")).checkpoints == ()
            for work in (CreateSession(session="s"), create("m", session="t")):
                await here.client.do(CreateSession(session="t"), owner="two")
                assert (await here.client.fails(work, owner="two")).code == "exists"
            await here.client.do(a_pass(), 1)

    asyncio.run(check())


def test_a_public_checkpoint_is_read_by_others_and_changed_by_none_of_them(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await here.client.do(a_pass("m", 5), 1)
            await here.client.do(a_step(), 2)
            await here.client.do(SaveState(model="m", name="good"), 3)
            keep = UpdateCheckpoint(model="m", name="weights/good", public=True)
            await here.client.do(keep)
            await here.client.do(CreateSession(session="t"), owner="two")
            told = await here.client.do(GetCheckpoint(path="m/weights/good"), owner="two")
            assert (told.base_model, told.lora.rank, told.checkpoint.public) == ("tiny", 8, True)
            theirs = create("theirs", session="t", lora=None, path="m/weights/good")
            await here.client.do(theirs, owner="two")
            await here.client.do(a_pass("theirs", 1), 1, owner="two")
            stepped = await here.client.do(a_step("theirs"), 2, owner="two")
            assert stepped.metrics == {"step": 1, "learnt": 6}
            delete = DeleteCheckpoint(model="m", name="weights/good")
            assert (await here.client.fails(delete, owner="two")).code == "not_found"

    asyncio.run(check())


def test_what_was_known_is_known_to_the_next_engine(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin("m", rank=4)
            await here.client.do(a_pass("m", 5), 1)
            await here.client.do(a_step(), 2)
            await here.client.do(SaveState(model="m", name="kept", ttl_seconds=1000), 3)
            await here.client.do(SaveSamplerWeights(model="m", name="v1", session="s", number=7))
            await here.client.do(AddEndpoint(endpoint=Endpoint(host="localhost", port=30000)))
            asked = [
                ListModels(),
                ListCheckpoints(),
                GetSession(session="s"),
                GetSampler(sampler="s:sample:7"),
                ListEndpoints(),
                GetCheckpoint(path="m/weights/kept"),
            ]
            before = [await here.client.do(work) for work in asked]
            orders = len(here.workers.orders)
            await here.restart_engine()
            assert [await here.client.do(work) for work in asked] == before
            # The workers live: nothing is opened or loaded again, and nothing is lost.
            assert len(here.workers.orders) == orders
            await here.client.do(a_pass("m", 2), 4)
            assert (await here.client.do(a_step(), 5)).metrics == {"step": 2, "learnt": 7}
            sampled = await here.client.do(
                Sample(prompt=prompt(), sampling=sampling(), sampler="s:sample:7")
            )
            assert sampled.sequences[0].tokens.numpy().tolist() == [5]

    asyncio.run(check())


def test_a_file_of_the_registry_that_was_spoilt_is_named(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()

    asyncio.run(check())
    [file] = (tmp_path / "server" / "models").glob("*.json")
    good = file.read_text()
    file.write_text(good.replace('"step": 0', '"step": 1'))
    with pytest.raises(StateStoreError, match=f"{file.name} .* differs from its digest"):
        StateStore(tmp_path)
    # As it was written before there were digests.
    older = json.loads(good)
    del older["digest"]
    file.write_text(json.dumps(older))
    assert StateStore(tmp_path).models
    file.write_text("{}")
    with pytest.raises(StateStoreError, match=file.name):
        StateStore(tmp_path)


def test_what_an_engine_leaves_is_not_believed_once_a_bit_of_it_has_changed(tmp_path, caplog):
    registry = StateStore(tmp_path)
    left = ShutdownState(lanes={"model": QueueState(next=7)})
    registry.write_shutdown_state(left)
    file = tmp_path / "server" / "left.msgpack"
    good = file.read_bytes()
    assert registry.take_shutdown_state() == left
    for place in range(len(good)):
        file.write_bytes(good)
        flip_bit(file, place)
        assert registry.take_shutdown_state() == ShutdownState(), place
    assert "left.msgpack is not what the server writes there" in caplog.text
    # As it was written before there were digests.
    file.write_bytes(good[20:])
    assert registry.take_shutdown_state() == left


def test_what_is_asked_of_a_model_that_is_not_is_not_found(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.do(CreateSession(session="s"))
            assert (await here.client.fails(a_pass("nobody"), 1)).code == "not_found"
            assert (await here.client.fails(create("m", session="t"))).code == "not_found"
            assert (
                await here.client.fails(create("m", lora=LoraConfig(rank=17)))
            ).code == "invalid"
            assert (await here.client.fails(create("m", base_model="big"))).code == "invalid"
            assert (await here.client.fails(create("../m"))).code == "invalid"
            lost = create("m", path="n/weights/000000")
            assert (await here.client.fails(lost)).code == "not_found"
            assert here.workers.models == {}
            assert await here.client.do(GetCapabilities()) == SERVED

    asyncio.run(check())


def test_asking_for_the_same_model_again_is_answered_until_it_is_used(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.do(CreateSession(session="s"))
            first, second = await here.client.ask(create("m")), await here.client.ask(create("m"))
            assert await first == await second
            await here.client.do(create("m"))
            assert (await here.client.fails(create("m", lora=LoraConfig(rank=2)))).code == "exists"
            await here.client.do(a_pass(), 1)
            assert (await here.client.fails(create("m"))).code == "exists"
            await here.client.do(UnloadModel(model="m"))
            await here.client.do(create("m"))
            await here.client.do(a_pass(), 1)

    asyncio.run(check())


def test_where_all_weights_are_trained_there_is_one_model(tmp_path):
    async def check():
        served = msgspec.structs.replace(SERVED, trains="all weights", max_rank=0)
        async with house(tmp_path, served) as here:
            await here.client.do(CreateSession(session="s"))
            assert "all weights are trained" in (await here.client.fails(create("m"))).error
            await here.client.do(create("m", lora=None))
            assert (await here.client.fails(create("n", lora=None))).code == "busy"
            await here.client.do(UnloadModel(model="m"))
            await here.client.do(create("n", lora=None))

    asyncio.run(check())


def test_a_sampler_made_for_a_session_goes_with_it(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            inflight = SaveSamplerWeights(model="m", session="s", number=1, keep=False)
            saved = await here.client.do(inflight)
            kept = await here.client.do(
                SaveSamplerWeights(model="m", name="v1", session="s", number=2)
            )
            made = await here.client.do(
                CreateSampler(session="s", number=3, path="m/sampler_weights/v1")
            )
            assert (made.sampler, made.path) == ("s:sample:3", "m/sampler_weights/v1")
            assert (await here.client.fails(inflight)).code == "exists"
            wrong = CreateSampler(session="s", number=4, path="m/weights/000000")
            assert (await here.client.fails(wrong)).code == "invalid"
            base = await here.client.do(CreateSampler(session="s", number=5))
            assert base.path is None
            await here.client.do(Sample(prompt=prompt(), sampling=sampling(), sampler=base.sampler))
            drawn = [order for order in here.workers.orders if isinstance(order, GenerateCommand)]
            assert [order.adapter for order in drawn] == [None]
            await here.client.do(EndSession(session="s"))
            names = [c.name for c in (await here.client.do(ListCheckpoints())).checkpoints]
            assert kept.name in names
            assert saved.name not in names

    asyncio.run(check())


def test_a_checkpoint_is_gone_when_its_time_is_over(tmp_path):
    async def check():
        async with house(tmp_path, idle_session_timeout=2.0) as here:
            await here.client.begin()
            await here.client.do(SaveState(model="m", name="short", ttl_seconds=0.2))
            await here.client.do(SaveState(model="m", name="longer", ttl_seconds=0.2))
            await here.client.do(UpdateCheckpoint(model="m", name="weights/longer"))
            await soon(lambda: not (tmp_path / "weights/m/short").exists())
            names = [c.name for c in (await here.client.do(ListCheckpoints())).checkpoints]
            assert names == ["weights/000000", "weights/longer"]

    asyncio.run(check())


def test_a_checkpoint_that_is_given_some_time_has_it_from_then_on(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await here.client.do(SaveState(model="m", name="kept"))
            await asyncio.sleep(0.1)
            before = time.time()
            await here.client.do(UpdateCheckpoint(model="m", name="weights/kept", ttl_seconds=1000))
            after = time.time()
            found = (await here.client.do(ListCheckpoints())).checkpoints
            [first, kept] = found
            assert (first.name, first.expires) == ("weights/000000", None)
            assert kept.name == "weights/kept"
            assert kept.expires is not None
            assert before + 1000 <= kept.expires <= after + 1000

    asyncio.run(check())


def test_weights_go_to_the_endpoints_that_were_named(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            assert (await here.client.fails(SyncWeights(model="m"))).code == "invalid"
            for port, pool in ((1, "a"), (2, "b"), (2, "a")):
                endpoint = Endpoint(host="localhost", port=port, pool=pool)
                await here.client.do(AddEndpoint(endpoint=endpoint))
            assert len((await here.client.do(ListEndpoints())).endpoints) == 2
            await here.client.do(SyncWeights(model="m", pools=("a",)))
            [push] = [
                order for order in here.workers.orders if isinstance(order, WeightSyncCommand)
            ]
            assert [endpoint.port for endpoint in push.endpoints] == [1, 2]
            await here.client.do(RemoveEndpoint(host="localhost", port=1))
            gone = RemoveEndpoint(host="localhost", port=1)
            assert (await here.client.fails(gone)).code == "not_found"

    asyncio.run(check())


def test_what_asks_wait_for_is_told(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            here.workers.slowly = 0.1
            asked = [await here.client.ask(a_pass(), seq, name=f"n{seq}") for seq in (1, 2, 3)]
            await soon(lambda: here.client.statuses[-1].queued == 2)
            assert here.client.statuses[-1].running == "n1"
            assert (await here.client.do(GetModel(model="m"))).pending == 3
            await here.client.cancel("n2")
            assert (await asked[1]).code == "cancelled"
            await asyncio.gather(*asked)
            assert (
                sum(isinstance(order, ForwardBackwardCommand) for order in here.workers.orders) == 2
            )

    asyncio.run(check())


def test_what_is_asked_before_the_workers_have_come_is_looked_at_when_they_have(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.kill_engine()
            here.start_engine()
            client = here.client
            assert (await client.fails(GetCapabilities())).code == "unavailable"
            await client.do(CreateSession(session="s"))
            beyond = Array.of([VOCABULARY], "int32")
            asked = [
                await client.ask(create("m", lora=LoraConfig(rank=17))),
                await client.ask(create("n")),
                await client.ask(Sample(prompt=beyond, sampling=sampling())),
                await client.ask(Sample(prompt=prompt(), sampling=sampling())),
            ]
            await asyncio.sleep(0.1)
            assert not any(each.done() for each in asked)
            here.meet()
            wrong, _, outside, drawn = await asyncio.gather(*asked)
            assert (wrong.code, outside.code) == ("invalid", "invalid")
            assert len(drawn.sequences) == 1
            assert list(here.workers.models) == ["n"]

    asyncio.run(check())


def test_nothing_is_saved_of_a_new_model_where_settings_say_so(tmp_path):
    async def check():
        async with house(tmp_path, skip_initial_checkpoint=True) as here:
            await here.client.begin()
            assert (await here.client.do(ListCheckpoints())).checkpoints == ()

    asyncio.run(check())
