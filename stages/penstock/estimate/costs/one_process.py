"""The layout of a run in one process on CPUs that has memory to spare: nothing sharded or
recomputed.

For `train.data_parallel_mode` and `train.enable_gradient_checkpointing` where the config has
neither: both save memory at the cost of time, and neither changes the result.
"""

from penstock.config.rules.run import rule_violations
from penstock.config.schema.run import RunConfig, is_explicitly_set
from penstock.core.errors import PenstockError
from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims
from penstock.estimate.costs.device_speed import Machine, detect_machine
from penstock.estimate.costs.estimate import build_cost_model
from penstock.estimate.costs.memory import peak_memory
from penstock.estimate.costs.sharded_model import ShardedModel
from penstock.estimate.machine import resolve_hf_config, world_size
from penstock.models.multimodal import language_config

ROOM = 0.5
"""Maximum estimated share of the memory: estimates are not exact, and other programs need some."""

FASTER = {"data_parallel_mode": "none", "enable_gradient_checkpointing": False}

CHECKPOINTING_FIELDS = (
    *("recompute_modules", "moe_checkpoint_method", "enable_reentrant"),
    *("enable_activation_offload", "activation_gpu_limit"),
)
"""Settings that are about stored or recomputed activations: checkpointing is the user's choice."""


def with_one_process_layout(
    run: RunConfig, machine: Machine | None = None
) -> tuple[RunConfig, str | None]:
    """The run with `FASTER` settings in place of unwritten ones, and a line that says so, if one
    process on CPUs trains it and they fit `machine` (default: this one). `run` has its row
    length."""
    if world_size(run) > 1:
        return run, None
    settings = {
        name: value for name, value in FASTER.items() if not is_explicitly_set(run, f"train.{name}")
    }
    if any(is_explicitly_set(run, f"train.{name}") for name in CHECKPOINTING_FIELDS):
        settings.pop("enable_gradient_checkpointing", None)
    faster = run.with_fields("train", **settings)
    if any(rule_violations(faster)):  # the mode is needed by another setting
        settings.pop("data_parallel_mode", None)
        faster = run.with_fields("train", **settings)
    if not settings or any(rule_violations(faster)):
        return run, None
    machine = machine or detect_machine(1)
    dims = compute_dims(faster.train, 1)
    # A GPU has little memory to spare, and estimates may be short of what batches need.
    if machine.kind != "cpu" or machine.memory is None or not isinstance(dims, ParallelDims):
        return run, None
    try:
        hf_config = resolve_hf_config(faster)
        model = build_cost_model(faster, hf_config)
    except PenstockError:  # a model without known shapes
        return run, None
    if language_config(hf_config) is not hf_config:  # images are not estimated
        return run, None
    needed = peak_memory(ShardedModel(faster, model, dims, machine.kind)).total
    if needed > ROOM * machine.memory:
        return run, None
    written = ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())
    return faster, (
        f"{written}, as about {needed / 1e9:.1f} of {machine.memory / 1e9:.0f} GB are needed by "
        "one process; written values are used as they are"
    )
