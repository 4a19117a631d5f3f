"""The learning rate, judged by other systems' numbers, transformers' schedules and invariants."""

import json
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import optimization

from penstock.config.schema.optimizer import DecayStyle, OptimConfig
from penstock.optim.schedule import lr_at

SHARED = Path(__file__).parents[3] / "shared" / "spec" / "lr_vectors.json"

# Ten steps at lr 1; value used at step 0, 1, 2, ... as the reference system computed them.
VECTORS = {
    "cosine": (
        {"lr_decay_style": "cosine", "lr_warmup_ratio": 0.2, "lr_min": 0.1, "lr_decay_ratio": 1.0},
        [0, 0.5, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1],
    ),
    "linear": (
        {"lr_decay_style": "linear", "lr_warmup_ratio": 0.2, "lr_min": 0.1, "lr_decay_ratio": 0.8},
        [0, 0.5, 1, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1, 0.1],
    ),
    "constant": (
        {"lr_decay_style": "constant", "lr_warmup_ratio": 0.3, "lr_start": 0.1},
        [0.1, 0.4, 0.7, 1, 1, 1],
    ),
    # From here on by the published formulas, worked out by hand.
    "steps": (
        {"lr_decay_style": "linear", "lr_warmup_steps": 4, "lr_min": 0.0},
        [0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
    ),
    "polynomial": (
        {"lr_decay_style": "polynomial", "lr_min": 0.0, "lr_schedule_kwargs": {"power": 2.0}},
        [1, 0.81, 0.64, 0.49, 0.36, 0.25, 0.16, 0.09, 0.04, 0.01],
    ),
    "stairs": (
        {
            "lr_decay_style": "step",
            "lr_min": 0.1,
            "lr_warmup_steps": 1,
            "lr_schedule_kwargs": {
                "gamma": 0.5,
                "step_size": 2,
                "hold_steps": 1,
                "warmup_style": "plus_one",
            },
        },
        [0.5, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1],
    ),
    "exponential": (
        {
            "lr_decay_style": "exponential",
            "lr_min": 0.1,
            "lr_schedule_kwargs": {"gamma": 0.25, "step_size": 2},
        },
        [1, 0.5, 0.25, 0.125, 0.1],
    ),
    # The peak is lr over the root of the width and of the warmup; lr_min ends the fall.
    "noam": (
        {
            "lr_decay_style": "noam",
            "lr_min": 0.18,
            "lr_warmup_steps": 4,
            "lr_schedule_kwargs": {"d_model": 4},
        },
        [0.0625, 0.0625, 0.125, 0.1875, 0.25, 0.5 / 5**0.5, 0.5 / 6**0.5, 0.5 / 7**0.5, 0.18],
    ),
    "noam_hold": (
        {
            "lr_decay_style": "noam_hold",
            "lr_min": 0.3,
            "lr_warmup_steps": 2,
            "lr_schedule_kwargs": {"hold_steps": 2, "decay_rate": 1.0},
        },
        [0, 0.5, 1, 1, 1, 2 / 3, 2 / 4, 2 / 5, 2 / 6, 0.3],
    ),
    "inverse root": (
        {"lr_decay_style": "inverse_sqrt", "lr_min": 0, "lr_schedule_kwargs": {"timescale": 3}},
        [1, (3 / 4) ** 0.5, (3 / 5) ** 0.5, (3 / 6) ** 0.5],
    ),
    "stable": (
        {
            "lr_decay_style": "wsd",
            "lr_min": 0.0,
            "lr_schedule_kwargs": {"decay_steps": 4, "decay_shape": "sqrt", "constant_steps": 1},
        },
        [1, 1, 1, 1, 1, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0],
    ),
}


def rates(total, /, steps=None, **settings):
    optim = OptimConfig(**settings)
    return [lr_at(step, total, optim) for step in steps or range(total)]


@pytest.mark.parametrize(("settings", "expected"), VECTORS.values(), ids=VECTORS)
def test_the_schedule_is_the_references(settings, expected):
    got = rates(10, steps=range(len(expected)), lr=1.0, **settings)
    assert got == pytest.approx(expected, abs=1e-6)


FROM_TRANSFORMERS = {
    "constant_schedule_with_warmup": ({"num_warmup_steps": 7}, {"lr_decay_style": "constant"}),
    "linear_schedule_with_warmup": (
        {"num_warmup_steps": 7, "num_training_steps": 50},
        {"lr_decay_style": "linear"},
    ),
    "cosine_schedule_with_warmup": (
        {"num_warmup_steps": 7, "num_training_steps": 50, "num_cycles": 1.5},
        {"lr_decay_style": "cosine", "lr_schedule_kwargs": {"num_cycles": 1.5}},
    ),
    "polynomial_decay_schedule_with_warmup": (
        {"num_warmup_steps": 7, "num_training_steps": 50, "lr_end": 0.001, "power": 3.0},
        {"lr_decay_style": "polynomial", "lr_min": 0.001, "lr_schedule_kwargs": {"power": 3.0}},
    ),
    "inverse_sqrt_schedule": ({"num_warmup_steps": 7}, {"lr_decay_style": "inverse_sqrt"}),
    "wsd_schedule": (
        {
            "num_warmup_steps": 7,
            "num_decay_steps": 20,
            "num_training_steps": 50,
            "decay_type": "1-sqrt",
            "min_lr_ratio": 0.2,
        },
        {
            "lr_decay_style": "wsd",
            "lr_min": 0.004,
            "lr_start": 0.004,
            "lr_schedule_kwargs": {"decay_steps": 20, "decay_shape": "sqrt"},
        },
    ),
}


@pytest.mark.parametrize("name", FROM_TRANSFORMERS)
def test_the_schedule_is_that_of_transformers(name):
    theirs, ours = FROM_TRANSFORMERS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    scheduler = getattr(optimization, f"get_{name}")(optimizer, **theirs)
    want = []
    for _ in range(50):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    got = rates(50, lr=0.02, **{"lr_min": 0.0, "lr_warmup_steps": 7, **ours})
    assert got == pytest.approx(want, rel=1e-9, abs=1e-12)


def our_words(kind, case):
    """Another system's schedule in this one's settings."""
    args = dict(case["args"])
    name = case.get("name") or case["lr_scheduler_type"]
    warmup = args.pop("warmup_steps", args.pop("num_warmup_steps", 0))
    least = args.pop("min_lr", args.pop("lr_end", 0.0))
    args.pop("max_steps", args.pop("num_training_steps", None))
    starts_at_zero = kind == "ernie" or name.startswith(("Linear", "Noam"))
    starts_at_zero = (starts_at_zero and name != "NoamHoldAnnealing") or args.get("constant_steps")
    style = {
        "CosineAnnealing": "cosine",
        "WarmupPolicy": "constant",
        "WarmupHoldPolicy": "constant",
        "SquareAnnealing": "square",
        "SquareRootAnnealing": "sqrt",
        "NoamAnnealing": "noam",
        "NoamHoldAnnealing": "noam_hold",
        "WarmupAnnealing": "linear",
        "InverseSquareRootAnnealing": "inverse_sqrt",
        "PolynomialDecayAnnealing": "polynomial",
        "PolynomialHoldDecayAnnealing": "polynomial",
        "LinearAnnealingWithWarmUp": "linear",
    }.get(name, name.removesuffix("_with_warmup"))
    return {
        "lr": case["lr"],
        "lr_min": least,
        "lr_warmup_steps": warmup,
        "lr_decay_style": style,
        "lr_schedule_kwargs": {
            "warmup_style": "zero_start" if starts_at_zero else "plus_one",
            **args,
        },
    }


@pytest.mark.skipif(not SHARED.is_file(), reason="needs ../shared/spec/lr_vectors.json")
def test_other_systems_schedules_can_be_written_and_give_their_numbers():
    found = json.loads(SHARED.read_text())
    styles = set()
    for kind, cases in found.items():
        for case in cases:
            settings = our_words(kind, case)
            styles.add(settings["lr_decay_style"])
            # A run of 100 steps has none after 99.
            want = {int(step): lr for step, lr in case["lr_at"].items() if int(step) < 100}
            got = rates(100, steps=list(want), **settings)
            assert got == pytest.approx(list(want.values()), rel=1e-9), case
    assert len(styles) == 9


@given(
    total=st.integers(1, 500),
    lr_start=st.floats(0, 1),
    lr_min=st.floats(0, 1),
    warmup=st.floats(0, 1) | st.integers(0, 600),
    decay=st.floats(0, 1),
    style=st.sampled_from([style for style in get_args(DecayStyle) if style != "noam"]),
    hold=st.integers(0, 50),
)
def test_the_rate_rises_to_lr_and_then_never_rises_again(
    total, lr_start, lr_min, warmup, decay, style, hold
):
    is_steps = isinstance(warmup, int)
    found = rates(
        total + 1,
        lr=1.0,
        lr_start=lr_start,
        lr_min=lr_min,
        lr_warmup_ratio=0.0 if is_steps else warmup,
        lr_warmup_steps=warmup if is_steps else None,
        lr_decay_style=style,
        lr_decay_ratio=decay,
        lr_schedule_kwargs={"hold_steps": hold},
    )
    turn = min(warmup if is_steps else int((total + 1) * warmup), total)
    slack = 1e-12
    assert all(a <= b + slack for a, b in pairwise(found[: turn + 1]))
    assert all(a >= b - slack for a, b in pairwise(found[turn:]))
    assert all(min(lr_start, lr_min) - slack <= rate <= 1 + slack for rate in found)
