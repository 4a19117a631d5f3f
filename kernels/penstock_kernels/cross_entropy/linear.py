"""Fused linear cross-entropy: the loss from hidden states, without storing all logits.

Logits are sums of products, `sum_i x_i @ w_i.T`: of hidden states and a head, and of an adapter.
For each chunk of tokens they are computed, reduced to softmax statistics, and replaced by their
own gradient, from which the gradients of the operands follow; so nothing is computed twice (idea:
Liger Kernel, arXiv 2410.10989, its fused linear cross-entropy). Where the gradient of each token's
loss is not known yet, logits are recomputed in the backward pass.

S tokens, all with a label, C those of a chunk; V entries of the local vocabulary; K the contracted
dimension of a product. Functions that return a loss for each token also take labels [S, L] of
tokens with L labels, each with its own loss.
"""

# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.function import once_differentiable

from penstock_kernels.cross_entropy import reference
from penstock_kernels.cross_entropy.gradients import largest, scale_
from penstock_kernels.cross_entropy.loss_terms import (
    PLAIN,
    LossOptions,
    SoftmaxStats,
    VocabShard,
    losses,
    slopes,
)
from penstock_kernels.cross_entropy.passes import (
    IMPLEMENTATIONS,
    Implementation,
    Passes,
    slope_by_,
    tally_by,
)
from penstock_kernels.cross_entropy.sides import (
    Product,
    SideGradients,
    Sides,
    computed,
    precise,
    seen_by_autograd,
)
from penstock_kernels.logit_chunks import tokens_at_once

ALIGNED = 64
"""Entries that the distance of rows of logits is a multiple of."""


