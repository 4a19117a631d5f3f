"""`focal`: a loss that dwells on tokens not learned yet; `entropy`: how sure the model is."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from penstock.losses.logits_loss import LogitsLoss, LogitsMetric


class Focal(LogitsLoss):
    """Focal loss (Lin et al. 2017, arXiv 1708.02002): (1 - p)^gamma times cross-entropy."""

    version: ClassVar[int] = 1

    gamma: float = Field(default=2.0, ge=0)

    def token_losses(self, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        """Loss of each token, [C]."""
        losses_C = F.cross_entropy(logits_CV, labels_C, reduction="none")
        return (1 - torch.exp(-losses_C)) ** self.gamma * losses_C


class Entropy(LogitsMetric):
    """Entropy of the predicted distribution, in nats."""

    version: ClassVar[int] = 1

    def token_values(self, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        """Entropy at each token, [C]."""
        del labels_C
        log_p_CV = logits_CV.log_softmax(dim=1)
        return -(log_p_CV.exp() * log_p_CV).sum(dim=1)
