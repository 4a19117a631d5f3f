"""Parallel dimensions: the degree of each axis, from settings and a world size.

The only place where the degrees are multiplied. No torch here: plans and cache keys need the global
batch size before heavy imports.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.distributed.suggest_layout import (
    LayoutSuggestion,
    Values,
    format_suggestion,
    suggest_change,
)

AXIS_FIELDS: Mapping[str, str] = {
    "pipeline": "pipeline_parallel_size",
    "replicate": "data_parallel_replicate_size",
    "shard": "data_parallel_shard_size",
    "ring": "ringattn_parallel_size",
    "ulysses": "ulysses_parallel_size",
    "tensor": "tensor_parallel_size",
}
"""The setting of each axis, outermost axis first."""

EXPERT_FIELD = "expert_parallel_size"
SIZE_FIELDS = {**AXIS_FIELDS, "expert": EXPERT_FIELD}

DATA_AXES = ("replicate", "shard")
"""Axes whose size may be -1, to be inferred."""

ReshardAfter = Literal["step", "backward", "nothing"]
"""What FSDP2 keeps gathered weights until (`reshard_after_forward`): stages 1, 2 and 3 of ZeRO
(Rajbhandari et al. 2020), by which `TrainConfig.resolved_zero_stage` states it.
"""
ZERO_STAGES: dict[int, ReshardAfter] = {1: "step", 2: "backward", 3: "nothing"}


def reshard_policy(train: TrainConfig) -> ReshardAfter:
    """When FSDP2 frees gathered weights."""
    return ZERO_STAGES[train.resolved_zero_stage]


@dataclass(frozen=True)
class ParallelDims:
    """The number of ranks along each axis; their product is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    expert: int = 1
    """Expert-parallel ranks per layer: another view of the ranks of a pipeline stage, not a factor
    of the world size.
    """

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas: groups of ranks that each compute their own packed sequences."""
        return self.replicate * self.shard

    @property
    def context(self) -> int:
        """Context-parallel ranks: those that share the tokens of a packed sequence."""
        return self.ring * self.ulysses

    @property
    def world_size(self) -> int:
        return self.pipeline * self.num_replicas * self.context * self.tensor

    def __str__(self) -> str:
        """The axes with more than one rank, by the names of their settings."""
        sizes = {SIZE_FIELDS[axis]: size for axis, size in asdict(self).items() if size > 1}
        return " x ".join(f"{name} {size}" for name, size in sizes.items()) or "1 process"


@dataclass(frozen=True)
class LayoutError:
    """Why a layout is invalid, and the settings that are most likely wrong."""

    reason: str
    settings: tuple[str, ...]


def build_parallel_dims(train: TrainConfig, world: int) -> ParallelDims:
    """The parallel dimensions that `train` asks for on `world` ranks.

    Raises ConfigError for an invalid layout, with the nearest valid one. Limits of the model and of
    the sequence length are checked in `validate_layout.py`.
    """
    dims = compute_dims(train, world)
    if isinstance(dims, ParallelDims):
        return dims

    def accepted(values: Values) -> bool:
        changed = train.model_copy(update={n.removeprefix("train."): v for n, v in values.items()})
        return isinstance(compute_dims(changed, world), ParallelDims)

    change = suggest_change(sizes_near(train, world), accepted, dims.settings, fallback_dims(train))
    raise ConfigError(f"{dims.reason}.{format_suggestion(change)}")


def compute_dims(train: TrainConfig, world: int) -> ParallelDims | LayoutError:
    """The degrees that multiply to `world`, or an error."""
    sizes = {axis: getattr(train, field) for axis, field in AXIS_FIELDS.items()}
    fixed = math.prod(size for axis, size in sizes.items() if axis not in DATA_AXES)
    data_ranks, remainder = divmod(world, fixed)
    if remainder or not data_ranks:
        model_axes = [axis for axis, size in sizes.items() if axis not in DATA_AXES and size > 1]
        product = " x ".join(f"{AXIS_FIELDS[axis]} {sizes[axis]}" for axis in model_axes)
        several = f" (= {fixed})" if len(model_axes) > 1 else ""
        largest_first = sorted(model_axes, key=lambda axis: -sizes[axis])
        return LayoutError(
            f"{_format_processes(world)} cannot be laid out as train.{product}{several}: "
            f"{world} is no multiple of {fixed}",
            tuple(f"train.{AXIS_FIELDS[axis]}" for axis in largest_first),
        )
    replicate, shard = sizes["replicate"], sizes["shard"]
    if error := _check_mode(train, world, data_ranks):
        return error
    if train.data_parallel_mode == "fsdp2":
        replicate = 1 if replicate == -1 else replicate
        shard = data_ranks // replicate if shard == -1 else shard
    else:
        replicate, shard = (data_ranks if replicate == -1 else replicate), 1
    if replicate * shard != data_ranks:
        written = [axis for axis in DATA_AXES if sizes[axis] != -1]
        sizes_set = " and ".join(f"train.{AXIS_FIELDS[axis]} is {sizes[axis]}" for axis in written)
        return LayoutError(
            f"{sizes_set}, and {_remaining(world, data_ranks)} to be shared out",
            # The other data-parallel axis is best inferred if it was left out.
            tuple(f"train.{AXIS_FIELDS[axis]}" for axis in DATA_AXES)
            if train.data_parallel_mode == "fsdp2"
            else (),
        )
    experts, in_stage = train.expert_parallel_size, world // train.pipeline_parallel_size
    if in_stage % experts:
        stage = "a pipeline stage has" if train.pipeline_parallel_size > 1 else "there are"
        return LayoutError(
            f"train.{EXPERT_FIELD} is {experts}, and {stage} {in_stage} processes, which "
            "experts cannot be shared out over evenly",
            (f"train.{EXPERT_FIELD}",),
        )
    return ParallelDims(**{**sizes, "replicate": replicate, "shard": shard, "expert": experts})


def _check_mode(train: TrainConfig, world: int, data_ranks: int) -> LayoutError | None:
    mode, shard = train.data_parallel_mode, train.data_parallel_shard_size
    replicate = train.data_parallel_replicate_size
    if mode != "fsdp2" and shard not in (-1, 1):
        return LayoutError(
            f"train.data_parallel_shard_size is {shard}, and train.data_parallel_mode {mode} "
            "shards nothing",
            ("train.data_parallel_mode", "train.data_parallel_shard_size"),
        )
    if mode == "none" and replicate not in (-1, 1):
        return LayoutError(
            f"train.data_parallel_replicate_size is {replicate}, and train.data_parallel_mode none "
            "trains on one copy of the weights",
            ("train.data_parallel_mode", "train.data_parallel_replicate_size"),
        )
    if mode == "none" and data_ranks > 1:
        return LayoutError(
            "train.data_parallel_mode is none, which trains on one copy of the weights, and "
            f"{_remaining(world, data_ranks)} to be shared out",
            ("train.data_parallel_mode",),
        )
    return None


def sizes_near(train: TrainConfig, world: int) -> list[LayoutSuggestion]:
    """Other sizes for each axis on `world` ranks, and other data-parallel modes."""
    suggestions: list[LayoutSuggestion] = []

    def suggest(field: str, value: Any, distance: float) -> None:
        is_written = field in train.model_fields_set
        suggestions.append(LayoutSuggestion(f"train.{field}", value, distance, is_written))

    for axis, field in SIZE_FIELDS.items():
        now = getattr(train, field)
        # The shard axis may be inferred from the others; the model may have no experts.
        if (axis, now) in (("shard", -1), ("expert", 1)):
            continue
        for size in (size for size in range(1, world + 1) if world % size == 0 and size != now):
            # Of equally near sizes prefer the smaller.
            suggest(field, size, abs(math.log2(size / max(1, now))) + (0.01 if size > now else 0))
    for distance, mode in enumerate(("fsdp2", "ddp", "none"), 1):
        if mode != train.data_parallel_mode:
            suggest("data_parallel_mode", mode, distance)
    return suggestions


def fallback_dims(train: TrainConfig) -> dict[str, Any]:
    """The settings of a layout with data parallelism only."""
    plain = {field: -1 if axis in DATA_AXES else 1 for axis, field in SIZE_FIELDS.items()}
    plain = {name: size for name, size in plain.items() if getattr(train, name) not in (size, 1)}
    mode = {"data_parallel_mode": "fsdp2"} if train.data_parallel_mode == "none" else {}
    return {f"train.{name}": value for name, value in {**mode, **plain}.items()}


def rows_per_step(train: TrainConfig, num_replicas: int) -> int:
    """The global batch size: packed sequences per optimizer step over all replicas."""
    if train.global_batch_size is not None:
        return train.global_batch_size
    return train.rows_at_once * train.gradient_accumulation_steps * num_replicas


def accumulation_steps(train: TrainConfig, num_replicas: int) -> int:
    """Micro-batches per replica and optimizer step. Raises ConfigError if the global batch size
    does not divide that way."""
    if train.global_batch_size is None:
        return train.gradient_accumulation_steps
    at_once = train.rows_at_once * num_replicas
    steps, remainder = divmod(train.global_batch_size, at_once)
    if remainder or not steps:
        nearest_size = max(1, steps) * at_once
        raise ConfigError(
            f"train.global_batch_size is {train.global_batch_size}, which {num_replicas} replicas "
            f"of train.micro_batch_size {train.micro_batch_size} cannot share evenly.\n"
            f"  Write a multiple of {at_once}, for example {nearest_size}, or change the other two."
        )
    written = train.is_non_default("gradient_accumulation_steps")
    if written and train.gradient_accumulation_steps != steps:
        raise ConfigError(
            f"train.global_batch_size {train.global_batch_size} on {num_replicas} replicas with "
            f"train.micro_batch_size {train.micro_batch_size} takes {steps} accumulation steps, "
            f"and train.gradient_accumulation_steps is {train.gradient_accumulation_steps}.\n"
            f"  Write {steps}, or leave one of the two out."
        )
    return steps


def _remaining(world: int, data_ranks: int) -> str:
    division = ""
    if data_ranks != world:
        division = f" ({world}, divided by {world // data_ranks} for the other axes)"
    return f"{_format_processes(data_ranks)}{division} {'is' if data_ranks == 1 else 'are'}"


def _format_processes(world: int) -> str:
    return "1 process" if world == 1 else f"{world} processes"
