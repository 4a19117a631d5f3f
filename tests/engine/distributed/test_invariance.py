"""The layout never changes the result: losses, gradients, weights, checkpoints and exports."""

import os
import random
import secrets
from functools import cache
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.inputs import MODELS, write_rows
from tests.engine.laid import MAX_NORM, alone
from tests.engine.layouts import LAYOUTS
from tests.engine.loops import each
from tests.engine.traces import Errors, errors, exported, trace_here, trace_of_transformers
from tests.ranks import on_ranks
from tests.turns import one_day_in, over_days

# Sums in another order, from fp32; half as much or less is seen.
LIMITS = Errors(loss=2e-6, norm=1e-5, gradients=1e-5, weights=1e-6)
# Their second factor starts at zero: all of it is a sum of gradients.
OF_ADAPTERS = Errors(loss=2e-6, norm=1e-5, gradients=1e-5, weights=1e-5)
# Decays of states are sums over many tokens, and their gradients differences of such sums.
OF_STATES = Errors(loss=2e-6, norm=1e-5, gradients=3e-5, weights=3e-5)

CORE = {
    2: [
        *("shard 2", "ring 2", "tp 2, sequence parallel", "pp 2"),
        "merged adapters, shard 2, offloaded",
    ],
    4: [
        *("replicate 2 x shard 2", "pp 2 x tp 2", "shard 2 x ulysses 2", "ring 2 x tp 2"),
        "a stage without experts, pp 2 x tp 2",
    ],
}
"""Every axis at once and each in a pair, adapters that are merged into rows of a shard, and groups
that a stage does not use, in two starts of the ranks on two days."""
SEED = int(os.environ.get("LAYOUT_SEED") or secrets.randbelow(10**9))
"""Of the layouts that are drawn; a failure shows it, and with this variable in the environment the
same are drawn again."""

DRAWN = {1: 1, 2: 2, 4: 1}
"""So many of the layouts on so many ranks are drawn by default, whose kinds of layers take turns;
all are compared with `pytest -m exhaustive`."""

TOGETHER = 6
"""Layouts that share a start of the ranks."""


def layouts_of(world):
    """All of so many ranks that are not in the core."""
    core = {name for names in CORE.values() for name in names}
    return [
        layout.name
        for layout in LAYOUTS.values()
        if layout.world == world and layout.name not in core
    ]


def groups():
    """The core, and all others, as many at a time as share a start."""
    for at, names in enumerate(CORE.values()):
        yield pytest.param(names, "plain", id=" | ".join(names), marks=one_day_in(2, of=at))
    # In these torch compares what the ranks ask of one another, which takes as long again.
    for at, name in enumerate(chain(*CORE.values())):
        yield pytest.param([name], "checked", id=f"{name}, checked", marks=one_day_in(10, of=at))
    marks = [pytest.mark.slow, pytest.mark.exhaustive]
    for world in sorted({layout.world for layout in LAYOUTS.values()}):
        names = layouts_of(world)
        for start in range(0, len(names), TOGETHER):
            group = names[start : start + TOGETHER]
            yield pytest.param(group, "plain", id=" | ".join(group), marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    write_rows(folder / "packed", 24)
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    @cache
    def made(name):
        job = named[name].job(folder, name)
        return on_ranks(1, trace_here, job)[0], exported(job)

    named = {layout.alone.name: layout.alone for layout in LAYOUTS.values()}

    return made


LATER = (
    *("untied", "learned positions", "output norms", "fused layers", "soft caps", "gemma 3"),
    *("gemma 4", "parallel blocks", "scales", "query scales", "dense linear attention"),
    *("convolutions", "separate linear attention", "dense mamba"),
)
"""Kinds of models that take turns."""


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["tied", *over_days(LATER, 4)])
def test_one_process_computes_what_transformers_does(kind, folder, reference):
    trace, files = reference(alone(kind).name)
    assert all(norm > MAX_NORM for norm in trace.norms), "what is clipped must differ"
    found = errors(trace, trace_of_transformers(folder, kind, trace.rows))
    limits = OF_STATES if kind.endswith("linear attention") else LIMITS
    assert found.within(limits), found
    [source] = (folder / kind).glob("*.safetensors")
    (folder / "exported.safetensors").write_bytes(files["hf/model.safetensors"])
    mine, theirs = load_file(folder / "exported.safetensors"), load_file(source)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.dist
@pytest.mark.parametrize(("names", "collectives"), list(groups()))
def test_a_layout_computes_and_exports_what_one_process_does(names, collectives, folder, reference):
    [world] = {LAYOUTS[name].world for name in names}
    jobs = {name: LAYOUTS[name].job(folder, f"{name}, {collectives}") for name in names}
    found = on_ranks(world, each, trace_here, jobs, timeout=300, collectives=collectives)[0]
    for name, job in jobs.items():
        layout = LAYOUTS[name]
        trace, files = reference(layout.alone.name)
        far = errors(found[name], trace)
        limits = OF_ADAPTERS if layout.lora else LIMITS
        if layout.kind.endswith(("linear attention", "mamba", "one part")):
            limits = OF_STATES
        assert far.within(limits), f"{name}: {far}"
        assert exported(job) == files, f"{name} does not export the same bytes"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("world", DRAWN)
def test_layouts_that_are_drawn_compute_what_one_process_does(world, folder, reference):
    print(f"LAYOUT_SEED={SEED}")
    names = random.Random(SEED).sample(layouts_of(world), DRAWN[world])
    test_a_layout_computes_and_exports_what_one_process_does(names, "plain", folder, reference)


def test_every_axis_is_there_alone_and_every_two_of_them_together():
    shapes = [
        {axis for axis, size in layout.sizes.items() if size > 1} for layout in LAYOUTS.values()
    ]
    axes = set().union(*shapes)
    assert len(axes) == 6
    assert all({axis} in shapes for axis in axes)
    assert all({one, other} in shapes for one in axes for other in axes - {one})
    assert sum(len(shape) > 1 for shape in shapes) >= 24
    assert {layout.kind for layout in LAYOUTS.values()} == set(MODELS)
