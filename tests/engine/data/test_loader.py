"""Rows reach the step the same however they are loaded, and what loads them ends with the rank."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from penstock.core.errors import ArtifactError, StageError
from penstock.rows.reader import PackedRows
from penstock.train import trainer
from penstock.train.dataloader import Loader, LoaderConfig
from penstock.train.row_costs import local_micro_batches
from tests.engine import runs
from tests.engine.checkpoint.test_resume import train_until
from tests.engine.loops import loop_of
from tests.ranks import RankError, on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

STEPS = [[[step % 10, (3 * step) % 10], [(7 * step) % 10], []] for step in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    runs.write_rows(folder / "packed", 10)
    runs.write_config(folder / "model")
    return folder


def reading(**data):
    return LoaderConfig.of(
        runs.run_config(Path("out"), Path("model"), data=data), torch.device("cpu")
    )


def loader_of(folder, steps, **data):
    return Loader(PackedRows(folder / "packed" / "data" / "train"), steps, reading(**data))


def counted(steps, seen):
    for step in steps:
        seen.append(step)
        yield step


def plain(batch):
    tensors = (batch.input_ids_T, batch.labels_T, batch.position_ids_T, batch.places())
    return [t.tolist() for t in tensors], batch.lengths, batch.num_tokens, batch.num_trained


def loaded(folder, settings):
    """All batches; steps that were begun when the first arrived; processes then and at the end."""
    found = {}
    for name, data in settings.items():
        begun, state = [], torch.get_rng_state()
        loader = loader_of(folder, counted(STEPS, begun), **data)
        first = next(loader)
        ahead, processes = len(begun) - 1, len(multiprocessing.active_children())
        batches = [[plain(batch) for batch in step] for step in [first, *loader]]
        loader.close()
        left = len(multiprocessing.active_children())
        assert torch.equal(torch.get_rng_state(), state)
        found[name] = batches, ahead, processes, left
    return found


@pytest.mark.slow
def test_rows_are_loaded_the_same_by_any_number_of_processes_that_read_as_far_ahead_as_written(
    folder,
):
    settings = {
        "nothing written": {},
        "none": {"dataloader_num_workers": 0},
        "one, far ahead": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 5},
        "two, null": {"dataloader_num_workers": 2, "dataloader_prefetch_factor": None},
    }
    [found] = on_ranks(1, loaded, folder, settings)
    batches = found["none"][0]
    assert [len(step) for step in batches] == [3] * len(STEPS)
    for name, (same, _, _, left) in found.items():
        assert same == batches, name
        assert left == 0, name
    seen = {name: (processes, ahead) for name, (_, ahead, processes, _) in found.items()}
    assert seen == {
        "nothing written": (0, 0),
        "none": (0, 0),
        "one, far ahead": (1, 5),
        "two, null": (2, 4),
    }


def test_a_written_distance_starts_the_documented_number_of_processes():
    assert reading(dataloader_prefetch_factor=4).num_workers == 8
    assert reading(dataloader_prefetch_factor=4).steps_ahead == 4
    assert reading(dataloader_prefetch_factor=None).num_workers == 0


def test_rows_are_pinned_only_where_a_gpu_copies_them():
    def pins(device, **data):
        run = runs.run_config(Path("out"), Path("model"), data=data)
        return LoaderConfig.of(run, torch.device(device)).pin_memory

    assert pins("cuda")
    assert not pins("cuda", dataloader_pin_memory=False)
    assert not pins("cpu")


def failing(folder):
    """What the rank is told when a row is not there, and when the files are gone."""
    told = []
    loader = loader_of(folder, iter([[[0]], [[99]]]), dataloader_num_workers=1)
    next(loader)
    with pytest.raises(IndexError) as error:
        next(loader)
    told.append(str(error.value))
    loader.close()
    shutil.copytree(folder / "packed", folder / "gone" / "packed")
    rows = PackedRows(folder / "gone" / "packed" / "data" / "train")
    shutil.rmtree(folder / "gone")
    loader = Loader(rows, iter([[[0]]]), reading(dataloader_num_workers=1))
    with pytest.raises(ArtifactError) as error:
        next(loader)
    return [*told, str(error.value)]


@pytest.mark.slow
def test_what_goes_wrong_in_a_loading_process_reaches_the_rank(folder):
    [[index, artifact]] = on_ranks(1, failing, folder)
    assert "row 99 of 10" in index
    assert artifact.endswith("has no packed rows.\n  Run the pack stage first.")


def children_here():
    return [child.pid for child in multiprocessing.active_children() if child.pid]


def killed_loader(folder):
    loader = loader_of(folder, iter(STEPS), dataloader_num_workers=1, dataloader_prefetch_factor=1)
    next(loader)
    for child in children_here():
        os.kill(child, signal.SIGKILL)
    with pytest.raises(StageError) as error:
        list(loader)
    return str(error.value)


@one_day_in(3, of=0)
def test_a_loading_process_that_dies_is_told_with_what_to_write(folder):
    [told] = on_ranks(1, killed_loader, folder)
    assert "a process that loads rows is lost" in told
    assert "dataloader_num_workers: 0" in told


def interrupted(folder):
    """Ranks that die while others read ahead for them; those ignore what they are told before."""
    rank = torch.distributed.get_rank()
    loader = loader_of(folder, iter(STEPS), dataloader_num_workers=2)
    # Each has delivered once: before it ignores signals it is still starting.
    for _ in range(2):
        next(loader)
    children = children_here()
    for child in children:
        os.kill(child, signal.SIGTERM)
        os.kill(child, signal.SIGINT)
    for _ in range(7):
        next(loader)
    (folder / f"children_{rank}").write_text(json.dumps(children))
    torch.distributed.barrier()
    os.kill(os.getpid(), [signal.SIGKILL, signal.SIGTERM][rank])
    time.sleep(60)


def running(pid):
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@one_day_in(2, of=0)
def test_loading_processes_end_with_the_rank_and_not_before(folder):
    with pytest.raises(RankError, match="died without a word"):
        on_ranks(2, interrupted, folder)
    children = [
        child for rank in "01" for child in json.loads((folder / f"children_{rank}").read_text())
    ]
    assert len(children) == 4
    deadline = time.monotonic() + 20
    while any(running(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(running(child) for child in children)


def job(folder, out, *, epoch_rows=(), key="a" * 64, **train):
    settings = {"data_parallel_mode": "none", "optimizer": "sgd", **train}
    run = runs.run_config(folder / out, folder / "model", **settings)
    return runs.job_of(run, folder / "packed", key, epoch_rows)


@one_day_in(3, of=1)
def test_a_run_is_the_same_with_loading_processes_also_when_it_is_stopped(folder):
    endings = []
    for name, data in (("here", {}), ("ahead", {"dataloader_num_workers": 2})):
        made = job(folder, name, num_train_epochs=3, data=data)
        if data:
            assert on_ranks(1, train_until, made, 3) == [None]
        [facts] = on_ranks(1, runs.train_here, made)
        last = made.output_dir / facts["checkpoint"]
        files = {path.name: path.read_bytes() for path in sorted(last.iterdir())}
        endings.append((facts, files, runs.losses(made.output_dir)))
    assert endings[0] == endings[1]


def rows_of_steps(job):
    """The rows of every step of a run from its checkpoint on, and the state it ends with."""
    loop = loop_of(job)
    seen = []

    def noted(built, rows, costs, **sizes):
        seen.append(rows)
        return local_micro_batches(built, rows, costs, **sizes)

    with patch.object(trainer, "local_micro_batches", noted):
        facts = loop.run()
    return seen, facts


def test_a_named_checkpoint_is_gone_on_from_row_by_row_with_another_batch(folder):
    kept = {"data": {"dataloader_drop_last": False}, "enable_gradient_checkpointing": False}
    first = job(folder, "first", max_steps=2, **kept)
    [(before, _)] = on_ranks(1, rows_of_steps, first)
    named = {"load_checkpoint_path": str(first.output_dir / "checkpoints" / "global_step_2")}
    second = job(
        folder, "second", key="b" * 64, num_train_epochs=2, global_batch_size=1, **named, **kept
    )
    [(after, facts)] = on_ranks(1, rows_of_steps, second)
    taken = [row for rows in (*before, *after) for row in rows]
    assert [len(rows) for rows in before] == [4, 4]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    # Two steps of four rows, what was left of that epoch, and one of ten rows, one at a time.
    assert (facts["steps"], facts["epochs"]) == (2 + 2 + 10, 2)


def test_laid_out_epochs_are_taken_in_turn_and_other_rows_from_their_beginning(folder):
    made = job(
        folder,
        "in turn",
        epoch_rows=(6, 4),
        num_train_epochs=3,
        global_batch_size=2,
        max_steps=None,
    )
    [(steps, facts)] = on_ranks(1, rows_of_steps, made)
    epochs = [steps[:3], steps[3:5], steps[5:]]
    flat = [sorted(row for rows in epoch for row in rows) for epoch in epochs]
    assert flat == [list(range(6)), list(range(6, 10)), list(range(6))]
    assert (facts["steps"], facts["epochs"]) == (8, 3)
    named = {"load_checkpoint_path": str(made.output_dir / facts["checkpoint"])}
    other = job(folder, "others", key="b" * 64, **named)
    other = type(other)(**{**vars(other), "packed_key": "d" * 64})
    [(steps, facts)] = on_ranks(1, rows_of_steps, other)
    assert ([len(rows) for rows in steps], facts["steps"], facts["epochs"]) == ([4, 4], 10, 0.8)
