"""Ring attention: each rank keeps its queries; keys and values are sent around the ring.

A rank first attends to its own tokens (ordinary causal attention), then, step by step, to those of
the rank one further away. The merge is exact: each partial output is weighted by its share of the
softmax denominator (Liu et al. 2023, "Ring Attention"). Only keys that some query sees are sent, so
packed sequences of short documents, and layers with sliding windows, send very little.

T tokens of this rank, S received tokens; N query heads, K key and value heads, H head width.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from penstock.engine.distributed.zigzag import (
    KVRange,
    RankTokens,
    Run,
    kv_ranges,
    local_lengths,
    local_runs,
    local_start_rows,
)
from penstock.models.layers.attention import AttentionFn
from penstock.rows.shared_prefix import Span
from penstock_kernels.attention import VarlenMetadata, attention
from penstock_kernels.attention.block import Rectangle, block, block_backward
from penstock_kernels.attention.segments import chunk_lengths
from penstock_kernels.attention.sinks import gradient_of_sinks, with_sinks


@dataclass(frozen=True)
class AttentionBlock:
    """Attention of some of this rank's queries to some keys, received or its own."""

    queries: range
    """Indices of the queries among this rank's tokens."""
    keys: range
    """Indices among the received keys, or among this rank's own."""
    mask: Rectangle


@dataclass(frozen=True)
class RingStep:
    """One ring step: send to the rank `distance` ahead, receive from the rank as far behind."""

    distance: int
    send: range
    recv_count: int
    parts: tuple[AttentionBlock, ...]


@dataclass(frozen=True, eq=False)
class RingSegments(VarlenMetadata):
    """Documents of this rank's tokens (as if alone), and attention to other ranks' tokens."""

    steps: tuple[RingStep, ...]
    """The steps, with the same distances on every rank, because two ranks must agree on the order
    of messages between them. Distances at which no rank sends anything are left out.
    """
    local_blocks: tuple[AttentionBlock, ...]
    """Attention among this rank's own tokens beyond its local documents, which are cut where tokens
    of other ranks lie in between.
    """
    doc_lengths: tuple[int, ...]
    size: int
    index: int
    spans: tuple[Span, ...] | None
    """How far the tokens are seen if documents are trees with branches."""
    bidirectional: tuple[Run, ...]

    def with_window(self, window: int | None) -> "RingSegments":
        """The segments under a sliding window of `window` tokens (the query's own included);
        cached.
        """
        if window is None or window >= max(self.doc_lengths):
            return self
        if ("window", window) not in self.memo:
            ring_rank = self.size, self.index, self.cu_seqlens.device
            masks = {"spans": self.spans, "bidirectional": self.bidirectional}
            windowed = ring_segments(self.doc_lengths, *ring_rank, window=window, **masks)
            self.memo["window", window] = windowed
        return self.memo["window", window]

    def unsharded(self) -> VarlenMetadata:
        """The documents of the packed sequence, for a rank with all tokens; cached."""
        if "unsharded" not in self.memo:
            self.memo["unsharded"] = VarlenMetadata.of(self.doc_lengths, self.cu_seqlens.device)
        return self.memo["unsharded"]

    def in_chunks(self, size: int) -> "RingSegments":
        """The segments of documents cut into chunks of `size` tokens; cached."""
        if size >= max(self.doc_lengths):
            return self
        if self.spans is not None or self.bidirectional:
            raise ValueError(
                "documents with branches or bidirectional runs cannot be cut into chunks"
            )
        if ("chunks", size) not in self.memo:
            lengths = chunk_lengths(self.doc_lengths, size)
            ring_rank = self.size, self.index, self.cu_seqlens.device
            self.memo["chunks", size] = ring_segments(lengths, *ring_rank)
        return self.memo["chunks", size]


