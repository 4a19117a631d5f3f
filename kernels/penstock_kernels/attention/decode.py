"""Decode attention: the newest token of each of several documents attends to the KV cache. No
gradients.

B documents, C tokens of the longest, K key/value heads, G query heads of each, H head width.
"""

import torch
import torch.nn.functional as F

from penstock_kernels.attention.sinks import with_sinks


def decode_attention(
    q_BNH: torch.Tensor,
    k_BKCH: torch.Tensor,
    v_BKCH: torch.Tensor,
    sees_BC: torch.Tensor | None,
    scale: float,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """One query of each document to its keys, including its own. Returns [B, N, H].

    Keys and values that `sees_BC` masks (None: none) may be any finite values. Scores are
    soft-capped at `soft_cap`. The softmax is computed in fp32 or wider.
    """
    heads = k_BKCH.shape[1]
    # Query heads of a key head are batched as queries: keys are not repeated.
    q_BKGH = q_BNH.reshape(len(q_BNH), heads, -1, q_BNH.shape[2])
    sees = None if sees_BC is None else sees_BC[:, None, None, :]
    if sinks_N is None and soft_cap is None:
        y_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKCH, v_BKCH, attn_mask=sees, scale=scale)
        return y_BKGH.flatten(1, 2)
    wide = torch.promote_types(q_BNH.dtype, torch.float32)
    # Autocast would cast the fp32 products down.
    with torch.autocast(q_BNH.device.type, enabled=False):
        scores = q_BKGH.to(wide) @ k_BKCH.to(wide).transpose(-1, -2) * scale
        if soft_cap is not None:
            scores = (scores / soft_cap).tanh() * soft_cap
        if sees is not None:
            scores = scores.masked_fill(~sees, float("-inf"))
        lse_BN = scores.logsumexp(-1).flatten(1)
        y_BNH = (scores.softmax(-1) @ v_BKCH.to(wide)).flatten(1, 2)
        if sinks_N is not None:
            y_BNH, _ = with_sinks(y_BNH, lse_BN, sinks_N)
        return y_BNH.to(q_BNH.dtype)
