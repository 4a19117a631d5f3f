"""Preference metrics: rewards, accuracy, margins, log-probs.

D samples, A their two completions, M metrics.
"""

from collections.abc import Mapping, Sequence

import torch

from penstock.config.schema.preference import PreferenceConfig
from penstock.losses.preference import implicit_rewards

# The two parts of the loss, before their weights.
PREFERENCE_LOSS, SFT_LOSS = "preference_loss", "sft_loss"

# Share of pairs whose chosen completion has the higher reward.
ACCURACY = "rewards/accuracies"

REWARDS, LOGPS = ("rewards/chosen", "rewards/rejected"), ("logps/chosen", "logps/rejected")
# Metrics over all samples, in the order of `metric_sums`. For KTO, chosen are the desirable
# completions and rejected the undesirable ones.
NAMES = (*REWARDS, ACCURACY, *LOGPS, PREFERENCE_LOSS, SFT_LOSS)

# Mean chosen reward minus mean rejected reward, if there are both.
MARGINS = "rewards/margins"


def metric_sums(
    policy_DA: torch.Tensor,
    ratios_DA: torch.Tensor,
    losses_D: torch.Tensor,
    sft: tuple[torch.Tensor, torch.Tensor],
    desirable_D: torch.Tensor | None,
    preference: PreferenceConfig,
) -> torch.Tensor:
    """(sum, denominator) of each metric in NAMES, fp64 [M, 2].

    Args:
        policy_DA: policy log-probabilities, summed over tokens.
        ratios_DA: normalized log ratios, as the loss takes them.
        losses_D: preference loss of each sample.
        sft: for the SFT (cross-entropy) term of each sample, the summed log-probability and the
            number of tokens, [D] each.
        desirable_D: KTO labels; None for pairs.
        preference: the preference config.
    """
    rewards_DA, policy_DA = implicit_rewards(ratios_DA, preference), policy_DA.detach()
    one_D = torch.ones_like(losses_D)
    if desirable_D is None:
        chosen, rejected = (0, one_D), (1, one_D)
        pairs_D = one_D
    else:
        chosen, rejected = (0, desirable_D.double()), (0, 1 - desirable_D.double())
        pairs_D = torch.zeros_like(one_D)
    is_right_D = (rewards_DA[:, 0] > rewards_DA[:, 1]).double()
    metrics_by_name = [
        *((rewards_DA[:, column], weight_D) for column, weight_D in (chosen, rejected)),
        (is_right_D, pairs_D),
        *((policy_DA[:, column], weight_D) for column, weight_D in (chosen, rejected)),
        (losses_D.detach(), one_D),
    ]
    sums = [
        torch.stack([(value * weight).sum(), weight.sum()]) for value, weight in metrics_by_name
    ]
    log_probs_D, tokens_D = sft
    sums.append(torch.stack([-log_probs_D.detach().sum(), tokens_D.sum()]))
    return torch.stack(sums).double()


def metrics_by_name(sums: Sequence[Sequence[float]], prefix: str = "") -> Mapping[str, float]:
    """Metrics by name, from sums over all samples; metrics without samples are omitted."""
    metrics = {
        name: total / count for name, (total, count) in zip(NAMES, sums, strict=True) if count
    }
    chosen, rejected = (metrics.get(name) for name in REWARDS)
    if chosen is not None and rejected is not None:
        metrics[MARGINS] = chosen - rejected
    return {f"{prefix}{name}": value for name, value in metrics.items()}
