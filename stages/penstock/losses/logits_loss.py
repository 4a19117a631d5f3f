"""Losses and metrics of packages, as functions of logits.

C tokens of a chunk, V vocabulary size.
"""

from abc import ABC, abstractmethod

import torch

from penstock.core.errors import CapabilityError
from penstock.core.extensions import Part


class LogitsLoss(Part, ABC):
    """A loss of a package (`penstock.losses`), with its options as fields."""

    @abstractmethod
    def token_losses(self, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        """Loss of each token, [C], differentiable in the fp32 logits of a chunk of trained tokens;
        training minimizes their weighted mean over the step. Called again in the backward pass."""


class LogitsMetric(Part, ABC):
    """An evaluation metric of a package (`penstock.metrics`), with its options as fields."""

    @abstractmethod
    def token_values(self, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        """Value of each token, [C], from the fp32 logits of a chunk of trained tokens. The metric
        is their mean over the tokens of an evaluation, weighted by their loss weights."""


def per_token(part: Part, values: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    """The values. Raises CapabilityError unless there is one for each token."""
    if values.shape == labels_C.shape:
        return values
    raise CapabilityError(
        f"{type(part).__name__} returns a tensor {list(values.shape)} for {len(labels_C)} tokens, "
        "and one value of each is meant."
    )
