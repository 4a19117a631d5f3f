"""ReLoRA: merge adapters into the weights every so many steps, and reinitialize them (Lialin et al.
2023).

A sum of many low-rank products is a high-rank change. Weights become W + s B A, computed in fp32
and rounded once. No weight is gathered: every rank gathers all factors of one weight at a time, and
updates its own rows. Merging into quantized matrices is in `quantization/requantize.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.adapters.init import initial_lora
from penstock.adapters.lora_delta import iter_adapted_weights
from penstock.adapters.names import parse_lora_name
from penstock.adapters.weight_delta import LoraDelta
from penstock.config.schema.run import RunConfig
from penstock.engine.distributed.device_mesh import DATA_AXES, Mesh
from penstock.engine.distributed.param_shards import LocalParam, local, rows_here
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.hf.load_weights import copy_shard
from penstock.engine.quantization.requantize import MergeIntoQuantized
from penstock.engine.step_part import StepPart, StepState
from penstock.models.weights import WeightMap

# Bytes of a weight's rows, in fp32, that are computed at a time.
STRETCH = 32 << 20


@dataclass(frozen=True)
class ReLoRA(StepPart):
    """When adapters are merged, and how."""

    parts: Sequence[nn.Module]
    params: Sequence[LocalParam]
    optimizer: torch.optim.Optimizer
    ranks: ProcessInfo
    requantizer: MergeIntoQuantized | None
    """None if no weight is quantized."""
    interval: int
    seed: int
    states: Literal["kept", "forgotten"]
    """What to do with the optimizer states of the adapters."""

    def is_due(self, steps: int) -> bool:
        return steps % self.interval == 0

    def finish(self, step: StepState, totals: Sequence[float]) -> Mapping[str, Any]:
        """Merge the adapters if it is due, also after a skipped update."""
        del totals
        if self.is_due(step.number + 1):
            self.ranks.heartbeat.set_phase("merging adapters")
            self.merge(step.number + 1)
        return {}

    @torch.no_grad()
    def merge(self, steps: int) -> None:
        """Merge all adapters after `steps` steps and reinitialize them, seeded by the number of
        merges. Collective. Raises StageError if the result is not finite and cannot be quantized.
        """
        for part in self.parts:
            for adapted in iter_adapted_weights(part, self._full_factor):
                if isinstance(adapted.weight, torch.Tensor):
                    _add(adapted.weight, adapted.products)
                else:
                    assert self.requantizer is not None
                    self.requantizer.add(adapted.weight, adapted.products)
        if self.requantizer:
            self.requantizer.require_finite(steps)
        for param in self.params:
            if not parse_lora_name(param.name):
                continue
            for piece in param.shards:
                start = initial_lora(
                    piece.tensor, piece.full_shape, self.seed, merges=steps // self.interval
                )
                copy_shard(start, piece, piece.view(local(param.parameter)))
            if self.states == "forgotten":
                # Optimizers initialize the states of a parameter without any, in its next step.
                self.optimizer.state.pop(param.parameter, None)

    def _full_factor(self, factor: torch.Tensor) -> torch.Tensor:
        if not isinstance(factor, DTensor):
            return factor.float()
        # An offloaded shard is in host memory, where the group cannot gather it.
        # With the shape, as from_local takes shards to be even where it has to infer one.
        reachable = DTensor.from_local(
            factor.to_local().to(self.ranks.device),
            factor.device_mesh,
            factor.placements,
            shape=factor.shape,
            stride=factor.stride(),
        )
        return reachable.full_tensor().to(factor.to_local().device).float()


def build_relora(
    run: RunConfig,
    parts: Sequence[nn.Module],
    params: Sequence[LocalParam],
    optimizer: torch.optim.Optimizer,
    names: WeightMap,
    mesh: Mesh,
    ranks: ProcessInfo,
) -> ReLoRA | None:
    """The merging that the `lora` section describes; None if adapters are not merged."""
    if not run.lora.merge_lora_interval:
        return None
    requantizer = None
    if run.lora.enable_qlora:
        requantizer = MergeIntoQuantized(params, names, ranks, mesh.group(*DATA_AXES, "tensor"))
    return ReLoRA(
        parts,
        params,
        optimizer,
        ranks,
        requantizer,
        interval=run.lora.merge_lora_interval,
        seed=run.train.seed,
        states="forgotten" if run.lora.reset_optimizer_on_merge else "kept",
    )


def _add(weight: torch.Tensor, products: Sequence[tuple[int, LoraDelta]]) -> None:
    columns = weight.shape[-1]
    first, end = rows_here(weight, 2)
    local_rows = local(weight).view(end - first, columns)
    at_once = max(1, STRETCH // (4 * columns))
    for start, product in products:
        low, high = max(first, start), min(end, start + product.shape[0])
        for row in range(low, high, at_once):
            rows = local_rows[row - first : min(row + at_once, high) - first]
            rows.copy_(product.add_to(rows, row - start))
