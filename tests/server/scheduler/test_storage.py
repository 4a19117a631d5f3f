"""What is saved stays below output_dir and under its limit, and is whole or not there."""

import asyncio
import errno
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.protocol.requests import (
    CreateModel,
    CreateSession,
    DeleteCheckpoint,
    ListCheckpoints,
    LoadState,
    Sample,
    SaveSamplerWeights,
    SaveState,
    UpdateCheckpoint,
)
from penstock.server.protocol.types import Array, LoraConfig
from penstock.server.protocol.worker_commands import (
    Command,
    CommandFailure,
    ExportCommand,
    LoadCheckpointCommand,
    SaveCheckpointCommand,
    UnloadModelCommand,
)
from penstock.server.scheduler.checkpoint_names import (
    CheckpointRef,
    checkpoint_name,
    model_name,
    parse_checkpoint_name,
    parse_checkpoint_path,
)
from penstock.server.scheduler.errors import RequestError, to_request_error
from penstock.server.scheduler.state_store import StateStore
from penstock.server.scheduler.storage import Storage, folder_num_bytes
from penstock.server.worker.loop import run_command
from tests.server.engine_house import a_pass, a_step, house, sampling
from tests.server.workers.standing_in import STATE_BYTES

LARGE = 10**12

NASTY = [
    *("", ".", "..", "a/b", "../a", "/etc", "a\0b", "a\nb", ".hidden", "-x", "a" * 129, "é", "a b"),
    *("weights/../../x", "a\\b", "~", "%2e%2e", "a\n", "a\u2044b"),
]


@pytest.mark.slow
@given(st.one_of(st.sampled_from(NASTY), st.text(max_size=140), st.from_regex(r"[\w.:/-]{1,9}")))
@settings(max_examples=150, deadline=None)
def test_no_name_leads_out_of_its_folder(tmp_path_factory, name):
    root = tmp_path_factory.getbasetemp() / "names"
    storage = Storage(root, LARGE)
    for found in (
        lambda: parse_checkpoint_path(name),
        lambda: parse_checkpoint_name(name, f"weights/{name}"),
        lambda: parse_checkpoint_path(f"m/weights/{name}"),
        lambda: parse_checkpoint_path(f"m/{name}/c"),
        lambda: CheckpointRef(model_name(name), "sampler_weights", "c"),
        lambda: CheckpointRef("m", "weights", checkpoint_name(name)),
    ):
        try:
            spot = found()
        except RequestError:
            continue
        folder = storage.folder(spot)
        rooms = {"weights", "sampler_weights"}
        assert folder.resolve() == folder
        assert folder.relative_to(storage.root).parts == (spot.subfolder, spot.model, spot.name)
        assert spot.subfolder in rooms
        assert parse_checkpoint_path(str(spot)) == spot
    # The registry's files are named after sessions of any name that is let in.
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}", name):
        assert model_name(name) == name
        file = StateStore(root)._file("models", name)
        assert file.parent == storage.root / "server" / "models"


def test_what_a_client_says_of_a_checkpoint_is_kept_with_it(tmp_path):
    said = {"of": "a test"}

    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await here.client.do(SaveState(model="m", name="a", user_metadata=said))
            await here.client.do(SaveSamplerWeights(model="m", name="b", user_metadata=said))
            vast = SaveState(model="m", name="c", user_metadata={"of": "x" * 100_000})
            assert (await here.client.fails(vast)).code == "invalid"
            await here.restart_engine()
            assert await told(here) == {"weights/a": said, "sampler_weights/b": said}
            await here.client.do(SaveState(model="m", name="a", overwrite=True))
            assert await told(here) == {"weights/a": {}, "sampler_weights/b": said}

    async def told(here):
        checkpoints = (await here.client.do(ListCheckpoints(model="m"))).checkpoints
        return {one.name: one.user_metadata for one in checkpoints if "000000" not in one.name}

    asyncio.run(check())


