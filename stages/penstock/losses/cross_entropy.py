"""Chunked (fused linear) cross-entropy, without materializing all logits of a micro-batch.

T tokens, S trained tokens, C tokens of a chunk, D hidden size, V vocabulary size; K labels per
token, if it has several.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from penstock.losses.labels import IGNORED, Labels
from penstock.losses.logits_loss import LogitsLoss, per_token
from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.dropout import DropoutRNG, current_dropout_rng, dropout_rng
from penstock.models.layers.linear_terms import WeightedRows, linear_terms, scaled_linear_terms
from penstock_kernels.cross_entropy import (
    PLAIN,
    LossOptions,
    Passes,
    VocabShard,
    cross_entropies,
    eager_cross_entropies,
    linear_cross_entropies,
    linear_cross_entropy,
    linear_logits,
)

# Default chunk in tokens for a head that can only be called: 0.6 GB of fp32 logits with a
# vocabulary of 150 thousand.
CHUNK = 1024

Mode = Literal["eager", "compiled", "chunked"]
"""`eager` materializes the logits of all trained tokens at once; the others those of one chunk,
processed by `torch.compile` kernels (`compiled`) or by penstock_kernels (`chunked`)."""

Precision = Literal["fp32", "model"]
"""Precision of the logits: fp32, or that of the hidden states and weights."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [C, D] to logits."""


