"""Autograd collectives at the boundaries of tensor-parallel regions.

Each rank computes a region (attention, the feed-forward network, the LM head) with some of its
features, so the output of a region has to be all-reduced, and so has the gradient of its input.
These are the functions f and g (Shoeybi et al. 2019, "Megatron-LM", section 3) and, with sequence
parallelism, where each rank holds some tokens of the residual stream, g and g-bar (Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2).

T tokens, D model width, V vocabulary, C tokens of a chunk.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# Torch 2.13 renamed these functions and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Residual = Literal["whole", "split"]
"""Whether ranks hold all tokens of the residual stream, or a share each (sequence parallelism)."""

ReduceDtype = torch.dtype | None
"""The dtype of reductions; None: the dtype of the tensor."""

TensorFn = Callable[[torch.Tensor], torch.Tensor]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: TensorFn, run_on_grad: TensorFn) -> torch.Tensor:
        ctx.run_on_grad = run_on_grad
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.run_on_grad(grads[0]), None, None


def apply_collective(x: torch.Tensor, run: TensorFn, run_on_grad: TensorFn) -> torch.Tensor:
    """`run(x)`, whose gradient by `x` is `run_on_grad` of the gradient of the result."""
    return _Collective.apply(x, run, run_on_grad)


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
    if residual == "split":
        reduce_grad = partial(reduce_scatter_dim0, group=group, reduce_dtype=reduce_dtype)
        return apply_collective(x_TD, partial(all_gather_dim0, group=group), reduce_grad)
    reduce_grad = partial(_all_reduce, group=group, reduce_dtype=reduce_dtype)
    return apply_collective(x_TD, lambda x: x.view_as(x), reduce_grad)


def reduce_from_tp_region(
    x_TD: torch.Tensor,
    group: dist.ProcessGroup,
    residual: Residual,
    reduce_dtype: ReduceDtype = None,
) -> torch.Tensor:
    """Leave a tensor-parallel region: all-reduce (`whole`) or reduce-scatter over tokens (`split`).

    Raises ValueError for `split`, if the tokens do not divide evenly.
    """
    if residual == "split":
        reduce = partial(reduce_scatter_dim0, group=group, reduce_dtype=reduce_dtype)
        return apply_collective(x_TD, reduce, partial(all_gather_dim0, group=group))
    reduce = partial(_all_reduce, group=group, reduce_dtype=reduce_dtype)
    return apply_collective(x_TD, reduce, lambda grad: grad)


def scatter_to_sequence_parallel(x_TD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keep this rank's consecutive share of tokens that all ranks of a group hold.

    If they do not divide evenly, zeros are appended. In the backward pass all ranks get the
    gradient of all tokens.
    """
    count = x_TD.shape[0]
    share = partial(local_share, group=group)
    return apply_collective(x_TD, share, lambda grad: all_gather_dim0(grad, group)[:count])


def gather_from_sequence_parallel(
    x_TD: torch.Tensor, group: dist.ProcessGroup, count: int
) -> torch.Tensor:
    """All-gather the shares of all ranks and keep the first `count` tokens.

    What follows must be computed identically on all ranks, so that each has the complete gradient.
    """
    gather, share = partial(all_gather_dim0, group=group), partial(local_share, group=group)
    return apply_collective(x_TD, gather, share)[:count]


def gather_columns(
    x_CV: torch.Tensor, group: dist.ProcessGroup, widths: Sequence[int]
) -> torch.Tensor:
    """All-gather columns side by side, `widths[i]` columns from rank i.

    What follows must be computed identically on all ranks: the gradient of a rank's columns is
    taken from that rank alone, without communication.
    """
    first, width = sum(widths[: group.rank()]), widths[group.rank()]

    def gather(x: torch.Tensor) -> torch.Tensor:
        # Collectives need equal sizes.
        padded = torch.nn.functional.pad(x, (0, max(widths) - width))
        parts = all_gather_dim0(padded, group).chunk(group.size())
        return torch.cat([part[:, :w] for part, w in zip(parts, widths, strict=True)], dim=1)

    return apply_collective(x_CV, gather, lambda grad: grad.narrow(1, first, width))


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


def local_share(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the share that `scatter_to_sequence_parallel` keeps, for a tensor without gradient."""
    if padding := -x.shape[0] % group.size():
        x = torch.cat((x, x.new_zeros((padding, *x.shape[1:]))))
    return x.chunk(group.size())[group.rank()].contiguous()
