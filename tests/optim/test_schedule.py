"""The learning rate, judged by vectors of the reference training system and by invariants."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.optim.schedule import lr_at

# Ten steps at lr 1; value used at step 0, 1, 2, ... as the reference system computed them.
VECTORS = [
    (
        {"decay_style": "cosine", "warmup_ratio": 0.2, "lr_min": 0.1, "decay_ratio": 1.0},
        [0, 0.5, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1],
    ),
    (
        {"decay_style": "linear", "warmup_ratio": 0.2, "lr_min": 0.1, "decay_ratio": 0.8},
        [0, 0.5, 1, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1, 0.1],
    ),
    (
        {"decay_style": "constant", "warmup_ratio": 0.3, "lr_start": 0.1},
        [0.1, 0.4, 0.7, 1, 1, 1],
    ),
]


@pytest.mark.parametrize(("settings", "expected"), VECTORS, ids=["cosine", "linear", "constant"])
def test_the_schedule_is_the_references(settings, expected):
    got = [lr_at(step, 10, lr=1.0, **settings) for step in range(len(expected))]
    assert got == pytest.approx(expected, abs=1e-6)


@given(
    total=st.integers(1, 500),
    lr_start=st.floats(0, 1),
    lr_min=st.floats(0, 1),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    style=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_the_rate_rises_to_lr_and_then_never_rises_again(
    total, lr_start, lr_min, warmup, decay, style
):
    rates = [
        lr_at(
            step,
            total,
            lr=1.0,
            lr_start=lr_start,
            lr_min=lr_min,
            warmup_ratio=warmup,
            decay_style=style,
            decay_ratio=decay,
        )
        for step in range(total + 1)
    ]
    turn = int(total * warmup)
    slack = 1e-12
    assert all(a <= b + slack for a, b in pairwise(rates[:turn]))
    assert all(a >= b - slack for a, b in pairwise(rates[turn:]))
    assert all(min(lr_start, lr_min) - slack <= rate <= 1 + slack for rate in rates)
