"""How many kernels a layer launches, forward and backward, by a dry run of two and of four."""

from typing import Any

import pytest

from penstock.estimate.dryrun.summary import DryRun
from penstock.estimate.dryrun.trace import Launch, records_from_json
from tests.dryrun.layouts import DENSE, MOE, Case, dry_runs

pytestmark = pytest.mark.slow

MOST = {"Qwen3": 41, "Qwen3-MoE": 104}
"""Without casts of weights and gradients, which FSDP has none of."""

IN_BF16 = {
    "data_parallel_mode": "none",
    "enable_gradient_checkpointing": False,
    "enable_mixed_precision": False,
    "precision": "bf16",
    "grad_accum_dtype": "bf16",
}


def case(shape: dict[str, Any], num_layers: int) -> Case:
    return Case(world=1, model={**shape, "num_hidden_layers": num_layers}, train=IN_BF16)


def launches(run: DryRun) -> int:
    """Of the forward and the backward pass."""
    return sum(
        isinstance(one, Launch) and one.phase in ("forward", "backward")
        for one in records_from_json(run.ranks[0].result.records)
    )


def test_a_layer_launches_few_kernels() -> None:
    shapes = {"Qwen3": DENSE, "Qwen3-MoE": MOE}
    cases = {f"{name} {n}": case(shape, n) for name, shape in shapes.items() for n in (2, 4)}
    found = {name: launches(run) for name, run in dry_runs(cases).items()}
    each = {name: (found[f"{name} 4"] - found[f"{name} 2"]) / 2 for name in shapes}
    assert all(each[name] <= MOST[name] for name in shapes), each
