"""The loss that trains an indexer: the KL divergence from its scores to attention.

T tokens, C of a chunk of queries, M keys up to its last; N heads, H head width; J heads of the
indexer, I their width; S keys selected for a token.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.sparse_attention import chunked
from penstock_kernels.sparse_attention.queries import query_chunks, query_ranges
from penstock_kernels.sparse_attention.reference import index_scores, selection_mask

SMALLEST = 1e-30
"""Attention weights below are counted as zero in their logarithm."""


def _unchanged(x_CM: torch.Tensor) -> torch.Tensor:
    return x_CM


@dataclass(frozen=True)
class HeadSharing:
    """The ranks that have the heads of the same tokens, equally many each."""

    ranks: int = 1
    index: int = 0
    """This one among them."""
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = _unchanged

    def share(self, count: int) -> slice:
        """This rank's share of so many queries."""
        return slice(self.index * count // self.ranks, (self.index + 1) * count // self.ranks)


ALONE = HeadSharing()


def indexer_loss(
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    selected_TS: torch.Tensor | None,
    segments: VarlenMetadata,
    scale: float,
    num_tokens: int,
    sharing: HeadSharing = ALONE,
    *,
    deferred: bool = False,
) -> torch.Tensor:
    """`sum_t KL(p_t || softmax(I_t))` over the first `num_tokens` tokens (DeepSeek-AI 2025,
    "DeepSeek-V3.2", section 2.1.1): p are the attention weights of all heads, summed and
    normalized, and I the index scores, both over the selected tokens; without a selection over all
    visible ones.

    Args:
        index: queries [T, J, I], keys [T, I] and weights [T, J] of the indexer, which alone get a
            gradient.
        k_TNH: keys of each head, or [T, 1, H] of all heads.
        sharing: where the other heads are. Every rank calls it with the same documents, and has the
            loss and the gradients of its share of the queries.
        deferred: nothing is computed, because a recomputation will: the result is 0, and what is
            saved for the backward pass has the right shapes only.

    Returns:
        A scalar, fp32 or wider.
    """
    # The indexer is trained to follow attention, and not the reverse.
    args = q_TNH.detach(), k_TNH.detach(), selected_TS, segments, scale, num_tokens, sharing
    return _IndexerLoss.apply(*index, *args, deferred)


class _IndexerLoss(torch.autograd.Function):
    """The gradients are computed with the loss, while the attention weights are there."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TJI: torch.Tensor,
        k_TI: torch.Tensor,
        weight_TJ: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        selected_TS: torch.Tensor | None,
        segments: VarlenMetadata,
        scale: float,
        num_tokens: int,
        sharing: HeadSharing,
        deferred: bool,
    ) -> torch.Tensor:
        wide = torch.promote_types(q_TJI.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=q_TJI.device)
        index = q_TJI, k_TI, weight_TJ
        if deferred:
            # Checkpointing compares shapes with the recomputation's. An expanded scalar has the
            # shape without the memory.
            ctx.save_for_backward(*(part.new_empty(()).expand(part.shape) for part in index))
            return total
        grads = [torch.zeros(part.shape, dtype=wide, device=part.device) for part in index]
        # Scores and gradients are in fp32, in which autocast would not multiply.
        with torch.autocast(q_TJI.device.type, enabled=False):
            ranges = query_ranges(segments)
            for chunk in query_chunks(segments.lengths, ranges, chunked.PAIRS):
                if chunk.start >= num_tokens:
                    continue
                chunk = chunk._replace(end=min(chunk.end, num_tokens))
                first, start, end, row = chunk
                own, keys = chunk.rows, chunk.keys
                if selected_TS is None:
                    mask_CM = torch.ones(
                        (end - start, end - first), dtype=torch.bool, device=q_TJI.device
                    ).tril_(start - first)
                else:
                    mask_CM = selection_mask(selected_TS[own], first, end - first)
                weights_CM = _attention_weights(q_TNH[own], k_TNH[keys], mask_CM, scale)
                # Before the queries are shared out: a collective has the same shape on every rank.
                weights_CM = sharing.sum_over_ranks(weights_CM) / sharing.ranks
                share = sharing.share(end - start)
                mask_CM, weights_CM = mask_CM[share], weights_CM[share]
                own = slice(row + share.start, row + share.stop)
                scores_CM = index_scores(q_TJI[own], k_TI[keys], weight_TJ[own])
                log_CM = scores_CM.masked_fill(~mask_CM, float("-inf")).log_softmax(-1)
                # Hidden keys have a weight of 0, and 0 times their logarithm, -inf, would be NaN.
                ratio_CM = weights_CM.clamp_min(SMALLEST).log() - log_CM.masked_fill(~mask_CM, 0)
                total += (weights_CM * ratio_CM).sum()
                # As the weights p of a query sum to 1: d KL(p || softmax(I)) / dI = softmax(I) - p.
                dscores_CM = log_CM.exp() - weights_CM
                for part, into, grad in zip(
                    (own, keys, own),
                    grads,
                    _gradients(dscores_CM, q_TJI[own], k_TI[keys], weight_TJ[own]),
                    strict=True,
                ):
                    into[part] += grad
        ctx.save_for_backward(
            *(grad.to(part.dtype) for grad, part in zip(grads, index, strict=True))
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = (grad * dloss.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*scaled, *[None] * 8)


def _attention_weights(
    q_CNH: torch.Tensor, k_MNH: torch.Tensor, mask_CM: torch.Tensor, scale: float
) -> torch.Tensor:
    """The mean of the heads' attention weights, fp32 or wider, [C, M], one head after another."""
    wide = torch.promote_types(q_CNH.dtype, torch.float32)
    sum_CM = torch.zeros(mask_CM.shape, dtype=wide, device=mask_CM.device)
    k_MNH = k_MNH.expand(-1, q_CNH.shape[1], -1)
    # The scores of all heads at once would take as many times the memory.
    for q_CH, k_MH in zip(q_CNH.unbind(1), k_MNH.unbind(1), strict=True):
        scores_CM = (q_CH @ k_MH.T).to(wide) * scale
        sum_CM += scores_CM.masked_fill(~mask_CM, float("-inf")).softmax(-1)
    return sum_CM / q_CNH.shape[1]


def _gradients(
    dscores_CM: torch.Tensor, q_CJI: torch.Tensor, k_MI: torch.Tensor, weight_CJ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `index_scores`, one head after another."""
    wide = dscores_CM.dtype
    k_MI = k_MI.to(wide)
    dk_MI, dq, dweight = torch.zeros_like(k_MI), [], []
    for q_CI, weight_C in zip(q_CJI.to(wide).unbind(1), weight_CJ.to(wide).unbind(1), strict=True):
        products_CM = q_CI @ k_MI.T
        dweight.append((dscores_CM * products_CM.relu()).sum(-1))
        dproducts_CM = dscores_CM * weight_C[:, None] * (products_CM > 0)
        dq.append(dproducts_CM @ k_MI)
        dk_MI += dproducts_CM.T @ q_CI
    return torch.stack(dq, 1), dk_MI, torch.stack(dweight, 1)
