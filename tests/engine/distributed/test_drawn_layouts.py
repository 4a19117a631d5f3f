"""Layouts drawn at random that `penstock check` accepts compute what one process does."""

import os
import secrets
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.train.launch.job import Job
from tests.engine.distributed.test_linear_layouts import WEIGHTED
from tests.engine.drawing import WORLDS, Drawn, accepted, link_rows, write_drawn_rows
from tests.engine.float64 import trace_in_float64
from tests.engine.inputs import write_model
from tests.engine.loops import each
from tests.engine.traces import Errors, Trace, errors, trace_here
from tests.ranks import on_ranks
from tests.turns import one_day_in, taking_turns

SEED = int(os.environ.get("LAYOUT_SEED") or secrets.randbelow(10**9))
"""Of all draws; a failure names it, and with this variable in the environment it is drawn again."""

LIMITS = Errors(loss=1e-6, norm=1e-5, gradients=1e-5, weights=1e-5)

FLOAT64_LIMITS = Errors(loss=1e-8, norm=1e-8, gradients=1e-7, weights=1e-7)
"""Of a draw that is beyond `LIMITS`, by float32 alone then: only parts that compute in float32
whatever they are given, such as norms and routers of transformers, still round."""

HALF_ULP = 3e-8
MOVES = 4
ROUNDINGS = 8
"""How often a layout of quantized weights, the scales of which are float32 in any case, may round:
in roundings of the weights and by what these do to the result."""

TOGETHER = 2
"""Draws that share a start of the ranks."""


def routed_alike(got: Trace, want: Trace) -> tuple[Trace, Trace]:
    """Both traces, up to the step in which rounding of weights has sent a token to another
    expert."""
    counts = [[told.get("routers", {}).get("counts") for told in t.told] for t in (got, want)]
    same = [here == there for here, there in zip(*counts, strict=True)]
    if all(same):
        return got, want
    steps = same.index(False)
    assert steps, "tokens go to other experts before any weight differs"

    def first(trace: Trace) -> Trace:
        losses, norms, gradients = (
            of_steps[:steps] for of_steps in (trace.losses, trace.norms, trace.gradients)
        )
        told = trace.told[:steps]
        return replace(
            trace,
            losses=losses,
            norms=norms,
            gradients=gradients,
            weights={},
            told=told,
            rounded={},
        )

    return first(got), first(want)


def errors_of_rounding(draw: Drawn, want: Trace, folder: Path, name: str) -> Errors:
    """How far one process goes at most if each weight moves by half of its last place, in several
    draws of the moves: in one of them the change of a norm may cancel."""
    jobs = {}
    for seed in range(MOVES):
        moved = folder / f"{name}, moved {seed}"
        write_model(moved, draw.layout.kind)
        link_rows(folder, moved)
        [file] = (moved / draw.layout.kind).glob("*.safetensors")
        generator = torch.Generator().manual_seed(seed)
        tensors = load_file(file)
        for tensor in tensors.values():
            tensor.mul_(1 + HALF_ULP * torch.randn(tensor.shape, generator=generator))
        save_file(tensors, file, {"format": "pt"})
        jobs[seed] = draw.job_alone(moved, name)
    [traces] = on_ranks(1, each, trace_here, jobs, timeout=300)
    return Errors(*map(max, *(errors(*routed_alike(trace, want)) for trace in traces.values())))


def errors_in_float64(world: int, job: Job, alone: Job, folder: Path) -> Errors:
    """How far the layout is from one process where both compute in float64."""
    job, alone = (
        replace(j, output_dir=folder / which) for j, which in ((job, "layout"), (alone, "alone"))
    )
    [want] = on_ranks(1, trace_in_float64, alone, timeout=300)
    got = on_ranks(world, trace_in_float64, job, timeout=300)[0]
    return errors(got, want)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    write_drawn_rows(folder)
    return folder


@pytest.mark.dist
@one_day_in(3, of=1)
@pytest.mark.parametrize("group", taking_turns(range(102), 1))
def test_what_check_accepts_computes_what_one_process_does(group, folder):
    names = [f"draw {number}" for number in range(group * TOGETHER, (group + 1) * TOGETHER)]
    draws = {name: accepted(folder, SEED, name) for name in names}
    print(f"LAYOUT_SEED={SEED}", *(f"{name}: {draws[name][0]}" for name in names), sep="\n")
    alone = {name: draw.job_alone(folder, f"{name}, alone") for name, (draw, _) in draws.items()}
    [wanted] = on_ranks(1, each, trace_here, alone, timeout=300)
    for world in WORLDS:
        jobs = {name: job for name, (draw, job) in draws.items() if draw.layout.world == world}
        traces = on_ranks(world, each, trace_here, jobs, timeout=300)[0] if jobs else {}
        for name, trace in traces.items():
            far = errors(*routed_alike(trace, wanted[name]))
            print(f"{name}: {far}")
            if far.within(LIMITS):
                continue
            draw, job = draws[name]
            if draw.is_quantized:
                by_rounding = errors_of_rounding(draw, wanted[name], folder, name)
                limits = [ROUNDINGS * error for error in by_rounding]
                limits = Errors(*map(max, LIMITS, limits))
                assert far.within(limits), f"{name}: {far}; by rounding {by_rounding}"
            else:
                exact = errors_in_float64(world, job, alone[name], folder / f"{name}, float64")
                print(f"{name}: {exact} in float64")
                limits = WEIGHTED if "rows weighted" in str(draw) else FLOAT64_LIMITS
                assert exact.within(limits), f"{name}: {far}; in float64 {exact}"
