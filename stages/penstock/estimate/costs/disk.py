"""Estimated disk space of a run, in bytes. No torch."""

from dataclasses import dataclass, replace
from math import ceil

from penstock.config.schema.train import TrainConfig
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.estimate.costs.optimizer_states import saved_bytes
from penstock.estimate.costs.param_sizes import list_tensors, list_vision_tensors
from penstock.estimate.costs.sharded_model import WIDTHS, ShardedModel
from penstock.estimate.costs.token_counts import Data

BYTES_PER_TOKEN = 8
"""Bytes per token on disk: an int32 id and an int32 label."""


@dataclass(frozen=True)
class Disk:
    """Bytes on disk, by kind."""

    checkpoint: float
    """Bytes of one checkpoint."""
    checkpoints: int | None
    """Number of checkpoints kept at the end; None if the number of steps is unknown."""
    exported: float
    prepared: float | None
    packed: float | None

    @property
    def total(self) -> float:
        """Total bytes; with one checkpoint if their number is unknown."""
        checkpoints = self.checkpoint * (self.checkpoints or 1)
        return checkpoints + self.exported + (self.prepared or 0) + (self.packed or 0)


def estimate_disk(
    sharded: ShardedModel, data: Data | None, steps: int | None, epochs: float
) -> Disk:
    """Estimate disk space, for all ranks together."""
    run = sharded.run
    unsharded = replace(sharded, degrees=ParallelDims())
    language, vision = list_tensors(unsharded), list_vision_tensors(unsharded)
    tensors = [*language, *vision]
    trainable = [tensor for tensor in tensors if tensor.is_trainable]
    saved = trainable
    if not sharded.saves_only_adapters:
        saved = [*language, *(tensor for tensor in vision if tensor.is_trainable)]
    checkpoint = sum(tensor.local_bytes for tensor in saved)
    if run.train.save_optimizer:
        checkpoint += sum(saved_bytes(run.train, tensor) for tensor in trainable)
    width = WIDTHS.get(run.export.dtype, 2 if run.model.model_path else 4)
    exported = float(sum(tensor.num_elements * width for tensor in tensors))
    if run.lora.enable_lora:
        merges = run.export.merge_lora and not run.lora.save_lora_only
        base = sum(tensor.num_elements * width for tensor in tensors if not tensor.is_trainable)
        exported = sum(tensor.local_bytes for tensor in trainable) + (base if merges else 0)
    data_bytes = float(data.tokens * BYTES_PER_TOKEN) if data else None
    checkpoints = _num_checkpoints(run.train, steps, epochs)
    return Disk(checkpoint, checkpoints, exported, data_bytes, data_bytes)


def _num_checkpoints(train: TrainConfig, steps: int | None, epochs: float) -> int | None:
    if steps is None:
        return None
    saved = 1
    if train.save_steps:
        saved += (steps - 1) // train.save_steps
    if train.save_epochs:
        saved += max(0, ceil(epochs / train.save_epochs) - 1)
    limit = train.save_total_limit
    return min(saved, limit + bool(train.save_best.metric)) if limit else saved
