"""Search for the fastest parallel layout of a run that fits in memory, on N devices of a type.

All layouts train on the same rows per step, so the result is the same. No torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from penstock.config.rules.run import rule_violations
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims
from penstock.engine.distributed.validate_layout import ModelDims, layout_errors
from penstock.estimate.costs.device_speed import Machine
from penstock.estimate.costs.durations import estimate_step
from penstock.estimate.costs.estimate import USABLE_MEMORY, Prediction, predict
from penstock.estimate.costs.memory import peak_memory, resident_bytes
from penstock.estimate.costs.sharded_model import ShardedModel, UnshardedModel
from penstock.estimate.costs.token_counts import Data, estimate_work

Settings = Mapping[str, Any]
"""Fields of the config section `train`."""

PARALLEL_SIZES = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8)
LONG = 16_384
"""Row length in tokens from which context parallelism is tried."""


@dataclass(frozen=True)
class Proposal:
    """A layout and its estimated costs."""

    settings: Settings
    """`train` settings of the layout."""
    prediction: Prediction


@dataclass(frozen=True)
class LayoutSearch:
    """Inputs of the search."""

    run: RunConfig
    model: UnshardedModel
    counts: ModelDims
    machine: Machine
    devices: int
    rows: int
    """Rows per step, the same for every layout."""
    data: Data | None


@dataclass(frozen=True)
class _Candidate:
    settings: Settings
    sharded: ShardedModel
    seconds: float
    memory: float


def find_fastest_layouts(search: LayoutSearch, *, limit: int = 5) -> list[Proposal]:
    """At most `limit` layouts that fit in memory, fastest first; empty if none fits."""
    best: list[_Candidate] = []
    for axes in _parallel_sizes(search):
        # Keep the best micro-batch size, ZeRO stage and recomputation of each set of sizes.
        if candidates := list(_candidates(search, axes)):
            best.append(min(candidates, key=_order))
    best.sort(key=_order)
    proposals: list[Proposal] = []
    for candidate in best[:limit]:
        # Parallel sizes of 1 and recomputation (True == 1) are defaults, and not shown.
        shown = {
            name: value
            for name, value in candidate.settings.items()
            if value != 1 or name == "micro_batch_size"
        }
        run, degrees = candidate.sharded.run, candidate.sharded.degrees
        prediction = predict(run, search.model, degrees, search.machine, search.data)
        proposals.append(Proposal(shown, prediction))
    return proposals


def _order(candidate: _Candidate) -> tuple[float, float]:
    return candidate.seconds, candidate.memory


def _candidates(search: LayoutSearch, axes: Settings) -> Iterator[_Candidate]:
    """Yield the layouts with these parallel sizes that fit."""
    # A pipeline's stages stay gathered until their last backward pass: ZeRO 3 would save nothing.
    options = product([3, 2] if axes["pipeline_parallel_size"] == 1 else [2], [False, True])
    for stage, recomputes in options:
        for several in MICRO_BATCHES:
            settings = {
                **axes,
                "data_parallel_mode": "fsdp2",
                "zero_stage": stage,
                "enable_gradient_checkpointing": recomputes,
                "micro_batch_size": several,
                "global_batch_size": search.rows,
            }
            sharded = _shard(search, settings)
            if sharded is None:
                continue
            memory = peak_memory(sharded).total
            if search.machine.memory and memory > USABLE_MEMORY * search.machine.memory:
                # Larger micro-batches need more memory.
                break
            work = estimate_work(search.model.config, search.run, search.data, search.rows)
            step = estimate_step(sharded, search.machine, work)
            yield _Candidate(settings, sharded, step.total if step else 0.0, memory)


def _parallel_sizes(search: LayoutSearch) -> Iterator[Settings]:
    """Yield valid parallel sizes for the devices whose state at rest fits in memory."""
    devices, machine = search.devices, search.machine
    within = [size for size in PARALLEL_SIZES if size <= min(devices, machine.ranks_per_node)]
    long = search.run.data.row_length >= LONG
    experts = [size for size in (*PARALLEL_SIZES, 16, 32) if search.model.config.experts]
    sizes = {
        "tensor_parallel_size": within,
        "pipeline_parallel_size": [size for size in PARALLEL_SIZES if size <= devices],
        "expert_parallel_size": [size for size in experts if size <= devices] or [1],
        "ulysses_parallel_size": within if long else [1],
        "ringattn_parallel_size": [1, 2] if long else [1],
        "data_parallel_replicate_size": _replicate_sizes(devices, machine),
    }
    for values in product(*sizes.values()):
        axes = dict(zip(sizes, values, strict=True))
        least = {**axes, "zero_stage": 2, "global_batch_size": search.rows, "micro_batch_size": 1}
        sharded = _shard(search, {**least, "data_parallel_mode": "fsdp2"})
        if sharded and (
            not machine.memory or resident_bytes(sharded) < USABLE_MEMORY * machine.memory
        ):
            yield axes


def _replicate_sizes(devices: int, machine: Machine) -> list[int]:
    """Replicate sizes to try: one replica of the weights, or one per machine (HSDP)."""
    machines = devices // machine.ranks_per_node
    return [1, machines] if machines > 1 and devices % machine.ranks_per_node == 0 else [1]


def _shard(search: LayoutSearch, settings: Settings) -> ShardedModel | None:
    """The run with these settings; None if the layout is invalid."""
    changed = with_train(search.run, settings)
    degrees = compute_dims(changed.train, search.devices)
    is_laid_out = isinstance(degrees, ParallelDims)
    if not is_laid_out or layout_errors(changed, search.devices, search.counts):
        return None
    if any(rule_violations(changed)):
        return None
    return ShardedModel(changed, search.model, degrees, search.machine.kind)


RESET_FIELDS = (
    "data_parallel_shard_size",
    "gradient_accumulation_steps",
    "reshard_after_forward",
    "enable_full_shard",
    "recompute_modules",
    "moe_checkpoint_method",
    "sequence_parallel",
    "pipeline_parallel_split",
    "pipeline_parallel_virtual_stages",
    "init_device",
)
"""Settings that depend on the layout and are reset to their defaults for another one."""


def with_train(run: RunConfig, settings: Settings) -> RunConfig:
    """The run with these `train` settings as if the config set them, and `RESET_FIELDS` reset."""
    # Not validated, for there are thousands of layouts; `rule_violations` checks those in question
    # by the fields that count as written.
    fields = TrainConfig.model_fields
    values = {name: getattr(run.train, name) for name in fields}
    values |= {name: fields[name].get_default() for name in RESET_FIELDS}
    fields_set = (run.train.model_fields_set - {*RESET_FIELDS}) | set(settings)
    train = TrainConfig.model_construct(_fields_set=fields_set, **{**values, **settings})
    return run.model_copy(update={"train": train})
