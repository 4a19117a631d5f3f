"""What is told of answers besides their loss: what they are worth, and which are preferred.

D samples, A their two answers, M measures.
"""

from collections.abc import Mapping, Sequence

import torch

from penstock.config.schema.preference import PreferenceConfig
from penstock.losses.preference import rewards

OF_PREFERENCES, OF_TOKENS = "preference_loss", "sft_loss"
"""The two parts of the loss, each before its weight."""

RIGHT = "rewards/accuracies"
"""The share of pairs whose chosen answer has the higher reward."""

NAMES = (
    "rewards/chosen",
    "rewards/rejected",
    RIGHT,
    "logps/chosen",
    "logps/rejected",
    OF_PREFERENCES,
    OF_TOKENS,
)
"""Of all samples together, in the order of `measures`. Of answers that are judged one by one the
chosen ones are the good ones and the rejected ones the bad ones."""

MARGINS = "rewards/margins"
"""By how much the mean reward of the former is higher, where there are both."""


def measures(
    policy_DA: torch.Tensor,
    ratios_DA: torch.Tensor,
    losses_D: torch.Tensor,
    sft: tuple[torch.Tensor, torch.Tensor],
    desirable_D: torch.Tensor | None,
    how: PreferenceConfig,
) -> torch.Tensor:
    """For each of NAMES its sum and what it is to be divided by, fp64 [M, 2].

    Args:
        policy_DA: log-probabilities, summed over tokens.
        ratios_DA: normalised, as the loss takes them.
        losses_D: the loss of each sample.
        sft: the log-probability of what cross-entropy learns of each sample, and its tokens, [D].
    """
    worth_DA, policy_DA = rewards(ratios_DA, how), policy_DA.detach()
    one_D = torch.ones_like(losses_D)
    if desirable_D is None:
        chosen, rejected = (0, one_D), (1, one_D)
        pairs_D = one_D
    else:
        chosen, rejected = (0, desirable_D.double()), (0, 1 - desirable_D.double())
        pairs_D = torch.zeros_like(one_D)
    right_D = (worth_DA[:, 0] > worth_DA[:, 1]).double()
    told = [
        *((worth_DA[:, at], weight_D) for at, weight_D in (chosen, rejected)),
        (right_D, pairs_D),
        *((policy_DA[:, at], weight_D) for at, weight_D in (chosen, rejected)),
        (losses_D.detach(), one_D),
    ]
    sums = [torch.stack([(value * weight).sum(), weight.sum()]) for value, weight in told]
    log_probs_D, tokens_D = sft
    sums.append(torch.stack([-log_probs_D.detach().sum(), tokens_D.sum()]))
    return torch.stack(sums).double()


def told(sums: Sequence[Sequence[float]], prefix: str = "") -> Mapping[str, float]:
    """The measures from their sums over all samples, by name; those of nothing are left out."""
    found = {name: total / count for name, (total, count) in zip(NAMES, sums, strict=True) if count}
    chosen, rejected = (found.get(name) for name in NAMES[:2])
    if chosen is not None and rejected is not None:
        found[MARGINS] = chosen - rejected
    return {f"{prefix}{name}": value for name, value in found.items()}
