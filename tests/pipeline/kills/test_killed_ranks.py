"""SIGKILL of a rank in the middle of a step, under the real torchrun."""

import os
import platform
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.core.errors import ConfigError, StageError
from penstock.core.process.rank_heartbeat import read_heartbeats
from penstock.train.launch.hang_watchdog import heartbeat_folder
from penstock.train.launch.job import CHECKPOINTS, LOGS, Job
from penstock.train.launch.torchrun import build_facts, start_ranks
from tests.engine import runs
from tests.ranks import on_ranks
from tests.turns import one_day_in

STEPS = 24
DEADLINE = 120.0


def job(folder: Path, name: str, packed: Path, **launch: object) -> Job:
    run = runs.run_config(
        folder / name, folder / "model", max_steps=STEPS, save_steps=4, optimizer="adamw"
    )
    env = {"OMP_NUM_THREADS": "1"}
    placed = run.launch.model_copy(update={"nproc_per_node": 2, "env": env, **launch})
    made = runs.job_of(run.model_copy(update={"launch": placed}), packed)
    (made.output_dir / LOGS).mkdir()
    return made


def kill_rank_1(job: Job, step: int, times: int) -> list[str]:
    """Have rank 1 killed as soon as it computes that step or a later one, once in each start."""
    done: list[str] = []

    def watch() -> None:
        killed: set[int] = set()
        deadline = time.monotonic() + DEADLINE
        while len(killed) < times and time.monotonic() < deadline:
            for beat in read_heartbeats(heartbeat_folder(job)):
                if beat.rank == 1 and beat.step >= step and beat.pid not in killed:
                    os.kill(beat.pid, signal.SIGKILL)
                    killed.add(beat.pid)
                    done.append(f"process {beat.pid}")
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    return done


def content(job: Job) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, bit by bit, and what is said beside them."""
    folder = job.output_dir / CHECKPOINTS / f"global_step_{STEPS}"
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads in one process
        dcp.load(found, storage_reader=reader, no_dist=True)
    bits = {name: tensor.numpy().tobytes() for name, tensor in found.items()}
    assert len(bits) > 20
    return {**bits, "state.json": (folder / "state.json").read_bytes()}


@one_day_in(3, of=1)
@pytest.mark.dist
def test_a_killed_rank_is_started_again_and_named_and_changes_no_weight(tmp_path):
    runs.write_config(tmp_path / "model")
    packed = runs.write_rows(tmp_path / "packed", 40)
    undisturbed = job(tmp_path, "undisturbed", packed)
    on_ranks(2, runs.train_here, undisturbed)

    # Killed once it starts again by itself, from the newest checkpoint; the second time it ends.
    disturbed = job(tmp_path, "disturbed", packed, max_restarts=1)
    disturbed.write()
    killed = kill_rank_1(disturbed, step=6, times=2)
    ended = start_ranks(disturbed, disturbed.output_dir / "job.json")
    assert len(killed) == 2
    with pytest.raises(StageError) as told:
        build_facts(disturbed, ended, "there")
    assert f"rank 1 on {platform.node()} ({killed[1]}) was killed by SIGKILL" in str(told.value)
    assert 6 <= len(runs.losses(disturbed.output_dir)) < STEPS

    again = replace(disturbed, launch_id="again")
    facts, _ = on_ranks(2, runs.train_here, again)
    assert facts["steps"] == STEPS
    assert runs.losses(again.output_dir) == runs.losses(undisturbed.output_dir)
    assert content(again) == content(undisturbed)


@one_day_in(3, of=2)
@pytest.mark.dist
def test_what_every_rank_refuses_is_told_once_and_without_a_traceback(tmp_path, capfdbinary):
    runs.write_config(tmp_path / "model")
    packed = runs.write_rows(tmp_path / "packed", 8)
    refused = replace(job(tmp_path, "refused", packed), max_token_id=10**6)
    refused.write()
    ended = start_ranks(refused, refused.output_dir / "job.json")
    with pytest.raises(StageError) as told:
        build_facts(refused, ended, "there")
    assert str(told.value).startswith("the packed rows hold token id 1000000, and the model's")
    assert told.value.exit_code == ConfigError.exit_code
    printed = capfdbinary.readouterr().err.decode()
    assert "Traceback" not in printed
    assert "exitcode" not in printed
