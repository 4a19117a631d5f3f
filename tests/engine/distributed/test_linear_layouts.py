"""Layouts of linear attention compute what one process does, to the last places of float64; what
it does not support is refused before any work, with what to write instead."""

import json
import os
import secrets

import pytest

from penstock.config.loading.load import loads
from penstock.core import env
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.validate_model import require_prompts_apart
from penstock.estimate.machine import check_layout, with_prompts_apart
from tests.config.values import smallest
from tests.engine import runs
from tests.engine.drawing import WORLDS, accepted, write_drawn_rows
from tests.engine.float64 import trace_in_float64
from tests.engine.inputs import MODELS, SHAPE
from tests.engine.loops import each
from tests.engine.traces import Errors, errors
from tests.ranks import on_ranks
from tests.turns import one_day_in

MODEL = {**runs.TINY, **SHAPE, **MODELS["linear attention"]}


def run_of(folder, nproc, data=None, *, model=MODEL, **train):
    (folder / "config.json").write_text(json.dumps(model))
    sections = {"data": data or {}, "launch": {"nproc_per_node": nproc}, "train": train}
    return loads(smallest(model={"config_path": str(folder)}, **sections))


@pytest.mark.parametrize(
    ("nproc", "train", "says"),
    [
        (8, {"tensor_parallel_size": 8}, "tensor_parallel_size is 8, .* linear_num_key_heads is 4"),
        (3, {"ulysses_parallel_size": 3}, "ulysses_parallel_size is 3, .* 8 num_attention_heads"),
    ],
    ids=str,
)
def test_a_layout_that_would_cut_heads_is_refused_with_one_that_does_not(
    tmp_path, monkeypatch, nproc, train, says
):
    monkeypatch.setattr(env, "num_gpus", lambda: 0)
    with pytest.raises(ConfigError, match=says) as refusal:
        check_layout(run_of(tmp_path, nproc, **train))
    assert "Write train." in str(refusal.value)
    check_layout(run_of(tmp_path, 4, tensor_parallel_size=4))
    check_layout(run_of(tmp_path, 6, ringattn_parallel_size=6))
    check_layout(run_of(tmp_path, 16, ringattn_parallel_size=2, ulysses_parallel_size=8))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"mamba_n_heads": 2}, "mamba_n_heads is 2: every rank must get equally many"),
        (
            {"mamba_expand": 3, "mamba_n_heads": 12, "mamba_n_groups": 3},
            "mamba_n_groups is 3: neither do ranks get equally many",
        ),
    ],
    ids=str,
)
def test_heads_and_groups_of_mamba_that_ranks_cannot_share_are_refused(
    tmp_path, monkeypatch, sizes, says
):
    monkeypatch.setattr(env, "num_gpus", lambda: 0)
    model = {**runs.TINY, **SHAPE, **MODELS["mamba"], **sizes}
    with pytest.raises(ConfigError, match=says) as refusal:
        check_layout(run_of(tmp_path, 4, tensor_parallel_size=4, model=model))
    assert "Write train." in str(refusal.value)
    check_layout(run_of(tmp_path, 1, model=model))


def test_prompts_are_not_shared_unless_that_is_written_which_is_refused(tmp_path):
    data = {"datasets": [{"path": "dummy", "type": "preference"}]}
    run = run_of(tmp_path, 1, data, objective="preference")
    apart, notes = with_prompts_apart(run)
    assert not apart.data.shares_prompts
    assert "linear attention cannot share them" in notes[0]
    written = run_of(tmp_path, 1, {**data, "share_prompts": True}, objective="preference")
    with pytest.raises(CapabilityError, match=r"Write data\.share_prompts: false"):
        require_prompts_apart(written.data, MODEL)


SEED = int(os.environ.get("LAYOUT_SEED") or secrets.randbelow(10**9))
"""Of all draws; with this variable in the environment the same are drawn again."""

LIMITS = Errors(loss=1e-9, norm=1e-9, gradients=1e-9, weights=1e-9)
"""In float32, gradients differ by up to 1e-4: what two layouts round differently, a state carries
from token to token."""
WEIGHTED = Errors(loss=1e-8, norm=1e-7, gradients=1e-6, weights=1e-7)
"""Loss weights are float32 whatever is computed in, and are divided by the largest of their
micro-batch (`penstock.losses.labels`), which is another one in another layout."""

LINEAR = (
    "linear attention",
    "dense linear attention",
    "separate linear attention",
    "channel linear attention",
    "mamba",
    "dense mamba",
    "layers of one part",
    "experts without a gate",
    "convolutions",
    "convolutions and experts",
)
TOGETHER = 2
"""Draws that share a start of the ranks."""


@pytest.mark.dist
@one_day_in(3, of=0)
@pytest.mark.parametrize(
    "group", [0, *(pytest.param(at, marks=pytest.mark.exhaustive) for at in range(1, 20))]
)
def test_layouts_of_linear_attention_differ_by_rounding_alone(group, tmp_path):
    write_drawn_rows(tmp_path)
    names = [f"draw {number}" for number in range(group * TOGETHER, (group + 1) * TOGETHER)]
    # Scales of quantized weights are float32 whatever is computed in.
    draws = {n: accepted(tmp_path, SEED, n, LINEAR, is_quantized=False) for n in names}
    print(f"LAYOUT_SEED={SEED}", *(f"{name}: {draws[name][0]}" for name in names), sep="\n")
    alone = {name: draw.job_alone(tmp_path, f"{name}, alone") for name, (draw, _) in draws.items()}
    [wanted] = on_ranks(1, each, trace_in_float64, alone, timeout=300)
    for world in WORLDS:
        jobs = {name: job for name, (draw, job) in draws.items() if draw.layout.world == world}
        traces = on_ranks(world, each, trace_in_float64, jobs, timeout=300)[0] if jobs else {}
        for name, trace in traces.items():
            far = errors(trace, wanted[name])
            print(f"{name}: {far}")
            limits = WEIGHTED if "rows weighted" in str(draws[name][0]) else LIMITS
            assert far.within(limits), f"{name}: {far}"