def linear_cross_entropy(
    products: Sequence[Product],
    labels_S: torch.Tensor,
    *,
    terms: LossOptions = PLAIN,
    chunk: int | None = None,
    divided: VocabShard | None = None,
    passes: Passes = "auto",
    scale: float = 1.0,
    weights_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """`scale` times the summed loss of logits that are sums of products, a scalar in fp32 (fp64 of
    fp64).

    Products are in the dtype of the first's rows, to which everything else is cast. Gradients of
    matrices are accumulated over chunks in fp32. Gradients are computed with the loss.

    Args:
        labels_S: entries of the whole vocabulary, int64.
        chunk: tokens at a time; unset, a fast default.
        divided: the local part of the vocabulary, with vocab parallelism; gradients are then those
            of the local logits.
        scale: such as 1/N, in fp32; gradients are multiplied by it before they are rounded.
        weights_S: what the loss of each token is multiplied by, fp32; absent, 1. Logit gradients
            have them as factors before they are rounded to the logits' dtype.

    Raises:
        ValueError: for tensors that do not fit, a chunk below 1, or, on a CPU, invalid labels. On a
            GPU such labels end the process.
    """
    work = _work(products, labels_S, terms, chunk, divided, passes)
    if weights_S is not None:
        if weights_S.shape != labels_S.shape:
            raise ValueError(f"{tuple(weights_S.shape)} weights for {len(labels_S)} labels")
        work = replace(work, weights=weights_S)
    return _Summed.apply(work, scale, *seen_by_autograd(products))


def linear_cross_entropies(
    products: Sequence[Product],
    labels_S: torch.Tensor,
    *,
    terms: LossOptions = PLAIN,
    chunk: int | None = None,
    divided: VocabShard | None = None,
    passes: Passes = "auto",
) -> torch.Tensor:
    """Like `linear_cross_entropy`, the loss of each token, [S], or of each of its labels, [S, L],
    unreduced.

    Logits are recomputed in the backward pass. Raises ValueError also for several labels
    with label smoothing or z-loss.
    """
    _require_plain(labels_S, terms)
    work = _work(products, labels_S, terms, chunk, divided, passes)
    return _Each.apply(work, *seen_by_autograd(products))


def cross_entropies(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    *,
    terms: LossOptions = PLAIN,
    divided: VocabShard | None = None,
    passes: Passes = "auto",
) -> torch.Tensor:
    """The loss of each token, [C], or of each of its labels, [C, L], from logits. Raises ValueError
    as `linear_cross_entropies`.
    """
    _require_plain(labels_C, terms)
    width = logits_CV.shape[1]
    _require_entries(labels_C, divided.size if divided else width)
    return _OfLogits.apply(logits_CV, _here(labels_C, divided, width), terms, divided, passes)


def eager_cross_entropies(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, terms: LossOptions = PLAIN
) -> torch.Tensor:
    """The same with PyTorch's own operations and their gradients."""
    _require_plain(labels_C, terms)
    return losses(
        tally_by(reference.softmax_stats, logits_CV, labels_C, terms), logits_CV.shape[1], terms
    )


@dataclass(frozen=True)
class _Work:
    """All arguments but the tensors with gradients."""

    labels: torch.Tensor
    """[S] or [S, L], local indices; -1 for labels of other shards."""
    terms: LossOptions
    entries: int
    chunk: int
    divided: VocabShard | None
    made_by: Implementation
    weights: torch.Tensor | None = None
    """fp32 [S]: what the loss of each token is multiplied by, in a sum; None: 1."""

    @property
    def num_chunks(self) -> int:
        return -(-len(self.labels) // self.chunk)

    def tally(self, logits_CV: torch.Tensor, rows: slice) -> tuple[SoftmaxStats, SoftmaxStats]:
        """Statistics of the local entries, and of the whole vocabulary."""
        own = tally_by(self.made_by.tally, logits_CV, self.labels[rows], self.terms)
        return own, self.divided.merge(own) if self.divided else own

    def turn_(self, logits_CV: torch.Tensor, rows: slice) -> SoftmaxStats:
        """Statistics of the whole vocabulary; replaces logits by the gradients of their tokens'
        weighted losses.
        """
        labels_C = self.labels[rows]
        if self.divided is None and self.weights is None:
            return self.made_by.turn_(logits_CV, labels_C, self.entries, self.terms)
        own, merged = self.tally(logits_CV, rows)
        weights_C = None if self.weights is None else self.weights[rows]
        rises = slopes(own.log_sum, merged.log_sum, self.entries, self.terms, weights_C)
        self.made_by.slope_(logits_CV, labels_C, own.log_sum, rises, self.terms)
        return merged

    def chunks(self, sides: Sides) -> Iterator[tuple[slice, torch.Tensor]]:
        """Logits of one chunk after another, in the same memory."""
        count, width = len(self.labels), len(sides.matrices[0])
        # Allocated once: new memory for each chunk would cost a CPU as much as a pass over it.
        # On a GPU rows are apart by a multiple of 64 entries, for fast matmuls and vector loads. A
        # CPU would copy rows that are apart.
        is_cpu = sides.rows[0].device.type == "cpu"
        apart = width if is_cpu else -(-width // ALIGNED) * ALIGNED
        buffer = sides.rows[0].new_empty(min(count, self.chunk), apart)[:, :width]
        for start in range(0, count, self.chunk):
            rows = slice(start, min(start + self.chunk, count))
            yield rows, sides.multiplied(rows, buffer[: rows.stop - start])


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, scale: float, *sides: torch.Tensor) -> torch.Tensor:
        gradients = SideGradients(ctx.needs_input_grad[2:], sides, work.num_chunks, scale)
        # In the dtype of the first rows: autocast would multiply those in fp32 in 16 bits.
        with torch.autocast(sides[0].device.type, enabled=False):
            needs_grad = any(ctx.needs_input_grad)
            total = _total(work, computed(sides), gradients if needs_grad else None)
        # Gradients, and not inputs: backward only scales them.
        ctx.save_for_backward(*gradients.take())
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = ctx.saved_tensors
        # Some pipeline schedules run one backward pass for each operand. All but the last pass
        # leave what is saved as it was: a leaf's `grad` may become the very tensor it is given.
        if _get_current_graph_task_keep_graph():
            gradients = [x if x is None else x.clone() for x in gradients]
        return None, None, *(x if x is None else scale_(x, grads[0]) for x in gradients)


def _total(work: _Work, sides: Sides, gradients: SideGradients | None) -> torch.Tensor:
    """The summed loss, and the requested gradients. No logits outlive it."""
    total = sides.rows[0].new_zeros((), dtype=precise(sides.rows[0]))
    for rows, logits_CV in work.chunks(sides):
        stats = work.turn_(logits_CV, rows) if gradients else work.tally(logits_CV, rows)[1]
        losses_C = losses(stats, work.entries, work.terms)
        total += (losses_C if work.weights is None else losses_C * work.weights[rows]).sum()
        if gradients:
            gradients.add(rows, logits_CV, sides)
    return total


class _Each(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, *sides: torch.Tensor) -> torch.Tensor:
        found_S = sides[0].new_empty(work.labels.shape, dtype=precise(sides[0]))
        own_S, whole_S = (found_S.new_empty(len(found_S)) for _ in range(2))
        with torch.autocast(found_S.device.type, enabled=False):
            for rows, logits_CV in work.chunks(computed(sides)):
                own, merged = work.tally(logits_CV, rows)
                found_S[rows] = losses(merged, work.entries, work.terms)
                own_S[rows], whole_S[rows] = own.log_sum, merged.log_sum
        ctx.work = work
        ctx.save_for_backward(own_S, whole_S, *sides)
        return found_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        work, (own_S, whole_S, *sides) = ctx.work, ctx.saved_tensors
        # Logit gradients are rounded to 16 bits: divided by the largest first, or those of a mean,
        # such as 1/N, would all be rounded in one direction (`scaled_product_`).
        rounds = sides[0].dtype != precise(sides[0])
        scale = largest(grads[0]) if rounds else 1.0
        gradients = SideGradients(ctx.needs_input_grad[1:], sides, work.num_chunks, scale)
        _go_back(work, computed(sides), own_S, whole_S, grads[0] / scale, gradients)
        return None, *gradients.take()


def _go_back(
    work: _Work,
    sides: Sides,
    own_S: torch.Tensor,
    whole_S: torch.Tensor,
    upstream_S: torch.Tensor,
    gradients: SideGradients,
) -> None:
    """Recompute logits, and compute their gradients. No logits outlive it."""
    for rows, logits_CV in work.chunks(sides):
        own_C, labels_C = own_S[rows], work.labels[rows]
        rises = slopes(own_C, whole_S[rows], work.entries, work.terms, upstream_S[rows])
        slope_by_(work.made_by.slope_, logits_CV, labels_C, own_C, rises, work.terms)
        gradients.add(rows, logits_CV, sides)


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: torch.Tensor,
        labels_C: torch.Tensor,
        terms: LossOptions,
        divided: VocabShard | None,
        passes: Passes,
    ) -> torch.Tensor:
        ctx.made_by, ctx.terms = IMPLEMENTATIONS[passes], terms
        ctx.entries = divided.size if divided else logits_CV.shape[1]
        own = tally_by(ctx.made_by.tally, logits_CV, labels_C, terms)
        merged = divided.merge(own) if divided else own
        ctx.save_for_backward(logits_CV, labels_C, own.log_sum, merged.log_sum)
        return losses(merged, ctx.entries, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_CV, labels_C, own_C, whole_C = ctx.saved_tensors
        rises = slopes(own_C, whole_C, ctx.entries, ctx.terms, grads[0])
        # `slope_` writes in place, and saved logits may be asked for again.
        slope_CV = logits_CV.clone()
        slope_by_(ctx.made_by.slope_, slope_CV, labels_C, own_C, rises, ctx.terms)
        return slope_CV, None, None, None, None


def _work(
    products: Sequence[Product],
    labels_S: torch.Tensor,
    terms: LossOptions,
    chunk: int | None,
    divided: VocabShard | None,
    passes: Passes,
) -> _Work:
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; logits are computed at least one token at a time")
    if not products:
        raise ValueError("there is no product to make logits of")
    first_SK, first_VK = products[0]
    for x_SK, matrix_VK in products:
        if len(x_SK) != len(labels_S) or len(matrix_VK) != len(first_VK):
            raise ValueError(
                f"rows {tuple(x_SK.shape)} and a matrix {tuple(matrix_VK.shape)} do not fit "
                f"{len(labels_S)} labels and {len(first_VK)} entries of the vocabulary"
            )
        if x_SK.shape[1:] != matrix_VK.shape[1:]:
            raise ValueError(
                f"rows {tuple(x_SK.shape)} cannot be multiplied by {tuple(matrix_VK.shape)}"
            )
    entries = divided.size if divided else len(first_VK)
    _require_entries(labels_S, entries)
    widest = divided.widest if divided else len(first_VK)
    return _Work(
        _here(labels_S, divided, len(first_VK)),
        terms,
        entries,
        chunk or tokens_at_once(widest * first_SK.itemsize, first_SK.device.type),
        divided,
        IMPLEMENTATIONS[passes],
    )


def _require_plain(labels: torch.Tensor, terms: LossOptions) -> None:
    if labels.dim() > 1 and (terms.smoothing or terms.z):
        raise ValueError(f"several labels of a token have no {terms}")


def _require_entries(labels: torch.Tensor, entries: int) -> None:
    fit = (labels >= 0) & (labels < entries)
    if labels.device.type != "cpu":
        # A synchronization would cost more than the rest of the loss.
        torch._assert_async(fit.all(), "labels are not entries of the vocabulary")
    elif not fit.all():
        wrong = labels[~fit][0].item()
        raise ValueError(f"label {wrong} is not one of the vocabulary's {entries} entries")


def _here(labels: torch.Tensor, divided: VocabShard | None, width: int) -> torch.Tensor:
    """Indices of the labels in the local vocabulary, else -1."""
    if divided is None:
        return labels
    local = labels - divided.first
    return local.masked_fill((local < 0) | (local >= width), -1)
