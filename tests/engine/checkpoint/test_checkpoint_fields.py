"""What checkpoints are called and hold, and what a run takes from one to begin with."""

import json

import numpy as np
import pytest
import torch

from penstock.core.errors import ArtifactError
from penstock.core.files import regular_files
from penstock.engine.checkpoint.folders import CheckpointNaming, complete_checkpoints
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.train.launch.upload_selection import files_to_download, files_to_upload
from penstock.train.metrics.jsonl import read_metrics
from penstock.train.stage import require_checkpoint
from tests.engine import runs
from tests.engine.checkpoint.test_checkpoint import everything
from tests.engine.loops import loop_of, parameters_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist

LORA = {"lora": {"enable_lora": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    runs.write_rows(folder / "packed", 10)
    runs.write_config(folder / "model")
    return folder


def job(folder, out, *, key="a", initial=None, **train):
    settings = {"data_parallel_mode": "none", "max_steps": 3, **train}
    run = runs.run_config(folder / out, folder / "model", **settings)
    return runs.job_of(run, folder / "packed", key=key * 64, initial=initial)


def begun(job):
    """A run before its first step: where it is, its weights, whether the optimizer knows anything,
    and what is said."""
    loop = loop_of(job)
    loop._resume()
    knows = bool(loop.built.engine.optimizer.state)
    return loop.at.step, parameters_of(loop), knows, loop._early_warnings


def beginnings(first, jobs):
    """How each of these runs begins, after the first is over; a text where one is refused."""
    runs.train_here(first)
    found = {}
    for name, its in jobs.items():
        try:
            found[name] = begun(its)
        except ArtifactError as error:
            found[name] = str(error)
    return found


def test_a_run_begins_with_as_much_of_a_checkpoint_as_is_written(folder):
    first = job(folder, "first")
    there = first.output_dir / "checkpoints" / "global_step_3"
    named = {"load_checkpoint_path": str(there), "max_steps": 9}
    weights = {**named, "load_optimizer": False}
    own = {"max_steps": 9, "load_checkpoint_path": "auto"}
    jobs = {
        "all": job(folder, "all", key="b", **named),
        "weights": job(folder, "weights", key="b", **weights),
        "another optimizer": job(folder, "another", key="b", optimizer="sgd", **weights),
        "another optimizer, all": job(folder, "mixed", key="b", optimizer="sgd", **named),
        "its own": job(folder, "first", **own),
        "weights of its own": job(folder, "first", **own, load_optimizer=False),
        # What is named is for the first start; an interruption changes nothing.
        "its own, weights named": job(folder, "first", **weights),
        "initial": job(folder, "initial", key="b", initial=there),
        "its own before initial": job(folder, "first", initial=there, max_steps=9),
        "initial adapters": job(folder, "mixed", key="b", initial=there, **LORA),
        "nothing": job(folder, "nothing", key="b"),
    }
    [found] = on_ranks(1, beginnings, first, jobs)
    assert "trained with adamw, and this run's optimizer is sgd" in found["another optimizer, all"]
    assert "take its weights alone" in found["another optimizer, all"]
    assert "holds a full model, and this run trains adapters only" in found["initial adapters"]
    wanted = {
        "all": (3, True),
        "weights": (3, False),
        "another optimizer": (3, False),
        "its own": (3, True),
        "weights of its own": (3, False),
        "its own, weights named": (3, True),
        "initial": (0, False),
        "its own before initial": (3, True),
    }
    reader = CheckpointReader(there)
    saved = reader.read(reader.shapes())
    for name, (at, knows) in wanted.items():
        its_step, parameters, its_knows, told = found[name]
        assert (its_step, its_knows) == (at, knows), name
        for tensor, weight in saved.items():
            assert np.array_equal(parameters[tensor], weight.numpy()), (name, tensor)
        said = [text for text in told if "(train.load_optimizer: false)" in text]
        assert len(said) == len(told) == (at == 3 and not knows), name
    at, parameters, *_ = found["nothing"]
    assert at == 0
    assert any(not np.array_equal(parameters[name], saved[name].numpy()) for name in saved)


def starts(jobs):
    """The names of checkpoints after each start of a run, and its facts."""
    return [
        (runs.train_here(its), [path.name for path in complete_checkpoints(root_of(its))])
        for its in jobs
    ]


def root_of(job):
    return job.output_dir / "checkpoints"


def test_checkpoints_bear_the_name_that_is_written_and_are_found_by_it(folder):
    name, other = "tiny--{step}-{consumed_samples}", "{consumed_samples}rows.{step}"
    jobs = [
        job(folder, "named", ckpt_name=called, max_steps=end, save_steps=1, save_total_limit=2)
        for called, end in ((name, 2), (name, 4), (other, 6))
    ]
    [((_, one), (_, two), (facts, three))] = on_ranks(1, starts, jobs)
    assert one == ["tiny--1-4", "tiny--2-8"]
    # The one that a start has gone on from is kept.
    assert two == ["tiny--2-8", "tiny--3-12", "tiny--4-16"]
    # A run deletes what it calls so itself alone.
    assert three == [*two, "20rows.5", "24rows.6"]
    assert facts["checkpoint"] == "checkpoints/24rows.6"
    out = jobs[0].output_dir
    steps = [record["step"] for record in read_metrics(out / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]
    names = [path.relative_to(out).as_posix() for group in files_to_upload(out) for path in group]
    assert {f"checkpoints/{each}/COMPLETE" for each in three} < {*names}
    elsewhere = folder / "elsewhere"
    with pytest.raises(ArtifactError, match=r"(?s)has a checkpoint .*Write ckpt_name as it was"):
        files_to_download(names, elsewhere, CheckpointNaming(name))
    mine = [each for each in names if "rows" not in each]
    assert (
        files_to_download(mine, elsewhere, CheckpointNaming(name))[-1]
        == "checkpoints/tiny--4-16/COMPLETE"
    )


def test_the_best_checkpoint_is_named_as_it_is_called(folder):
    runs.write_rows(folder / "judged", 10)
    runs.write_rows(folder / "judged", 2, seed=1, split="validation")
    its = job(
        folder,
        "best",
        ckpt_name="{step}-best-of-{consumed_samples}",
        eval_steps=1,
        save_best={"metric": "eval_loss", "mode": "max"},
        data={"val_set_size": 2},
    )
    its = runs.job_of(its.config, folder / "judged")
    [facts] = on_ranks(1, runs.train_here, its)
    root = root_of(its)
    step = facts["best_step"]
    assert (root / "best").read_text() == f"{step}-best-of-{4 * step}\n"
    assert facts["checkpoint"] == f"checkpoints/{step}-best-of-{4 * step}"
    assert facts["last_checkpoint"] == "checkpoints/3-best-of-12"


def rounded(jobs):
    """How each of these runs goes on once it is over."""
    told = {}
    for name, its in jobs.items():
        runs.train_here(its)
        told[name] = begun(its)
    return told


def test_a_checkpoint_holds_the_weights_that_are_written(folder):
    jobs = {
        f"{kind}, {when}": job(
            folder,
            f"{kind} {when}",
            enable_mixed_precision=True,
            ckpt_weights=kind,
            save_async=when == "behind",
        )
        for kind, when in (("master", "at once"), ("compute", "at once"), ("compute", "behind"))
    }
    [told] = on_ranks(1, rounded, jobs)
    found, sizes = {}, {}
    for name, its in jobs.items():
        [there] = complete_checkpoints(root_of(its))
        found[name] = everything(there)
        state = json.loads((there / "state.json").read_text())
        assert state["rounds_weights"] == name.startswith("compute")
        sizes[name] = sum(path.stat().st_size for path in regular_files(there))
    master, compute, behind = found.values()
    assert master.keys() == compute.keys() == behind.keys()
    for name, tensor in master.items():
        is_weight = name.startswith("model.")
        assert tensor.dtype == torch.float32
        assert compute[name].dtype == (torch.bfloat16 if is_weight else torch.float32)
        assert torch.equal(compute[name], tensor.bfloat16() if is_weight else tensor), name
        assert torch.equal(compute[name], behind[name])
    numbers = sum(tensor.numel() for name, tensor in master.items() if name.startswith("model."))
    saved = sizes["master, at once"] - sizes["compute, at once"]
    assert saved == pytest.approx(2 * numbers, rel=0.1)
    for name, (at, parameters, knows, warnings) in told.items():
        assert (at, knows) == (3, True)
        for tensor, weight in parameters.items():
            assert np.array_equal(weight, found[name][f"model.{tensor}"].float().numpy()), name
        assert [("ckpt_weights: compute" in text) for text in warnings] == [True] * (
            not name.startswith("master")
        )


def test_what_is_computed_in_what_it_is_kept_in_is_saved_so(folder):
    made = job(folder, "plain", ckpt_weights="compute", max_steps=1)
    on_ranks(1, runs.train_here, made)
    [there] = complete_checkpoints(root_of(made))
    assert {shape[1] for shape in CheckpointReader(there).shapes().values()} == {torch.float32}
    assert not json.loads((there / "state.json").read_text())["rounds_weights"]


def test_a_checkpoint_that_is_required_and_is_not_there_ends_a_run_before_it_begins(folder):
    required = {"load_checkpoint_path": "auto", "require_checkpoint": True}
    made = job(folder, "required", max_steps=1)
    with pytest.raises(ArtifactError, match="holds no complete checkpoint of this run"):
        require_checkpoint(job(folder, "required", **required))
    on_ranks(1, runs.train_here, made)
    require_checkpoint(job(folder, "required", **required))
    with pytest.raises(ArtifactError, match="of this run"):
        require_checkpoint(job(folder, "required", key="b", **required))
