"""Ring attention: each rank attends from its own tokens, and keys and values come to it.

A rank first attends to what it holds itself, which is ordinary causal attention; then, step by
step, to what a rank one further away holds. What is merged is exact: each part's output is weighed
by its share of the whole sum of exponentials (Liu et al. 2023, "Ring Attention"). Only what some
query sees is sent, so rows of short documents send next to nothing.

T tokens of this rank, S of another that come here; N query heads, K key and value heads, H head
width.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from penstock.engine.parallel.zigzag import Holding, need, own_lengths
from penstock.models.layers.attention import Attend
from penstock_kernels.attention import Segments, attention
from penstock_kernels.attention.block import Rectangle, block, block_backward


@dataclass(frozen=True)
class Step:
    """What goes to the rank `distance` further on, and comes from the one as far back."""

    distance: int
    gives: range
    """This rank's tokens whose keys and values go; none where empty."""
    takes: int
    """How many tokens' keys and values come."""
    queries: range
    """This rank's tokens that see them."""
    sees: Rectangle | None
    """None where nothing comes."""


@dataclass(frozen=True, eq=False)
class Spread(Segments):
    """The documents of this rank's tokens, as if there were no others, and what others hold."""

    steps: tuple[Step, ...]
    """The same distances on every rank, or two would not agree on the order of the messages
    between them; those at which no rank gives anything are left out."""


