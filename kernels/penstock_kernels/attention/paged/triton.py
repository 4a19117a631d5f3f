"""Paged attention on Triton: keys are read through the table of pages, and long sequences are split.

A program takes the query heads of one key head of some queries of one sequence, and SPLIT of its
keys: with few sequences their heads alone would not fill a GPU (Dao et al. 2023, "Flash-Decoding").
Parts of a query are merged by their log-sum-exps in a second kernel. Where splits begin depends on
a key's position alone, so that a result does not depend on the other sequences.
"""

# pyright: reportArgumentType=false, reportReturnType=false, reportCallIssue=false

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
    rest = 0
    if wide > 256 and wide != width:
        # A latent vector with its key for RoPE: 512 + 64 features, not 1,024.
        wide //= 2
        rest = max(LEAST, next_power_of_2(width - wide))
    padded_groups = next_power_of_2(groups)
    rows = LEAST if is_decode else 64 if wide * dtype.itemsize <= 256 else 32
    keys = 64 if wide * dtype.itemsize <= 256 else 32 if wide * dtype.itemsize <= 512 else 16
    return {
        "PADDED_GROUPS": padded_groups,
        "QUERIES": max(1, rows // padded_groups),
        "KEYS": keys,
        "WIDTH": wide,
        "REST": rest,
    }


@triton.jit
def _load_queries(
    q_ptr,
    row_offset,
    is_row,
    offs,
    H,
):
    return tl.load(
        q_ptr + row_offset[:, None] + offs[None, :],
        mask=is_row[:, None] & (offs < H)[None, :],
        other=0,
    )


@triton.jit
def _load_keys(
    x_ptr,
    key_offset,
    is_key,
    offs,
    H,
):
    """[KEYS, features]"""
    return tl.load(
        x_ptr + key_offset[:, None] + offs[None, :],
        mask=is_key[:, None] & (offs < H)[None, :],
        other=0,
    )


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
    REST: tl.constexpr,
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
    if tiles_ptr is None:
        # A decode step: one query of each sequence.
        sequence, first_query = tl.program_id(0), 0
    else:
        sequence = tl.load(tiles_ptr + 2 * tl.program_id(0))
        first_query = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    start = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - start
    count = tl.load(counts_ptr + sequence)
    row = tl.arange(0, QUERIES * PADDED_GROUPS)
    query, group = first_query + row // PADDED_GROUPS, row % PADDED_GROUPS
    is_row = (query < queries) & (group < GROUPS)
    position = count - queries + query
    q_head = head * GROUPS + group
    token = (start + query).to(tl.int64)
    offs = tl.arange(0, WIDTH)
    row_offset = token * q_token_stride + q_head * q_head_stride
    q = _load_queries(q_ptr, row_offset, is_row, offs, H)
    if REST > 0:
        rest = WIDTH + tl.arange(0, REST)
        q_rest = _load_queries(q_ptr, row_offset, is_row, rest, H)
        acc_rest = tl.zeros([QUERIES * PADDED_GROUPS, REST], tl.float32)
    low = split * SPLIT
    # No query of the tile sees a key after the last one's own.
    high = tl.minimum(count, count - queries + first_query + QUERIES)
    if NUM_SPLITS > 1:
        high = tl.minimum(high, low + SPLIT)
    if WINDOWED:
        visible = count - queries + first_query - window + 1
        low = tl.maximum(low, tl.maximum(visible, 0) // KEYS * KEYS)
    most = tl.full([QUERIES * PADDED_GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * PADDED_GROUPS], tl.float32)
    acc = tl.zeros([QUERIES * PADDED_GROUPS, WIDTH], tl.float32)
    for begin in range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_key = key < high
        page = tl.load(tables_ptr + sequence * pages + key // PAGE, mask=is_key, other=0)
        slot = page.to(tl.int64) * PAGE + key % PAGE
        k_offset = slot * k_slot_stride + head * k_head_stride
        v_offset = slot * v_slot_stride + head * v_head_stride
        k = _load_keys(k_ptr, k_offset, is_key, offs, H)
        if UPCAST:
            q, k = q.to(tl.float32), k.to(tl.float32)
        # Not TF32: its logits would be off by a thousandth.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _load_keys(k_ptr, k_offset, is_key, rest, H)
            if UPCAST:
                q_rest, k_rest = q_rest.to(tl.float32), k_rest.to(tl.float32)
            scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        scores *= scale
        if CAPPED:
            # tanh by exponentials, which do not overflow for negative exponents.
            ratio = tl.abs(scores / soft_cap)
            small = tl.exp(-2 * ratio)
            tanh = (1 - small) / (1 + small)
            scores = tl.where(scores < 0, -tanh, tanh) * soft_cap
        sees = (key[None, :] <= position[:, None]) & is_key[None, :]
        if WINDOWED:
            sees = sees & (key[None, :] > position[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, 1))
        # Rows that have seen nothing yet: -inf minus -inf would be NaN.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp(scores - shift[:, None])
        keep = tl.exp(most - shift)
        total = total * keep + tl.sum(weights, 1)
        v = _load_keys(v_ptr, v_offset, is_key, offs, H)
        if UPCAST:
            v = v.to(tl.float32)
        rounded = weights.to(v.dtype)
        acc = acc * keep[:, None] + tl.dot(rounded, v, input_precision="ieee")
        if REST > 0:
            v_rest = _load_keys(v_ptr, v_offset, is_key, rest, H)
            if UPCAST:
                v_rest = v_rest.to(tl.float32)
            acc_rest = acc_rest * keep[:, None] + tl.dot(rounded, v_rest, input_precision="ieee")
        most = largest
    seen = total > 0
    lse = tl.where(seen, most + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    share = tl.where(seen, 1 / tl.where(seen, total, 1.0), 0.0)
    of_keys = tl.full([QUERIES * PADDED_GROUPS], 1.0, tl.float32)
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + (token * N + q_head) * NUM_SPLITS + split, lse, mask=is_row)
    elif sinks_ptr is not None:
        # As in `_merge`: a result does not depend on how many splits the others need.
        sink = tl.load(sinks_ptr + q_head, mask=is_row, other=0).to(tl.float32)
        joint = tl.maximum(lse, sink)
        weight = tl.exp(lse - joint)
        of_keys = weight / (weight + tl.exp(sink - joint))
    y_offset = ((token * N + q_head) * NUM_SPLITS + split) * H
    y_row = y_ptr + y_offset[:, None]
    y = acc * share[:, None] * of_keys[:, None]
    is_y = is_row[:, None] & (offs < H)[None, :]
    tl.store(y_row + offs[None, :], y.to(y_ptr.dtype.element_ty), mask=is_y)
    if REST > 0:
        y_rest = acc_rest * share[:, None] * of_keys[:, None]
        is_y = is_row[:, None] & (rest < H)[None, :]
        tl.store(y_row + rest[None, :], y_rest.to(y_ptr.dtype.element_ty), mask=is_y)


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
        num_warps=4,
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
