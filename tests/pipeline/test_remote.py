"""The pipeline with its data, its prepared data and its output behind URLs."""

import gzip
import json
import os
import signal
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from penstock.cli import train as by_hand
from penstock.cli.artifacts.commands import find_entries
from penstock.config.loading.load import load
from penstock.core.cache.store import find_cached
from penstock.core.errors import StageError
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.path import RemotePath
from penstock.pipeline.plan import RebuildOptions, execute_stage, plan, require_upstream
from penstock.prepare.stage import Prepare
from tests.buckets import ACCOUNT
from tests.cli.command import penstock
from tests.core.servers import web  # noqa: F401
from tests.pipeline.runs import write_chats, write_run
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.fixture
def on(tmp_path, monkeypatch):
    """`on(name)` makes this the machine called so: its mirrors and caches are its own."""

    def switch(name):
        monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "machines" / name))

    return switch


@pytest.fixture
def files(bucket, tmp_path):
    """The same chats as plain lines, compressed lines and Parquet, here and in the bucket."""
    folder = tmp_path / "chats"
    folder.mkdir()
    for number, name in enumerate(("a.jsonl", "b.jsonl", "c.jsonl")):
        write_chats(folder / name, 20, salt=f" ({number})")
    lines = (folder / "b.jsonl").read_bytes()
    (folder / "b.jsonl").unlink()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    rows = [json.loads(line) for line in (folder / "c.jsonl").read_text().splitlines()]
    (folder / "c.jsonl").unlink()
    pq.write_table(pa.Table.from_pylist(rows), folder / "c.parquet")
    for file in folder.iterdir():
        (RemotePath.from_url(f"{bucket}/chats") / file.name).put(file)
    return folder


def bring(config, *wanted):
    """Bring the stages up in this process, and return the plan and the statuses."""
    run = load(config, ())
    planned = plan(run, wanted)
    statuses = [execute_stage(step, run, RebuildOptions(), print).status for step in planned.steps]
    return planned, statuses


def tokens(step):
    """Every prepared sample's tokens and labels, by plain pyarrow, in an order of their own."""
    found = []
    for file in sorted((step.path / "data").rglob("*.arrow")):
        table = pa.ipc.open_file(file).read_all()
        found += zip(*(table[name].to_pylist() for name in ("input_ids", "labels")), strict=True)
    return sorted(found)


@pytest.mark.slow
def test_data_and_results_in_a_bucket_give_the_rows_that_local_ones_give(
    files, bucket, tmp_path, on
):
    local = write_run(tmp_path / "local", data={"datasets": [{"path": str(files), "type": "chat"}]})
    remote = write_run(
        tmp_path / "remote",
        data={
            "datasets": [{"path": f"{bucket}/chats", "type": "chat"}],
            "dataset_prepared_path": f"{bucket}/prepared",
        },
    )
    prepared, packed = bring(local, "pack")[0].steps
    on("first")
    planned, statuses = bring(remote, "pack")
    assert statuses == ["ran", "ran"]
    assert tokens(planned.steps[0]) == tokens(prepared)
    rows = planned.steps[1].artifact.facts["rows"]
    assert rows == packed.artifact.facts["rows"]

    on("second")
    planned, statuses = bring(remote, "pack")
    assert statuses == ["cached", "cached"]
    assert tokens(planned.steps[0]) == tokens(prepared)

    on("third")
    other = plan(load(remote, ()), ("pack",))
    require_upstream(other, "pack")
    assert tokens(other.steps[0]) == tokens(prepared)

    entries = list(find_entries([f"{bucket}/prepared"]))
    assert sorted(entry.stage for entry in entries) == ["pack", "prepare"]
    assert [fault for entry in entries for fault in entry.faults()] == []
    pack = next(entry for entry in entries if entry.stage == "pack")
    assert pack.manifest
    file = pack.manifest["files"][0]
    (RemotePath.from_url(pack.where) / file["path"]).write(bytes(file["bytes"]))
    (damaged,) = find_entries([pack.where])
    assert damaged.faults() == [f"{pack.where}/{file['path']}: content differs from the manifest"]
    pack.delete()
    assert RemotePath.from_url(pack.where).files() == {}
    assert bring(remote, "pack")[1] == ["cached", "ran"]


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_slices_that_one_machine_made_are_not_made_by_another(bucket, tmp_path, on):
    data = {
        "datasets": [{"path": f"{bucket}/chats", "type": "chat"}],
        "dataset_prepared_path": f"{bucket}/prepared",
    }
    config = write_run(tmp_path / "one", data=data)
    counts = []
    for machine, index in (("first", 0), ("second", 1)):
        on(machine)
        step = plan(load(config, ()), ("prepare",)).steps[0]
        assert isinstance(step.stage, Prepare)
        counts.append(step.stage.prepare_share(step.path, index, 2))
        assert find_cached(step) is None
    assert sum(done.slices for done in counts) == sum(done.done for done in counts) == 3

    on("third")
    changed = write_run(tmp_path / "two", data={**data, "val_set_size": 7})
    step = plan(load(changed, ()), ("prepare",)).steps[0]
    assert isinstance(step.stage, Prepare)
    assert step.stage.prepare_share(step.path, 0, 1).done == 0
    assert bring(changed, "prepare")[1] == ["ran"]