@dataclass(frozen=True)
class Loss:
    """Cross-entropy options and implementation."""

    terms: LossOptions = PLAIN
    mode: Mode = "chunked"
    chunk: int | None = None
    """Tokens per chunk of logits; None: chosen for speed."""
    divided: VocabShard | None = None
    """Vocabulary shard of the head (vocab parallel); None if the head has the whole vocabulary."""
    precision: Precision = "model"
    package: LogitsLoss | None = None
    """The loss of a package, in place of cross-entropy and its options but the soft cap. It has
    logits of the whole vocabulary."""

    @property
    def passes(self) -> Passes:
        return "compiled" if self.mode == "compiled" else "auto"

    def of_logits(self, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        """Loss per token, [C]; with labels [C, K], loss per label, [C, K]."""
        if self.package:
            logits_CV = soft_capped(logits_CV.float(), self.terms.soft_cap)
            return per_token(self.package, self.package.token_losses(logits_CV, labels_C), labels_C)
        if self.mode == "eager" and self.divided is None:
            return eager_cross_entropies(logits_CV, labels_C, self.terms)
        return cross_entropies(
            logits_CV, labels_C, terms=self.terms, divided=self.divided, passes=self.passes
        )


CROSS_ENTROPY = Loss()


def sum_cross_entropy(
    hidden_TD: torch.Tensor,
    head: Head,
    labels_T: torch.Tensor | Labels,
    loss: Loss = CROSS_ENTROPY,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """`scale` times the summed cross-entropy of the tokens with a label, each times its loss weight
    (`Labels.weights`), an fp32 scalar.

    labels[t] is the target of position t (already shifted); -100 is not trained. Untrained
    positions are removed before the head, so they cost nothing. If the head is a sum of linear
    terms, gradients are computed in the forward pass and rounded once, after multiplication by
    `scale` in fp32; otherwise logits are recomputed in the backward pass (activation
    checkpointing). Without trained tokens the sum is exactly 0 and still depends on the head and
    the hidden states, whose gradients are zeros: every rank of a group must take part in its
    collectives. A head with dropout uses the dropout RNG of its tokens.

    Raises:
        ValueError: if the chunk is below 1, the labels are not one per position, or (on a CPU only)
            a label is not in the vocabulary.
    """
    labels = Labels.of(labels_T)
    if labels.values.dim() != 1:
        raise ValueError(f"{tuple(labels.values.shape)} labels for a sum, which is of one each")
    tokens = _TrainedTokens.of(hidden_TD, head, labels)
    if not len(tokens.labels):
        return tokens.zero(loss)
    weights_T, scale = labels.weights, scale * labels.weight_scale
    weights_S = None if weights_T is None else weights_T.index_select(0, tokens.trained)
    if products := tokens.products(loss):
        return linear_cross_entropy(
            products,
            tokens.labels,
            terms=loss.terms,
            chunk=loss.chunk,
            divided=loss.divided,
            passes=loss.passes,
            scale=scale,
            weights_S=weights_S,
        )
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    start = 0
    for losses_C in tokens.losses_by_chunks(loss):
        stop = start + len(losses_C)
        total = total + (losses_C if weights_S is None else losses_C * weights_S[start:stop]).sum()
        start = stop
    return total * scale


def token_log_probs(
    hidden_TD: torch.Tensor,
    head: Head,
    labels_T: torch.Tensor | Labels,
    loss: Loss = CROSS_ENTROPY,
) -> torch.Tensor:
    """Log-probability of each position's label, fp32 [T]; 0 without a label.

    With labels [T, K] the result is [T, K], at the same number of logit computations. For losses
    that are not a sum of log-probabilities (RL, DPO). Logits are recomputed in the backward pass.
    Of the loss options only the logit soft cap applies.

    Raises:
        ValueError: as `sum_cross_entropy`; if the loss has label smoothing or a z-loss.
    """
    if loss.terms.smoothing or loss.terms.z:
        raise ValueError(f"log-probabilities have no {loss.terms}")
    labels = Labels.of(labels_T)
    tokens = _TrainedTokens.of(hidden_TD, head, labels)
    log_probs_T = hidden_TD.new_zeros(labels.values.shape, dtype=torch.float32)
    if not len(tokens.labels):
        return log_probs_T + tokens.zero(loss)
    is_label_S = tokens.labels != IGNORED
    if labels.values.dim() > 1:
        # Ignored labels of a token that has others: compute them as token 0, masked below.
        tokens = replace(tokens, labels=tokens.labels.where(is_label_S, 0))
    if products := tokens.products(loss):
        losses_S = linear_cross_entropies(
            products,
            tokens.labels,
            terms=loss.terms,
            chunk=loss.chunk,
            divided=loss.divided,
            passes=loss.passes,
        )
    else:
        losses_S = torch.cat([*tokens.losses_by_chunks(loss)])
    log_probs_S = (-losses_S.float()).where(is_label_S, 0.0)
    return log_probs_T.index_put((tokens.trained,), log_probs_S)


@dataclass(frozen=True)
class _TrainedTokens:
    """The trained positions, and the head that computes their logits."""

    trained: torch.Tensor
    hidden: torch.Tensor
    head: Head
    labels: torch.Tensor
    rng: DropoutRNG | None

    @classmethod
    def of(cls, hidden_TD: torch.Tensor, head: Head, labels: Labels) -> "_TrainedTokens":
        if labels.values.shape[:1] != hidden_TD.shape[:1]:
            positions = tuple(hidden_TD.shape)
            raise ValueError(f"{tuple(labels.values.shape)} labels for {positions} positions")
        trained = labels.trained
        rng = current_dropout_rng()
        return cls(
            trained,
            hidden_TD.index_select(0, trained),
            head,
            labels.values.index_select(0, trained),
            rng.select(trained) if rng else None,
        )

    def zero(self, loss: Loss) -> torch.Tensor:
        """Zero that depends on all tensors a loss would, so that their gradients are zeros."""
        # The head is read as for a loss, not called: FSDP records the order of calls, in which
        # ranks gather weights, and it must be that of the other ranks.
        with dropout_rng(self.rng):
            return compute_logits(self.hidden, self.head, loss.precision).float().sum()

    def products(self, loss: Loss) -> Sequence[WeightedRows] | None:
        """The linear terms whose sum is the logits; None if the loss takes logits, or the head is
        opaque."""
        if loss.mode == "eager" or loss.package:
            return None
        is_fp32 = loss.precision == "fp32"
        hidden_SD = self.hidden.float() if is_fp32 else as_autocast(self.hidden)
        with dropout_rng(self.rng), _autocast_for(loss.precision, hidden_SD.device.type):
            return linear_terms(self.head, hidden_SD)

    def losses_by_chunks(self, loss: Loss) -> Iterator[torch.Tensor]:
        if loss.mode == "eager":
            yield _chunk_losses(self.hidden, self.head, self.labels, loss, self.rng)
            return
        chunk = CHUNK if loss.chunk is None else loss.chunk
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; logits are computed at least one token at a time")
        for start in range(0, len(self.labels), chunk):
            some = slice(start, start + chunk)
            rng = self.rng.select(some) if self.rng else None
            arguments = self.hidden[some], self.head, self.labels[some], loss, rng
            # Reentrant checkpoints have no gradient unless an input has: a frozen body gives none.
            yield checkpoint(_chunk_losses, *arguments, use_reentrant=False)


def _chunk_losses(
    hidden_CD: torch.Tensor, head: Head, labels_C: torch.Tensor, loss: Loss, rng: DropoutRNG | None
) -> torch.Tensor:
    with dropout_rng(rng):
        return loss.of_logits(compute_logits(hidden_CD, head, loss.precision), labels_C)


def compute_logits(hidden_CD: torch.Tensor, head: Head, precision: Precision) -> torch.Tensor:
    """Logits of the head, [C, V]. Weights may have a lower precision than the computation.

    If the head is a sum of linear terms, logits are fp32 even if the matmuls have a lower
    precision, so that gradients of the adapter branches are rounded once.
    """
    with _autocast_for(precision, hidden_CD.device.type):
        x_CD = hidden_CD.float() if precision == "fp32" else as_autocast(hidden_CD)
        groups = scaled_linear_terms(head, x_CD)
        if groups is None:
            return head(x_CD if precision == "fp32" else hidden_CD)
        # A generator: one group's logits at a time beside the sum.
        return reduce(torch.add, (_scaled(*group) for group in groups))


def soft_capped(logits_CV: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap tanh(logits / cap), as in Gemma 2 (arXiv 2408.00118)."""
    return logits_CV if cap is None else (logits_CV / cap).tanh() * cap


def _scaled(by_V: torch.Tensor | None, products: Sequence[WeightedRows]) -> torch.Tensor:
    logits_CV = linear_logits(products)
    return logits_CV if by_V is None else logits_CV * by_V.to(logits_CV.dtype)


def _autocast_for(precision: Precision, kind: str) -> AbstractContextManager[object]:
    """Keep the current autocast (`model`), or disable it (`fp32`)."""
    return nullcontext() if precision == "model" else torch.autocast(kind, enabled=False)