def ring_segments(
    lengths: Sequence[int],
    size: int,
    index: int,
    device: torch.device | str = "cpu",
    *,
    window: int | None = None,
    spans: Sequence[Span] | None = None,
    bidirectional: Sequence[Run] = (),
) -> RingSegments:
    """The segments of rank `index` in a ring of `size`, for a packed sequence of these documents.

    The lengths sum to a multiple of twice the ring size. `window`, `spans` and `bidirectional` as
    in `zigzag.kv_ranges`.
    """
    bounds = (0, *accumulate(lengths))
    rank_tokens = [RankTokens(rank, size, bounds[-1] // (2 * size)) for rank in range(size)]
    me = rank_tokens[index]

    def kv_ranges_for(query_rank: RankTokens, kv_rank: RankTokens) -> list[KVRange]:
        return kv_ranges(bounds, query_rank, kv_rank, window, spans, bidirectional)

    transfers: list[tuple[int, range, list[KVRange]]] = [(0, range(0), kv_ranges_for(me, me))]
    for distance in range(1, size):
        # For all ranks: the distances must be the same on each.
        if any(kv_ranges_for(rank, rank_tokens[rank.index - distance]) for rank in rank_tokens):
            send = _all_keys(kv_ranges_for(rank_tokens[(index + distance) % size], me))
            transfers.append((distance, send, kv_ranges_for(me, rank_tokens[index - distance])))
    all_ranges = [need for *_, ranges in transfers for need in ranges]
    sizes = [(len(need.queries), len(need.keys)) for need in all_ranges]
    reaches = [need.reach for need in all_ranges]
    rectangles = iter(Rectangle.several(sizes, device, reaches=reaches))

    def parts(ranges: Sequence[KVRange], first_key: int) -> tuple[AttentionBlock, ...]:
        blocks: list[AttentionBlock] = []
        for need in ranges:
            keys = range(need.keys.start - first_key, need.keys.stop - first_key)
            blocks.append(AttentionBlock(need.queries, keys, next(rectangles)))
        return tuple(blocks)

    # Own keys are numbered by position, received keys by arrival.
    [(*_, local_ranges), *remote] = transfers
    own_parts = parts(local_ranges, 0)
    steps = [
        RingStep(distance, send, len(recv := _all_keys(ranges)), parts(ranges, recv.start))
        for distance, send, ranges in remote
    ]
    start_rows = None if spans is None else local_start_rows(spans, me)
    own = local_runs(bidirectional, me, window)
    local = VarlenMetadata.of(
        local_lengths(bounds, me, window), device, start_rows=start_rows, bidirectional=own
    )
    return RingSegments(
        **vars(local),
        steps=tuple(steps),
        local_blocks=own_parts,
        doc_lengths=tuple(lengths),
        size=size,
        index=index,
        spans=None if spans is None else tuple(spans),
        bidirectional=tuple(bidirectional),
    )


def _all_keys(ranges: Sequence[KVRange]) -> range:
    """The range from the first to the last needed key, gaps included."""
    if not ranges:
        return range(0)
    return range(min(need.keys.start for need in ranges), max(need.keys.stop for need in ranges))


class Ring:
    """One rank of a ring."""

    def __init__(self, group: dist.ProcessGroup, size: int, index: int) -> None:
        """Every rank of the group must create it at the same time."""
        self.size, self.index = size, index
        # Ranks pass different numbers of P2P messages. Torch's collective checks count those, so a
        # group used for both would seem desynchronized at the next collective; a mesh axis that
        # spans the world uses the world group.
        p2p_group = dist.new_group() if size == dist.get_world_size() else group
        assert isinstance(p2p_group, dist.ProcessGroup)
        self.group = p2p_group
        # The first operation of a group must not be P2P between only some of its ranks.
        dist.barrier(self.group)

    def shard(self, x_T: torch.Tensor) -> torch.Tensor:
        """This rank's two zigzag chunks of a whole packed sequence."""
        chunks = x_T.chunk(2 * self.size)
        return torch.cat((chunks[self.index], chunks[-1 - self.index]))

    def attend(self, backend: str) -> AttentionFn:
        """Attention of this rank's tokens to the whole packed sequence, on `backend`."""
        local_attention = attention.backend(backend)

        def over_ring(
            q_TNH: torch.Tensor,
            k_TKH: torch.Tensor,
            v_TKH: torch.Tensor,
            segments: VarlenMetadata,
            scale: float,
            window: int | None = None,
            sinks_N: torch.Tensor | None = None,
            soft_cap: float | None = None,
        ) -> torch.Tensor:
            assert isinstance(segments, RingSegments), (
                "ring attention needs segments built by `ring_segments`"
            )
            windowed = segments.with_window(window)
            if not windowed.steps and not windowed.local_blocks:
                settings = scale, window, sinks_N, soft_cap
                return local_attention(q_TNH, k_TKH, v_TKH, windowed, *settings)
            # Autocast would cast back what is computed in fp32 on purpose.
            with torch.autocast(q_TNH.device.type, enabled=False):
                return _RingAttention.apply(
                    q_TNH, k_TKH, v_TKH, sinks_N, windowed, scale, window, soft_cap, self, backend
                )

        return over_ring

    def start_transfer(
        self, x: torch.Tensor | None, by: int, like: torch.Tensor, recv_count: int
    ) -> "P2PTransfer":
        """Start to send `x` to the rank `by` ahead, and to receive `recv_count` rows, shaped like
        those of `like`, from the rank as far behind.
        """
        operations: list[dist.P2POp] = []
        received = None
        if x is not None:
            to = (self.index + by) % self.size
            operations.append(dist.P2POp(dist.isend, x, group=self.group, group_peer=to))
        if recv_count:
            received = like.new_empty((recv_count, *like.shape[1:]))
            source = (self.index - by) % self.size
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=source))
        # As one batch: NCCL may end a send only when its peer receives, and on a ring every rank
        # would send first.
        works = dist.batch_isend_irecv(operations) if operations else []
        return P2PTransfer(works, x, received)


