"""Loss weights of tokens: the loss and the gradients of transformers' logits, in every layout."""

import pytest
import torch
import transformers

from penstock.rows.reader import PackedRows
from tests.engine import runs
from tests.engine.inputs import MODELS, SHAPE, write_rows
from tests.engine.layouts import LAYOUTS
from tests.engine.loops import each, evaluated, loop_of
from tests.engine.traces import (
    Errors,
    errors,
    loss_of_transformers,
    trace_here,
    trace_of_transformers,
)
from tests.ranks import on_ranks
from tests.turns import one_day_in

LIMITS = Errors(loss=2e-6, norm=1e-5, gradients=1e-5, weights=1e-6)
AXES = ["shard 2", "ring 2", "tp 2, sequence parallel", "pp 2"]
FURTHER = ["replicate 2, ddp", "tp 2, logits gathered", "pp 2, ZBV", "shard 2, two rows at once"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weighted")
    write_rows(folder / "packed", 12, is_weighted=True)
    for kind in ("tied", "untied"):
        runs.write_model(folder / kind, noise=0.1, **{**SHAPE, **MODELS[kind]})
    return folder


@pytest.mark.dist
@one_day_in(2, of=0)
@pytest.mark.parametrize(
    "names",
    [AXES, pytest.param(["ulysses 2", *FURTHER], marks=pytest.mark.exhaustive)],
    ids=" | ".join,
)
def test_a_layout_weighs_tokens_as_plain_pytorch_does(names, folder):
    jobs = {name: LAYOUTS[name].job(folder, name) for name in names}
    found = on_ranks(2, each, trace_here, jobs, timeout=300)[0]
    for name in names:
        want = trace_of_transformers(folder, LAYOUTS[name].kind, found[name].rows)
        far = errors(found[name], want)
        assert far.within(LIMITS), f"{name}: {far}"


def evaluated_here(job):
    return evaluated(loop_of(job), PackedRows(job.packed_dir / "data" / "train"))


@pytest.mark.dist
@pytest.mark.slow
def test_an_evaluation_has_the_mean_of_weighted_losses(folder):
    job = LAYOUTS["ring 2"].job(folder, "evaluated")
    [found, _] = on_ranks(2, evaluated_here, job)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "tied", dtype=torch.float32)
    with torch.no_grad():
        want = loss_of_transformers(model, PackedRows(folder / "packed/data/train"), [*range(12)])
    assert found["eval_loss"] == pytest.approx(want.item(), rel=2e-6)
