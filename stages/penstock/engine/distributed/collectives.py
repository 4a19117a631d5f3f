"""What passes between ranks of a group where a divided region begins and ends, as autograd sees it.

Each rank computes a region (attention, the feed-forward network, the head) with some of its
features, so what comes out of a region has to be summed, and so has the gradient of what goes in.
These are the functions f, g (Shoeybi et al. 2019, "Megatron-LM", section 3) and, for a residual
stream of which each rank holds some tokens, g and g-bar (Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2.2).

T tokens, D model width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

# Torch 2.13 has other names for them, and warns of these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Residual = Literal["whole", "split"]
"""Whether each rank of a group holds all tokens of the residual stream, or its share of them."""


SumsIn = torch.dtype | None
"""In what ranks add up; None: in that of what they add."""


def copy_to_tp_region(
    x_TD: torch.Tensor, group: dist.ProcessGroup, residual: Residual, sums: SumsIn = None
) -> torch.Tensor:
    """The residual stream's tokens, all of them, as a divided region needs them.

    Its gradient is the sum over the group. Each rank gives all tokens (`whole`) or its own
    consecutive share of them (`split`).
    """
    return (_Copy if residual == "whole" else _Gather).apply(x_TD, group, sums)


def reduce_from_tp_region(
    x_TD: torch.Tensor, group: dist.ProcessGroup, residual: Residual, sums: SumsIn = None
) -> torch.Tensor:
    """The sum of what the ranks of a group computed: all tokens (`whole`) or a share (`split`).

    Raises:
        ValueError: for `split`, if the tokens cannot be shared evenly.
    """
    return (_Sum if residual == "whole" else _Scatter).apply(x_TD, group, sums)


def scatter_to_sequence_parallel(x_TD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's consecutive share of tokens that all ranks of a group hold alike.

    Where they do not divide evenly, zeros are added behind the last. All ranks get the gradient of
    all tokens.
    """
    return _KeepShare.apply(x_TD, group)


def gather_from_sequence_parallel(
    x_TD: torch.Tensor, group: dist.ProcessGroup, count: int
) -> torch.Tensor:
    """The first `count` tokens of all ranks' shares, one after another: undoes
    `scatter_to_sequence_parallel`.

    What comes after must be computed alike on all ranks, so that each has the whole gradient.
    """
    return _GatherShares.apply(x_TD, group)[:count]


def gather_columns(
    x_CV: torch.Tensor, group: dist.ProcessGroup, widths: Sequence[int]
) -> torch.Tensor:
    """The columns of all ranks, `widths[i]` of rank i, side by side.

    Each rank must make the same of them: a column's gradient is taken from its own rank alone.
    """
    return _GatherColumns.apply(x_CV, group, widths)


def gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The equally large tensors of all ranks, one after the other along dimension 0."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    _all_gather(out, x, group=group)
    return out


def _summed(x: torch.Tensor, group: dist.ProcessGroup, sums: SumsIn) -> torch.Tensor:
    # A copy: whoever made the tensor may still need it.
    total = x.to(sums or x.dtype, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def _scattered(x: torch.Tensor, group: dist.ProcessGroup, sums: SumsIn) -> torch.Tensor:
    tokens, rest = divmod(x.shape[0], group.size())
    if rest:
        # Said here because a backend may end the process over it without a word.
        raise ValueError(f"{x.shape[0]} tokens cannot be shared evenly by {group.size()} ranks")
    out = x.new_empty((tokens, *x.shape[1:]), dtype=sums)
    _reduce_scatter(out, x.to(out.dtype).contiguous(), group=group)
    return out.to(x.dtype)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sums: SumsIn) -> torch.Tensor:
        ctx.group, ctx.sums = group, sums
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _summed(grads[0], ctx.group, ctx.sums), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sums: SumsIn) -> torch.Tensor:
        del ctx
        return _summed(x, group, sums)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        del ctx
        return grads[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sums: SumsIn) -> torch.Tensor:
        ctx.group, ctx.sums = group, sums
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scattered(grads[0], ctx.group, ctx.sums), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, sums: SumsIn) -> torch.Tensor:
        ctx.group = group
        return _scattered(x, group, sums)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gathered(grads[0], ctx.group), None, None


def local_share(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What `scatter_to_sequence_parallel` keeps of a tensor that has no gradient."""
    if padding := -x.shape[0] % group.size():
        x = torch.cat((x, x.new_zeros((padding, *x.shape[1:]))))
    return x.chunk(group.size())[group.rank()].contiguous()


class _KeepShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.count = group, x.shape[0]
        return local_share(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(grads[0], ctx.group)[: ctx.count], None


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gathered(x, group)

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
        # Collectives want equal sizes.
        padded = torch.nn.functional.pad(x, (0, max(widths) - widths[rank]))
        parts = gathered(padded, group).chunk(group.size())
        return torch.cat([part[:, :w] for part, w in zip(parts, widths, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].narrow(1, ctx.first, ctx.width), None, None
