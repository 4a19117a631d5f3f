"""Selection of keys whose index scores are computed on Triton, without synchronization: chunks do
not end with documents, so that the host need not know where these do.

T tokens, C of a chunk of queries, M columns of its scores; J heads of the indexer, I their width; S
keys selected for a token.
"""

# pyright: reportArgumentType=false, reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.custom_op import operator
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.op import INTERPRETED, needs_cuda, needs_floats
from penstock_kernels.sparse_attention.chunked import fake_selected
from penstock_kernels.sparse_attention.queries import query_ranges
from penstock_kernels.sparse_attention.reference import NO_KEY, highest

NUMBERS = 1 << 25
"""Scores of a chunk, about."""

TILE = {"QUERIES": 64, "KEYS": 64}
WARPS = 4


@triton.jit
def score(
    q_ptr,
    k_ptr,
    weight_ptr,
    first_ptr,
    scores_ptr,
    start,
    T,
    C,
    M,
    J,
    width,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The scores of queries `start` to `start + C`, fp32 [C, M]. Column 0 is the first token of the
    first query's document; what a query does not see has a score of -inf."""
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    query, is_query = start + row, row < C
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    key = tl.load(first_ptr + start) + column
    first = tl.load(first_ptr + query, mask=is_query, other=T)
    sees = (key[None, :] <= query[:, None]) & (key[None, :] >= first[:, None])
    scores = tl.zeros([QUERIES, KEYS], tl.float32)
    # Tiles above the diagonal or of earlier documents are not computed.
    if tl.max(sees.to(tl.int32)) > 0:
        offs = tl.arange(0, WIDTH)
        inside = (offs < width)[None, :]
        element = key.to(tl.int64)[:, None] * width + offs[None, :]
        k = tl.trans(tl.load(k_ptr + element, mask=(key < T)[:, None] & inside, other=0))
        if UPCAST:
            k = k.to(tl.float32)
        for head in range(0, J):
            head_row = row.to(tl.int64) * J + head
            element = head_row[:, None] * width + offs[None, :]
            q = tl.load(q_ptr + element, mask=is_query[:, None] & inside, other=0)
            if UPCAST:
                q = q.to(tl.float32)
            weight = tl.load(weight_ptr + head_row, mask=is_query, other=0).to(tl.float32)
            # Not TF32, by whose scores other tokens might be selected than by the reference's.
            products = tl.dot(q, k, input_precision="ieee")
            scores += weight[:, None] * tl.maximum(products, 0.0)
    score_offs = row.to(tl.int64)[:, None] * M + column[None, :]
    inside = is_query[:, None] & (column < M)[None, :]
    tl.store(scores_ptr + score_offs, tl.where(sees, scores, float("-inf")), mask=inside)


def _select(
    q_TJI: torch.Tensor,
    k_TI: torch.Tensor,
    weight_TJ: torch.Tensor,
    cu_seqlens: torch.Tensor,
    queries: Sequence[int],
    slots: int,
    max_length: int,
) -> torch.Tensor:
    (rows, heads, width), device = q_TJI.shape, q_TJI.device
    tokens = len(k_TI)
    q_TJI, k_TI, weight_TJ = (part.contiguous() for part in (q_TJI, k_TI, weight_TJ))
    selected_TS = torch.empty((rows, slots), dtype=torch.int32, device=device)
    lengths = cu_seqlens.diff()
    first_T = torch.repeat_interleave(cu_seqlens[:-1], lengths, output_size=tokens)
    size = max(TILE["QUERIES"], NUMBERS // (2 * max_length))
    row = 0
    chunks = (
        (start, min(start + size, stop))
        for begin, stop in zip(queries[::2], queries[1::2], strict=True)
        for start in range(begin, stop, size)
    )
    for start, end in chunks:
        count = end - start
        own = slice(row, row + count)
        row += count
        # Earlier queries of the first one's document, and the chunk: at least as many as slots.
        columns = max(slots, min(tokens, max_length - 1 + count))
        scores_CM = torch.empty((count, columns), dtype=torch.float32, device=device)
        grid = cdiv(count, TILE["QUERIES"]), cdiv(columns, TILE["KEYS"])
        score[grid](
            *(q_TJI[own], k_TI, weight_TJ[own], first_T, scores_CM),
            *(start, tokens, count, columns, heads, width),
            **TILE,
            WIDTH=max(16, next_power_of_2(width)),
            UPCAST=INTERPRETED,  # bfloat16 products need it in the interpreter
            num_warps=WARPS,
        )
        column_CS = highest(scores_CM, slots)
        best_CS = scores_CM.gather(1, column_CS)
        selected_TS[own] = torch.where(best_CS == float("-inf"), NO_KEY, column_CS + first_T[start])
    return selected_TS


_operator = operator("select_keys_triton", _select, fake=fake_selected)


def unsupported_reason(
    q_TJI: torch.Tensor,
    k_TI: torch.Tensor,
    weight_TJ: torch.Tensor,
    segments: VarlenMetadata,
    top_k: int,
) -> str | None:
    """Why inputs are not supported; None if they are."""
    del top_k
    if q_TJI.dtype != k_TI.dtype:
        return f"queries are {q_TJI.dtype} and keys are {k_TI.dtype}"
    return needs_floats(q_TJI) or needs_cuda(q_TJI, k_TI, weight_TJ, segments.cu_seqlens)


def select_keys(
    q_TJI: torch.Tensor,
    k_TI: torch.Tensor,
    weight_TJ: torch.Tensor,
    segments: VarlenMetadata,
    top_k: int,
) -> torch.Tensor:
    """Same as the reference, [T, S]."""
    with torch.no_grad():
        slots, longest = min(top_k, segments.max_length), segments.max_length
        documents = segments.cu_seqlens, query_ranges(segments)
        return _operator(q_TJI, k_TI, weight_TJ, *documents, slots, longest)
