"""Cross-entropy of trained tokens, without ever holding a micro-batch's logits.

T tokens, S those that are trained, C those of a chunk, D model width, V vocabulary; K labels of a
token, where it has several.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.dropout import DropoutRNG, current_noise, dropout_rng
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

IGNORED = -100
"""The label of a position that is not trained."""

CHUNK = 1024
"""Tokens at a time of a head that only makes logits: 0.6 GB in fp32 for a vocabulary of 150
thousand."""

Mode = Literal["eager", "compiled", "chunked"]
"""`eager` holds the logits of all trained tokens at once; the others those of a chunk, with passes
over them that `torch.compile` makes or with the package's own."""

Precision = Literal["fp32", "model"]
"""In which logits are computed: fp32, or that of the hidden states and the weights."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [C, D] to logits."""


@dataclass(frozen=True)
class Loss:
    """Which loss, and how it is computed."""

    terms: LossOptions = PLAIN
    """What is added to plain cross-entropy."""
    mode: Mode = "chunked"
    chunk: int | None = None
    """Tokens whose logits are held at a time; unset, as many as are quick."""
    divided: VocabShard | None = None
    """What of the vocabulary the head gives, where that is not all."""
    precision: Precision = "model"

    @property
    def passes(self) -> Passes:
        """By what logits are read and turned into gradients."""
        return "compiled" if self.mode == "compiled" else "auto"

    def of_logits(self, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        """Each token's, [C]; of labels [C, K] each one's, [C, K]."""
        if self.mode == "eager" and self.divided is None:
            return eager_cross_entropies(logits_CV, labels_C, self.terms)
        return cross_entropies(
            logits_CV, labels_C, terms=self.terms, divided=self.divided, passes=self.passes
        )


CROSS_ENTROPY = Loss()
"""Plain cross-entropy, the quick way."""


def sum_cross_entropy(
    hidden_TD: torch.Tensor,
    head: Head,
    labels_T: torch.Tensor,
    loss: Loss = CROSS_ENTROPY,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """`scale` times the summed loss of the tokens with a label, a scalar in fp32.

    labels[t] is the target of position t itself (already shifted); -100 is not trained. Positions
    that are not trained are left out before the head, so they cost nothing. Where the head is a sum
    of products gradients are computed with the loss, else logits once more in the backward pass.
    Without any trained token the sum is exactly 0 and still reaches the head and the hidden states,
    whose gradients are zeros: every process of a group must take part in its collectives.
    Where the head is made of products gradients are rounded once, after they are multiplied by
    `scale` in fp32.
    A head that draws from a noise gets that of its tokens.

    Raises:
        ValueError: for a chunk below 1, or labels that are not one per position, or, on a CPU, are
            no entries of the vocabulary.
    """
    if labels_T.dim() != 1:
        raise ValueError(f"{tuple(labels_T.shape)} labels for a sum, which is of one each")
    given = _Given.of(hidden_TD, head, labels_T)
    if not len(given.labels):
        return given.nothing()
    if products := given.products(loss):
        return linear_cross_entropy(
            products,
            given.labels,
            terms=loss.terms,
            chunk=loss.chunk,
            divided=loss.divided,
            passes=loss.passes,
            scale=scale,
        )
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    for losses_C in given.losses_by_chunks(loss):
        total = total + losses_C.sum()
    return total * scale


def token_log_probs(
    hidden_TD: torch.Tensor, head: Head, labels_T: torch.Tensor, loss: Loss = CROSS_ENTROPY
) -> torch.Tensor:
    """The log-probability of each position's label, fp32 [T]; 0 where there is none. Of labels
    [T, K] that of each, [T, K], for which logits are computed no more often than for one.

    For losses that make something else of them than their sum. Logits are computed once more in the
    backward pass. Of the loss's terms only a soft cap has to do with probabilities.

    Raises:
        ValueError: as `sum_cross_entropy`; for a loss with smoothing or a z-loss.
    """
    if loss.terms.smoothing or loss.terms.z:
        raise ValueError(f"log-probabilities have no {loss.terms}")
    given = _Given.of(hidden_TD, head, labels_T)
    found_T = hidden_TD.new_zeros(labels_T.shape, dtype=torch.float32)
    if not len(given.labels):
        return found_T + given.nothing()
    is_label_S = given.labels != IGNORED
    if labels_T.dim() > 1:
        # A token that has some of its labels; the others are computed as the first entry's.
        given = replace(given, labels=given.labels.where(is_label_S, 0))
    if products := given.products(loss):
        losses_S = linear_cross_entropies(
            products,
            given.labels,
            terms=loss.terms,
            chunk=loss.chunk,
            divided=loss.divided,
            passes=loss.passes,
        )
    else:
        losses_S = torch.cat([*given.losses_by_chunks(loss)])
    found_S = (-losses_S.float()).where(is_label_S, 0.0)
    return found_T.index_put((given.trained,), found_S)


@dataclass(frozen=True)
class _Given:
    """The positions with a label, and what makes logits of them."""

    trained: torch.Tensor
    hidden: torch.Tensor
    head: Head
    labels: torch.Tensor
    noise: DropoutRNG | None

    @classmethod
    def of(cls, hidden_TD: torch.Tensor, head: Head, labels_T: torch.Tensor) -> "_Given":
        """`labels_T` may be [T, K]: positions that have any of them are trained."""
        if labels_T.shape[:1] != hidden_TD.shape[:1]:
            positions = tuple(hidden_TD.shape)
            raise ValueError(f"{tuple(labels_T.shape)} labels for {positions} positions")
        is_label = labels_T != IGNORED
        is_trained_T = is_label.any(1) if labels_T.dim() > 1 else is_label
        trained = is_trained_T.nonzero().squeeze(1)
        noise = current_noise()
        return cls(
            trained,
            hidden_TD.index_select(0, trained),
            head,
            labels_T.index_select(0, trained),
            noise.of(trained) if noise else None,
        )

    def nothing(self) -> torch.Tensor:
        """Zero, which reaches all that a loss of some tokens would."""
        with dropout_rng(self.noise):
            return self.head(self.hidden).float().sum()

    def products(self, loss: Loss) -> Sequence[WeightedRows] | None:
        """Of which logits are the sum, unless all logits are wanted, or only the head knows."""
        if loss.mode == "eager":
            return None
        is_fp32 = loss.precision == "fp32"
        hidden_SD = self.hidden.float() if is_fp32 else as_autocast(self.hidden)
        with dropout_rng(self.noise), _casting_for(loss.precision, hidden_SD.device.type):
            return linear_terms(self.head, hidden_SD)

    def losses_by_chunks(self, loss: Loss) -> Iterator[torch.Tensor]:
        """Each token's, [C] at a time."""
        if loss.mode == "eager":
            yield _losses(self.hidden, self.head, self.labels, loss, self.noise)
            return
        chunk = CHUNK if loss.chunk is None else loss.chunk
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; logits are computed at least one token at a time")
        for start in range(0, len(self.labels), chunk):
            some = slice(start, start + chunk)
            noise = self.noise.of(some) if self.noise else None
            here = self.hidden[some], self.head, self.labels[some], loss, noise
            yield checkpoint(_losses, *here, use_reentrant=False)


def _losses(
    hidden_CD: torch.Tensor,
    head: Head,
    labels_C: torch.Tensor,
    loss: Loss,
    noise: DropoutRNG | None,
) -> torch.Tensor:
    with dropout_rng(noise):
        return loss.of_logits(compute_logits(hidden_CD, head, loss.precision), labels_C)


def compute_logits(hidden_CD: torch.Tensor, head: Head, precision: Precision) -> torch.Tensor:
    """The head's logits, [C, V]. Its weights may be kept in less precision than is computed in.

    Where the head is made of products they are in fp32, also if the products are rounded to less:
    gradients of sides are then rounded once.
    """
    with _casting_for(precision, hidden_CD.device.type):
        x_CD = hidden_CD.float() if precision == "fp32" else as_autocast(hidden_CD)
        groups = scaled_linear_terms(head, x_CD)
        if groups is None:
            return head(x_CD if precision == "fp32" else hidden_CD)
        return reduce(torch.add, (_scaled(*group) for group in groups))


def _scaled(by_V: torch.Tensor | None, products: Sequence[WeightedRows]) -> torch.Tensor:
    logits_CV = linear_logits(products)
    return logits_CV if by_V is None else logits_CV * by_V.to(logits_CV.dtype)


def _casting_for(precision: Precision, kind: str) -> AbstractContextManager[object]:
    """Autocast as it is, or off."""
    return nullcontext() if precision == "model" else torch.autocast(kind, enabled=False)
