"""Definition of attention. The slow reference of every other implementation."""

from collections.abc import Callable

import torch

from penstock_kernels.attention.mask import causal_window_mask
from penstock_kernels.attention.segments import VarlenMetadata

Drop = Callable[[torch.Tensor, int], torch.Tensor]
"""A document's weights [N, L, L], and the number of its first token, to what is left of them."""


def eager(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
    drop: Drop | None = None,
) -> torch.Tensor:
    """Causal attention within each document, one document after another.

    T tokens, N query heads, K key/value heads (N a multiple of K), H head width. A query attends to
    the last `window` tokens up to its own (None: all) whose start row it has not reached, and to
    the later ones of its run. Scores are soft-capped at `soft_cap` by a tanh, as in Gemma 2.
    `sinks_N` are additional logits without values. The softmax is computed in fp32 or wider. `drop`
    is the dropout of a document's attention weights. Returns [T, N, H].
    """
    group = q_TNH.shape[1] // k_TKH.shape[1]
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    window = segments.effective_window(window)
    outputs = []
    first = 0
    for q_LNH, k_LKH, v_LKH in zip(
        *(part.split(list(segments.lengths)) for part in (q_TNH, k_TKH, v_TKH)), strict=True
    ):
        length = q_LNH.shape[0]
        k_LNH, v_LNH = (part.repeat_interleave(group, dim=1) for part in (k_LKH, v_LKH))
        scores_NLL = torch.einsum("qnh,knh->nqk", q_LNH, k_LNH).to(wide) * scale
        if soft_cap is not None:
            scores_NLL = (scores_NLL / soft_cap).tanh() * soft_cap
        masks = segments.document_masks(first, length)
        hidden_LL = causal_window_mask(length, window, q_TNH.device, *masks)
        scores_NLL = scores_NLL.masked_fill(hidden_LL, float("-inf"))
        if sinks_N is not None:
            sinks_NL1 = sinks_N.to(wide)[:, None, None].expand(-1, length, 1)
            scores_NLL = torch.cat((scores_NLL, sinks_NL1), dim=-1)
        # Without the sink's column: it takes a share of the softmax, and has no value.
        # Rounded before the values are weighted, as in transformers' eager_attention_forward.
        weights_NLL = scores_NLL.softmax(-1)[..., :length].to(q_TNH.dtype)
        if drop is not None:
            weights_NLL = drop(weights_NLL, first)
        outputs.append(torch.einsum("nqk,knh->qnh", weights_NLL, v_LNH))
        first += length
    return torch.cat(outputs)
