"""Definition of route and route_stats."""

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


def route_stats(
    logits_TE: torch.Tensor,
    choice_TK: torch.Tensor,
    row_T: torch.Tensor,
    num_rows: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over the tokens of each of R packed rows, which are numbered from 1: `sum_by_row` of the
    tokens' `score_shares` and of the squared logsumexp of their logits (z-loss)."""
    shares_TE = score_shares(logits_TE, scoring)
    # Zoph et al. 2022, "ST-MoE" (arXiv 2202.08906), equation 5.
    squares_T = logits_TE.logsumexp(-1).square()
    return sum_by_row(row_T, num_rows, shares_TE, squares_T, choice_TK)


def score_shares(logits_TE: torch.Tensor, scoring: Literal["softmax", "sigmoid"]) -> torch.Tensor:
    """Each expert's share of a token's scores."""
    if scoring == "softmax":
        return logits_TE.softmax(-1)
    scores_TE = logits_TE.sigmoid()
    # Sigmoids do not sum to 1 (DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, equation 19).
    return scores_TE / scores_TE.sum(-1, keepdim=True)


def row_mask(row_T: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Mask of the tokens of each row, from 1, fp32 [R, T]."""
    numbers_R = torch.arange(1, num_rows + 1, device=row_T.device)
    return (row_T == numbers_R[:, None]).float()


def sum_by_row(
    row_T: torch.Tensor,
    num_rows: int,
    shares_TE: torch.Tensor,
    squares_T: torch.Tensor,
    choice_TK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of each expert, int64 [R, E], sums of shares, fp32 [R, E], and of squares, fp32 [R].
    Tokens of row 0 are in none."""
    experts = shares_TE.shape[-1]
    # Not `torch.bincount`, which synchronizes with the GPU.
    chosen = (row_T[:, None] * experts + choice_TK).flatten()
    counts = chosen.new_zeros((num_rows + 1) * experts)
    # Integers: whatever order the GPU adds them in, the sum is the same.
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    # Matmuls with the mask: index_add_ on CUDA adds in any order.
    row_mask_RT = row_mask(row_T, num_rows)
    return counts.view(-1, experts)[1:], row_mask_RT @ shares_TE, row_mask_RT @ squares_T
