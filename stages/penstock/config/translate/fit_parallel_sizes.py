"""Fit the parallel sizes of a foreign file to the available devices.

Files of other tools are written for their clusters. The number of sequences of a step, and so the
result, does not change; parallel sizes that do not fit are replaced.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.translate.translation import Draft
from penstock.core import env

TENSOR, PIPELINE = "train.tensor_parallel_size", "train.pipeline_parallel_size"
RING, ULYSSES = "train.ringattn_parallel_size", "train.ulysses_parallel_size"
EXPERT = "train.expert_parallel_size"
SHARD, REPLICATE = "train.data_parallel_shard_size", "train.data_parallel_replicate_size"
PER_NODE, NODES = "launch.nproc_per_node", "launch.nnodes"

# Settings of the rendezvous.
MEETING = ("launch.node_rank", "launch.rdzv_endpoint")

# Of transformers' trainer: fewer sequences at once where memory runs out.
FINDS_ROWS = "auto_find_batch_size"

# Set for one replica, and multiplied by the number of replicas here.
EVAL_ROWS = "train.eval_rows_per_batch"
GLOBAL, MICRO = "train.global_batch_size", "train.micro_batch_size"
ACCUMULATION = "train.gradient_accumulation_steps"

# Axes that split the model or a sequence, in the order in which ranks are assigned.
CUTS = (TENSOR, PIPELINE, RING, ULYSSES)

SPLIT = "train.pipeline_parallel_split"
OF_TENSOR = ("train.sequence_parallel", "train.tp_vocab_parallel_loss", "train.tp_reduce_dtype")
OF_PIPELINE = (
    "train.pipeline_parallel_schedule",
    SPLIT,
    "train.pipeline_parallel_output_weight",
    "train.pipeline_parallel_virtual_stages",
    "train.pp_variable_seq_lengths",
)
ON_GPUS_ALONE = ("train.optimizer_offload", "train.enable_activation_offload")


@dataclass(frozen=True)
class Devices:
    """The devices to fit a run to."""

    # Training processes, one for each GPU.
    ranks: int
    has_gpus: bool = True


def devices_here() -> Devices:
    """The devices of this machine, or of all nodes if torchrun started this process."""
    gpus, started = env.num_gpus(), env.rank_variables()
    return Devices(started[2] if started else max(1, gpus), gpus > 0)


def fit_parallel_sizes(draft: Draft, devices: Devices) -> int:
    """Set the parallel sizes for the devices; returns the number of processes."""
    sizes = {name: _size(draft, name) for name in CUTS}
    cut, copies = math.prod(sizes.values()), _size(draft, SHARD) * _size(draft, REPLICATE)
    written_ranks = _processes_there(draft, devices.ranks)
    replicas = max(1, (written_ranks or cut * copies) // cut)
    rows = _rows_of_a_step(draft, replicas)
    if draft.has(EVAL_ROWS):
        draft.put(EVAL_ROWS, _size(draft, EVAL_ROWS) * replicas)
    ranks = free_ranks = _processes_here(draft, written_ranks, devices.ranks)
    for name in CUTS:
        free_ranks = _divide(draft, name, free_ranks)
    if ranks // free_ranks != cut or free_ranks % copies or draft.has(GLOBAL):
        ranks, free_ranks = _keep_rows(draft, rows, ranks, free_ranks)
    _divide(draft, SHARD, _divide(draft, REPLICATE, free_ranks))
    _fill_up(draft, free_ranks)
    experts = math.gcd(_size(draft, EXPERT), ranks // _size(draft, PIPELINE))
    if experts != _size(draft, EXPERT):
        draft.change(EXPERT, experts, f"fitted to {_processes(ranks)}")
    _leave_out(draft, sizes, devices)
    if draft.get(FINDS_ROWS):
        _take_rows_that_fit(draft, free_ranks)
    return ranks


def _size(draft: Draft, name: str) -> int:
    value: Any = draft.value(name, 1)
    return value if isinstance(value, int) and value > 0 else 1


def _processes(number: int) -> str:
    return "one process" if number == 1 else f"{number} processes"


def _processes_there(draft: Draft, available: int) -> int | None:
    if not (draft.has(PER_NODE) or draft.has(NODES)):
        return None
    return (_size(draft, PER_NODE) if draft.has(PER_NODE) else available) * _size(draft, NODES)


def _rows_of_a_step(draft: Draft, replicas: int) -> int:
    if draft.has(GLOBAL):
        return _size(draft, GLOBAL)
    return _size(draft, MICRO) * _size(draft, ACCUMULATION) * max(1, replicas)


def _processes_here(draft: Draft, written: int | None, available: int) -> int:
    if written is not None and written <= available and _size(draft, NODES) == 1:
        return written
    if written is not None:
        why = f"{_processes(written)} there, and {available} here: as many as there are devices"
        for name in (PER_NODE, NODES, *MEETING):
            draft.drop(name, why, "approximated")
    return available


def _divide(draft: Draft, name: str, free_ranks: int) -> int:
    # Set an axis to as many of the `left` ranks as it asks for and as divide them; returns the
    # ranks left for other axes.
    size = _size(draft, name)
    # The largest share of the written size that divides the ranks, so that heads and layers, which
    # the written size divides, are divided by it too.
    fits = math.gcd(size, free_ranks)
    if fits != size:
        draft.change(name, fits, f"{size} there; fitted to the devices here")
    return free_ranks // fits


def _keep_rows(draft: Draft, rows: int, ranks: int, free_ranks: int) -> tuple[int, int]:
    # Set the sequences of a step, and use as many replicas as divide them evenly.
    micro = _size(draft, MICRO)
    replicas = next((n for n in range(free_ranks, 0, -1) if rows % (micro * n) == 0), free_ranks)
    if not draft.has(GLOBAL):
        _put_rows(draft, rows)
    if replicas != free_ranks:
        ranks = ranks // free_ranks * replicas
        draft.put(PER_NODE, ranks)
        for line in draft.lines_of(GLOBAL):
            line.names.append(PER_NODE)
    return ranks, replicas


def _put_rows(draft: Draft, rows: int) -> None:
    # Set the sequences of a step, from which the number of micro-batches follows.
    draft.put(GLOBAL, rows)
    for name in (MICRO, ACCUMULATION):
        for line in draft.lines_of(name):
            line.names.append(GLOBAL)
    draft.drop(ACCUMULATION, f"train.global_batch_size keeps the {rows} rows of a step")


def _take_rows_that_fit(draft: Draft, replicas: int) -> None:
    # As many sequences at once as fit, in steps of as many as are written.
    if not draft.has(GLOBAL):
        _put_rows(draft, _size(draft, MICRO) * _size(draft, ACCUMULATION) * replicas)
    why = "as many rows at once as fit; a step keeps its rows, where the trainer's shrinks"
    draft.change(MICRO, "auto", why)


def _fill_up(draft: Draft, replicas: int) -> None:
    # If the number of shards is set, the number of replicas must be set too.
    shards = _size(draft, SHARD)
    is_open = draft.value(SHARD, -1) == -1
    if not is_open and _size(draft, REPLICATE) * shards < replicas:
        draft.put(REPLICATE, replicas // shards)
        for line in draft.lines_of(SHARD):
            line.names.append(REPLICATE)


def _leave_out(draft: Draft, sizes: Mapping[str, int], devices: Devices) -> None:
    # Remove settings of axes with one rank, and of GPUs if there are none.
    stages = _size(draft, PIPELINE)
    idle = {
        **dict.fromkeys(OF_TENSOR if _size(draft, TENSOR) == 1 else (), "tensor_parallel_size"),
        **dict.fromkeys(OF_PIPELINE if stages == 1 else (), "pipeline_parallel_size"),
    }
    for name, axis in idle.items():
        draft.drop(name, f"{axis} is 1")
    if stages not in (1, sizes[PIPELINE]) and draft.value(SPLIT, "uniform") != "uniform":
        draft.change(SPLIT, "uniform", f"lists the layers of {sizes[PIPELINE]} stages")
    if not devices.has_gpus:
        for name in filter(draft.value, ON_GPUS_ALONE):
            draft.drop(name, "there is no GPU to move it from", "approximated")
