"""max_logits in PyTorch: a block of queries at a time.

T tokens; N query heads, K key heads, G = N / K; H head width; L queries of a block, E keys that
they may see.
"""

from itertools import accumulate

import torch

from penstock_kernels.attention.mask import causal_window_mask
from penstock_kernels.attention.segments import VarlenMetadata

QUERIES = 256
"""Queries of a block."""


@torch.no_grad()
def max_logits(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The maximum of `scale * q @ k.T` of each query head over all pairs of a token and one that it
    attends to, in fp32 or wider: [N]. No gradients."""
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    largest_N = q_TNH.new_full((q_TNH.shape[1],), float("-inf"), dtype=wide)
    starts = (0, *accumulate(segments.lengths))
    for first, length in zip(starts, segments.lengths, strict=False):
        q_NLH = q_TNH[first : first + length].to(wide).transpose(0, 1)
        k_KLH = k_TKH[first : first + length].to(wide).transpose(0, 1)
        masks = segments.document_masks(first, length)
        for row in range(0, length, QUERIES):
            end = min(row + QUERIES, length)
            hidden_LE = _hidden(row, end, length, window, q_TNH.device, *masks)
            keys = hidden_LE.shape[1]
            q_KRH = q_NLH[:, row:end].reshape(len(k_KLH), -1, q_NLH.shape[-1])
            scores_NLE = (q_KRH @ k_KLH[:, :keys].mT).view(len(q_NLH), end - row, keys)
            scores_NLE.masked_fill_(hidden_LE, float("-inf"))
            largest_N = torch.maximum(largest_N, scores_NLE.amax((1, 2)))
    return largest_N * scale


def _hidden(
    row: int,
    end: int,
    length: int,
    window: int | None,
    device: torch.device,
    start_rows_L: torch.Tensor | None,
    run_ends_L: torch.Tensor | None,
) -> torch.Tensor:
    """bool [L, E]: keys that the queries `row` to `end` of a document of `length` tokens do not
    attend to."""
    if run_ends_L is not None:
        return causal_window_mask(length, window, device, start_rows_L, run_ends_L)[row:end]
    if start_rows_L is not None:
        return causal_window_mask(end, window, device, start_rows_L[:end])[row:]
    query_L1 = torch.arange(row, end, device=device).unsqueeze(1)
    key_E = torch.arange(end, device=device)
    hidden_LE = query_L1 < key_E
    return hidden_LE if window is None else hidden_LE | (query_L1 - key_E >= window)
