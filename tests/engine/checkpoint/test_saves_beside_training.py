"""Saves behind training, copied as late as training lets them: they are of their step, to the bit,
whatever changes weights and wherever in a step."""

import threading
import time
from itertools import pairwise

import pytest

from penstock.core.files import regular_files
from penstock.engine.checkpoint import checkpoint_manager
from penstock.engine.checkpoint.async_staging import StagingBuffers
from tests.engine import runs
from tests.ranks import on_ranks
from tests.turns import one_day_in

STEPS = 3
PATIENCE, MORE = 3.0, 0.02
"""Seconds until a copy is made though nobody waits for it, and after somebody does."""

SHARDED = {"data_parallel_mode": "fsdp2"}
WAYS = {
    "after the backward pass": SHARDED,
    "within it": {**SHARDED, "fuse_optimizer_step": True, "max_grad_norm": 0},
    "on the host": {**SHARDED, "optimizer_offload": "cpu"},
    # Gradients overflow, so the update is left out, and adapters begin anew all the same.
    "without an update": {
        "data_parallel_mode": "ddp",
        "precision": "fp16_mixed",
        "enable_mixed_precision": True,
        "loss_scale_init": 2.0**40,
        "lora": {"enable_lora": True, "lora_rank": 4, "merge_lora_interval": 1},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    runs.write_rows(folder / "packed", 12)
    runs.write_config(folder / "model")
    return folder


def job(folder, out, **train):
    settings = {"max_steps": STEPS, "save_steps": 1, **train}
    run = runs.run_config(folder / out, folder / "model", **settings)
    return runs.job_of(run, folder / "packed")


class LateCopies(StagingBuffers):
    """Begins when a change waits for it, but for the last of a run, which none follows."""

    def __init__(self):
        super().__init__()
        self.waits, self.left = threading.Event(), STEPS

    def start(self):
        self.waits.clear()
        super().start()

    def wait(self):
        self.waits.set()
        super().wait()

    def _copy(self, boxes):
        self.left -= 1
        if self.left:
            self.waits.wait(PATIENCE)
            time.sleep(MORE)
        return super()._copy(boxes)


def all_of(jobs):
    copies, checkpoint_manager.StagingBuffers = checkpoint_manager.StagingBuffers, LateCopies
    for its in jobs:
        runs.train_here(its)
    checkpoint_manager.StagingBuffers = copies


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in regular_files(root)}


@pytest.mark.dist
@one_day_in(3, of=2)
def test_what_is_copied_while_training_goes_on_is_as_it_was_at_the_save(folder):
    jobs = {
        (way, asked): job(folder, f"{way} {asked}", save_async=asked, **settings)
        for way, settings in WAYS.items()
        for asked in (False, True)
    }
    on_ranks(2, all_of, list(jobs.values()))
    for way in WAYS:
        waited, behind = (
            contents(jobs[way, asked].output_dir / "checkpoints") for asked in (False, True)
        )
        assert {path.parts[0] for path in waited} == {f"global_step_{step}" for step in (1, 2, 3)}
        assert behind == waited, way
        steps = [
            {path.name: data for path, data in waited.items() if path.parts[0].endswith(number)}
            for number in "123"
        ]
        # In each step something did change.
        for before, after in pairwise(steps):
            assert before["__0_0.distcp"] != after["__0_0.distcp"], way
