"""A run that is interrupted and resumed ends with the very bits of one that was not."""

import json
import shutil
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penstock.core.errors import ArtifactError, ConfigError
from penstock.engine import rng
from penstock.engine.checkpoint.folders import complete_checkpoints, read_state
from penstock.train.launch.stop_request import StopRequest
from penstock.train.metrics.jsonl import MetricsLog, read_metrics
from tests.engine import runs
from tests.engine.loops import loop_of
from tests.ranks import on_ranks
from tests.turns import taking_turns

LAYOUTS = {
    "none": (1, {"data_parallel_mode": "none", "dropout": {"hidden": 0.1}}),
    "ddp": (2, {"data_parallel_mode": "ddp"}),
    "fsdp2": (2, {"data_parallel_mode": "fsdp2"}),
    "fsdp2 in bf16": (2, {"data_parallel_mode": "fsdp2", "enable_mixed_precision": True}),
    "fsdp2 with lora": (
        2,
        {
            "data_parallel_mode": "fsdp2",
            "dropout": {"hidden": 0.1},
            "lora": {"enable_lora": True, "lora_dropout": 0.1},
        },
    ),
    "fsdp2 with qlora, merged": (
        2,
        {
            "data_parallel_mode": "fsdp2",
            "lora": {
                "enable_lora": True,
                "enable_qlora": True,
                "exclude_modules": ["mlp"],
                "merge_lora_interval": 2,
            },
        },
    ),
    "stages of rings": (4, {"pipeline_parallel_size": 2, "ringattn_parallel_size": 2}),
}
DIVIDED = [layout for layout in LAYOUTS if layout != "none"]


class StopAfter(StopRequest):
    """Asks to stop as a signal would, once the log holds so many steps: after the one under way."""

    def __init__(self, metrics, step):
        super().__init__()
        self.metrics, self.step = metrics, step

    def __bool__(self):
        return len(list(read_metrics(self.metrics))) >= self.step


def train_until(job, step):
    return runs.train_here(job, StopAfter(job.output_dir / "metrics.jsonl", step))


def train_and_begin(whole, stopped, step):
    """The facts of a run, and what those of one are that is stopped."""
    return runs.train_here(whole), train_until(stopped, step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    runs.write_rows(folder / "packed", 24)
    runs.write_config(folder / "model")
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["none", *taking_turns(DIVIDED, 1)])
def test_a_resumed_run_ends_with_the_same_bytes(layout, folder):
    world, settings = LAYOUTS[layout]

    def job(name, **train):
        out = folder / layout.replace(" ", "_") / name
        run = runs.run_config(out, folder / "model", save_steps=3, **train, **settings)
        return runs.job_of(run, folder / "packed")

    def ending(job, facts):
        last = job.output_dir / facts["checkpoint"]
        files = {path.name: path.read_bytes() for path in sorted(last.iterdir())}
        return facts, files, runs.losses(job.output_dir)

    whole, stopped = job("whole", save_async=False), job("stopped", save_async=True)
    # Stopped before anything is saved by itself, and after it.
    begun = on_ranks(world, train_and_begin, whole, stopped, 1)
    assert [facts for _, facts in begun] == [None] * world
    assert on_ranks(world, train_until, stopped, 4) == [None] * world
    expected = ending(whole, begun[0][0])
    assert ".metadata" in expected[1]
    assert ending(stopped, on_ranks(world, runs.train_here, stopped)[0]) == expected


def gone_on(job):
    """On this rank: what a run knows beside its weights at its second step, what the next start of
    it knows, and what it then evaluates; once more after what it found was logged."""
    loop = loop_of(job)
    loop._resume()
    for _ in range(2):
        loop._step()
    torch.rand(1 + 2 * loop.ranks.rank)  # no rank has drawn as many numbers as another
    loop.judge.update({"eval_loss": 3.0})
    loop.judge.update({"eval_loss": 3.5})
    loop.clock.resume_from(1000.0)
    loop.saves.save(loop.at, loop._trainer_state({"evaluation"}))
    loop.saves.finish()
    told: list[Any] = [(loop.at, loop.judge.state_dict(), rng.get_rng_state(), None)]
    for record in ({"step": 1, "eval_loss": 3.5}, {"step": 2, "time": 1.0, "eval_loss": 2.5}):
        if loop.ranks.is_main_process:
            log = MetricsLog(job.output_dir / "metrics.jsonl", 2)
            log.append(record)
            log.append({"step": 2, "loss": 6.0})
            log.close()
        loop.ranks.barrier()
        again = loop_of(job)
        due = again._resume()
        assert due == {"evaluation"}
        assert 1000 <= again.clock.seconds < 2000
        known = again.at, again.judge.state_dict(), rng.get_rng_state()
        assert again.held_out
        with patch.object(again.held_out, "evaluate", lambda _: {"eval_loss": 4.5}):
            assert again._run_due_evals(due, 0)
        assert not due
        told.append((*known, again._evaluated))
    return told


