"""Definition of a block of attention; slow.

The backward formulas are those of Dao et al. 2022, "FlashAttention", appendix B.2: with the output
and log-sum-exp of all keys, the gradients of all blocks add up to those of full attention.
"""

from collections.abc import Iterator

import torch

from penstock_kernels.attention.block.block_mask import Rectangle, Sees
from penstock_kernels.attention.mask import causal_window_mask


def block(
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    sees: Sees,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries to the unmasked keys of this block only.

    Within documents, a query attends to the last `window` tokens up to its own (None: all) whose
    start row it has not reached, and to the later ones of its run. A `Rectangle` defines its own
    mask. Scores are soft-capped at `soft_cap` by a tanh.

    Returns the output [Q, N, H], and the log-sum-exp of each query's scores [Q, N], in fp32 or
    wider.
    """
    outputs, sums = [], []
    for queries, keys, hidden in _parts(q_QNH, sees, window):
        k_SNH, v_SNH = (_for_each_query_head(part[keys], q_QNH) for part in (k_SKH, v_SKH))
        scores_NQS = _masked(_capped(_scores(q_QNH[queries], k_SNH, scale), soft_cap), hidden)
        weights_NQS = scores_NQS.softmax(-1)
        outputs.append(torch.einsum("nqs,snh->qnh", weights_NQS, v_SNH).to(q_QNH.dtype))
        sums.append(scores_NQS.logsumexp(-1).t())
    return torch.cat(outputs), torch.cat(sums)


def block_backward(
    dy_QNH: torch.Tensor,
    q_QNH: torch.Tensor,
    k_SKH: torch.Tensor,
    v_SKH: torch.Tensor,
    y_QNH: torch.Tensor,
    lse_QN: torch.Tensor,
    sees: Sees,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This block's part of the gradients of the queries [Q, N, H], keys and values [S, K, H].

    `y_QNH` and `lse_QN` are the output and log-sum-exp over all keys, of this block and others.
    """
    dq_QNH, dk_SKH, dv_SKH = (torch.zeros_like(part) for part in (q_QNH, k_SKH, v_SKH))
    for queries, keys, hidden in _parts(q_QNH, sees, window):
        k_SNH, v_SNH = (_for_each_query_head(part[keys], q_QNH) for part in (k_SKH, v_SKH))
        q, y, dy = (_wide(part[queries]) for part in (q_QNH, y_QNH, dy_QNH))
        capped_NQS = _capped(_scores(q, k_SNH, scale), soft_cap)
        scores_NQS = _masked(capped_NQS, hidden)
        weights_NQS = (scores_NQS - lse_QN[queries].t().unsqueeze(-1)).exp()
        # The sum over keys of weight times its gradient: y is that of weights times values.
        delta_NQ1 = (dy * y).sum(-1).t().unsqueeze(-1)
        dweights_NQS = torch.einsum("qnh,snh->nqs", dy, v_SNH)
        dscores_NQS = weights_NQS * (dweights_NQS - delta_NQ1) * scale
        # The cap's own derivative, 1 - tanh(score / cap)^2.
        if soft_cap is not None:
            dscores_NQS *= 1 - (capped_NQS / soft_cap).square()
        dq_QNH[queries] = torch.einsum("nqs,snh->qnh", dscores_NQS, k_SNH).to(dq_QNH.dtype)
        for gradient, dx_SNH in (
            (dk_SKH, torch.einsum("nqs,qnh->snh", dscores_NQS, q)),
            (dv_SKH, torch.einsum("nqs,qnh->snh", weights_NQS, dy)),
        ):
            of_each_head = dx_SNH.unflatten(1, (k_SKH.shape[1], -1))
            gradient[keys] = of_each_head.sum(2).to(gradient.dtype)
    return dq_QNH, dk_SKH, dv_SKH


def _parts(
    q_QNH: torch.Tensor, sees: Sees, window: int | None
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Queries, the keys they may see, and which of these are hidden from which."""
    if isinstance(sees, Rectangle):
        hidden_QS = sees.hidden_keys(q_QNH.device)
        yield slice(0, sees.num_queries), slice(0, sees.num_keys), hidden_QS
        return
    window = sees.effective_window(window)
    start = 0
    for length in sees.lengths:
        document = slice(start, start + length)
        masks = sees.document_masks(start, length)
        yield document, document, causal_window_mask(length, window, q_QNH.device, *masks)
        start += length


def _scores(q_QNH: torch.Tensor, k_SNH: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.einsum("qnh,snh->nqs", _wide(q_QNH), k_SNH) * scale


def _capped(scores_NQS: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    return scores_NQS if soft_cap is None else (scores_NQS / soft_cap).tanh() * soft_cap


def _masked(scores_NQS: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    return scores_NQS if hidden is None else scores_NQS.masked_fill(hidden, float("-inf"))


def _for_each_query_head(x_SKH: torch.Tensor, q_QNH: torch.Tensor) -> torch.Tensor:
    return _wide(x_SKH).repeat_interleave(q_QNH.shape[1] // x_SKH.shape[1], dim=1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
