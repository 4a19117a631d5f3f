"""Kernels of linear attention's backward pass; the mathematics is in `chunk.py`."""

# pyright: reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from penstock_kernels.linear_attention.triton_tiles import (
    CHUNK,
    LEVELS,
    decay,
    decays_between,
    dot,
    halves,
    load_numbers,
    load_rows,
    load_sums,
    meets,
    store_rows,
)


@triton.jit
def scan_gradients(
    q_ptr,
    k_ptr,
    dy_ptr,
    sums_ptr,
    beta_ptr,
    scores_ptr,
    solution_ptr,
    deltas_ptr,
    dfinal_ptr,
    chunks_ptr,
    firsts_ptr,
    dstates_ptr,
    dv_ptr,
    dbeta_ptr,
    dinitial_ptr,
    scale,
    T,
    G,
    N,
    K,
    V,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The gradient of the state after each chunk, [chunks, N, K, V], of v, of the initial states,
    and parts of beta's, [blocks of V, T, N]."""
    document, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.program_id(2)
    first_v, key_head = block * BLOCK_V, head // (N // G)
    row, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, BLOCK_K)[:, None]
    column = first_v + tl.arange(0, BLOCK_V)[None, :]
    inside = (channel < K) & (column < V)
    in_state = channel * V + column
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if dfinal_ptr is not None:
        final_at = dfinal_ptr + (document * N + head) * K * V + in_state
        dstate += tl.load(final_at, mask=inside, other=0).to(tl.float32)
    first = tl.load(firsts_ptr + document)
    count = tl.load(firsts_ptr + document + 1) - first
    for passed in range(0, count):
        chunk = first + count - 1 - passed
        start, length = tl.load(chunks_ptr + chunk * 2), tl.load(chunks_ptr + chunk * 2 + 1)
        ptrs = dstates_ptr + (tl.cast(chunk, tl.int64) * N + head) * K * V + in_state
        tl.store(ptrs, dstate, mask=inside)
        dy = load_rows(dy_ptr, start, length, head, N, V, first_v, BLOCK_V)
        q = load_rows(q_ptr, start, length, key_head, G, K, 0, BLOCK_K).to(tl.float32)
        k = load_rows(k_ptr, start, length, key_head, G, K, 0, BLOCK_K).to(tl.float32)
        sums = load_sums(sums_ptr, row, start, length, head, N, K, 0, BLOCK_K, CHANNELS)
        end = tl.zeros([1, 1], tl.int32) + length - 1
        last = load_sums(sums_ptr, end, start, length, head, N, K, 0, BLOCK_K, CHANNELS)
        scores = load_rows(scores_ptr, start, length, head, N, CHUNK, 0, CHUNK)
        dv = dot(tl.trans(scores), dy, k_ptr, UPCAST)
        dv += dot(k * decay(last - sums), dstate, k_ptr, UPCAST)
        since_start = decay(sums)
        dstate = dstate * tl.trans(decay(last))
        dstate += dot(tl.trans(q * scale * since_start), dy, k_ptr, UPCAST)
        if beta_ptr is not None:
            beta = load_numbers(beta_ptr, start, length, head, N)
            solution = load_rows(solution_ptr, start, length, head, N, CHUNK, 0, CHUNK)
            dv -= dot(tl.trans(solution), dv * beta, k_ptr, UPCAST)
            deltas = load_rows(deltas_ptr, start, length, head, N, V, first_v, BLOCK_V)
            dbeta = tl.sum(dv * deltas.to(tl.float32), axis=1)[:, None]
            part_ptr = dbeta_ptr + tl.cast(block, tl.int64) * T * N
            store_rows(part_ptr, dbeta, start, length, head, N, 1, 0, 1)
            dv *= beta
            dstate -= dot(tl.trans(k * since_start), dv, k_ptr, UPCAST)
        store_rows(dv_ptr, dv, start, length, head, N, V, first_v, BLOCK_V)
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + (document * N + head) * K * V + in_state, dstate, mask=inside)


@triton.jit
def _sides(left, right, slopes, inside, to_late, to_border, like_ptr, UPCAST: tl.constexpr):
    """The gradients of both sides of products `left * to_late` by `right * to_border`."""
    slopes = tl.where(inside, slopes, 0.0)
    dleft = to_late * dot(slopes, right * to_border, like_ptr, UPCAST)
    return dleft, to_border * dot(tl.trans(slopes), left * to_late, like_ptr, UPCAST)