@pytest.mark.dist
def test_a_run_that_goes_on_knows_on_every_rank_what_it_knew(tmp_path):
    runs.write_rows(tmp_path / "packed", 12)
    runs.write_rows(tmp_path / "packed", 2, seed=1, split="validation")
    runs.write_config(tmp_path / "model")
    its = runs.run_config(
        tmp_path / "out",
        tmp_path / "model",
        data_parallel_mode="ddp",
        max_hours=1.0,
        eval_steps=1,
        early_stopping={"patience": 3},
        data={"val_set_size": 2},
    )
    found = on_ranks(2, gone_on, runs.job_of(its, tmp_path / "packed"))
    for (at, judged, drawn, _), *starts in found:
        for number, known in enumerate(starts):
            assert known[:3] == (at, judged, drawn)
            # What an earlier step found is not what this one is owed; what it found itself is.
            assert known[3] == {"eval_loss": [4.5, 2.5][number]}
        assert at.step == 2
        assert (judged["judged"]["reached"], judged["judged"]["waited"]) == (-3.0, 1)
    assert found[0][0][2] != found[1][0][2]


@pytest.mark.dist
def test_an_unfinished_save_is_never_resumed_from(folder):
    out = folder / "cut"
    run = runs.run_config(out, folder / "model", data_parallel_mode="none", save_steps=2)
    job = runs.job_of(run, folder / "packed")
    on_ranks(1, train_until, job, 3)
    root = out / "checkpoints"
    whole = root / "global_step_4"
    shutil.copytree(whole, root / "global_step_5.part")
    (root / "global_step_5").mkdir()
    shutil.copy(whole / "state.json", root / "global_step_5" / "state.json")
    assert complete_checkpoints(root)[-1] == whole
    with pytest.raises(ArtifactError, match="not a complete checkpoint"):
        read_state(root / "global_step_5")
    assert on_ranks(1, runs.train_here, job)[0]["steps"] == 6
    assert not list(root.glob("*.part"))


@pytest.fixture(scope="module")
def named(folder):
    """The last checkpoint of a run of six steps."""
    first = runs.run_config(folder / "first", folder / "model", data_parallel_mode="none")
    runs.train_here(runs.job_of(first, folder / "packed"))
    return folder / "first" / "checkpoints" / "global_step_6"


def test_a_run_starts_from_a_checkpoint_that_is_named(folder, named):
    more = runs.run_config(
        folder / "more",
        folder / "model",
        data_parallel_mode="none",
        load_checkpoint_path=str(named),
        max_steps=8,
    )
    runs.train_here(runs.job_of(more, folder / "packed", key="b" * 64))
    steps = [record["step"] for record in read_metrics(folder / "more" / "metrics.jsonl")]
    assert steps == [7, 8]


def test_a_named_checkpoint_beyond_the_end_of_the_run_is_refused(folder, named):
    short = runs.run_config(
        folder / "short",
        folder / "model",
        data_parallel_mode="none",
        load_checkpoint_path=str(named),
        max_steps=6,
    )
    with pytest.raises(ConfigError, match=r"has taken 6 steps.*ends at 6"):
        runs.train_here(runs.job_of(short, folder / "packed", key="b" * 64))


def test_metrics_hold_each_step_once_after_a_rewind(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, 0)
    for step in range(1, 6):
        first.append({"step": step})
    first.close()
    with path.open("a") as stream:
        stream.write('{"step": 6, "lo')  # cut short by a crash
    again = MetricsLog(path, 3)
    again.append({"step": 4})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
