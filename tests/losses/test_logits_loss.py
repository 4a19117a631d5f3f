"""Losses and metrics of packages compute what the same function of all logits gives."""

import pytest
import torch
import torch.nn.functional as F

from penstock.core.errors import CapabilityError
from penstock.losses.cross_entropy import Loss, sum_cross_entropy
from penstock.losses.labels import Labels
from penstock.losses.logits_loss import LogitsLoss, LogitsMetric
from penstock.losses.token_metrics import token_scores
from penstock_kernels.cross_entropy import LossOptions
from tests.losses.test_cross_entropy import TOKENS, VOCAB, WIDTH, matrix, numbers

CAP = 3.0


class Focal(LogitsLoss):
    """Focal loss (arXiv 1708.02002)."""

    gamma: float = 2.0

    def token_losses(self, logits_CV, labels_C):
        losses_C = F.cross_entropy(logits_CV, labels_C, reduction="none")
        return (1 - torch.exp(-losses_C)) ** self.gamma * losses_C


class Entropy(LogitsMetric):
    def token_values(self, logits_CV, labels_C):
        del labels_C
        return torch.distributions.Categorical(logits=logits_CV).entropy()


class OneNumber(LogitsLoss):
    def token_losses(self, logits_CV, labels_C):
        return F.cross_entropy(logits_CV, labels_C)


def some_labels():
    values = numbers(TOKENS).abs().mul(10).long() % VOCAB
    values[::4] = -100
    weights = 1 + numbers(TOKENS).abs()
    return values, weights


@pytest.mark.parametrize("mode", ["chunked", "eager"])
@pytest.mark.parametrize("cap", [None, CAP])
def test_a_loss_and_its_gradients_are_those_of_all_logits_at_once(mode, cap):
    values_T, weights_T = some_labels()
    hidden_TD, head = numbers(TOKENS, WIDTH).requires_grad_(), matrix()
    labels = Labels.from_host(values_T, torch.device("cpu"), weights_T)
    loss = Loss(LossOptions(soft_cap=cap), mode=mode, chunk=8, package=Focal(gamma=1.5))
    total = sum_cross_entropy(hidden_TD, head, labels, loss, scale=0.25)
    gradients = torch.autograd.grad(total, [hidden_TD, head.weight])

    logits_TV = head(hidden_TD)
    logits_TV = logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)
    kept_T = values_T != -100
    of_tokens = Focal(gamma=1.5).token_losses(logits_TV[kept_T], values_T[kept_T])
    expected = 0.25 * (of_tokens * weights_T[kept_T]).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [hidden_TD, head.weight]))


def test_a_metric_has_the_value_of_each_trained_token():
    values_T, _ = some_labels()
    hidden_TD, head = numbers(TOKENS, WIDTH), matrix()
    capped = Loss(LossOptions(soft_cap=CAP), chunk=8)
    scores = token_scores(
        hidden_TD, head, values_T, width=VOCAB, loss=capped, metrics=[Entropy(), Entropy()]
    )
    with torch.no_grad():
        log_p = (CAP * torch.tanh(head(hidden_TD) / CAP)).log_softmax(1)[values_T != -100]
    entropies = -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close(scores.values, torch.stack([entropies, entropies]))
    none = token_scores(hidden_TD, head, values_T, width=VOCAB)
    assert none.values.shape == (0, len(entropies))


def test_a_loss_that_is_not_one_number_of_each_token_is_refused():
    values_T, _ = some_labels()
    with pytest.raises(CapabilityError, match="OneNumber"):
        sum_cross_entropy(
            numbers(TOKENS, WIDTH), matrix(), values_T, Loss(chunk=8, package=OneNumber())
        )
