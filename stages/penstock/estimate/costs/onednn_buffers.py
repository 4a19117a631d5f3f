"""Memory of oneDNN's primitive cache, in bytes. No torch.

oneDNN computes 16-bit matmuls on CPUs, and compiles and caches a primitive for each shape.
"""

from penstock.estimate.costs.activations import FP32
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.models.tp_roles import ParallelStyle

BYTES_PER_PRIMITIVE = 0.57e6
"""Bytes per cached primitive, for any shape."""

# oneDNN's default, unless ONEDNN_PRIMITIVE_CACHE_CAPACITY is set.
CACHE_CAPACITY = 1024
"""Capacity of the cache, in primitives."""

NUM_EXPERT_ROW_COUNTS = 12
"""Number of distinct row counts in expert matmuls: four per doubling, from a quarter of the mean to
twice the mean, as with untrained routers."""


def program_bytes(sharded: ShardedModel) -> float:
    """Bytes of cached primitives, for a rank with layers of every kind."""
    if sharded.kind != "cpu" or sharded.compute_bytes == FP32:
        return 0
    model = sharded.model
    frozen, heights = sharded.run.lora.enable_lora, {True: NUM_EXPERT_ROW_COUNTS, False: 1}
    matrices = {
        (shape, model.roles.get(name.rpartition(".")[0]) is ParallelStyle.EXPERTS)
        for name, shape in model.shapes.items()
        if len(shape) > 1
    }
    # One matmul forward, and one for each gradient (input; weight unless frozen).
    count = (2 if frozen else 3) * sum(heights[of_experts] for _, of_experts in matrices)
    factors = {
        (factor, width, bool(adapter.experts))
        for adapter in model.adapters
        for factor, width in (("first", adapter.inputs), ("second", adapter.outputs))
    }
    count += 3 * sum(heights[of_experts] for *_, of_experts in factors)
    return min(CACHE_CAPACITY, count) * BYTES_PER_PRIMITIVE
