"""The layout never changes the result: losses, gradients, weights, checkpoints and exports."""

import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from penstock.train.job import CHECKPOINTS
from tests.engine import runs
from tests.engine.layouts import LAYOUTS, MAX_NORM, MODELS, alone, write_inputs
from tests.engine.loops import each, loop_of, step
from tests.engine.traces import STEPS, Errors, errors, exported, trace_here, trace_of_transformers
from tests.ranks import on_ranks

# Sums in another order, from fp32; half as much or less is seen.
LIMITS = Errors(loss=2e-6, norm=1e-5, gradients=1e-5, weights=1e-6)
# Their second factor starts at zero: all of it is a sum of gradients.
OF_ADAPTERS = Errors(loss=2e-6, norm=1e-5, gradients=1e-5, weights=1e-5)

CORE = {
    2: ["shard 2", "ring 2", "tp 2, sequence parallel", "pp 2"],
    4: ["replicate 2 x shard 2", "pp 2 x tp 2", "shard 2 x ulysses 2", "ring 2 x tp 2"],
}
"""Every axis at once and each in a pair, in two starts of the ranks."""
LARGE = {
    "shard 4",
    "replicate 4, ddp",
    "ring 4",
    "ulysses 4, two key heads",
    "pp 4",
    "pp 2 x shard 2 x ring 2",
    "replicate 2 x ring 2 x ulysses 2",
    "shard 2 x tp 4, two key heads",
    "pp 4 x tp 2",
    "ep 4 over pp 2 x ring 2 x ulysses 2",
    "ep 4 over shard 2 x ulysses 2 x tp 2",
    "ep 2 over shard 2 x ring 2 x tp 2",
}
"""Many processes for what others show as well: run with `pytest -m exhaustive`."""

TOGETHER = 6
"""Layouts that share a start of the ranks."""


def groups():
    """All layouts, as many at a time as share a start; all but the first start are slow."""
    for world, names in CORE.items():
        marks = pytest.mark.slow if world > 2 else ()
        yield pytest.param(names, id=" | ".join(names), marks=marks)
    core = {name for names in CORE.values() for name in names}
    for marks, chosen in (
        ([pytest.mark.slow], [name for name in LAYOUTS if name not in core | LARGE]),
        ([pytest.mark.slow, pytest.mark.exhaustive], [name for name in LAYOUTS if name in LARGE]),
    ):
        for world in sorted({layout.world for layout in LAYOUTS.values()}):
            names = [name for name in chosen if LAYOUTS[name].world == world]
            for start in range(0, len(names), TOGETHER):
                some = names[start : start + TOGETHER]
                yield pytest.param(some, id=" | ".join(some), marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invariance")
    write_inputs(folder, 24)
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    @cache
    def made(kind, lora=False):
        job = alone(kind, lora=lora).job(folder, f"alone {kind} {lora}")
        return on_ranks(1, trace_here, job)[0], exported(job)

    return made


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["tied", pytest.param("untied", marks=pytest.mark.slow)])
def test_one_process_computes_what_transformers_does(kind, folder, reference):
    trace, files = reference(kind)
    assert all(norm > MAX_NORM for norm in trace.norms), "what is clipped must differ"
    found = errors(trace, trace_of_transformers(folder, kind, trace.rows))
    assert found.within(LIMITS), found
    [source] = (folder / kind).glob("*.safetensors")
    (folder / "exported.safetensors").write_bytes(files["hf/model.safetensors"])
    mine, theirs = load_file(folder / "exported.safetensors"), load_file(source)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.dist
@pytest.mark.parametrize("names", list(groups()))
def test_a_layout_computes_and_exports_what_one_process_does(names, folder, reference):
    [world] = {LAYOUTS[name].world for name in names}
    jobs = {name: LAYOUTS[name].job(folder, name) for name in names}
    found = on_ranks(world, each, trace_here, jobs, timeout=300)[0]
    for name, job in jobs.items():
        layout = LAYOUTS[name]
        trace, files = reference(layout.kind, layout.lora)
        far = errors(found[name], trace)
        assert far.within(OF_ADAPTERS if layout.lora else LIMITS), f"{name}: {far}"
        assert exported(job) == files, f"{name} does not export the same bytes"


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


CHANGES = [
    ("ep 4 over shard 4", "ep 2 over tp 2"),
    ("one process", "pp 2 x tp 2"),
    ("shard 2", "tp 2"),
    ("shard 2", "pp 2"),
    ("tp 2", "shard 2"),
    ("tp 2", "pp 2, interleaved"),
    ("pp 2", "shard 2"),
    ("pp 2", "replicate 2, ddp"),
    ("pp 2", "one process"),
    ("pp 2 x tp 2", "ring 2 x ulysses 2"),
    ("pp 2 x tp 2", "tp 2, not fused"),
    ("replicate 2 x shard 2", "replicate 2 x tp 2"),
    ("replicate 2 x shard 2", "one process"),
]
"""A layout, and the one that goes on after its first three steps."""


def begun(job):
    loop = loop_of(job)
    for _ in range(STEPS):
        step(loop)
    loop._save()


def gone_on(job):
    return loop_of(job).run()


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_under_another_layout_as_if_it_had_never_changed(folder):
    layouts = {"one process": alone("tied"), "one with experts": alone("experts"), **LAYOUTS}

    def jobs(wanted):
        """Jobs by the name of their folder, for each number of ranks."""
        made = {}
        for out, name in wanted.items():
            job = layouts[name].job(folder, out, optimizer="adamw", lr=0.01)
            made.setdefault(layouts[name].world, {})[out] = job
        return made

    for world, some in jobs({f"begun {before}": before for before, _ in CHANGES}).items():
        on_ranks(world, each, begun, some, timeout=300)
    goings_on = {f"{before} to {after}": after for before, after in CHANGES}
    for before, after in CHANGES:
        begun_there = folder / f"begun {before}" / CHECKPOINTS
        shutil.copytree(begun_there, folder / f"{before} to {after}" / CHECKPOINTS)
    wholes = {"whole tied": "one process", "whole experts": "one with experts"}
    for world, some in jobs({**wholes, **goings_on}).items():
        on_ranks(world, each, gone_on, some, timeout=300)
    for out, after in goings_on.items():
        want = runs.losses(folder / f"whole {layouts[after].kind}")
        assert len(want) == 2 * STEPS
        assert runs.losses(folder / out) == pytest.approx(want[STEPS:], rel=1e-5), out
