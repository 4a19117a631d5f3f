"""Ulysses context parallelism: all-to-all between token shards and head shards.

Ranks that hold some tokens of all heads exchange them for all tokens of some heads.

Attention itself is then the same as on one rank (Jacobs et al. 2023, "DeepSpeed Ulysses").

S tokens of one rank, T tokens of all, N query heads, K key and value heads, H head width.
"""

# pyright: reportIncompatibleMethodOverride=false

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from penstock.engine.distributed.collectives import all_gather_dim0
from penstock.models.layers.attention import AttentionFn
from penstock_kernels.attention import VarlenMetadata


class Ulysses:
    """One rank of the group that shares the heads."""

    def __init__(self, group: dist.ProcessGroup, size: int, index: int) -> None:
        self.group, self.size, self.index = group, size, index

    def shard(self, x_T: torch.Tensor) -> torch.Tensor:
        """This rank's consecutive share of all tokens."""
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
            is_one = v_SKH is k_SKH
            repeats = self.size // math.gcd(self.size, k_SKH.shape[1])
            if repeats > 1 and is_one:
                k_SKH = k_SKH.repeat_interleave(repeats, dim=1)
            elif repeats > 1:
                k_SKH, v_SKH = (x.repeat_interleave(repeats, dim=1) for x in (k_SKH, v_SKH))
            # One all-to-all for all three: separate ones would cost three times the latency.
            parts = (k_SKH,) if is_one else (k_SKH, v_SKH)
            q_TNH, k_TKH, *others = _ToHeads.apply(self, q_SNH, *parts)
            v_TKH = k_TKH if is_one else others[0]
            if sinks_N is not None:
                sinks_N = sinks_N.chunk(self.size)[self.index]
            y_TNH = inner(q_TNH, k_TKH, v_TKH, segments, scale, window, sinks_N, soft_cap)
            return _ToTokens.apply(self, y_TNH)

        return over_heads

    def gather(self, x_S: torch.Tensor) -> torch.Tensor:
        """All tokens of what each rank has of its share; without gradients."""
        return all_gather_dim0(x_S, self.group)

    def to_heads(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """[S, n, H] of each part to [T, n / size, H], which are views of one tensor."""
        by_rank = [part.unflatten(1, (self.size, -1)).transpose(0, 1) for part in parts]
        widths = [part.shape[2] for part in by_rank]
        return self._exchange(torch.cat(by_rank, dim=2)).flatten(0, 1).split(widths, dim=1)

    def to_tokens(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """[T, n / size, H] of each part to [S, n, H]: the inverse of `to_heads`."""
        widths = [part.shape[1] for part in parts]
        all_parts = torch.cat([*parts], dim=1) if len(parts) > 1 else parts[0].contiguous()
        by_rank = self._exchange(all_parts.unflatten(0, (self.size, -1))).transpose(0, 1)
        return tuple(part.flatten(1, 2) for part in by_rank.split(widths, dim=2))

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """All-to-all along the first dimension, one entry per rank."""
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


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, part: torch.Tensor) -> torch.Tensor:
        ctx.ulysses = ulysses
        return ulysses.to_tokens([part])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.ulysses.to_heads([gradient])
