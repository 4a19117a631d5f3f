"""Definition of route."""

from typing import Literal

import torch


def route(
    logits_TE: torch.Tensor,
    experts_per_token: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    normalized: bool = True,
    norm_eps: float = 1e-20,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    groups_per_token: int = 1,
    group_score: Literal["best_two", "best"] = "best_two",
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top-k experts of each token, int64 [T, K], and their weights, fp32 [T, K].

    T tokens, E experts in `num_groups` groups of equal size. A token chooses among the experts of
    the groups with the largest sums of their two best scores, or with the best scores. `bias_E`
    affects only the choice. `norm_eps` is added to the sum that normalizes weights, which may be 0.
    """
    # Scores rounded to 16 bits would tie, and top-k breaks ties in no documented order.
    logits_TE = logits_TE.float()
    scores_TE = logits_TE.softmax(-1) if scoring == "softmax" else logits_TE.sigmoid()
    # The bias balances load: it selects experts, but does not weigh them (Wang et al. 2024,
    # "Auxiliary-loss-free load balancing strategy for mixture-of-experts").
    with torch.no_grad():
        wanted_TE = scores_TE if bias_E is None else scores_TE + bias_E.float()
        if num_groups > groups_per_token:
            wanted_TGE = wanted_TE.unflatten(-1, (num_groups, -1))
            # DeepSeek-V2 ranks groups by their best expert, DeepSeek-V3 by their best two.
            if group_score == "best":
                best_TG = wanted_TGE.amax(-1)
            else:
                best_TG = wanted_TGE.topk(2, dim=-1).values.sum(-1)
            left_out_TG = torch.ones_like(best_TG, dtype=torch.bool)
            left_out_TG.scatter_(1, best_TG.topk(groups_per_token, dim=-1).indices, False)
            # Not 0: with a negative bias, experts of chosen groups may score less than that.
            wanted_TE = wanted_TGE.masked_fill(left_out_TG.unsqueeze(-1), float("-inf")).flatten(1)
        choice_TK = wanted_TE.topk(experts_per_token, dim=-1).indices
    weights_TK = scores_TE.gather(1, choice_TK)
    if normalized:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + norm_eps)
    return choice_TK, weights_TK * scale
