"""A checkpoint of any layout goes on under any other, as if the layout had never changed."""

import shutil

import pytest

from penstock.train.launch.job import CHECKPOINTS
from tests.engine import runs
from tests.engine.inputs import write_rows
from tests.engine.laid import ROWS_PER_STEP, alone
from tests.engine.layouts import LAYOUTS
from tests.engine.loops import each, loop_of, save, step
from tests.ranks import on_ranks
from tests.turns import taking_turns

BEFORE, AFTER = 3, 2
"""Steps. Adapters that are merged every second step are in the middle of theirs."""

CHANGES = [
    ("ep 4 over shard 4", "ep 2 over tp 2"),
    (
        "half shared adapters, ep 2 over shard 2, gates recomputed",
        "half shared adapters, ep 2 over tp 2",
    ),
    ("normed adapters, tp 2, not fused", "normed adapters, shard 2"),
    ("merged adapters, tp 2, not fused", "merged adapters, shard 2, offloaded"),
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
"""A layout, and the one that goes on after its first steps."""


def begun(job):
    loop = loop_of(job)
    for _ in range(BEFORE):
        step(loop)
    save(loop)


def gone_on(job):
    return loop_of(job).run()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("changes", taking_turns([[change] for change in CHANGES], 1))
def test_a_run_goes_on_under_another_layout_as_if_it_had_never_changed(tmp_path, changes):
    write_rows(tmp_path / "packed", ROWS_PER_STEP * (BEFORE + AFTER))
    layouts = {"one process": alone("tied"), **LAYOUTS}

    def jobs(wanted):
        """Jobs by the name of their folder, for each number of ranks."""
        made = {}
        for out, layout in wanted.items():
            job = layout.job(tmp_path, out, optimizer="adamw", lr=0.01)
            made.setdefault(layout.world, {})[out] = job
        return made

    for world, some in jobs({f"begun {name}": layouts[name] for name, _ in changes}).items():
        on_ranks(world, each, begun, some, timeout=300)
    goings_on = {f"{before} to {after}": layouts[after] for before, after in changes}
    for before, after in changes:
        begun_there = tmp_path / f"begun {before}" / CHECKPOINTS
        shutil.copytree(begun_there, tmp_path / f"{before} to {after}" / CHECKPOINTS)
    wholes = {f"whole {layout.alone.name}": layout.alone for layout in goings_on.values()}
    for world, some in jobs({**wholes, **goings_on}).items():
        on_ranks(world, each, gone_on, some, timeout=300)
    for out, layout in goings_on.items():
        want = runs.losses(tmp_path / f"whole {layout.alone.name}")
        assert len(want) == BEFORE + AFTER
        assert runs.losses(tmp_path / out) == pytest.approx(want[BEFORE:], rel=1e-5), out
