"""Ranks that run out of memory are started again with settings that need less."""

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.train_step import TrainStep
from penstock.train.launch import leaner_starts, torchrun
from penstock.train.launch.job import LOGS, Job
from penstock.train.launch.rank_failures import ran_out_of_memory, write_failure
from penstock.train.launch.torchrun import LaunchResult
from penstock.train.rank import _with_same_settings
from tests import warm_ranks
from tests.cli.command import penstock, small_run
from tests.engine import loops
from tests.engine.runs import losses, short_job, train_here, write_model, write_rows
from tests.ranks import on_ranks

STEPS = 3
SETTINGS = {"max_steps": STEPS, "global_batch_size": 4, "save_steps": 1, "optimizer": "sgd"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "packed", 16)
    write_model(tmp_path / "model")
    return tmp_path


def weights(job: Job) -> loops.Arrays:
    """Of the job's last checkpoint."""
    loop = loops.loop_of(job)
    loop._resume()
    assert loop.at.step == STEPS
    found = loops.parameters_of(loop)
    loop.close()
    return found


@pytest.mark.parametrize("nnodes", [1, 2])
def test_rows_at_once_are_halved_until_they_fit_and_the_run_goes_on(folder, nnodes, monkeypatch):
    """One node: four rows never fit, and two do not in the second step."""
    take_step, started = TrainStep.step, []

    def step(self, batches, lr, number, *args, **kwargs):
        rows = max(len(batch.rows) for batch in batches)
        if rows == 4 or (rows == 2 and number == 1):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return take_step(self, batches, lr, number, *args, **kwargs)

    def start_ranks(job: Job, file: Path) -> LaunchResult:
        started.append(Job.read(file).config.train.micro_batch_size)
        try:
            train_here(job)
        except torch.OutOfMemoryError as error:
            write_failure(job.output_dir / LOGS, 0, error)
            return LaunchResult(1)
        return LaunchResult(0)

    written = short_job(folder, "written", **SETTINGS, micro_batch_size=1)
    train_here(written)
    monkeypatch.setattr(TrainStep, "step", step)
    monkeypatch.setattr(leaner_starts, "start_ranks", start_ranks)
    job = short_job(folder, "auto", **SETTINGS, micro_batch_size=4)
    job = Job(**{**vars(job), "config": job.config.with_fields("launch", nnodes=nnodes)})
    leaner = [{"micro_batch_size": 2}, {"micro_batch_size": 1}]
    (job.output_dir / LOGS).mkdir(parents=True, exist_ok=True)
    last, ended = leaner_starts.start_leaner_ranks(job, job.write(), leaner)
    if nnodes == 2:
        assert (started, ended.exit_status) == ([4], 1)
        return
    assert (started, ended.exit_status) == ([4, 2, 1], 0)
    assert last.launch_id != job.launch_id
    failures = sorted((job.output_dir / LOGS).rglob("failure_0.json"))
    assert [file.parent.name for file in failures] == ["out_of_memory_1", "out_of_memory_2"]
    assert losses(job.output_dir) == pytest.approx(losses(written.output_dir), rel=1e-5)
    found, wanted = weights(last), weights(written)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("expected scalar type Float"), False),
    ],
)
def test_what_counts_as_too_little_memory(error, expected, tmp_path):
    (tmp_path / LOGS).mkdir()
    write_failure(tmp_path / LOGS, 0, error)
    assert ran_out_of_memory(tmp_path / LOGS) == expected


SHORT_OF_MEMORY = """
import os

import torch
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.train_step import TrainStep

take_step = TrainStep.step


def step(self, batches, *args, **kwargs):
    if os.environ["RANK"] == "1" and max(len(batch.rows) for batch in batches) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return take_step(self, batches, *args, **kwargs)


TrainStep.step = step
"""


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_of_two_ranks_goes_on_after_one_is_out_of_memory(tmp_path, monkeypatch):
    # Under torchrun is the start that fails: its agent ends the other rank.
    starts = iter([warm_ranks.run_ranks, torchrun.run_ranks, warm_ranks.run_ranks])
    monkeypatch.setattr(torchrun, "run_ranks", lambda *args, **more: next(starts)(*args, **more))
    # Imported by each rank as it starts.
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "step_patch.py").write_text(SHORT_OF_MEMORY)
    (patch / "sitecustomize.py").write_text(
        "import os\nif 'RANK' in os.environ:\n    import step_patch\n"
    )
    found = {}
    for name, size in {"written": 1, "auto": "auto"}.items():
        train = {"output_dir": str(tmp_path / name), "data_parallel_mode": "fsdp2"}
        train |= {"global_batch_size": 4, "micro_batch_size": size}
        launch = {"nproc_per_node": 2, "env": {"PYTHONPATH": str(patch)}}
        said = penstock("train", small_run(tmp_path, train=train, launch=launch))
        assert said.code == 0, said.err
        chosen = "micro_batch_size: 2, as about" in said.err
        restarted = "memory ran out; the ranks start again with" in said.err
        assert chosen == restarted == (name == "auto")
        found[name] = losses(tmp_path / name)
    assert not [*starts]
    assert found["auto"] == pytest.approx(found["written"], rel=1e-4)


def settings_of_ranks(jobs: list[Job]) -> list[tuple]:
    """What a rank trains with whose launcher has chosen the settings of its job."""
    ranks = init_process_group(60)
    trains = [_with_same_settings(job, ranks).config.train for job in jobs[ranks.rank :: 2]]
    return [
        (train.rows_at_once, train.enable_gradient_checkpointing, train.recompute_modules)
        for train in trains
    ]


@pytest.mark.dist
def test_nodes_that_choose_unlike_settings_take_what_needs_less_memory(folder):
    nothing = {"enable_gradient_checkpointing": False}
    network = {"recompute_modules": ["mlp"]}
    pairs = [
        ({"micro_batch_size": 2, **network}, {"micro_batch_size": 4, **network}),
        ({"micro_batch_size": 2, **network}, {"micro_batch_size": 2, **nothing}),
        (nothing, nothing),
    ]
    jobs = [
        short_job(folder, "out", global_batch_size=4, **settings)
        for pair in pairs
        for settings in pair
    ]
    expected = [(2, True, ["mlp"]), (2, True, None), (1, False, None)]
    assert on_ranks(2, settings_of_ranks, jobs) == [expected, expected]