@triton.jit
def _from_states(
    v_ptr,
    dy_ptr,
    dv_ptr,
    beta_ptr,
    deltas_ptr,
    states_ptr,
    dstates_ptr,
    start,
    length,
    chunk,
    head,
    first,
    N,
    K,
    V,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """What is summed over the values' width: gradients of q~, k~, k^, P, A and the total decay."""
    channel = first + tl.arange(0, BLOCK_K)[:, None]
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dk_row = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dscores = tl.zeros([CHUNK, CHUNK], tl.float32)
    dproducts = tl.zeros([CHUNK, CHUNK], tl.float32)
    dtotal = tl.zeros([BLOCK_K, 1], tl.float32)
    for first_v in range(0, V, BLOCK_V):
        column = first_v + tl.arange(0, BLOCK_V)[None, :]
        inside = (channel < K) & (column < V) & (length > 0)
        offs = (chunk * N + head) * K * V + channel * V + column
        state = tl.load(states_ptr + offs, mask=inside, other=0).to(tl.float32)
        dstate = tl.load(dstates_ptr + offs, mask=inside, other=0).to(tl.float32)
        dtotal += tl.sum(state * dstate, axis=1)[:, None]
        dy = load_rows(dy_ptr, start, length, head, N, V, first_v, BLOCK_V)
        if beta_ptr is None:
            updates = load_rows(v_ptr, start, length, head, N, V, first_v, BLOCK_V).to(tl.float32)
        else:
            updates = load_rows(deltas_ptr, start, length, head, N, V, first_v, BLOCK_V)
            updates = updates.to(tl.float32) * load_numbers(beta_ptr, start, length, head, N)
            dv = load_rows(dv_ptr, start, length, head, N, V, first_v, BLOCK_V)
            dk_row -= dot(dv, tl.trans(state), v_ptr, UPCAST)
            dproducts -= dot(dv, tl.trans(updates), v_ptr, UPCAST)
        dq += dot(dy, tl.trans(state), v_ptr, UPCAST)
        dk += dot(updates, tl.trans(dstate), v_ptr, UPCAST)
        dscores += dot(dy, tl.trans(updates), v_ptr, UPCAST)
    return dq, dk_row, dk, dscores, dproducts, dtotal


@triton.jit
def make_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    dy_ptr,
    dv_ptr,
    sums_ptr,
    beta_ptr,
    deltas_ptr,
    chunks_ptr,
    states_ptr,
    dstates_ptr,
    dq_ptr,
    dk_ptr,
    dlog_decay_ptr,
    scale,
    T,
    G,
    N,
    K,
    V,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The gradients of q and k for each head of v, [T, N, K], and of log decays: [T, N, K], or
    parts of them, [blocks of K, T, N]."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.program_id(2)
    first, key_head = block * BLOCK_K, head // (N // G)
    start, length = tl.load(chunks_ptr + chunk * 2), tl.load(chunks_ptr + chunk * 2 + 1)
    row, source = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    dq, dk_row, dk, dscores, dproducts, dtotal = _from_states(
        v_ptr,
        dy_ptr,
        dv_ptr,
        beta_ptr,
        deltas_ptr,
        states_ptr,
        dstates_ptr,
        start,
        length,
        chunk,
        head,
        first,
        N,
        K,
        V,
        BLOCK_K,
        BLOCK_V,
        UPCAST,
    )
    q = load_rows(q_ptr, start, length, key_head, G, K, first, BLOCK_K).to(tl.float32) * scale
    k = load_rows(k_ptr, start, length, key_head, G, K, first, BLOCK_K).to(tl.float32)
    sums = load_sums(sums_ptr, row, start, length, head, N, K, first, BLOCK_K, CHANNELS)
    # Chunks past the last have no last token: of a row before the first, sums past the end of all
    # would be read.
    end = tl.zeros([1, 1], tl.int32) + tl.maximum(length - 1, 0)
    last = load_sums(sums_ptr, end, start, length, head, N, K, first, BLOCK_K, CHANNELS)
    since_start = decay(sums)
    dq, dk_row = dq * since_start, dk_row * since_start
    dk *= decay(last - sums)
    dtotal = tl.trans(dtotal) * decay(last) + tl.sum(k * dk, axis=0)[None, :]
    dproducts = tl.where(row > source, dproducts, 0.0)
    if CHANNELS:
        diagonal = tl.sum(tl.where(row == source, dscores, 0.0), axis=1)[:, None]
        dq, dk = dq + diagonal * k, dk + diagonal * q
        for level in range(LEVELS):
            is_late, border = halves(row, level)
            at_border = load_sums(sums_ptr, border, start, length, head, N, K, first, BLOCK_K, True)
            to_late = tl.where(is_late, decay(sums - at_border), 0.0)
            to_border = tl.where(is_late, 0.0, decay(at_border - sums))
            inside = meets(level)
            dlate, dearly = _sides(q, k, dscores, inside, to_late, to_border, k_ptr, UPCAST)
            dq, dk = dq + dlate, dk + dearly
            if beta_ptr is not None:
                dlate, dearly = _sides(k, k, dproducts, inside, to_late, to_border, k_ptr, UPCAST)
                dk_row, dk = dk_row + dlate, dk + dearly
    else:
        between = decays_between(sums, length)
        dlate, dearly = _sides(q, k, dscores * between, True, 1.0, 1.0, k_ptr, UPCAST)
        dq, dk = dq + dlate, dk + dearly
        if beta_ptr is not None:
            dlate, dearly = _sides(k, k, dproducts * between, True, 1.0, 1.0, k_ptr, UPCAST)
            dk_row, dk = dk_row + dlate, dk + dearly
    # By G, the derivative of x e^G is itself, and that of k e^-G its negative.
    dsums = q * dq - k * dk + k * dk_row
    # What decays until the chunk's end depends on the last sum.
    dsums += tl.where(row == length - 1, dtotal, 0.0)
    store_rows(dq_ptr, dq * scale, start, length, head, N, K, first, BLOCK_K)
    store_rows(dk_ptr, dk + dk_row, start, length, head, N, K, first, BLOCK_K)
    if CHANNELS:
        # A log decay is in its own token's sum and in all later ones.
        slopes = tl.cumsum(dsums, axis=0, reverse=True)
        store_rows(dlog_decay_ptr, slopes, start, length, head, N, K, first, BLOCK_K)
    else:
        slopes = tl.cumsum(tl.sum(dsums, axis=1), axis=0, reverse=True)[:, None]
        part_ptr = dlog_decay_ptr + tl.cast(block, tl.int64) * T * N
        store_rows(part_ptr, slopes, start, length, head, N, 1, 0, 1)
