"""How many kernels a layer launches, forward and backward, by a dry run of two and of four."""

from typing import Any

import pytest

from tests.dryrun.layouts import DENSE, MOE, Case, dry_runs

pytestmark = pytest.mark.slow

MOST = {"Qwen3": 41, "Qwen3-MoE": 105}
"""Without casts of weights, as in bf16 or under FSDP."""

IN_BF16 = {
    "data_parallel_mode": "none",
    "enable_gradient_checkpointing": False,
    "enable_mixed_precision": False,
    "precision": "bf16",
}


def case(shape: dict[str, Any], num_layers: int) -> Case:
    return Case(world=1, model={**shape, "num_hidden_layers": num_layers}, train=IN_BF16)


def test_a_layer_launches_few_kernels() -> None:
    shapes = {"Qwen3": DENSE, "Qwen3-MoE": MOE}
    cases = {f"{name} {n}": case(shape, n) for name, shape in shapes.items() for n in (2, 4)}
    found = {name: run.ranks[0].launches for name, run in dry_runs(cases).items()}
    each = {name: (found[f"{name} 4"] - found[f"{name} 2"]) / 2 for name in shapes}
    assert all(each[name] <= MOST[name] for name in shapes), each