@pytest.mark.usefixtures("files")
def test_a_file_that_changes_while_it_is_prepared_fails_the_run(bucket, tmp_path, on):
    config = write_run(
        tmp_path / "run", data={"datasets": [{"path": f"{bucket}/chats/a.jsonl", "type": "chat"}]}
    )
    on("here")
    run = load(config, ())
    planned = plan(run, ("prepare",))
    write_chats(tmp_path / "other.jsonl", 20, salt=" (other)")
    (RemotePath.from_url(f"{bucket}/chats") / "a.jsonl").put(tmp_path / "other.jsonl")
    with pytest.raises(StageError, match=r"a\.jsonl has changed since this run was planned"):
        execute_stage(planned.steps[0], run, RebuildOptions(), print)
    assert bring(config, "prepare")[1] == ["ran"]


@pytest.mark.slow
def test_a_signature_is_in_nothing_that_a_run_leaves(web, bucket, tmp_path, on, capfd):  # noqa: F811
    on("here")
    web.manners["signature"] = secret = f"signed-{web.server_port}-{os.getpid()}"
    write_chats(tmp_path / "chats.jsonl")
    web.files["/chats.jsonl"] = (tmp_path / "chats.jsonl").read_bytes()
    url = f"{web.url}/chats.jsonl?signature={secret}"
    config = write_run(
        tmp_path / "run",
        data={
            "datasets": [{"path": url, "type": "chat"}],
            "dataset_prepared_path": f"{bucket}/prepared",
        },
    )
    bring(config, "pack")
    web.manners["signature"] = "another"
    (tmp_path / "machines" / "here" / f"digests-{os.getuid()}" / "digests.sqlite").unlink()
    left = [file for file in (tmp_path / "machines").rglob("*") if file.is_file()]
    assert len(left) > 5
    for file in left:
        assert secret.encode() not in file.read_bytes(), file
    root = RemotePath.from_url(bucket)
    for name in root.files():
        assert secret.encode() not in ((root / name).read() or b""), name
    assert secret not in "".join(capfd.readouterr())


STORE = (*ACCOUNT, "AWS_ENDPOINT_URL")


def newest(out):
    """The last step of which a checkpoint is kept there."""
    marks = [name for name in out.files() if name.endswith("/COMPLETE")]
    return max((int(name.split("/")[1].split("_")[-1]) for name in marks), default=0)


def trains_until(words, url, step, variables):
    """Train on this rank alone, and be told to end once a checkpoint of a later step is kept."""
    os.environ.update(variables)

    def tell():
        while newest(RemotePath.from_url(url)) <= step:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    return by_hand.main(words)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_page_in_a_bucket_tells_what_eval_finds(bucket, tmp_path, on):
    on("first")
    config = write_run(
        tmp_path / "run",
        data={"dataset_prepared_path": f"{bucket}/prepared"},
        train={"output_dir": f"{bucket}/out"},
        pipeline={"artifacts_path": f"{bucket}/artifacts"},
    )
    out = RemotePath.from_url(f"{bucket}/out")
    assert penstock("run", config).code == 0
    assert b"Not evaluated by generation yet" in ((out / "report.html").read() or b"")
    said = penstock("eval", config, "--json")
    assert said.code == 0, said.err
    right = f"{said.last['right']} of {said.last['asked']}, "
    assert right in ((out / "report.html").read() or b"").decode()
    assert {"eval_results.json", "shown_data.json"} <= set(out.files())
    # Another machine has what the manifest lists, and no page can be made of that.
    on("second")
    said = penstock("eval", config, "--json")
    assert said.code == 0, said.err
    assert "the report does not show it" in said.err


@one_day_in(2, of=0)
@pytest.mark.dist
def test_training_that_was_stopped_goes_on_on_another_machine(bucket, tmp_path, on):
    config = write_run(
        tmp_path / "run",
        data={"dataset_prepared_path": f"{bucket}/prepared"},
        train={"output_dir": f"{bucket}/out", "num_train_epochs": 9999, "save_steps": 20},
    )
    out = RemotePath.from_url(f"{bucket}/out")

    def train_until(machine, step):
        """Train there until a checkpoint of a later step is kept; return the newest kept."""
        on(machine)
        variables = {name: os.environ[name] for name in ("PENSTOCK_CACHE_HOME", *STORE)}
        ended = on_ranks(1, trains_until, [str(config)], out.url, step, variables, timeout=200)
        assert ended == [128 + signal.SIGTERM]
        return newest(out)

    first = train_until("first", 0)
    assert {"attempt.json", "metrics.jsonl", "config.yaml"} <= set(out.files())
    second = train_until("second", first)
    folders = local_cache_dir(out.url) / "checkpoints"
    assert {path.name for path in folders.glob(f"*_{first}")} == {f"global_step_{first}"}
    assert not (folders / "global_step_20").exists() or first == 20, "only the newest is fetched"
    lines = ((out / "metrics.jsonl").read() or b"").splitlines()
    # Where the loss leaps up there is a record of that as well.
    steps = [record["step"] for record in map(json.loads, lines) if "loss" in record]
    assert steps == list(range(1, second + 1))

    on("third")
    said = penstock("train", config, "--train.lr", "0.5").err
    assert f"train.output_dir {out.url} holds an unfinished run of another key" in said


@pytest.mark.slow
def test_a_model_in_a_bucket_is_trained_and_exported_with_its_tokenizer(bucket, tmp_path, on):
    on("here")
    first = write_run(tmp_path / "first", train={"num_train_epochs": 1})
    said = penstock("run", first)
    assert said.code == 0, said.err
    base = tmp_path / "first" / "out" / "hf"
    for file in base.resolve().iterdir():
        (RemotePath.from_url(f"{bucket}/base") / file.name).put(file)
    config = write_run(tmp_path / "second", train={"num_train_epochs": 1})
    written = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**written, "model": {"model_path": f"{bucket}/base"}}))
    said = penstock("run", config)
    assert said.code == 0, said.err
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "second" / "out" / "hf" / name).read_bytes() == (
            base / name
        ).read_bytes()
