"""Definition of paged attention; slow."""

import torch

from penstock_kernels.attention.paged.pages import PagedSequences
from penstock_kernels.attention.sinks import with_sinks


def gather_keys(
    x_PSKH: torch.Tensor, sequences: PagedSequences, number: int, first: int = 0
) -> torch.Tensor:
    """The cached tokens of one sequence from number `first` on, [C, K, H]."""
    size, count = sequences.page_size, sequences.num_keys[number]
    begin = first // size
    pages = torch.as_tensor(
        sequences.tables[number][begin : -(-count // size)], device=x_PSKH.device
    )
    return x_PSKH[pages].flatten(0, 1)[first - begin * size : count - begin * size]


@torch.no_grad()
def paged_attention(
    q_TNH: torch.Tensor,
    k_PSKH: torch.Tensor,
    v_PSKH: torch.Tensor,
    sequences: PagedSequences,
    scale: float,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of the newest tokens of each sequence to its cached ones. No gradients.

    T queries of all sequences, N query heads, P pages of S tokens, K key/value heads (N a multiple
    of K), H head width. A query attends to the tokens up to its own, of which the last `window`
    (None: all). Scores are soft-capped at `soft_cap` by a tanh; `sinks_N` are additional logits
    without values. `v_PSKH` may be `k_PSKH`. The softmax is computed in fp32 or wider. Returns [T,
    N, H] in the dtype of the values.
    """
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    outputs: list[torch.Tensor] = []
    # Autocast would cast the fp32 products down.
    with torch.autocast(q_TNH.device.type, enabled=False):
        for number, q_QNH in enumerate(q_TNH.split(list(sequences.num_queries))):
            count, queries = sequences.num_keys[number], len(q_QNH)
            first = sequences.first_key(number, window)
            k_CKH, v_CKH = (
                gather_keys(x, sequences, number, first).to(wide) for x in (k_PSKH, v_PSKH)
            )
            q_QKGH = q_QNH.to(wide).unflatten(1, (k_CKH.shape[1], -1))
            scores_KGQC = torch.einsum("qkgh,ckh->kgqc", q_QKGH, k_CKH) * scale
            if soft_cap is not None:
                scores_KGQC = (scores_KGQC / soft_cap).tanh() * soft_cap
            own_Q1 = torch.arange(count - queries, count, device=q_QNH.device).unsqueeze(1)
            key_C = torch.arange(first, count, device=q_QNH.device)
            hidden_QC = key_C > own_Q1
            if window is not None:
                hidden_QC |= key_C <= own_Q1 - window
            scores_KGQC = scores_KGQC.masked_fill(hidden_QC, float("-inf"))
            y_QNH = torch.einsum("kgqc,ckh->qkgh", scores_KGQC.softmax(-1), v_CKH).flatten(1, 2)
            if sinks_N is not None:
                lse_QN = scores_KGQC.logsumexp(-1).movedim(-1, 0).flatten(1)
                y_QNH, _ = with_sinks(y_QNH, lse_QN, sinks_N)
            outputs.append(y_QNH.to(v_PSKH.dtype))
    return torch.cat(outputs)
