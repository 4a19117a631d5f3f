"""max_logits on Triton: a program takes a block of queries of one head, and the keys of their
documents."""

# pyright: reportArgumentType=false, reportReturnType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

from penstock_kernels.attention.segments import VarlenMetadata
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.op import INTERPRETED

LEAST = 16
"""The least inner size of a product."""


def tile(width: int, dtype: torch.dtype) -> dict[str, int]:
    """A program's queries and keys, and the power of two that holds the head width."""
    wide = next_power_of_2(max(LEAST, width))
    rows = 32 if wide * dtype.itemsize > 512 else 64
    return {"QUERIES": rows, "KEYS": rows, "WIDTH": wide}


@triton.jit
def _max_logits(
    q_ptr,
    k_ptr,
    first_ptr,
    start_rows_ptr,
    largest_ptr,
    T,
    N,
    H,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    scale,
    window,
    GROUPS: tl.constexpr,
    WINDOWED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """GROUPS query heads of each key head."""
    head = tl.program_id(1)
    begin = tl.program_id(0) * QUERIES
    query = begin + tl.arange(0, QUERIES)
    offs = tl.arange(0, WIDTH)
    q_row = q_ptr + query[:, None].to(tl.int64) * q_token_stride + head * q_head_stride
    q = tl.load(q_row + offs[None, :], mask=(query < T)[:, None] & (offs < H)[None, :], other=0)
    # A query past the end sees nothing: its document begins after the last key of any tile.
    document = tl.load(first_ptr + query, mask=query < T, other=T + KEYS + QUERIES)
    lowest = tl.load(first_ptr + begin)
    if WINDOWED:
        lowest = tl.maximum(lowest, begin - window + 1)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    for start in range(lowest // KEYS * KEYS, tl.minimum(begin + QUERIES, T), KEYS):
        key = start + tl.arange(0, KEYS)
        k_row = k_ptr + key[None, :].to(tl.int64) * k_token_stride + head // GROUPS * k_head_stride
        k = tl.load(k_row + offs[:, None], mask=(key < T)[None, :] & (offs < H)[:, None], other=0)
        if UPCAST:
            q, k = q.to(tl.float32), k.to(tl.float32)
        # Not TF32: its logits would be off by a thousandth.
        scores = tl.dot(q, k, input_precision="ieee")
        sees = (key[None, :] <= query[:, None]) & (key[None, :] >= document[:, None])
        if WINDOWED:
            sees = sees & (query[:, None] - key[None, :] < window)
        if start_rows_ptr is not None:
            last = tl.load(start_rows_ptr + key, mask=key < T, other=0)
            sees = sees & (query[:, None] < last[None, :])
        largest = tl.maximum(largest, tl.max(tl.where(sees, scores, float("-inf")), 1))
    # scale is positive, so that the largest product is the largest logit.
    tl.store(largest_ptr + tl.program_id(0) * N + head, tl.max(largest, 0) * scale)


def _document_starts(segments: VarlenMetadata) -> torch.Tensor:
    """int32 [T]: the first token of each token's document."""
    if "document_starts" not in segments.memo:
        starts = segments.cu_seqlens
        segments.memo["document_starts"] = torch.repeat_interleave(
            starts[:-1], starts.diff(), output_size=segments.num_tokens
        )
    return segments.memo["document_starts"]


@torch.no_grad()
def max_logits(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    segments: VarlenMetadata,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Same as the reference, in fp32."""
    tokens, heads, width = q_TNH.shape
    # Heads are read by their strides: only features must lie side by side.
    q_TNH, k_TKH = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_TKH))
    sizes = tile(width, q_TNH.dtype)
    num_blocks = cdiv(tokens, sizes["QUERIES"])
    largest_BN = q_TNH.new_empty(num_blocks, heads, dtype=torch.float32)
    window = segments.effective_window(window)
    _max_logits[num_blocks, heads](
        *(q_TNH, k_TKH, _document_starts(segments), segments.start_rows, largest_BN),
        *(tokens, heads, width, *q_TNH.stride()[:2], *k_TKH.stride()[:2], scale, window or 0),
        GROUPS=heads // k_TKH.shape[1],
        WINDOWED=window is not None,
        **sizes,
        UPCAST=INTERPRETED,  # bfloat16 products need it in the interpreter
        num_warps=4,
    )
    return largest_BN.amax(0)
