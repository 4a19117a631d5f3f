"""Definition of sparse attention. The slow reference of the other implementations.

T tokens, L queries of a document, M keys up to their last, N heads, H head width; R size of a
latent vector, P features with RoPE; J heads of the indexer, I their width; S keys selected for a
token.
"""

import torch

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.sparse_attention.queries import query_chunks, query_ranges

NO_KEY = -1
"""In place of a selected token where fewer than S are visible."""


def index_scores(q_LJI: torch.Tensor, k_MI: torch.Tensor, weight_LJ: torch.Tensor) -> torch.Tensor:
    """`sum_j weight_j * relu(q_j . k)` of each query with each key, fp32 or wider, [L, M].

    Heads one after another: all at once take J times the memory of the result.
    """
    wide = torch.promote_types(q_LJI.dtype, torch.float32)
    k_IM = k_MI.to(wide).T
    scores_LM = torch.zeros((len(q_LJI), len(k_MI)), dtype=wide, device=q_LJI.device)
    # Autocast would multiply in 16 bits what is cast to fp32 here.
    with torch.autocast(q_LJI.device.type, enabled=False):
        for q_LI, weight_L in zip(q_LJI.unbind(1), weight_LJ.unbind(1), strict=True):
            scores_LM = scores_LM + weight_L.to(wide)[:, None] * (q_LI.to(wide) @ k_IM).relu()
    return scores_LM


def top_k_keys(
    q_TJI: torch.Tensor,
    k_TI: torch.Tensor,
    weight_TJ: torch.Tensor,
    segments: VarlenMetadata,
    top_k: int,
) -> torch.Tensor:
    """For each query, of all tokens or those of `PartialSegments`, the S = min(top_k, longest
    document) visible tokens with the highest index scores of each token, of equal scores the
    earlier token, or all that are visible and then `NO_KEY`: int32 [T, S], in no order. No
    gradient."""
    selected = []
    with torch.no_grad():
        for chunk in query_chunks(segments.lengths, query_ranges(segments)):
            own, first = chunk.rows, chunk.first
            scores_LM = index_scores(q_TJI[own], k_TI[chunk.keys], weight_TJ[own])
            slots = min(top_k, segments.max_length)
            chosen_LS = top_k_of_chunk(scores_LM, chunk.start - first, slots)
            selected.append(torch.where(chosen_LS == NO_KEY, NO_KEY, chosen_LS + first))
    return torch.cat(selected).to(torch.int32)


def top_k_of_chunk(scores_CM: torch.Tensor, start: int, top_k: int) -> torch.Tensor:
    """The keys with the highest scores for the queries from `start` on, which see the keys up to
    their own: int64 [C, top_k]."""
    queries, keys = scores_CM.shape
    hidden_CM = scores_CM.new_ones((queries, keys), dtype=torch.bool).triu_(start + 1)
    scores_CM = scores_CM.masked_fill(hidden_CM, float("-inf"))
    key_CK = highest(scores_CM, min(top_k, keys))
    # A query that sees fewer keys than top-k returns gets hidden ones too; their scores tell.
    key_CK = key_CK.masked_fill(scores_CM.gather(1, key_CK) == float("-inf"), NO_KEY)
    missing = top_k - key_CK.shape[1]
    return torch.nn.functional.pad(key_CK, (0, missing), value=NO_KEY) if missing else key_CK


def highest(scores_CM: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of the `count` highest scores of each row, ascending, int64 [C, count].

    `topk` breaks ties by what else is in the row, so that tokens would attend to other keys in
    another layout. Does not synchronize.
    """
    rows, columns = scores_CM.shape
    # The values of top-k are the same however it breaks ties; only its indices are not.
    least_C1 = scores_CM.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_CM, equal_CM = scores_CM > least_C1, scores_CM == least_C1
    missing_C1 = count - above_CM.sum(-1, keepdim=True)
    # int32, and in place below: sums of [C, M] are as large as the scores, or larger.
    chosen_CM = above_CM | (equal_CM & (equal_CM.cumsum(-1, dtype=torch.int32) <= missing_C1))
    # Columns that are not chosen go to a slot past the last, which is cut off.
    slot_CM = chosen_CM.cumsum(-1).sub_(1).masked_fill_(~chosen_CM, count)
    column_CM = torch.arange(columns, device=scores_CM.device).expand(rows, -1)
    # Zeros, for a row with NaN fills no slot.
    slots_CS = column_CM.new_zeros((rows, count + 1))
    return slots_CS.scatter_(1, slot_CM, column_CM)[:, :count]


def selection_mask(selected_CS: torch.Tensor, first: int, keys: int) -> torch.Tensor:
    """Whether each query attends to each of the `keys` tokens from `first` on, bool [C, keys]."""
    # NO_KEY marks one more column, which is cut off: scatter_ has no index to skip.
    place_CS = torch.where(selected_CS == NO_KEY, keys, selected_CS.long() - first)
    mask_CM = place_CS.new_zeros((len(selected_CS), keys + 1), dtype=torch.bool)
    return mask_CM.scatter_(1, place_CS, True)[:, :keys]


def sparse_attention(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    selected_TS: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
) -> torch.Tensor:
    """`softmax(scale * q @ k.T) @ v` over the selected tokens of each token's own document, [T, N,
    H]. The softmax is computed in fp32 or wider."""
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    outputs = []
    for chunk in query_chunks(segments.lengths, query_ranges(segments)):
        own, keys = chunk.rows, chunk.keys
        scores_NLM = torch.einsum("qnh,knh->nqk", q_TNH[own], k_TNH[keys]).to(wide) * scale
        mask_LM = selection_mask(selected_TS[own], chunk.first, chunk.end - chunk.first)
        weights_NLM = scores_NLM.masked_fill(~mask_LM, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("nqk,knh->qnh", weights_NLM.to(q_TNH.dtype), v_TNH[keys]))
    return torch.cat(outputs)


def latent_sparse_attention(
    q_TNR: torch.Tensor,
    q_TNP: torch.Tensor,
    latent_TR: torch.Tensor,
    k_TP: torch.Tensor,
    selected_TS: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
) -> torch.Tensor:
    """The same where all heads share keys, which are latent vectors and P features with RoPE, and
    values, which are the latent vectors: [T, N, R] (multi-head latent attention, "absorbed":
    DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2)."""
    heads = q_TNR.shape[1]
    q_TNL = torch.cat((q_TNR, q_TNP), -1)
    k_TNL = torch.cat((latent_TR, k_TP), -1)[:, None].expand(-1, heads, -1)
    v_TNR = latent_TR[:, None].expand(-1, heads, -1)
    return sparse_attention(q_TNL, k_TNL, v_TNR, selected_TS, segments, scale)