def test_nasty_names_are_refused_wherever_they_are_said(tmp_path):
    def saying(name):
        path = f"m/weights/{name}"
        yield SaveState(model="m", name=name)
        yield SaveState(model="m", name=name, overwrite=True)
        yield SaveSamplerWeights(model="m", name=name)
        yield LoadState(model="m", path=path)
        yield LoadState(model="m", path=f"{name}/weights/000000")
        yield DeleteCheckpoint(model="m", name=f"weights/{name}")
        yield UpdateCheckpoint(model="m", name=f"weights/{name}")
        yield CreateSession(session=name)
        yield CreateModel(session="s", model=name, base_model=None, lora=LoraConfig(rank=2))
        yield CreateModel(session="s", model="n", base_model=None, lora=None, path=path)
        yield Sample(prompt=Array.of([1], "int32"), sampling=sampling(), path=path)

    async def check():
        async with house(tmp_path / "out") as here:
            await here.client.begin()
            orders = len(here.workers.orders)
            for name in NASTY:
                for work in saying(name):
                    failed = await here.client.fails(work)
                    assert failed.code in ("invalid", "not_found"), work
            assert len(here.workers.orders) == orders
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"server", "weights"}
        assert [path.name for path in (tmp_path / "out/weights").iterdir()] == ["m"]

    asyncio.run(check())


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path):
    async def check():
        out = tmp_path / "out"
        async with house(out) as here:
            await here.client.begin()
            elsewhere = tmp_path / "elsewhere"
            (elsewhere / "000000").mkdir(parents=True)
            (elsewhere / "000000" / "state.json").write_text("{}")
            (out / "weights/m/000000").rename(tmp_path / "moved")
            (out / "weights/m/000000").symlink_to(tmp_path / "moved")
            (out / "weights/m/linked").symlink_to(tmp_path / "moved")
            (out / "weights/other").symlink_to(elsewhere)
            (out / "sampler_weights").symlink_to(elsewhere)
            works = [
                LoadState(model="m", path="m/weights/000000"),
                SaveState(model="m", name="linked", overwrite=True),
                SaveSamplerWeights(model="m", name="new"),
                DeleteCheckpoint(model="m", name="weights/000000"),
            ]
            for work in works:
                failed = await here.client.fails(work)
                assert (failed.category, failed.code) == ("user", "invalid")
                assert "is a link" in failed.error
            assert sorted(path.name for path in elsewhere.iterdir()) == ["000000"]
            assert (tmp_path / "moved" / "state.json").exists()
            assert not any(
                isinstance(order, LoadCheckpointCommand | ExportCommand)
                for order in here.workers.orders
            )

    asyncio.run(check())


def test_sizes_count_files_and_not_what_links_lead_to(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_bytes(b"x" * 10)
    (tmp_path / "a/d").write_bytes(b"x" * 5)
    (tmp_path / "elsewhere").write_bytes(b"x" * 100)
    (tmp_path / "a/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "a/around").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "a/pipe")
    assert folder_num_bytes(tmp_path / "a") == 15
    assert folder_num_bytes(tmp_path / "nowhere") == 0


@pytest.mark.parametrize(("used", "fits"), [(600, True), (601, False)])
def test_there_is_room_up_to_the_limit_and_no_further(tmp_path, used, fits):
    storage = Storage(tmp_path, limit=1000)
    (tmp_path / "file").write_bytes(b"x" * used)
    if fits:
        storage.check_space(400, "it")
    else:
        with pytest.raises(RequestError, match="storage_limit"):
            storage.check_space(400, "it")


def test_a_disk_that_has_no_room_is_a_limit_too(tmp_path):
    with pytest.raises(RequestError, match="the disk of output_dir has"):
        Storage(tmp_path, limit=10**24).check_space(10**20, "it")


def test_a_disk_that_fills_up_during_a_request_is_named_with_what_to_do(tmp_path):
    def write(_operation):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "file"))

    with pytest.raises(OSError, match="No space") as full:
        write(None)
    answer = to_request_error(full.value).failure("1")
    command = Command(id="1", operation=UnloadModelCommand(model="m"))
    handlers: Any = SimpleNamespace(do=write)
    broadcast: Any = None  # Ranks do not agree on what none of them expected.
    reply = run_command(command, handlers, broadcast).reply
    assert isinstance(reply, CommandFailure)
    for failure in (answer, reply):
        assert failure.code == "storage_limit"
        assert failure.category == "user"
        assert f"the disk is full ({tmp_path / 'file'}); free some space" in failure.error


