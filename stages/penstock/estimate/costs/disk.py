"""Estimated disk space of a run, in bytes. No torch."""

from dataclasses import dataclass, replace
from math import ceil

from penstock.estimate.costs.optimizer_states import saved_bytes
from penstock.estimate.costs.param_sizes import Tensor, list_tensors, list_vision_tensors
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
    unsharded, vision = _unsharded_tensors(sharded)
    saved = [
        tensor for tensor in unsharded if tensor.is_trainable or not sharded.saves_only_adapters
    ]
    saved += [tensor for tensor in vision if tensor.is_trainable]
    unsharded += vision
    checkpoint = sum(_tensor_bytes(tensor) for tensor in saved)
    if sharded.run.train.save_optimizer:
        checkpoint += sum(
            saved_bytes(sharded.run.train, tensor) for tensor in unsharded if tensor.is_trainable
        )
    export = sharded.run.export
    width = WIDTHS.get(export.dtype, 4 if not sharded.run.model.model_path else 2)
    adapters = sum(_tensor_bytes(tensor) for tensor in unsharded if tensor.is_trainable)
    exported = float(sum(tensor.num_elements * width for tensor in unsharded))
    if sharded.run.lora.enable_lora:
        merges = export.merge_lora and not sharded.run.lora.save_lora_only
        base = sum(tensor.num_elements * width for tensor in unsharded if not tensor.is_trainable)
        exported = adapters + (base if merges else 0)
    tokens = data.tokens if data else None
    data_bytes = None if tokens is None else float(tokens * BYTES_PER_TOKEN)
    return Disk(
        checkpoint, _num_checkpoints(sharded, steps, epochs), exported, data_bytes, data_bytes
    )


def _unsharded_tensors(sharded: ShardedModel) -> tuple[list[Tensor], list[Tensor]]:
    """All tensors without sharding: those of the language model, and those of a vision part."""
    alone = replace(sharded.degrees, pipeline=1, replicate=1, shard=1, ring=1, ulysses=1)
    alone = replace(sharded, degrees=replace(alone, tensor=1, expert=1))
    return list_tensors(alone), list_vision_tensors(alone)


def _tensor_bytes(tensor: Tensor) -> float:
    return tensor.num_elements * tensor.width


def _num_checkpoints(sharded: ShardedModel, steps: int | None, epochs: float) -> int | None:
    train = sharded.run.train
    if steps is None:
        return None
    saved = 1
    if train.save_steps:
        saved += (steps - 1) // train.save_steps
    if train.save_epochs:
        saved += max(0, ceil(epochs / train.save_epochs) - 1)
    limit = train.save_total_limit
    return min(saved, limit + bool(train.save_best.metric)) if limit else saved
