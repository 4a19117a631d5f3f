"""What oneDNN keeps of a step's products, in bytes. No torch.

It multiplies 16-bit numbers on CPUs, by a program for each shape that it meets, which it keeps.
"""

from penstock.costs.activations import FP32
from penstock.costs.sharded_model import Cut
from penstock.models.tp_roles import ParallelStyle

PROGRAM = 0.57e6
"""Bytes of one, whatever its shape."""

MOST = 1024
"""So many are kept."""

HEIGHTS = 12
"""In which experts' rows are multiplied: four for every doubling, from a quarter of what all have
on average to twice that, as routers choose that are not trained."""


def program_bytes(cut: Cut) -> float:
    """Of a rank with layers of every kind."""
    if cut.kind != "cpu" or cut.computes == FP32:
        return 0
    model = cut.model
    frozen, heights = cut.run.lora.enable_lora, {True: HEIGHTS, False: 1}
    matrices = {
        (shape, model.roles.get(name.rpartition(".")[0]) is ParallelStyle.EXPERTS)
        for name, shape in model.shapes.items()
        if len(shape) > 1
    }
    # One product forward, and one for each gradient.
    count = (2 if frozen else 3) * sum(heights[of_experts] for _, of_experts in matrices)
    factors = {
        (side, width, bool(one.experts))
        for one in model.adapters
        for side, width in (("first", one.inputs), ("second", one.outputs))
    }
    count += 3 * sum(heights[of_experts] for *_, of_experts in factors)
    return min(MOST, count) * PROGRAM