@pytest.mark.parametrize("by", ["the engine that made it", "the next engine"])
@pytest.mark.parametrize(
    "work", [SaveState(model="m"), SaveSamplerWeights(model="m")], ids=["s", "e"]
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, work, by):
    async def check():
        async with house(tmp_path, storage_limit=5 * STATE_BYTES) as here:
            await here.client.begin()
            orders = len(here.workers.orders)
            if by == "the next engine":
                await here.restart_engine()
            left = 5 * STATE_BYTES - folder_num_bytes(tmp_path)
            (tmp_path / "others").write_bytes(b"x" * (left - STATE_BYTES // 2 + 1))
            before = sorted(tmp_path.rglob("*"))
            failed = await here.client.fails(work)
            assert (failed.category, failed.code) == ("user", "storage_limit")
            assert "storage_limit (5 kB)" in failed.error
            assert len(here.workers.orders) == orders
            assert sorted(tmp_path.rglob("*")) == before
            (tmp_path / "others").unlink()
            await here.client.do(work)

    asyncio.run(check())


def test_a_model_whose_first_checkpoint_does_not_fit_is_not_made(tmp_path):
    async def check():
        async with house(tmp_path, storage_limit=STATE_BYTES - 1) as here:
            await here.client.do(CreateSession(session="s"))
            new = CreateModel(session="s", model="m", base_model=None, lora=LoraConfig(rank=2))
            assert (await here.client.fails(new)).code == "storage_limit"
            assert here.workers.models == {}
            assert not any(
                isinstance(order, SaveCheckpointCommand) for order in here.workers.orders
            )
            assert (await here.client.fails(a_pass())).code == "not_found"

    asyncio.run(check())


def test_a_name_that_is_taken_is_overwritten_only_when_that_is_asked_for(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await here.client.do(SaveState(model="m", name="a"))
            assert (await here.client.fails(SaveState(model="m", name="a"))).code == "exists"
            await here.client.do(a_pass("m", 3), 1)
            await here.client.do(a_step(), 2)
            saved = await here.client.do(SaveState(model="m", name="a", overwrite=True))
            assert saved.name == "weights/a"
            await here.client.do(LoadState(model="m", path="m/weights/a"))
            assert here.workers.models["m"].learnt == 3
            await here.client.do(SaveSamplerWeights(model="m", name="a"))
            assert (
                await here.client.fails(SaveSamplerWeights(model="m", name="a"))
            ).code == "exists"
            unnamed = [await here.client.do(SaveState(model="m")) for _ in range(3)]
            assert len({saved.name for saved in unnamed}) == 3
            told = (await here.client.do(ListCheckpoints())).checkpoints
            assert {c.name: c.size for c in told} == {
                "weights/000000": STATE_BYTES,
                "weights/a": STATE_BYTES,
                "sampler_weights/a": STATE_BYTES // 2,
                **{saved.name: STATE_BYTES for saved in unnamed},
            }

    asyncio.run(check())


def test_what_is_deleted_is_gone_from_the_list_and_the_disk(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await here.client.do(SaveState(model="m", name="a"))
            await here.client.do(DeleteCheckpoint(model="m", name="weights/a"))
            again = DeleteCheckpoint(model="m", name="weights/a")
            assert (await here.client.fails(again)).code == "not_found"
            assert (await here.client.fails(LoadState(model="m", path="m/weights/a"))).code == (
                "not_found"
            )
            await here.client.do(SaveState(model="m", name="a"))
            await asyncio.sleep(0.1)
        assert sorted(path.name for path in (tmp_path / "weights/m").iterdir()) == ["000000", "a"]

    asyncio.run(check())


def test_room_is_looked_for_when_what_was_deleted_is_gone(tmp_path, monkeypatch):
    def slowly(folder, *, ignore_errors, rmtree=shutil.rmtree):
        time.sleep(0.3)
        rmtree(folder, ignore_errors=ignore_errors)

    async def check():
        async with house(tmp_path, storage_limit=5 * STATE_BYTES) as here:
            await here.client.begin()
            await here.client.do(SaveState(model="m", name="a"))
            left = 5 * STATE_BYTES - folder_num_bytes(tmp_path)
            (tmp_path / "others").write_bytes(b"x" * (left - 200))
            assert (await here.client.fails(SaveState(model="m"))).code == "storage_limit"
            monkeypatch.setattr(shutil, "rmtree", slowly)
            await here.client.do(DeleteCheckpoint(model="m", name="weights/a"))
            await here.client.do(SaveState(model="m", name="b"))

    asyncio.run(check())


@pytest.mark.slow
def test_a_link_in_the_place_of_what_is_over_does_not_keep_others_or_end_the_engine(tmp_path):
    async def check():
        async with house(tmp_path, idle_session_timeout=2.0) as here:
            await here.client.begin()
            for name in ("linked", "over"):
                await here.client.do(SaveState(model="m", name=name, ttl_seconds=0.3))
            (tmp_path / "weights/m/linked").rename(tmp_path / "moved")
            (tmp_path / "weights/m/linked").symlink_to(tmp_path / "moved")
            await asyncio.sleep(1.0)
            told = (await here.client.do(ListCheckpoints())).checkpoints
            assert [c.name for c in told] == ["weights/000000", "weights/linked"]
            assert (tmp_path / "moved" / "state.json").exists()

    asyncio.run(check())


def made(root: Path, *names: str) -> None:
    for name in names:
        (root / "weights/m" / name).mkdir(parents=True)
        (root / "weights/m" / name / "which").write_text(name)


@pytest.mark.parametrize(
    ("there", "left"),
    [
        ((".a.new",), {}),
        (("a", ".a.new"), {"a": "a"}),
        ((".a.old", ".a.new"), {"a": ".a.old"}),
        (("a", ".a.old"), {"a": "a"}),
        (("a", ".b.1234.gone", ".a.new.part"), {"a": "a"}),
    ],
)
def test_a_replacement_that_was_cut_short_leaves_one_whole_checkpoint(tmp_path, there, left):
    made(tmp_path, *there)
    storage = Storage(tmp_path, LARGE)
    storage.finish_interrupted()
    found = {p.name: (p / "which").read_text() for p in (tmp_path / "weights/m").iterdir()}
    assert found == left
    assert storage.list_checkpoints() == [CheckpointRef("m", "weights", name) for name in left]


def test_what_was_saved_just_before_the_engine_died_is_found(tmp_path):
    async def check():
        async with house(tmp_path) as here:
            await here.client.begin()
            await here.client.do(SaveState(model="m", name="a"))
            await here.kill_engine()
            (tmp_path / "weights/m/a").rename(tmp_path / "weights/m/b")
            here.start_engine()
            here.meet()
            await here.client.workers("ready")
            told = (await here.client.do(ListCheckpoints(model="m"))).checkpoints
            assert {c.name for c in told} == {"weights/000000", "weights/b"}
            await here.client.do(LoadState(model="m", path="m/weights/b"))

    asyncio.run(check())
