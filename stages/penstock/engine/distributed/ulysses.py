"""Ulysses context parallelism: all-to-all between token shards and head shards.

Ranks that hold some tokens of all heads exchange them for all tokens of some heads. Attention
itself is then the same as on one rank (Jacobs et al. 2023, "DeepSpeed Ulysses").

Layers with a recurrent state are run so under ring attention too. A state has to pass through all
tokens before the next one, so ranks that passed states on would wait for one another, and take as
long as one rank for all heads; heads do not see one another. Ranks that cannot share heads evenly
fill them up with empty ones, and none has a whole head more than its share.

S tokens of one rank, T tokens of all, N query heads, K key and value heads, H head width, F
features of heads.
"""

# pyright: reportIncompatibleMethodOverride=false

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from penstock.engine.distributed.collectives import (
    all_gather_dim0,
    apply_collective,
    reduce_scatter_dim0,
)
from penstock.engine.distributed.ring_attention import RingSegments
from penstock.engine.distributed.zigzag import chunk_order
from penstock.models.layers.attention import AttentionFn
from penstock.models.layers.call_hook import HeadBlocks
from penstock.models.layers.recurrent.mixer import RecurrentMixer
from penstock.models.state_layer_config import even_heads
from penstock_kernels.attention import VarlenMetadata


