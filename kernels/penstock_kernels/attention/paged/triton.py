"""Paged attention on Triton: keys are read through the table of pages; long sequences are split.

A program takes the query heads of one key head of some queries of one sequence, and SPLIT of its
keys: with few sequences their heads alone would not fill a GPU (Dao et al. 2023, "Flash-Decoding").
Parts of a query are merged by their log-sum-exps in a second kernel. Where splits begin depends on
a key's position alone, so that a result does not depend on the other sequences.
"""

# pyright: reportArgumentType=false, reportReturnType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from penstock_kernels.attention.paged.pages import PagedSequences
from penstock_kernels.launch_sizes import cdiv, next_power_of_2
from penstock_kernels.op import INTERPRETED
from penstock_kernels.to_device import to_device

LEAST = 16
"""The least inner size of a product, and the least rows of one."""
SPLIT = 512
"""Keys of a program in a decode step."""


def tile(width: int, groups: int, dtype: torch.dtype, *, is_decode: bool) -> dict[str, int]:
    """Query heads of a key head and queries of a program, its keys at a time, and the head width as
    a power of two and what is left of it."""
    wide = max(LEAST, next_power_of_2(width))
    tail = 0
    if wide > 256 and wide != width:
        # A latent vector with its key for RoPE: 512 + 64 features, not 1,024.
        wide //= 2
        tail = max(LEAST, next_power_of_2(width - wide))
    padded_groups = next_power_of_2(groups)
    rows = LEAST if is_decode else 64 if wide * dtype.itemsize <= 256 else 32
    keys = 64 if wide * dtype.itemsize <= 256 else 32 if wide * dtype.itemsize <= 512 else 16
    return {
        "PADDED_GROUPS": padded_groups,
        "QUERIES": max(1, rows // padded_groups),
        "KEYS": keys,
        "WIDTH": wide,
        "TAIL": tail,
    }


def warps(sizes: dict[str, int]) -> int:
    """Warps of a program: wide heads would spill in four."""
    return 8 if sizes["WIDTH"] > 256 else 4


@triton.jit
def _load(
    x_ptr,
    row_offset,
    is_row,
    offs,
    H,
    UPCAST: tl.constexpr,
):
    """[rows, features]"""
    mask = is_row[:, None] & (offs < H)[None, :]
    x = tl.load(x_ptr + row_offset[:, None] + offs[None, :], mask=mask, other=0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def _store(
    x_ptr,
    row_offset,
    is_row,
    offs,
    H,
    x,
):
    mask = is_row[:, None] & (offs < H)[None, :]
    target = x_ptr + row_offset[:, None] + offs[None, :]
    tl.store(target, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _cap(
    scores,
    soft_cap,
):
    # tanh by exponentials of negative numbers, which do not overflow.
    small = tl.exp(-2 * tl.abs(scores / soft_cap))
    tanh = (1 - small) / (1 + small)
    return tl.where(scores < 0, -tanh, tanh) * soft_cap


@triton.jit
def _find_queries(
    starts_ptr,
    counts_ptr,
    tiles_ptr,
):
    """The sequence of this program, its first query, its queries and keys, and the number of the
    first query."""
    if tiles_ptr is None:
        # A decode step: one query of each sequence.
        sequence, first_query = tl.program_id(0), 0
    else:
        sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
        first_query = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    return sequence, start, queries, tl.load(counts_ptr + sequence), first_query


@triton.jit
def _find_keys(
    count,
    first_position,
    split,
    window,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The first key of a split that a query of the tile sees, and their end."""
    low = split * SPLIT
    # No query of the tile sees a key after the last one's own.
    high = tl.minimum(count, first_position + QUERIES)
    if NUM_SPLITS > 1:
        high = tl.minimum(high, low + SPLIT)
    if WINDOWED:
        low = tl.maximum(low, tl.maximum(first_position - window + 1, 0) // KEYS * KEYS)
    return low, high


@triton.jit
def _find_slots(
    table_ptr,
    key,
    is_key,
    PAGE: tl.constexpr,
):
    page = tl.load(table_ptr + key // PAGE, mask=is_key, other=0)
    return page.to(tl.int64) * PAGE + key % PAGE


@triton.jit
def _hide(
    scores,
    key,
    position,
    is_key,
    window,
    WINDOWED: tl.constexpr,
):
    """-inf for keys that a query does not see."""
    sees = (key[None, :] <= position[:, None]) & is_key[None, :]
    if WINDOWED:
        sees = sees & (key[None, :] > position[:, None] - window)
    return tl.where(sees, scores, float("-inf"))


@triton.jit
def _add_to_softmax(
    scores,
    most,
    total,
):
    """Weights of these scores, the factor of all earlier ones, and the new maximum and sum."""
    largest = tl.maximum(most, tl.max(scores, 1))
    # Rows that have seen nothing yet: -inf minus -inf would be NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights, keep = tl.exp(scores - shift[:, None]), tl.exp(most - shift)
    return weights, keep, largest, total * keep + tl.sum(weights, 1)


@triton.jit
def _finish_softmax(
    most,
    total,
):
    """The log-sum-exp, and the factor of the summed values; -inf and 0 without any key."""
    some = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, most + tl.log(some), float("-inf"))
    return lse, tl.where(total > 0, 1 / some, 0.0)


@triton.jit
def _share_of_keys(
    lse,
    sinks_ptr,
    q_head,
    is_row,
):
    # As in `_merge`: a result does not depend on how many splits the others need.
    sink = tl.load(sinks_ptr + q_head, mask=is_row, other=0).to(tl.float32)
    joint = tl.maximum(lse, sink)
    weight = tl.exp(lse - joint)
    return weight / (weight + tl.exp(sink - joint))


@triton.jit
def _paged_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    starts_ptr,
    counts_ptr,
    tiles_ptr,
    sinks_ptr,
    y_ptr,
    lse_ptr,
    N,
    H,
    pages,
    q_token_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    scale,
    window,
    soft_cap,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """y [T, N, NUM_SPLITS, H] and lse [T, N, NUM_SPLITS]; with one split y is the result, with the
    sinks, and there is no lse."""
    head, split = tl.program_id(1), tl.program_id(2)
    sequence, start, queries, count, first_query = _find_queries(starts_ptr, counts_ptr, tiles_ptr)
    row = tl.arange(0, QUERIES * PADDED_GROUPS)
    query, group = first_query + row // PADDED_GROUPS, row % PADDED_GROUPS
    is_row, position = (query < queries) & (group < GROUPS), count - queries + query
    q_head, token = head * GROUPS + group, (start + query).to(tl.int64)
    offs, tail = tl.arange(0, WIDTH), WIDTH + tl.arange(0, TAIL if TAIL > 0 else 16)
    row_offset = token * q_token_stride + q_head * q_head_stride
    q = _load(q_ptr, row_offset, is_row, offs, H, UPCAST)
    if TAIL > 0:
        q_tail = _load(q_ptr, row_offset, is_row, tail, H, UPCAST)
        acc_tail = tl.zeros([QUERIES * PADDED_GROUPS, TAIL], tl.float32)
    first = count - queries + first_query
    low, high = _find_keys(count, first, split, window, QUERIES, KEYS, SPLIT, NUM_SPLITS, WINDOWED)
    most = tl.full([QUERIES * PADDED_GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * PADDED_GROUPS], tl.float32)
    acc = tl.zeros([QUERIES * PADDED_GROUPS, WIDTH], tl.float32)
    for begin in range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < high
        slot = _find_slots(tables_ptr + sequence * pages, key, is_key, PAGE)
        k_offset = slot * k_slot_stride + head * k_head_stride
        v_offset = slot * v_slot_stride + head * v_head_stride
        # Not TF32: its logits would be off by a thousandth.
        k = _load(k_ptr, k_offset, is_key, offs, H, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if TAIL > 0:
            k_tail = _load(k_ptr, k_offset, is_key, tail, H, UPCAST)
            scores += tl.dot(q_tail, tl.trans(k_tail), input_precision="ieee")
        scores *= scale
        if CAPPED:
            scores = _cap(scores, soft_cap)
        scores = _hide(scores, key, position, is_key, window, WINDOWED)
        weights, keep, most, total = _add_to_softmax(scores, most, total)
        v = _load(v_ptr, v_offset, is_key, offs, H, UPCAST)
        rounded = weights.to(v.dtype)
        acc = acc * keep[:, None] + tl.dot(rounded, v, input_precision="ieee")
        if TAIL > 0:
            v_tail = _load(v_ptr, v_offset, is_key, tail, H, UPCAST)
            acc_tail = acc_tail * keep[:, None] + tl.dot(rounded, v_tail, input_precision="ieee")
    lse, share = _finish_softmax(most, total)
    y_row = (token * N + q_head) * NUM_SPLITS + split
    share_of_keys = tl.full(lse.shape, 1.0, tl.float32)
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + y_row, lse, mask=is_row)
    elif sinks_ptr is not None:
        share_of_keys = _share_of_keys(lse, sinks_ptr, q_head, is_row)
    _store(y_ptr, y_row * H, is_row, offs, H, acc * share[:, None] * share_of_keys[:, None])
    if TAIL > 0:
        y_tail = acc_tail * share[:, None] * share_of_keys[:, None]
        _store(y_ptr, y_row * H, is_row, tail, H, y_tail)


@triton.jit
def _merge(
    parts_ptr,
    lse_ptr,
    sinks_ptr,
    y_ptr,
    N,
    H,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One query head: the parts weighted by their shares of all exponentials."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(0) % N
    split, offs = tl.arange(0, PADDED_SPLITS), tl.arange(0, WIDTH)
    is_split = split < NUM_SPLITS
    lse = tl.load(lse_ptr + row * NUM_SPLITS + split, mask=is_split, other=float("-inf"))
    most = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        most = tl.maximum(most, sink)
    weight = tl.exp(lse - most)
    total = tl.sum(weight, 0)
    if sinks_ptr is not None:
        total += tl.exp(sink - most)
    part = parts_ptr + (row * NUM_SPLITS + split)[:, None] * H + offs[None, :]
    x = tl.load(part, mask=is_split[:, None] & (offs < H)[None, :], other=0)
    y = tl.sum(x * (weight / total)[:, None], 0)
    tl.store(y_ptr + row * H + offs, y.to(y_ptr.dtype.element_ty), mask=offs < H)


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
    """Same as the reference."""
    q_TNH = q_TNH.to(k_PSKH.dtype)
    tokens, heads, width = q_TNH.shape
    q_TNH, k_PSKH, v_PSKH = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q_TNH, k_PSKH, v_PSKH)
    )
    groups, is_decode = heads // k_PSKH.shape[2], sequences.is_decode
    sizes = tile(width, groups, q_TNH.dtype, is_decode=is_decode)
    tables, starts, counts = sequences.index_tensors()
    # A chunk has queries enough to fill a GPU, and partial results for each of them are large.
    splits = cdiv(max(sequences.num_keys), SPLIT) if is_decode else 1
    tiles = None if is_decode else _tiles(sequences, sizes["QUERIES"])
    y_TNH = torch.empty(tokens, heads, width, dtype=v_PSKH.dtype, device=q_TNH.device)
    parts, lse = y_TNH, None
    if splits > 1:
        parts = y_TNH.new_empty(tokens, heads, splits, width, dtype=torch.float32)
        lse = parts.new_empty(parts.shape[:-1])
    grid = (len(sequences.tables) if tiles is None else len(tiles), k_PSKH.shape[2], splits)
    _paged_attention[grid](
        *(q_TNH, k_PSKH, v_PSKH, tables, starts, counts, tiles, sinks_N, parts, lse),
        *(heads, width, tables.shape[1], *q_TNH.stride()[:2]),
        *(*k_PSKH.stride()[1:3], *v_PSKH.stride()[1:3], scale, window or 0, soft_cap or 1.0),
        GROUPS=groups,
        **sizes,
        PAGE=sequences.page_size,
        SPLIT=SPLIT,
        NUM_SPLITS=splits,
        WINDOWED=window is not None,
        CAPPED=soft_cap is not None,
        UPCAST=INTERPRETED,  # bfloat16 products need it in the interpreter
        num_warps=warps(sizes),
    )
    if splits > 1:
        _merge[(tokens * heads,)](
            *(parts, lse, sinks_N, y_TNH, heads, width),
            NUM_SPLITS=splits,
            PADDED_SPLITS=next_power_of_2(splits),
            WIDTH=next_power_of_2(width),
            num_warps=4,
        )
    return y_TNH


def _tiles(sequences: PagedSequences, queries: int) -> torch.Tensor:
    """int32 [tiles, 2]: the sequence of each tile, and its first query."""
    key = "tiles", queries
    if key not in sequences.memo:
        tiles = [
            (number, first)
            for number, count in enumerate(sequences.num_queries)
            for first in range(0, count, queries)
        ]
        sequences.memo[key] = to_device(torch.tensor(tiles, dtype=torch.int32), sequences.device)
    return sequences.memo[key]