@dataclass(frozen=True)
class P2PTransfer:
    """P2P messages in progress."""

    works: list[dist.Work]
    sent: torch.Tensor | None
    """Kept alive until completion."""
    received: torch.Tensor | None

    def wait(self) -> torch.Tensor | None:
        for work in self.works:
            work.wait()
        return self.received


def _receive_kv(
    ring: Ring, steps: Sequence[RingStep], kv_T2KH: torch.Tensor
) -> Iterator[tuple[RingStep, torch.Tensor | None]]:
    """The keys and values of each step."""

    def start(step: RingStep) -> P2PTransfer:
        send = kv_T2KH[_to_slice(step.send)] if step.send else None
        return ring.start_transfer(send, step.distance, kv_T2KH, step.recv_count)

    def receive(transfers: list[P2PTransfer]) -> Iterator[tuple[RingStep, torch.Tensor | None]]:
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            transfer = transfers.pop()
            # Before this step's are yielded: the transfer overlaps with attention to them.
            if following:
                transfers.append(start(following))
            yield step, transfer.wait()

    # The first one starts now, before the caller attends to its own keys.
    return receive([start(step) for step in steps[:1]])


class _RingAttention(torch.autograd.Function):
    """Ring attention with a custom backward pass.

    The backward pass receives keys and values a second time: keeping them would store the whole
    sequence's on every rank. The transfer overlaps with the backward pass, which computes two and a
    half times as much as the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        sinks_N: torch.Tensor | None,
        segments: RingSegments,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        ring: Ring,
        backend: str,
    ) -> torch.Tensor:
        attend = block.backend(backend)
        # One message for both.
        kv_T2KH = torch.stack((k_TKH, v_TKH), dim=1)
        incoming = _receive_kv(ring, segments.steps, kv_T2KH)
        y_TNH, lse_TN = attend(q_TNH, k_TKH, v_TKH, segments, scale, window, soft_cap)
        # Each merge rounds the output, so it is summed in a wider dtype.
        y_TNH, lse_TN = y_TNH.to(_accum_dtype(q_TNH)), lse_TN.contiguous()

        def attend_blocks(parts: Sequence[AttentionBlock], kv_S2KH: torch.Tensor) -> None:
            for part in parts:
                rows = _to_slice(part.queries)
                k_SKH, v_SKH = kv_S2KH[_to_slice(part.keys)].unbind(1)
                keys = k_SKH, v_SKH, part.mask
                merged = attend(q_TNH[rows], *keys, scale, None, soft_cap)
                _merge(y_TNH[rows], lse_TN[rows], *merged)

        attend_blocks(segments.local_blocks, kv_T2KH)
        for step, received in incoming:
            if received is not None:
                attend_blocks(step.parts, received)
        if sinks_N is not None:
            # Apply sinks once, after all keys are merged.
            y_TNH, lse_TN = with_sinks(y_TNH, lse_TN, sinks_N)
        y_TNH = y_TNH.to(q_TNH.dtype)
        # The backward pass recomputes the softmax from the log-sum-exp of all keys.
        ctx.save_for_backward(q_TNH, kv_T2KH, y_TNH, lse_TN, sinks_N)
        ctx.segments, ctx.scale, ctx.window, ctx.soft_cap = segments, scale, window, soft_cap
        ctx.ring, ctx.backend = ring, backend
        return y_TNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TNH: torch.Tensor) -> tuple[Any, ...]:
        q_TNH, kv_T2KH, y_TNH, lse_TN, sinks_N = ctx.saved_tensors
        segments, scale, ring, soft_cap = ctx.segments, ctx.scale, ctx.ring, ctx.soft_cap
        gradients = block_backward.backend(ctx.backend)
        incoming = _receive_kv(ring, segments.steps, kv_T2KH)
        k_TKH, v_TKH = kv_T2KH.unbind(1)
        local_inputs = (q_TNH, k_TKH, v_TKH, y_TNH, lse_TN, segments)
        dq, dk, dv = gradients(dy_TNH, *local_inputs, scale, ctx.window, soft_cap)
        wide = _accum_dtype(q_TNH)
        dq_TNH, dkv_T2KH = dq.to(wide), torch.stack((dk, dv), dim=1).to(wide)

        def attend_blocks(
            parts: Sequence[AttentionBlock], kv_S2KH: torch.Tensor, dkv_S2KH: torch.Tensor
        ) -> None:
            for part in parts:
                rows, keys = _to_slice(part.queries), _to_slice(part.keys)
                dy, q, y, lse = (x[rows] for x in (dy_TNH, q_TNH, y_TNH, lse_TN))
                k_SKH, v_SKH = kv_S2KH[keys].unbind(1)
                own = (dy, q, k_SKH, v_SKH, y, lse, part.mask)
                dq, dk, dv = gradients(*own, scale, None, soft_cap)
                dq_TNH[rows] += dq
                dkv_S2KH[keys] += torch.stack((dk, dv), dim=1)

        attend_blocks(segments.local_blocks, kv_T2KH, dkv_T2KH)
        returns: list[tuple[RingStep, P2PTransfer]] = []
        for step, received in incoming:
            kv_grads = None
            if received is not None:
                dkv_S2KH = torch.zeros_like(received, dtype=wide)
                attend_blocks(step.parts, received, dkv_S2KH)
                # Sent in the dtype of the keys: half the bytes of the fp32 sum where these are
                # bf16.
                kv_grads = dkv_S2KH.to(kv_T2KH.dtype)
            # Gradients return the way that the keys came.
            transfer = ring.start_transfer(kv_grads, -step.distance, kv_T2KH, len(step.send))
            returns.append((step, transfer))
            # The return before this one has overlapped with the last block.
            if len(returns) > 1:
                _add_kv_grads(dkv_T2KH, *returns.pop(0))
        for step, transfer in returns:
            _add_kv_grads(dkv_T2KH, step, transfer)
        dk_TKH, dv_TKH = dkv_T2KH.to(kv_T2KH.dtype).unbind(1)
        dsinks_N = None
        if sinks_N is not None and ctx.needs_input_grad[3]:
            dsinks_N = gradient_of_sinks(dy_TNH, y_TNH, lse_TN, sinks_N)
        return (dq_TNH.to(q_TNH.dtype), dk_TKH, dv_TKH, dsinks_N, *[None] * 6)


def _merge(
    y_TNH: torch.Tensor, lse_TN: torch.Tensor, part_TNH: torch.Tensor, part_lse_TN: torch.Tensor
) -> None:
    """Merge attention to another part of the keys into the output and log-sum-exp, in place."""
    # Finite: each query has seen its own key first, so no difference is inf - inf.
    joint_TN = torch.logaddexp(lse_TN, part_lse_TN)
    y_TNH *= (lse_TN - joint_TN).exp().unsqueeze(-1)
    y_TNH += part_TNH * (part_lse_TN - joint_TN).exp().unsqueeze(-1)
    lse_TN.copy_(joint_TN)


def _add_kv_grads(dkv_T2KH: torch.Tensor, step: RingStep, transfer: P2PTransfer) -> None:
    """Add the gradients from another rank's queries to the tokens that were sent to it."""
    received = transfer.wait()
    if received is not None:
        dkv_T2KH[_to_slice(step.send)] += received


def _to_slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _accum_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums over steps: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)
