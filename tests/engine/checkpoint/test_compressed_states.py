"""Checkpoints whose optimizer states are in few bits: what they hold, and how a run goes on."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.core.errors import ArtifactError
from penstock.engine.checkpoint.dcp_io import ShardView, whole_box
from penstock.engine.checkpoint.dcp_writer import write_boxes
from penstock.engine.checkpoint.folders import complete_checkpoints
from penstock.engine.checkpoint.quantized_boxes import QuantizedStates, compressed_boxes
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from tests.engine import runs
from tests.engine.loops import each, loop_of, parameters_of, save, step
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = [pytest.mark.slow, pytest.mark.dist]

NAME = "optimizer.layer.weight.exp_avg"
BEFORE, AFTER = 4, 3
"""Steps."""

FORMS = {"as they are": {}, "int8": {"ckpt_quant": "int8"}, "int4": {"ckpt_quant": "int4"}}
ANEW = {"save_optimizer": False}


def boxes_of(tensor, *cuts):
    """Its boxes, cut at these rows and columns."""
    rows, columns = ([0, *cut, size] for cut, size in zip(cuts, tensor.shape, strict=True))
    return [
        ShardView(tuple(tensor.shape), (top, left), tensor[top:bottom, left:right])
        for top, bottom in pairwise(rows)
        for left, right in pairwise(columns)
    ]


def written_and_read(folder):
    """A tensor, and what readers of other boxes find of it."""
    torch.manual_seed(0)
    tensor = torch.randn(7, 300)
    found = {}
    for form in ("int8", "int4"):
        boxes = {}
        for box in boxes_of(tensor, [3], [131, 290]):
            for name, part in compressed_boxes(NAME, box, form):
                boxes.setdefault(name, []).append(part)
        (folder / form).mkdir()
        write_boxes(boxes, folder / form, None)
        for cuts in (([], []), ([2, 4], []), ([], [1, 150]), ([3], [131, 290])):
            into = torch.full_like(tensor, torch.nan)
            states = QuantizedStates(CheckpointFiles(folder / form))
            parts = boxes_of(into, *cuts)
            assert states.read({NAME: parts, "other": parts}).keys() == {"other"}
            found[form, str(cuts)] = into.numpy()
    larger = [whole_box(torch.zeros(8, 300))]
    with pytest.raises(ArtifactError, match=f"holds 2100 of 2400 numbers of {NAME}"):
        QuantizedStates(CheckpointFiles(folder / "int8")).read({NAME: larger})
    return tensor.numpy(), found


def test_readers_of_other_boxes_find_the_same_numbers(tmp_path):
    [(tensor, found)] = on_ranks(1, written_and_read, tmp_path)
    for form, steps in (("int8", 127), ("int4", 7)):
        first, *others = (value for (its, _), value in found.items() if its == form)
        assert all(np.array_equal(first, other) for other in others)
        assert 0 < np.abs(first - tensor).max() <= np.abs(tensor).max() / steps / 2 * (1 + 1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compressed")
    runs.write_rows(folder / "packed", 32)
    runs.write_config(folder / "model")
    return folder


def job(folder, out, **train):
    settings = {"max_steps": BEFORE + AFTER, "lr": 0.01, **train}
    run = runs.run_config(folder / out, folder / "model", **settings)
    return runs.job_of(run, folder / "packed")


def continued(job):
    """A run that goes on from its checkpoint: where that is, what is said, whether it is told as
    compressed, the bytes of its states, and the weights there and at the end."""
    loop = loop_of(job)
    for _ in range(BEFORE):
        step(loop)
    save(loop)
    [there] = complete_checkpoints(job.output_dir / "checkpoints")
    state = json.loads((there / "state.json").read_text())
    tensors = CheckpointFiles(there).read_metadata().state_dict_metadata.items()
    size = sum(
        entry.size.numel() * entry.properties.dtype.itemsize
        for name, entry in tensors
        if name.startswith("optimizer.") and isinstance(entry, TensorStorageMetadata)
    )
    loop = loop_of(job)
    loop._resume()
    at, middle = loop.at.step, parameters_of(loop)
    for _ in range(AFTER):
        step(loop)
    return at, loop._early_warnings, state["compresses_states"], size, middle, parameters_of(loop)


def distance(one, other):
    return np.sqrt(sum(((one[name] - other[name]) ** 2).sum() for name in one))


@one_day_in(2, of=1)
def test_a_run_goes_on_from_few_bits_nearly_as_from_all_of_them(folder):
    alone = {"data_parallel_mode": "none"}
    jobs = {
        name: job(folder, name, **alone, **its) for name, its in {**FORMS, "anew": ANEW}.items()
    }
    jobs["behind"] = job(folder, "behind", **alone, ckpt_quant="int8", save_async=True)
    [found] = on_ranks(1, each, continued, jobs)
    _, told, compressed, size, middle, judge = found["as they are"]
    assert (told, compressed) == ([], False)
    moved = distance(judge, middle)
    off = {name: distance(end, judge) / moved for name, (*_, end) in found.items()}
    assert off["as they are"] == 0
    assert 0 < off["int8"] < 0.02
    assert off["int8"] < off["int4"] < 0.3
    assert off["anew"] > 2 * off["int4"]
    assert off["behind"] == off["int8"]
    # With scales, and the few numbers of vectors, which make blocks that are not full.
    for name, share in (("int8", 0.29), ("int4", 0.17)):
        at, told, compressed, its, _, _ = found[name]
        assert (at, compressed) == (BEFORE, True)
        assert any("holds the optimizer's states in few bits" in text for text in told)
        assert its / size < share


def begun(job):
    loop = loop_of(job)
    loop._resume()
    facts = runs.train_here(job)
    assert facts is not None
    return loop.at.step, bool(loop.built.engine.optimizer.state), facts["steps"]


@one_day_in(2, of=1)
def test_few_bits_that_two_ranks_saved_are_read_by_one_and_by_other_two(folder):
    cut = job(folder, "cut", data_parallel_shard_size=2, ckpt_quant="int4", max_steps=BEFORE)
    on_ranks(2, runs.train_here, cut)
    for world, its in (
        (1, {"data_parallel_mode": "none"}),
        (2, {"data_parallel_mode": "none", "tensor_parallel_size": 2}),
    ):
        there = str(cut.output_dir / "checkpoints" / f"global_step_{BEFORE}")
        made = job(folder, f"other {world}", load_checkpoint_path=there, **its)
        at, knows, steps = on_ranks(world, begun, made)[0]
        assert (at, knows, steps) == (BEFORE, True, BEFORE + AFTER)
