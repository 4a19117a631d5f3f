"""FP8 all-gather of FSDP weights (`train.enable_fp8_all_gather`).

Before FSDP gathers a weight each rank quantizes its own rows with the scales of the full weight, as
the layer would do with all of them: scales are powers of two, so the result is what the layer
computes with anyway. Only FP8 codes are gathered and passed to the layer.

N rows, K columns.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.config.schema.train import TrainConfig
from penstock.engine.precision.fp8_convert import largest_over, products_in
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.float8 import Float8Matmul
from penstock_kernels.float8 import (
    BLOCK,
    Float8Matrix,
    Float8WeightShard,
    Sharing,
    compute_scales,
    largest_of_part,
    quantize,
    seen,
)


@dataclass(frozen=True)
class Rows:
    """Which rows of which weight a rank holds, and how they are quantized."""

    first: int
    num_rows: int
    group: dist.ProcessGroup
    """The group of ranks that hold the other rows."""
    product: Float8Matmul

    def quantized(self, shard_NK: torch.Tensor) -> Float8Matrix:
        scheme, agreement = self.product.scheme, self.product.agreement
        sharing = scheme.of_weights
        blocks = seen(shard_NK, scheme.block)
        largest = largest_of_part(blocks, sharing, self.first, self.num_rows)
        largest = largest_over(self.group, largest)
        # Over ranks that hold other features of a scale's block.
        groups = {"tensor": (agreement.outputs, agreement.inputs), "rows": (agreement.inputs,)}
        for agree in groups.get(sharing, ()):
            largest = agree(largest) if agree else largest
        scales = compute_scales(largest, "e4m3")
        part: tuple[Sharing, torch.Tensor] = sharing, scales
        if sharing != "tensor":
            rows = torch.arange(self.first, self.first + len(blocks), device=scales.device)
            # A tile may begin or end on other ranks.
            is_tiled = sharing == "tiles"
            part = ("groups", scales[rows // BLOCK]) if is_tiled else ("rows", scales[rows])
        return Float8Matrix(quantize(blocks, "e4m3", *part).codes, scales, sharing)


class Float8ShardedWeight(torch.Tensor):
    """A rank's rows of a weight, with FSDP's all-gather hooks; otherwise a plain tensor."""

    rows: Rows
    # Operations on it give plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """What is all-gathered, and metadata that every rank already has."""
        del mesh, outer_size, outer_stride, module
        # In the dtype in which the layer would get a weight that is gathered as it is.
        coded = self.rows.quantized(self.detach().to(mp_policy.param_dtype or self.dtype))
        # Collectives do not support float8.
        return (coded.codes.view(torch.uint8),), coded.scales

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        scales: torch.Tensor,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Build the weight from gathered codes; with `out`, refill it after another all-gather."""
        scheme, [codes] = self.rows.product.scheme, outputs
        coded = Float8Matrix(codes.view(torch.float8_e4m3fn), scales, scheme.of_weights)
        if out is None:
            return Float8WeightShard(coded, scheme.block, param_dtype), ()
        assert isinstance(out, Float8WeightShard)
        out.coded = coded
        return None


def enable_fp8_all_gather(
    parts: Sequence[CausalLM], train: TrainConfig, notify: Callable[[str], None]
) -> None:
    """Enable FP8 all-gather on the FP8 layers if the settings ask for it; in place.

    Call it after FSDP sharding and allocation. Weights whose rows FSDP splits unevenly are gathered
    as before, which is logged.
    """
    if not train.enable_fp8_all_gather:
        return
    uneven: list[str] = []
    for part in parts:
        for name, product in products_in(part).items():
            weight = cast(DTensor, part.get_submodule(name).get_parameter("weight"))
            mesh = weight.device_mesh
            shards = mesh if mesh.ndim == 1 else mesh["shard"]
            # Of uneven rows FSDP (torch 2.13) takes padded shards alone from these hooks.
            if weight.shape[0] % shards.size():
                uneven.append(name)
                continue
            _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
            # FSDP2 looks for all-gather hooks on `_local_tensor`, which DTensor has no public way
            # to replace. The new one shares the memory.
            sharded = torch.Tensor._make_subclass(Float8ShardedWeight, weight._local_tensor)
            sharded.rows = Rows(offset[0], weight.shape[0], shards.get_group(), product)
            weight._local_tensor = sharded
    if uneven:
        notify(
            f"train.enable_fp8_all_gather: {len(uneven)} weights are gathered unrounded, whose rows"
            f" are no multiple of the shards ({uneven[0]} is the first)"
        )