def spread(
    lengths: Sequence[int], size: int, index: int, device: torch.device | str = "cpu"
) -> Spread:
    """What rank `index` of a ring of `size` attends to, in a row of documents of these lengths.

    The lengths sum to a multiple of twice the ring's size.
    """
    bounds = (0, *accumulate(lengths))
    holdings = [Holding(rank, size, bounds[-1] // (2 * size)) for rank in range(size)]
    me = holdings[index]
    found: list[tuple[int, range, range, range]] = []
    for distance in range(1, size):
        if not any(need(bounds, one, holdings[one.index - distance]) for one in holdings):
            continue
        asked = need(bounds, holdings[(index + distance) % size], me)
        asks = need(bounds, me, holdings[index - distance])
        gives = asked.keys if asked else range(0)
        queries, keys = (asks.queries, asks.keys) if asks else (range(0), range(0))
        found.append((distance, gives, queries, keys))
    sizes = [(len(queries), len(keys)) for *_, queries, keys in found]
    steps = [
        Step(distance, gives, len(keys), queries, rectangle if keys else None)
        for (distance, gives, queries, keys), rectangle in zip(
            found, Rectangle.several(sizes, device), strict=True
        )
    ]
    own = Segments.of(own_lengths(bounds, me), device)
    return Spread(**vars(own), steps=tuple(steps))


class Ring:
    """One rank of a ring."""

    def __init__(self, group: dist.ProcessGroup, size: int, index: int) -> None:
        """Every rank of the group must make one at the same time."""
        self.size, self.index = size, index
        # Ranks pass different numbers of messages. Torch's checks of collectives count those, and
        # would find ranks out of step at the next collective of a group that does both; a mesh's
        # axis that is the whole world has the world's group.
        own = dist.new_group() if size == dist.get_world_size() else group
        assert isinstance(own, dist.ProcessGroup)
        self.group = own
        # Messages between a few ranks of a group may not be the first that it ever passes.
        dist.barrier(self.group)

    def mine(self, x_T: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of a whole row's."""
        chunks = x_T.chunk(2 * self.size)
        return torch.cat((chunks[self.index], chunks[-1 - self.index]))

    def attend(self, backend: str) -> Attend:
        """Attention of this rank's tokens to the whole row's, on `backend`."""
        alone = attention.backend(backend)

        def over_ring(
            q_TNH: torch.Tensor,
            k_TKH: torch.Tensor,
            v_TKH: torch.Tensor,
            segments: Segments,
            scale: float,
        ) -> torch.Tensor:
            assert isinstance(segments, Spread), "ring attention needs what `spread` returns"
            if not segments.steps:
                return alone(q_TNH, k_TKH, v_TKH, segments, scale)
            # Autocast would turn what is computed in fp32 on purpose back.
            with torch.autocast(q_TNH.device.type, enabled=False):
                return _RingAttention.apply(q_TNH, k_TKH, v_TKH, segments, scale, self, backend)

        return over_ring

    def send(self, x: torch.Tensor | None, by: int, like: torch.Tensor, takes: int) -> "Transfer":
        """Start to pass `x` on to the rank `by` further on, and to take `takes` rows shaped as
        those of `like` from the rank as far back."""
        operations: list[dist.P2POp] = []
        taken = None
        if x is not None:
            to = (self.index + by) % self.size
            operations.append(dist.P2POp(dist.isend, x, group=self.group, group_peer=to))
        if takes:
            taken = like.new_empty((takes, *like.shape[1:]))
            source = (self.index - by) % self.size
            operations.append(dist.P2POp(dist.irecv, taken, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works, x, taken)


@dataclass(frozen=True)
class Transfer:
    """Tensors under way."""

    works: list[dist.Work]
    sent: torch.Tensor | None
    """Kept until it is through."""
    taken: torch.Tensor | None

    def wait(self) -> torch.Tensor | None:
        """What came, once it is here."""
        for work in self.works:
            work.wait()
        return self.taken


class _KeysAndValues:
    """Those of other ranks, step by step; the next are under way while these are used."""

    def __init__(self, ring: Ring, steps: Sequence[Step], kv_T2KH: torch.Tensor) -> None:
        self.ring, self.steps, self.kv_T2KH = ring, steps, kv_T2KH
        self._under_way = self._start(steps[0])

    def __iter__(self) -> Iterator[tuple[Step, torch.Tensor | None]]:
        for step, following in zip(self.steps, (*self.steps[1:], None), strict=True):
            here = self._under_way
            if following:
                self._under_way = self._start(following)
            yield step, here.wait()

    def _start(self, step: Step) -> Transfer:
        gives = self.kv_T2KH[_rows(step.gives)] if step.gives else None
        return self.ring.send(gives, step.distance, self.kv_T2KH, step.takes)


class _RingAttention(torch.autograd.Function):
    """Others' keys and values are asked for again in the backward pass, not kept: kept, every rank
    would hold the whole row's. Their transfer hides behind the backward pass, which computes two
    and a half times as much as the forward one."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        spread: Spread,
        scale: float,
        ring: Ring,
        backend: str,
    ) -> torch.Tensor:
        attend = block.backend(backend)
        kv_T2KH = torch.stack((k_TKH, v_TKH), dim=1)
        incoming = _KeysAndValues(ring, spread.steps, kv_T2KH)
        y_TNH, lse_TN = attend(q_TNH, k_TKH, v_TKH, spread, scale)
        y_TNH, lse_TN = y_TNH.to(_wide(q_TNH)), lse_TN.contiguous()
        for step, taken in incoming:
            if taken is not None and step.sees is not None:
                rows = _rows(step.queries)
                k_SKH, v_SKH = taken.unbind(1)
                part = attend(q_TNH[rows], k_SKH, v_SKH, step.sees, scale)
                _merge(y_TNH[rows], lse_TN[rows], *part)
        y_TNH = y_TNH.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, kv_T2KH, y_TNH, lse_TN)
        ctx.spread, ctx.scale, ctx.ring, ctx.backend = spread, scale, ring, backend
        return y_TNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TNH: torch.Tensor) -> tuple[Any, ...]:
        q_TNH, kv_T2KH, y_TNH, lse_TN = ctx.saved_tensors
        spread, scale, ring = ctx.spread, ctx.scale, ctx.ring
        gradients = block_backward.backend(ctx.backend)
        incoming = _KeysAndValues(ring, spread.steps, kv_T2KH)
        k_TKH, v_TKH = kv_T2KH.unbind(1)
        dq, dk, dv = gradients(dy_TNH, q_TNH, k_TKH, v_TKH, y_TNH, lse_TN, spread, scale)
        wide = _wide(q_TNH)
        dq_TNH, dkv_T2KH = dq.to(wide), torch.stack((dk, dv), dim=1).to(wide)
        returns: list[tuple[Step, Transfer]] = []
        for step, taken in incoming:
            given_back = None
            if taken is not None and step.sees is not None:
                rows = _rows(step.queries)
                dy, q, y, lse = (x[rows] for x in (dy_TNH, q_TNH, y_TNH, lse_TN))
                k_SKH, v_SKH = taken.unbind(1)
                dq, dk, dv = gradients(dy, q, k_SKH, v_SKH, y, lse, step.sees, scale)
                dq_TNH[rows] += dq
                given_back = torch.stack((dk, dv), dim=1)
            under_way = ring.send(given_back, -step.distance, kv_T2KH, len(step.gives))
            returns.append((step, under_way))
            if len(returns) > 1:
                _add(dkv_T2KH, *returns.pop(0))
        for step, under_way in returns:
            _add(dkv_T2KH, step, under_way)
        dk_TKH, dv_TKH = dkv_T2KH.to(kv_T2KH.dtype).unbind(1)
        return dq_TNH.to(q_TNH.dtype), dk_TKH, dv_TKH, None, None, None, None


def _merge(
    y_TNH: torch.Tensor, lse_TN: torch.Tensor, part_TNH: torch.Tensor, part_lse_TN: torch.Tensor
) -> None:
    """Make attention to some keys one to those of another part as well, in place."""
    joint_TN = torch.logaddexp(lse_TN, part_lse_TN)
    y_TNH *= (lse_TN - joint_TN).exp().unsqueeze(-1)
    y_TNH += part_TNH * (part_lse_TN - joint_TN).exp().unsqueeze(-1)
    lse_TN.copy_(joint_TN)


def _add(dkv_T2KH: torch.Tensor, step: Step, under_way: Transfer) -> None:
    """What another rank's queries add to the gradients of the tokens it was given."""
    taken = under_way.wait()
    if taken is not None:
        dkv_T2KH[_rows(step.gives)] += taken


def _rows(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _wide(x: torch.Tensor) -> torch.dtype:
    """What is summed over steps is summed in this."""
    return torch.promote_types(x.dtype, torch.float32)
