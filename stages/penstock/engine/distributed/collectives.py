"""Autograd collectives at the boundaries of tensor-parallel regions.

Each rank computes a region (attention, the feed-forward network, the LM head) with some of its
features, so the output of a region has to be all-reduced, and so has the gradient of its input.
These are the functions f and g (Shoeybi et al. 2019, "Megatron-LM", section 3) and, with sequence
parallelism, where each rank holds some tokens of the residual stream, g and g-bar (Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2).

T tokens, D model width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

# Torch 2.13 renamed these functions and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Residual = Literal["whole", "split"]
"""Whether each rank of a group holds all tokens of the residual stream, or its share (sequence
parallelism).
"""


ReduceDtype = torch.dtype | None
"""The dtype of reductions; None: the dtype of the tensor."""


def copy_to_tp_region(
    x_TD: torch.Tensor,
    group: dist.ProcessGroup,
    residual: Residual,
    reduce_dtype: ReduceDtype = None,
) -> torch.Tensor:
    """Enter a tensor-parallel region: all tokens of the residual stream on every rank.

    The gradient is summed over the group. Each rank passes all tokens (`whole`) or its own
    consecutive share of them (`split`, which is all-gathered).
    """
    return (_CopyToRegion if residual == "whole" else _GatherToRegion).apply(
        x_TD, group, reduce_dtype
    )


def reduce_from_tp_region(
    x_TD: torch.Tensor,
    group: dist.ProcessGroup,
    residual: Residual,
    reduce_dtype: ReduceDtype = None,
) -> torch.Tensor:
    """Leave a tensor-parallel region: all-reduce (`whole`) or reduce-scatter over tokens (`split`).

    Raises:
        ValueError: for `split`, if the tokens do not divide evenly.
    """
    return (_ReduceFromRegion if residual == "whole" else _ScatterFromRegion).apply(
        x_TD, group, reduce_dtype
    )


def scatter_to_sequence_parallel(x_TD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keep this rank's consecutive share of tokens that all ranks of a group hold.

    If they do not divide evenly, zeros are appended. In the backward pass all ranks get the
    gradient of all tokens.
    """
    return _ScatterTokens.apply(x_TD, group)


def gather_from_sequence_parallel(
    x_TD: torch.Tensor, group: dist.ProcessGroup, count: int
) -> torch.Tensor:
    """All-gather the shares of all ranks and keep the first `count` tokens.

    The inverse of `scatter_to_sequence_parallel`.

    What follows must be computed identically on all ranks, so that each has the complete gradient.
    """
    return _GatherTokens.apply(x_TD, group)[:count]


def gather_columns(
    x_CV: torch.Tensor, group: dist.ProcessGroup, widths: Sequence[int]
) -> torch.Tensor:
    """All-gather columns side by side, `widths[i]` columns from rank i.

    What follows must be computed identically on all ranks: the gradient of a rank's columns is
    taken from that rank alone, without communication.
    """
    return _GatherColumns.apply(x_CV, group, widths)


def all_gather_dim0(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather equally large tensors along dimension 0."""
    # Collectives read and write memory in one piece.
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    _all_gather(out, x, group=group)
    return out


def _all_reduce(
    x: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: ReduceDtype
) -> torch.Tensor:
    # A copy: the caller may still need the tensor.
    total = x.to(reduce_dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def reduce_scatter_dim0(
    x: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: ReduceDtype = None
) -> torch.Tensor:
    """Sum over ranks, of which each gets an equal part along dimension 0."""
    tokens, remainder = divmod(x.shape[0], group.size())
    if remainder:
        # Checked here because a backend may abort the process without a message.
        raise ValueError(f"{x.shape[0]} tokens cannot be shared evenly by {group.size()} ranks")
    out = x.new_empty((tokens, *x.shape[1:]), dtype=reduce_dtype)
    _reduce_scatter(out, x.to(out.dtype).contiguous(), group=group)
    return out.to(x.dtype)


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: ReduceDtype
    ) -> torch.Tensor:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_reduce(grads[0], ctx.group, ctx.reduce_dtype), None, None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: ReduceDtype
    ) -> torch.Tensor:
        del ctx
        return _all_reduce(x, group, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        del ctx
        return grads[0], None, None


class _GatherToRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: ReduceDtype
    ) -> torch.Tensor:
        ctx.group, ctx.reduce_dtype = group, reduce_dtype
        return all_gather_dim0(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter_dim0(grads[0], ctx.group, ctx.reduce_dtype), None, None


class _ScatterFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: ReduceDtype
    ) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_dim0(x, group, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_dim0(grads[0], ctx.group), None, None


def local_share(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the share that `scatter_to_sequence_parallel` keeps, for a tensor without gradient."""
    if padding := -x.shape[0] % group.size():
        x = torch.cat((x, x.new_zeros((padding, *x.shape[1:]))))
    return x.chunk(group.size())[group.rank()].contiguous()


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.count = group, x.shape[0]
        return local_share(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_dim0(grads[0], ctx.group)[: ctx.count], None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather_dim0(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return local_share(grads[0], ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, widths: Sequence[int]
    ) -> torch.Tensor:
        rank = group.rank()
        ctx.first, ctx.width = sum(widths[:rank]), widths[rank]
        # Collectives need equal sizes.
        padded = torch.nn.functional.pad(x, (0, max(widths) - widths[rank]))
        parts = all_gather_dim0(padded, group).chunk(group.size())
        return torch.cat([part[:, :w] for part, w in zip(parts, widths, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].narrow(1, ctx.first, ctx.width), None, None