class Ulysses:
    """One rank of the group that shares the heads."""

    def __init__(self, group: dist.ProcessGroup, size: int, index: int, *, zigzag: int = 1) -> None:
        """`zigzag`: over how many of its ranks tokens are split in zigzag order, outermost."""
        self.group, self.size, self.index = group, size, index
        self._zigzag = zigzag

    def shard(self, x_T: torch.Tensor) -> torch.Tensor:
        return x_T.chunk(self.size)[self.index]

    def attend(self, inner: AttentionFn) -> AttentionFn:
        """`inner` for all tokens and this rank's share of the heads.

        The number of query heads must be a multiple of the group size. Key and value heads are
        repeated until their number is one too.
        """

        def over_heads(
            q_SNH: torch.Tensor,
            k_SKH: torch.Tensor,
            v_SKH: torch.Tensor,
            segments: VarlenMetadata,
            scale: float,
            window: int | None = None,
            sinks_N: torch.Tensor | None = None,
            soft_cap: float | None = None,
        ) -> torch.Tensor:
            # Values that are the keys themselves are sent once.
            is_one = v_SKH is k_SKH
            # The least that makes their number a multiple of the group's size.
            repeats = self.size // math.gcd(self.size, k_SKH.shape[1])
            if repeats > 1 and is_one:
                k_SKH = k_SKH.repeat_interleave(repeats, dim=1)
            elif repeats > 1:
                k_SKH, v_SKH = (x.repeat_interleave(repeats, dim=1) for x in (k_SKH, v_SKH))
            # One all-to-all for all three: separate ones would cost three times the latency.
            parts = (k_SKH,) if is_one else (k_SKH, v_SKH)
            q_TNH, k_TKH, *values = _ToHeads.apply(self, q_SNH, *parts)
            v_TKH = k_TKH if is_one else values[0]
            if sinks_N is not None:
                # Sinks of the other heads get zeros here: gradients are summed over this axis.
                sinks_N = sinks_N.chunk(self.size)[self.index]
            y_TNH = inner(q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N, soft_cap)
            return self._to_tokens(y_TNH)

        return over_heads

    def run_core(self, mixer: RecurrentMixer) -> Callable[..., torch.Tensor]:
        """The hook `run_core` of `mixer`, for all tokens and this rank's share of the heads."""

        def over_heads(core: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
            *inputs_SF, segments = inputs
            if isinstance(segments, RingSegments):
                segments = segments.unsharded()
            blocks = mixer.head_blocks()
            heads = max(count for some in blocks for count, _ in some)

            def of_heads(weight: torch.Tensor, blocks: HeadBlocks) -> torch.Tensor:
                parts = _by_head(weight, blocks, heads, self.size, dim=0)
                return torch.cat([p.chunk(self.size)[self.index].flatten(0, 1) for p in parts])

            parts = [
                part
                for x_SF, some in zip(inputs_SF, blocks, strict=True)
                for part in _by_head(x_SF, some, heads, self.size, dim=1)
            ]
            received = iter(_ToHeads.apply(self, *parts))
            inputs_TF = [
                torch.cat([next(received).flatten(1) for _ in some], dim=1) for some in blocks
            ]
            y_TNH = core(*inputs_TF, segments, of_heads)
            return self._to_tokens(y_TNH)[:, :heads]

        return over_heads

    def gather(self, x_S: torch.Tensor) -> torch.Tensor:
        """All tokens of what each rank has of its share; without gradients."""
        return all_gather_dim0(x_S, self.group)

    def gather_in_sequence(self, x_S: torch.Tensor) -> torch.Tensor:
        """The same in the order of the sequence. The gradients of all ranks are added."""
        return apply_collective(
            x_S,
            lambda x_S: _in_sequence(self.gather(x_S), self._zigzag),
            lambda grad_T: reduce_scatter_dim0(_by_rank(grad_T, self._zigzag), self.group),
        )

    def to_heads(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """[S, n, H] of each part, or [S, n], to [T, n / size, H], which are views of one tensor."""
        # Each [ranks, S, features of a rank's heads].
        by_rank = [part.flatten(1).unflatten(1, (self.size, -1)).transpose(0, 1) for part in parts]
        received_TF = self._exchange(torch.cat(by_rank, dim=2)).flatten(0, 1)
        widths = [part.shape[2] for part in by_rank]
        local_heads = _in_sequence(received_TF, self._zigzag).split(widths, dim=1)
        return tuple(
            x_TF.unflatten(1, (-1, *part.shape[2:]))
            for x_TF, part in zip(local_heads, parts, strict=True)
        )

    def to_tokens(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """[T, n / size, H] of each part to [S, n, H]: the inverse of `to_heads`."""
        flat = [part.flatten(1) for part in parts]
        x_TF = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0].contiguous()
        by_rank = _by_rank(x_TF, self._zigzag).unflatten(0, (self.size, -1))
        received = self._exchange(by_rank).transpose(0, 1)
        widths = [part.shape[1] for part in flat]
        return tuple(
            x.flatten(1).unflatten(1, (-1, *part.shape[2:]))
            for x, part in zip(received.split(widths, dim=2), parts, strict=True)
        )

    def _to_tokens(self, y_TNH: torch.Tensor) -> torch.Tensor:
        return apply_collective(
            y_TNH, lambda y: self.to_tokens([y])[0], lambda grad: self.to_heads([grad])[0]
        )

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=self.group)
        return received


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.ulysses = ulysses
        return ulysses.to_heads(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.ulysses.to_tokens(gradients)


def _by_head(
    x: torch.Tensor, blocks: HeadBlocks, heads: int, ranks: int, *, dim: int
) -> list[torch.Tensor]:
    """The blocks of a dimension as heads and their features, so many that `ranks` get equally
    many; `heads` as in `even_heads`."""
    parts = x.split([count * width for count, width in blocks], dim)
    pieces: list[torch.Tensor] = []
    for part, (count, width) in zip(parts, blocks, strict=True):
        repeats, empty = even_heads(count, heads, ranks)
        by_head = part.unflatten(dim, (count, width))
        if repeats > 1:
            by_head = by_head.repeat_interleave(repeats, dim)
        if empty:
            by_head = F.pad(by_head, (*[0, 0] * (by_head.ndim - dim - 1), 0, empty))
        pieces.append(by_head)
    return pieces


def _in_sequence(x_T: torch.Tensor, ring: int) -> torch.Tensor:
    """The tokens of ranks of a ring, one rank's after another's, in the order of the sequence."""
    if ring == 1:
        return x_T
    chunks = x_T.chunk(2 * ring)
    # Rank i holds chunks i and 2 ring - 1 - i: the even ones ascend, the odd ones descend.
    return torch.cat((*chunks[::2], *chunks[::-2]))


def _by_rank(x_T: torch.Tensor, ring: int) -> torch.Tensor:
    """The inverse of `_in_sequence`."""
    if ring == 1:
        return x_T
    chunks = x_T.chunk(2 * ring)
    return torch.cat([chunks[number] for number in chunk_order(ring)])
